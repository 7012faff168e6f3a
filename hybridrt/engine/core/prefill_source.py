"""Protocol for computing an engine's prompts elsewhere."""

from collections.abc import Sequence
from typing import Protocol


class PrefillSource(Protocol):
    """Computes prompts, except their last token, elsewhere. It must call `Engine.start` or
    `Engine.fail` for every request that has not ended before.
    """

    def request(self, request_id: str, tokens: Sequence[int], salt: str) -> None:
        """Begins, and returns at once. `salt`: the request's `cache_salt`, "" without."""

    def advance(self) -> None:
        """Called at the head of every step; never waits for long."""
