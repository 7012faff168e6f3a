"""Triton `mamba2_decode`: conv and state update, or the two launches of replay."""

import torch.nn.functional as F
from torch import Tensor

from hybridrt.kernels.causal_conv1d_triton import causal_conv1d_update_triton
from hybridrt.kernels.mamba2_common import split_conv_channels
from hybridrt.kernels.mamba2_replay_decode_triton import replay_decode_triton
from hybridrt.kernels.records import FusedStep, SSMInputs, SSMWeights
from hybridrt.kernels.selective_state_update_triton import selective_state_update_triton


def mamba2_decode_triton(
    xBC: Tensor, dt: Tensor, z: Tensor | None, *, weights: SSMWeights, step: FusedStep, out: Tensor | None = None
) -> Tensor:
    """Triton `mamba2_decode`."""
    if step.ring is not None:
        return replay_decode_triton(xBC, dt, z, weights, step, out)
    # Two launches: one kernel would repeat the conv for every tile of the state, which costs more than a launch.
    conv, taps = (step.conv_weights, step.conv_state, step.conv_nodes), step.conv_weights.weight.shape[1]
    conved = causal_conv1d_update_triton(xBC, *conv) if taps else F.silu(xBC)
    x, B, C = split_conv_channels(conved, step.state.states.shape)
    return selective_state_update_triton(SSMInputs(x, dt, B, C, z), weights, step.state, out)
