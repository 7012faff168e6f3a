"""Methods of quantised linear layers and experts: weights stay packed, products decode blocks of rows."""

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from hybridrt.base.errors import BackendError
from hybridrt.base.quantization import PLAIN, Scheme
from hybridrt.kernels.dense.linear import linear
from hybridrt.kernels.dense.moe import activate, each_expert
from hybridrt.kernels.dense.skinny_linear import ACTIVATIONS, Activation, InputNorm
from hybridrt.kernels.quant.fp8_linear import fp8_token_linear, quantize_tokens
from hybridrt.kernels.quant.quant_experts import QuantStack, quant_experts
from hybridrt.kernels.quant.quant_linear import most_tokens, quant_linear
from hybridrt.kernels.quant.quant_weight import QuantWeight
from hybridrt.layers.linear import side_by_side
from hybridrt.layers.quant.cpu_product import product as torch_product
from hybridrt.layers.quant.cpu_product import repack
from hybridrt.layers.quant.fp8_products import (
    Fp8Product,
    fp8_product,
    joined_products,
    multiplies_fp8,
    multiply_codes,
    takes_kernel,
    takes_token,
)
from hybridrt.layers.quant.kernel_weight import finished, looked_up, may_have_kernel, parameters, product_of_many
from hybridrt.layers.quant.packed_weight import PackedWeight
from hybridrt.layers.quant.pieces import PackedPiece
from hybridrt.layers.summands import Hidden, summed
from hybridrt.layers.weights import (
    Build,
    CheckpointMap,
    ExpertPart,
    ExpertsMethod,
    LinearMethod,
    Part,
    Piece,
    parameter,
)

if TYPE_CHECKING:
    from hybridrt.layers.norm import RMSNorm

KERNELS_ON = ("cuda",)


