"""A whole Gated Delta Net decode or verify step in one operation: conv, SiLU, l2 norms, gates and the delta rule.

It reads the merged projection and ends at the input of the gated norm, in one of three state modes:

- classic: the state is read and written each step (`values` and `intermediate_states` None);
- replay: checkpoint and ring of `gdn_replay` (`values`, `keys`, `gates` given);
- intermediate: the state is read only, and the state after each token stored (`intermediate_states` given).

Tokens of a row form a chain; draft trees go through `causal_conv1d_update` and `recurrent_gated_delta_rule`.
"""

from typing import Any

from torch import Tensor

from hybridrt.kernels.causal_conv1d import causal_conv1d_update, check_ring
from hybridrt.kernels.gated_delta_rule import gdn_gates, recurrent_gated_delta_rule
from hybridrt.kernels.gdn_replay import gdn_replay
from hybridrt.kernels.operation import by, operation
from hybridrt.kernels.state_ring import check_ring_width


def _check(qkv: Tensor, *_: Any, weight: Tensor, conv: Tensor, gates: Tensor | None = None, **__: Any) -> None:
    check_ring(conv, weight.shape[1], qkv.shape[1])
    if gates is not None:
        check_ring_width(gates.shape[2], qkv.shape[1])


@operation(by("triton"), check=_check)
def gdn_decode(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    weight: Tensor,
    bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
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
    """Advances each of B rows by T tokens.

    Args:
        qkv: `[B, T, C]` raw conv inputs: q (Hk*K), k (Hk*K), v (Hv*V) side by side; a, b: `[B, T, Hv]` raw gate inputs.
            Any row and token stride: they may be column slices of one projection.
        weight: `[C, taps]`; bias: `[C]` or None; A_log, dt_bias: `[Hv]` float32.
        conv: `[S+1, C, Wc]` rings; states: `[S+1, Hv, V, K]`.
        read_slots, write_slots: `[B]` int32, -1 for padding (zeros, nothing touched); equal in replay mode.
        start_positions: `[B]` int32, absolute position of each row's first token.
        values, keys, gates, start, length: the state ring and its cursors `[B]`, as in `gdn_replay`.
        intermediate_states: `[R+1, T, Hv, V, K]`, as in `recurrent_gated_delta_rule`.
        rows: `[B]` int32, rows of the ring or of `intermediate_states`.

    Returns:
        `[B, T, Hv, V]` in qkv's dtype.

    Raises:
        ConfigError: the conv ring or the state ring is too narrow for T tokens.
    """
    # The separate operations one after the other
    conved = causal_conv1d_update.reference(qkv, weight, bias, conv, read_slots, write_slots, start_positions)
    q, k, v = split_qkv(conved, states)
    g, beta = gdn_gates.reference(a, b, A_log, dt_bias)
    if values is None:
        return recurrent_gated_delta_rule.reference(
            states, q, k, v, g, beta, read_slots=read_slots, write_slots=write_slots,
            intermediate_states=intermediate_states, rows=rows,
        )  # fmt: skip
    assert keys is not None and gates is not None and rows is not None and start is not None and length is not None
    return gdn_replay(
        states, values, keys, gates, q, k, v, g, beta, slots=read_slots, rows=rows, start=start, length=length
    )


def split_qkv(qkv: Tensor, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views q, k `[..., Hk, K]` and v `[..., Hv, V]` of the conv's channels, for a pool of states `[S+1, Hv, V, K]`."""
    _, value_heads, value_dim, key_dim = states.shape
    v_width = value_heads * value_dim
    q, k, v = qkv.split([*[(qkv.shape[-1] - v_width) // 2] * 2, v_width], -1)
    return q.unflatten(-1, (-1, key_dim)), k.unflatten(-1, (-1, key_dim)), v.unflatten(-1, (value_heads, value_dim))
