"""hybridrt.embedding: a row, a state slot and a page have one owner at a time, over many steps."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hybridrt.base.errors import BackendError, HybridrtError, PoolError
from hybridrt.embedding import EmbeddedRuntime
from tests.embedding.test_surface import attention_alone
from tests.support.embedded import Models, decode, make, run, start


def two(models: Models, **options: Any) -> EmbeddedRuntime:
    """Rows 0 and 1 have prompts of five tokens, in slots 0 and 1 and pages 0 to 7 and 8 to 15."""
    runtime = make(models(**options))
    start(runtime)
    start(runtime, row=1, slot=1, first_page=8)
    return runtime


def prompt(runtime: EmbeddedRuntime, row: int, tokens: int = 2) -> torch.Tensor:
    return run(runtime, runtime.batch(input_ids=[1] * tokens, rows=[row], seq_lens=[tokens], query_lens=[tokens]))


@pytest.mark.parametrize("mode", ["classic", "replay"])
def test_a_slot_that_a_second_row_gets_is_lost_to_the_first(mode: str, models: Models) -> None:
    """In separate steps, by a step, a snapshot and a graph."""
    runtime = two(models, state_mode=mode)
    graphs = runtime.capture(max_rows=1)
    runtime.admit([1], [0])
    runtime.write_pages([1], [0], [8])
    prompt(runtime, 1)
    for call in (
        lambda: decode(runtime, 1, 6), lambda: graphs.replay(input_ids=[1], rows=[0], seq_lens=[6]),
        lambda: runtime.snapshot([0], [4]), lambda: runtime.restore([4], [0]),
    ):  # fmt: skip
        with pytest.raises(PoolError, match="row 0 has lost state slot 0 to row 1"):
            call()
    decode(runtime, 1, 3, row=1)
    runtime.snapshot([1], [2])
    start(runtime, row=2, slot=3, first_page=16)
    runtime.snapshot([1], [3])
    with pytest.raises(PoolError, match="row 2 has lost state slot 3 to a snapshot"):
        decode(runtime, 1, 6, row=2)
    start(runtime)  # with slot 0, which row 1 had
    with pytest.raises(PoolError, match="row 1 has lost state slot 0 to row 0"):
        decode(runtime, 1, 4, row=1)


def test_a_row_that_gets_another_slot_gives_its_first_one_back(models: Models) -> None:
    runtime = two(models)
    runtime.admit([0], [2])
    runtime.admit([1], [0])
    runtime.admit([0], [1])
    runtime.write_pages([0, 1], [0, 0], [0, 8])
    prompt(runtime, 0)
    prompt(runtime, 1)


@pytest.mark.parametrize("make_model", [None, attention_alone], ids=["hybrid", "attention alone"])
def test_a_page_that_is_handed_on_is_lost_to_its_first_row(make_model: Any, models: Models) -> None:
    runtime = two(models) if make_model is None else make(models(make_model))
    if make_model is not None:
        for row in (0, 1):
            runtime.admit([row])
            runtime.write_pages([row] * 8, range(8), range(8 * row, 8 * row + 8))
            prompt(runtime, row, 5)
    runtime.write_pages([1], [2], [1])  # page 1 has positions 4 to 7 of row 0
    decode(runtime, 1, 6)  # row 1 has not used it yet
    for length in (6, 7, 8):
        decode(runtime, 1, length, row=1)
    decode(runtime, 1, 9, row=1)  # position 8
    with pytest.raises(PoolError, match="row 0 has lost page 1 to row 1, which has written it since"):
        decode(runtime, 1, 7)
    runtime.admit([0], None if make_model else [0])
    runtime.write_pages([0], [0], [0])
    prompt(runtime, 0)
    decode(runtime, 1, 10, row=1)


def test_a_step_whose_rows_share_a_page_that_one_writes_is_refused(models: Models) -> None:
    """Both write it, or the other one has read it; in a batch and in a graph. A full page may be shared."""
    runtime = two(models)
    graphs = runtime.capture(max_rows=2)
    runtime.write_pages([1], [1], [1])
    step: dict[str, Any] = {"input_ids": [1, 1], "rows": [0, 1], "seq_lens": [6, 6]}
    for call in (runtime.batch, graphs.replay):
        with pytest.raises(PoolError, match=r"rows 0 and 1 of the step have page 1, and row [01] writes it"):
            call(**step)
    runtime.write_pages([1, 1], [0, 1], [0, 9])  # page 0 is full
    run(runtime, runtime.batch(**step))
    runtime.write_pages([1], [0], [1])
    with pytest.raises(PoolError, match="rows 0 and 1 of the step have page 1, and row 0 writes it"):
        run(runtime, runtime.batch(**step | {"seq_lens": [7, 7]}))


CALLS: dict[str, tuple[Callable[[EmbeddedRuntime], object], str]] = {
    "a page at two indices": (lambda r: r.write_pages([0, 0], [3, 4], [20, 20]), "page 20 at two page indices"),
    "two pages at an index": (lambda r: r.write_pages([0, 0], [3, 3], [20, 21]), "gets two pages"),
    "a page that the row has": (lambda r: r.write_pages([0], [3], [1]), "page 1 of row 0 is that of page index 1"),
    "tokens at another offset": (
        lambda r: r.write_tokens(*torch.tensor([[0], [12], [81]])), "position 12 gets offset"),
    "tokens of an index in two pages": (
        lambda r: r.write_tokens(*torch.tensor([[0, 0], [12, 13], [80, 85]])), "page index 3 of row 0 gets two pages"),
    "the slot of a row beside it": (
        lambda r: r.batch(
            input_ids=[1, 2, 2], rows=[0, 1], seq_lens=[6, 7], query_lens=[1, 2], num_decode_rows=1,
            read_state_slots=[0],
        ),
        r"read_state_slots\[0\] is 0, the slot of row 0, which the step writes"),
}  # fmt: skip


@pytest.mark.parametrize("what", CALLS)
def test_a_call_that_gives_twice_is_refused(what: str, models: Models) -> None:
    runtime = two(models)
    table = runtime.pools.req_to_token.req_to_token.clone()
    call, message = CALLS[what]
    with pytest.raises(PoolError, match=message):
        call(runtime)
    assert torch.equal(runtime.pools.req_to_token.req_to_token, table)
    decode(runtime, 1, 6)
    decode(runtime, 1, 6, row=1)


def test_what_a_prepared_step_names_is_not_free(models: Models) -> None:
    """Until it has run, or is dropped. What it does not name may change."""
    runtime = two(models)
    graphs = runtime.capture(max_rows=1)
    runtime.snapshot([1], [4])
    runtime.admit([1], [1])
    runtime.write_pages([1, 1], [0, 1], [0, 8])
    step: dict[str, Any] = {"input_ids": [1, 2, 2], "rows": [0, 1], "seq_lens": [6, 7], "query_lens": [1, 2],
                            "num_decode_rows": 1, "read_state_slots": [4]}  # fmt: skip
    batch = runtime.batch(**step)
    runtime.prepare(batch)
    ahead = [
        (lambda: runtime.admit([0], [3]), "row 0 is used by a step"),
        (lambda: runtime.admit([2], [0]), "state slot 0 is used by a step"),
        (lambda: runtime.admit([2], [4]), "state slot 4 is used by a step"),
        (lambda: runtime.snapshot([0], [4]), "state slot 4 is used by a step"),
        (lambda: runtime.restore([4], [0]), "row 0 is used by a step"),
        (lambda: runtime.write_pages([0], [1], [20]), "page index 1 of row 0 gets another page"),
        (lambda: graphs.replay(input_ids=[1], rows=[0], seq_lens=[7]), "replay while a prepared step has not run"),
    ]
    for call, message in ahead:
        with pytest.raises(HybridrtError, match=message):
            call()
    runtime.write_pages([0, 0], [1, 2], [1, 20])  # as it is, and after the step
    runtime.admit([2], [2])
    runtime.forward(batch)
    runtime.commit(batch)
    runtime.write_pages([0], [2], [21])
    for call, _ in ahead[:1]:
        call()


def test_a_batch_made_before_its_memory_changed_hands_is_refused(models: Models) -> None:
    runtime = two(models)
    first, second, third = (runtime.batch(input_ids=[1], rows=[row], seq_lens=[6]) for row in (0, 0, 1))
    runtime.write_pages([0], [1], [20])
    with pytest.raises(PoolError, match="page index 1 of row 0 has another page than when the batch was made"):
        runtime.prepare(first)
    start(runtime)
    with pytest.raises(PoolError, match="row 0 was admitted again after the batch was made"):
        runtime.prepare(second)
    later = runtime.batch(input_ids=[1], rows=[0], seq_lens=[6])
    runtime.prepare(third)
    runtime.prepare(later)
    with pytest.raises(BackendError, match="in the order in which they were prepared"):
        runtime.forward(later)
    runtime.forward(third)
    runtime.commit(third)
    runtime.forward(later)
    runtime.commit(later)
