"""Engines over a real tiny model, with the logits of every token they sample."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridrt.base.engine_config import EngineConfig
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.collectives.groups import TPGroup
from hybridrt.engine.cache.cache_coordinator import CacheCoordinator
from hybridrt.engine.core.engine import Engine
from hybridrt.engine.request.intake import EngineLimits
from hybridrt.mem_cache.pools.host_plan import NO_HOST_PLAN
from hybridrt.mem_cache.pools.memory_plan import MemoryPlan
from hybridrt.mem_cache.pools.pools import Pools
from hybridrt.parallel.ranks import Ranks
from hybridrt.parallel.tensor_parallel import TensorParallelExecutor
from hybridrt.runtime.load.fit import pool_budget
from hybridrt.runtime.load.load_target import load_target
from hybridrt.runtime.load.make_plan import make_plan
from hybridrt.runtime.load.target import RunTarget
from hybridrt.runtime.replay.graph_runner import GraphRunner
from hybridrt.runtime.run.model_runner import ModelRunner
from hybridrt.runtime.step.plan import StepHandle, StepPlan
from tests.support.checkpoints import Checkpoint
from tests.support.ties import check_greedy

LARGE, LARGE_CODE = 1e4, 0x7E  # garbage in KV; the code is 448 * scale


@dataclass
class Sample:
    """What became of a request: its tokens, and the logits that each was chosen from, [n, vocab]."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    retractions: int = 0
    finish_reason: str | None = None


def greedy(max_tokens: int, seed: int = 0, **params: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, seed=seed, **params)


class Session:
    """A ModelRunner on a CPU whose pools start full of garbage, and engines on it, one after the other.

    It is an executor itself: it keeps the logits by (seed of the request, output index).

    Args:
        ranks: split the model over these.
    """

    def __init__(
        self, path: Path, *, budget_bytes: int | None = None, ranks: Ranks | None = None, cache_slots: int = 0,
        **config: Any,
    ) -> None:  # fmt: skip
        defaults = {"device": "cpu", "dtype": "float32", "max_model_len": 160, "max_running_requests": 4}
        defaults["prefix_cache"] = False  # the plan then holds what its budget says
        self.config = EngineConfig(str(path), **{**defaults, **config})
        self.split = TensorParallelExecutor(self.config, ranks=ranks) if ranks else None
        plan = None
        if cache_slots:
            target = load_target(self.config, TPGroup())[1]
            given = pool_budget(self.config, target) if budget_bytes is None else budget_bytes
            plan = make_plan(self.config, target, budget_bytes=given, cache_slots=cache_slots)
            budget_bytes = None
        self.runner = (
            self.split.runner if self.split else ModelRunner(self.config, budget_bytes=budget_bytes, plan=plan)
        )
        self.plan: MemoryPlan = self.runner.memory_plan
        self.logits: dict[tuple[int, int], Tensor] = {}
        self.plans: list[StepPlan] = []
        self._seeds: dict[int, int] = {}
        self._sampler = self.runner.sampler
        self.runner.sampler = self._sample  # type: ignore[assignment]
        spoil(self.runner.pools)

    def launch(self, plan: StepPlan) -> StepHandle:
        self._seeds.update((a.row, a.seed) for a in plan.admissions)
        self.plans.append(plan)
        self._watch_draws()
        return (self.split or self.runner).launch(plan)

    def _watch_draws(self) -> None:
        """Graphs that draw tokens do not call the sampler: their logits are kept too."""
        for graph in self.runner.graphs.values():
            if graph.draws and not isinstance(graph.draw, partial):
                graph.draw = partial(self._draw, graph, graph.draw)  # type: ignore[method-assign]

    def _draw(self, graph: GraphRunner, draw: Callable[[int], Tensor], n: int) -> Tensor:
        views = graph.views_of(n)
        self._keep(views.logits, graph.buffers.arrays.rows[:n], views.output_indices)
        return draw(n)

    def _sample(self, logits: Tensor, rows: Tensor, output_indices: Tensor, parts: int, bitmask: None) -> Tensor:
        self._keep(logits, rows, output_indices)
        return self._sampler(logits, rows, output_indices, parts, bitmask)

    def _keep(self, logits: Tensor, rows: Tensor, output_indices: Tensor) -> None:
        for line, row, index in zip(logits, rows.tolist(), output_indices.tolist(), strict=True):
            self.logits[self._seeds[row], index] = line.clone()

    def engine(self, *, chunk: int = 8192, overlap: bool = False, prefix_cache: bool = False, grid: int = 16) -> Engine:
        plan, model = self.plan, self.runner.model_config
        groups = [replace(group, demand=replace(group.demand, step_tokens=chunk)) for group in plan.groups]
        pools = replace(plan, groups=tuple(groups), host=plan.host if prefix_cache else NO_HOST_PLAN)
        self.coordinator = CacheCoordinator.from_plan(pools, self.runner.copied, prefix_cache=prefix_cache)
        if self.coordinator.slabs is not None:
            self.coordinator.slabs.reclaim()  # slabs have garbage, or what an earlier engine left there
        self.coordinator.prefixes.grid = grid
        limits = EngineLimits(model.vocab_size, plan.max_model_len, chunk, model.eos_token_ids)
        return Engine(self, self.coordinator, limits, overlap=overlap)

    def run(
        self, requests: Sequence[tuple[Sequence[int], int]], *, chunk: int = 8192, overlap: bool = False, gap: int = 0
    ) -> list[Sample]:
        """(prompt, output tokens) greedily, a new request every `gap` steps; request i has seed i."""
        engine, waiting = self.engine(chunk=chunk, overlap=overlap), list(enumerate(requests))
        self.logits.clear()
        self.plans.clear()
        samples = [Sample(list(prompt)) for prompt, _ in requests]
        steps = 0
        while waiting or engine.has_unfinished():
            while waiting and steps >= waiting[0][0] * gap:
                i, (prompt, count) = waiting.pop(0)
                engine.add_request(prompt, greedy(count, seed=i), str(i))
            for out in engine.step() if engine.has_unfinished() else ():
                sample = samples[int(out.request_id)]
                assert out.error is None, out.error
                sample.tokens += out.token_ids
                if out.metrics is not None:
                    sample.finish_reason, sample.retractions = out.finish_reason, out.metrics.retractions
            self.coordinator.check()
            steps += 1
        self.assert_empty()
        for i, sample in enumerate(samples):
            sample.logits = torch.stack([self.logits[i, k] for k in range(len(sample.tokens))])
        return samples

    def assert_empty(self) -> None:
        if self.coordinator.fetches is not None:
            self.coordinator.fetches.cancel_all()  # those of requests that did not wait for them
        for pool in (self.coordinator.rows, self.coordinator.slots, self.coordinator.pages):
            pool.check()
            assert not pool.num_used, f"leaked: {pool}"

    def num_mixed(self) -> int:
        """Steps of the last run that held decode rows and prompt chunks."""
        return sum(bool(plan.decode and plan.extend) for plan in self.plans)


