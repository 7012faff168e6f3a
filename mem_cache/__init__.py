"""Pools of device memory and the prefix cache. People import their names from here."""

from hybridrt.base.lazy_names import lazy_names

NAMES = {
    "HybridReqToTokenPool": "hybridrt.mem_cache.pools.req_to_token_pool:HybridReqToTokenPool",
    "KVPool": "hybridrt.mem_cache.pools.kv_pool:KVPool",
    "LayerCache": "hybridrt.mem_cache.pools.mamba_pool:LayerCache",
    "MambaPool": "hybridrt.mem_cache.pools.mamba_pool:MambaPool",
    "MambaPoolSpec": "hybridrt.mem_cache.pools.mamba_pool_spec:MambaPoolSpec",
    "Pools": "hybridrt.mem_cache.pools.pools:Pools",
}
__getattr__ = lazy_names(__name__, NAMES)
