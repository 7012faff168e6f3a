"""Falcon-H1: attention and Mamba-2 in parallel in every block, then an MLP.

    x ─ norm ─┬─ attention ─┬─ concat ─ out ─ + ─ norm ─ MLP ─ +
              └─ Mamba-2 ───┘

A block's input projections are one GEMM, and both output projections another. The checkpoint's mu-P
multipliers scale weights at loading (Falcon-H1 report, TII 2025).
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from hybridrt.attention.base import AttentionInputs, Branch
from hybridrt.base.config_fields import ATTENTION, COMMON, EPSILON, MULTIPLIER, SIZE, FieldTypes
from hybridrt.base.config_json import FLAG, NULL, TRUE, either, list_of
from hybridrt.base.forward_batch import ForwardBatch
from hybridrt.base.model_config import LayerSpec, ModelConfig
from hybridrt.kernels.core.records import Rope
from hybridrt.kinds.mamba2 import Mamba2Config
from hybridrt.layers.attention import AttentionLayer, qkv_segments
from hybridrt.layers.linear import MLP, ColumnLinear, RowLinear, Segment
from hybridrt.layers.norm import ResidualPart, RMSNorm
from hybridrt.layers.summands import Hidden, Summands
from hybridrt.layers.weights import Build, CheckpointMap
from hybridrt.models.base import CausalLM
from hybridrt.models.config.family import (
    FULL_ROPE,
    MAMBA2,
    MAMBA2_DEFAULTS,
    Family,
    FamilyFields,
    attention_config,
    derive_mamba2,
    mamba2_config,
)
from hybridrt.recurrent.mamba2 import Mamba2Mixer, mamba2_segments

FIELDS: FieldTypes = {
    **COMMON,
    **ATTENTION,
    **MAMBA2,
    "mamba_d_ssm": either(NULL, SIZE),
    "rms_norm_eps": EPSILON,
    "rope_parameters": FULL_ROPE,
    **dict.fromkeys(("mamba_rms_norm", "mamba_norm_before_gate"), FLAG),
    **dict.fromkeys(("attention_bias", "projectors_bias", "mlp_bias"), FLAG),
    **dict.fromkeys(("lm_head_multiplier", "embedding_multiplier", "key_multiplier"), MULTIPLIER),
    **dict.fromkeys(("attention_in_multiplier", "attention_out_multiplier"), MULTIPLIER),
    **dict.fromkeys(("ssm_in_multiplier", "ssm_out_multiplier"), MULTIPLIER),
    "ssm_multipliers": list_of(MULTIPLIER, 5),
    "mlp_multipliers": list_of(MULTIPLIER, 2),
    # Hub files name these fields, and none uses them.
    "attn_layer_indices": NULL,
    "mamba_use_mlp": either(NULL, TRUE),
    **dict.fromkeys(("layer_types", "layers_block_type"), NULL),
}
DEFAULTS: dict[str, Any] = {
    **MAMBA2_DEFAULTS,
    "vocab_size": 128000, "tie_word_embeddings": False, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
    "max_position_embeddings": 8192, "mamba_d_ssm": 1024, "mamba_norm_before_gate": True, "mamba_rms_norm": False,
    "projectors_bias": False, "attention_bias": False, "mlp_bias": False, "rope_parameters": None,
    "lm_head_multiplier": 1.0, "embedding_multiplier": 1.0, "key_multiplier": 1.0, "attention_in_multiplier": 1.0,
    "attention_out_multiplier": 1.0, "ssm_in_multiplier": 1.0, "ssm_out_multiplier": 1.0, "mlp_multipliers": None,
    "ssm_multipliers": None,
}  # fmt: skip


def _derive(fields: dict[str, Any]) -> None:
    derive_mamba2(fields, fields["mamba_d_ssm"])
    for name, count in (("mlp_multipliers", 2), ("ssm_multipliers", 5)):
        if fields[name] is None:
            fields[name] = [1.0] * count


def _describe(hf: Any) -> FamilyFields:
    mamba = mamba2_config(hf, hf.mamba_d_ssm)
    layer = LayerSpec(attention=True, linear="mamba2", ffn="mlp")
    return {"layers": (layer,) * hf.num_hidden_layers, "linear": {"mamba2": mamba}, "attention": attention_config(hf)}


FAMILY = Family(
    model="hybridrt.models.falcon_h1:FalconH1ForCausalLM",
    model_type="falcon_h1",
    fields=FIELDS,
    defaults=DEFAULTS,
    derive=_derive,
    describe=_describe,
)


class ParallelMixer(nn.Module):
    """Attention and Mamba-2 with common projections.

    Args:
        branch: runs Mamba-2 next to attention in graphs; None without a GPU, where a layer's way is shorter.
    """

    def __init__(
        self, config: ModelConfig, layer_id: int, name: str, branch: Branch | None, cos_sin: torch.Tensor, build: Build
    ) -> None:
        super().__init__()
        hf, mamba, attention = config.hf, config.linear_of(Mamba2Config), config.attention_of(layer_id)
        tp, hidden = build.tp, config.hidden_size
        self.hf, self.branch, self.rope = hf, branch, Rope(cos_sin)
        self.attn = AttentionLayer(attention, layer_id, build)
        gated_norm = (hf.rms_norm_eps, hf.mamba_norm_before_gate) if hf.mamba_rms_norm else None
        self.mamba = Mamba2Mixer(
            f"{name}.mamba", mamba, layer_id, conv_bias=hf.mamba_conv_bias, gated_norm=gated_norm, build=build
        )
        # dt is last: its few rows would move the others off the blocks in which a weight may be quantised.
        parts = qkv_segments(attention, tp, hf.attention_bias) + mamba2_segments(mamba, tp, hf.mamba_proj_bias)
        self.in_proj = ColumnLinear(f"{name}.in_proj", hidden, parts, build=build, aligned=True)
        outputs = [
            Segment("attn", attention.num_heads * attention.head_dim, bias=hf.attention_bias),
            Segment("ssm", mamba.intermediate_size, bias=hf.projectors_bias),
        ]
        self.out_proj = RowLinear(f"{name}.out_proj", outputs, hidden, build=build)
        q, k, v, *of_mamba = self.in_proj.sizes
        self.sizes = (q, k, v, sum(of_mamba))

    def forward(self, norm: RMSNorm, x: Hidden, residual: torch.Tensor | None, batch: ForwardBatch) -> Summands:
        projected, residual = self.in_proj.normed(norm, x, residual)
        widths = self.out_proj.sizes  # results that are written into one tensor need no copy for `out_proj`
        attn_out, ssm_out = projected.new_empty(len(projected), sum(widths)).split_with_sizes(widths, dim=-1)
        q, k, v, mamba_in = projected.split_with_sizes(self.sizes, dim=-1)
        with self.branch.side_stream() if self.branch else nullcontext():
            ssm = self.mamba(mamba_in, batch, ssm_out)
        attn = batch.attn_backend.run(self.attn, batch, AttentionInputs(q, k, v, rope=self.rope), attn_out)
        if self.branch:
            self.branch.join()
        return self.out_proj.onto(residual, attn, ssm)

    def targets(self, key: str) -> CheckpointMap:
        hf, ssm_names = self.hf, ["z", "x", "B", "C", "dt"]
        # ssm_multipliers scale the projection's output, so a bias too. ssm_in_multiplier scales its input.
        by_output = dict(zip(ssm_names, hf.ssm_multipliers))
        by_input = {n: m * hf.ssm_in_multiplier for n, m in by_output.items()}
        found: CheckpointMap = {
            **self.in_proj.targets(f"{key}.mamba.in_proj", ssm_names, scale=by_input, bias_scale=by_output),
            **self.out_proj.targets(f"{key}.mamba.out_proj", "ssm", scale=hf.ssm_out_multiplier),
            **self.out_proj.targets(f"{key}.self_attn.o_proj", "attn", scale=hf.attention_out_multiplier),
            **self.mamba.targets(f"{key}.mamba"),
        }
        for name, multiplier in (("q", 1.0), ("k", hf.key_multiplier), ("v", 1.0)):
            scale = {name: multiplier * hf.attention_in_multiplier}
            at = f"{key}.self_attn.{name}_proj"
            found |= self.in_proj.targets(at, [name], scale=scale, bias_scale={name: multiplier})
        return found


class FalconH1ForCausalLM(CausalLM):
    norm_key = "model.final_layernorm"

    def __init__(self, config: ModelConfig, build: Build, max_len: int) -> None:
        hf, self.branch = config.hf, Branch(build.device) if build.device.type == "cuda" else None
        # lm_head_multiplier scales the final norm: the head's weights may be those of the embedding.
        scales = {"embed_scale": hf.embedding_multiplier, "norm_scale": hf.lm_head_multiplier}
        super().__init__(config, build, max_len, **scales)

    def layer(self, layer_id: int, name: str) -> Sequence[ResidualPart]:
        config, hf = self.config, self.config.hf
        cos_sin = self.cos_sin(config.attention_of(layer_id))
        assert cos_sin is not None
        mixer = ParallelMixer(config, layer_id, name, self.branch, cos_sin, self.build)
        size, (gate, down) = hf.intermediate_size, hf.mlp_multipliers
        mlp = MLP(f"{name}.mlp", config.hidden_size, size, bias=hf.mlp_bias, scales=(gate, down), build=self.build)
        return [ResidualPart("input_layernorm", "", mixer), ResidualPart("pre_ff_layernorm", "feed_forward", mlp)]
