"""Triton `mamba2_decode`: one launch of the state update kernel, or the two of replay; all run the conv themselves."""

from torch import Tensor

from hybridrt.kernels.mamba2_common import split_conv_channels
from hybridrt.kernels.mamba2_replay_decode_triton import replay_decode_triton
from hybridrt.kernels.selective_state_update_triton import launch_update


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
) -> Tensor:
    """Triton `mamba2_decode`."""
    x, B, C = split_conv_channels(xBC, states.shape)
    raw = conv, weight, bias, start_positions
    if values is None:
        return launch_update(
            states,
            x,
            dt,
            A,
            B,
            C,
            D,
            dt_bias,
            dt_limit,
            z,
            read_slots,
            write_slots,
            intermediate_states,
            rows,
            None,
            *raw,
        )
    assert keys is not None and gates is not None and rows is not None and start is not None and length is not None
    return replay_decode_triton(
        xBC, dt, z, weight=weight, bias=bias, A=A, D=D, dt_bias=dt_bias, dt_limit=dt_limit, conv=conv, states=states,
        values=values, keys=keys, gates=gates, slots=read_slots, rows=rows, start=start, length=length,
        start_positions=start_positions,
    )  # fmt: skip
