"""The memory plan of a model on a device."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from hybridrt.base.engine_config import EngineConfig
from hybridrt.base.errors import ConfigError, MemoryBudgetError
from hybridrt.mem_cache.pools.host_plan import HostPlan, plan_host
from hybridrt.mem_cache.pools.kv_pool import cell_bytes, page_bytes
from hybridrt.mem_cache.pools.memory_plan import MemoryPlan, plan_memory, share_memory
from hybridrt.runtime.load.graph_costs import DEFAULT_ROWS
from hybridrt.runtime.load.kept_state import keeps_prefixes, kv_layers, page_demands, pool_spec
from hybridrt.runtime.load.pool_costs import own_pages, unit_costs
from hybridrt.runtime.load.target import RunTarget


def make_plan(
    config: EngineConfig, target: RunTarget, *, budget_bytes: int, weights: int = 0, activations: int = 0,
    cache_slots: int | None = None, share: bool = False,
) -> MemoryPlan:  # fmt: skip
    """The memory plan for pools of `budget_bytes`.

    Args:
        share: page groups and states share memory. Then CacheCoordinator alone lends them.
        cache_slots: state slots for cached prefixes; None takes a share if the prefix cache is on.
    """
    mc, host = target.model_config, _plan_host(config, target)
    cache_slots = config.cache_slots if cache_slots is None and config.prefix_cache else cache_slots
    plan = partial(
        plan_memory,
        budget_bytes=budget_bytes,
        demands=page_demands(config, target),
        page_size=config.page_size,
        max_running_requests=config.max_running_requests,
        default_rows=DEFAULT_ROWS[target.device.type],
        max_model_len=config.max_model_len,
        model_limit=mc.max_position_embeddings,
        cache_slots=cache_slots or 0,
        share_slots=cache_slots is None and keeps_prefixes(config, mc),
        keeps_prefixes=keeps_prefixes(config, mc),
        weight_bytes=weights,
        activation_bytes=activations,
    )
    shared = _in_slabs(config, target, _fit(config, target, partial(plan, one_memory=True), host)) if share else None
    return shared or _fit(config, target, plan, host)


def _fit(config: EngineConfig, target: RunTarget, plan: Callable[..., MemoryPlan], host: HostPlan) -> MemoryPlan:
    """The plan that charges graphs and page tables for requests as long as fit, if no option says how long they are.

    Args:
        plan: of given costs.
    """

    def of_length(length: int) -> MemoryPlan:
        """With room for requests of up to `length` tokens in graphs, page tables and a draft model."""
        found = plan(costs=unit_costs(config, target, length))
        return replace(found, max_model_len=min(found.max_model_len, length))

    length = config.max_model_len or plan(costs=unit_costs(config, target, 1)).max_model_len
    while True:
        try:
            found = of_length(length)
            break
        except MemoryBudgetError:
            if config.max_model_len is not None or length == 1:
                raise
            length //= 2
    return replace(found, host=host, costs=unit_costs(config, target, found.max_model_len))


def _plan_host(config: EngineConfig, target: RunTarget) -> HostPlan:
    """The prefix cache's part in main memory. ConfigError, MemoryBudgetError: the option cannot be used."""
    image, page = pool_spec(config, target).image_bytes(), page_bytes(kv_layers(config, target), config.page_size)
    host = plan_host(config.host_cache_bytes // target.tp.size, page, image)
    if config.host_cache_bytes and not keeps_prefixes(config, target.model_config):
        raise ConfigError("host_cache_bytes has no use here: this model keeps no prefixes there (docs/prefix-cache.md)")
    if config.host_cache_bytes and not host:
        raise MemoryBudgetError(
            f"host_cache_bytes is {config.host_cache_bytes}; a KV page and a state take "
            f"{2 * max(sum(page), image) * target.tp.size} bytes: raise it"
        )
    return host


def _in_slabs(config: EngineConfig, target: RunTarget, plan: MemoryPlan) -> MemoryPlan | None:
    cells, slot = cell_bytes(kv_layers(config, target), config.page_size), pool_spec(config, target).packed_slot_bytes()
    return share_memory(plan, cells, own_pages(config, plan), slot)
