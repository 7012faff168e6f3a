"""Two GPUs: the tokens of one, collectives inside the graphs, and a lost rank, which blocks no other."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hybridrt import LLM, SpeculativeConfig
from hybridrt.base.errors import EngineError
from hybridrt.parallel.rank_start import start_ranks
from hybridrt.parallel.ranks import Ranks
from hybridrt.parallel.tensor_parallel import TensorParallelExecutor
from tests.gpu.rig import GPU, GpuSession
from tests.models.test_models_parity import requests
from tests.support.checkpoints import SPLIT, CheckpointStore
from tests.support.rank_soak import soak_processes
from tests.support.session import check_sample, greedy
from tests.support.ties import check_greedy

pytestmark = [*GPU, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    ranks = start_ranks(2, "cuda")
    yield ranks
    ranks.close()


@pytest.mark.parametrize("name", SPLIT)
def test_logits_and_tokens_of_one_process(name: str, pair: Ranks, checkpoints: CheckpointStore) -> None:
    """Chunks, mixed steps, and decode steps as graphs with NCCL inside."""
    checkpoint = checkpoints[name]
    session = GpuSession(checkpoint.path, ranks=pair, tp_size=2)
    samples = session.run(requests(1, 17, 40, steps=24), chunk=24, gap=2, overlap=True)
    assert session.split is not None and session.runner.graphs
    session.split.close()
    for sample in samples:
        check_sample(checkpoint, sample, name)


def test_sums_next_to_products(checkpoints: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of 64 tokens and more; tokens are those of sums in line, up to ties."""
    monkeypatch.setenv("HYBRIDRT_OVERLAP_FROM", "64")
    checkpoint = checkpoints["falcon-split"]
    with LLM(str(checkpoint.path), device="cuda", dtype="float32", tp_size=2, max_model_len=160) as llm:
        for output in llm.generate([[5 + i % 90 for i in range(n)] for n in (64, 70, 129)], greedy(16)):
            check_greedy(output.token_ids, checkpoint.logits(output.prompt_token_ids, output.token_ids), "pieces")


@pytest.mark.parametrize("name", ["falcon-split", "qwen-split"])
def test_random_schedules(name: str, checkpoints: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of mixed steps, whose sums run next to products from eight tokens on, and of decode steps in graphs."""
    monkeypatch.setenv("HYBRIDRT_OVERLAP_FROM", "8")
    ranks = start_ranks(2, "cuda")
    try:
        assert soak_processes(name, 300, ranks, checkpoints, device="cuda")["finished"] > 0
    finally:
        ranks.close()


@pytest.mark.parametrize("graphs", [True, False])
def test_replicas_that_share_experts(graphs: bool, checkpoints: CheckpointStore) -> None:
    """Prompts through NCCL, decode in graphs and through the memory of the other GPU; one replica joins the other's
    steps."""
    checkpoint = checkpoints["qwen-split"]
    with LLM(
        str(checkpoint.path), device="cuda", dtype="float32", dp_size=2, expert_parallel=True, max_model_len=160,
        max_running_requests=8, cuda_graph=graphs,
    ) as llm:  # fmt: skip
        for count in (1, 7):
            for output in llm.generate([[5 + i, 9, *range(3, 20)] for i in range(count)], greedy(24)):
                check_greedy(output.token_ids, checkpoint.logits(output.prompt_token_ids, output.token_ids), "experts")
        assert llm.expert_tokens()


def test_sums_through_the_memory_of_peers() -> None:
    """Ranks that come at random times, in steps and graphs, of all sizes; the program compares."""
    command = [sys.executable, "-m", "benchmarks.bench_collectives", "--rounds", "50"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]


def test_drafts_and_a_killed_rank(checkpoints: CheckpointStore) -> None:
    """Verify steps as graphs; then the GPU that waits for a rank that is gone is freed."""
    checkpoint = checkpoints["falcon-split"]
    llm = LLM(
        str(checkpoint.path), device="cuda", dtype="float32", tp_size=2, max_model_len=160, max_running_requests=2,
        speculative=SpeculativeConfig("ngram", num_draft_tokens=3),
    )  # fmt: skip
    prompts = [[5, 6, 7, 5, 6], [9] * 20]
    for output in llm.generate(prompts, greedy(24)):
        check_greedy(output.token_ids, checkpoint.logits(output.prompt_token_ids, output.token_ids), "ngram")
    executor = llm.engine.executor
    assert isinstance(executor, TensorParallelExecutor) and llm.engine.counters().proposed > 0
    stream = llm.stream(prompts[0], greedy(120))
    next(stream)
    executor.ranks._processes[0].kill()
    with pytest.raises(EngineError, match="tensor-parallel rank 1 was lost: its process was killed by SIGKILL"):
        list(stream)
    llm.close()
    torch.cuda.synchronize()
