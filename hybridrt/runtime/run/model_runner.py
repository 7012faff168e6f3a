"""The executor of a real model: loads it, plans its memory, captures its graphs."""

import gc
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hybridrt.base.device import begin_peak, peak_bytes, release_kept_memory
from hybridrt.base.engine_config import EngineConfig
from hybridrt.base.errors import MemoryBudgetError
from hybridrt.collectives.groups import TPGroup
from hybridrt.mem_cache.pools.memory_plan import MemoryPlan, gib
from hybridrt.models.base import CausalLM
from hybridrt.runtime.load.build_model import build_model, empty_model, weight_bytes
from hybridrt.runtime.load.fit import plan_ahead, pool_budget
from hybridrt.runtime.load.graph_costs import graph_rows
from hybridrt.runtime.load.load_target import load_target
from hybridrt.runtime.load.make_plan import make_plan
from hybridrt.runtime.load.runtime import Runtime
from hybridrt.runtime.load.start_kernels import StartAhead, StartKernels, start_kernels
from hybridrt.runtime.load.target import RunTarget
from hybridrt.runtime.load.tuned_choices import use_tuned_choices
from hybridrt.runtime.replay.prompt_graphs import needed_buckets
from hybridrt.runtime.run.expert_loads import ExpertLoads
from hybridrt.runtime.run.host_copies import HostCopies
from hybridrt.runtime.run.kv_scales import find_kv_scales
from hybridrt.runtime.run.probe import probe
from hybridrt.runtime.run.span_encoder import SpanEncoder
from hybridrt.runtime.run.state_arena import StateArena
from hybridrt.runtime.run.step_runner import StepRunner

log = logging.getLogger("hybridrt.load")


class ModelRunner(StepRunner):
    """A StepRunner that loads its model.

    Args:
        config: what to run.
        tp: this process's tensor-parallel rank.
        budget_bytes: for the pools; None follows EngineConfig.memory_fraction.
        plan: sizes of the pools; None makes a plan from the budget.
        progress: show a bar while loading.
        ahead: compiles kernels while models are loaded, the draft model too; None compiles them at
            their first launch.

    Raises:
        MemoryBudgetError: weights, pools or graphs do not fit the device; says which number to
            change.

    Attributes:
        model_path, model_config: the checkpoint's directory and its config.
        memory_plan: rows, slots and pages that a scheduler may lend.
        expert_loads: tokens that each rank's experts have computed.
        backend, pools: for callers that run the model themselves.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        tp: TPGroup | None = None,
        budget_bytes: int | None = None,
        plan: MemoryPlan | None = None,
        progress: bool = False,
        ahead: StartAhead | None = None,
    ) -> None:
        tp, self.ahead = tp or TPGroup(), ahead
        with start_kernels(ahead, config, tp) as kernels:
            self._start(config, tp, budget_bytes, plan, progress, kernels)

    def _start(
        self, config: EngineConfig, tp: TPGroup, budget_bytes: int | None, plan: MemoryPlan | None, progress: bool,
        kernels: StartKernels,
    ) -> None:  # fmt: skip
        began = time.monotonic()
        self.model_path, target = load_target(config, tp)
        use_tuned_choices(target.device, tp)
        kernels.start_compiling(target.device, self.model_path)
        if plan is None:
            weights = weight_bytes(empty_model(config, target, torch.device("meta")))
            plan_ahead(config, target, weights, budget_bytes)  # raises what is known before loading
        with _out_of_memory_as("loading weights", "run it on a larger device, or end what else runs on this one"):
            model = build_model(config, target, self.model_path, progress)
        log.info("weights: %s in %.1f s", gib(weight_bytes(model)), time.monotonic() - began)
        kernels.wait_for_start()
        tp.minimum(0)  # one rank may compile for all
        with _out_of_memory_as("allocating pools", "lower memory_fraction or chunked_prefill_size"):
            scales = find_kv_scales(config, target, model, self.model_path)
            plan = plan or plan_pools(config, target, model, budget_bytes)
            super().__init__(Runtime.allocate(config, target, model, plan, scales))
            if config.transfer_bytes:
                self.arena = StateArena(target, self.pools, config.transfer_bytes)
            if target.model_config.vision is not None or config.prompt_embeds:
                self.encoder = SpanEncoder(model, config.encoder_cache_tokens, config.encoder_host_tokens, self.staging)
            if plan.host:
                self.host = HostCopies(self.pools, plan.host, target.device)
        log.info("memory plan: %s", self.memory_plan.summary())
        if self.device.type == "cuda" and config.cuda_graph:
            began = time.monotonic()
            with _out_of_memory_as("capturing graphs", "lower memory_fraction or cuda_graph_max_bs"):
                self.capture(progress)
            log.info("graphs: %.1f s", time.monotonic() - began)
        self.expert_loads = ExpertLoads(model)


def plan_pools(config: EngineConfig, target: RunTarget, model: CausalLM, budget_bytes: int | None) -> MemoryPlan:
    """The memory plan with the loaded model; see ModelRunner."""
    peak = 0
    if budget_bytes is None and target.device.type == "cuda":
        peak = _measure_activations(config, target, model)
        peak += _graph_activations(config, target, peak)
    # One scheduler serves all ranks: the smallest decides.
    budget_bytes = target.tp.minimum(pool_budget(config, target, peak) if budget_bytes is None else budget_bytes)
    if target.tp.replicas is not None:  # which replay graphs of the same rows
        budget_bytes = target.tp.replicas.minimum(budget_bytes)
    return make_plan(
        config, target, budget_bytes=budget_bytes, weights=weight_bytes(model), activations=peak, share=True
    )


def _graph_activations(config: EngineConfig, target: RunTarget, peak: int) -> int:
    """Bytes, estimated from the step that needed `peak`. Prompt graphs are the largest, and all
    share one memory."""
    if not (config.cuda_graph and config.cuda_graph_prompts):
        return 0
    buckets = needed_buckets(graph_rows(config, target), config.chunked_prefill_size)
    return peak * max(map(sum, buckets)) // config.chunked_prefill_size


def _measure_activations(config: EngineConfig, target: RunTarget, model: CausalLM) -> int:
    """Bytes that the largest prefill step needs besides weights and pools, measured with small
    pools."""
    plan, step = probe(config, target)
    runner = StepRunner(Runtime.allocate(config, target, model, plan))
    before = begin_peak(target.device)
    runner.launch(step).result()
    peak = peak_bytes(target.device) - before
    del runner
    gc.collect()  # a cycle in another package's backend would keep the small pools
    release_kept_memory()
    return peak


@contextmanager
def _out_of_memory_as(doing: str, advice: str) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as e:
        raise MemoryBudgetError(f"the device ran out of memory while {doing}: {advice} ({e})") from e
