"""What every model gives the runtime."""

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hybridrt.attention.hybrid_linear import HybridLinearAttnBackend
from hybridrt.config import ModelConfig
from hybridrt.distributed.groups import TPGroup
from hybridrt.forward_batch import ForwardBatch
from hybridrt.layers.embedding import VocabParallelEmbedding
from hybridrt.layers.linear import RowLinear, Segment
from hybridrt.layers.norm import RMSNorm
from hybridrt.layers.weights import Build, CheckpointMap

MTP_KEYS = r"mtp\..*"


class MTPHead(nn.Module, ABC):
    """A multi-token-prediction head: from a token's hidden state and the next token to a hidden state of that one, by a
    few layers between the model's own embedding and output head (DeepSeek-AI 2024, section 2.2).

        norm(embedding) | norm(hidden) ─ fuse ─ layers ─ norm

    From its output and the token drawn from it, it goes on. Its layers' ids count on after the model's last.
    """

    def __init__(self, config: ModelConfig, build: Build, *, eps: float, zero_centered: bool = False) -> None:
        super().__init__()
        size = config.hidden_size
        norm: dict[str, Any] = {"eps": eps, "device": build.device, "zero_centered": zero_centered}
        self.embedding_norm = RMSNorm("mtp.embedding_norm", size, **norm)
        self.hidden_norm = RMSNorm("mtp.hidden_norm", size, **norm)
        # Every rank needs the whole fused vector, so the projection is not cut.
        self.fuse = RowLinear("mtp.fuse", [Segment("both", 2 * size)], size, build=replace(build, tp=TPGroup()))
        self.norm = RMSNorm("mtp.norm", size, **norm)

    def forward(self, embedded: torch.Tensor, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """[T, hidden] embeddings of the next tokens and hidden states (after the final norm, the model's or this head's
        own) to [T, hidden] hidden states after the head's norm."""
        x = self.fuse(self.embedding_norm(embedded)[0], tail=self.hidden_norm(hidden)[0])
        return self.norm(*self.layers_of(x, batch))[0]

    @abstractmethod
    def layers_of(self, x: torch.Tensor, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The layers: [T, hidden] to (what the last one adds, what it adds it to)."""

    @abstractmethod
    def checkpoint_map(self) -> CheckpointMap:
        """Every `mtp.*` key and what it fills."""


class CausalLM(nn.Module, ABC):
    """A decoder: embedding, layers, final norm, head.

    Args:
        max_len: positions that the rotary table covers.
    """

    # Checkpoint keys that a model leaves alone on purpose (regular expressions): the loader lists what they matched.
    skipped_keys: tuple[str, ...] = (MTP_KEYS,)
    # How its softmax attention and its recurrent layers are put together.
    composite: type[HybridLinearAttnBackend] = HybridLinearAttnBackend
    embed: VocabParallelEmbedding
    head: VocabParallelEmbedding

    def __init__(
        self, config: ModelConfig, *, tp: TPGroup, dtype: torch.dtype, device: torch.device, max_len: int
    ) -> None:
        super().__init__()
        self.config, self.tp, self.dtype, self.device, self.max_len = config, tp, dtype, device, max_len
        self.mtp: MTPHead | None = None

    def make_tables(self, build: Build, multiplier: float = 1.0) -> None:
        """`embed`, whose rows are scaled by `multiplier`, and `head`: one table if the model ties them."""
        shape = (self.config.vocab_size, self.config.hidden_size)
        self.embed = VocabParallelEmbedding("embed", *shape, multiplier=multiplier, build=build)
        tied = self.config.tie_word_embeddings
        self.head = self.embed if tied else VocabParallelEmbedding("head", *shape, build=build)

    def attach_mtp(self, head: MTPHead) -> None:
        """Adds a prediction head, whose keys are then read as the model's own are."""
        self.mtp = head
        self.skipped_keys = tuple(keys for keys in self.skipped_keys if keys != MTP_KEYS)

    def predict(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """The prediction head over hidden states [T, hidden] and the batch's tokens, which follow them: [T, hidden]."""
        assert self.mtp is not None, "attach_mtp comes first"
        head: MTPHead = self.mtp
        predicted: torch.Tensor = head(self.embed(batch.input_ids), hidden, batch)
        return predicted

    @abstractmethod
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states after the final norm, [T, hidden]."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] to [n, vocab] in the model's dtype."""
        return self.head.logits(hidden)

    @abstractmethod
    def checkpoint_map(self) -> CheckpointMap:
        """Every key of a checkpoint and what it fills, a prediction head's apart."""

    @abstractmethod
    def mixers(self) -> dict[int, Any]:
        """The recurrent mixers by layer id."""

    def rename_key(self, key: str) -> str:
        """Brings an older spelling of a checkpoint key into the map's."""
        return key
