"""Replays of prefill and mixed steps on a CPU: a closure over static buffers that are poisoned between replays."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from hybridrt.base.forward_batch import ForwardBatch
from hybridrt.engine.core.engine import Engine
from hybridrt.engine.core.step_cost import StepWork
from hybridrt.kernels.attention import paged_attention_triton
from hybridrt.kernels.core import launch
from hybridrt.kernels.core.packed import map_arrays
from hybridrt.kernels.core.records import TokenInputs
from hybridrt.runtime.replay.graph_runner import ClosureRecorder, CudaGraphRecorder
from hybridrt.runtime.replay.prompt_graphs import PromptGraphs, needed_buckets, splits
from hybridrt.runtime.step import pack_padded as prompt_columns
from hybridrt.runtime.step.pack import StepArrays, enter_tables, fill_decode, make_batch
from hybridrt.runtime.step.pack_padded import Bucket, PaddedStep, StateSaves
from hybridrt.runtime.step.plan import DecodeRow, DecodeRows, ExtendRow, StepPlan
from hybridrt.runtime.step.recurrent_arrays import set_recurrent
from hybridrt.runtime.step.sampling_table import SamplingTable
from tests.attention.test_extend_passes import TEXT, check_saved
from tests.models.test_models_parity import prompts
from tests.support.by_hand import ByHand
from tests.support.checkpoints import CheckpointStore, has_replay
from tests.support.levels import sweep
from tests.support.plain_arrays import pack_plainly
from tests.support.prompt_steps import Play, capture_prompts
from tests.support.session import Sample, Session, check_sample, greedy

SIZES = ((0, 3), (16, 48))
ROWS, SPARE = 9, 11  # request rows; the first state slot that belongs to none
MODELS = (
    "falcon-norm_after_gate", "nemotron-experts", "qwen-plain", "jamba-plain", "lfm2_moe-plain", "kimi-plain",
    "swa_ssm-plain", "minimax-plain", "olmo-plain", "ling-plain", "zamba2-plain", "ling25-plain", "lfm3-plain",
    "lara-plain",
)  # fmt: skip
CASES = [(name, ("classic", "replay")[saves and has_replay(name)], saves) for saves in (True, False) for name in MODELS]


@pytest.fixture(autouse=True)
def short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small buckets have room for as many prompts as large ones. References are slow on padding."""
    monkeypatch.setattr(prompt_columns, "TOKENS_OF_ONE", 6)
    monkeypatch.setattr(prompt_columns, "TAIL", 6)


def last_tokens() -> Tensor:
    """Of request row r: 10 + r."""
    found = 10 + torch.arange(ROWS + 2, dtype=torch.int32)
    found[0] = 0
    return found


def runner_of(hand: ByHand, saves: bool, exact_lens: bool = True, sizes: Any = SIZES) -> PromptGraphs:
    constants = SamplingTable(ROWS, hand.model.config.vocab_size, torch.device("cpu"))
    graphs = PromptGraphs(
        model=hand.model, backend=hand.backend, req_to_token_pool=hand.pools.req_to_token, last_tokens=last_tokens(),
        max_bs=3, max_tokens=48, saves=saves, sizes=sizes,
        enter_tables=partial(enter_tables, hand.pools, constants),
    )  # fmt: skip
    graphs.exact_lens = exact_lens
    graphs.capture()
    return graphs


def twins(path: Any, mode: str, **config: Any) -> tuple[ByHand, ByHand]:
    """Two equal set-ups whose rows are admitted."""
    made = []
    for _ in range(2):
        hand = ByHand(path, mode=mode, rows=ROWS, cache_slots=8, **config)
        hand.admit(*range(1, ROWS + 1))
        made.append(hand)
    return made[0], made[1]


