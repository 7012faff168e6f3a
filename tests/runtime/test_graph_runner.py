"""Graph replays on a CPU: a closure over static buffers that are poisoned between replays."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hybridrt.base.errors import ConfigError
from hybridrt.base.forward_batch import ForwardBatch
from hybridrt.kernels.dense.moe import ExpertStack, fused_experts
from hybridrt.runtime.replay.graph_runner import ClosureRecorder, GraphRunner, buckets
from hybridrt.runtime.step.plan import DecodeRow, DecodeRows
from tests.attention.test_backends_verify import MODELS, random_tokens
from tests.models.test_models_parity import BASES, LENGTHS, requests, with_modes
from tests.support.by_hand import ByHand, Row, assert_close
from tests.support.checkpoints import CheckpointStore, has_replay
from tests.support.levels import sweep
from tests.support.session import Session, check_sample

SHAPES = (("classic", 1), ("intermediate", 3), ("replay", 1), ("replay", 3))
ROWS = 6


def runner_of(hand: ByHand, max_bs: int = ROWS, **changes: Any) -> GraphRunner:
    """A captured GraphRunner over the pools of `hand`; the last sampled token of row r is 10 + r."""
    tokens = hand.config.num_verify_tokens
    last_tokens = 10 + torch.arange(hand.plan.num_rows + 1, dtype=torch.int32)
    last_tokens[0] = 0
    graphs = GraphRunner(
        model=hand.model, backend=hand.backend, req_to_token_pool=hand.pools.req_to_token, last_tokens=last_tokens,
        max_bs=max_bs, **{"tokens_per_row": tokens, **changes},
    )  # fmt: skip
    graphs.capture()
    replay = graphs.replay

    def noted(*args: Any) -> Tensor:
        logits = replay(*args)
        hand.last_batch = graphs.prepared
        return logits

    graphs.replay = noted  # type: ignore[method-assign]
    return graphs


def inputs_of(rows: Sequence[Row], tokens: int) -> DecodeRows:
    """The graph finds the first token of a row itself; the others are drafts."""
    assert all(len(r.tokens) == tokens for r in rows)
    return DecodeRows.from_rows(DecodeRow(r.row, r.computed, 0, r.tokens[1:]) for r in rows)


def twins(path: Any, mode: str, tokens: int) -> tuple[ByHand, ByHand, dict[int, int]]:
    """Two equal set-ups with rows of 0 (admitted, nothing computed), 1, 5, ... tokens."""
    lengths = {1: 0, 2: 1, 3: 5, 4: 9, 5: 16, 6: 3}
    made = []
    for _ in range(2):
        hand = ByHand(path, mode=mode, tokens=tokens, rows=ROWS)
        generator = torch.Generator().manual_seed(1)
        hand.admit(*lengths)
        hand.extend(*(Row(row, 0, random_tokens(generator, n)) for row, n in lengths.items() if n))
        made.append(hand)
    return made[0], made[1], lengths


def padded_step(hand: ByHand, rows: Sequence[Row], padding: int) -> Tensor:
    """Logits of an eager step of real and padding rows. Like a graph it does not know the lengths on the host."""
    batch = hand.batch(rows, padding=padding)
    batch.seq_lens_cpu = None
    return hand.forward(batch)


def finish(hand: ByHand, accepted: Sequence[int], tokens: int) -> None:
    """What comes after a verify step; a plain decode graph commits itself."""
    if tokens > 1:
        hand.commit(accepted)


def test_the_largest_step_alone_runs_before_its_capture(checkpoints: CheckpointStore) -> None:
    """What it loads serves the others, and a run takes as long as a capture."""
    warmed: list[bool] = []

    class Noting(ClosureRecorder):
        def __call__(self, step: Callable[[], None], warm: bool = False) -> Callable[[], None]:
            warmed.append(warm)
            return super().__call__(step)

    graphs = runner_of(ByHand(checkpoints["falcon-plain"].path, rows=ROWS), recorder=Noting())
    assert warmed == [False] + [True] * (len(buckets(graphs.max_bs)) - 1)


@pytest.mark.parametrize(
    ("name", "mode", "tokens"),
    sweep([(name, *shape) for name in MODELS for shape in SHAPES[: 2 + 2 * has_replay(name)]], 13, thin=5),
)
def test_replay_equals_eager_padded_alike(name: str, mode: str, tokens: int, checkpoints: CheckpointStore) -> None:
    """Bit for bit, for every number of real rows, step after step; and neither touches any other row."""
    replayed, eager, lengths = twins(checkpoints[name].path, mode, tokens)
    graphs = runner_of(replayed)
    generator = torch.Generator().manual_seed(2)
    for count in (1, 2, 3, 4, 5, 6, 5, 4, 3, 2, 1):
        chosen = [*lengths][:count] if count % 2 else [*lengths][::-1][:count]
        rows = [Row(row, lengths[row], [10 + row, *random_tokens(generator, tokens - 1)]) for row in chosen]
        bucket = graphs.bucket(count)
        assert bucket is not None
        padding = bucket - count
        before = replayed.snapshot()
        got = graphs.replay(inputs_of(rows, tokens)).clone()
        wanted = padded_step(eager, rows, padding)
        accepted = [1 + (row + count) % tokens for row in chosen]
        finish(replayed, accepted, tokens)
        if tokens > 1:
            eager.commit([*accepted, *[0] * padding])
        else:
            eager.commit()
        assert torch.equal(got, wanted[: count * tokens])
        for what, tensor in eager.snapshot().items():
            assert torch.equal(tensor[:, 1:].nan_to_num(7.5), replayed.snapshot()[what][:, 1:].nan_to_num(7.5)), what
        slots = {replayed.slot(row) for row in chosen}
        for what, entries in replayed.touched(before).items():
            if what.startswith(("conv", "temporal")):
                assert entries <= slots, what
            elif not what.startswith(("keys", "values")):
                assert entries <= set(chosen), what
        for row, kept in zip(chosen, accepted):
            lengths[row] += kept


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize(
    "name", ["qwen-equal_heads", "nemotron-latent_experts_in_groups", "jamba-every_layer_sparse_tied"]
)
def test_padding_goes_to_no_expert(
    name: str, tokens: int, checkpoints: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a bucket's rows only the real ones choose experts, in every layer that has any."""
    hand, _, lengths = twins(checkpoints[name].path, "intermediate" if tokens > 1 else "classic", tokens)
    graphs = runner_of(hand)
    routed: list[Tensor] = []

    def noted(x: Tensor, experts: ExpertStack, weights: Tensor, ids: Tensor) -> Tensor:
        routed.append(ids)
        return fused_experts(x, experts, weights, ids)

    monkeypatch.setattr("hybridrt.layers.linear.fused_experts", noted)
    rows = [Row(row, lengths[row], [10 + row] * tokens) for row in (5, 2, 4)]
    logits = graphs.replay(inputs_of(rows, tokens))
    assert graphs.bucket(3) == 4 and routed
    for ids in routed:
        assert ids.shape[0] == 4 * tokens
        assert (ids[: 3 * tokens] >= 0).all() and (ids[3 * tokens :] == -1).all()
    assert graphs.buffers.logits[: 4 * tokens].isfinite().all() and logits.isfinite().all()


