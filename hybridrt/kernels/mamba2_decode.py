"""A whole Mamba-2 decode or verify step in one operation: conv, SiLU, time step, state, skip and gate.

It reads one merged projection (z, x|B|C, dt) and ends at the input of the output projection (or of the gated norm), in
one of three state modes:

- classic: the state is read and written each step (`values` and `intermediate_states` None);
- replay: checkpoint and ring of `state_replay` (`values`, `keys`, `gates` given);
- intermediate: the state is read only, and the state after each token stored (`intermediate_states` given).

Tokens of a row form a chain; draft trees go through `causal_conv1d_update` and `selective_state_update`.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridrt.kernels.causal_conv1d import causal_conv1d_update, check_ring
from hybridrt.kernels.mamba2_common import skip_and_gate, split_conv_channels, time_step
from hybridrt.kernels.mamba2_replay import mamba2_replay
from hybridrt.kernels.operation import by, operation
from hybridrt.kernels.selective_state_update import selective_state_update
from hybridrt.kernels.slots import consecutive
from hybridrt.kernels.state_ring import check_ring_width


def _check(xBC: Tensor, *_: Any, weight: Tensor, conv: Tensor, gates: Tensor | None = None, **__: Any) -> None:
    check_ring(conv, weight.shape[1], xBC.shape[1])
    if gates is not None:
        check_ring_width(gates.shape[2], xBC.shape[1])


@operation(by("triton"), check=_check)
def mamba2_decode(
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
    """Advances each of B rows by T tokens.

    Args:
        xBC: [B, T, C] raw conv inputs: x [H*P], B [G*N], C [G*N] side by side. dt: [B, T, H] raw. z: [B, T, H, P] or
            None. Any row and token stride: they may be column slices of one projection.
        weight: [C, K]; bias: [C] or None; A: [H] float32, negative; D, dt_bias: [H] or None.
        conv: [S+1, C, Wc] rings; states: [S+1, H, P, N].
        read_slots, write_slots: [B] int32, -1 for padding (zeros, nothing touched); equal in replay mode.
        start_positions: [B] int32, absolute position of each row's first token.
        values, keys, gates, start, length: the state ring and its cursors [B], as in `mamba2_replay`.
        intermediate_states: [R+1, T, H, P, N], as in `selective_state_update`.
        rows: [B] int32, rows of the ring or of `intermediate_states`.
        out: [B, T, H, P] of any row and token stride, where the result is to be left.

    Returns:
        [B, T, H, P] in xBC's dtype.

    Raises:
        ConfigError: the conv ring or the state ring is too narrow for T tokens.
    """
    # The separate operations one after the other, but for the plain decode step
    heads: dict[str, Any] = {"A": A, "D": D, "dt_bias": dt_bias, "dt_limit": dt_limit}
    run = None
    if xBC.shape[1] == 1 and values is None and intermediate_states is None and read_slots is write_slots:
        run = _rows_in_place(weight.shape[1], read_slots, start_positions, xBC, conv, states)
    if run is not None:
        y = _one_token(xBC, dt, z, conv[run], states[run], start_positions, weight=weight, bias=bias, **heads)
        return y if out is None else out.copy_(y)
    conved = causal_conv1d_update.reference(xBC, weight, bias, conv, read_slots, write_slots, start_positions)
    x, B, C = split_conv_channels(conved, states.shape)
    if values is None:
        y = selective_state_update.reference(
            states, x, dt, B=B, C=C, z=z, read_slots=read_slots, write_slots=write_slots,
            intermediate_states=intermediate_states, rows=rows, **heads,
        )  # fmt: skip
    else:
        assert keys is not None and gates is not None and rows is not None and start is not None and length is not None
        y = mamba2_replay(
            states, values, keys, gates, x, dt, B=B, C=C, z=z, slots=read_slots, rows=rows, start=start,
            length=length, **heads,
        )  # fmt: skip
    return y if out is None else out.copy_(y)


def _rows_in_place(taps: int, slots: Tensor, start_positions: Tensor, *tensors: Tensor) -> slice | None:
    """The pool rows that a decode step may update where they stand: consecutive slots on a CPU, all of them past the
    first K - 1 positions, everything float32. It saves two copies of each row's state and half of the operations."""
    if any(t.dtype != torch.float32 for t in tensors):
        return None
    run = consecutive(slots)
    return run if run is not None and min(start_positions.tolist()) >= taps - 1 else None


def _one_token(
    xBC: Tensor,
    dt: Tensor,
    z: Tensor | None,
    conv: Tensor,
    states: Tensor,
    start_positions: Tensor,
    *,
    weight: Tensor,
    bias: Tensor | None,
    A: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    dt_limit: tuple[float, float],
) -> Tensor:
    """One token of each of B rows, whose conv rings [B, C, Wc] and states [B, H, P, N] are updated in place."""
    taps = torch.arange(1 - weight.shape[1], 1)
    columns = (start_positions[:, None] + taps & conv.shape[2] - 1).long()[:, None].expand(-1, xBC.shape[2], -1)
    conv.scatter_(2, columns[..., -1:], xBC.transpose(1, 2))
    conved = conv.gather(2, columns).mul_(weight).sum(-1)
    x, B, C = split_conv_channels(F.silu(conved if bias is None else conved.add_(bias), inplace=True), states.shape)
    step = time_step(dt[:, 0], dt_bias, dt_limit)
    heads, keys = x.shape[1], B.reshape(-1, 1, B.shape[2])
    state = states.mul_((step * A).exp_()[..., None, None]).view(len(keys), -1, B.shape[2])
    state.addcmul_((x * step[..., None]).reshape(len(keys), -1, 1), keys)
    y = torch.bmm(C.reshape(keys.shape), state.transpose(1, 2)).view(-1, heads, x.shape[2])
    return skip_and_gate(y, x, D, None if z is None else z[:, 0])[:, None]
