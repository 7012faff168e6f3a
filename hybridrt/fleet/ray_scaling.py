"""How many replicas Ray Serve runs: by their requests, those that wait, and the time to the first token."""

from dataclasses import dataclass
from typing import Any

MOST_GROWTH = 2.0  # of the number of replicas, by slow first tokens alone


@dataclass(frozen=True)
class ScalingPolicy:
    """A policy of Ray Serve's AutoscalingConfig. Ray applies its limits and delays to what it returns.

    The number is the largest of three: of the requests of all replicas by `target_requests`, of those
    that wait by `target_waiting`, and of the replicas themselves, times their mean time to the first
    token by `target_first_token_s` if that is longer.
    """

    target_requests: float
    target_waiting: float
    target_first_token_s: float

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """`context`: Ray's AutoscalingContext, with what each replica has recorded."""
        recorded = context.aggregated_metrics or {}
        requests, waiting = (sum(recorded.get(name, {}).values()) for name in ("requests", "waiting"))
        first = [seconds for seconds in recorded.get("first_token_s", {}).values() if seconds > 0]
        slow = sum(first) / len(first) / self.target_first_token_s if first else 0.0
        by_first = context.current_num_replicas * min(slow, MOST_GROWTH) if slow > 1 else 0.0
        return max(requests / self.target_requests, waiting / self.target_waiting, by_first, 0.0), {}
