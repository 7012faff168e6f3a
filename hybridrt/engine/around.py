"""What stands around an engine: its counters, the seeds of its requests, and who else computes prompts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hybridrt.engine.request import DraftRates


@dataclass(slots=True)
class EngineCounters(DraftRates):
    """Since the engine was built: steps, tokens, drafts (as RequestMetrics counts them) and how samples ended. Now: who
    runs, who waits, what is free."""

    steps: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    proposed: int = 0
    accepted: int = 0
    target_steps: int = 0
    verify_steps: int = 0
    retractions: int = 0
    running: int = 0
    waiting: int = 0
    free_rows: int = 0
    free_slots: int = 0
    free_pages: int = 0


def derive_seed(seed: int, index: int) -> int:
    """Seed number `index` of the stream that `seed` starts, in [0, 2**63): SplitMix64 (Steele, Lea and Flood 2014),
    whose output at step i is a hash of seed + i * 0x9E3779B97F4A7C15."""
    mask = 2**64 - 1
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (z ^ (z >> 31)) >> 1


class PrefillSource(Protocol):
    """Computes prompts elsewhere, all but their last token. It must call `Engine.start` or `Engine.fail` for every
    request, unless the request has ended before."""

    def request(self, request_id: str, tokens: Sequence[int]) -> None:
        """Begins, and returns at once."""
        ...

    def advance(self) -> None:
        """Called at the head of every step; never waits for long."""
        ...