def padded_batch(hand: ByHand, plan: StepPlan, bucket: Bucket, saves: bool) -> tuple[ForwardBatch, Tensor]:
    """A step as an eager batch with the rows of a bucket, and the places that it samples from."""
    sizes, table, n = hand.backend.chunk_sizes, hand.pools.req_to_token, bucket.decode_rows
    kind = (
        (StateSaves.AT_CHUNKS if hand.backend.saves_at_chunks else StateSaves.SECOND_PASS) if saves else StateSaves.NONE
    )
    on_host = pack_plainly(plan, bucket, sizes, kind, hand.backend.seq_len_fill, table.num_groups)
    arrays: StepArrays[Tensor] = map_arrays(torch.from_numpy, on_host)
    prompts, decoded = arrays.prompts, TokenInputs.allocate(n, torch.device("cpu"), table.num_groups)
    assert on_host.prompts is not None and prompts is not None
    if n:
        fill_decode(decoded, arrays, n, None, last_tokens(), table)
    slots = table.token_slots(prompts.rows, prompts.positions)
    inputs = decoded.then(TokenInputs(prompts.input_ids, prompts.positions, slots))
    batch = make_batch(
        hand.backend, arrays.rows, arrays.seq_lens, prompts.query_start_loc, inputs, n, None, len(plan.decode),
        seq_lens_cpu=on_host.seq_lens.tolist(), query_lens_cpu=np.diff(on_host.prompts.query_start_loc).tolist(),
    )  # fmt: skip
    set_recurrent(batch, on_host.prompts.recurrent, prompts.recurrent, sizes)
    return batch, prompts.sample_at


@torch.inference_mode()
def eager(hand: ByHand, plan: StepPlan, bucket: Bucket, saves: bool) -> Tensor:
    """Logits of a step of the bucket's rows, which is committed."""
    batch, places = padded_batch(hand, plan, bucket, saves)
    hand.backend.prepare(batch)
    logits = hand.model.logits(hand.model(batch).index_select(0, places))
    if batch.num_decode_rows:
        hand.backend.commit(batch)
    return logits


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(7.5), b.nan_to_num(7.5))


@pytest.mark.parametrize(("name", "mode", "saves"), sweep(CASES, 11, thin=3))
def test_replay_equals_eager_padded_alike(name: str, mode: str, saves: bool, checkpoints: CheckpointStore) -> None:
    """Bit for bit, step after step, and no other row changes. A replay reads nothing of the step before."""
    check_equal(checkpoints[name].path, mode, saves)


@pytest.mark.parametrize("name", ["mamba2-plain", "qwen-plain"])
def test_replays_with_states_in_8_bits_equal_eager_steps(name: str, checkpoints: CheckpointStore) -> None:
    check_equal(checkpoints[name].path, "replay", True, mamba_ssm_dtype="int8")


def check_equal(path: Any, mode: str, saves: bool, **config: Any) -> None:
    replayed, other = twins(path, mode, **config)
    graphs, before = runner_of(replayed, saves), replayed.snapshot()
    play = Play(dict.fromkeys(range(1, ROWS + 1), 0), SPARE if saves else None, seed=3, most_saves=graphs.saves.most)
    for _ in range(6):
        plan = play.step()
        assert sorted(graphs.captured) == sorted(graphs.buckets), "what the cost of steps knows"
        bucket = graphs.bucket(plan)
        assert bucket is not None
        with torch.inference_mode():
            got = graphs.replay(plan, bucket)
        wanted = eager(other, plan, bucket, saves)[: len(got.rows)]
        assert got.logits.isfinite().all() and torch.equal(got.logits, wanted)
        after = replayed.snapshot()
        for what, tensor in other.snapshot().items():
            assert same(tensor[:, 1:], after[what][:, 1:]), what
            if what.startswith(("conv", "temporal")):
                assert same(before[what][:, :1], after[what][:, :1]), f"padding has written {what}"
        sampled = [*plan.decode.rows.tolist(), *(row.row for row in plan.extend if row.sample)]
        assert got.rows.tolist() == got.on_host[0].tolist() == sampled


