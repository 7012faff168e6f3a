"""Layers that vision towers share: projections, norms, attention within a picture, positions."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from hybridrt.base.vision import VisionSpec
from hybridrt.kernels.attention.paged_attention import qk_norm_rotary
from hybridrt.kernels.core.records import Rope
from hybridrt.layers.weights import Build, CheckpointMap, Transform, parameter, unchanged, whole


class Linear(nn.Module):
    """x W^T + b, the same on all ranks."""

    def __init__(self, name: str, in_features: int, out_features: int, *, bias: bool = True, build: Build) -> None:
        super().__init__()
        self.name = name
        self.weight = parameter(out_features, in_features, dtype=build.dtype, device=build.device)
        self.bias = parameter(out_features, dtype=build.dtype, device=build.device, dummy="zeros") if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    def targets(self, key: str, select: Transform = unchanged) -> CheckpointMap:
        """`select` brings the checkpoint's weight to [out, in]."""
        found = {f"{key}.weight": whole(f"{self.name}.weight", self.weight.data, select)}
        if self.bias is not None:
            found[f"{key}.bias"] = whole(f"{self.name}.bias", self.bias.data)
        return found


class JoinedLinear(Linear):
    """Projections of one input, `sizes` wide, as one product."""

    def __init__(self, name: str, in_features: int, sizes: Sequence[int], *, bias: bool = True, build: Build) -> None:
        super().__init__(name, in_features, sum(sizes), bias=bias, build=build)
        self.sizes = list(sizes)

    def targets_apart(self, keys: Sequence[str]) -> CheckpointMap:
        """`keys` of the projections, which the checkpoint stores apart."""
        found: CheckpointMap = {}
        for end, param in (("weight", self.weight), ("bias", self.bias)):
            parts = () if param is None else param.data.split(self.sizes)
            for key, part in zip(keys, parts):
                found[f"{key}.{end}"] = whole(f"{self.name}.{key.rpartition('.')[2]}.{end}", part)
        return found


class LayerNorm(nn.Module):
    """Layer norm with weight and bias (Ba et al. 2016)."""

    def __init__(self, name: str, size: int, eps: float, *, build: Build) -> None:
        super().__init__()
        self.name, self.eps = name, eps
        self.weight = parameter(size, dtype=build.dtype, device=build.device, dummy="ones")
        self.bias = parameter(size, dtype=build.dtype, device=build.device, dummy="zeros")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

    def targets(self, key: str) -> CheckpointMap:
        parts = {"weight": self.weight, "bias": self.bias}
        return {f"{key}.{part}": whole(f"{self.name}.{part}", param.data) for part, param in parts.items()}


class Rotations(NamedTuple):
    """Rotary embeddings of the patches' places: [T, dim] float32 cosines, then sines, and [T] int32, 0 to
    T - 1."""

    cos_sin: torch.Tensor
    order: torch.Tensor

    @classmethod
    def from_parts(cls, parts: Sequence[torch.Tensor]) -> "Rotations":
        cos_sin = torch.cat(list(parts))
        return cls(cos_sin, torch.arange(len(cos_sin), dtype=torch.int32, device=cos_sin.device))

    def of_part(self, part: slice) -> "Rotations":
        return Rotations(self.cos_sin, self.order[part])


class Pictures(NamedTuple):
    """Pictures whose patches lie one after the other.

    Attributes:
        grids: rows and columns of patches of each.
        num_prefix: further tokens before the patches of each picture.
        rotations: of queries and keys. None: the tower has none.
    """

    grids: Sequence[tuple[int, int]]
    rotations: Rotations | None = None
    num_prefix: int = 0

    @property
    def lengths(self) -> list[int]:
        """Tokens of each."""
        return [self.num_prefix + rows * columns for rows, columns in self.grids]


class QKV(NamedTuple):
    """Queries, keys and values [T, heads, dim] of patches; keys and values may have fewer heads."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


class BlockKeys(NamedTuple):
    """Keys of a block's parts; `qkv` of one tensor, or of three."""

    norm1: str
    norm2: str
    qkv: str | Sequence[str]
    proj: str
    up: str
    down: str


