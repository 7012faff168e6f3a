"""The base of all towers: from the patches of pictures to embeddings of the text model."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter

import numpy as np
import torch
from torch import nn

from hybridrt.base.device import pinned_empty
from hybridrt.base.quantization import PLAIN
from hybridrt.base.spans import EncoderInput
from hybridrt.base.vision import VisionSpec
from hybridrt.layers.weights import Build, CheckpointMap


def on_device(parts: Sequence[np.ndarray], device: torch.device) -> torch.Tensor:
    """All rows of `parts` [n, numbers] uint8; to a GPU by one copy that the host does not wait for."""
    if device.type == "cpu":
        return torch.from_numpy(np.concatenate(parts))
    staged = pinned_empty((sum(map(len, parts)), parts[0].shape[1]), torch.uint8)
    np.concatenate(parts, out=staged.numpy())
    return staged.to(device, non_blocking=True)


class Tower(nn.Module, ABC):
    """A tower with its projector. Every rank has all of it: its products are small next to the text
    model's, and no rank waits for another.

    Attributes:
        channel_last: the three channels of a pixel are neighbours in a patch.
    """

    channel_last: bool = False

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
        order = sorted(range(len(inputs)), key=lambda i: inputs[i].grid)  # equal grids share calls of attention
        grids = [inputs[i].grid for i in order]
        patches = on_device([inputs[i].patches for i in order], self.build.device)
        normed = patches.float().sub_(self.mean).div_(self.std).to(self.build.dtype)
        block = self.spec.merge**2
        found = self(normed, grids).split([rows * columns // block for rows, columns in grids])
        return [part for _, part in sorted(zip(order, found), key=itemgetter(0))]

    @abstractmethod
    def forward(self, patches: torch.Tensor, grids: Sequence[tuple[int, int]]) -> torch.Tensor:
        """[T, numbers of a patch] of pictures with `grids`, one after the other, to [T / merge^2,
        hidden size of the text model]."""

    @abstractmethod
    def checkpoint_map(self) -> CheckpointMap:
        """Every key of the tower and its projector, and its target."""
