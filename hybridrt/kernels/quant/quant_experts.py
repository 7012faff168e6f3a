"""The MLP of routed experts with weights of 8 and 4 bits, as `fused_experts` computes it."""

from typing import Literal, NamedTuple

from torch import Tensor

from hybridrt.kernels.core.operation import By, operation
from hybridrt.kernels.dense.moe import ExpertStack, each_expert, expert_mlp
from hybridrt.kernels.quant.quant_weight import QuantWeight, dequantize, expert_of


class QuantStack(NamedTuple):
    """E routed experts of one layer.

    Attributes:
        up: stack [E, 2I, D] (gate rows, then up rows) of SwiGLU, else [E, I, D]; down: [E, D, I].

    The others are those of `ExpertStack`.
    """

    up: QuantWeight
    down: QuantWeight
    activation: Literal["silu", "relu2"]
    limit: float | None = None
    alpha: float | None = None
    b_up: Tensor | None = None
    b_down: Tensor | None = None


@operation(By("triton"))
def quant_experts(x: Tensor, experts: QuantStack, weights: Tensor, ids: Tensor) -> Tensor:
    """`fused_experts` with `dequantize`d weights. The reference dequantises an expert at a time, those
    that tokens have chosen."""

    def mlp(expert: int, chosen: Tensor) -> Tensor:
        up, down = (dequantize(expert_of(w, expert)).to(x.dtype)[None] for w in (experts.up, experts.down))
        biases = (None if bias is None else bias[expert][None] for bias in (experts.b_up, experts.b_down))
        return expert_mlp(ExpertStack(up, down, *experts[2:5], *biases), 0, chosen)

    return each_expert(x, len(experts.up.data), mlp, weights, ids)
