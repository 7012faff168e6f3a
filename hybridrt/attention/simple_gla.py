"""The backend of simple gated linear attention: Mamba-2's state update and chunked scan, without a conv."""

from typing import Any

import torch

from hybridrt.kernels.core.records import SSMInputs, SSMWeights
from hybridrt.kernels.mamba.mamba2_scan import mamba2_chunk_scan
from hybridrt.kernels.mamba.selective_state_update import selective_state_update
from hybridrt.recurrent.backend import Inputs, MambaAttnBackendBase
from hybridrt.recurrent.segments import DecodeSegment, ExtendSegment


class SimpleGLAAttnBackend(MambaAttnBackendBase):
    """Simple GLA layers: S_t = exp(A) S_{t-1} + v_t k_t^T and y_t = S_t q_t in each head.

    This is a selective state space model with x = v, B = k and C = q, a group for each head, and a time step of one.

    Inputs: v, k, q [T, H, P], normed and rotated; strided views will do.
    """

    kind, scan, saves_at_chunks = "simple_gla", "mamba2_chunk_scan", True

    def decode(self, layer: Any, inputs: Inputs, segment: DecodeSegment) -> torch.Tensor:
        tokens = _tokens(layer, *(segment.by_row(inputs[name]) for name in "vkq"))
        state = segment.state(self.layer_cache(layer.layer_id))
        return selective_state_update(tokens, _weights(layer), state).flatten(0, 1).flatten(1)

    def extend(self, layer: Any, inputs: Inputs, segment: ExtendSegment) -> torch.Tensor:
        tokens = _tokens(layer, *(inputs[name] for name in "vkq"))
        state = segment.state(self.layer_cache(layer.layer_id))
        return mamba2_chunk_scan(tokens, _weights(layer), state, segment.prompts).flatten(1)


def _tokens(layer: Any, v: torch.Tensor, k: torch.Tensor, q: torch.Tensor) -> SSMInputs:
    return SSMInputs(v, layer.steps.expand(v.shape[:-1]), k, q)


def _weights(layer: Any) -> SSMWeights:
    """The limits make every time step one, whatever the raw step."""
    return SSMWeights(layer.A, dt_limit=(1.0, 1.0))
