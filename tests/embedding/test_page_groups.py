"""A model whose layers have windows next to layers without one: a host engine gives a page of each page group."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridrt.base.errors import BackendError, HybridrtError, PoolError
from hybridrt.embedding import EmbeddedRuntime, EngineConfig, build, load, plan_memory
from tests.support import outside_mixed
from tests.support.embedded import run

PAGE, WINDOW = 4, 5
PROMPT, OTHER = [7, 3, 50, 11, 2, 9, 9, 40, 21, 5, 33, 18, 27], [60, 1, 13, 14, 15, 16, 17, 4]


@pytest.fixture
def reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[outside_mixed.Reference]:
    """The model in plain torch, of two page groups: no window, and one of 5 tokens."""
    monkeypatch.setattr(outside_mixed, "LAYERS", tuple(outside_mixed.LAYERS[i] for i in (0, 1, 3)))
    with outside_mixed.installed():
        yield outside_mixed.write_checkpoint(tmp_path)


@pytest.fixture
def runtime(reference: outside_mixed.Reference, tmp_path: Path) -> EmbeddedRuntime:
    config = EngineConfig(
        str(tmp_path), device="cpu", dtype="float32", page_size=PAGE, max_running_requests=3, max_model_len=64,
        chunked_prefill_size=16,
    )  # fmt: skip
    loaded = load(config)
    found = build(loaded, plan_memory(loaded, budget_bytes=2**22))
    assert [group.window for group in found.plan.groups] == [None, WINDOW]
    assert [numbers.scratch for numbers in found.numbers.pages] == [group.num_pages for group in found.plan.groups]
    return found


def prefill(runtime: EmbeddedRuntime, row: int, prompt: list[int]) -> torch.Tensor:
    batch = runtime.batch(input_ids=prompt, rows=[row], seq_lens=[len(prompt)], query_lens=[len(prompt)])
    return run(runtime, batch)


def check(reference: outside_mixed.Reference, text: list[int], got: torch.Tensor) -> None:
    torch.testing.assert_close(got, reference.logits(text)[-1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("graphs", [False, True])
def test_pages_that_a_window_has_passed_serve_another_row(
    graphs: bool, reference: outside_mixed.Reference, runtime: EmbeddedRuntime
) -> None:
    """And later the same row again. Each row keeps all its pages of the layers without a window."""
    scratch = runtime.plan.groups[1].num_pages
    recorded = runtime.capture() if graphs else None
    runtime.admit([0])
    runtime.write_pages([0] * 4, range(4), [[0, 0], [1, 1], [2, 2], [3, 3]])
    torch.testing.assert_close(prefill(runtime, 0, PROMPT), reference.logits(PROMPT), rtol=1e-4, atol=1e-4)
    runtime.write_pages([0, 0], [0, 1], [[0, scratch], [1, scratch]])  # the next token sees positions 9 to 13
    runtime.admit([1])
    runtime.write_pages([1] * 4, range(4), [[4, 1], [5, 0], [6, 4], [7, 5]])
    torch.testing.assert_close(prefill(runtime, 1, OTHER), reference.logits(OTHER), rtol=1e-4, atol=1e-4)
    texts, generator = [list(PROMPT), list(OTHER)], torch.Generator().manual_seed(3)
    for _ in range(7):
        if len(texts[0]) == 16:
            runtime.write_pages([0], [4], [[8, 2]])  # page 2 of the window group was that of positions 8 to 11
        new = torch.randint(1, 60, (2,), generator=generator).tolist()
        texts = [[*text, token] for text, token in zip(texts, new)]
        step: dict[str, Any] = {"input_ids": new, "rows": [0, 1], "seq_lens": [len(text) for text in texts]}
        logits = recorded.replay(**step) if recorded else run(runtime, runtime.batch(**step))
        for text, own in zip(texts, logits):
            check(reference, text, own)


def test_layers_without_a_window_and_of_two_sizes_have_pages_each(tmp_path: Path) -> None:
    with outside_mixed.installed():
        model = outside_mixed.write_checkpoint(tmp_path)
        config = EngineConfig(str(tmp_path), device="cpu", dtype="float32", page_size=PAGE, max_running_requests=2)
        loaded = load(config)
        found = build(loaded, plan_memory(loaded, budget_bytes=2**22))
        assert [group.window for group in found.plan.groups] == [None, None, WINDOW, 9]
        found.admit([0])
        found.write_pages([0] * 4, range(4), [[0, 3, 1, 2], [1, 2, 0, 3], [2, 0, 3, 1], [3, 1, 2, 0]])
        torch.testing.assert_close(prefill(found, 0, PROMPT), model.logits(PROMPT), rtol=1e-4, atol=1e-4)


def test_a_table_of_the_device_has_places_of_each_group(
    reference: outside_mixed.Reference, runtime: EmbeddedRuntime
) -> None:
    runtime.admit([2])
    pages = torch.tensor([[5, 9], [0, 3], [2, 0], [7, 1]])
    places = (pages[:, None] * PAGE + torch.arange(PAGE)[:, None]).flatten(0, 1)
    runtime.write_tokens(torch.full((16,), 2), torch.arange(16), places)
    table = runtime.pools.req_to_token.tables[3, :, :16].T
    for group in range(2):
        assert torch.equal(runtime.numbers.tokens[group].outside(table[:, group]), places[:, group].int())
    torch.testing.assert_close(prefill(runtime, 2, PROMPT), reference.logits(PROMPT), rtol=1e-4, atol=1e-4)


def test_a_row_that_lost_a_page_of_its_window_is_refused(runtime: EmbeddedRuntime) -> None:
    """Whichever group it is of: page 3 holds positions 12 to 15, which are still seen."""
    runtime.admit([0, 1])
    runtime.write_pages([0] * 4, range(4), [[0, 0], [1, 1], [2, 2], [3, 3]])
    prefill(runtime, 0, PROMPT)
    runtime.write_pages([1, 1], [0, 1], [[4, 3], [5, 4]])
    prefill(runtime, 1, OTHER)
    with pytest.raises(PoolError, match=r"row 0 .*page 3"):
        runtime.batch(input_ids=[5], rows=[0], seq_lens=[14])


def test_a_new_token_needs_a_page_of_each_group(runtime: EmbeddedRuntime) -> None:
    runtime.admit([0])
    runtime.write_pages([0, 0], [0, 1], [[0, 0], [1, runtime.plan.groups[1].num_pages]])
    prefill(runtime, 0, PROMPT[:4])
    with pytest.raises(PoolError, match="row 0 has no page for position 4"):
        runtime.batch(input_ids=[5], rows=[0], seq_lens=[5])


@pytest.mark.parametrize("scratch", [True, False])
def test_a_page_within_the_window_is_missed(scratch: bool, runtime: EmbeddedRuntime) -> None:
    """The token at position 13 sees positions 9 to 13: page index 2 is needed, 1 is not. A row that begins after a
    prefix may lack it, too."""
    none = runtime.plan.groups[1].num_pages
    runtime.admit([0, 1])
    runtime.write_pages([0] * 4, range(4), [[0, 0], [1, 1], [2, 2], [3, 3]])
    prefill(runtime, 0, PROMPT)
    runtime.write_pages([0, 0], [0, 1], [[0, none], [1, none]])
    step: dict[str, Any] = {"input_ids": [5], "rows": [0], "seq_lens": [14]}
    made = runtime.batch(**step)
    row = 0
    if scratch:
        runtime.write_pages([0], [2], [[2, none]])
        with pytest.raises(PoolError, match="row 0 has no page for page index 2, and its token at position 13"):
            runtime.prepare(made)
    else:
        row = 1
        runtime.write_pages([1, 1], [0, 3], [[4, none], [5, 4]])
    with pytest.raises(PoolError, match=f"row {row} has no page for page index {'2' if scratch else '1'}, and"):
        runtime.batch(**(step | {"rows": [row]}))


SHAPE = r"shape \(%s\); .*\[n, 2\]"
WRONG: dict[str, tuple[Callable[[EmbeddedRuntime], object], type[HybridrtError], str]] = {
    "one page": (lambda r: r.write_pages([0, 0], [0, 1], [0, 1]), BackendError, SHAPE % "2,"),
    "a column": (lambda r: r.write_pages([0, 0], [0, 1], [[0], [1]]), BackendError, SHAPE % "2, 1"),
    "three groups": (lambda r: r.write_pages([0], [0], [[0, 1, 2]]), BackendError, SHAPE % "1, 3"),
    "three dimensions": (lambda r: r.write_pages([0], [0], torch.zeros(1, 2, 1).int()), BackendError, "shape"),
    "lists of two lengths": (lambda r: r.write_pages([0, 0], [0, 1], [[0, 1], [2]]), BackendError, "no array"),
    "no integers": (lambda r: r.write_pages([0], [0], [[0.5, 1.5]]), BackendError, "must hold integers"),
    "pages missing": (
        lambda r: r.write_pages([0, 0], [0, 1], [[0, 1]]), BackendError, "rows has 2 entries and pages 1"),
    "scratch without a window": (
        lambda r: r.write_pages([0], [0], [[r.plan.groups[0].num_pages, 0]]), PoolError, "which is scratch"),
    "a page outside its group": (
        lambda r: r.write_pages([0], [0], [[0, r.plan.groups[1].num_pages + 1]]), PoolError, "pages holds"),
    "one page twice in a group": (
        lambda r: r.write_pages([0, 0], [0, 1], [[0, 3], [1, 3]]), PoolError, "page 3 at two page indices"),
    "places of one group": (
        lambda r: r.write_tokens(*torch.zeros(3, 2, dtype=torch.int64)), BackendError, r"need \(2, 2\)"),
    "places of three groups": (
        lambda r: r.write_tokens(*torch.zeros(2, 1).long(), torch.zeros(1, 3).long()), BackendError, r"need \(1, 2\)"),
    "a place outside its group": (
        lambda r: r.write_tokens(*torch.zeros(2, 1).long(), torch.tensor([[0, 10**6]])), PoolError, "places holds"),
    "an offset of one group": (
        lambda r: r.write_tokens(*torch.zeros(2, 1).long(), torch.tensor([[0, 1]])), PoolError, "gets offset 1"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_wrong_pages_are_refused(what: str, runtime: EmbeddedRuntime) -> None:
    """Nothing has changed then."""
    runtime.admit([0])
    before = runtime.pools.req_to_token.tables.clone()
    call, error, message = WRONG[what]
    with pytest.raises(error, match=message):
        call(runtime)
    assert torch.equal(runtime.pools.req_to_token.tables, before)
    with pytest.raises(PoolError, match="row 0 has no page for position 0"):
        runtime.batch(input_ids=[5], rows=[0], seq_lens=[1], query_lens=[1])
