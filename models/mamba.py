"""Mamba and Mamba-2: only recurrent blocks, without attention or MLP.

    x ─ norm ─ Mamba ─ +

Gu & Dao 2023 (arXiv:2312.00752), Dao & Gu 2024 (arXiv:2405.21060).
"""

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from hybridrt.base.config_fields import CHUNK, COMMON, DT_LIMIT, EPSILON, POSITIONS, SIZE, STATE, TAPS, FieldTypes
from hybridrt.base.config_json import FLAG, NULL, either
from hybridrt.base.errors import ConfigError
from hybridrt.base.forward_batch import ForwardBatch
from hybridrt.base.model_config import AttentionConfig, LayerSpec, LinearConfig, ModelConfig
from hybridrt.kinds.mamba1 import Mamba1Config
from hybridrt.kinds.mamba2 import Mamba2Config
from hybridrt.layers.norm import LayerPart, ResidualPart
from hybridrt.layers.summands import Hidden
from hybridrt.layers.weights import Build
from hybridrt.models.base import CausalLM
from hybridrt.models.config.family import Family, FamilyFields
from hybridrt.recurrent.mamba1 import Mamba1Mixer
from hybridrt.recurrent.mamba2 import Mamba2Block

PURE: FieldTypes = {
    **COMMON,
    "state_size": STATE,
    "conv_kernel": TAPS,
    "expand": SIZE,
    "max_position_embeddings": either(NULL, POSITIONS),
    "layer_norm_epsilon": EPSILON,
    **dict.fromkeys(("use_conv_bias", "use_bias", "residual_in_fp32"), FLAG),
}
FIELDS: FieldTypes = {**PURE, **dict.fromkeys(("intermediate_size", "time_step_rank"), SIZE)}
FIELDS2: FieldTypes = {
    **PURE,
    **dict.fromkeys(("num_heads", "head_dim", "n_groups"), SIZE),
    "chunk_size": CHUNK,
    "time_step_limit": DT_LIMIT,
}
DEFAULTS: dict[str, Any] = {
    "vocab_size": 50280, "hidden_size": 768, "state_size": 16, "num_hidden_layers": 32, "layer_norm_epsilon": 1e-05,
    "expand": 2, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "residual_in_fp32": True,
    "intermediate_size": None, "time_step_rank": "auto", "tie_word_embeddings": True,
}  # fmt: skip
DEFAULTS2: dict[str, Any] = {
    "vocab_size": 32768, "hidden_size": 4096, "state_size": 128, "num_hidden_layers": 64, "layer_norm_epsilon": 1e-05,
    "expand": 2, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True, "residual_in_fp32": True,
    "num_heads": 128, "head_dim": 64, "n_groups": 8, "chunk_size": 256, "time_step_limit": (0.0, math.inf),
    "tie_word_embeddings": False,
}  # fmt: skip
NO_ATTENTION = AttentionConfig(0, 0, 0, rope=None)


def derive(fields: dict[str, Any]) -> None:
    if fields["intermediate_size"] is None:
        fields["intermediate_size"] = fields["expand"] * fields["hidden_size"]
    if fields["time_step_rank"] == "auto":
        fields["time_step_rank"] = dt_rank(fields["hidden_size"])


def dt_rank(hidden_size: int) -> int:
    """The default of Mamba-1 ("auto")."""
    return math.ceil(hidden_size / 16)


def describe(hf: Any) -> FamilyFields:
    return _stack(hf, Mamba1Config(hf.intermediate_size, hf.state_size, hf.conv_kernel, int(hf.time_step_rank)))


def _describe2(hf: Any) -> FamilyFields:
    if hf.num_heads * hf.head_dim != hf.expand * hf.hidden_size:
        raise ConfigError(
            f"num_heads is {hf.num_heads} and head_dim {hf.head_dim}; their product must be expand x hidden_size, "
            f"{hf.expand * hf.hidden_size}"
        )
    mamba = Mamba2Config(
        num_heads=hf.num_heads,
        head_dim=hf.head_dim,
        state_size=hf.state_size,
        n_groups=hf.n_groups,
        conv_kernel=hf.conv_kernel,
        chunk_size=hf.chunk_size,
        dt_limit=tuple(hf.time_step_limit),
    )
    return _stack(hf, mamba)


def _stack(hf: Any, mamba: LinearConfig) -> FamilyFields:
    layers = (LayerSpec(attention=False, linear=mamba.kind, ffn=None),) * hf.num_hidden_layers
    return {"layers": layers, "linear": {mamba.kind: mamba}, "attention": NO_ATTENTION}


FAMILY = Family(
    model="hybridrt.models.mamba:MambaForCausalLM",
    model_type="mamba",
    fields=FIELDS,
    defaults=DEFAULTS,
    derive=derive,
    describe=describe,
)
FAMILY2 = Family(
    model="hybridrt.models.mamba:Mamba2ForCausalLM",
    model_type="mamba2",
    fields=FIELDS2,
    defaults=DEFAULTS2,
    describe=_describe2,
)


class PureMamba(CausalLM):
    """A stack of mixers. Residuals may be float32."""

    embed_key, norm_key, layers_key = "backbone.embeddings", "backbone.norm_f", "backbone.layers"
    spellings: ClassVar[dict[str, str]] = {"backbone.embedding.": "backbone.embeddings."}
    eps_field = "layer_norm_epsilon"

    def __init__(self, config: ModelConfig, build: Build, max_len: int) -> None:
        super().__init__(config, build, max_len)
        self.residual_dtype = torch.float32 if config.hf.residual_in_fp32 else build.dtype

    @abstractmethod
    def mixer(self, layer_id: int, name: str) -> LayerPart: ...

    def layer(self, layer_id: int, name: str) -> Sequence[ResidualPart]:
        return [ResidualPart("norm", "mixer", self.mixer(layer_id, f"{name}.mixer"))]

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        embedded = self.embed(batch.input_ids)
        residual: torch.Tensor | None = embedded.to(self.residual_dtype)
        x: Hidden = torch.zeros_like(embedded)
        for norm, part in self.stack:
            x, residual = part(norm, x, residual, batch)
        return self.norm(x, residual)[0]


class MambaForCausalLM(PureMamba):
    def mixer(self, layer_id: int, name: str) -> Mamba1Mixer:
        hf, config = self.config.hf, self.config
        return Mamba1Mixer(
            name, config.linear_of(Mamba1Config), layer_id, config.hidden_size, conv_bias=hf.use_conv_bias,
            proj_bias=hf.use_bias, build=self.build,
        )  # fmt: skip


class Mamba2ForCausalLM(PureMamba):
    def mixer(self, layer_id: int, name: str) -> Mamba2Block:
        hf, config = self.config.hf, self.config
        return Mamba2Block(
            name, config.linear_of(Mamba2Config), layer_id, config.hidden_size, bias=hf.use_bias,
            conv_bias=hf.use_conv_bias, gated_norm=(hf.layer_norm_epsilon, False), build=self.build,
        )  # fmt: skip
