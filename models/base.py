"""The base of all models: embedding, stack of layers, head; and the base of prediction heads."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from hybridrt.base.forward_batch import ForwardBatch
from hybridrt.base.model_config import AttentionConfig, ModelConfig
from hybridrt.base.spans import EncoderInput
from hybridrt.kinds.registry import state_shape
from hybridrt.layers.linear import RowLinear, Segment, VocabParallelEmbedding
from hybridrt.layers.moe import STACKS, stacked_experts
from hybridrt.layers.norm import ResidualPart, ResidualStack, RMSNorm
from hybridrt.layers.rotary import rotary_table
from hybridrt.layers.summands import Hidden
from hybridrt.layers.weights import Build, CheckpointMap, TensorPart, Transform
from hybridrt.models.config.family import routed_experts
from hybridrt.models.vision.tower import Tower
from hybridrt.recurrent.backend import HybridLinearAttnBackend

MTP_KEYS = r"mtp\..*"
SWIGLU = {".w1.": ".gate_proj.", ".w2.": ".down_proj.", ".w3.": ".up_proj."}
CONV = ".conv1d.weight"


class CausalLM(nn.Module, ABC):
    """A decoder: embedding, layers, final norm, head. A family defines each `layer`, and its
    checkpoint's other keys.

    Args:
        max_len: positions of the rotary table.
        embed_scale, norm_scale: multipliers of the embedding's rows and of the final norm.
    """

    # Regular expressions of checkpoint keys; the loader lists matches.
    skipped_keys: tuple[str, ...] = (MTP_KEYS,)
    # Keys that a checkpoint may lack: their parameters keep what they were made with.
    optional_keys: ClassVar[str | None] = None
    composite: type[HybridLinearAttnBackend] = HybridLinearAttnBackend
    embed_key: ClassVar[str] = "model.embed_tokens"
    norm_key: ClassVar[str] = "model.norm"
    layers_key: ClassVar[str] = "model.layers"
    # part of a checkpoint key -> the blocks' spelling
    spellings: ClassVar[Mapping[str, str]] = {}
    # A checkpoint tensor may hold joined convolutions of q, k and v.
    joined_convs: ClassVar[bool] = False
    # The tower of images, and what its keys match.
    tower_class: ClassVar[type[Tower] | None] = None
    tower_keys: ClassVar[str] = ""
    # The config's epsilon field; whether norms are stored as w - 1.
    eps_field: ClassVar[str] = "rms_norm_eps"
    zero_centered: ClassVar[bool] = False

    def __init__(
        self, config: ModelConfig, build: Build, max_len: int, *, embed_scale: float = 1.0, norm_scale: float = 1.0
    ) -> None:
        super().__init__()
        self.config, self.build, self.max_len = config, build, max_len
        self.tp, self.dtype, self.device = build.tp, build.dtype, build.device
        eps = getattr(config.hf, self.eps_field)
        self.norm_options: dict[str, Any] = {"eps": eps, "device": build.device, "zero_centered": self.zero_centered}
        self.mtp: MTPHead | None = None
        self.tower = self._make_tower()
        self._rotary: list[tuple[AttentionConfig, torch.Tensor]] = []
        tables = (config.vocab_size, config.hidden_size)
        self.embed = VocabParallelEmbedding("embed", *tables, multiplier=embed_scale, build=build)
        tied = config.tie_word_embeddings
        self.head = self.embed if tied else VocabParallelEmbedding("head", *tables, looks_up=False, build=build)
        self.stack = self.make_stack(range(len(config.layers)))
        self.norm_scale = norm_scale
        self.norm = RMSNorm("norm", config.hidden_size, scale=norm_scale, **self.norm_options)

    def _make_tower(self) -> Tower | None:
        if self.tower_class is None or self.config.vision is None:
            return None
        self.skipped_keys = tuple(keys for keys in self.skipped_keys if keys != self.tower_keys)
        return self.tower_class(self.config.vision, self.build)

    @abstractmethod
    def layer(self, layer_id: int, name: str) -> Sequence[ResidualPart]:
        """The parts of a layer of the model or its prediction head. Piece names begin with `name`."""

    def build_of(self, layer_id: int) -> Build:
        """What a layer's experts are built for. Replicas step together, and a prediction head drafts between steps:
        they do not share its experts."""
        if layer_id < len(self.config.layers):
            return self.build
        return replace(self.build, tp=replace(self.build.tp, replicas=None))

    def make_stack(self, layer_ids: Iterable[int]) -> ResidualStack:
        layers = {f"layers.{i}": self.layer(i, f"layers.{i}") for i in layer_ids}
        return ResidualStack(layers, self.config.hidden_size, **self.norm_options)

    def cos_sin(self, attention: AttentionConfig) -> torch.Tensor | None:
        """The rotary table of a layer's attention, shared by equal ones. None: no rotation."""
        if attention.rope is None:
            return None
        for known, table in self._rotary:
            if (known.rope, known.rotary_dim) == (attention.rope, attention.rotary_dim):
                return table
        self._rotary.append((attention, rotary_table(self.config, attention, self.max_len, self.device)))
        return self._rotary[-1][1]

    def attach_mtp(self, head: "MTPHead") -> None:
        """Adds a prediction head and its checkpoint keys."""
        self.mtp = head
        self.skipped_keys = tuple(keys for keys in self.skipped_keys if keys != MTP_KEYS)

    def predict(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """The prediction head on hidden states [T, hidden] and the next tokens, which the batch
        has: [T, hidden]."""
        assert self.mtp is not None, "attach_mtp comes first"
        return self.mtp(self.embedded(batch), hidden, batch)

    def embedded(self, batch: ForwardBatch) -> torch.Tensor:
        """[T, hidden] embeddings of a batch's tokens: those of the table, or of an encoder."""
        x = self.embed(batch.input_ids)
        if batch.embeddings is not None:
            x.index_copy_(0, batch.embeddings.places.long(), batch.embeddings.rows)
        return x

    def encode(self, inputs: Sequence[EncoderInput]) -> list[torch.Tensor]:
        """Embeddings of spans, [length, hidden] in the model's dtype each."""
        assert self.tower is not None, "only a model with `vision` encodes"
        return self.tower.encode(inputs)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states after the final norm, times norm_scale: [T, hidden]."""
        x: Hidden = self.embedded(batch)
        residual = None
        for norm, part in self.stack:
            x, residual = part(norm, x, residual, batch)
        return self.norm(x, residual)[0]

    def shortened(self) -> AbstractContextManager[None]:
        """In this context, a forward pass computes two layers of each sort, which launch all
        kernels."""
        return self.stack.shortened(self.config.layers)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] to [n, vocab] in the model's dtype."""
        return self.head.logits(hidden)

    def logits_into(self, out: torch.Tensor, hidden: torch.Tensor) -> None:
        """`logits`, [n, hidden] to a contiguous `out` [n, vocab]; without a copy if a model's logits are its
        head's."""
        if getattr(self.logits, "__func__", None) is CausalLM.logits:
            self.head.logits_into(out, hidden)
        else:
            out.copy_(self.logits(hidden))

    def checkpoint_map(self) -> CheckpointMap:
        """Every checkpoint key of the text model and its target, without the prediction head."""
        found = {**self.embed.targets(self.embed_key), **self.norm.targets(self.norm_key)}
        if self.head is not self.embed:
            found |= self.head.targets("lm_head")
        return found | self.stack.targets(self.layers_key)

    def all_targets(self) -> CheckpointMap:
        """Every checkpoint key and its target, those of the prediction head and the tower included."""
        found = self.checkpoint_map()
        for part in (self.mtp, self.tower):
            found |= {} if part is None else part.checkpoint_map()
        return found

    def check_skipped(self, key: str, tensor: torch.Tensor) -> None:
        """CheckpointError if a tensor that is skipped would change the model."""

    def mixers(self) -> dict[int, Any]:
        return self.stack.mixers()

    def rename_key(self, key: str) -> str:
        """A checkpoint's key in the map's spelling."""
        for theirs, ours in self.spellings.items():
            key = key.replace(theirs, ours)
        return key

    def parts_of(self, key: str) -> list[TensorPart]:
        """The parts of a checkpoint tensor, by keys of the map."""
        name = self.rename_key(key)
        for end, matrices in STACKS.items():
            if name.endswith(end):
                return stacked_experts(f"{name.removesuffix(end)}.experts", matrices, routed_experts(self.config.hf))
        if self.joined_convs and name.endswith(CONV):
            (linear,) = self.config.linear.values()
            parts, widths = zip(*state_shape(linear).segments)
            stem = name.removesuffix(CONV)
            return [(f"{stem}.{part}_conv1d.weight", part_of_rows(widths, i)) for i, part in enumerate(parts)]
        return [(name, lambda t: t)]


def part_of_rows(widths: Sequence[int], i: int) -> Transform:
    """Part `i` of rows that are cut into `widths`."""
    return lambda t: t.split(widths)[i]


class MTPHead(nn.Module, ABC):
    """A multi-token-prediction head: from a token's hidden state and the next token to the next
    hidden state (DeepSeek-AI 2024, section 2.2). Embedding and output head are the model's.

        norm(embedding) | norm(hidden) ─ fuse ─ layers ─ norm

    It can run on its own output. Its layer ids follow the model's.
    """

    def __init__(self, model: CausalLM) -> None:
        super().__init__()
        size, first, norm = model.config.hidden_size, len(model.config.layers), model.norm_options
        self.embedding_norm = RMSNorm("mtp.embedding_norm", size, **norm)
        self.hidden_norm = RMSNorm("mtp.hidden_norm", size, **norm)
        # Every rank needs the whole fused vector.
        self.fuse = RowLinear("mtp.fuse", [Segment("both", 2 * size)], size, build=model.build.uncut)
        self.norm = RMSNorm("mtp.norm", size, **norm)
        self.stack = model.make_stack(range(first, first + len(model.config.mtp_layers)))

    def forward(self, embedded: torch.Tensor, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """[T, hidden] embeddings of the next tokens, and hidden states after the final norm of the
        model or of this head, to [T, hidden] after this head's norm."""
        x = self.fuse(self.embedding_norm(embedded)[0], tail=self.hidden_norm(hidden)[0])
        residual = None
        for norm, part in self.stack:
            x, residual = part(norm, x, residual, batch)
        return self.norm(x, residual)[0]

    @abstractmethod
    def checkpoint_map(self) -> CheckpointMap:
        """Every `mtp.*` key and its target."""
