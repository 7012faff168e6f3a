"""The preallocated memory of a run: KV, row tables and recurrent states."""

from dataclasses import dataclass

from hybridrt.mem_cache.pools.kv_pool import KVPool
from hybridrt.mem_cache.pools.req_to_token_pool import HybridReqToTokenPool


@dataclass(frozen=True)
class Pools:
    """The preallocated memory of a run."""

    kv: KVPool
    req_to_token: HybridReqToTokenPool
