"""Checks before loading whether a model fits the device, and computes the budget of its pools."""

from dataclasses import replace

import torch

from hybridrt.base.device import GPUFacts
from hybridrt.base.dtypes import DTYPES, resolve_kv_codes, resolve_state_dtype
from hybridrt.base.engine_config import EngineConfig
from hybridrt.base.errors import ConfigError, MemoryBudgetError
from hybridrt.base.gpus import GPUS
from hybridrt.mem_cache.pools.memory_plan import MemoryPlan, gib
from hybridrt.runtime.load.host_memory import free_host_memory
from hybridrt.runtime.load.make_plan import make_plan
from hybridrt.runtime.load.target import RunTarget, resolve_state_mode

# Defaults of memory_fraction: share of a GPU; divisor of free main memory.
GPU_SHARE, CPU_SHARE = 0.85, 4


def gpu_bytes(name: str, config: EngineConfig) -> int:
    """The memory of a GPU by name. ConfigError if there is none, or another device is asked for."""
    if name not in GPUS:
        raise ConfigError(f"gpu is {name!r}; it must be one of {', '.join(GPUS)}")
    if config.device not in ("auto", "cuda"):
        raise ConfigError(f"device is {config.device!r}; leave it out with gpu, or set it to cuda")
    return GPUS[name].memory


def as_on_gpu(config: EngineConfig, target: RunTarget, gpu: str) -> RunTarget:
    """The target that it would be on a GPU by name, which need not be here: nothing may be allocated for it.

    Raises:
        DeviceError: states or keys and values in a type that the GPU has not.
    """
    device, mc = torch.device("cuda"), target.model_config
    return replace(
        target,
        device=device,
        dtype=mc.dtype if config.dtype == "auto" else DTYPES[config.dtype],
        state_dtype=resolve_state_dtype(config.mamba_ssm_dtype, device, gpu),
        state_mode=resolve_state_mode(config, mc.linear, device),
        kv_codes=resolve_kv_codes(config.kv_cache_dtype, device, gpu),
        gpu=gpu,
    )


def budget_text(config: EngineConfig, target: RunTarget, total_bytes: int | None = None) -> str:
    """Where `free_bytes` comes from, and which option changes it."""
    share = f"memory_fraction {config.memory_fraction or (1 if _in_main_memory(target, total_bytes) else GPU_SHARE)}"
    if _in_main_memory(target, total_bytes):
        pools = "" if config.memory_fraction else f"; pools take 1/{CPU_SHARE} of what the weights leave"
        return f"Budget: {share} of the main memory that is free, shared by the ranks{pools}"
    if total_bytes is not None:
        return f"Budget: {share} of {gib(total_bytes)}; a run there takes the room for activations and graphs from it"
    total, used = _in_use(target.device)
    return f"Budget: {share} of {gib(total)}, less {gib(used)} in use"


def _in_main_memory(target: RunTarget, total_bytes: int | None) -> bool:
    return target.device.type != "cuda" and total_bytes is None


def free_bytes(config: EngineConfig, target: RunTarget, total_bytes: int | None = None) -> int:
    """Bytes that this rank may still use. `total_bytes`: of an empty GPU that need not be here.

    On a GPU: `memory_fraction` of it, less what is in use (weights, other processes). In main
    memory: `memory_fraction` of what is free, shared equally by the ranks of all replicas.
    """
    if total_bytes is not None:
        return int(total_bytes * _gpu_share(config))
    if target.device.type != "cuda":
        return int(free_host_memory() // (target.tp.size * config.dp_size) * (config.memory_fraction or 1))
    total, used = _in_use(target.device)
    return int(total * _gpu_share(config)) - used


def _in_use(device: torch.device) -> tuple[int, int]:
    """All bytes of a GPU, and those that are in use."""
    gpu = GPUFacts.of_device(device)
    return gpu.total_bytes, gpu.total_bytes - gpu.free_bytes


def _gpu_share(config: EngineConfig) -> float:
    return config.memory_fraction or GPU_SHARE


def pool_budget(config: EngineConfig, target: RunTarget, taken: int = 0) -> int:
    """Bytes for pools where no budget is given, after `taken` more bytes are in use. On a CPU
    without `memory_fraction` it is a share of what is left."""
    shared = target.device.type == "cpu" and config.memory_fraction is None
    return (free_bytes(config, target) - taken) // (CPU_SHARE if shared else 1)


def plan_ahead(
    config: EngineConfig,
    target: RunTarget,
    weights: int,
    budget_bytes: int | None = None,
    total_bytes: int | None = None,
) -> MemoryPlan:
    """The memory plan before loading. On a GPU, a later run measures activations and lowers the
    budget.

    Args:
        weights: bytes of this rank's weights.
        budget_bytes: for the pools; None is what the weights leave (`pool_budget`).
        total_bytes: of a GPU that need not be here.

    Raises:
        MemoryBudgetError: weights, or weights and pools, do not fit.
    """
    free = free_bytes(config, target, total_bytes)
    if weights + rotary_table_bytes(config, target) > free:
        raise MemoryBudgetError(_too_large(config, target, weights, free, total_bytes))
    if budget_bytes is None:
        budget_bytes = free - weights if total_bytes is not None else pool_budget(config, target, weights)
    return make_plan(config, target, budget_bytes=budget_bytes, weights=weights, share=True)


def rotary_table_bytes(config: EngineConfig, target: RunTarget) -> int:
    """Peak bytes of making the table of rotary embeddings, which has a row for each position."""
    mc = target.model_config
    positions = min(config.max_model_len or mc.max_position_embeddings, mc.max_position_embeddings)
    rotated = {a.rotary_dim: a for i in mc.full_attention_layer_ids if (a := mc.attention_of(i)).rope is not None}
    return 3 * 4 * positions * sum(rotated)


def _too_large(config: EngineConfig, target: RunTarget, weights: int, free: int, total_bytes: int | None) -> str:
    hints, detail = ["a larger device"], ""
    if target.dtype.itemsize > 2:
        hints.insert(0, 'dtype="bfloat16"')
    if config.memory_fraction is not None or target.device.type == "cuda":
        share = config.memory_fraction if target.device.type == "cpu" else _gpu_share(config)
        hints.insert(0, f"a memory_fraction above {share}")
    if target.device.type == "cuda":
        hints.append("more ranks (tp_size)")
        total, used = (total_bytes, 0) if total_bytes is not None else _in_use(target.device)
        allowed = int(total * _gpu_share(config))
        detail = f": of its {gib(total)}, {gib(allowed)} may be taken and {gib(used)} are in use"
        if used > allowed // 2:
            hints.append("a GPU that nothing else uses")
    if 3 * rotary_table_bytes(config, target) > weights:
        hints.insert(0, "a smaller max_model_len")
    ranks = f", each of {target.tp.size} ranks" if target.tp.size > 1 else ""
    needed = gib(weights + rotary_table_bytes(config, target))
    place = target.device if total_bytes is None else "the GPU"
    return (
        f"the weights need {needed}{ranks}, and {place} has {gib(max(free, 0))} for them{detail}; use "
        f"{', or '.join(hints)}"
    )
