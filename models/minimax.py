"""MiniMax: lightning attention with a layer of softmax attention every few, each followed by experts.

    x ─ norm ─ h ─ attention ─ x beta ─ + alpha h ─ norm ─ h ─ experts ─ x beta ─ + alpha h

What a part adds goes onto its normed input, not onto the input. Decays grow slower from layer to layer (MiniMax 2025,
arXiv:2501.08313).
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import nn

from hybridrt.base.forward_batch import ForwardBatch
from hybridrt.kinds.lightning import LightningConfig
from hybridrt.layers.attention import Attention
from hybridrt.layers.linear import Summands
from hybridrt.layers.moe import Experts, MoE, SoftmaxRouter
from hybridrt.layers.norm import RMSNorm
from hybridrt.layers.stack import ResidualPart
from hybridrt.layers.weights import CheckpointMap
from hybridrt.models.base import MTP_KEYS, SWIGLU, CausalLM
from hybridrt.recurrent.lightning import LightningMixer, alibi_rates, decay_rates

LIGHTNING_EPS = 1e-6  # of the norm in lightning attention; rms_norm_eps of config.json is for the other norms


class OntoNormed(nn.Module):
    """A part of a layer whose output is added to `alpha` times its normed input."""

    def __init__(self, part: Attention | LightningMixer | MoE, alpha: float) -> None:
        super().__init__()
        self.part, self.alpha = part, alpha

    def forward(self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch) -> Summands:
        h = norm(x, residual)[0]
        return self.part.summand(h, batch), h if self.alpha == 1.0 else h * self.alpha

    def targets(self, key: str) -> CheckpointMap:
        return self.part.targets(key)


class MiniMaxForCausalLM(CausalLM):
    """MiniMax-Text-01 and MiniMax-M1 (MiniMax 2025), as transformers names and computes them."""

    spellings: ClassVar[dict[str, str]] = {**SWIGLU, ".block_sparse_moe.": ".mlp."}
    # Powers of the decays, which follow from the configuration.
    skipped_keys = (MTP_KEYS, r".*\.self_attn\.(slope_rate|query_decay|key_decay|diagonal_decay)")

    def layer(self, layer_id: int, name: str) -> Sequence[ResidualPart]:
        config, hf, hidden, build = self.config, self.config.hf, self.config.hidden_size, self.build
        mixer: Attention | LightningMixer
        if config.layer(layer_id).attention:
            own, alpha, beta = config.attention_of(layer_id), hf.full_attn_alpha_factor, hf.full_attn_beta_factor
            mixer = Attention(
                f"{name}.attn", own, layer_id, hidden, cos_sin=self.cos_sin(own), out_scale=float(beta), build=build
            )
        else:
            alpha, beta = hf.linear_attn_alpha_factor, hf.linear_attn_beta_factor
            lightning = config.linear_of(LightningConfig)
            mixer = LightningMixer(
                f"{name}.lightning", lightning, layer_id, hidden, rates=self.rates(lightning.num_heads, layer_id),
                eps=LIGHTNING_EPS, out_scale=float(beta), build=build,
            )  # fmt: skip
        experts = OntoNormed(self._moe(f"{name}.moe"), hf.mlp_alpha_factor)
        return [
            ResidualPart("input_layernorm", "self_attn", OntoNormed(mixer, alpha)),
            ResidualPart("post_attention_layernorm", "mlp", experts),
        ]

    def rates(self, num_heads: int, layer_id: int) -> torch.Tensor:
        """[num_heads] float32, of the decays in a layer."""
        return decay_rates(num_heads) * (1.0 - layer_id / (len(self.config.layers) - 1 + 1e-5) + 1e-5)

    def _moe(self, name: str) -> MoE:
        """Routed SwiGLU experts."""
        hf, hidden, build = self.config.hf, self.config.hidden_size, self.build
        count, scales = hf.num_local_experts, (float(hf.mlp_beta_factor), 1.0)
        router = SoftmaxRouter(
            f"{name}.router", hidden, count, top_k=hf.num_experts_per_tok, renormalize=True, build=build
        )
        experts = Experts(
            f"{name}.experts", count, hidden, hf.intermediate_size, activation="silu", scales=scales, build=build
        )
        return MoE(router, experts, keys={"router": "gate", "experts": "experts"})


class MiniMaxText01ForCausalLM(MiniMaxForCausalLM):
    """MiniMax-Text-01, as it is published: its code has other decays where heads are no power of two."""

    def rates(self, num_heads: int, layer_id: int) -> torch.Tensor:
        return alibi_rates(num_heads) * (1.0 - layer_id / max(len(self.config.layers) - 1, 1) + 1e-5)


class MiniMaxM1ForCausalLM(MiniMaxText01ForCausalLM):
    """MiniMax-M1, as it is published."""