class QuantExperts(ExpertsMethod):
    """Stacks of experts in any of the formats, up and down each in its own, or plain. On a GPU they
    are stored for kernels once they are loaded."""

    kernels: tuple[QuantWeight, QuantWeight] | None = None

    def __init__(
        self, name: str, count: int, rows: int, in_features: int, size: int, build: Build, up: Scheme = PLAIN,
        down: Scheme = PLAIN,
    ) -> None:  # fmt: skip
        self.name, self.on_gpu, self.dtype = name, build.device.type in KERNELS_ON, build.dtype
        self.up = _Stack(up, (size,) * (rows // size), in_features, build, count)
        self.down = _Stack(down, (in_features,), size, build, count)
        for stack in (self.up, self.down):
            if self.on_gpu and (stack.packed is None or not may_have_kernel(stack.packed)):
                raise self._refusal()

    def finish(self) -> None:
        if not self.on_gpu:
            for stack in (self.up, self.down):
                if stack.packed is not None:
                    repack(stack.packed, self.dtype)
            return
        found = [None if each.packed is None else finished(each.packed, stack=True) for each in (self.up, self.down)]
        if found[0] is None or found[1] is None:
            raise self._refusal()
        self.kernels = found[0], found[1]

    def _refusal(self) -> BackendError:
        return BackendError(
            f"{self.name} has {self.up} and {self.down}; kernels for experts take groups of 16 inputs or of multiples "
            "of 32, in order, 8 bits with a multiple of 4 inputs, and no plain matrix next to quantised ones; run this "
            "model with device='cpu'"
        )

    def parameters(self) -> dict[str, nn.Parameter]:
        if self.kernels is not None:
            each = zip(("up", "down"), self.kernels)
            return {f"{name}_{own}": p for name, weight in each for own, p in parameters(weight).items()}
        stacks = {"up": self.up, "down": self.down}
        return {f"{name}_{each}": p for name, stack in stacks.items() for each, p in stack.parameters().items()}

    def targets(self, key: str, part: ExpertPart) -> CheckpointMap:
        stack = self.up if part.matrix == "up" else self.down
        return {f"{key}.weight": (stack.piece(part),)}

    def apply(
        self, x: Tensor, weights: Tensor, ids: Tensor, *, activation: Literal["silu", "relu2"],
        limit: float | None = None, alpha: float | None = None, biases: tuple[Tensor, Tensor | None] | None = None,
    ) -> Tensor:  # fmt: skip
        b_up, b_down = biases or (None, None)
        if self.kernels is not None:
            stack = QuantStack(*self.kernels, activation, limit, alpha, b_up, b_down)
            return quant_experts(x, stack, weights, ids)

        def expert(e: int, h: Tensor) -> Tensor:
            hidden = self.up.multiply(e, h, None if b_up is None else b_up[e])
            hidden = activate(hidden, activation, limit, alpha)
            return self.down.multiply(e, hidden, None if b_down is None else b_down[e])

        return each_expert(x, self.up.count, expert, weights, ids)


class _Stack:
    """One matrix of each expert: packed, or plain in the model's dtype."""

    def __init__(self, scheme: Scheme, sizes: tuple[int, ...], width: int, build: Build, count: int) -> None:
        self.scheme, self.width, self.count, self.size = scheme, width, count, sizes[0]
        self.packed: PackedWeight | None = None
        if scheme.layout:
            self.packed = PackedWeight(scheme, sizes, width, build, count)
        else:
            self.weight = parameter(count, sum(sizes), width, dtype=build.dtype, device=build.device)

    def __str__(self) -> str:
        return f"{self.scheme} of {self.width} inputs"

    def parameters(self) -> dict[str, nn.Parameter]:
        return {"weight": self.weight} if self.packed is None else self.packed.parameters()

    def piece(self, part: ExpertPart) -> Piece | PackedPiece:
        if self.packed is None:
            stack = self.weight.data.narrow(1, part.start, part.size) if part.matrix == "up" else self.weight.data
            return Piece(f"{part.name}.weight", stack.narrow(0, part.first, part.count), part.select, part.scale)
        dim, place = (0, part.start // self.size) if part.matrix == "up" else (1, 0)
        return PackedPiece(
            f"{part.name}.weight", self.packed, dim, part.total, part.select, part.first, place, part.scale
        )

    def multiply(self, e: int, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.packed is None:
            return linear(x, self.weight[e], bias)
        return multiply(self.packed, x, bias, e)


class QuantMethod(LinearMethod):
    """A packed weight. On a GPU it is stored for kernels once it is loaded, unless they have none for
    its groups."""

    experts = QuantExperts
    kernel: QuantWeight | None = None
    kernel_tokens = 0  # of a product without decoding the weight first, at most

    def __init__(
        self, out_features: int, in_features: int, build: Build, scheme: Scheme = PLAIN, parts: Sequence[int] = ()
    ) -> None:
        self.weight = PackedWeight(scheme, tuple(parts) or (out_features,), in_features, build)
        self.on_gpu, self.dtype = build.device.type in KERNELS_ON, build.dtype

    def finish(self) -> None:
        if self.on_gpu:
            self.kernel = finished(self.weight)
            self.kernel_tokens = 0 if self.kernel is None else most_tokens(self.kernel, self.dtype)
        elif not self.looks_up:
            repack(self.weight, self.dtype)

    def parameters(self) -> dict[str, nn.Parameter]:
        return self.weight.parameters() if self.kernel is None else parameters(self.kernel)

    def targets(self, key: str, parts: Sequence[Part]) -> CheckpointMap:
        return {f"{key}.weight": tuple(map(self._piece, parts))}

    def _piece(self, part: Part) -> PackedPiece:
        place = self.weight.starts.index(part.start) if part.dim == 0 else 0
        return PackedPiece(
            f"{part.name}.weight", self.weight, part.dim, part.total, part.select, part=place, scale=part.scale
        )

    def apply(
        self, x: Tensor, bias: Tensor | None, activation: Activation | None = None, tail: Tensor | None = None
    ) -> Tensor:
        if self.kernel is not None and x.shape[0] <= self.kernel_tokens:
            return quant_linear(x, self.kernel, bias, tail=tail, activation=activation)[0]
        x = x if tail is None else side_by_side(x, tail)
        if self.kernel is not None:
            return product_of_many(self.kernel, x, bias, activation)
        y = multiply(self.weight, x, bias)
        return y if activation is None else ACTIVATIONS[activation](y)

    def fuses_activation(self, tokens: int, activation: Activation) -> bool:
        return tokens <= self.kernel_tokens

    def apply_normed(
        self, norm: "RMSNorm", x: Hidden, residual: Tensor | None, bias: Tensor | None,
        activation: Activation | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        x = summed(x)
        if self.kernel is None or x.shape[0] > self.kernel_tokens:
            return super().apply_normed(norm, x, residual, bias, activation)
        input_norm = InputNorm(norm.weight, norm.eps, residual)
        y, total = quant_linear(x, self.kernel, bias, norm=input_norm, activation=activation)
        return y, x if total is None else total

    def lookup(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        if self.kernel is not None:
            return looked_up(self.kernel, ids).to(dtype)
        return self.weight.lookup(ids).to(dtype)


class Fp8(QuantMethod):
    """e4m3 with scales of the tensor, of rows or of blocks (fp8, ModelOpt, compressed-tensors, MXFP8).

    If the checkpoint says that inputs are quantised, the GPU multiplies such numbers and `fp8_product`
    takes the scales, they are: in every product, whatever the number of tokens.
    """

    product: Fp8Product | None = None

    def __init__(
        self, out_features: int, in_features: int, build: Build, scheme: Scheme = PLAIN, parts: Sequence[int] = ()
    ) -> None:
        super().__init__(out_features, in_features, build, scheme, parts)
        self.quantises = bool(scheme.activations) and build.dtype == torch.bfloat16 and multiplies_fp8(build.device)

    def finish(self) -> None:
        super().finish()
        if self.quantises and self.kernel is not None:
            self.product = fp8_product(self.kernel)
            self.kernel = self.kernel if self.product is None else self.product.weight
        self.activates = self.product is not None

    def fuses_activation(self, tokens: int, activation: Activation) -> bool:
        if self.product is None:
            return super().fuses_activation(tokens, activation)
        return takes_kernel(tokens, self.product.weight)

    def joined(self, others: Sequence[LinearMethod]) -> "Fp8 | None":
        """One product instead of several, with their inputs quantised at once. Only of blocks: scales of rows and of
        tokens serve one weight."""
        products = [self.product, *(other.product if isinstance(other, Fp8) else None for other in others)]
        found, product = copy(self), joined_products(products)
        if product is None:
            return None
        found.product, found.kernel = product, product.weight
        return found

    def apply(
        self, x: Tensor, bias: Tensor | None, activation: Activation | None = None, tail: Tensor | None = None
    ) -> Tensor:
        if self.product is None:
            return super().apply(x, bias, activation, tail)
        if x.shape[0] == 1 and takes_token(self.product):
            return fp8_token_linear(x, self.product.weight, bias, tail=tail, activation=activation)[0]
        x = x if tail is None else side_by_side(x, tail)
        codes, _ = quantize_tokens(x, self.product.group)
        return multiply_codes(self.product, codes, bias, activation, x.dtype)

    def apply_activated(self, before: Activation, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.product is None or x.shape[0] == 1:
            return super().apply_activated(before, x, bias)
        codes, _ = quantize_tokens(x, self.product.group, before=before)
        return multiply_codes(self.product, codes, bias, None, x.dtype)

    def apply_normed(
        self, norm: "RMSNorm", x: Hidden, residual: Tensor | None, bias: Tensor | None,
        activation: Activation | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if self.product is None:
            return super().apply_normed(norm, x, residual, bias, activation)
        x, input_norm = summed(x), InputNorm(norm.weight, norm.eps, residual)
        if x.shape[0] == 1 and takes_token(self.product):
            y, total = fp8_token_linear(x, self.product.weight, bias, norm=input_norm, activation=activation)
        else:
            codes, total = quantize_tokens(x, self.product.group, input_norm)
            y = multiply_codes(self.product, codes, bias, activation, x.dtype)
        return y, x if total is None else total


class Int8(QuantMethod):
    """int8 with scales of rows or groups (compressed-tensors, GPTQ)."""


class Int4(QuantMethod):
    """Four bits with scales of rows or groups, maybe zero points (compressed-tensors, AWQ, GPTQ)."""


class Fp4(QuantMethod):
    """e2m1 with scales of groups (NVFP4, MXFP4)."""


def multiply(weight: PackedWeight, x: Tensor, bias: Tensor | None, e: int = 0) -> Tensor:
    """x W^T + b: x [T, in] to [T, out]. Decodes a block of rows at a time, unless torch has a kernel."""
    found = torch_product(weight, x, e)
    if found is not None:
        return found if bias is None else found.add_(bias)
    y = x.new_empty(x.shape[0], weight.starts[-1])
    for start, end in weight.row_ranges():
        part, own = y[:, start:end], None if bias is None else bias[start:end]
        scales = weight.row_scales(start, end, e)
        if scales is None or x.dtype == torch.float16:  # in which sums of codes may be infinite
            part.copy_(linear(x, weight.dequantize(start, end, e).to(x.dtype), own))
        else:  # fewer numbers than those of the weight
            torch.mul(linear(x, weight.decoded(start, end, e).to(x.dtype)), scales, out=part)
            if own is not None:
                part += own
    return y
