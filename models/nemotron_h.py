"""Nemotron-H: residual blocks of Mamba-2 (M), attention (*), an MLP (-) or experts (E).

    x ─ norm ─ mixer ─ +

Attention rotates nothing: recurrent layers give positions (NVIDIA 2025, arXiv:2504.03624).
"""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

from hybridrt.base.config_fields import (
    ATTENTION,
    CHUNK,
    COMMON,
    COUNT,
    EPSILON,
    MAX_EXPERTS,
    MULTIPLIER,
    SIZE,
    STATE,
    TAPS,
    FieldTypes,
)
from hybridrt.base.config_json import FLAG, NULL, FieldType, check_fields, either, integer, list_of, one_of
from hybridrt.base.errors import ConfigError
from hybridrt.base.model_config import LayerSpec
from hybridrt.kinds.mamba2 import Mamba2Config
from hybridrt.layers.attention import Attention
from hybridrt.layers.linear import MLP
from hybridrt.layers.moe import Experts, Latent, MoE, SigmoidGroupRouter
from hybridrt.layers.norm import LayerPart, ResidualPart
from hybridrt.layers.weights import CheckpointMap
from hybridrt.models.base import CausalLM, MTPHead
from hybridrt.models.config.family import Family, FamilyFields, attention_config
from hybridrt.recurrent.mamba2 import Mamba2Block

BLOCKS = {
    "linear_attention": LayerSpec(False, "mamba2", None),
    "full_attention": LayerSpec(True, None, None),
    "mlp": LayerSpec(False, None, "mlp"),
    "moe": LayerSpec(False, None, "moe"),
}
FIELDS: FieldTypes = {
    **COMMON,
    **ATTENTION,
    **dict.fromkeys(("mamba_num_heads", "mamba_head_dim", "n_groups"), SIZE),
    "ssm_state_size": STATE,
    "conv_kernel": TAPS,
    "chunk_size": CHUNK,
    **dict.fromkeys(("layers_block_type", "mtp_layers_block_type"), list_of(one_of(*BLOCKS))),
    "num_nextn_predict_layers": COUNT,
    **dict.fromkeys(("n_routed_experts", "num_experts_per_tok"), COUNT),
    **dict.fromkeys(("n_group", "topk_group"), integer(1, MAX_EXPERTS)),
    **dict.fromkeys(("moe_intermediate_size", "moe_shared_expert_intermediate_size"), SIZE),
    "moe_latent_size": either(NULL, SIZE),
    "routed_scaling_factor": MULTIPLIER,
    "layer_norm_epsilon": EPSILON,
    **dict.fromkeys(("use_bias", "use_conv_bias", "mlp_bias", "norm_topk_prob"), FLAG),
}
DEFAULTS: dict[str, Any] = {
    "vocab_size": 131072, "hidden_size": 4096, "num_hidden_layers": None, "layers_block_type": None,
    "tie_word_embeddings": False, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 4096, "intermediate_size": 21504, "mlp_bias": False, "ssm_state_size": 128,
    "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "conv_kernel": 4, "use_conv_bias": True,
    "chunk_size": 128, "n_routed_experts": 8, "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688, "moe_latent_size": None, "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
    "num_nextn_predict_layers": 0, "mtp_layers_block_type": None, "use_bias": False, "layer_norm_epsilon": 1e-05,
}  # fmt: skip
OLDER = {
    "layer_types": "layers_block_type", "num_local_experts": "n_routed_experts", "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel", "mamba_conv_bias": "use_conv_bias", "mamba_chunk_size": "chunk_size",
}  # fmt: skip
# Letters of hybrid_override_pattern.
LETTERS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
MTP_KINDS = ["full_attention", "moe"]
PATTERN = FieldType(f"a string of {' '.join(LETTERS)}", lambda v: isinstance(v, str) and set(v) <= LETTERS.keys())


def _derive(fields: dict[str, Any]) -> None:
    """Reads lists of blocks from letters if there is no list."""
    if fields["layers_block_type"] is None:
        fields["layers_block_type"] = _spelled(fields, "hybrid_override_pattern", "ME*-")
    count = len(fields["layers_block_type"])
    if fields["num_hidden_layers"] not in (None, count):
        raise ConfigError(
            f"num_hidden_layers is {fields['num_hidden_layers']}, but the list or the pattern of blocks has {count}"
        )
    fields["num_hidden_layers"] = count
    if fields["mtp_layers_block_type"] in (None, MTP_KINDS):
        fields["mtp_layers_block_type"] = _spelled(fields, "mtp_hybrid_override_pattern", "*E")


def _spelled(fields: dict[str, Any], name: str, default: str) -> list[str]:
    check_fields(fields, {name: PATTERN}, "a pattern of blocks")
    return [LETTERS[letter] for letter in fields.get(name, default)]


