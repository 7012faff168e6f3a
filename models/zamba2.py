"""Zamba2: Mamba-2 blocks, some with a shared transformer block.

    x ─────────────────────────────────────────┬─ + ─ norm ─ Mamba-2 ─ + x
    x | embedding ─ norm ─ attention ─ norm ─ MLP ─ linear ─┘

Uses share the block's weights. Each has its own KV cache, and low-rank adapters of q, k, v and the
MLP's first projection (Zyphra 2024, arXiv:2411.15242).
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from hybridrt.base.config_fields import (
    CHUNK,
    COMMON,
    EPSILON,
    MAX_LAYERS,
    POSITIONS,
    SIZE,
    STATE,
    TAPS,
    FieldTypes,
    integer,
)
from hybridrt.base.config_json import FLAG, NULL, FieldType, either, list_of, number, one_of
from hybridrt.base.errors import ConfigError
from hybridrt.base.forward_batch import ForwardBatch
from hybridrt.base.model_config import AttentionConfig, LayerSpec, ModelConfig
from hybridrt.kinds.mamba2 import Mamba2Config
from hybridrt.layers.linear import ColumnLinear, Segment
from hybridrt.layers.norm import ResidualPart, ResidualStack, RMSNorm
from hybridrt.layers.shared_block import SharedBlock
from hybridrt.layers.summands import Hidden, Summands, summed
from hybridrt.layers.weights import Build, CheckpointMap
from hybridrt.models.base import CausalLM
from hybridrt.models.config.family import FULL_ROPE, Family, FamilyFields, check_heads
from hybridrt.recurrent.mamba2 import Mamba2Block

FIELDS: FieldTypes = {
    **COMMON,
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "attention_head_dim", "intermediate_size"), SIZE),
    **dict.fromkeys(("mamba_expand", "mamba_ngroups", "n_mamba_heads", "adapter_rank"), SIZE),
    "mamba_d_state": STATE,
    "mamba_d_conv": TAPS,
    "chunk_size": CHUNK,
    "layers_block_type": list_of(one_of("linear_attention", "hybrid")),
    "num_mem_blocks": integer(1, MAX_LAYERS),
    "max_position_embeddings": POSITIONS,
    "rms_norm_eps": EPSILON,
    "time_step_min": number(0.0, 1e6),
    "rope_parameters": either(NULL, FULL_ROPE),
    **dict.fromkeys(("add_bias_linear", "use_mem_rope", "use_shared_attention_adapter"), FLAG),
    "use_long_context": FieldType("false: rescaled rotary embeddings are not supported", lambda v: v is False),
}
# Layers of the published 2.7B model.
HYBRID = (6, 12, 18, 24, 30, 36, 42, 47, 51)
DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000, "max_position_embeddings": 4096, "hidden_size": 2560, "num_hidden_layers": 54,
    "layers_block_type": None, "mamba_d_state": 64, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_ngroups": 1,
    "time_step_min": 0.001, "n_mamba_heads": 8, "chunk_size": 256, "add_bias_linear": False, "intermediate_size": None,
    "num_attention_heads": 32, "num_key_value_heads": None, "attention_head_dim": None, "num_mem_blocks": 1,
    "use_shared_attention_adapter": False, "adapter_rank": 128, "use_mem_rope": False, "rope_parameters": None,
    "rms_norm_eps": 1e-05, "use_long_context": False, "tie_word_embeddings": True,
}  # fmt: skip


def _derive(fields: dict[str, Any]) -> None:
    if fields["intermediate_size"] is None:
        fields["intermediate_size"] = 4 * fields["hidden_size"]
    if fields["attention_head_dim"] is None:
        fields["attention_head_dim"] = 2 * fields["hidden_size"] // fields["num_attention_heads"]
    if fields["layers_block_type"] is None:
        fields["layers_block_type"] = ["hybrid" if i in HYBRID else "linear_attention" for i in range(54)]


def _describe(hf: Any) -> FamilyFields:
    inner = hf.mamba_expand * hf.hidden_size
    if inner % hf.n_mamba_heads or hf.hidden_size * 2 % hf.num_attention_heads:
        raise ConfigError(
            f"n_mamba_heads {hf.n_mamba_heads} must divide mamba_expand x hidden_size, {inner}, and "
            f"num_attention_heads {hf.num_attention_heads} must divide 2 x hidden_size, {2 * hf.hidden_size}"
        )
    check_heads(hf)
    if hf.use_shared_attention_adapter and hf.num_attention_heads != hf.num_key_value_heads:
        raise ConfigError(
            f"use_shared_attention_adapter: the adapters of keys and values are made for {hf.num_attention_heads} "
            f"heads, and num_key_value_heads is {hf.num_key_value_heads}"
        )
    mamba = Mamba2Config(
        num_heads=hf.n_mamba_heads,
        head_dim=inner // hf.n_mamba_heads,
        state_size=hf.mamba_d_state,
        n_groups=hf.mamba_ngroups,
        conv_kernel=hf.mamba_d_conv,
        chunk_size=hf.chunk_size,
        # transformers clamps only in prefill; here decode steps agree with prompts.
        dt_limit=(float(hf.time_step_min), math.inf),
    )
    head_dim, rope = 2 * hf.hidden_size // hf.num_attention_heads, None
    if hf.use_mem_rope:
        rope = dict(hf.rope_parameters or {})
    heads = hf.num_attention_heads, hf.num_key_value_heads, head_dim
    attention = AttentionConfig(*heads, rope, scale=(head_dim / 2) ** -0.5)
    plain, hybrid = LayerSpec(False, "mamba2", None), LayerSpec(True, "mamba2", "mlp")
    layers = tuple(hybrid if kind == "hybrid" else plain for kind in hf.layers_block_type)
    return {"layers": layers, "linear": {"mamba2": mamba}, "attention": attention}


FAMILY = Family(
    model="hybridrt.models.zamba2:Zamba2ForCausalLM",
    model_type="zamba2",
    fields=FIELDS,
    defaults=DEFAULTS,
    older={"layer_types": "layers_block_type", "head_dim": "attention_head_dim"},
    derive=_derive,
    describe=_describe,
    activation="gelu",
)


GATED_NORM_EPS = 1e-5  # epsilon of Mamba-2's norm; config.json's is for other norms


class HybridPart(nn.Module):
    """Hybrid layer `i`: a shared block (whose keys the model names), a projection, then Mamba-2."""

    def __init__(self, name: str, i: int, block: SharedBlock, mamba: Mamba2Block, hidden: int, *, build: Build) -> None:
        super().__init__()
        self.i, self.block, self.mamba = i, block, mamba
        self.linear = ColumnLinear(f"{name}.linear", hidden, [Segment("x", hidden)], build=build.uncut)

    def forward(
        self, norm: RMSNorm, x: Hidden, residual: torch.Tensor | None, batch: ForwardBatch, embedded: torch.Tensor
    ) -> Summands:
        """Mamba-2 of norm(x + residual + projected block), and x + residual."""
        x = summed(x) if residual is None else summed(x) + residual
        seen = self.linear(self.block(self.i, x, embedded, batch)).add_(x)
        projected, _ = self.mamba.in_proj.normed(norm, seen, None)
        return self.mamba.out_proj.onto(x, self.mamba.mixer(projected, batch))

    def targets(self, key: str) -> CheckpointMap:
        return {**self.linear.targets(f"{key}.linear", ["x"]), **self.mamba.targets(f"{key}.mamba_decoder.mamba")}


class Zamba2ForCausalLM(CausalLM):
    """Zamba2 (Zyphra 2024): `num_mem_blocks` shared blocks, or one for each hybrid layer if
    embeddings are not tied."""

    norm_key = "model.final_layernorm"

    def __init__(self, config: ModelConfig, build: Build, max_len: int) -> None:
        super().__init__(config, build, max_len)
        # A checkpoint may repeat a block, and hold unused adapters.
        again = "|".join(map(str, config.full_attention_layer_ids[len(self.blocks) :])) or r"\d+"
        part = ".*" if len(self.blocks) < len(config.full_attention_layer_ids) else r".*_adapter_list\..*"
        self.skipped_keys = (*self.skipped_keys, rf"model\.layers\.({again})\.shared_transformer\.{part}")

    def make_stack(self, layer_ids: Iterable[int]) -> ResidualStack:
        config, hf = self.config, self.config.hf
        hybrid = list(enumerate(config.full_attention_layer_ids))
        # Like transformers: untied embeddings mean one block for each hybrid layer.
        count = hf.num_mem_blocks if hf.tie_word_embeddings else len(hybrid)
        table = self.cos_sin(config.attention)
        places = [dict(hybrid[b::count]) for b in range(min(count, len(hybrid)))]
        self.blocks = nn.ModuleList(
            SharedBlock(
                f"shared.{b}",
                config.attention,
                config.hidden_size,
                hf.intermediate_size,
                each,
                adapter_rank=hf.adapter_rank,
                attention_adapters=hf.use_shared_attention_adapter,
                bias=hf.add_bias_linear,
                eps=hf.rms_norm_eps,
                cos_sin=table,
                build=self.build,
            )
            for b, each in enumerate(places)
        )
        return super().make_stack(layer_ids)

    def layer(self, layer_id: int, name: str) -> Sequence[ResidualPart]:
        config, hf, hidden = self.config, self.config.hf, self.config.hidden_size
        mamba = Mamba2Block(
            f"{name}.mamba", config.linear_of(Mamba2Config), layer_id, hidden, bias=hf.add_bias_linear, conv_bias=True,
            gated_norm=(GATED_NORM_EPS, False), build=self.build,
        )  # fmt: skip
        if not config.layer(layer_id).attention:
            return [ResidualPart("input_layernorm", "mamba", mamba)]
        i = config.full_attention_layer_ids.index(layer_id)
        block = self.blocks[i % len(self.blocks)]
        assert isinstance(block, SharedBlock)
        return [
            ResidualPart(
                "mamba_decoder.input_layernorm", "", HybridPart(name, i, block, mamba, hidden, build=self.build)
            )
        ]

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        embedded = self.embed(batch.input_ids)
        # The residual may be overwritten; blocks read the embedding to the end.
        x, residual = embedded.clone(), None
        for norm, part in self.stack:
            more = (embedded,) if isinstance(part, HybridPart) else ()
            x, residual = part(norm, x, residual, batch, *more)
        return self.norm(x, residual)[0]

    def checkpoint_map(self) -> CheckpointMap:
        found = super().checkpoint_map()
        for layer_id, block in zip(self.config.full_attention_layer_ids, self.blocks):
            assert isinstance(block, SharedBlock)
            found |= block.targets(f"model.layers.{layer_id}.shared_transformer")
        return found
