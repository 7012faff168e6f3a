"""Turns a byte budget into numbers of request rows, state slots and KV pages."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hybridrt.base.errors import MemoryBudgetError
from hybridrt.mem_cache.pools.host_plan import NO_HOST_PLAN, HostPlan
from hybridrt.mem_cache.pools.page_groups import PageDemand
from hybridrt.mem_cache.pools.slab_plan import SlabPlan, plan_slabs

GIB = 1024**3


def gib(count: int) -> str:
    """Bytes in GiB with two decimals; small numbers with two significant digits, never "0.00"."""
    number = count / GIB
    if not 0 < abs(number) < 0.1:
        return f"{number:.2f} GiB"
    return f"{np.format_float_positional(number, 2, unique=False, fractional=False, trim='-')} GiB"


# Without max_running_requests, rows and their states get at most this share. KV gets the rest.
STATE_SHARE = 0.5
# Cached prefixes get this share of a group's pages in a window group, beyond those of running
# requests: only the ends of texts, and places where they part, need pages there.
WINDOW_SHARE = 0.25


@dataclass(frozen=True)
class UnitCosts:
    """Bytes of one state slot (conv ring and recurrent state of all layers), one running row (rings
    or intermediate states, tables, its drafter's data) and one KV page of each page group. `fixed`:
    graph buffers and a draft model's weights. Also the arena of state transfer, and an encoder's
    workspace with the embeddings that are kept.
    """

    slot: int
    row: int
    pages: Sequence[int]
    fixed: int = 0
    transfer: int = 0
    encoder: int = 0


@dataclass(frozen=True)
class PageGroup:
    """The KV pages of the layers of one page group.

    Attributes:
        demand: how many pages a request holds at a time.
        num_pages: pages that may be lent; with shared memory, if there are no others and no states.
        page_bytes: of a page, over the layers.
    """

    demand: PageDemand
    num_pages: int
    page_bytes: int

    @property
    def window(self) -> int | None:
        return self.demand.window


@dataclass(frozen=True)
class MemoryPlan:
    """Entries of every pool, and their bytes.

    Attributes:
        num_rows: R, requests that run together.
        num_slots: S, state slots of rows and cached prefixes; with shared memory, if there are no
            pages. 0 without recurrent layers.
        groups: page groups, with pages of `page_size` tokens; none without attention layers.
        max_model_len: longest prompt + output of one request.
        slabs: memory that the page groups and the states share; None: each has memory of its own.
        budget_bytes: limit of the pools, without weight_bytes and activation_bytes.
        host: the prefix cache's part in main memory.

    Raises:
        MemoryBudgetError: there are fewer state slots than rows.
    """

    num_rows: int
    num_slots: int
    groups: tuple[PageGroup, ...]
    page_size: int
    max_model_len: int
    costs: UnitCosts
    budget_bytes: int
    weight_bytes: int = 0
    activation_bytes: int = 0
    host: HostPlan = NO_HOST_PLAN
    slabs: SlabPlan | None = None

    def __post_init__(self) -> None:
        if 0 < self.num_slots < self.num_rows:
            raise MemoryBudgetError(
                f"{self.num_slots} state slots for {self.num_rows} running requests, each of which needs one: plan at "
                f"least {self.num_rows} slots, or at most {self.num_slots} rows"
            )

    @property
    def cache_slots(self) -> int:
        return max(self.num_slots - self.num_rows, 0)

    @property
    def num_pages(self) -> int:
        """Pages of the first page group, that of layers without a window if there are some."""
        return self.groups[0].num_pages if self.groups else 0

    @property
    def pool_bytes(self) -> int:
        return sum(size for _, _, size in self._pools())

    def table(self) -> list[tuple[str, str, int]]:
        kept = f"{self.host.num_pages} pages, {self.host.num_states} states"
        return [
            ("weights", "", self.weight_bytes),
            ("activations (peak)", "", self.activation_bytes),
            *self._pools(),
            *([("cached prefixes in main memory", kept, self.host.nbytes)] if self.host else []),
        ]

    def _pools(self) -> list[tuple[str, str, int]]:
        one_memory = self.slabs is not None and self.slabs.states is not None
        return [
            *([] if one_memory else [self._slot_pool()]),
            ("running requests", f"{self.num_rows} rows", (self.num_rows + 1) * self.costs.row),
            *(self._kv_pools() if self.slabs is None else [self._shared_pool(self.slabs)]),
            ("graph buffers, draft model", "", self.costs.fixed),
            *([("state transfer", "", self.costs.transfer)] if self.costs.transfer else []),
            *([("image encoder: workspace, embeddings", "", self.costs.encoder)] if self.costs.encoder else []),
        ]

    def _slot_pool(self) -> tuple[str, str, int]:
        slots = self.num_slots + 1 if self.num_slots else 0
        cached = f", {self.cache_slots} of them for cached prefixes" if self.cache_slots else ""
        return "recurrent state", f"{self.num_slots} slots{cached}", slots * self.costs.slot

    def _kv_pools(self) -> list[tuple[str, str, int]]:
        return [
            (
                "KV cache" if group.window is None else f"KV cache, window {group.window}",
                f"{group.num_pages} pages of {self.page_size} tokens",
                (group.num_pages + 1) * group.page_bytes,
            )
            for group in self.groups
        ]

    def _shared_pool(self, slabs: SlabPlan) -> tuple[str, str, int]:
        """Pages of drafters are charged with the rows."""
        counts = " or ".join([f"{group.num_pages}" for group in self.groups])
        nbytes = slabs.nbytes - slabs.own_pages * sum([group.page_bytes for group in self.groups])
        pages = f"{counts} pages of {self.page_size} tokens"
        if slabs.states is None:
            return "KV cache, shared", pages, nbytes
        return "KV cache and recurrent state, shared", f"{pages}, or {self.num_slots} slots", nbytes

    def summary(self) -> str:
        pages = [
            f"{group.num_pages} KV pages"
            + (f" ({group.num_pages * self.page_size} tokens)" if group.window is None else f" (window {group.window})")
            for group in self.groups
        ]
        states = [f"{self.num_slots} state slots"] if self.slabs is None or self.num_slots else []
        entries = (", " if self.slabs is None else " or ").join([*states, *pages])
        return (
            f"{self.num_rows} running requests, {entries}, {gib(self.pool_bytes)} of {gib(self.budget_bytes)}; "
            f"requests up to {self.max_model_len} tokens"
        )


def plan_memory(
    *,
    budget_bytes: int,
    costs: UnitCosts,
    demands: Sequence[PageDemand],
    page_size: int,
    max_running_requests: int | None,
    default_rows: int,
    max_model_len: int | None,
    model_limit: int,
    cache_slots: int = 0,
    share_slots: bool = False,
    keeps_prefixes: bool = False,
    one_memory: bool = False,
    weight_bytes: int = 0,
    activation_bytes: int = 0,
) -> MemoryPlan:
    """Rows first (at most half of the budget, unless their number is given), then KV pages.

    Args:
        costs: a model without recurrent layers has slots of 0 bytes, and gets none.
        page_size: tokens of a page.
        demands: of each page group, how many pages requests of a length hold at a time.
        max_running_requests, max_model_len: the user's settings; None lets the plan choose.
        default_rows: most rows if max_running_requests is None.
        model_limit: positions that the model was made for.
        cache_slots: state slots for cached prefixes, in addition to one for each row.
        share_slots: adds as many slots for cached prefixes as there are rows, for at most half of
            the bytes that the rows and one request of the greatest length do not need.
        keeps_prefixes: window groups get pages for cached prefixes.
        one_memory: `share_memory` follows. The rows that are asked for, and one request of
            max_model_len, need not fit at the same time: then there are too few pages for it.

    Raises:
        MemoryBudgetError: cache_slots is negative; or the rows asked for, the slots for cached
            prefixes, or one request of max_model_len do not fit. The text says what would fit.
    """
    if max_model_len is not None and max_model_len > model_limit:
        raise MemoryBudgetError(f"max_model_len is {max_model_len}, but the model was made for {model_limit} positions")
    if cache_slots < 0:
        raise MemoryBudgetError(f"cache_slots is {cache_slots}; pass 0 or more state slots for cached prefixes")
    per_request = costs.row + costs.slot
    cached = cache_slots if costs.slot else 0
    scratch = per_request + sum(costs.pages)  # row 0, slot 0 and page 0 of each group
    available = budget_bytes - costs.fixed - costs.transfer - costs.encoder - cached * costs.slot - scratch
    need = _page_bytes(costs, [demand.least(max_model_len or 1) for demand in demands])
    fitting_rows = (available - need) // max(per_request, 1)
    share = int(available * STATE_SHARE) // max(per_request, 1)
    rows = max_running_requests or max(min(default_rows, share, fitting_rows), 1)
    lends = False  # states lend memory to the longest request
    if available < rows * per_request + need:
        borrowed = available + cached * costs.slot
        together = rows * per_request + _page_bytes(costs, [demand.least(1) for demand in demands])
        lends = one_memory and bool(demands) and borrowed >= max(together, rows * costs.row + costs.slot + need)
        if not lends:
            raise MemoryBudgetError(
                _too_small(budget_bytes, available, per_request, costs, demands, rows, max_model_len or 1, cached)
            )
        cached, available, share_slots = 0, borrowed, False
    longest = max_model_len or model_limit
    if share_slots and costs.slot:
        spare = available - rows * per_request - _page_bytes(costs, [demand.least(longest) for demand in demands])
        shared = _shared_slots(costs, demands, spare, rows)
        cached, available = cached + shared, available - shared * costs.slot
    pages = _plan_pages(costs, demands, available - rows * per_request, rows, longest, cached, keeps_prefixes)
    fits_alone = lends and max_model_len is not None  # in the memory of all
    fits = fits_alone or all(demand.least(longest) <= count for demand, count in zip(demands, pages))
    length = longest if fits else min(demand.fitting(count) for demand, count in zip(demands, pages))
    groups = tuple(PageGroup(*group) for group in zip(demands, pages, costs.pages))
    return MemoryPlan(
        rows, rows + cached if costs.slot else 0, groups, page_size, min(length, longest), costs, budget_bytes,
        weight_bytes, activation_bytes,
    )  # fmt: skip


def share_memory(
    plan: MemoryPlan, cell_bytes: Sequence[int | None], own_pages: int, slot_bytes: int = 0
) -> MemoryPlan | None:
    """The plan with all page groups and states in one memory of the same size; None if they cannot
    share it, or if the longest request, or a state for each row, does not fit there.

    Args:
        cell_bytes: of a page in one tensor of each group; None if keys and values differ.
        own_pages: the drafter's pages of each group, which the plan has charged with the rows.
        slot_bytes: of a state slot (`MambaPoolSpec.packed_slot_bytes`).
    """
    sizes = [group.page_bytes for group in plan.groups]
    total = sum([(group.num_pages + 1) * group.page_bytes for group in plan.groups]) + own_pages * sum(sizes)
    total += (plan.num_slots + 1) * plan.costs.slot
    slabs = plan_slabs(
        total, sizes, cell_bytes, own_pages=own_pages, page_size=plan.page_size, slot_bytes=slot_bytes
    )  # fmt: skip
    if slabs is None or not slabs.fits([group.demand for group in plan.groups], plan.max_model_len):
        return None
    if slot_bytes and slabs.num_slots < plan.num_rows:
        return None
    groups = zip(plan.groups, slabs.groups)
    most = tuple([replace(group, num_pages=slabs.num_slabs * share.per_slab) for group, share in groups])
    return replace(plan, num_slots=slabs.num_slots, groups=most, slabs=slabs)


def _shared_slots(costs: UnitCosts, demands: Sequence[PageDemand], spare: int, rows: int) -> int:
    """State slots for cached prefixes, with the pages that they need, for STATE_SHARE of `spare` bytes."""
    kept = costs.slot + _page_bytes(costs, [demand.kept for demand in demands])
    return max(min(rows, int(spare * STATE_SHARE) // kept), 0)


def _page_bytes(costs: UnitCosts, counts: Sequence[int]) -> int:
    return sum(count * nbytes for count, nbytes in zip(counts, costs.pages))


def _plan_pages(
    costs: UnitCosts, demands: Sequence[PageDemand], available: int, rows: int, longest: int, cached_states: int,
    keeps_prefixes: bool,
) -> list[int]:  # fmt: skip
    """Pages of each group in `available` bytes.

    A group without a window gets one page for each of n page indices, with n as great as the bytes
    allow. One request of the greatest length comes first; beyond it, a window group gets a page for
    each index too, until all rows have their windows, and then a share for cached prefixes.
    """
    page_size = demands[0].page_size if demands else 1
    alone = -(-longest // page_size)

    def counts(n: int) -> list[int]:
        found, more = list[int](), max(n - alone, 0)
        for demand in demands:
            if demand.window is None:
                found.append(min(n, rows * alone))
                continue
            running = min(demand.least(min(n * page_size, longest)) + more, demand.pool(rows, longest))
            cached = min(cached_states * demand.kept, more) if costs.slot else int(more * WINDOW_SHARE)
            found.append(min(running + cached * keeps_prefixes, rows * alone))
        return found

    low, high = 0, 2 * rows * alone + max([demand.pool(rows, longest) for demand in demands], default=0)
    while low < high:
        middle = (low + high + 1) // 2
        if _page_bytes(costs, counts(middle)) <= available:
            low = middle
        else:
            high = middle - 1
    return counts(low)


def _too_small(
    budget: int, available: int, per_request: int, costs: UnitCosts, demands: Sequence[PageDemand], rows: int,
    length: int, cached: int,
) -> str:  # fmt: skip
    pages = [demand.least(length) for demand in demands]
    need, page_size = _page_bytes(costs, pages), demands[0].page_size if demands else 1
    wanted = rows * per_request + need
    fitting_rows = (available - need) // max(per_request, 1)
    fitting_tokens = (available - rows * per_request) // max(sum(costs.pages), 1) * page_size
    hints = [f"raise the budget to {budget + wanted - available} bytes (memory_fraction)"]
    if fitting_rows >= 1:
        hints.insert(0, f"lower max_running_requests from {rows} to {fitting_rows}")
    if fitting_tokens >= 1:
        hints.insert(0, f"lower max_model_len to {fitting_tokens}")
    missing = -(-(wanted - available) // max(costs.slot, 1))
    if missing <= cached:
        hints.insert(0, f"lower cache_slots from {cached} to {cached - missing}")
    if wanted - available <= costs.transfer:
        hints.insert(0, f"lower transfer_bytes from {costs.transfer} to {costs.transfer - (wanted - available)}")
    short = f" ({-budget} bytes more are in use already)" if budget < 0 else ""
    return (
        f"the pools' budget of {max(budget, 0)} bytes{short} cannot hold {rows} running requests "
        f"({per_request / 2**20:.2f} MiB each) "
        f"and {' + '.join(map(str, pages)) or 0} KV pages of {page_size} tokens "
        f"({' and '.join(f'{nbytes / 2**20:.2f}' for nbytes in costs.pages) or 0} MiB each): {', or '.join(hints)}"
    )
