"""The backend of lightning attention: Mamba-2's, for a layer without a conv, steps, skip or gate."""

from typing import Any

import torch

from hybridrt.attention.mamba2 import Mamba2AttnBackend
from hybridrt.kernels.core.records import ConvWeights, SSMWeights
from hybridrt.kernels.dense.activation import sigmoid_mul
from hybridrt.recurrent.segments import ExtendSegment


class LightningAttnBackend(Mamba2AttnBackend):
    """Lightning attention: S_t = exp(A) S_{t-1} + v_t k_t^T and y_t = S_t q_t in each head, with SiLU on q, k and v.

    This is Mamba-2 with x = v, B = k and C = q, a group for each head, and a time step of one.

    Inputs: xBC [T, v | k | q] before SiLU, dt [T, H] of any numbers; strided views will do.
    """

    kind = "lightning"

    @staticmethod
    def weights(layer: Any) -> SSMWeights:
        """The limits make every time step one, whatever the raw step."""
        return SSMWeights(layer.A, dt_limit=(1.0, 1.0))

    @staticmethod
    def conv_weights(layer: Any) -> ConvWeights:
        return ConvWeights(layer.no_taps)

    def conved_chunks(self, layer: Any, segment: ExtendSegment, xBC: torch.Tensor) -> torch.Tensor:
        return sigmoid_mul(xBC, xBC)  # on rows that are apart PyTorch's SiLU takes twice as long
