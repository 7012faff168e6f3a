"""The preallocated memory of a run: KV, row tables and recurrent states."""

from dataclasses import dataclass

from hybridrt.mem_cache.pools.kv_pool import KVPool
from hybridrt.mem_cache.pools.req_to_token_pool import HybridReqToTokenPool
from hybridrt.mem_cache.pools.slab_memory import SlabMemory


@dataclass(frozen=True)
class Pools:
    """The preallocated memory of a run.

    Attributes:
        shared: what the page groups, and the states, share; None: nothing.
    """

    kv: KVPool
    req_to_token: HybridReqToTokenPool
    shared: SlabMemory | None = None
