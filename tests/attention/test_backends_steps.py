"""What one step may touch, and what it may not: padding, idle and mixed batches, rejected drafts, rings, trees."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridrt.base.forward_batch import ForwardMode, SpecInfo
from hybridrt.kernels.core.chunk_plan import plan_chunks
from tests.attention.test_backends_verify import MODELS, oracle, random_tokens
from tests.support.by_hand import ByHand, Row, assert_close
from tests.support.checkpoints import CheckpointStore, has_replay
from tests.support.levels import sweep
from tests.support.tree_paths import ancestry

MODES = (("classic", 1), ("intermediate", 4), ("replay", 1), ("replay", 4))
STEPS = [(name, *mode) for name in MODELS for mode in MODES[: 2 + 2 * has_replay(name)]]
SLOT_TENSORS, ROW_TENSORS = ("conv", "temporal"), ("intermediate", "ring", "start", "length")


def started(
    path: Path, mode: str, tokens: int, lengths: dict[int, int], **changes: Any
) -> tuple[ByHand, dict[int, list[int]]]:
    """Rows that have prefilled prompts of the given lengths, and the prompts."""
    generator = torch.Generator().manual_seed(3)
    hand = ByHand(path, mode=mode, tokens=tokens, **changes)
    known = {row: random_tokens(generator, n) for row, n in lengths.items()}
    hand.admit(*known)
    hand.extend(*(Row(row, 0, prompt) for row, prompt in known.items()))
    return hand, known


def pages(hand: ByHand, row: Row, group: int) -> set[int]:
    table = hand.pools.req_to_token.tables[row.row, group]
    return {int(table[row.computed + i]) // hand.plan.page_size for i in range(len(row.tokens))}


@pytest.mark.parametrize(("name", "mode", "tokens"), sweep(STEPS, 13, thin=3))
def test_a_step_touches_only_its_own_rows(name: str, mode: str, tokens: int, checkpoints: CheckpointStore) -> None:
    """Decode, verify and extend steps with padding rows: no byte of another slot, row or page changes, and what the
    padding rows give is finite."""
    hand, known = started(checkpoints[name].path, mode, tokens, {1: 6, 2: 3, 4: 9, 5: 1})
    generator = torch.Generator().manual_seed(9)
    for kind in ("decode", "extend", "decode"):
        width = tokens if kind == "decode" else 7
        rows = [Row(row, len(known[row]), random_tokens(generator, width)) for row in (4, 2)]
        before = hand.snapshot()
        batch = hand.batch(rows, padding=3) if kind == "decode" else hand.batch((), rows, padding=3)
        assert hand.forward(batch).isfinite().all()
        if kind == "decode":
            hand.commit([1, tokens, 0, 0, 0]) if tokens > 1 else hand.commit()
        kept = (1, tokens) if kind == "decode" else (7, 7)
        for row, count in zip(rows, kept):
            known[row.row] += row.tokens[:count]
        for what, entries in hand.touched(before).items():
            if what.startswith(SLOT_TENSORS):
                allowed = {hand.slot(4), hand.slot(2)}
            elif what.startswith(ROW_TENSORS):
                allowed = {4, 2}
            else:
                allowed = set[int]().union(*[pages(hand, row, hand.kv_group(what)) for row in rows])
            assert entries <= allowed, f"{kind}: {what} {entries - allowed} changed"
            if what.startswith("keys"):
                assert entries == allowed
        if mode == "replay" and kind == "extend":
            break  # extend rows of one request come before its decode rows


@pytest.mark.parametrize(("name", "mode", "tokens"), sweep(STEPS, 13, thin=3))
def test_scratch_stays_finite(name: str, mode: str, tokens: int, checkpoints: CheckpointStore) -> None:
    hand, _ = started(checkpoints[name].path, mode, tokens, {3: 5})
    for step in range(20):
        hand.forward(hand.batch([Row(3, 5 + step, [7] * tokens)], padding=2))
        hand.commit([1, 0, 0]) if tokens > 1 else hand.commit()
    for what, tensor in hand.snapshot().items():
        assert tensor[:, 0].isfinite().all() if tensor.is_floating_point() else not tensor[:, 0].any(), what


@pytest.mark.parametrize("name", sweep(MODELS, 2))
def test_rejected_drafts_leave_the_state_alone(name: str, checkpoints: CheckpointStore) -> None:
    """Before the commit, and after a commit of nothing, a verify step has written no recurrent state."""
    hand, _ = started(checkpoints[name].path, "intermediate", 4, {1: 6})
    before = hand.state(1, 6)
    hand.forward(hand.batch([Row(1, 6, [5, 6, 7, 8])]))
    assert_close(hand.state(1, 6), before, 0.0)
    hand.commit([0])
    assert_close(hand.state(1, 6), before, 0.0)


@pytest.mark.parametrize(("name", "mode", "tokens"), sweep(STEPS, 13, thin=3))
def test_idle_steps_give_empty_tensors(name: str, mode: str, tokens: int, checkpoints: CheckpointStore) -> None:
    hand, _ = started(checkpoints[name].path, mode, tokens, {1: 3})
    before = hand.snapshot()
    batch = hand.batch(mode=ForwardMode.IDLE)
    assert hand.forward(batch).shape == (0, hand.target.model_config.vocab_size)
    hand.commit()
    assert not any(hand.touched(before).values())


@pytest.mark.parametrize(("name", "mode", "tokens"), sweep(STEPS, 13, thin=3))
def test_mixed_batch_equals_rows_alone(name: str, mode: str, tokens: int, checkpoints: CheckpointStore) -> None:
    """Two decode (or verify) rows, a new prompt, a later chunk and a last chunk of one token."""
    lengths = {1: 6, 2: 17, 3: 20, 4: 5}
    hand, _ = started(checkpoints[name].path, mode, tokens, lengths)
    alone, _ = started(checkpoints[name].path, mode, tokens, lengths)
    for each in (hand, alone):
        each.admit(5)
    generator = torch.Generator().manual_seed(4)
    decode = [Row(row, lengths[row], random_tokens(generator, tokens)) for row in (2, 1)]
    extend = [Row(5, 0, random_tokens(generator, 11)), Row(3, 20, random_tokens(generator, 19)), Row(4, 5, [9])]
    accepted = [1, tokens]

    mixed = hand.forward(hand.batch(decode, extend))
    hand.commit(accepted) if tokens > 1 else hand.commit()
    parts = []
    for row, count in zip(decode, accepted):
        parts.append(alone.verify([row], [count]) if tokens > 1 else alone.decode(row))
    parts += [alone.extend(row) for row in extend]

    torch.testing.assert_close(mixed, torch.cat(parts), rtol=0, atol=1e-5)
    ends = [r.computed + n for r, n in zip((*decode, *extend), (*accepted, 11, 19, 1))]
    for row, length in zip((*decode, *extend), ends):
        assert_close(hand.state(row.row, length), alone.state(row.row, length))


@pytest.mark.parametrize(
    ("name", "mode"), sweep([(name, mode) for name, mode, tokens in STEPS if tokens == 1], 10, thin=7)
)
def test_prefill_then_decode_equals_longer_prefill(name: str, mode: str, checkpoints: CheckpointStore) -> None:
    """Logits, recurrent state, conv window and KV, wherever prefill ends and decoding begins."""
    tokens = random_tokens(torch.Generator().manual_seed(6), 36)
    whole = ByHand(checkpoints[name].path)
    whole.admit(2)
    wanted = whole.extend(Row(2, 0, tokens))
    for split in (1, 2, 3, 16, 17, 33):
        hand = ByHand(checkpoints[name].path, mode=mode)
        hand.admit(2)
        parts = [hand.extend(Row(2, 0, tokens[:split]))]
        parts += [hand.decode(Row(2, i, [tokens[i]])) for i in range(split, len(tokens))]
        torch.testing.assert_close(torch.cat(parts), wanted, rtol=0, atol=5e-5)
        assert_close(hand.state(2, len(tokens)), whole.state(2, len(tokens)), 2e-5)


@pytest.mark.parametrize("name", sweep(MODELS, 6, thin=5))
def test_chunked_prefill_equals_whole_prefill(name: str, checkpoints: CheckpointStore) -> None:
    """States too, for chunk ends on both sides of the scan's own chunks."""
    tokens = random_tokens(torch.Generator().manual_seed(6), 80)
    whole = ByHand(checkpoints[name].path)
    whole.admit(2)
    wanted = whole.extend(Row(2, 0, tokens))
    for ends in ((1, 2, 3, 80), (15, 31, 80), (16, 64, 80), (17, 18, 65, 80), (5, 79, 80), tuple(range(1, 81))):
        hand = ByHand(checkpoints[name].path)
        hand.admit(2)
        parts = [hand.extend(Row(2, a, tokens[a:b])) for a, b in pairwise((0, *ends))]
        torch.testing.assert_close(torch.cat(parts), wanted, rtol=0, atol=5e-5)
        assert_close(hand.state(2, 80), whole.state(2, 80), 2e-5)


