"""A method of linear layers as another package brings it: int8 weights, stored input by input, with a scale a row."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from hybridrt.base.quantization import PLAIN, Scheme
from hybridrt.kernels.dense.skinny_linear import Activation
from hybridrt.layers.linear import ACTIVATIONS, side_by_side
from hybridrt.layers.weights import Build, CheckpointMap, LinearMethod, Part, Piece

SCALED = Scheme("scaled_int8")


class ScaledInt8(LinearMethod):
    """In the checkpoint: `key`.weight [out, in] int8 and `key`.weight_scale [out] float32."""

    def __init__(
        self, out_features: int, in_features: int, build: Build, scheme: Scheme = PLAIN, parts: Sequence[int] = ()
    ) -> None:
        self.scheme = scheme
        values = torch.empty(in_features, out_features, dtype=torch.int8, device=build.device)
        self.values = nn.Parameter(values, requires_grad=False)
        self.scales = nn.Parameter(torch.empty(out_features, device=build.device), requires_grad=False)

    def targets(self, key: str, parts: Sequence[Part]) -> CheckpointMap:
        int8, weight, scale = (torch.int8,), [], []
        for part in parts:
            place = self.values.data.t().narrow(part.dim, part.start, part.size)
            weight.append(Piece(f"{part.name}.weight", place, part.select, dtypes=int8))
            # A multiplier of the matrix lands on its scales. Those of a row serve all of its columns.
            rows = part.dim == 0
            scales = self.scales.data.narrow(0, part.start, part.size) if rows else self.scales.data
            select = part.select if rows else (lambda t: t)
            scale.append(Piece(f"{part.name}.weight_scale", scales, select, part.scale))
        return {f"{key}.weight": tuple(weight), f"{key}.weight_scale": tuple(scale)}

    def apply(
        self, x: Tensor, bias: Tensor | None, activation: Activation | None = None, tail: Tensor | None = None
    ) -> Tensor:
        x = x if tail is None else side_by_side(x, tail)
        y = (x @ self.values.to(x.dtype)) * self.scales.to(x.dtype)
        y = y if bias is None else y + bias
        return y if activation is None else ACTIVATIONS[activation](y)


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[out, in] to int8 values and scales [out]."""
    scales = weight.abs().amax(1) / 127
    return (weight / scales[:, None]).round().to(torch.int8), scales


def build_with(build: Build, *segments: tuple[str, str]) -> Build:
    """Segments, by ends of the layers' names and their own names, in int8; the others stay dense."""

    def scheme(part: str) -> Scheme:
        return SCALED if any(part.endswith(f"{end}.{name}") for end, name in segments) else PLAIN

    return replace(build, scheme=scheme)