def _describe(hf: Any) -> FamilyFields:
    mamba = Mamba2Config(
        hf.mamba_num_heads, hf.mamba_head_dim, hf.ssm_state_size, hf.n_groups, hf.conv_kernel, hf.chunk_size,
        # Not time_step_min: transformers clamps only in prefill, vLLM never.
        dt_limit=(0.0, math.inf),
    )  # fmt: skip
    layers = tuple(BLOCKS[k] for k in hf.layers_block_type)
    head = tuple(BLOCKS[k] for k in hf.mtp_layers_block_type) if hf.num_nextn_predict_layers == 1 else ()
    attention = attention_config(hf, rotary=False)
    return {"layers": layers, "linear": {"mamba2": mamba}, "attention": attention, "mtp_layers": head}


FAMILY = Family(
    model="hybridrt.models.nemotron_h:NemotronHForCausalLM",
    model_type="nemotron_h",
    fields=FIELDS,
    defaults=DEFAULTS,
    older=OLDER,
    derive=_derive,
    describe=_describe,
    mtp_head="hybridrt.models.nemotron_h:NemotronHMTP",
)


MOE_KEYS = {
    "router": "gate",
    "experts": "experts",
    "shared": "shared_experts",
    "into": "fc1_latent_proj",
    "back": "fc2_latent_proj",
}


class NemotronHForCausalLM(CausalLM):
    embed_key, norm_key, layers_key = "backbone.embeddings", "backbone.norm_f", "backbone.layers"
    spellings: ClassVar[dict[str, str]] = {"model.": "backbone."}
    eps_field = "layer_norm_epsilon"

    def layer(self, layer_id: int, name: str) -> Sequence[ResidualPart]:
        return [ResidualPart("norm", "mixer", self._part(layer_id, f"{name}.mixer"))]

    def _part(self, layer_id: int, name: str) -> LayerPart:
        config, hf, spec = self.config, self.config.hf, self.config.layer(layer_id)
        hidden, build = config.hidden_size, self.build
        if spec.attention:
            return Attention(name, config.attention_of(layer_id), layer_id, hidden, build=build)
        if spec.linear:
            return Mamba2Block(
                name, config.linear_of(Mamba2Config), layer_id, hidden, bias=hf.use_bias, conv_bias=hf.use_conv_bias,
                gated_norm=(hf.layer_norm_epsilon, False), build=build,
            )  # fmt: skip
        if spec.ffn == "moe":
            return self._moe(name, layer_id)
        return self._mlp(name, self.size_of("intermediate_size", layer_id))

    def size_of(self, field: str, layer_id: int) -> int:
        """A layer's value of a config.json field."""
        return getattr(self.config.hf, field)

    def _mlp(self, name: str, size: int) -> MLP:
        hidden, bias = self.config.hidden_size, self.config.hf.mlp_bias
        return MLP(name, hidden, size, activation="relu2", bias=bias, build=self.build)

    def _moe(self, name: str, layer_id: int) -> MoE:
        """Builds squared-ReLU experts, maybe in a smaller latent space, and a shared one."""
        hf, hidden, build = self.config.hf, self.config.hidden_size, self.build_of(layer_id)
        count, top_k = self.size_of("n_routed_experts", layer_id), self.size_of("num_experts_per_tok", layer_id)
        router = SigmoidGroupRouter(
            f"{name}.router", hidden, count, top_k=top_k, n_group=hf.n_group,
            topk_group=hf.topk_group, renormalize=hf.norm_topk_prob, scaling=float(hf.routed_scaling_factor),
            build=build,
        )  # fmt: skip
        size, inner = hf.moe_latent_size or hidden, self.size_of("moe_intermediate_size", layer_id)
        experts = Experts(f"{name}.experts", count, size, inner, activation="relu2", build=build)
        shared = self._mlp(f"{name}.shared", self.size_of("moe_shared_expert_intermediate_size", layer_id))
        latent = Latent(name, hidden, size, bias=hf.mlp_bias, build=build) if hf.moe_latent_size else None
        return MoE(router, experts, shared=shared, latent=latent, keys=MOE_KEYS)


class NemotronHMTP(MTPHead):
    """The prediction head of Nemotron 3: blocks like the model's. In checkpoints the first block
    holds the fusion, the last one the final norm."""

    def checkpoint_map(self) -> CheckpointMap:
        return {
            **self.embedding_norm.targets("mtp.layers.0.enorm"),
            **self.hidden_norm.targets("mtp.layers.0.hnorm"),
            **self.fuse.targets("mtp.layers.0.eh_proj", "both"),
            **self.norm.targets(f"mtp.layers.{len(self.stack.parts) - 1}.final_layernorm"),
            **self.stack.targets("mtp.layers"),
        }
