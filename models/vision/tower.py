"""The base of all towers: from the patches of pictures to embeddings of the text model."""

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import cast

import numpy as np
import torch
from torch import nn

from hybridrt.base.device import pinned_empty
from hybridrt.base.quantization import PLAIN
from hybridrt.base.spans import EncoderInput
from hybridrt.base.vision import VisionSpec
from hybridrt.layers.weights import Build, CheckpointMap
from hybridrt.models.vision.layers import QKV, AnyBlock, Pictures, attend


def on_device(parts: Sequence[np.ndarray], device: torch.device) -> torch.Tensor:
    """All rows of `parts` [n, numbers]; to a GPU by one copy that the host does not wait for."""
    if device.type == "cpu":
        return torch.from_numpy(np.concatenate(parts))
    dtype = torch.uint8 if parts[0].dtype == np.uint8 else torch.float32
    staged = pinned_empty((sum(map(len, parts)), parts[0].shape[1]), dtype)
    np.concatenate(parts, out=staged.numpy())
    return staged.to(device, non_blocking=True)


def _ranges(length: int, at_once: int) -> list[slice]:
    return [slice(start, start + at_once) for start in range(0, length, at_once)]


def _rows_at_once(spec: VisionSpec, length: int, most: int) -> int:
    """Queries to a picture of `length` patches that take about as long as a picture of `most`."""
    size = spec.hidden_size
    products = 4 * size**2 + 2 * size * spec.intermediate_size
    return max(1, int(most * (products + 2 * most * size) / (products + 2 * length * size)))


class Tower(nn.Module, ABC):
    """A tower with its projector. Every rank has all of it: its products are small next to the text
    model's, and no rank waits for another.

    Attributes:
        channel_last: the three channels of a pixel are neighbours in a patch.
        blocks: its transformer.
    """

    channel_last: bool = False
    blocks: nn.ModuleList
    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, spec: VisionSpec, build: Build) -> None:
        super().__init__()
        self.spec, self.build = spec, replace(build.uncut, scheme=lambda part: PLAIN)
        numbers = {"mean": spec.mean, "std": spec.std}
        for name, channels in numbers.items():
            each = 255 * torch.tensor(channels, dtype=torch.float32)
            pixels = spec.patch_size**2
            of_patch = each.repeat(pixels) if self.channel_last else each.repeat_interleave(pixels)
            self.register_buffer(name, of_patch.to(build.device), persistent=False)

    def encode(self, inputs: Sequence[EncoderInput]) -> list[torch.Tensor]:
        """Embeddings of each input's span, [length, hidden] in the model's dtype. Does not wait for
        the device."""
        slices = self.slices(inputs)
        while True:
            try:
                next(slices)
            except StopIteration as end:
                return cast("list[torch.Tensor]", end.value)

    def slices(
        self, inputs: Sequence[EncoderInput], most: int | None = None
    ) -> Generator[int, None, list[torch.Tensor]]:
        """`encode` in slices, for a caller that launches other work between them: what comes before the
        first block, a block of layers, or a part of one where a single picture has more than `most`
        patches. After each slice it yields a number of patches: a slice takes at most about the time
        that so many take through one block.
        """
        order = sorted(range(len(inputs)), key=lambda i: inputs[i].grid)  # equal grids share calls of attention
        grids = [inputs[i].grid for i in order]
        patches = on_device([inputs[i].patches for i in order], self.build.device)
        x, pictures = self.begin(
            patches.to(torch.float32, copy=True).sub_(self.mean).div_(self.std).to(self.build.dtype), grids
        )
        yield len(x)
        for block in cast("Iterable[AnyBlock]", self.blocks):
            if most is None or len(x) <= most or len(grids) > 1:
                x = block(x, pictures)
                yield len(x)
            else:
                x = yield from self._parts(block, x, pictures, most)
        block_size = self.spec.merge**2
        found = self.finish(x, grids).split([rows * columns // block_size for rows, columns in grids])
        return [part for _, part in sorted(zip(order, found), key=itemgetter(0))]

    def _parts(
        self, block: AnyBlock, x: torch.Tensor, pictures: Pictures, most: int
    ) -> Generator[int, None, torch.Tensor]:
        """A block on one picture: queries, keys and values of `most` patches at a time, then
        attention and the MLP of as many as take about as long."""
        rows, qkv = most, None
        if block.attends:
            made = []
            for part in _ranges(len(x), most):
                made.append(block.inputs(x[part], pictures.rotations and pictures.rotations.of_part(part)))
                yield most
            qkv, rows = QKV(*map(torch.cat, zip(*made))), _rows_at_once(self.spec, len(x), most)
        else:
            x = block.mixed(x, pictures)
            yield most
        found = []
        for part in _ranges(len(x), rows):
            of_part = x[part]
            if qkv is not None:
                attended = attend(qkv.q[None, part], qkv.k[None], qkv.v[None])
                of_part = block.joined(of_part, attended[0])
            found.append(block.mlp(of_part))
            yield most
        return torch.cat(found)

    @abstractmethod
    def begin(self, patches: torch.Tensor, grids: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, Pictures]:
        """From patches [T, numbers of a patch] to the input of the first block, [T, hidden_size]."""

    @abstractmethod
    def finish(self, x: torch.Tensor, grids: Sequence[tuple[int, int]]) -> torch.Tensor:
        """From the output of the last block to embeddings [T / merge^2, out_size]."""

    @abstractmethod
    def checkpoint_map(self) -> CheckpointMap:
        """Every key of the tower and its projector, and its target."""
