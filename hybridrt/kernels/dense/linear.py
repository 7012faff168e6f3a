"""The matrix product of a dense linear layer."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridrt.kernels.core.launch_choice import LaunchChoice, Values

# Multiply-adds from which oneDNN pays for its two copies (70 microseconds together).
ONEDNN_FROM = 1 << 21
# Tokens from which it also pays for transposing a column-major weight.
TRANSPOSE_FROM = 256
# Numbers of a weight that are widened at once: they stay in the cache until they are multiplied.
WIDENED = 1 << 20
# Most tokens of a product on a GPU for which one of two libraries is chosen: with more they take equally long.
CHOSEN_UP_TO = 1024


class LibraryProduct(NamedTuple):
    """A product on a GPU by cuBLAS or cuBLASLt. rows, columns: of the weight."""

    rows: int
    columns: int
    tokens: int
    dtype: torch.dtype


def _built_in(_: LibraryProduct, __: torch.device) -> Values:
    """Each is the faster one of some numbers of tokens, by up to 40% (benchmarks/log/prefill.md)."""
    return {"lt": 0}


def _candidates(_: LibraryProduct, __: torch.device) -> list[Values]:
    return [{"lt": 0}, {"lt": 1}]


def _is_lt(lt: int) -> bool:
    return bool(lt)


LIBRARY = LaunchChoice("product of a library", LibraryProduct, _built_in, _candidates, _is_lt)


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
    if x.is_cuda and x.shape[0] <= CHOSEN_UP_TO and x.element_size() == 2:
        shape = LibraryProduct(len(weight), weight.shape[1], x.shape[0], weight.dtype)
        if LIBRARY(shape, weight.device):
            with _cublaslt():
                return F.linear(x, weight, bias)
    if not _is_for_onednn(x, weight):
        return F.linear(x, weight, bias)
    return F.linear(x.to_mkldnn(), weight, bias).to_dense()


@contextmanager
def _cublaslt() -> Iterator[None]:
    """torch has this choice for a process, not for a call."""
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


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
