"""What every model gives the runtime."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import nn

from hybridrt.base.config import AttentionConfig, ModelConfig
from hybridrt.base.forward_batch import ForwardBatch
from hybridrt.kinds.registry import state_shape
from hybridrt.layers.embedding import VocabParallelEmbedding
from hybridrt.layers.linear import RowLinear, Segment
from hybridrt.layers.moe import STACKS, stacked_experts
from hybridrt.layers.norm import RMSNorm
from hybridrt.layers.rotary import rotary_table
from hybridrt.layers.stack import ResidualPart, ResidualStack
from hybridrt.layers.weights import Build, CheckpointMap, TensorPart, Transform
from hybridrt.models.config.family import routed_experts
from hybridrt.recurrent.hybrid_linear import HybridLinearAttnBackend

MTP_KEYS = r"mtp\..*"
# Spellings of the matrices of SwiGLU that several families use.
SWIGLU = {".w1.": ".gate_proj.", ".w2.": ".down_proj.", ".w3.": ".up_proj."}
CONV = ".conv1d.weight"


class CausalLM(nn.Module, ABC):
    """A decoder: embedding, layers, final norm, head. A family says what each layer is made of (`layer`), and how its
    checkpoints name the rest.

    Args:
        max_len: positions that the rotary table covers.
        embed_scale, norm_scale: multipliers of the embedding's rows and of the final norm.
    """

    # Checkpoint keys that a model leaves alone on purpose (regular expressions): the loader lists what they matched.
    skipped_keys: tuple[str, ...] = (MTP_KEYS,)
    # How its softmax attention and its recurrent layers are put together.
    composite: type[HybridLinearAttnBackend] = HybridLinearAttnBackend
    embed_key: ClassVar[str] = "model.embed_tokens"
    norm_key: ClassVar[str] = "model.norm"
    layers_key: ClassVar[str] = "model.layers"
    # Parts of keys in checkpoints, and what they are in the keys of the blocks.
    spellings: ClassVar[Mapping[str, str]] = {}
    # Whether a tensor may hold the convolutions of q, k and v, which have keys of their own, one behind the other.
    joined_convs: ClassVar[bool] = False
    # Of the norms: the field of the model's config with their epsilon, and whether weights are stored less 1.
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
        self._rotary: list[tuple[AttentionConfig, torch.Tensor]] = []
        tables = (config.vocab_size, config.hidden_size)
        self.embed = VocabParallelEmbedding("embed", *tables, multiplier=embed_scale, build=build)
        tied = config.tie_word_embeddings
        self.head = self.embed if tied else VocabParallelEmbedding("head", *tables, build=build)
        self.stack = self.make_stack(range(len(config.layers)))
        self.norm = RMSNorm("norm", config.hidden_size, scale=norm_scale, **self.norm_options)

    @abstractmethod
    def layer(self, layer_id: int, name: str) -> Sequence[ResidualPart]:
        """The parts of a layer of the model or of its prediction head. The names of their pieces begin with `name`."""

    def make_stack(self, layer_ids: Iterable[int]) -> ResidualStack:
        """These layers, with their norms."""
        layers = {f"layers.{i}": self.layer(i, f"layers.{i}") for i in layer_ids}
        return ResidualStack(layers, self.config.hidden_size, **self.norm_options)

    def cos_sin(self, attention: AttentionConfig) -> torch.Tensor | None:
        """The rotary table of a layer's attention; layers of equal embeddings share one. None if it rotates nothing."""
        if attention.rope is None:
            return None
        for known, table in self._rotary:
            if (known.rope, known.rotary_dim) == (attention.rope, attention.rotary_dim):
                return table
        self._rotary.append((attention, rotary_table(self.config, attention, self.max_len, self.device)))
        return self._rotary[-1][1]

    def attach_mtp(self, head: "MTPHead") -> None:
        """Adds a prediction head, whose keys are then read as the model's own are."""
        self.mtp = head
        self.skipped_keys = tuple(keys for keys in self.skipped_keys if keys != MTP_KEYS)

    def predict(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """The prediction head over hidden states [T, hidden] and the batch's tokens, which follow them: [T, hidden]."""
        assert self.mtp is not None, "attach_mtp comes first"
        return self.mtp(self.embed(batch.input_ids), hidden, batch)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states after the final norm, [T, hidden]."""
        x, residual = self.embed(batch.input_ids), None
        for norm, part in self.stack:
            x, residual = part(norm, x, residual, batch)
        return self.norm(x, residual)[0]

    def shortened(self) -> AbstractContextManager[None]:
        """Within it, a forward pass computes two layers of each sort, which launch all kernels of a whole one."""
        return self.stack.shortened(self.config.layers)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] to [n, vocab] in the model's dtype."""
        return self.head.logits(hidden)

    def logits_into(self, out: torch.Tensor, hidden: torch.Tensor) -> None:
        """The same into `out`, contiguous. The head writes there itself, if the model's logits are the head's."""
        if getattr(self.logits, "__func__", None) is CausalLM.logits:
            self.head.logits_into(out, hidden)
        else:
            out.copy_(self.logits(hidden))

    def checkpoint_map(self) -> CheckpointMap:
        """Every key of a checkpoint and what it fills, a prediction head's apart."""
        found = {**self.embed.targets(self.embed_key), **self.norm.targets(self.norm_key)}
        if self.head is not self.embed:
            found |= self.head.targets("lm_head")
        return found | self.stack.targets(self.layers_key)

    def mixers(self) -> dict[int, Any]:
        """The recurrent mixers by layer id."""
        return self.stack.mixers()

    def rename_key(self, key: str) -> str:
        """A checkpoint's key in the map's spelling."""
        for theirs, ours in self.spellings.items():
            key = key.replace(theirs, ours)
        return key

    def parts_of(self, key: str) -> list[TensorPart]:
        """What a checkpoint's tensor holds, by keys of the map: itself, or several parts."""
        name = self.rename_key(key)
        for end, matrices in STACKS.items():
            if name.endswith(end):
                return stacked_experts(f"{name.removesuffix(end)}.experts", matrices, routed_experts(self.config.hf))
        if self.joined_convs and name.endswith(CONV):
            (linear,) = self.config.linear.values()
            parts, widths = zip(*state_shape(linear).segments)
            return [(f"{name.removesuffix(CONV)}.{p}_conv1d.weight", _rows(widths, i)) for i, p in enumerate(parts)]
        return [(name, lambda t: t)]


def _rows(widths: Sequence[int], i: int) -> Transform:
    """Of parts of these widths, one above the other, number i."""
    return lambda t: t.split(widths)[i]


class MTPHead(nn.Module, ABC):
    """A multi-token-prediction head: from a token's hidden state and the next token to a hidden state of that one, by a
    few layers between the model's own embedding and output head (DeepSeek-AI 2024, section 2.2).

        norm(embedding) | norm(hidden) ─ fuse ─ layers ─ norm

    From its output and the token drawn from it, it goes on. Its layers' ids count on after the model's last.
    """

    def __init__(self, model: CausalLM) -> None:
        super().__init__()
        size, first, norm = model.config.hidden_size, len(model.config.layers), model.norm_options
        self.embedding_norm = RMSNorm("mtp.embedding_norm", size, **norm)
        self.hidden_norm = RMSNorm("mtp.hidden_norm", size, **norm)
        # Every rank needs the whole fused vector, so the projection is not cut.
        self.fuse = RowLinear("mtp.fuse", [Segment("both", 2 * size)], size, build=model.build.uncut)
        self.norm = RMSNorm("mtp.norm", size, **norm)
        self.stack = model.make_stack(range(first, first + len(model.config.mtp_layers)))

    def forward(self, embedded: torch.Tensor, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """[T, hidden] embeddings of the next tokens and hidden states (after the final norm, the model's or this head's
        own) to [T, hidden] hidden states after the head's norm."""
        x = self.fuse(self.embedding_norm(embedded)[0], tail=self.hidden_norm(hidden)[0])
        residual = None
        for norm, part in self.stack:
            x, residual = part(norm, x, residual, batch)
        return self.norm(x, residual)[0]

    @abstractmethod
    def checkpoint_map(self) -> CheckpointMap:
        """Every `mtp.*` key and what it fills."""