def spoil(pools: Pools) -> None:
    """Fills what is not scratch with garbage: NaN, and in KV, whose hidden entries must be finite, large numbers.
    Slabs that may be lent have NaN: a step must clear those of pages (`CacheCoordinator.slabs.reclaim`)."""
    for tensor in pools.kv.tensors:
        tensor[:, 1:] = LARGE if tensor.is_floating_point() else LARGE_CODE
    if pools.shared is not None:
        plan, memory = pools.shared.plan, pools.shared._buffer
        memory[: plan.slab_bytes] = 0
        if plan.states is not None:
            memory[plan.slab_bytes : (1 + plan.num_slabs) * plan.slab_bytes] = 255  # NaN in every dtype
    mamba = pools.req_to_token.mamba_pool
    for layer_id in mamba.layer_ids if mamba is not None else ():
        for tensor in vars(mamba.layer_cache(layer_id)).values():  # type: ignore[union-attr]
            if isinstance(tensor, Tensor) and not in_slabs(pools, tensor):
                tensor[1:] = torch.nan if tensor.is_floating_point() else -1 if tensor.dtype == torch.int8 else 255
    pools.req_to_token.tables[1:] = -(2**30)
    pools.req_to_token.req_to_state_slot[1:] = -(2**30)


def in_slabs(pools: Pools, tensor: Tensor) -> bool:
    """Whether a tensor is a view of the memory that pages and states share."""
    shared = pools.shared
    return shared is not None and tensor.untyped_storage().data_ptr() == shared._buffer.untyped_storage().data_ptr()


def budget(path: Path, *, rows: int, pages: int, cache_slots: int = 0, **config: Any) -> int:
    """Bytes that hold `rows` running requests, `cache_slots` states of cached prefixes and `pages` KV pages, and no
    more."""
    engine_config = EngineConfig(
        str(path), **{"device": "cpu", "dtype": "float32", "max_running_requests": rows, **config}
    )
    target: RunTarget = load_target(engine_config, TPGroup(size=engine_config.tp_size))[1]
    plan = make_plan(engine_config, target, budget_bytes=2**40)
    costs, longest = plan.costs, plan.max_model_len
    states = (rows + 1 + cache_slots) * costs.slot
    total = costs.fixed + (rows + 1) * costs.row + states
    for group in plan.groups:
        count, demand = pages, group.demand
        if group.window is not None and len(plan.groups) > 1:  # as plan_memory shares out pages
            more = max(pages - demand.whole(longest), 0)
            count = min(demand.least(min(pages * plan.page_size, longest)) + more, demand.pool(rows, longest))
        total += (count + 1) * group.page_bytes
    return total


def check_sample(checkpoint: Checkpoint, sample: Sample, what: str, tolerance: float = 5e-4) -> None:
    """Each token's logits within `tolerance` of transformers', and the token the most likely one there."""
    oracle = checkpoint.logits(sample.prompt, sample.tokens)
    what = f"{what}, prompt of {len(sample.prompt)}"
    worst = (sample.logits - oracle).abs().max().item()
    assert worst <= tolerance, f"{what}: logits differ by {worst:.1e}"
    check_greedy(sample.tokens, oracle, what)