@pytest.mark.parametrize(("mode", "tokens"), SHAPES)
def test_capture_touches_nothing(mode: str, tokens: int, checkpoints: CheckpointStore) -> None:
    hand, _, _ = twins(checkpoints["qwen-dense"].path, mode, tokens)
    before = hand.snapshot()
    runner_of(hand)
    assert not any(hand.touched(before).values())


def test_a_request_of_one_token_is_real(checkpoints: CheckpointStore) -> None:
    """Its length is that of a padding row; its state and KV are written all the same."""
    hand, eager, _ = twins(checkpoints["falcon-plain"].path, "classic", 1)
    graphs = runner_of(hand)
    row = Row(1, 0, [11])
    got = graphs.replay(inputs_of([row], 1))
    assert torch.equal(got, padded_step(eager, [row], 0))
    assert_close(hand.state(1, 1), eager.state(1, 1), 0.0)
    assert all(tensor.any() for what, tensor in hand.state(1, 1).items() if what.startswith("state"))


def test_new_pages_are_entered_by_the_graph(checkpoints: CheckpointStore) -> None:
    hand, eager, _ = twins(checkpoints["falcon-plain"].path, "classic", 1)
    graphs = runner_of(hand)
    page = int(hand.pools.req_to_token.req_to_token[5, 16]) // 4
    hand.pools.req_to_token.req_to_token[5, 16:] = 0
    got = graphs.replay(inputs_of([Row(5, 16, [15])], 1), np.array([[page]]))
    assert torch.equal(got, padded_step(eager, [Row(5, 16, [15])], 0))
    assert hand.pools.req_to_token.req_to_token[5, 16:20].tolist() == [page * 4 + i for i in range(4)]


