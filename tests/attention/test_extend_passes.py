"""Chunks that leave states within them: outputs and states are those of the chunk computed at once, and each saved
state is that of a chunk which ends there."""

from collections.abc import Sequence

import pytest
import torch

from hybridrt.base.errors import BackendError
from hybridrt.kernels.core.packed import int32_array, map_arrays
from hybridrt.runtime.step.plan import ExtendRow
from hybridrt.runtime.step.recurrent_arrays import PassArrays, recurrent_lists, set_recurrent
from tests.models.test_models_parity import prompts
from tests.support.by_hand import ByHand, Row, assert_close
from tests.support.checkpoints import CheckpointStore
from tests.support.levels import sweep

MODELS = ("falcon-plain", "qwen-plain", "jamba-plain", "falcon_mamba-plain")
TEXT = prompts(60, seed=7)[0]
Chunks = Sequence[tuple[int, int, tuple[int, ...]]]
# Tokens that each row has already, tokens of its chunk, and after how many of them states are left.
CHUNKS = ((0, 37, (16, 33)), (5, 20, ()), (3, 9, (1,)), (0, 2, (1,)), (17, 30, (15, 16, 29)))
SHORT = ((3, 9, (1,)), (0, 2, (1,))), ((3, 9, (1,)), (7, 12, (9,)))  # of each, for the interpreter, which is slow
ONE_EACH = ((0, 37, (33,)), (5, 20, ()), (3, 9, (1,)), (17, 30, (15,)), (16, 16, (16,)))  # saved at the ends of chunks
FIRST_SPARE = 6


def extend(hand: ByHand, rows: Sequence[ExtendRow], decode: Sequence[Row] = ()) -> torch.Tensor:
    """A step of these chunks, as the runtime makes it."""
    sizes = hand.backend.chunk_sizes
    batch = hand.batch(decode, [Row(r.row, r.computed, r.tokens) for r in rows])
    on_host = map_arrays(int32_array, recurrent_lists(rows, sizes, hand.backend.saves_at_chunks))
    set_recurrent(batch, on_host, map_arrays(torch.from_numpy, on_host), sizes)
    return hand.forward(batch)


def start(hand: ByHand, chunks: Chunks) -> list[ExtendRow]:
    """Rows 1 and on with what they have already, and the chunks that follow."""
    rows, spare = [], FIRST_SPARE
    for row, (computed, length, ends) in enumerate(chunks, 1):
        hand.admit(row)
        if computed:
            hand.extend(Row(row, 0, TEXT[row : row + computed]))
        tokens = TEXT[row + computed : row + computed + length]
        saves = [(end, spare + i) for i, end in enumerate(ends)]
        spare += len(ends)
        rows.append(ExtendRow(row, computed, tokens, 0, True, saves=saves))
    return rows


@torch.inference_mode()
@pytest.mark.parametrize(("chunks", "short"), sweep(zip((CHUNKS, ONE_EACH), SHORT), 2), ids=["several", "one of a row"])
@pytest.mark.parametrize("name", sweep(MODELS, 12, thin=5))
def test_saved_states_are_those_of_shorter_chunks(
    name: str, chunks: Chunks, short: Chunks, provider: str, checkpoints: CheckpointStore
) -> None:
    path = checkpoints[name].path
    hand, whole = ByHand(path), ByHand(path)
    chunks = chunks if provider == "torch" else short
    rows = start(hand, chunks)
    logits = extend(hand, rows)
    start(whole, chunks)
    wanted = whole.extend(*[Row(r.row, r.computed, r.tokens) for r in rows])
    torch.testing.assert_close(logits, wanted, rtol=2e-4, atol=2e-4)
    for r in rows:
        end = r.computed + len(r.tokens)
        assert_close(hand.state(r.row, end), whole.state(r.row, end), 1e-4)
        for tokens, slot in r.saves:
            check_saved(hand, path, r, tokens, slot)


def check_saved(hand: ByHand, path: object, row: ExtendRow, tokens: int, slot: int) -> None:
    short = ByHand(path)  # type: ignore[arg-type]
    short.admit(row.row)
    end = row.computed + tokens
    short.extend(Row(row.row, 0, TEXT[row.row : row.row + end]))
    wanted = short.state(row.row, end)
    slots, position = torch.tensor([slot], dtype=torch.int32), torch.tensor([end], dtype=torch.int32)
    for layer_id in hand.mamba.layer_ids:
        state = hand.mamba.layer_cache(layer_id).temporal[slot]
        window = hand.mamba.conv_window(layer_id, slots, position)[0]
        found = {f"state of layer {layer_id}": state, f"conv of layer {layer_id}": window}
        assert_close(found, {what: wanted[what] for what in found}, 1e-4)


@torch.inference_mode()
def test_beside_decode_rows(checkpoints: CheckpointStore) -> None:
    hand, whole = (ByHand(checkpoints["qwen-plain"].path, mode="replay") for _ in range(2))
    for each in (hand, whole):
        each.admit(1, 2)
        each.extend(Row(2, 0, TEXT[:5]))
    decode = Row(2, 5, [9])
    found = extend(hand, [ExtendRow(1, 0, TEXT[:20], 0, True, saves=[(16, FIRST_SPARE + 1)])], [decode])
    hand.backend.commit(hand.last_batch)
    torch.testing.assert_close(found, whole.decode(decode, extend=[Row(1, 0, TEXT[:20])]), rtol=2e-4, atol=2e-4)
    assert_close(hand.state(2, 6), whole.state(2, 6), 1e-4)


def test_a_slot_that_does_not_exist_is_refused(checkpoints: CheckpointStore) -> None:
    hand = ByHand(checkpoints["qwen-plain"].path)
    hand.admit(1)
    with pytest.raises(BackendError, match="write_state_slots of a pass holds 99"):
        extend(hand, [ExtendRow(1, 0, TEXT[:20], 0, True, saves=[(16, 99)])])


def test_no_saves_no_passes() -> None:
    rows = [ExtendRow(1, 0, TEXT[:20], 0, True), ExtendRow(2, 3, TEXT[:4], 0, True, 0, 5)]
    for at_chunks in (False, True):
        assert recurrent_lists(rows, (16, 64), at_chunks).passes == ()


def test_two_states_of_a_prompt_are_saved_at_chunks_and_three_in_passes() -> None:
    two, three = ([ExtendRow(1, 4, TEXT[:6], 0, True, 0, 5, [(n, 8) for n in ends])] for ends in ((2, 5), (2, 3, 5)))
    found = recurrent_lists(two, (4,), True)
    assert not found.passes and found.saves == ([[8, 8]], [[2, 5]], ([8, 0, 8, 0],))
    assert len(recurrent_lists(three, (4,), True).passes) == 4


def test_what_is_packed_of_each_pass() -> None:
    rows = [ExtendRow(1, 4, TEXT[:6], 0, True, 0, 5, [(2, 8), (5, 9)]), ExtendRow(2, 0, TEXT[:3], 0, True)]
    assert recurrent_lists(rows, (), False).passes == (
        PassArrays([0, 0, 1], [5, -1, 0], [8, -1, 0], [0, 2, 6, 9], [4, 6, 0], None, ()),
        PassArrays([0], [8], [9], [0, 3], [6], [2, 3, 4], ()),
        PassArrays([0], [9], [0], [0, 1], [9], [5], ()),
    )
