"""Gated short convolution of LFM2 in decode steps, C * conv(B * x); the ring holds products B * x."""

from typing import Any

from torch import Tensor

from hybridrt.kernels.core.operation import By, operation
from hybridrt.kernels.core.records import ConvState, ConvWeights
from hybridrt.kernels.core.slots import pad_mask
from hybridrt.kernels.state.causal_conv1d import causal_conv1d_update, check_conv_ring


def _check(projected: Tensor, weights: ConvWeights, state: ConvState, *_: Any, **__: Any) -> None:
    check_conv_ring(state.conv, weights.weight.shape[1], projected.shape[1])


@operation(By("triton", "hybridrt.kernels.state.causal_conv1d_triton:causal_conv1d_update_triton"), check=_check)
def short_conv_update(x: Tensor, weights: ConvWeights, state: ConvState) -> Tensor:
    """Convolves the T new products of each row: decode (T = 1), or verify of a chain (T > 1).

    Products and the conv's output are rounded to the dtype of x, as they are where the steps run apart.

    Args:
        x: [rows, T, 3 * channels], the projected B, C and x after one another; token t is at position
            start_positions + t.
        weights: without an activation.
        state: its rings get the T products.

    Returns:
        [rows, T, channels] in the dtype of x.

    Raises:
        ConfigError: the ring is too narrow for K taps and T tokens, or Wc is not a power of two.
    """
    into, out, value = x.chunk(3, -1)
    y = causal_conv1d_update.reference(into * value, weights, state)
    return (out * y).masked_fill_(pad_mask(state.read_state_slots, 3), 0.0)
