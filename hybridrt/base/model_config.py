"""ModelConfig: attention, recurrent layers and sizes of a model, as its checkpoint describes it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeVar, cast

import torch

from hybridrt.base.config_json import check_fields, integer, one_of
from hybridrt.base.quantization import QuantConfig
from hybridrt.base.vision import VisionSpec


@dataclass(frozen=True)
class LatentConfig:
    """The projections of multi-head latent attention (DeepSeek-AI 2024, section 2.1).

    Attributes:
        rank: size of a token's latent vector, which gives the keys and values of all heads.
        nope_dim, rope_dim: sizes of a query head's two parts: the head's own, and the rotated one
            for the key part that all heads share.
        value_dim: size of a head's output.
        query_rank: size of compressed queries; None if one projection gives the queries.
    """

    rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    query_rank: int | None = None


@dataclass(frozen=True)
class AttentionConfig:
    """Softmax attention of a layer, before sharding. A model without attention layers has no heads.

    Attributes:
        head_dim: numbers of a cached key, and of the queries that are multiplied by them.
        rope: the Hugging Face rope_parameters dict, None for none.
        sliding_window: keys that a token sees, its own included; None for all.
        v_head_dim: numbers of a value; None for head_dim.
        scale: factor of the scores; None for head_dim ** -0.5.
        sinks: each head has a learned score of a key without a value (gpt-oss).
        latent: the projections of variant "mla", which has one KV head; None for "gqa".
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Mapping[str, Any] | None
    sliding_window: int | None = None
    v_head_dim: int | None = None
    scale: float | None = None
    latent: LatentConfig | None = None
    sinks: bool = False

    @property
    def mrope_section(self) -> tuple[int, int, int] | None:
        """Pairs that turn by time, row and column (`kernels.core.records.Rope`); None: positions
        have one axis."""
        section = (self.rope or {}).get("mrope_section")
        return None if section is None else tuple(section)

    @property
    def rotary_dim(self) -> int:
        """Size of the part of a head that rotary embeddings may rotate."""
        return self.latent.rope_dim if self.latent else self.head_dim


@dataclass(frozen=True)
class AttentionSpec:
    """Softmax attention of one layer on one rank, as its KV cache and its kernels see it.

    Attributes:
        sliding_window, head_dim, v_head_dim, scale, sinks: those of AttentionConfig, with defaults
            filled in.
        dtype: dtype of the KV cache.
        query_dtype: dtype of queries if the cache holds codes (KV_CODES); None for `dtype`.
        variant: "gqa" keeps keys and values of every KV head. "mla" keeps one latent vector of
            head_dim numbers for a token; its first v_head_dim numbers are the values (DeepSeek-AI
            2024, section 2.1).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    sliding_window: int | None
    scale: float
    dtype: torch.dtype
    variant: str = "gqa"
    sinks: bool = False
    query_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        check_fields(self, {"variant": one_of("gqa", "mla")}, "an attention layer")

    @property
    def cache_dims(self) -> tuple[int, ...]:
        """Sizes per token and KV head in the cache: keys and values, or the latent vector."""
        return (self.head_dim, self.v_head_dim) if self.variant == "gqa" else (self.head_dim,)

    @property
    def stored_dtype(self) -> torch.dtype:
        """dtype of the cache's memory: codes are kept as bytes."""
        return self.dtype if self.query_dtype is None else torch.uint8

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in the cache of one layer."""
        return self.num_kv_heads * sum(self.cache_dims) * self.dtype.itemsize


class LinearConfig:
    """Base of the configurations of recurrent layers before sharding, one frozen dataclass a kind.

    Attributes:
        kind: name of the kind (`hybridrt.kinds`).
        chunk_size: tokens of a prefill chunk.

    Raises:
        ConfigError: a field of type int is not a positive integer.
    """

    kind: ClassVar[str]
    chunk_size: int

    def __post_init__(self) -> None:
        sizes = (each.name for each in fields(cast(Any, self)) if each.type is int)
        check_fields(self, dict.fromkeys(sizes, integer(1, 2**31 - 1)), self.kind)


Linear = TypeVar("Linear", bound=LinearConfig)


@dataclass(frozen=True)
class LayerSpec:
    """The parts of one decoder layer: attention and/or a recurrent mixer, then feed-forward or
    none.

    Attributes:
        attention: whether there is any; its own configuration if that differs from the model's.
    """

    attention: bool | AttentionConfig
    linear: str | None  # a kind (hybridrt.kinds), or None
    ffn: str | None


@dataclass(frozen=True)
class ModelConfig:
    """A model as the runtime sees it, the same for all families (`read_model_config` makes it).

    Attributes:
        attention: configuration of the layers that have no configuration of their own.
        hf: the fields of config.json, for numbers that only one model file reads.
        mtp_layers: layers of the multi-token-prediction head; their ids follow the model's last.
        image_tokens: placeholders of images, with the names of their fields. A prompt that contains
            one is refused.
        quant: how a quantised checkpoint stores its matrices; None for a plain one.
        vision: its tower for images; None: it takes text only.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    attention: AttentionConfig
    linear: Mapping[str, LinearConfig]
    max_position_embeddings: int
    dtype: torch.dtype
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    hf: Any = field(repr=False, compare=False)
    mtp_layers: tuple[LayerSpec, ...] = ()
    image_tokens: Mapping[int, str] = field(default_factory=dict, compare=False)
    quant: QuantConfig | None = field(default=None, repr=False, compare=False)
    vision: VisionSpec | None = None

    @property
    def mrope(self) -> bool:
        """Whether tokens of images have positions on three axes."""
        return self.vision is not None and self.attention.mrope_section is not None

    @property
    def full_attention_layer_ids(self) -> tuple[int, ...]:
        """Layers with softmax attention, those with a sliding window included."""
        return tuple(i for i, spec in enumerate(self.layers) if spec.attention)

    @property
    def mtp_attention_layer_ids(self) -> tuple[int, ...]:
        return tuple(i for i, spec in enumerate(self.mtp_layers, len(self.layers)) if spec.attention)

    def layer(self, layer_id: int) -> LayerSpec:
        """A layer of the model or of its prediction head."""
        return (*self.layers, *self.mtp_layers)[layer_id]

    def attention_of(self, layer_id: int) -> AttentionConfig:
        """The attention of a layer of the model or of its prediction head."""
        own = self.layer(layer_id).attention
        assert own, f"layer {layer_id} has no attention"
        return self.attention if own is True else own

    def linear_of(self, cls: type[Linear]) -> Linear:
        """The configuration of the model's recurrent layers of one kind, by its class."""
        config = self.linear[cls.kind]
        assert isinstance(config, cls)
        return config

    def linear_layer_ids(self, kind: str) -> tuple[int, ...]:
        return tuple(i for i, spec in enumerate(self.layers) if spec.linear == kind)
