"""Triton `mamba2_decode`: conv, if there is one, and state update, or the two launches of replay."""

from torch import Tensor

from hybridrt.kernels.core.records import FusedStep, SSMInputs, SSMWeights
from hybridrt.kernels.mamba.mamba2_replay_decode_triton import replay_decode_triton
from hybridrt.kernels.mamba.mamba2_scan import split_conv_channels
from hybridrt.kernels.mamba.selective_state_update_triton import selective_state_update_triton
from hybridrt.kernels.state.causal_conv1d_triton import causal_conv1d_update_triton


def mamba2_decode_triton(
    xBC: Tensor, dt: Tensor, z: Tensor | None, *, weights: SSMWeights, step: FusedStep, out: Tensor | None = None
) -> Tensor:
    """Triton `mamba2_decode`."""
    if step.ring is not None:
        return replay_decode_triton(xBC, dt, z, weights, step, out)
    taps = step.conv_weights.weight.shape[1]
    if taps:  # apart: the update would repeat the conv for every tile of the state
        xBC = causal_conv1d_update_triton(xBC, step.conv_weights, step.conv_state, step.conv_windows)
    x, B, C = split_conv_channels(xBC, step.state.states.shape)
    tokens = SSMInputs(x, dt, B, C, z)
    return selective_state_update_triton(tokens, weights, step.state, out, silu_inputs=taps == 0)
