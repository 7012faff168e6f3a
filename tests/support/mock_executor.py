"""An executor without a model, whose tokens depend on everything that a real one's do, and that answers late.

The next token of a row is a hash of the KV that its page tables lead to (within the window of each page group, if there
is one), of its recurrent state, of its seed and of the output index: a lost, stale or misplaced token, page, slot or
index changes all that follows. Without recurrent layers, the state stands for the KV of layers without a window.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from types import SimpleNamespace
from typing import Any

import numpy as np

from hybridrt.base.errors import EngineError
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.mem_cache.pools.slab_plan import SlabPlan
from hybridrt.mem_cache.pools.state_moves import StateMove, When
from hybridrt.runtime.step.pack_padded import StateSaves
from hybridrt.runtime.step.plan import (
    Admission,
    DecodeRow,
    ExtendRow,
    HostCopy,
    StateCopy,
    StepPlan,
    StepResult,
)
from tests.support.decode_rows import rows_of

MASK = 2**61 - 1
Page = tuple[int, int]  # a page's group and number


def mix(*values: int) -> int:
    h = 0x243F6A8885A308D3
    for value in values:
        h = ((h ^ (value + 0x9E3779B9)) * 0x100000001B3 + (h >> 23)) & MASK
    return h


Windows = Sequence[int | None]


def next_token(
    context: Sequence[int], seed: int, output_index: int, vocab: int, windows: Windows = (None,), has_state: bool = True
) -> int:
    state = reduce(mix, context, 0) if has_state else 0
    seen = [token for window in windows for token in context[-(window or len(context)) :]]
    return mix(*seen, state, seed, output_index) % vocab


def tokens_alone(
    prompt: Sequence[int], seed: int, count: int, vocab: int, windows: Windows = (None,), has_state: bool = True
) -> list[int]:
    """`count` tokens of a request that runs by itself."""
    context = list(prompt)
    for i in range(count):
        context.append(next_token(context, seed, i, vocab, windows, has_state))
    return context[len(prompt) :]


class SlabMemory(dict[tuple[Page, int], int]):
    """KV of pages, and states, that share slabs: a group's first write to a slab destroys what others have there.

    Attributes:
        states, texts: by state slot.
    """

    def __init__(self, slabs: SlabPlan) -> None:
        self._slabs, self.states, self.texts = slabs, SharedStates(self), dict[int, list[int]]()
        self._written: dict[int, tuple[int, list[Any]]] = {}  # by slab: the group, and its keys
        self._unclean = set[int]()  # slabs that have been states

    def clear_slabs(self, slabs: Sequence[int]) -> None:
        for slab in slabs:
            assert 1 <= slab <= self._slabs.num_slabs
            self._destroy(slab)
            self._unclean.discard(slab)

    def write_state(self, slot: int) -> None:
        """A step or copy writes a state."""
        self._unclean.add(self._enter(len(self._slabs.groups), slot, slot))

    def __setitem__(self, key: tuple[Page, int], token: int) -> None:
        (group, number), _ = key
        slab = self._enter(group, number, key)
        assert slab not in self._unclean, f"page {number} has numbers of states"
        super().__setitem__(key, token)

    def slab_of(self, group: int, number: int) -> int:
        share = [*self._slabs.groups, self._slabs.states][group]
        assert share is not None
        slab, place = divmod(number, share.apart)
        assert 1 <= slab <= self._slabs.num_slabs and place < share.per_slab, f"entry {number} is in no slab"
        return slab

    def _enter(self, group: int, number: int, key: Any) -> int:
        slab = self.slab_of(group, number)
        if self._written.get(slab, (group, []))[0] != group:
            self._destroy(slab)
        self._written.setdefault(slab, (group, []))[1].append(key)
        return slab

    def _destroy(self, slab: int) -> None:
        group, keys = self._written.pop(slab, (0, []))
        for key in keys:
            if group == len(self._slabs.groups):
                self.states.pop(key, None)
                self.texts.pop(key, None)
            else:
                self.pop(key, None)

    def __ior__(self, more: Any) -> "SlabMemory":
        for key, token in more.items():
            self[key] = token
        return self


class SharedStates(dict[int, int]):
    """States by slot. Rows of models without states have places of their own, which are negative."""

    def __init__(self, memory: SlabMemory) -> None:
        self._memory = memory

    def __setitem__(self, slot: int, state: int) -> None:
        if slot > 0:
            self._memory.write_state(slot)
        super().__setitem__(slot, state)


@dataclass
class Tenant:
    """Whoever an admission put on a row; `steps` are the launched steps that name it, each with the position of its
    first token there. `following` is what the last chunk says of the next one's first token. `pages` maps all pages
    that it ever had, by group and number in the text; `next_page` numbers the next one of each group; `borrowed` says
    whose the first of them were. `ring` holds decoded tokens that its slot lacks."""

    admission: Admission
    pages: dict[tuple[int, int], int] = field(default_factory=dict)
    borrowed: dict[tuple[int, int], tuple["Tenant", int]] = field(default_factory=dict)
    ring: list[int] = field(default_factory=list)
    next_page: dict[int, int] = field(default_factory=dict)
    steps: list[tuple["MockHandle", int]] = field(default_factory=list)
    length: int = 0
    outputs: int = 0
    last: int | None = None
    following: int | None = None
    broken: bool = False
    masks: list[np.ndarray] = field(default_factory=list)  # of the tokens that the step draws now

    @property
    def state(self) -> int:
        """Where its recurrent state is; a model without recurrent layers gets a place of its own."""
        return self.admission.state_slot or -self.admission.row


class MockHandle:
    def __init__(self, executor: "MockExecutor", plan: StepPlan, tenants: list[Tenant]) -> None:
        self.executor, self.plan, self.tenants = executor, plan, tenants
        self.donors: list[Tenant] = []
        self.copied_states: list[tuple[Tenant, int]] = []
        self.answer: StepResult | None = None
        self.error: Exception | None = None
        self.consumed = False
        self.masks: list[np.ndarray] | None = None if plan.constrained else []  # of each row that samples

    def ready(self) -> bool:
        return self.answer is not None

    @property
    def needs_masks(self) -> bool:
        return self.masks is None

    def sample(self, masks: np.ndarray) -> None:
        """The steps before it have been read: their tokens decide the masks."""
        assert self.executor.unread == [self]
        assert self.masks is None, "a step without grammars, or one that has its masks"
        if self.executor.fail_sample is not None:
            raise self.executor.fail_sample
        counts = (1 + self.plan.decode.num_drafts).tolist() + [1 for row in self.plan.extend if row.sample]
        lines = [counts[i] if i in self.plan.constrained else 0 for i in range(len(counts))]
        assert masks.shape == (sum(lines), -(-self.executor.vocab // 32)) and masks.dtype == np.int32
        self.masks = np.split(masks, np.cumsum(lines)[:-1])
        self.executor.run_early()

    def drop(self) -> None:
        """If it has no masks, it never samples."""
        if self.masks is None:
            self.error, self.masks = EngineError("the step has not sampled"), []

    def result(self) -> StepResult:
        if self.masks is None:
            raise EngineError("the step has not sampled")
        if self.executor.interrupt is not None:
            interrupt, self.executor.interrupt = self.executor.interrupt, None
            raise interrupt
        while self.answer is None:
            self.executor.run_oldest()
        if self.consumed and self.error is None:
            return self.answer  # read again
        assert self.executor.unread[0] is self, "steps are consumed in launch order"
        self.executor.unread.pop(0)
        self.consumed = True
        if self.error is not None:
            raise self.error
        return self.answer


class MockExecutor:
    """`late`: how many launched steps it leaves undone until their results are asked for. `replay`: what rows decode
    becomes part of their slots when these are donated or exported, and now and then."""

    pools, prompt_graphs = SimpleNamespace(req_to_token=SimpleNamespace(mamba_pool=None)), None  # no folds to count
    chunk_saves = StateSaves.AT_CHUNKS

    def __init__(
        self, *, num_rows: int, num_slots: int, num_pages: int, page_size: int, vocab: int, late: int = 0,
        windows: Windows = (None,), replay: bool = False, slabs: SlabPlan | None = None,
    ) -> None:  # fmt: skip
        self.replay = replay
        self.vocab, self.page_size, self.late, self.windows = vocab, page_size, late, tuple(windows)
        self.has_state = num_slots > 0 or not num_pages or None in self.windows
        slot_numbers = num_slots if slabs is None else max(slabs.num_slot_numbers - 1, 0)
        self.limits = {"row": num_rows, "slot": slot_numbers, "page": num_pages}
        self.rows: dict[int, Tenant] = {}
        self.owner: dict[tuple[str, int], Tenant] = {}
        self.page_owner: dict[Page, tuple[Tenant, int]] = {}
        self.borrowers: dict[Page, list[Tenant]] = {}
        self.slot_readers: dict[int, list[tuple[MockHandle, Tenant]]] = {}
        self.saved: dict[int, MockHandle] = {}  # by state slot: the step that leaves a state there
        self.shared = None if slabs is None else SlabMemory(slabs)
        self.kv: dict[tuple[Page, int], int] = {} if self.shared is None else self.shared
        self.state: dict[int, int] = {} if self.shared is None else self.shared.states
        # By state slot: the tokens in its state.
        self.text: dict[int, list[int]] = {} if self.shared is None else self.shared.texts
        self.queue: list[MockHandle] = []
        self.unread: list[MockHandle] = []
        self.plans: list[StepPlan] = []
        self.max_in_flight = 0
        self.interrupt: BaseException | None = None
        self.fail_launch: dict[int, BaseException] = {}
        self.fail_result: dict[int, Exception] = {}
        self.fail_sample: Exception | None = None
        self.copies: list[HostCopy] = []  # of plans that have run; these copies have not
        self.copy_delay = 0  # how often it is asked whether copies are done before they are
        self.asked: dict[int, int] = {}
        self.host_pages: dict[Page, list[int]] = {}
        self.host_states: dict[int, tuple[int, list[int]]] = {}
        self.arena: dict[int, tuple[list[list[int]], int]] = {}  # by offset: tokens seen by group, and recurrent state

    def launch(self, plan: StepPlan) -> "MockHandle":
        if any(earlier.needs_masks for earlier in self.queue):
            raise EngineError("a launch before the last step has its masks")
        number = len(self.plans)
        self.plans.append(plan)
        if number in self.fail_launch:
            raise self.fail_launch[number]
        handle = MockHandle(self, plan, [])
        handle.error = self.fail_result.get(number)
        for move in plan.moves:
            if move.when is When.FIRST:
                self.donate(move, handle)
        cached = {row.row: row.computed // self.page_size for row in plan.extend}
        cached |= {row.row: 0 for row in plan.imports}
        copies = [move for move in plan.moves if move.when is When.BEFORE_ROWS]
        assert len({move.target for move in copies}) == len(copies), "a slot is written twice"
        for move in copies:
            self.copy_state(move, handle)
        for admission in plan.admissions:
            tenant = Tenant(admission)
            self.take("row", admission.row, tenant)
            if self.limits["slot"]:
                self.take("slot", admission.state_slot, tenant)
            self.rows[admission.row] = tenant
        for write in plan.page_writes:
            tenant = self.rows[write.row]
            admitted = any(tenant.admission is admission for admission in plan.admissions)
            for number, pages in enumerate(write.pages.tolist(), write.first_page):
                assert len(pages) == len(self.windows)
                for page in ((group, page) for group, page in enumerate(pages) if page):
                    self.enter_page(page, number, tenant, admitted and number < cached[write.row])
        sources, targets = ({page for copy in plan.page_copies for page in enumerate(getattr(copy, name).tolist())}
                            for name in ("sources", "targets"))  # fmt: skip
        assert not sources & targets
        for row in [*rows_of(plan.decode), *plan.extend]:
            self.name(row, handle)
        assert plan.decode or plan.extend or any(copy.fetch for copy in plan.host_copies), "an empty step"
        for copy in plan.host_copies:
            self.note_copy(copy, plan.cleared)
        self.queue.append(handle)
        self.unread.append(handle)
        self.max_in_flight = max(self.max_in_flight, len(self.unread))
        self.run_early()
        return handle

    def run_early(self) -> None:
        while len(self.queue) > self.late and self.queue[0].masks is not None:
            self.run_oldest()

    def note_copy(self, copy: HostCopy, cleared: Sequence[int]) -> None:
        """No launched step may name a page that is fetched into, nor does this one clear it."""
        for group, pages in enumerate(copy.pages if copy.fetch else ()):
            for page in pages:
                self.keep_page((group, page))
                assert self.shared is None or self.shared.slab_of(group, page) not in cleared
        for state in copy.states if copy.fetch else ():
            readers = self.slot_readers.pop(state.slot, [])
            assert all(step.consumed for step, _ in readers), f"slot {state.slot} fetched too early"
            self.owner.pop(("slot", state.slot), None)
            self.saved.pop(state.slot, None)

    def keep_page(self, page: Page) -> None:
        """The cache gets a page for a copy."""
        before, number = self.page_owner.get(page, (None, 0))
        for step, position in before.steps if before is not None else ():
            assert step.consumed or number < self.first_page(page[0], position), f"page {page} filled too early"
        self.check_borrowers(page)
        self.page_owner[page] = Tenant(Admission.from_prompt(0, 0, [], SamplingParams(), 0)), 0

    def drop_last(self) -> None: ...

    def copied(self, ticket: int) -> bool:
        """Copies run as late as they may: when a plan waits for them, or after several polls."""
        if any(copy.ticket == ticket for handle in self.queue for copy in handle.plan.host_copies):
            return False
        self.asked[ticket] = self.asked.get(ticket, 0) + 1
        if self.asked[ticket] > self.copy_delay:
            self.run_copies(ticket)
        return all(copy.ticket > ticket for copy in self.copies)

    def run_copies(self, ticket: int) -> None:
        while self.copies and self.copies[0].ticket <= ticket:
            copy = self.copies.pop(0)
            if self.shared is not None:
                self.shared.clear_slabs(copy.cleared)
            for group, pages in enumerate(zip(copy.pages, copy.host_pages, strict=True)):
                for page, place in zip(*(((group, number) for number in numbers) for numbers in pages), strict=True):
                    for i in range(self.page_size):
                        if copy.fetch:
                            self.kv[page, i] = self.host_pages[place][i]
                    if not copy.fetch:
                        self.host_pages[place] = [self.kv.get((page, i), -1) for i in range(self.page_size)]
            for state in copy.states:
                if copy.fetch:
                    self.state[state.slot], text = self.host_states[state.place]
                    self.text[state.slot] = list(text)
                else:
                    self.host_states[state.place] = self.state[state.slot], list(self.text[state.slot])
                assert len(self.text[state.slot]) == state.length, "the state of another position"

    def take(self, kind: str, index: int, tenant: Tenant) -> None:
        """Whoever had it before must be out of every launched step, and never be named again (`name` checks)."""
        assert 1 <= index <= self.limits[kind], f"{kind} {index} is reserved or does not exist"
        before = self.owner.get((kind, index))
        assert before is not tenant, f"{kind} {index} given twice to one request"
        assert before is None or all(step.consumed for step, _ in before.steps), f"{kind} {index} reused too early"
        if kind == "slot" and index in self.saved:
            assert self.saved.pop(index).consumed, f"slot {index} reused before a state has been left there"
        readers = self.slot_readers.pop(index, []) if kind == "slot" else []
        others = [step for step, reader in readers if reader is not tenant]  # the tenant's own steps come in order
        assert all(step.consumed for step in others), f"slot {index} reused before a step has read it"
        self.owner[kind, index] = tenant

    def donate(self, move: StateMove, handle: MockHandle) -> None:
        """The row's slot is the cache's from this step on."""
        tenant = self.rows[move.row]
        assert move.source == move.target == tenant.admission.state_slot, "a row donates its own slot"
        assert all(step.consumed for step, _ in tenant.steps), "a row that a launched step names donates its slot"
        if self.owner.get(("slot", move.source)) is tenant:  # else a failed step has done it
            del self.owner["slot", move.source]
            handle.donors.append(tenant)

    def copy_state(self, move: StateMove, handle: MockHandle) -> None:
        """A decode row of the step leaves a state. Its slot may be lent again at once: steps run in order."""
        tenant = self.rows[move.row]
        assert move.row in handle.plan.decode.rows and self.owner["slot", move.source] is tenant
        self.take("slot", move.target, tenant)
        del self.owner["slot", move.target]
        handle.copied_states.append((tenant, move.target))

    def enter_page(self, page: Page, number: int, tenant: Tenant, borrowed: bool) -> None:
        """The tenant's page of this number in a group: the next one, or one that it has already."""
        group = page[0]
        if tenant.pages.get((group, number)) == page[1] and number < tenant.next_page[group]:
            return
        assert number == tenant.next_page.setdefault(group, number), "pages are appended without a gap"
        tenant.next_page[group] += 1
        tenant.pages[group, number] = page[1]
        if borrowed:  # the cache's, whichever request filled it
            tenant.borrowed[group, number] = self.page_owner[page]
            self.borrowers.setdefault(page, []).append(tenant)
        else:
            self.take_page(page, number, tenant)

    def take_page(self, page: Page, number: int, tenant: Tenant) -> None:
        """Whoever had it before, itself included, has no launched step that reads it."""
        assert 1 <= page[1] <= self.limits["page"], f"page {page} is reserved or does not exist"
        before, earlier = self.page_owner.get(page, (tenant, -1))
        for step, position in before.steps:
            assert step.consumed or earlier < self.first_page(page[0], position), f"page {page} reused too early"
        self.check_borrowers(page)
        self.page_owner[page] = tenant, number

    def check_borrowers(self, page: Page) -> None:
        """No launched step of a request that has borrowed a page reads it."""
        for borrower in self.borrowers.pop(page, []):
            places = [place for place, held in borrower.pages.items() if (place[0], held) == page]
            (number,) = (number for group, number in places if (group, number) in borrower.borrowed)
            for step, position in borrower.steps:
                assert step.consumed or number < self.first_page(page[0], position), f"{page} reused while lent"

    def first_page(self, group: int, position: int) -> int:
        """The first page of a group that a token at `position` sees."""
        window = self.windows[group]
        return 0 if window is None else max(position - window + 1, 0) // self.page_size

    def name(self, row: DecodeRow | ExtendRow, handle: MockHandle) -> None:
        tenant = self.rows[row.row]
        assert tenant not in handle.tenants, "a row twice in one step"
        handle.tenants.append(tenant)
        tenant.steps.append((handle, row.computed))
        held = [("row", row.row), *([("slot", tenant.admission.state_slot)] if self.limits["slot"] else [])]
        assert all(self.owner[thing] is tenant for thing in held), "a step names what belongs to another request"
        if isinstance(row, ExtendRow) and row.read_state_slot:
            assert ("slot", row.read_state_slot) not in self.owner, "a slot is read that is not the cache's"
            if row.read_state_slot in self.saved:
                assert self.saved[row.read_state_slot].consumed, "a state is read before its step is over"
            self.slot_readers.setdefault(row.read_state_slot, []).append((handle, tenant))
        if isinstance(row, ExtendRow):
            ends = [0, *(end for end, _ in row.saves), len(row.tokens)]
            assert ends == sorted(set(ends)), "states stand between the chunk's tokens, in order"
            for _, slot in row.saves:
                self.take("slot", slot, tenant)
                del self.owner["slot", slot]
                self.saved[slot] = handle
        tokens = 1 + len(row.drafts) if isinstance(row, DecodeRow) else len(row.tokens)
        if self.limits["page"]:
            end = -(-(row.computed + tokens) // self.page_size)
            for place in (
                (g, n) for g in range(len(self.windows)) for n in range(self.first_page(g, row.computed), end)
            ):
                assert place in tenant.pages, "positions without a page"
                owner = self.page_owner[place[0], tenant.pages[place]]
                wanted = tenant.borrowed.get(place, (tenant, place[1]))
                assert owner == wanted, "a step names a page that belongs to another request"

    def run_oldest(self) -> None:
        handle = self.queue.pop(0)
        plan, answers = handle.plan, []
        assert handle.masks is not None, "a step runs before it has its masks"
        masks = iter(handle.masks)
        for donor in handle.donors:
            self.fold(donor)
        self.copies += plan.host_copies
        self.run_copies(plan.after_copies)
        if self.shared is not None:
            self.shared.clear_slabs(plan.cleared)
        for tenant, slot in handle.copied_states:
            self.text[slot] = self.text[tenant.state] + tenant.ring
            self.state[slot] = self.mixed(tenant)
        for copy in plan.page_copies:
            for source, target in zip(enumerate(copy.sources.tolist()), enumerate(copy.targets.tolist())):
                for offset in range(self.page_size):
                    self.kv[target, offset] = self.kv.get((source, offset), -1)
        for row, tenant in zip([*rows_of(plan.decode), *plan.extend], handle.tenants, strict=True):
            if any(tenant.admission is admission for admission in plan.admissions):
                self.state[tenant.state], self.text[tenant.state] = 0, []
                if isinstance(row, ExtendRow) and not any(copy.row == row.row for copy in plan.imports):
                    self.start(row, tenant)
            for copy in plan.imports:
                if copy.row == row.row:
                    self.import_state(tenant, copy)
            tenant.broken |= handle.error is not None
            tenant.masks = list(next(masks, ())) if isinstance(row, DecodeRow) or row.sample else []
            if tenant.broken:
                answers += [[0]] if isinstance(row, DecodeRow) or row.sample else []
            else:
                answers += [self.decode(row, tenant)] if isinstance(row, DecodeRow) else self.extend(row, tenant)
            for copy in plan.exports:
                if copy.row == row.row:
                    assert copy.length == tenant.length
                    starts = [0 if w is None else max(tenant.length - w + 1, 0) for w in self.windows]
                    tokens = [
                        [self.kv[self.place(tenant, i, group)] for i in range(start, tenant.length)]
                        for group, start in enumerate(starts)
                    ]
                    self.fold(tenant)
                    self.arena[copy.offset] = tokens, self.state[tenant.state]
        logprobs = [[{t: -0.5} | {(t + 1) % self.vocab: -0.25} for t in a] for a in answers]
        handle.answer = StepResult(tokens=answers, logprobs=list(logprobs))

    def start(self, row: ExtendRow, tenant: Tenant) -> None:
        """The first chunk of a tenant, maybe after a prefix of the cache."""
        assert bool(row.read_state_slot) == bool(row.computed and self.limits["slot"])
        tenant.length = row.computed
        if row.read_state_slot:
            self.state[tenant.state] = self.state[row.read_state_slot]
            self.text[tenant.state] = list(self.text[row.read_state_slot])
            assert len(self.text[tenant.state]) == row.computed, "the state of another position"
            if not self.limits["page"]:  # a model without attention layers: the context is all in the state
                for i, token in enumerate(self.text[tenant.state]):
                    self.kv |= {self.place(tenant, i, group): token for group in range(len(self.windows))}
        elif row.computed and self.has_state:  # no recurrent layer: the state stands for what the KV says
            group = self.windows.index(None)
            before = (self.kv[self.place(tenant, position, group)] for position in range(row.computed))
            self.state[tenant.state] = reduce(mix, before, self.state[tenant.state])

    def fold(self, tenant: Tenant) -> None:
        self.state[tenant.state] = self.mixed(tenant)
        self.text[tenant.state] += tenant.ring
        tenant.ring = []

    def mixed(self, tenant: Tenant) -> int:
        """Its whole state."""
        return reduce(mix, tenant.ring, self.state[tenant.state])

    def decode(self, row: DecodeRow, tenant: Tenant) -> list[int]:
        assert tenant.last is not None and row.computed == tenant.length, "computed positions are contiguous"
        assert row.output_index == tenant.outputs
        gained: list[int] = []
        for draft in [tenant.last, *row.drafts]:
            if gained and draft != gained[-1]:
                break
            self.write(tenant, draft)
            gained.append(self.allowed(tenant))
        return gained

    def extend(self, row: ExtendRow, tenant: Tenant) -> list[list[int]]:
        assert row.tokens and row.computed == tenant.length, "computed positions are contiguous"
        assert tenant.following in (None, row.tokens[0]), "a chunk says which token the next one begins with"
        tenant.outputs, tenant.following = row.output_index, None if row.sample else row.following
        saves = dict(row.saves)
        for number, token in enumerate(row.tokens):
            if number in saves:
                self.fold(tenant)
                self.state[saves[number]] = self.state[tenant.state]
                self.text[saves[number]] = list(self.text[tenant.state])
            self.write(tenant, token)
        num_tokens = tenant.admission.prompt_len + row.output_index
        assert row.sample == (tenant.length == num_tokens), "the last chunk samples, and no other"
        return [[self.allowed(tenant)]] if row.sample else []

    def import_state(self, tenant: Tenant, copy: StateCopy) -> None:
        assert not tenant.length, "only a request that has just been admitted"
        tokens, state = self.arena[copy.offset]
        tenant.length = copy.length
        for group, seen in enumerate(tokens):
            for position, token in enumerate(seen, copy.length - len(seen)):
                self.kv[self.place(tenant, position, group)] = token
        self.state[tenant.state], self.text[tenant.state] = state, [0] * copy.length

    def write(self, tenant: Tenant, token: int) -> None:
        for group in range(len(self.windows)):
            self.kv[self.place(tenant, tenant.length, group)] = token
        tenant.ring.append(token)
        tenant.length += 1
        if not (self.replay and tenant.outputs) or len(tenant.ring) > 5:
            self.fold(tenant)

    def place(self, tenant: Tenant, position: int, group: int = 0) -> tuple[Page, int]:
        if not self.limits["page"]:
            return (group, -tenant.admission.row), position
        return (group, tenant.pages[group, position // self.page_size]), position % self.page_size

    def allowed(self, tenant: Tenant) -> int:
        """The next token; if its mask forbids it, another one that depends on it; -1 if none is allowed."""
        token, mask = self.draw(tenant), tenant.masks.pop(0) if tenant.masks else None
        if mask is not None and not mask[token // 32] >> token % 32 & 1:
            left = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            tenant.last = token = int(left[mix(token) % len(left)]) if len(left) else -1
        return token

    def draw(self, tenant: Tenant) -> int:
        context = list[int]()
        for group, window in enumerate(self.windows):
            start = max(tenant.length - (window or tenant.length), 0)
            context += [self.kv[self.place(tenant, i, group)] for i in range(start, tenant.length)]
        state = self.mixed(tenant) if self.has_state else 0
        tenant.last = mix(*context, state, tenant.admission.seed, tenant.outputs) % self.vocab
        tenant.outputs += 1
        return tenant.last
