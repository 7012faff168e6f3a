"""Element-wise activations of the MLPs and of gated attention."""

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridrt.kernels.providers import register, select

for _op in ("silu_and_mul", "relu2", "sigmoid_mul"):
    register(_op, "torch", f"hybridrt.kernels.activation:{_op}_reference")
    register(_op, "triton", f"hybridrt.kernels.activation_triton:{_op}_triton", priority=10)
for _library, _priority in (("flashinfer", 5), ("sgl_kernel", 4)):
    register("silu_and_mul", _library, f"hybridrt.kernels.libraries.{_library}:silu_and_mul", priority=_priority)


def silu_and_mul(x: Tensor) -> Tensor:
    """SwiGLU (Shazeer 2020): silu(gate) * up for x `[..., 2I]` holding gate then up. Returns `[..., I]` in x's
    dtype."""
    out: Tensor = select("silu_and_mul", x.device.type)(x)
    return out


def relu2(x: Tensor) -> Tensor:
    """max(x, 0)^2 (So et al. 2021), any shape and float dtype."""
    out: Tensor = select("relu2", x.device.type)(x)
    return out


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate), both `[T, D]` or broadcastable (a gate `[T, 1]` scales rows). Returns x's dtype."""
    out: Tensor = select("sigmoid_mul", x.device.type)(x, gate)
    return out


def silu_and_mul_reference(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def relu2_reference(x: Tensor) -> Tensor:
    return torch.relu(x).square_()


def sigmoid_mul_reference(x: Tensor, gate: Tensor) -> Tensor:
    return x * torch.sigmoid(gate)