@pytest.mark.parametrize("name", sweep([name for name in MODELS if has_replay(name)], 2))
def test_prompt_chunks_leave_the_ring_empty(name: str, checkpoints: CheckpointStore) -> None:
    """A last chunk of one token is a chunk and no decode step."""
    hand, _ = started(checkpoints[name].path, "replay", 1, {1: 6})
    hand.extend(Row(1, 6, [5]))
    assert int(hand.mamba.ring_length[1]) == 0
    hand.decode(Row(1, 7, [6]))
    assert int(hand.mamba.ring_length[1]) == 1


@pytest.mark.parametrize(("name", "mode", "tokens"), sweep(STEPS, 13, thin=3))
def test_a_new_tenant_sees_nothing_of_the_last(name: str, mode: str, tokens: int, checkpoints: CheckpointStore) -> None:
    """Row, slot, ring and pages of a request that decoded for a while go to another one."""
    hand, _ = started(checkpoints[name].path, mode, tokens, {1: 30})
    for step in range(11):
        hand.forward(hand.batch([Row(1, 30 + step, [7 + step] * tokens)]))
        hand.commit([1]) if tokens > 1 else hand.commit()
    fresh, prompt = started(checkpoints[name].path, mode, tokens, {1: 4})
    hand.admit(1)
    hand.extend(Row(1, 0, prompt[1]))
    assert_close(hand.state(1, 4), fresh.state(1, 4), 0.0)
    row = Row(1, 4, [11] * tokens)
    torch.testing.assert_close(hand.forward(hand.batch([row])), fresh.forward(fresh.batch([row])), rtol=0, atol=0)


