"""Element-wise activations of the MLPs and of gated attention."""

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridrt.kernels.core.operation import By, operation


@operation(By("triton"), By("flashinfer", priority=5), By("sgl_kernel", priority=4))
def silu_and_mul(x: Tensor) -> Tensor:
    """SwiGLU (Shazeer 2020): silu(gate) * up. x `[..., 2I]` holds gate, then up. `[..., I]` in x's
    dtype."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


@operation(By("triton"))
def clamped_silu_and_mul(x: Tensor, limit: float) -> Tensor:
    """min(silu(gate), limit) * clamp(up, -limit, limit), otherwise `silu_and_mul` (Ling 3)."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).clamp_(max=limit).mul_(up.clamp(-limit, limit))


def biased_swiglu(x: Tensor, limit: float, alpha: float) -> Tensor:
    """g * sigmoid(alpha * g) * (u + 1) of g = min(gate, limit) and u = clamp(up, -limit, limit)
    (gpt-oss), otherwise `silu_and_mul`. Only experts compute it, in their kernel."""
    gate, up = x.chunk(2, dim=-1)
    gate = gate.clamp(max=limit)
    return torch.sigmoid(gate * alpha).mul_(gate).mul_(up.clamp(-limit, limit).add_(1))


@operation(By("triton"))
def relu2(x: Tensor) -> Tensor:
    """max(x, 0)^2 (So et al. 2021), any shape and float dtype."""
    return torch.relu(x).square_()


@operation(By("triton"))
def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate), `[..., D]` by `[..., G]`. G divides D: each gate is for D / G neighbouring
    columns, such as a head. Returns x's dtype."""
    if gate.shape == x.shape:
        return x * torch.sigmoid(gate)
    runs = x.unflatten(-1, (gate.shape[-1], -1))
    return (runs * torch.sigmoid(gate).unsqueeze(-1)).flatten(-2)
