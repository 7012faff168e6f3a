"""What an engine does at one moment, for people who watch it: lengths and counts, and no text, token or name."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count, islice
from typing import Any

from hybridrt.engine.cache.cache_coordinator import CacheCoordinator
from hybridrt.engine.core.fold_counts import FoldCounts
from hybridrt.engine.core.step_times import StepsView
from hybridrt.engine.request.sample_request import Request
from hybridrt.mem_cache.prefix_tree.radix_cache import RadixCache
from hybridrt.mem_cache.prefix_tree.radix_node import Node

MAX_ROWS = 64
MAX_NODES = 160
MAX_BELOW = 128  # children of a node, or roots, that are looked at: those that came last


@dataclass(frozen=True, slots=True)
class RowView:
    """A sample that runs.

    Attributes:
        row, slot: its row, and its state slot; slot 0 without recurrent layers.
        prompt, cached: tokens of its prompt, and those that the prefix cache had.
        computed: tokens with KV and state in all steps that were read.
        output, most: output tokens that are known, and how many it gets at most.
        pages: KV pages that it reads, the cache's included.
        ring: in replay mode, the column of its state ring after the last entry; else None.
    """

    row: int
    slot: int
    prompt: int
    cached: int
    computed: int
    output: int
    most: int
    pages: int
    ring: int | None


@dataclass(frozen=True, slots=True)
class NodeView:
    """An edge of the prefix tree and the entries at its end.

    Attributes:
        parent: place of the node above, before this one's; -1 below a root.
        start, end: tokens of the path before the edge, and with it.
        pages: whole KV pages of the edge.
        state: whether a state is stored at its end.
        readers: requests that read the path up to here.
        used: when it was last used; greater is later.
        children: of the node, those that are not shown included.
    """

    parent: int
    start: int
    end: int
    pages: int
    state: bool
    readers: int
    used: int
    children: int


@dataclass(frozen=True, slots=True)
class EngineView:
    """The first MAX_ROWS samples in the order of admission, and the MAX_NODES nodes of the prefix
    tree that were used last.

    Attributes:
        slots_used, pages_used: state slots and KV pages that requests own, or have locked in the cache.
        ring_end: the column after which a ring is folded; None without rings.
        nodes: parents first. nodes_total: of the whole tree.
        steps: the latest ones.
    """

    rows: tuple[RowView, ...]
    slots_used: int
    pages_used: int
    ring_end: int | None
    nodes: tuple[NodeView, ...]
    nodes_total: int
    steps: StepsView


def view_of(
    running: Iterable[Request], pools: CacheCoordinator, folds: FoldCounts | None, steps: StepsView
) -> EngineView:
    """Call it within a turn. The work is bounded, however many samples and nodes there are."""
    rows = tuple(_row(request, folds) for request in islice(running, MAX_ROWS))
    slots, pages, tree = pools.slots, pools.pages, pools.prefixes.tree
    return EngineView(
        rows, slots.num_used + slots.num_locked, pages.num_used + pages.num_locked,
        None if folds is None else folds.last, tuple(_latest(tree)), tree.num_nodes, steps,
    )  # fmt: skip


def _row(request: Request, folds: FoldCounts | None) -> RowView:
    row = 0 if request.row is None else request.row.index
    slot = 0 if request.state_slot is None else request.state_slot.index
    pages = sum(end - start for start, end in zip(request.pages.starts, request.pages.ends, strict=True))
    prompt = len(request.prompt)
    return RowView(
        row, slot, prompt, request.metrics.cached_tokens, request.settled, len(request.output),
        request.max_len - prompt, pages, None if folds is None else folds.end_of(row),
    )  # fmt: skip


def _latest(tree: RadixCache) -> Iterator[NodeView]:
    """A use of a node is one of all nodes above it, so a heap by the latest use has parents first."""
    order = count()
    waiting = [(-node.used, next(order), -1, node) for root in _last(tree.roots) for node in _last(root.children)]
    heapify(waiting)
    for place in range(MAX_NODES):
        if not waiting:
            return
        used, _, parent, node = heappop(waiting)
        for child in _last(node.children):
            heappush(waiting, (-child.used, next(order), place, child))
        yield NodeView(
            parent, node.start, node.end, len(node.pages), node.state is not None, node.readers, -used,
            len(node.children),
        )  # fmt: skip


def _last(nodes: dict[Any, Node]) -> list[Node]:
    """Those that came last. Nodes of texts that no match finds are left out."""
    return [node for node in islice(reversed(nodes.values()), MAX_BELOW) if node.parent is None or node.first >= 0]
