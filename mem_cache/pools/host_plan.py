"""Numbers of KV pages and states that the prefix cache keeps in main memory."""

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNED = 16  # bytes: tensors of an image start at multiples
STAGED_BYTES = 32 << 20  # of pages that are gathered on the device at a time
STATE_SHARE = 0.5  # of the bytes, if a model has KV and states


@dataclass(frozen=True)
class HostPlan:
    """One rank's part of the tier.

    Attributes:
        num_pages: KV pages of each page group that fit. num_states: recurrent states that fit.
        page_bytes: of a page of each page group. state_bytes: of a state.
    """

    num_pages: int = 0
    num_states: int = 0
    page_bytes: Sequence[int] = ()
    state_bytes: int = 0

    @property
    def nbytes(self) -> int:
        return self.num_pages * sum(self.page_bytes) + self.num_states * self.state_bytes

    def __bool__(self) -> bool:
        return bool(self.num_pages or self.num_states)


NO_HOST_PLAN = HostPlan()


def plan_host(budget_bytes: int, page_bytes: Sequence[int], state_bytes: int) -> HostPlan:
    """How much fits into `budget_bytes`. page_bytes is empty without attention layers, state_bytes
    is 0 without recurrent layers. With both, the plan is empty if one of each does not fit.
    """
    set_bytes = sum(page_bytes)
    share = STATE_SHARE if set_bytes and state_bytes else float(bool(state_bytes))
    states = int(budget_bytes * share) // state_bytes if state_bytes else 0
    pages = (budget_bytes - states * state_bytes) // set_bytes if set_bytes else 0
    if (set_bytes and not pages) or (state_bytes and not states):
        return NO_HOST_PLAN
    return HostPlan(pages, states, tuple(page_bytes), state_bytes)


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNED) * ALIGNED
