"""Protocol for computing an engine's prompts elsewhere."""

from collections.abc import Sequence
from typing import Protocol

from hybridrt.mem_cache.prefix_tree.cache_key import CacheKey


class PrefillSource(Protocol):
    """Computes prompts, except their last token, elsewhere. It must call `Engine.start` or
    `Engine.fail` for every request that has not ended before.
    """

    def request(self, request_id: str, tokens: Sequence[int], key: CacheKey) -> None:
        """Begins, and returns at once. `key`: the request's `cache_key`."""

    def advance(self) -> None:
        """Called at the head of every step; never waits for long."""
