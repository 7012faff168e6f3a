"""Triton `mamba2_decode`: conv and state update, or the two launches of replay."""

from torch import Tensor

from hybridrt.kernels.causal_conv1d_triton import causal_conv1d_update_triton
from hybridrt.kernels.mamba2_common import split_conv_channels
from hybridrt.kernels.mamba2_replay_decode_triton import replay_decode_triton
from hybridrt.kernels.selective_state_update_triton import selective_state_update_triton


def mamba2_decode_triton(
    xBC: Tensor,
    dt: Tensor,
    z: Tensor | None,
    *,
    weight: Tensor,
    bias: Tensor | None,
    A: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    conv: Tensor,
    states: Tensor,
    read_slots: Tensor,
    write_slots: Tensor,
    start_positions: Tensor,
    values: Tensor | None = None,
    keys: Tensor | None = None,
    gates: Tensor | None = None,
    start: Tensor | None = None,
    length: Tensor | None = None,
    intermediate_states: Tensor | None = None,
    rows: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Triton `mamba2_decode`."""
    if values is None:
        # Two launches: conved once more for every tile of the state, the inputs cost more than the second launch.
        conved = causal_conv1d_update_triton(xBC, weight, bias, conv, read_slots, write_slots, start_positions)
        x, B, C = split_conv_channels(conved, states.shape)
        return selective_state_update_triton(
            states, x, dt, A, B, C, D=D, dt_bias=dt_bias, dt_limit=dt_limit, z=z, read_slots=read_slots,
            write_slots=write_slots, intermediate_states=intermediate_states, rows=rows, out=out,
        )  # fmt: skip
    assert keys is not None and gates is not None and rows is not None and start is not None and length is not None
    return replay_decode_triton(
        xBC, dt, z, weight=weight, bias=bias, A=A, D=D, dt_bias=dt_bias, dt_limit=dt_limit, conv=conv, states=states,
        values=values, keys=keys, gates=gates, slots=read_slots, rows=rows, start=start, length=length,
        start_positions=start_positions, out=out,
    )  # fmt: skip
