"""The preallocated memory of a run: KV, row tables and recurrent states."""

from dataclasses import dataclass

from hybridrt.mem_cache.pools.kv_pool import KVPool
from hybridrt.mem_cache.pools.req_to_token_pool import HybridReqToTokenPool
from hybridrt.mem_cache.pools.slab_memory import SlabMemory


@dataclass(frozen=True)
class Pools:
    """The preallocated memory of a run.

    Attributes:
        shared: the memory that page groups and states share; None: each has its own.
    """

    kv: KVPool
    req_to_token: HybridReqToTokenPool
    shared: SlabMemory | None = None
