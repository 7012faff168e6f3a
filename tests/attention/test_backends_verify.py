"""Verify steps against plain decoding, for every accepted length, both ways to roll the recurrent state back."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybridrt.base.errors import BackendError
from tests.support.by_hand import ByHand, Row, assert_close
from tests.support.checkpoints import VOCAB, Checkpoint, CheckpointStore, has_replay
from tests.support.levels import drawn, sweep

MODELS = (
    "falcon-norm_after_gate", "nemotron-one_group_biases", "qwen-unequal_head_dims", "jamba-dense",
    "swa_ssm-plain", "granite-groups_biases", "olmo-plain", "ling-softplus_biases",
    "lara-plain",
)  # fmt: skip
VERIFYING = [(name, mode) for name in MODELS for mode in ("intermediate", "replay")[: 1 + has_replay(name)]]


def oracle(checkpoint: Checkpoint, tokens: list[int], count: int) -> Tensor:
    """transformers' logits at the last `count` of `tokens`."""
    with torch.no_grad():
        logits: Tensor = checkpoint.model(torch.tensor([tokens]), use_cache=False).logits[0, -count:]
    return logits


def random_tokens(generator: torch.Generator, count: int) -> list[int]:
    return torch.randint(3, VOCAB, (count,), generator=generator).tolist()


def reference_states(checkpoint: Checkpoint, known: dict[int, list[int]]) -> dict[int, dict[str, Tensor]]:
    """Of the same rows, decoded one token at a time."""
    plain = ByHand(checkpoint.path)
    if known:
        plain.admit(*known)
    for position in range(max(map(len, known.values()), default=0)):
        plain.decode(*(Row(row, position, k[position : position + 1]) for row, k in known.items() if position < len(k)))
    return {row: plain.state(row, len(tokens)) for row, tokens in known.items()}


@pytest.mark.parametrize(
    ("name", "mode", "tokens"), sweep([(*way, tokens) for way in VERIFYING for tokens in (2, 5, 9, 8, 16)], 23, thin=9)
)
def test_verify_equals_decodes_for_each_accepted_length(
    name: str, mode: str, tokens: int, checkpoints: CheckpointStore
) -> None:
    """Rows of several lengths; step after step, each row accepts another number, until all numbers have been."""
    checkpoint, generator = checkpoints[name], torch.Generator().manual_seed(tokens)
    hand = ByHand(checkpoint.path, tokens=tokens, mode=mode, max_len=160)
    known = {row: random_tokens(generator, count) for row, count in ((3, 1), (1, 7), (4, 18))}
    hand.admit(*known)
    hand.extend(*(Row(row, 0, prompt) for row, prompt in known.items()))
    counts = [*range(1, tokens + 1)][: 160 // (tokens + 1) - 3]
    for step, count in enumerate([*counts, tokens, 1]):
        rows = [Row(row, len(k), random_tokens(generator, tokens)) for row, k in known.items()]
        accepted = [(count + step * i - 1) % tokens + 1 for i in range(len(rows))]
        accepted = [min(a, 160 - tokens - r.computed) for a, r in zip(accepted, rows)]
        if min(accepted) < 1:
            break
        logits = hand.verify(rows, accepted, padding=step % 3).unflatten(0, (-1, tokens))
        assert logits[len(rows) :].isfinite().all()
        for row, got, kept in zip(rows, logits, accepted):
            wanted = oracle(checkpoint, known[row.row] + list(row.tokens), tokens)
            torch.testing.assert_close(got, wanted, rtol=0, atol=5e-4)
            known[row.row] += row.tokens[:kept]
    for row, history in known.items():
        plain = ByHand(checkpoint.path, rows=1, max_len=160)
        plain.admit(1)
        plain.extend(Row(1, 0, history))
        assert_close(hand.state(row, len(history)), plain.state(1, len(history)), 2e-4)


@pytest.mark.parametrize(("name", "mode", "examples"), drawn(VERIFYING, 18, 5, 2, thin=4))
def test_any_sequence_of_steps(name: str, mode: str, examples: int, checkpoints: CheckpointStore) -> None:
    """Verify steps of any width, plain decode steps, and both next to prompt chunks, in any order."""

    @settings(max_examples=examples, deadline=None, derandomize=True)
    @given(data=st.data())
    def steps(data: st.DataObject) -> None:
        play(checkpoints[name], mode, data)

    steps()


def play(checkpoint: Checkpoint, mode: str, data: st.DataObject) -> None:
    most = data.draw(st.sampled_from([2, 4, 7, 8]), "T")
    hand = ByHand(checkpoint.path, tokens=most, mode=mode)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 999), "seed"))
    known: dict[int, list[int]] = {}
    for _ in range(data.draw(st.integers(3, 12), "steps")):
        free = [row for row in range(1, 6) if row not in known]
        fresh = free[: data.draw(st.integers(0, 2), "new rows")]
        new = [Row(row, 0, random_tokens(generator, data.draw(st.integers(1, 9), "prompt"))) for row in fresh]
        width = data.draw(st.integers(1, most), "width")
        old = [Row(row, len(k), random_tokens(generator, width)) for row, k in known.items()]
        if new:
            hand.admit(*(r.row for r in new))
        if not old and not new:
            continue
        accepted = [data.draw(st.integers(1, width), "accepted") for _ in old]
        padding = data.draw(st.integers(0, 2), "padding") if not new else 0
        logits = hand.forward(hand.batch(old, new, padding=padding))
        if old and width == 1:
            hand.commit()
        elif old:
            hand.commit([*accepted, *[0] * padding])
        start = 0
        for row, kept in zip([*old, *new], [*accepted, *(len(r.tokens) for r in new)]):
            history = known.get(row.row, []) + list(row.tokens)
            count = len(row.tokens)
            got, wanted = logits[start : start + count], oracle(checkpoint, history, count)
            torch.testing.assert_close(got, wanted, rtol=0, atol=5e-4)
            known[row.row] = history[: len(history) - count + kept]
            start += count
    for row, state in reference_states(checkpoint, known).items():
        assert_close(hand.state(row, len(known[row])), state, 2e-4)


