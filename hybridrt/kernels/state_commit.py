"""Copies the state after the last accepted token back into the pool ("intermediate" speculation)."""

from torch import Tensor

from hybridrt.kernels.providers import register, select
from hybridrt.kernels.slots import write_rows

register("commit_intermediate", "torch", "hybridrt.kernels.state_commit:commit_intermediate_reference")
register(
    "commit_intermediate", "triton", "hybridrt.kernels.state_commit_triton:commit_intermediate_triton", priority=10
)


def commit_intermediate(temporal: Tensor, intermediate: Tensor, slots: Tensor, rows: Tensor, accepted: Tensor) -> None:
    """temporal[slots[b]] = intermediate[rows[b], accepted[b] - 1] where accepted[b] > 0, in place.

    Args:
        temporal: [S + 1, *state]; intermediate: [R + 1, T, *state].
        slots, rows, accepted: [B] int32; slots -1 or accepted 0 leave everything as it is.
    """
    select("commit_intermediate", temporal.device.type)(temporal, intermediate, slots, rows, accepted)


def commit_intermediate_reference(
    temporal: Tensor, intermediate: Tensor, slots: Tensor, rows: Tensor, accepted: Tensor
) -> None:
    kept = slots.masked_fill(accepted == 0, -1)
    write_rows(temporal, kept, intermediate[rows, (accepted - 1).clamp(min=0)])
