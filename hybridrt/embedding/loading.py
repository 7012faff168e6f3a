"""Makes an `EmbeddedRuntime` from a configuration: weights, memory plan, pools and backends."""

from dataclasses import dataclass, field

from hybridrt.base.config_json import check_fields, integer
from hybridrt.base.engine_config import EngineConfig
from hybridrt.base.errors import ConfigError, shown
from hybridrt.base.turns import in_undisturbed
from hybridrt.collectives.groups import TPGroup
from hybridrt.embedding.numbers import Numbers, Scratch
from hybridrt.embedding.runtime import EmbeddedRuntime
from hybridrt.engine.text.tokenizer import HFTokenizer, load_tokenizer
from hybridrt.mem_cache.pools.kv_pool import LayerScales
from hybridrt.mem_cache.pools.memory_plan import MemoryPlan
from hybridrt.models.base import CausalLM
from hybridrt.runtime.load.build_model import build_model, weight_bytes
from hybridrt.runtime.load.load_target import load_target
from hybridrt.runtime.load.make_plan import make_plan
from hybridrt.runtime.load.model_path import resolve_model_path
from hybridrt.runtime.load.runtime import Runtime
from hybridrt.runtime.load.target import RunTarget
from hybridrt.runtime.run.kv_scales import find_kv_scales


@dataclass(frozen=True)
class LoadedModel:
    """A model in the memory of its device.

    Attributes:
        target: configuration, device, dtypes and state mode.
        model: the module, in inference mode.
        kv_scales: scales of a KV cache of codes, by layer.
    """

    config: EngineConfig
    target: RunTarget
    model: CausalLM
    kv_scales: LayerScales = field(default_factory=dict)

    def tokenizer(self) -> HFTokenizer | None:
        """The checkpoint's tokenizer; None if it has none.

        Raises:
            ConfigError, CheckpointError: its files cannot be used.
        """
        return load_tokenizer(resolve_model_path(self.config.model))


@in_undisturbed
def load(config: EngineConfig, *, tp: TPGroup | None = None, progress: bool = False) -> LoadedModel:
    """Reads a checkpoint's configuration and its weights.

    Args:
        config: max_running_requests and max_model_len are for `plan_memory`. overlap and
            transfer_bytes have no effect.
        tp: place of this process among `config.tp_size`, from `join_ranks`; None: it is the only one. All of
            them make the same calls in the same order.
        progress: show a bar.

    Raises:
        ConfigError, CheckpointError, DeviceError: nothing has been loaded.
        BackendError, ProviderNotInstalledError: HYBRIDRT_PROVIDERS names what cannot serve.
    """
    _check_kind("config", config, EngineConfig)
    _check_kind("tp", tp or TPGroup(), TPGroup)
    if config.tp_size != (found := 1 if tp is None else tp.size):
        raise ConfigError(
            f"tp_size is {config.tp_size}, and tp is a group of {found}: pass tp_size={found}, or use "
            f"hybridrt.LLM(model, tp_size={config.tp_size}), which starts ranks and schedules itself; or start as many "
            "processes, and pass each what join_ranks gives it"
        )
    path, target = load_target(config, tp or TPGroup())
    model = build_model(config, target, path, progress)
    return LoadedModel(config, target, model, find_kv_scales(config, target, model, path))


@in_undisturbed
def plan_memory(loaded: LoadedModel, *, budget_bytes: int, cache_slots: int = 0) -> MemoryPlan:
    """How many rows, state slots and KV pages fit into a budget.

    Args:
        budget_bytes: for pools and graph buffers, without weights and activations. There is no
            default: the host engine uses the device, too. Of several ranks the smallest counts.
        cache_slots: state slots beyond one for each row, for snapshots and cached prefixes.

    Raises:
        MemoryBudgetError: the configuration does not fit; the message says what to change.
        ConfigError: an argument has the wrong kind.
    """
    _check_kind("loaded", loaded, LoadedModel)
    sizes = {"budget_bytes": integer(0, 2**63 - 1), "cache_slots": integer(-(2**63), 2**63 - 1)}
    check_fields({"budget_bytes": budget_bytes, "cache_slots": cache_slots}, sizes)
    weights, budget_bytes = weight_bytes(loaded.model), loaded.target.tp.minimum(budget_bytes)
    return make_plan(loaded.config, loaded.target, budget_bytes=budget_bytes, weights=weights, cache_slots=cache_slots)


@in_undisturbed
def build(loaded: LoadedModel, plan: MemoryPlan, scratch: Scratch | None = None) -> EmbeddedRuntime:
    """Allocates the pools of a plan, and the backends over them.

    Args:
        scratch: the host engine's scratch numbers. None: the last row, slot and page.

    Raises:
        PoolError: a scratch entry is outside its table. Nothing has been allocated.
        BackendError, ProviderNotInstalledError: no backend serves this model on this device.
        ConfigError: an argument has the wrong kind.
    """
    _check_kind("loaded", loaded, LoadedModel)
    _check_kind("plan", plan, MemoryPlan)
    _check_kind("scratch", scratch or Scratch(), Scratch)
    numbers = Numbers.from_plan(plan, scratch or Scratch())
    runtime = Runtime.allocate(loaded.config, loaded.target, loaded.model, plan, loaded.kv_scales)
    return EmbeddedRuntime(runtime, numbers)


def _check_kind(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise ConfigError(f"{name} is {shown(value)}; it must be a hybridrt.embedding.{kind.__name__}")