@pytest.mark.parametrize(("name", "mode"), sweep(VERIFYING, 9, thin=4))
def test_steps_without_drafts_between_verify_steps(name: str, mode: str, checkpoints: CheckpointStore) -> None:
    """Plain decode steps in any number; what verify steps stored for going back is not read by them."""
    checkpoint, generator = checkpoints[name], torch.Generator().manual_seed(7)
    hand = ByHand(checkpoint.path, tokens=8, mode=mode)
    known = {row: random_tokens(generator, 3) for row in range(1, 6)}
    hand.admit(*known)
    hand.extend(*(Row(row, 0, prompt) for row, prompt in known.items()))
    for plain_steps in (0, 1, 9, 0, 2):
        rows = [Row(row, len(k), random_tokens(generator, 8)) for row, k in known.items()]
        accepted = [8, 7, 1, 3, 2]
        logits = hand.verify(rows, accepted).unflatten(0, (-1, 8))
        for row, got, kept in zip(rows, logits, accepted):
            wanted = oracle(checkpoint, known[row.row] + list(row.tokens), 8)
            torch.testing.assert_close(got, wanted, rtol=0, atol=5e-4)
            known[row.row] += row.tokens[:kept]
        decoded = []
        for _ in range(plain_steps):
            rows = [Row(row, len(k), random_tokens(generator, 1)) for row, k in known.items()]
            decoded.append(hand.decode(*rows))
            for row in rows:
                known[row.row] += row.tokens
        for tokens, got in zip(known.values(), zip(*decoded)):
            torch.testing.assert_close(torch.stack(got), oracle(checkpoint, tokens, plain_steps), rtol=0, atol=5e-4)


def test_a_pool_takes_no_step_wider_than_it_was_made_for(checkpoints: CheckpointStore) -> None:
    path = checkpoints["falcon-plain"].path
    for mode, tokens, wrong in (("replay", 4, 5), ("replay", 1, 2), ("intermediate", 4, 5)):
        hand = ByHand(path, tokens=tokens, mode=mode)
        hand.admit(1)
        hand.extend(Row(1, 0, [5, 6]))
        before = hand.snapshot()
        with pytest.raises(BackendError, match=f"{wrong} tokens a row.* made for {tokens}"):
            hand.forward(hand.batch([Row(1, 2, [7] * wrong)]))
        assert not any(hand.touched(before).values())
