"""Falcon-H1: every block runs softmax attention and Mamba-2 side by side on one normalised input, then an MLP.

    x ─ norm ─┬─ attention ─┬─ concat ─ out ─ + ─ norm ─ MLP ─ +
              └─ Mamba-2 ───┘

All of a block's input projections are one GEMM and both output projections another; the mu-P multipliers of the
checkpoint scale those weights when they are loaded (Falcon-H1 report, TII 2025).
"""

from typing import Any, cast

import torch
from torch import nn

from hybridrt.config import ModelConfig
from hybridrt.distributed.groups import TPGroup
from hybridrt.forward_batch import ForwardBatch
from hybridrt.kernels.records import Rope
from hybridrt.kinds.mamba2 import Mamba2Config
from hybridrt.layers.attention import AttentionLayer, qkv_segments
from hybridrt.layers.branch import Branch
from hybridrt.layers.linear import ColumnLinear, RowLinear, Segment, Summands, norm_linear
from hybridrt.layers.mamba2 import Mamba2Mixer, mamba2_segments
from hybridrt.layers.mlp import GatedMLP
from hybridrt.layers.norm import GatedRMSNorm, RMSNorm
from hybridrt.layers.rotary import rotary_table
from hybridrt.layers.weights import Build, CheckpointMap
from hybridrt.models.base import CausalLM


class FalconH1Block(nn.Module):
    """One decoder block. `hf` holds the multipliers and bias switches of config.json."""

    def __init__(self, config: ModelConfig, layer_id: int, branch: Branch, build: Build) -> None:
        super().__init__()
        hf, mamba, hidden = config.hf, config.linear_of(Mamba2Config), config.hidden_size
        name, tp, device = f"layers.{layer_id}", build.tp, build.device
        self.hf, self.branch = hf, branch
        self.attn = AttentionLayer(config.attention, layer_id, tp)
        norm = self._gated_norm(name, config, build)
        self.mamba = Mamba2Mixer(f"{name}.mamba", mamba, layer_id, conv_bias=hf.mamba_conv_bias, norm=norm, build=build)
        ssm_parts, qkv_parts = mamba2_segments(mamba, tp), qkv_segments(config.attention, tp)
        biased = [s.name for s in ssm_parts if hf.mamba_proj_bias] + [s.name for s in qkv_parts if hf.attention_bias]
        self.in_proj = ColumnLinear(f"{name}.in_proj", hidden, ssm_parts + qkv_parts, bias=biased, build=build)
        outputs = [Segment("attn", config.attention.num_heads * config.attention.head_dim)]
        outputs += [Segment("ssm", mamba.intermediate_size)]
        out_bias = hf.attention_bias or hf.projectors_bias
        self.out_proj = RowLinear(f"{name}.out_proj", outputs, hidden, bias=out_bias, build=build)
        self.mlp = GatedMLP(f"{name}.mlp", hidden, hf.intermediate_size, bias=hf.mlp_bias, build=build)
        self.input_norm = RMSNorm(f"{name}.input_norm", hidden, hf.rms_norm_eps, device=device)
        self.mlp_norm = RMSNorm(f"{name}.mlp_norm", hidden, hf.rms_norm_eps, device=device)
        self.ssm_width = sum(s.local(tp) for s in ssm_parts)

    @staticmethod
    def _gated_norm(name: str, config: ModelConfig, build: Build) -> GatedRMSNorm | None:
        hf, mamba = config.hf, config.linear_of(Mamba2Config)
        if not hf.mamba_rms_norm:
            return None
        group = mamba.intermediate_size // mamba.n_groups
        return GatedRMSNorm(
            f"{name}.mamba.norm", mamba.intermediate_size // build.tp.size, hf.rms_norm_eps, group_size=group,
            norm_before_gate=hf.mamba_norm_before_gate, build=build,
        )  # fmt: skip

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None, rope: Rope, batch: ForwardBatch) -> Summands:
        projected, residual = norm_linear(self.input_norm, self.in_proj, x, residual)
        # Rows of one kind leave both results side by side; those of a mixed step are put together anyway.
        mixed = batch.num_decode_rows and batch.num_extend_rows
        for_attn, for_ssm = (None, None) if mixed else self.out_proj.places(projected)
        with self.branch.beside():
            ssm = self.mamba(projected[:, : self.ssm_width], batch, for_ssm)
        attn = self._attention(projected[:, self.ssm_width :], rope, batch, for_attn)
        self.branch.join()
        return self.mlp.after_norm(self.mlp_norm, *self.out_proj.onto(residual, attn, ssm), batch)

    def _attention(self, qkv: torch.Tensor, rope: Rope, batch: ForwardBatch, out: torch.Tensor | None) -> torch.Tensor:
        attn = self.attn
        q, k, v = qkv.split((attn.q_size, attn.kv_size, attn.kv_size), dim=-1)
        return batch.attn_backend.forward(q, k, v, attn, batch, rope=rope, out=out)

    def checkpoint_map(self, key: str) -> CheckpointMap:
        hf, ssm_names = self.hf, ["z", "x", "B", "C", "dt"]
        # ssm_multipliers act on the projection's output, ssm_in on its input: a bias sees only the first.
        by_output = dict(zip(ssm_names, hf.ssm_multipliers))
        by_input = {n: m * hf.ssm_in_multiplier for n, m in by_output.items()}
        found: CheckpointMap = {
            **self.in_proj.targets(
                f"{key}.mamba.in_proj", ssm_names, bias=hf.mamba_proj_bias, scale=by_input, bias_scale=by_output
            ),
            **self.out_proj.targets(
                f"{key}.mamba.out_proj", "ssm", bias=hf.projectors_bias, scale=hf.ssm_out_multiplier
            ),
            **self.out_proj.targets(
                f"{key}.self_attn.o_proj", "attn", bias=hf.attention_bias, scale=hf.attention_out_multiplier
            ),
            **self.mamba.targets(f"{key}.mamba"),
            **self.mlp.targets(f"{key}.feed_forward", *hf.mlp_multipliers),
            **self.input_norm.targets(f"{key}.input_layernorm"),
            **self.mlp_norm.targets(f"{key}.pre_ff_layernorm"),
        }
        for name, multiplier in (("q", 1.0), ("k", hf.key_multiplier), ("v", 1.0)):
            scale = {name: multiplier * hf.attention_in_multiplier}
            found |= self.in_proj.targets(
                f"{key}.self_attn.{name}_proj",
                [name],
                bias=hf.attention_bias,
                scale=scale,
                bias_scale={name: multiplier},
            )
        return found


