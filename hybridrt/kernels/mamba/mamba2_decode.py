"""A whole Mamba-2 decode or verify step: conv, SiLU, time step, state, skip and gate.

A layer without a conv passes weights without taps and conv rings without channels. State modes:

- classic: the state is read and written each step;
- replay, with a `ring`: the state is a checkpoint, the ring holds the inputs since
  (`mamba2_replay.py`);
- intermediate, with `state.intermediate`: the state after each token is stored there, and the pool
  is only read. Only in this mode may tokens have predecessors.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from hybridrt.base.errors import ConfigError
from hybridrt.kernels.core.operation import By, operation
from hybridrt.kernels.core.records import FusedStep, SSMInputs, SSMWeights
from hybridrt.kernels.mamba.mamba2_replay import mamba2_replay
from hybridrt.kernels.mamba.mamba2_scan import split_conv_channels
from hybridrt.kernels.mamba.selective_state_update import selective_state_update
from hybridrt.kernels.state.causal_conv1d import causal_conv1d_update
from hybridrt.kernels.state.state_ring import check_step


def _check(xBC: Tensor, *_: Any, step: FusedStep, **__: Any) -> None:
    if step.conv_weights.applied_before:
        raise ConfigError('mamba2_decode applies SiLU to inputs without a conv: pass activation="silu"')
    check_step(xBC, step)


@operation(By("triton"), check=_check)
def mamba2_decode(
    xBC: Tensor, dt: Tensor, z: Tensor | None, *, weights: SSMWeights, step: FusedStep, out: Tensor | None = None
) -> Tensor:
    """Advances each of B rows by T tokens.

    Args:
        xBC: [B, T, C] raw conv inputs: x [H*P], B [G*N], C [G*N]. dt: [B, T, H] raw. z: [B, T, H,
            P] or None. Any row and token stride.
        out: [B, T, H, P] of any row and token stride, for the result.

    Returns:
        [B, T, H, P] in xBC's dtype.

    Raises:
        ConfigError: the conv ring or the state ring is too narrow for T tokens, or the conv (or, if
            there is none, its activation) is not SiLU.
    """
    conv_weights, state = step.conv_weights, step.state
    taps = conv_weights.weight.shape[1]
    conved = (
        causal_conv1d_update.reference(xBC, conv_weights, step.conv_state, step.conv_windows) if taps else F.silu(xBC)
    )
    x, B, C = split_conv_channels(conved, state.states.shape)
    tokens = SSMInputs(x, dt, B, C, z)
    if step.ring is None:
        return selective_state_update.reference(tokens, weights, state, out)
    y = mamba2_replay(tokens, weights, state, step.ring)
    return y if out is None else out.copy_(y)