@pytest.mark.parametrize("name", sweep([name for name in MODELS if has_replay(name)], 4, thin=3))
def test_a_snapshot_consumes_nothing(name: str, checkpoints: CheckpointStore) -> None:
    """At any fill of the ring: the state as a prefill leaves it, and the row decodes on as if none had been taken."""
    path = checkpoints[name].path
    hand, known = started(path, "replay", 1, {2: 5})
    generator = torch.Generator().manual_seed(2)
    tokens = known[2] + random_tokens(generator, 9)
    rows, spare = torch.tensor([[2], [6]])
    for i in range(5, 15):
        before = hand.snapshot()
        with torch.inference_mode():
            hand.mamba.snapshot(rows, spare)
        assert set().union(*hand.touched(before).values()) == {6}
        plain = ByHand(path, rows=1)
        plain.admit(1)
        plain.extend(Row(1, 0, tokens[:i]))
        where = torch.tensor([6, plain.slot(1)], dtype=torch.int32)
        for layer_id in hand.mamba.layer_ids:
            got, wanted = (h.mamba.layer_cache(layer_id).temporal for h in (hand, plain))
            torch.testing.assert_close(got[6], wanted[plain.slot(1)], rtol=0, atol=1e-5)
            position = torch.tensor([i], dtype=torch.int32)
            windows = [h.mamba.conv_window(layer_id, s, position) for h, s in zip((hand, plain), where.split(1))]
            torch.testing.assert_close(*windows, rtol=0, atol=1e-5)
        if i < 14:
            hand.decode(Row(2, i, [tokens[i]]))


PARENTS = [[-1, 0, 0, 1, 1, 2, 3], [-1, 0, 1, 2, 0, 4, 4]]


