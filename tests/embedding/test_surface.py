"""hybridrt.embedding: its numbers, and its steps against the same steps run otherwise."""

from typing import Any

import numpy as np
import pytest
import torch

from hybridrt.base.engine_config import SpeculativeConfig
from hybridrt.base.errors import PoolError
from hybridrt.embedding import EmbeddedRuntime, ForwardBatch, Scratch, SpecInfo
from tests.support.checkpoints import Make, falcon_mamba, nemotron
from tests.support.embedded import PAGE, PROMPT, ROWS, Models, continuation, decode, make, run, start

# -- numbers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scratch", [Scratch(0, 0, 0), Scratch(1, 2, 3), Scratch(-1, 0, -2)])
def test_scratch_is_where_the_host_engine_puts_it(scratch: Scratch, models: Models) -> None:
    """The same request on each row, slot and page that is not scratch; all give what the default numbering gives."""
    loaded = models(state_mode="replay")
    want = continuation(reference := make(loaded), start(reference), 5, 18)
    runtime = make(loaded, scratch)
    numbers, plan = runtime.numbers, runtime.plan
    rows = [r for r in range(plan.num_rows + 1) if r != numbers.rows.scratch]
    slots = [s for s in range(plan.num_slots + 1) if s != numbers.state_slots.scratch]
    pages = [p for p in range(plan.num_pages + 1) if p != numbers.pages[0].scratch]
    for i, row in enumerate(rows):
        runtime.admit([row], [slots[i]])
        runtime.write_pages([row] * 8, range(8), pages[8 * i : 8 * i + 8])
        first = run(runtime, runtime.batch(input_ids=PROMPT, rows=[row], seq_lens=[5], query_lens=[5]))[-1]
        assert torch.equal(continuation(runtime, first, 5, 18, row), want)
    padded = runtime.batch(
        input_ids=[3, 0], rows=[rows[0], numbers.rows.scratch], seq_lens=[25, 1], query_lens=[1, 1], num_decode_rows=2
    )
    assert padded.num_real == 1


def test_padding_touches_no_entry_of_a_request(models: Models) -> None:
    """By default row 0, slot 0 and page 0 are a request's."""
    runtime = make(models(state_mode="replay"))
    first = start(runtime)
    batch = runtime.batch(input_ids=[1, 1, 1], rows=[0, ROWS, ROWS], seq_lens=[6, 1, 1])
    padded = run(runtime, batch)[0]
    other = make(models(state_mode="replay"))
    assert torch.equal(first, start(other))
    assert torch.allclose(padded, decode(other, 1, 6), atol=1e-5)
    assert torch.allclose(decode(runtime, 2, 7), decode(other, 2, 7), atol=1e-5)


def test_numbers_are_a_rotation(models: Models) -> None:
    numbers = make(models(), Scratch(row=1, page=2)).numbers
    assert numbers.rows.scratch == 1 and numbers.rows.inside(1) == 0 and numbers.rows.inside(0) == ROWS
    (tokens,) = numbers.tokens
    assert tokens.inside(2 * PAGE + 3) == 3
    every = torch.arange(tokens.count)
    assert torch.equal(tokens.outside(tokens.inside(every)), every)
    assert tokens.inside(every).unique().numel() == tokens.count


def test_a_table_that_the_engine_computes_on_the_device(models: Models) -> None:
    loaded = models()
    want = continuation(reference := make(loaded), start(reference), 5, 10)
    runtime = make(loaded, Scratch(page=1))
    runtime.admit([0], [0])
    pages = torch.tensor([7, 0, 5, 3])
    places = (pages[:, None] * PAGE + torch.arange(PAGE)).flatten()
    with pytest.raises(PoolError, match="row 0 has no page for position 0"):
        runtime.batch(input_ids=PROMPT, rows=[0], seq_lens=[5], query_lens=[5])
    runtime.write_tokens(torch.zeros(16, dtype=torch.int64), torch.arange(16), places)
    first = run(runtime, runtime.batch(input_ids=PROMPT, rows=[0], seq_lens=[5], query_lens=[5]))[-1]
    assert torch.equal(continuation(runtime, first, 5, 10), want)


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor, lambda x: np.array(x, np.uint8)])
def test_arrays_may_be_lists_numpy_or_torch(kind: Any, models: Models) -> None:
    runtime = make(models())
    runtime.admit(kind([0]), kind([0]))
    runtime.write_pages(kind([0, 0]), kind([0, 1]), kind([0, 1]))
    batch = runtime.batch(input_ids=kind(PROMPT), rows=kind([0]), seq_lens=kind([5]), query_lens=kind([5]))
    assert torch.equal(run(runtime, batch)[-1], start(make(models())))


# -- steps ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["classic", "replay"])
def test_a_restored_snapshot_continues_as_the_request_would(mode: str, models: Models) -> None:
    """After a prefill, and in the middle of decoding, where a replay ring holds tokens."""
    runtime = make(models(state_mode=mode))
    first = start(runtime)
    half = continuation(runtime, first, 5, 8)
    runtime.snapshot([0], [4])
    token = int(half[-1].argmax())
    want = continuation(runtime, decode(runtime, token, 13), 13, 6)
    runtime.admit([2], [1])
    runtime.restore([4], [2])
    runtime.write_pages([2] * 8, range(8), range(8))  # reads the KV of row 0, and writes the same again
    got = continuation(runtime, decode(runtime, token, 13, row=2), 13, 6, row=2)
    assert torch.allclose(got, want, atol=1e-5)


