"""A model in memory with its pools and its backend, ready to run steps."""

from dataclasses import dataclass

from hybridrt.attention.base import AttentionBackend
from hybridrt.base.engine_config import EngineConfig
from hybridrt.mem_cache.pools.kv_pool import ONES, KVPool, LayerScales
from hybridrt.mem_cache.pools.mamba_pool import MambaPool
from hybridrt.mem_cache.pools.memory_plan import MemoryPlan
from hybridrt.mem_cache.pools.pools import Pools
from hybridrt.mem_cache.pools.req_to_token_pool import HybridReqToTokenPool
from hybridrt.mem_cache.pools.slab_memory import SlabMemory
from hybridrt.models.base import CausalLM
from hybridrt.recurrent.backends import create_backend
from hybridrt.runtime.load.kept_state import kv_layers, pool_spec, table_length
from hybridrt.runtime.load.pool_costs import own_pages
from hybridrt.runtime.load.target import RunTarget


@dataclass(frozen=True)
class Runtime:
    """A model in memory, ready to run steps.

    Attributes:
        plan: rows, slots and pages that a scheduler may lend.
    """

    config: EngineConfig
    target: RunTarget
    model: CausalLM
    plan: MemoryPlan
    pools: Pools
    backend: AttentionBackend

    @classmethod
    def allocate(
        cls, config: EngineConfig, target: RunTarget, model: CausalLM, plan: MemoryPlan, kv_scales: LayerScales = ONES
    ) -> "Runtime":
        """The model's pools as planned, and a backend over them. `kv_scales`: of a KV cache of
        codes."""
        pools = build_pools(config, target, plan, kv_scales)
        backend = create_backend(
            config,
            target.model_config,
            layers=model.mixers(),
            kv_pool=pools.kv,
            req_to_token_pool=pools.req_to_token,
            composite=model.composite,
        )
        return cls(config, target, model, plan, pools, backend)


def build_pools(config: EngineConfig, target: RunTarget, plan: MemoryPlan, kv_scales: LayerScales = ONES) -> Pools:
    """Allocates everything that the plan counts."""
    device, spec = target.device, pool_spec(config, target)
    shared = None if plan.slabs is None else SlabMemory(plan.slabs, device)
    sizes = {"num_slots": plan.num_slots, "num_rows": plan.num_rows}
    mamba = MambaPool(spec, **sizes, device=device, memory=shared) if spec.groups else None
    kv = KVPool(
        kv_layers(config, target), num_pages=[group.num_pages for group in plan.groups], page_size=plan.page_size,
        device=device, own_pages=own_pages(config, plan), memory=shared, scales=kv_scales,
    )  # fmt: skip
    table = HybridReqToTokenPool(
        num_rows=plan.num_rows, max_context=table_length(config, target, plan.max_model_len), page_size=plan.page_size,
        mamba_pool=mamba, device=device, num_groups=max(len(plan.groups), 1), mrope=target.model_config.mrope,
    )  # fmt: skip
    return Pools(kv, table, shared)
