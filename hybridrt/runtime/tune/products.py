"""Trials of products."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from hybridrt.collectives.groups import TPGroup
from hybridrt.kernels.dense.linear import LibraryProduct, linear
from hybridrt.kernels.dense.skinny_linear import ACTIVATIONS, Activation, Product
from hybridrt.kernels.dense.skinny_linear_triton import TiledProduct, skinny_linear_triton
from hybridrt.layers.linear import DenseMethod
from hybridrt.layers.weights import Build
from hybridrt.runtime.tune.trial import Trial, normal

COLD_BYTES = 256 << 20  # of weights in turn: several times a GPU's cache
MOST_WEIGHTS = 32
_ACTIVATION: dict[str, Activation] = {"silu_and_mul": "silu_and_mul", "relu2": "relu2"}


def tiled_product(shape: TiledProduct, device: torch.device) -> Trial:
    """`skinny_linear` without norm and activation, which change no tile."""
    return _plain_product(shape, device, _product)


def few_tokens(shape: Product, device: torch.device) -> Trial:
    """A linear layer. It decides as in a step whether the product is fused."""
    activation: Activation | None = _ACTIVATION.get(shape.activation)
    x = normal(device, shape.tokens, shape.columns, dtype=shape.dtype)
    build = Build(TPGroup(), shape.dtype, device)
    layers = [_layer(weight, build) for weight in _weights(shape.rows, shape.columns, shape.dtype, device)]
    calls = [partial(_apply, layer, x, activation) for layer in layers]

    def reference() -> list[Tensor]:
        y = x.float() @ layers[0].weight.float().t()
        return [y if activation is None else ACTIVATIONS[activation].reference(y)]

    return Trial(calls, partial(_alone, calls[0]), reference)


def library_product(shape: LibraryProduct, device: torch.device) -> Trial:
    """A product of more tokens than our kernels take."""
    return _plain_product(shape, device, linear)


def _plain_product(
    shape: TiledProduct | LibraryProduct, device: torch.device, product: Callable[[Tensor, Tensor], Tensor]
) -> Trial:
    x = normal(device, shape.tokens, shape.columns, dtype=shape.dtype)
    weights = _weights(shape.rows, shape.columns, shape.dtype, device)
    calls = [partial(product, x, weight) for weight in weights]
    return Trial(calls, partial(_alone, calls[0]), lambda: [x.float() @ weights[0].float().t()])


def _product(x: Tensor, weight: Tensor) -> Tensor:
    return skinny_linear_triton(x, weight)[0]


def _apply(layer: DenseMethod, x: Tensor, activation: Activation | None) -> Tensor:
    return layer.apply(x, None, activation)


def _alone(call: Callable[[], Tensor]) -> Sequence[Tensor]:
    return [call()]


def _layer(weight: Tensor, build: Build) -> DenseMethod:
    layer = DenseMethod(weight.shape[0], weight.shape[1], build)
    layer.weight.data = weight
    return layer


def _weights(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Enough to fill COLD_BYTES on a GPU; a CPU only checks results."""
    count = 1
    if device.type == "cuda":
        count = max(2, min(COLD_BYTES // (rows * columns * dtype.itemsize) + 1, MOST_WEIGHTS))
    first = normal(device, rows, columns, dtype=dtype, seed=1) * columns**-0.5
    return [first, *(first.clone() for _ in range(count - 1))]
