"""Views of an engine are bounded and true, whatever it has."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hybridrt import LLM, SamplingParams
from hybridrt.engine.core.engine_view import MAX_BELOW, MAX_NODES, MAX_ROWS, NodeView, view_of
from hybridrt.engine.core.step_times import LAST_STEPS, StepsView, StepTime
from hybridrt.mem_cache.pools.entries import Handle
from hybridrt.mem_cache.prefix_tree.cache_key import DEFAULT_KEY, CacheKey
from hybridrt.mem_cache.prefix_tree.radix_cache import RadixCache
from hybridrt.mem_cache.prefix_tree.radix_drop import drop
from tests.support.checkpoints import CheckpointStore
from tests.support.session import greedy

NO_SETS = np.zeros((0, 0), np.int64)
NO_STEPS = StepsView.of_steps(0, ())
NONE_USED = SimpleNamespace(num_used=0, num_locked=0)


def tree_of(*texts: list[int], key: CacheKey = DEFAULT_KEY) -> RadixCache:
    """Texts of a model without attention layers, with a state after each."""
    tree = RadixCache(0, True, windows=())
    for i, text in enumerate(texts):
        tree.insert(np.array(text, np.int32), NO_SETS, {len(text): Handle(i + 1, 0)}, key)
    return tree


def nodes_of(tree: RadixCache) -> tuple[NodeView, ...]:
    pools: Any = SimpleNamespace(slots=NONE_USED, pages=NONE_USED, prefixes=SimpleNamespace(tree=tree))
    view = view_of([], pools, None, NO_STEPS)
    assert view.nodes_total == len(list(tree.nodes()))
    return view.nodes


def test_nodes_come_parents_first_and_the_latest_use_before_others() -> None:
    tree = tree_of([1, 2, 3], [1, 2, 4, 5], [9])
    shown = [(n.parent, n.start, n.end, n.state, n.children) for n in nodes_of(tree)]
    assert shown == [
        (-1, 0, 1, True, 0), (-1, 0, 2, False, 2), (1, 2, 4, True, 0), (1, 2, 3, True, 0),
    ]  # fmt: skip
    tree.touch(np.array([1, 2, 3], np.int32), DEFAULT_KEY)
    assert [(n.start, n.end) for n in nodes_of(tree)] == [(0, 2), (2, 3), (0, 1), (2, 4)]


@pytest.mark.parametrize(
    ("texts", "shown"),
    [
        ([[i] for i in range(2000)], MAX_BELOW),
        ([[0, i] for i in range(2000)], MAX_BELOW + 1),
        ([[0] * i for i in range(1, 400)], MAX_NODES),
    ],
)
def test_a_large_tree_is_cut(texts: list[list[int]], shown: int) -> None:
    """Many texts, many that go on after one text, and one long chain."""
    nodes = nodes_of(tree_of(*texts))
    assert len(nodes) == shown and all(n.parent < i for i, n in enumerate(nodes))
    assert all(n.start == (nodes[n.parent].end if n.parent >= 0 else 0) for n in nodes)


def test_dropped_texts_are_not_shown() -> None:
    tree = tree_of([1, 2, 3], [5, 6])
    text = np.array([1, 2, 3, 4], np.int32)
    tree.lock(tree.match(text))  # or nothing of it would stay
    drop(tree, text, DEFAULT_KEY, whole=True)
    assert len(list(tree.nodes())) == 2
    assert [(n.start, n.end) for n in nodes_of(tree)] == [(0, 2)]


def test_rows_and_their_rings(checkpoints: CheckpointStore) -> None:
    path = str(checkpoints["falcon-plain"].path)
    with LLM(path, device="cpu", state_mode="replay", max_running_requests=4, max_model_len=128) as llm:
        engine = llm.engine
        for prompt in ([1, 2, 3, 4, 5] * 8, [7, 8, 9]):
            engine.add_request(prompt, greedy(60))
        rings = []
        for _ in range(40):
            engine.step()
            view = engine.view()
            rings.append([row.ring for row in view.rows])
        assert view.ring_end is not None and view.slots_used == 2
        for row, prompt in zip(view.rows, (40, 3), strict=True):
            assert (row.prompt, row.most, row.computed) == (prompt, 60, prompt + row.output - 1)
            assert row.pages * llm.plan.page_size >= row.computed
        first = [ring[0] for ring in rings if ring]
        assert max(first) == view.ring_end and 0 in first, "it fills up, and is folded"


def test_rows_are_cut() -> None:
    """Those that were admitted last are left out."""
    metrics, pages = SimpleNamespace(cached_tokens=0), SimpleNamespace(starts=[], ends=[])
    request: Any = SimpleNamespace(
        row=Handle(3, 1), state_slot=None, prompt=[1, 2], output=[], metrics=metrics, settled=1, max_len=9, pages=pages
    )
    pools: Any = SimpleNamespace(slots=NONE_USED, pages=NONE_USED, prefixes=SimpleNamespace(tree=tree_of()))
    view = view_of([request] * 1000, pools, None, NO_STEPS)
    assert len(view.rows) == MAX_ROWS and (view.rows[0].row, view.rows[0].slot, view.rows[0].most) == (3, 0, 7)


def test_times_of_steps_that_overlap_are_counted_once() -> None:
    steps = [StepTime(0.0, 1.0, 0, 2), StepTime(0.5, 3.0, 4, 0), StepTime(8.0, 9.0, 4, 0)]
    view = StepsView.of_steps(7, steps)
    assert view.milliseconds == (1000.0, 2000.0, 1000.0) and view.prompt_tokens == (2, 0, 0)
    assert view.decode_rows == (0, 4, 4) and view.total == 7


def test_the_latest_steps_are_noted(checkpoints: CheckpointStore) -> None:
    with LLM(str(checkpoints["falcon-plain"].path), device="cpu", max_model_len=256, max_running_requests=2) as llm:
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=LAST_STEPS + 5, ignore_eos=True))
        steps = llm.engine.view().steps
    assert len(steps.milliseconds) == LAST_STEPS < steps.total and min(steps.milliseconds) > 0
    assert {*steps.decode_rows} == {1} and {*steps.prompt_tokens} == {0}