@pytest.mark.parametrize("max_bs", [1, 3, 8, 9, 63, 64, 65, 100, 256, 300, 512])
def test_buckets_cover_every_batch(max_bs: int) -> None:
    sizes = buckets(max_bs)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == max_bs
    for low, high in pairwise(sizes):
        assert high - low <= max(8, low // 4 + 1, 64 if low >= 256 else 16)


def test_buckets_are_captured_from_the_largest_down_and_capped_by_rows(checkpoints: CheckpointStore) -> None:
    hand, _, _ = twins(checkpoints["falcon-plain"].path, "classic", 1)
    sizes: list[int] = []
    prepare = hand.backend.prepare

    def noted(batch: ForwardBatch, **more: Any) -> None:
        sizes.append(batch.batch_size)
        prepare(batch, **more)

    hand.backend.prepare = noted
    graphs = runner_of(hand, max_bs=100)
    assert graphs.max_bs == hand.plan.num_rows == ROWS + 1
    assert sizes == buckets(ROWS + 1)[::-1]
    assert [graphs.bucket(n) for n in (1, 2, 3, 4, 5, 7, 8)] == [1, 2, 4, 4, 7, 7, None]


def test_graphs_ask_a_model_for_logits_of_its_own(checkpoints: CheckpointStore) -> None:
    """A class from outside may change them, after the head."""

    def halved(model: Any, hidden: Tensor) -> Tensor:
        return model.head.logits(hidden) / 2

    model: Any = ByHand(checkpoints["falcon-norm_after_gate"].path).model
    hidden, found = torch.randn(3, model.config.hidden_size), []
    for cls in (type(model), type("Changed", (type(model),), {"logits": halved})):
        model.__class__ = cls
        found.append(torch.full((3, model.config.vocab_size), torch.nan))
        model.logits_into(found[-1], hidden)
        torch.testing.assert_close(found[-1], model.logits(hidden))
    torch.testing.assert_close(found[0], 2 * found[1])


def test_graphs_need_a_row(checkpoints: CheckpointStore) -> None:
    with pytest.raises(ConfigError, match="max_bs is 0"):
        runner_of(ByHand(checkpoints["falcon-plain"].path), max_bs=0)


def test_decode_and_verify_graphs_share_a_backend(checkpoints: CheckpointStore) -> None:
    """Steps with drafts and steps without alternate, each with its own buffers."""
    hand, eager, lengths = twins(checkpoints["falcon-plain"].path, "intermediate", 3)
    verify = runner_of(hand)
    decode = runner_of(hand, tokens_per_row=1, max_bs=4)
    generator = torch.Generator().manual_seed(2)
    for tokens, chosen in ((3, (4, 2, 1, 5, 6)), (1, (2, 4)), (3, (3,)), (1, (6, 5, 4, 3)), (3, (1, 2))):
        rows = [Row(row, lengths[row], [10 + row, *random_tokens(generator, tokens - 1)]) for row in chosen]
        graphs = verify if tokens > 1 else decode
        got = graphs.replay(inputs_of(rows, tokens)).clone()
        wanted = padded_step(eager, rows, (graphs.bucket(len(rows)) or 0) - len(rows))
        assert torch.equal(got, wanted[: len(got)])
        finish(hand, [2] * len(rows), tokens)
        if tokens > 1:
            eager.commit([2] * len(rows))
        for row in chosen:
            lengths[row] += min(tokens, 2)
            assert_close(hand.state(row, lengths[row]), eager.state(row, lengths[row]), 0.0)


@with_modes(BASES, 13, thin=3)
def test_an_engine_on_graphs_gives_the_same_tokens(name: str, state_mode: str, checkpoints: CheckpointStore) -> None:
    """Decode steps replay graphs, also in mixed steps; larger batches than the largest bucket run eagerly."""
    checkpoint = checkpoints[name]
    session = Session(checkpoint.path, state_mode=state_mode, page_size=4)
    runner, replayed = session.runner, 0
    graphs = GraphRunner(
        model=runner.model, backend=runner.backend, req_to_token_pool=runner.pools.req_to_token,
        last_tokens=runner.last_tokens, max_bs=3,
    )  # fmt: skip
    graphs.capture()
    replay = graphs.replay

    def counting(*args: Any) -> Tensor:
        nonlocal replayed
        replayed += 1
        return replay(*args)

    graphs.replay = counting  # type: ignore[method-assign]
    runner.graphs = {1: graphs}
    samples = session.run(requests(*LENGTHS, steps=20), chunk=9, gap=2)
    assert session.num_mixed() > 0
    decode_steps = [len(plan.decode) for plan in session.plans if plan.decode]
    assert 0 < replayed < len(decode_steps) and max(decode_steps) == 4
    for sample in samples:
        check_sample(checkpoint, sample, name)