class AnyBlock(nn.Module, ABC):
    """x + mixer(norm(x)), then x + MLP(norm(x)).

    Attributes:
        attends: its mixer is attention, between `inputs` and `joined`.
    """

    attends = True

    @abstractmethod
    def inputs(self, x: torch.Tensor, rotations: Rotations | None) -> QKV:
        """Queries, keys and values of patches [T, size]."""

    @abstractmethod
    def joined(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Patches [T, size] and what they have attended to, [T, heads, dim]."""

    def mixed(self, x: torch.Tensor, pictures: Pictures) -> torch.Tensor:
        return self.joined(x, attend_within(*self.inputs(x, pictures.rotations), pictures.lengths))

    @abstractmethod
    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        """[T, size], `x` added."""

    def forward(self, x: torch.Tensor, pictures: Pictures) -> torch.Tensor:
        """[T, size]."""
        return self.mlp(self.mixed(x, pictures))


class Block(AnyBlock):
    """Attention within each picture, and two projections (Dosovitskiy et al. 2021)."""

    def __init__(self, name: str, spec: VisionSpec, *, build: Build) -> None:
        super().__init__()
        self.heads, size = spec.num_heads, spec.hidden_size
        self.gelu = "none" if spec.exact_gelu else "tanh"
        self.norm1, self.norm2 = (LayerNorm(f"{name}.norm{i}", size, spec.norm_eps, build=build) for i in (1, 2))
        self.qkv = JoinedLinear(f"{name}.qkv", size, [size] * 3, build=build)
        self.proj = Linear(f"{name}.proj", size, size, build=build)
        self.up = Linear(f"{name}.up", size, spec.intermediate_size, build=build)
        self.down = Linear(f"{name}.down", spec.intermediate_size, size, build=build)

    def inputs(self, x: torch.Tensor, rotations: Rotations | None) -> QKV:
        q, k, v = self.qkv(self.norm1(x)).view(len(x), 3, self.heads, -1).unbind(1)
        if rotations is not None:
            q, k = qk_norm_rotary(q, k, rotations.order, Rope(rotations.cos_sin))
        return QKV(q, k, v)

    def joined(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        return x + self.proj(attended.flatten(1))

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate=self.gelu))

    def targets(self, keys: BlockKeys) -> CheckpointMap:
        qkv = self.qkv.targets(keys.qkv) if isinstance(keys.qkv, str) else self.qkv.targets_apart(keys.qkv)
        return {
            **self.norm1.targets(keys.norm1),
            **self.norm2.targets(keys.norm2),
            **qkv,
            **self.proj.targets(keys.proj),
            **self.up.targets(keys.up),
            **self.down.targets(keys.down),
        }


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Of queries to all keys of their own picture: q [pictures, Tq, heads, dim], k and v [pictures,
    Tk, heads or a part of them, dim]."""
    shared = k.shape[2] < q.shape[2]
    by_head = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return F.scaled_dot_product_attention(*by_head, enable_gqa=shared).transpose(1, 2)


def attend_within(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Softmax attention of patches to all patches of their own picture: q [T, heads, dim], k and v
    with as many heads or a part of them. Neighbours of equal length are one call, so nothing is
    padded."""
    found, start = [], 0
    for length, group in groupby(lengths):
        count = len(list(group))
        rows = slice(start, start + count * length)
        found.append(attend(*(each[rows].unflatten(0, (count, length)) for each in (q, k, v))).flatten(0, 1))
        start += count * length
    return torch.cat(found) if len(found) > 1 else found[0]


def corner_weights(size: int, side: int, device: torch.device) -> torch.Tensor:
    """[size, side] float32: linear interpolation from `side` points to `size`, whose ends meet."""
    index = torch.arange(size, dtype=torch.float32, device=device)
    centers = index * (side - 1) / max(size - 1, 1)
    return (1 - (centers[:, None] - torch.arange(side, device=device)).abs()).clamp_(min=0)


def area_weights(size: int, side: int, device: torch.device) -> torch.Tensor:
    """[size, side] float32: linear interpolation of areas, smoothed where it makes them fewer."""
    scale = side / size
    centers = (torch.arange(size, dtype=torch.float32, device=device) + 0.5) * scale - 0.5
    distances = (centers[:, None] - torch.arange(side, device=device)).abs()
    weights = (1 - distances / max(scale, 1.0)).clamp_(min=0)
    return weights / weights.sum(-1, keepdim=True)


def linear_weights(size: int, side: int, device: torch.device) -> torch.Tensor:
    """[size, side] float32: linear interpolation of areas, without smoothing."""
    centers = (torch.arange(size, dtype=torch.float32, device=device) + 0.5) * (side / size) - 0.5
    distances = centers.clamp_(0, side - 1)[:, None] - torch.arange(side, device=device)
    return (1 - distances.abs_()).clamp_(min=0)


def resized_table(
    table: torch.Tensor, grid: tuple[int, int], weights: Callable[[int, int, torch.device], torch.Tensor]
) -> torch.Tensor:
    """A table of positions [side * side, size] for a grid: [rows, columns, size] float32."""
    side = round(len(table) ** 0.5)
    rows, columns = (weights(size, side, table.device) for size in grid)
    by_row = torch.einsum("rs,sce->rce", rows, table.float().view(side, side, -1))
    return torch.einsum("ct,rte->rce", columns, by_row)


def axial_rotations(grid: tuple[int, int], head_dim: int, theta: float, device: torch.device) -> torch.Tensor:
    """[rows, columns, head_dim] float32: cosines, then sines of half a head's pairs by row, and of
    the others by column."""
    pairs = head_dim // 4
    frequencies = theta ** -(torch.arange(pairs, dtype=torch.float32, device=device) / pairs)
    places = torch.meshgrid(*(torch.arange(size, device=device) for size in grid), indexing="ij")
    angles = torch.cat([place[..., None] * frequencies for place in places], -1)
    return torch.cat((angles.cos(), angles.sin()), -1)


def in_blocks(patches: torch.Tensor, merge: int) -> torch.Tensor:
    """[rows, columns, ...] to [rows * columns, ...]: block by block of merge x merge, each row by
    row."""
    rows, columns, *rest = patches.shape
    blocks = patches.view(rows // merge, merge, columns // merge, merge, *rest)
    return blocks.transpose(1, 2).reshape(rows * columns, *rest)


def out_of_blocks(patches: torch.Tensor, grid: tuple[int, int], merge: int) -> torch.Tensor:
    """The way back: [rows * columns, ...], to row by row."""
    rows, columns = grid
    blocks = patches.view(rows // merge, columns // merge, merge, merge, *patches.shape[1:])
    return blocks.transpose(1, 2).reshape(patches.shape)
