"""The base of all towers: from the patches of pictures to embeddings of the text model."""

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
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
from hybridrt.models.vision.layers import Pictures


def on_device(parts: Sequence[np.ndarray], device: torch.device) -> torch.Tensor:
    """All rows of `parts` [n, numbers]; to a GPU by one copy that the host does not wait for."""
    if device.type == "cpu":
        return torch.from_numpy(np.concatenate(parts))
    dtype = torch.uint8 if parts[0].dtype == np.uint8 else torch.float32
    staged = pinned_empty((sum(map(len, parts)), parts[0].shape[1]), dtype)
    np.concatenate(parts, out=staged.numpy())
    return staged.to(device, non_blocking=True)


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

    def slices(self, inputs: Sequence[EncoderInput]) -> Generator[None, None, list[torch.Tensor]]:
        """`encode`, one block of layers between two yields, for a caller that launches other work
        between them."""
        order = sorted(range(len(inputs)), key=lambda i: inputs[i].grid)  # equal grids share calls of attention
        grids = [inputs[i].grid for i in order]
        patches = on_device([inputs[i].patches for i in order], self.build.device)
        x, pictures = self.begin(
            patches.to(torch.float32, copy=True).sub_(self.mean).div_(self.std).to(self.build.dtype), grids
        )
        for block in self.blocks:
            x = block(x, pictures)
            yield
        block_size = self.spec.merge**2
        found = self.finish(x, grids).split([rows * columns // block_size for rows, columns in grids])
        return [part for _, part in sorted(zip(order, found), key=itemgetter(0))]

    @abstractmethod
    def begin(self, patches: torch.Tensor, grids: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, Pictures]:
        """From patches [T, numbers of a patch] to the input of the first block, [T, hidden_size]."""

    @abstractmethod
    def finish(self, x: torch.Tensor, grids: Sequence[tuple[int, int]]) -> torch.Tensor:
        """From the output of the last block to embeddings [T / merge^2, out_size]."""

    @abstractmethod
    def checkpoint_map(self) -> CheckpointMap:
        """Every key of the tower and its projector, and its target."""