@pytest.mark.parametrize("name", sweep(MODELS, 2))
def test_tree_of_drafts(name: str, checkpoints: CheckpointStore) -> None:
    """Each node's logits are those of the chain of its ancestors; the tree leaves recurrent and conv state alone."""
    checkpoint = checkpoints[name]
    hand, known = started(checkpoint.path, "intermediate", 7, {1: 9, 4: 2}, topk=2)
    generator = torch.Generator().manual_seed(8)
    rows = [Row(row, len(k), random_tokens(generator, 7)) for row, k in known.items()]
    parents = torch.tensor(PARENTS, dtype=torch.int32)
    paths = [[ancestry(line, node) for node in range(7)] for line in PARENTS]
    mask = torch.zeros(2, 7, 7, dtype=torch.bool)
    for b, nodes in enumerate(paths):
        for node, path in enumerate(nodes):
            mask[b, node, path] = True
    batch = hand.batch(rows, spec=SpecInfo(7, parents, mask))
    depths = torch.tensor([[len(path) - 1 for path in nodes] for nodes in paths])
    batch.positions = (batch.seq_lens[:, None] - 7 + depths).flatten().int()
    before = {row: hand.state(row, len(k)) for row, k in known.items()}
    logits = hand.forward(batch).unflatten(0, (-1, 7))
    for row, nodes, got in zip(rows, paths, logits):
        for node, path in enumerate(nodes):
            chain = known[row.row] + [row.tokens[i] for i in path]
            torch.testing.assert_close(got[node], oracle(checkpoint, chain, 1)[0], rtol=0, atol=5e-4)
        assert_close(hand.state(row.row, len(known[row.row])), before[row.row], 0.0)


def test_metadata_of_a_mixed_step(checkpoints: CheckpointStore) -> None:
    hand, _ = started(checkpoints["falcon-plain"].path, "replay", 1, {1: 6, 2: 20, 3: 3})
    hand.admit(4)
    batch = hand.batch([Row(3, 3, [5])], [Row(4, 0, [5] * 18), Row(2, 20, [6] * 15)])
    linear = hand.backend.linear_attn_backend
    linear.prepare(batch)
    step = linear.begin_step(batch)
    mixed = step.extends[16]
    assert step.decode.buffers.state_slots.tolist() == [hand.slot(3)]
    assert mixed.write_state_slots.tolist() == [hand.slot(4), hand.slot(2)] == mixed.read_state_slots.tolist()
    assert mixed.prompts.has_initial_state.tolist() == [False, True]
    # A chunk ends with its request and at multiples of chunk_size 16 of the absolute position.
    assert mixed.prompts.plan.cu_chunk_seqlens.tolist() == [0, 16, 18, 30, 33]
    assert mixed.prompts.plan.seq_idx.tolist() == [0, 0, 1, 1]
    assert mixed.prompts.query_start_loc.tolist() == [0, 18, 33]
    assert step.decode.buffers.start_positions.tolist() == [3]
    decode, extend = (linear.begin_step(linear.restrict_to_segment(batch, decode=decode)) for decode in (True, False))
    assert (decode.num_tokens, extend.num_tokens, step.num_tokens) == (1, 33, 34)


@pytest.mark.parametrize("where", ["decode", "extend"])
def test_padding_rows_get_slot_minus_one(where: str, checkpoints: CheckpointStore) -> None:
    """By number, not by length: a real request of length 1 is real."""
    hand = ByHand(checkpoints["falcon-plain"].path)
    hand.admit(1, 2)
    rows = [Row(1, 0, [5]), Row(2, 0, [6])]
    batch = hand.batch(rows, padding=2) if where == "decode" else hand.batch((), rows, padding=2)
    linear = hand.backend.linear_attn_backend
    linear.prepare(batch)
    step = linear.begin_step(batch)
    slots = step.decode.buffers.state_slots if where == "decode" else step.extends[16].write_state_slots
    assert slots.tolist() == [hand.slot(1), hand.slot(2), -1, -1]


def test_chunk_plan_vector() -> None:
    """A hand-made case: chunks respect the boundaries of requests and of earlier steps."""
    case = json.loads((Path(__file__).parents[1] / "vectors" / "mamba2_chunks.json").read_text())
    plan = plan_chunks(case["computed"], case["new"], case["chunk_size"])
    for name in ("cu_chunk_seqlens", "seq_idx", "last_chunk"):
        assert getattr(plan, name).tolist() == case[name]
