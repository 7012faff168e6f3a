"""How many replicas Ray Serve runs: by their requests, those that wait, and the time to the first token."""

from dataclasses import dataclass
from typing import Any

MOST_GROWTH = 2.0  # of the number of replicas, by slow first tokens alone


@dataclass(frozen=True)
class ScalingPolicy:
    """A policy of Ray Serve's AutoscalingConfig. Ray applies its limits and delays to what it returns.

    The number is the largest of three:
    - the requests of all replicas, divided by `target_requests`;
    - the requests that wait, divided by `target_waiting`;
    - if the mean time to the first token is longer than `target_first_token_s`: the present number of
      replicas, times how many times longer it is, at most MOST_GROWTH.
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
