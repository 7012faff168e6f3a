"""What every model gives the runtime."""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import nn

from hybridrt.config import ModelConfig
from hybridrt.distributed.groups import TPGroup
from hybridrt.forward_batch import ForwardBatch
from hybridrt.layers.weights import CheckpointMap


class CausalLM(nn.Module, ABC):
    """A decoder: embedding, layers, final norm, head.

    Args:
        max_len: positions that the rotary table covers.
    """

    # Checkpoint keys that a model leaves alone on purpose (regular expressions): the loader lists what they matched.
    skipped_keys: tuple[str, ...] = (r"mtp\..*",)

    def __init__(
        self, config: ModelConfig, *, tp: TPGroup, dtype: torch.dtype, device: torch.device, max_len: int
    ) -> None:
        super().__init__()
        self.config, self.tp, self.dtype, self.device, self.max_len = config, tp, dtype, device, max_len

    @abstractmethod
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states after the final norm, [T, hidden]."""

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] to [n, vocab] in the model's dtype."""

    @abstractmethod
    def checkpoint_map(self) -> CheckpointMap:
        """Every key of a checkpoint and what it fills."""

    @abstractmethod
    def mixers(self) -> dict[int, Any]:
        """The recurrent mixers by layer id."""

    def rename_key(self, key: str) -> str:
        """Brings an older spelling of a checkpoint key into the map's."""
        return key