def test_a_prompt_starts_from_the_state_in_another_slot(models: Models) -> None:
    runtime = make(models())
    start(runtime)
    runtime.snapshot([0], [4])
    runtime.admit([1], [1])
    runtime.write_pages([1, 1], [0, 1], [0, 1])
    ids, scratch = [3, 4], runtime.numbers.state_slots.scratch
    batch = runtime.batch(input_ids=ids, rows=[1], seq_lens=[7], query_lens=[2], read_state_slots=[4])
    want = run(
        runtime, runtime.batch(input_ids=ids, rows=[0], seq_lens=[7], query_lens=[2], read_state_slots=[scratch])
    )
    assert torch.allclose(run(runtime, batch), want, atol=1e-5)


@pytest.mark.parametrize("mode", ["intermediate", "replay"])
@pytest.mark.parametrize("accepted", [1, 2, 3])
def test_a_verify_step_keeps_what_was_accepted(mode: str, accepted: int, models: Models) -> None:
    loaded = models(speculative=SpeculativeConfig(num_draft_tokens=2, state_mode=mode))
    runtime, plain = make(loaded), make(loaded)
    start(runtime), start(plain)
    tokens = [3, 11, 4]
    batch = runtime.batch(input_ids=tokens, rows=[0], seq_lens=[8], spec_info=SpecInfo(3))
    verified = run(runtime, batch, [accepted])
    one_by_one = torch.stack([decode(plain, token, 6 + i) for i, token in enumerate(tokens[:accepted])])
    assert torch.allclose(verified[:accepted], one_by_one, atol=1e-5)
    following = 6 + accepted
    assert torch.allclose(decode(runtime, 2, following), decode(plain, 2, following), atol=1e-5)


@pytest.mark.parametrize("mode", ["classic", "replay"])
def test_graphs_give_what_eager_steps_give(mode: str, models: Models) -> None:
    runtime, eager = make(models(state_mode=mode)), make(models(state_mode=mode))
    graphs = runtime.capture(max_rows=2)
    assert graphs.fits(1) and graphs.fits(2) and not graphs.fits(3) and not graphs.fits(0)
    for each in (runtime, eager):
        start(each)
        start(each, row=2, slot=1, first_page=8)
    for i in range(20):  # longer than a ring
        step: dict[str, Any] = {"input_ids": [i, i + 1], "rows": [2, 0], "seq_lens": [6 + i % 10, 6 + i % 10]}
        if i % 10 == 0:
            for each in (runtime, eager):
                start(each)
                start(each, row=2, slot=1, first_page=8)
        assert torch.allclose(graphs.replay(**step), run(eager, eager.batch(**step)), atol=1e-5)


@pytest.mark.parametrize("mode", ["classic", "replay"])
def test_a_step_is_prepared_before_the_one_before_has_run(mode: str, models: Models) -> None:
    """Long enough that rings are folded, and with tokens that are filled in between."""
    runtime, plain = make(models(state_mode=mode)), make(models(state_mode=mode))
    want = continuation(plain, start(plain), 5, 11)
    token = start(runtime).argmax()[None].int()
    got, ahead = [], []
    for length in range(6, 16):
        ids = torch.zeros(1, dtype=torch.int32)
        ahead.append((ids, runtime.batch(input_ids=ids, rows=[0], seq_lens=[length])))
        runtime.prepare(ahead[-1][1])
        if len(ahead) == 3:
            got.append(fill_and_run(runtime, *ahead.pop(0), got[-1] if got else None, token))
    while ahead:
        got.append(fill_and_run(runtime, *ahead.pop(0), got[-1], token))
    assert torch.allclose(torch.stack(got), want[1:], atol=1e-5)


def fill_and_run(
    runtime: EmbeddedRuntime, ids: torch.Tensor, batch: ForwardBatch, last: torch.Tensor | None, first: torch.Tensor
) -> torch.Tensor:
    ids.copy_(first if last is None else last.argmax()[None])
    logits = runtime.logits(runtime.forward(batch))[0]
    runtime.commit(batch)
    return logits


def test_a_model_without_attention_or_state_has_nothing_to_write(models: Models) -> None:
    runtime = make(models(falcon_mamba))
    assert runtime.plan.num_pages == 0
    runtime.write_pages([0], [0], [0])
    runtime.write_tokens(*torch.zeros(3, 1, dtype=torch.int64))
    assert start(runtime).isfinite().all()


def test_a_model_without_recurrent_layers_needs_no_slots(models: Models) -> None:
    runtime = make(models(attention_alone))
    assert runtime.plan.num_slots == 0
    runtime.admit([0])
    runtime.write_pages([0, 0], [0, 1], [0, 1])
    batch = runtime.batch(input_ids=PROMPT, rows=[0], seq_lens=[5], query_lens=[5])
    assert continuation(runtime, run(runtime, batch)[-1], 5, 3).isfinite().all()
    assert decode(runtime, 3, 6).isfinite().all()  # without a state a step may begin anywhere
    with pytest.raises(PoolError, match="no state to snapshot"):
        runtime.snapshot([0], [0])


def attention_alone() -> Make:
    return nemotron("*-*-")
