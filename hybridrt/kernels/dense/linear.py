"""The matrix product of a dense linear layer."""

import torch
import torch.nn.functional as F
from torch import Tensor

# Multiply-adds from which oneDNN pays for its two copies (70 microseconds together).
ONEDNN_FROM = 1 << 21
# Tokens from which it also pays for transposing a column-major weight.
TRANSPOSE_FROM = 256
# Numbers of a weight that are widened at once: they stay in the cache until they are multiplied.
WIDENED = 1 << 20


def stored_by_columns(weight: Tensor) -> bool:
    """Whether a weight [out, in] should be column-major: small float32 ones on a CPU. MKL then
    needs half the time for one or two tokens, and the same for more."""
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() < ONEDNN_FROM


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b: x [T, K], weight [N, K], bias [N] or None. A weight of a narrower dtype than x's is
    widened, which rounds nothing.

    PyTorch passes float32 CPU products to MKL, which does not use the wide vector units of AMD
    processors. Large ones go to oneDNN, which does.
    """
    if weight.dtype != x.dtype:
        return _widened_linear(x, weight, bias)
    if not _is_for_onednn(x, weight):
        return F.linear(x, weight, bias)
    return F.linear(x.to_mkldnn(), weight, bias).to_dense()


def _widened_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    (rows, columns), y = weight.shape, x.new_empty(x.shape[0], weight.shape[0])
    step = max(1, min(rows, WIDENED // columns))
    wide = x.new_empty(step, columns)
    for start in range(0, rows, step):
        part = weight[start : start + step]
        y[:, start : start + step] = linear(x, wide[: len(part)].copy_(part))
    return y if bias is None else y.add_(bias)


def add_linear(residual: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """x W^T + residual, stored in `residual` [T, N]."""
    if weight.dtype != x.dtype or _is_for_onednn(x, weight):
        return residual.add_(linear(x, weight))
    return residual.addmm_(x, weight.t())


def _is_for_onednn(x: Tensor, weight: Tensor) -> bool:
    tokens = x.shape[0]
    pays = tokens * weight.numel() >= ONEDNN_FROM and (weight.is_contiguous() or tokens >= TRANSPOSE_FROM)
    return pays and x.device.type == "cpu" and x.dtype == torch.float32 and _HAS_ONEDNN


_HAS_ONEDNN = torch.backends.mkldnn.is_available()