class FalconH1ForCausalLM(CausalLM):
    """Falcon-H1 (TII 2025), any size."""

    def __init__(
        self, config: ModelConfig, *, tp: TPGroup, dtype: torch.dtype, device: torch.device, max_len: int
    ) -> None:
        super().__init__(config, tp=tp, dtype=dtype, device=device, max_len=max_len)
        hf, build = config.hf, Build(tp, dtype, device)
        self.make_tables(build, hf.embedding_multiplier)
        branch = Branch(device)
        blocks = nn.ModuleList(FalconH1Block(config, i, branch, build) for i in range(len(config.layers)))
        self.layers = cast(list[FalconH1Block], blocks)
        # The head's multiplier commutes with the head, so the norm before it takes it, tied or not.
        self.norm = RMSNorm("norm", config.hidden_size, hf.rms_norm_eps, device=device, scale=hf.lm_head_multiplier)
        self.rope = Rope(rotary_table(config, max_len, device))

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        x, residual = self.embed(batch.input_ids), None
        for layer in self.layers:
            x, residual = layer(x, residual, self.rope, batch)
        return self.norm(x, residual)[0]

    def mixers(self) -> dict[int, Any]:
        return {layer.mamba.layer_id: layer.mamba for layer in self.layers}

    def checkpoint_map(self) -> CheckpointMap:
        found = {**self.embed.targets("model.embed_tokens"), **self.norm.targets("model.final_layernorm")}
        if self.head is not self.embed:
            found |= self.head.targets("lm_head")
        for i, layer in enumerate(self.layers):
            found |= layer.checkpoint_map(f"model.layers.{i}")
        return found