@pytest.mark.slow
@torch.inference_mode()
@pytest.mark.parametrize("name", ["falcon-plain", pytest.param("falcon_mamba-plain", marks=pytest.mark.soak)])
def test_kernels_see_bounds_alone(
    name: str, provider: str, checkpoints: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton kernels with the host's numbers of the capture, as in a CUDA graph. Saved states are those of shorter
    prompts."""
    if provider == "torch":
        pytest.skip("reference operations need each step's own lengths")
    monkeypatch.setattr(prompt_columns, "TOKENS_OF_ONE", 8)
    monkeypatch.setattr(prompt_columns, "CACHED_PAGES", 16)  # a program each, also for places without a page
    monkeypatch.setattr(paged_attention_triton, "multiprocessors", lambda device: 12)  # programs, most without work
    path = checkpoints[name].path
    replayed, other = twins(path, "classic", attention_backend="triton")
    graphs = runner_of(replayed, True, exact_lens=False, sizes=((2,), (16,)))
    saving = ExtendRow(4, 0, TEXT[4:13], 0, True, saves=[(3, SPARE + 1), (6, SPARE)])
    first = StepPlan(extend=[saving, ExtendRow(2, 0, TEXT[9:14], 0, True)])
    behind = [ExtendRow(2, 5, TEXT[14:16], 0, True), ExtendRow(5, 0, TEXT[3:5], 0, True, read_state_slot=SPARE)]
    second = StepPlan(decode=DecodeRows.from_rows([DecodeRow(4, 9, 0)]), extend=behind)
    for plan in (first, second):
        bucket = graphs.bucket(plan)
        assert bucket is not None
        with torch.inference_mode():
            got = graphs.replay(plan, bucket)
        wanted = eager(other, plan, bucket, True)[: len(got.rows)]
        torch.testing.assert_close(got.logits, wanted, rtol=1e-4, atol=1e-4)
        after = replayed.snapshot()
        for what, tensor in other.snapshot().items():
            close = torch.allclose(tensor[:, 1:], after[what][:, 1:], rtol=1e-4, atol=1e-4, equal_nan=True)
            assert close, what
        if plan is first:
            for end, slot in saving.saves:
                check_saved(replayed, path, saving, end, slot)


@pytest.mark.parametrize(
    ("name", "mode"),
    sweep([("falcon-norm_after_gate", "replay"), ("kimi-plain", "classic"), ("jamba-plain", "classic")], 3),
)
def test_an_engine_on_graphs_gives_the_same_tokens(name: str, mode: str, checkpoints: CheckpointStore) -> None:
    """Prompts in chunks, next to decode rows, after cached prefixes, some saving states."""
    checkpoint = checkpoints[name]
    session = Session(checkpoint.path, state_mode=mode, page_size=4, cache_slots=6)
    runner, seen = session.runner, list[tuple[StepPlan, Bucket]]()
    graphs = capture_prompts(runner, SIZES, saves=True)
    replay = graphs.replay

    def noted(plan: StepPlan, bucket: Bucket) -> Any:
        seen.append((plan, bucket))
        return replay(plan, bucket)

    graphs.replay = noted  # type: ignore[method-assign]
    texts = prompts(45, 30, 7)
    samples = run_cached(session, [*texts, *([*texts[0][:n], 5, 6, 7] for n in (20, 33))])
    for sample in samples:
        check_sample(checkpoint, sample, name)
    assert any(plan.decode for plan, _ in seen) and any(not plan.decode for plan, _ in seen)
    rows = [row for plan, _ in seen for row in plan.extend]
    assert any(row.saves for row in rows) and any(row.read_state_slot for row in rows)
    assert len(seen) == sum(bool(plan.extend) for plan in session.plans)


def test_graphs_change_the_tables(checkpoints: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of steps whose changes a graph has no room for, or that count tokens, are changed before the graph."""
    monkeypatch.setattr(prompt_columns, "CACHED_PAGES", 0)
    checkpoint, before = checkpoints["falcon-plain"], list[int]()
    session = Session(checkpoint.path, page_size=1, cache_slots=6)
    runner = session.runner
    capture_prompts(runner, ((3,), (16,)), saves=True)
    apply = runner._enter_tables

    def noted(plan: StepPlan) -> None:
        before.extend([len(plan.admissions)] * bool(plan.extend))
        apply(plan)

    monkeypatch.setattr(runner, "_enter_tables", noted)
    engine, (text,) = session.engine(chunk=16, prefix_cache=True, grid=4), prompts(40)
    turns = ((text[:9], {}), (text[:12], {"frequency_penalty": 1e-6}), (text, {}), ([*text[:36], 7], {}))
    for i, (tokens, more) in enumerate(turns):
        before.clear()
        engine.add_request(tokens, replace(greedy(4), **more), str(i))
        answer = list[int]()
        while engine.has_unfinished():
            for out in engine.step():
                answer += out.token_ids
        assert answer == checkpoint.logits(tokens, answer).argmax(-1).tolist()
        assert before == [[], [1], [1], [1]][i], "few pages; penalties; more pages, new ones and cached ones"


def run_cached(session: Session, texts: Sequence[list[int]]) -> list[Sample]:
    """Requests that arrive one after the other, on an engine with a prefix cache."""
    engine, samples, step = session.engine(chunk=24, prefix_cache=True, grid=4), [Sample(t) for t in texts], 0
    while step < 8 * len(texts) or engine.has_unfinished():
        if step % 8 == 0 and step // 8 < len(texts):
            engine.add_request(texts[step // 8], greedy(12, seed=step // 8), str(step // 8))
        for out in engine.step() if engine.has_unfinished() else ():
            samples[int(out.request_id)].tokens += out.token_ids
        session.coordinator.check()
        step += 1
    for i, sample in enumerate(samples):
        sample.logits = torch.stack([session.logits[i, k] for k in range(len(sample.tokens))])
    return samples


def test_what_a_bucket_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four prompts with two states each, or one and 24 tokens after such states if a second pass computes them."""
    bucket = Bucket(2, 24)
    assert (bucket.prompts, bucket.tail) == (4, 24)

    def holds(
        *lengths: int, rows: int = 0, saves: Sequence[int] = (), how: StateSaves = StateSaves.SECOND_PASS
    ) -> bool:
        decode = DecodeRows.from_rows(DecodeRow(row, 3, 0) for row in range(rows))
        last = [(end, SPARE) for end in saves]
        chunks = [ExtendRow(5, 0, [7] * n, 0, True, saves=last if i == 0 else ()) for i, n in enumerate(lengths)]
        return bucket.holds(StepPlan(decode=decode, extend=chunks), how)

    assert holds(24) and holds(6, 6, 6, 6, rows=2) and holds(24, saves=[1])
    assert not holds(25) and not holds(1, 1, 1, 1, 1) and not holds(3, rows=3) and not holds(rows=1)
    assert not holds(24, saves=[1], how=StateSaves.NONE) and not holds(24, saves=[4, 8])
    monkeypatch.setattr(prompt_columns, "TAIL", 2)
    assert not holds(24, saves=[1]) and holds(24, saves=[16])
    at_chunks = StateSaves.AT_CHUNKS
    assert holds(24, saves=[1, 8], how=at_chunks) and not holds(24, saves=[1, 8, 9], how=at_chunks)


@torch.inference_mode()
def test_contexts_of_a_graph_fit_the_room_for_copies(checkpoints: CheckpointStore) -> None:
    """Else the step runs without one. Attention gets the room at each preparation."""
    hand, _ = twins(checkpoints["falcon-plain"].path, "classic")
    graphs, attention = runner_of(hand, saves=False), hand.backend.full_attn_backend
    rows = [ExtendRow(1, 20, TEXT[20:30], 0, True), ExtendRow(2, 5, TEXT[5:12], 0, True)]
    plan, bucket = StepPlan(extend=rows), graphs.bucket(StepPlan(extend=rows))
    assert bucket is not None and bucket.tokens == 48
    graphs._view.most_context = 20 + 5 + 48
    assert graphs.bucket(plan) == bucket
    graphs._view.most_context -= 1
    graphs._view.limited_from = 49  # tokens: this graph copies nothing
    assert graphs.bucket(plan) == bucket
    graphs._view.limited_from = 48
    assert graphs.bucket(plan) is None
    room = graphs._view.buffers[attention] = torch.zeros(3)
    graphs.replay(plan, bucket)
    assert attention.metadata_of(graphs._graphs[bucket].batch).extend.copies is room


def test_padding_stands_at_positions_that_every_rotary_table_has() -> None:
    """A table may be shorter than a bucket by less than a page."""
    plan = StepPlan(extend=[ExtendRow(1, 3, [7, 7], 0, True)])
    padded = PaddedStep(Bucket(0, 24), (16,), StateSaves.NONE, 1)
    padded.pack(plan)
    assert padded.arrays.prompts is not None
    assert padded.arrays.prompts.positions.tolist() == [3, 4, *[0] * 22]


def test_the_option_leaves_them_out(checkpoints: CheckpointStore) -> None:
    for on in (True, False):
        session = Session(checkpoints["falcon-plain"].path, cuda_graph_prompts=on, chunked_prefill_size=128)
        session.runner.capture()
        graphs = session.runner.prompt_graphs
        assert (graphs is not None) == on and session.runner.graphs
        policy = Engine.from_config(replace(session.runner.config, target_itl_ms=15.0), session.runner).policy
        assert policy is not None and policy.cost.fills(StepWork()) == ([128] if graphs else [])


def test_common_steps_are_padded_little() -> None:
    """By at most an eighth, or to so few tokens that padding costs no time."""
    found = prompt_columns.make_buckets(prompt_columns.DECODE_ROWS, prompt_columns.PROMPT_TOKENS)
    assert len(found) <= 32
    tiles = ((64, 768), (128, 768), (256, 640), (0, 1152), (32, 1120), (128, 2176), (256, 2048))
    for rows, n in (*product((0, 8, 32, 64, 128), (128, 256, 512, 1024)), *tiles):
        padded = min(sum(bucket) for bucket in found if bucket.decode_rows >= rows and bucket.tokens >= n)
        assert padded <= max(1.125 * (rows + n), 200), (rows, n)


@pytest.mark.parametrize(
    ("rows", "chunk", "longest", "most"),
    [
        (256, 1024, 0, 1024),
        (64, 8192, 1024, 1024),
        (32, 8192, 768, 768),
        (256, 8192, 0, 2176),
        (256, 8192, 4608, 2176),
        (256, 8192, 4607, 1536),
    ],
)
def test_no_graph_has_more_tokens_than_a_step(rows: int, chunk: int, longest: int, most: int) -> None:
    """But the largest steps that may come have one."""
    found = needed_buckets(rows, chunk, longest)
    assert max(bucket.tokens for bucket in found) == most and len(set(found)) == len(found)
    assert [bucket.tokens for bucket in needed_buckets(rows, 100, longest) if not bucket.decode_rows] == [128]


class FakeGraph:
    """Writes down what it captures: the steps between its begin and its end."""

    log: ClassVar[list[str]] = []
    made = 0

    def __init__(self) -> None:
        FakeGraph.made += 1
        self.name = f"graph {FakeGraph.made}"

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        self.log.append(f"{self.name} begins, {pool}")

    def capture_end(self) -> None:
        self.log.append(f"{self.name} ends")

    def replay(self) -> None:
        self.log.append(f"{self.name} runs")


def test_a_split_capture_is_replayed_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """All pieces take their memory from one pool."""
    fakes = {"CUDAGraph": FakeGraph, "Stream": object, "graph_pool_handle": lambda: "the pool"}
    for name, fake in (fakes | {"synchronize": lambda: None}).items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(launch, "_reserved", {})
    log, recorder = FakeGraph.log, CudaGraphRecorder(torch.device("cpu"))

    def step() -> None:
        log.append("a")
        recorder.split()
        log.append("b")

    replay = recorder(step)
    captured = ["graph 1 begins, the pool", "a", "graph 1 ends", "graph 2 begins, the pool", "b", "graph 2 ends"]
    assert log == ["a", "b", *captured]
    assert torch.device("cpu") in launch._reserved, "counters are zeros before the capture"
    log.clear()
    replay()
    assert log == ["graph 1 runs", "graph 2 runs"]


def test_captures_are_split_between_layers(checkpoints: CheckpointStore) -> None:
    hand, calls = ByHand(checkpoints["falcon-plain"].path, mode="classic", rows=ROWS, cache_slots=8), []
    recorder = ClosureRecorder()
    recorder.split = lambda: calls.append(1)  # type: ignore[method-assign]
    graphs = PromptGraphs(
        model=hand.model, backend=hand.backend, req_to_token_pool=hand.pools.req_to_token, last_tokens=last_tokens(),
        max_bs=3, max_tokens=48, saves=False, enter_tables=lambda changes: None, sizes=SIZES, recorder=recorder,
    )  # fmt: skip
    graphs.capture()
    assert len(calls) == len(graphs.buckets) * len(splits(len(hand.model.stack.parts))) > 0
    assert splits(88) == [3, 22] and splits(3) == []
