"""A whole decode or verify step of the gated delta rule: conv, SiLU, norms, gates, delta rule.

It serves Gated Delta Nets and Kimi Delta Attention, whose raw gates have one dimension more. State
modes are those of `mamba2_decode.py`, with the ring of `decode_ring.py`.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from hybridrt.base.errors import ConfigError
from hybridrt.kernels.core.operation import By, operation
from hybridrt.kernels.core.records import DeltaInputs, FusedStep, GateWeights
from hybridrt.kernels.core.slots import split_heads
from hybridrt.kernels.delta_rule.decode_ring import gdn_replay
from hybridrt.kernels.delta_rule.delta_rule import gdn_gates, recurrent_gated_delta_rule
from hybridrt.kernels.state.causal_conv1d import causal_conv1d_update
from hybridrt.kernels.state.state_ring import check_step


def _check(qkv: Tensor, a: Tensor, *_: Any, step: FusedStep, **__: Any) -> None:
    if step.conv_weights.weight.shape[1] == 0 and not step.conv_weights.applied_before:
        raise ConfigError("gdn_decode applies no activation without a conv: apply it before, and pass activation=None")
    check_step(qkv, step)
    if step.ring is not None and (kept := step.ring.gates.ndim) != a.ndim:
        raise ConfigError(
            f"a state ring whose gates have {kept} dimensions, and raw gates of {a.ndim}: both have a gate for each "
            "head (3), or one for each channel of its keys (4)"
        )


@operation(By("triton"), check=_check)
def gdn_decode(qkv: Tensor, a: Tensor, b: Tensor, *, weights: GateWeights, step: FusedStep) -> Tensor:
    """Advances each of B rows by T tokens.

    Args:
        qkv: `[B, T, C]` raw conv inputs: q (Hk*K), k (Hk*K), v (Hv*V). Any row and token stride. If
            `step.conv_weights.applied_before`, what a conv and SiLU gave; `conv_state.conv` is not
            read then, and has a column.
        a, b: `[B, T, Hv]` raw gates; a is `[B, T, Hv, K]` in Kimi Delta Attention. Any strides of
            rows and tokens.

    Returns:
        `[B, T, Hv, V]` in qkv's dtype.

    Raises:
        ConfigError: the conv ring or the state ring is too narrow for T tokens, the conv does not
            end in SiLU, there is an activation and no conv, or one of ring and step has gates of
            heads and the other of channels.
    """
    state = step.state
    conved = conved_inputs(qkv, step, causal_conv1d_update.reference)
    inputs = DeltaInputs(*split_qkv(conved, state.states), *gdn_gates(a, b, weights))
    if step.ring is None:
        return recurrent_gated_delta_rule.reference(inputs, state)
    return gdn_replay(inputs, state, step.ring)


def conved_inputs(qkv: Tensor, step: FusedStep, update: Callable[..., Tensor]) -> Tensor:
    """What the step's conv gives, by an implementation of `causal_conv1d_update`: [B, T, C]."""
    if step.conv_weights.applied_before:
        return qkv
    return update(qkv, step.conv_weights, step.conv_state, step.conv_windows)


def split_qkv(qkv: Tensor, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views q, k `[..., Hk, K]` and v `[..., Hv, V]` of the conv's channels, for a pool of states
    `[S+1, Hv, V, K]`.
    """
    _, value_heads, value_dim, key_dim = states.shape
    keys = (qkv.shape[-1] - value_heads * value_dim) // (2 * key_dim), key_dim
    q, k, v = split_heads(qkv, keys, keys, (value_heads, value_dim))
    return q, k, v
