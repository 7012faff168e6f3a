"""An attention backend as another package brings it: torch's kernels, for layers without a window."""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from hybridrt.attention.paged import PagedAttnBackend
from hybridrt.base.forward_batch import ForwardBatch
from hybridrt.base.model_config import AttentionSpec


class OutsideAttnBackend(PagedAttnBackend):
    provider = "torch"
    layers_seen: set[int] = set()  # noqa: RUF012  # for tests

    @classmethod
    def objection(cls, device: torch.device, specs: Collection[AttentionSpec]) -> str | None:
        windows = [spec.sliding_window for spec in specs if spec.sliding_window is not None]
        return f"a window of {windows[0]}, it takes none" if windows else super().objection(device, specs)

    def decode(self, q: Tensor, layer: Any, batch: ForwardBatch, out: Tensor | None = None) -> Tensor:
        self.layers_seen.add(layer.layer_id)
        return super().decode(q, layer, batch, out)
