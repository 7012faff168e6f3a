"""A soak: thousands of steps of random schedules through pools that are too small for them."""

import gc
import random
from pathlib import Path
from typing import Any

import torch

from hybridrt import SamplingParams, SpeculativeConfig
from hybridrt.base.engine_config import EngineConfig
from hybridrt.engine.core.engine import Engine
from hybridrt.parallel.tensor_parallel import TensorParallelExecutor
from hybridrt.runtime.run.model_runner import ModelRunner
from tests.support.checkpoints import VOCAB, CheckpointStore
from tests.support.samples import Sample, Samples
from tests.support.session import budget
from tests.support.ties import check_greedy

CHECKED = 25  # finished greedy requests of each run that are held against transformers
CHUNK, LENGTH = 32, 128
FALCON, NEMOTRON, QWEN = "falcon-norm_after_gate", "nemotron-experts", "qwen-plain"
RUNS: list[tuple[str, dict[str, Any]]] = [
    (FALCON, {"state_mode": "replay"}),
    (NEMOTRON, {"state_mode": "replay", "mamba_ssm_dtype": "bfloat16", "dtype": "bfloat16"}),
    (QWEN, {"state_mode": "replay"}),
    (QWEN, {"state_mode": "classic", "overlap": False}),
    (FALCON, {"speculative": SpeculativeConfig(num_draft_tokens=3, state_mode="replay")}),
]


class Soak:
    """An engine whose pools hold five rows and pages for two or three of them: requests wait, and are retracted.

    Requests come and go at random: bursts of arrivals, aborts, samples in groups, stops, every kind of draw.
    """

    split: TensorParallelExecutor | None = None

    def __init__(self, path: Path, seed: int, **changes: Any) -> None:
        fields: dict[str, Any] = {
            "dtype": "float32",
            "max_model_len": LENGTH,
            "max_running_requests": 5,
        } | changes
        config = EngineConfig(str(path), chunked_prefill_size=CHUNK, page_size=4, **fields)
        self.runner = self.load(config, budget(path, rows=5, pages=40, page_size=4, **fields))
        self.engine = Engine.from_config(config, self.runner, split=self.split, overlap=config.overlap)
        self.coordinator = self.engine._coordinator
        self.random = random.Random(seed)
        self.running: dict[str, tuple[list[int], SamplingParams, int]] = {}  # and how many samples still run
        self.greedy: list[tuple[list[int], Sample]] = []
        self.samples = Samples()

    def load(self, config: EngineConfig, budget_bytes: int) -> ModelRunner:
        return ModelRunner(config, budget_bytes=budget_bytes)

    def run(self, steps: int) -> None:
        """`steps` steps, the pools' ledgers checked after each, then until nothing is left."""
        for _ in range(steps):
            self.arrive()
            self.step()
            if self.running and self.random.random() < 0.02:
                assert self.engine.abort(self.random.choice(sorted(self.running)))
        while self.engine.has_unfinished():
            self.step()
        # The runner keeps the last step's tensors. So that they do not differ in size, it is the same in every run.
        self.engine.add_request([3, 4, 5], SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True))
        while self.engine.has_unfinished():
            self.engine.step()
        self.engine.drain()
        pools = (self.coordinator.rows, self.coordinator.slots, self.coordinator.pages)
        counters = self.engine.counters()
        assert not any(pool.num_used or pool.num_locked for pool in pools), counters
        assert not self.running and counters.failed == 0

    def arrive(self) -> None:
        chance = 0.9 if len(self.running) < 3 else 0.15 if len(self.running) < 12 else 0.0
        while self.random.random() < chance:
            prompt = [self.random.randrange(3, VOCAB) for _ in range(self.random.choice((1, 2, 7, 30, 60)))]
            params = self.params()
            self.running[self.engine.add_request(prompt, params)] = prompt, params, params.n

    def params(self) -> SamplingParams:
        pick = self.random.choice
        common: dict[str, Any] = {"max_tokens": pick((1, 2, 9, 30, 60)), "ignore_eos": pick((True, False))}
        if self.random.random() < 0.5:
            return SamplingParams(temperature=0.0, **common)
        return SamplingParams(
            temperature=pick((0.5, 1.0)), top_k=pick((-1, 20)), top_p=pick((1.0, 0.9)), min_p=pick((0.0, 0.05)),
            frequency_penalty=pick((0.0, 0.3)), logprobs=pick((None, 2)), n=pick((1, 1, 1, 3)), **common,
        )  # fmt: skip

    def step(self) -> None:
        deltas = self.engine.step()
        self.samples.add(deltas)
        for delta in deltas:
            assert delta.error is None, delta.error
            if delta.finish_reason is not None:
                self.finish(self.samples.pop((delta.request_id, delta.index)))
        self.coordinator.check()

    def finish(self, out: Sample) -> None:
        prompt, params, left = self.running.pop(out.request_id)
        if left > 1:
            self.running[out.request_id] = prompt, params, left - 1
        if params.greedy and out.finish_reason != "abort":
            self.greedy.append((prompt, out))


def soak(run: int, steps: int, device: str, checkpoints: CheckpointStore) -> dict[str, int]:
    """A quarter of `steps` steps of RUNS[run], then the rest in the same memory. What happened, by its name."""
    name, changes = RUNS[run]
    soak = Soak(checkpoints[name].path, run, device=device, **changes)
    soak.run(steps // 4)
    before = _allocated(device)
    soak.run(steps * 3 // 4)
    after = _allocated(device)
    assert after == before, f"{before:,} bytes of tensors became {after:,}"
    if soak.runner.target.dtype == torch.float32:
        for prompt, out in soak.random.sample(soak.greedy, min(CHECKED, len(soak.greedy))):
            check_greedy(out.token_ids, checkpoints[name].logits(prompt, out.token_ids), name)
    counters = soak.engine.counters()
    return {name: getattr(counters, name) for name in ("steps", "finished", "aborted", "retractions", "accepted")}


def _allocated(device: str) -> int:
    """Bytes of tensors on a GPU; 0 on a CPU, where torch does not count them. Engines of earlier tests hold none."""
    gc.collect()
    return torch.cuda.memory_allocated() if device == "cuda" else 0
