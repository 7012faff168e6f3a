"""From a configuration to an `EmbeddedRuntime`: weights, a memory plan, pools and backends."""

from dataclasses import dataclass

from hybridrt.config import EngineConfig
from hybridrt.distributed.groups import TPGroup
from hybridrt.embedding.numbers import Numbers, Scratch
from hybridrt.embedding.runtime import EmbeddedRuntime
from hybridrt.mem_cache.memory_plan import MemoryPlan
from hybridrt.models.base import CausalLM
from hybridrt.runtime.ambient import in_undisturbed
from hybridrt.runtime.build import RunTarget, Runtime, build_model, load_target, make_plan, weight_bytes


@dataclass(frozen=True)
class LoadedModel:
    """A model in the memory of its device.

    Attributes:
        target: its configuration, device, dtypes and state mode.
        model: the module, in inference mode.
    """

    config: EngineConfig
    target: RunTarget
    model: CausalLM


@in_undisturbed
def load(config: EngineConfig, *, tp: TPGroup | None = None, progress: bool = False) -> LoadedModel:
    """Reads a checkpoint's configuration and its weights.

    Args:
        config: what to load, and onto which device. `plan_memory` plans for its max_running_requests and max_model_len.
            overlap and transfer_bytes have no effect here.
        tp: this process's tensor-parallel rank; None for a model on one device.
        progress: show a bar.

    Raises:
        ConfigError, CheckpointError, DeviceError: nothing has been loaded.
    """
    path, target = load_target(config, tp or TPGroup())
    return LoadedModel(config, target, build_model(config, target, path, progress))


@in_undisturbed
def plan_memory(loaded: LoadedModel, *, budget_bytes: int, cache_slots: int = 0) -> MemoryPlan:
    """How many rows, state slots and KV pages fit into a budget.

    Args:
        budget_bytes: what pools and graph buffers may take of the model's device, without the weights and the
            activations of a step. There is no default: the device also holds memory of the host engine.
        cache_slots: state slots beyond one for each row, for snapshots and cached prefixes.

    Raises:
        MemoryBudgetError: the configuration does not fit the budget; the message says what to change.
    """
    weights = weight_bytes(loaded.model)
    return make_plan(loaded.config, loaded.target, budget_bytes=budget_bytes, weights=weights, cache_slots=cache_slots)


@in_undisturbed
def build(loaded: LoadedModel, plan: MemoryPlan, scratch: Scratch | None = None) -> EmbeddedRuntime:
    """Allocates the pools of a plan, and the backends over them.

    Args:
        scratch: which of the host engine's numbers are scratch. None: the last row, slot and page, so that real ones
            count from 0.

    Raises:
        PoolError: a scratch entry is outside its table. Nothing has been allocated.
        BackendError, ProviderNotInstalledError: no backend serves this model on this device.
    """
    numbers = Numbers.of(plan, scratch or Scratch())
    return EmbeddedRuntime(Runtime.allocate(loaded.config, loaded.target, loaded.model, plan), numbers)
