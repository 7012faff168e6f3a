"""Bamba: Mamba-2 blocks and a few of attention, each followed by an MLP.

    x ─ norm ─ Mamba-2 or attention ─ + ─ norm ─ MLP ─ +

Rotary turns half of each head (IBM, Princeton, CMU and UIUC 2024).
"""

from collections.abc import Sequence

from hybridrt.kinds.mamba2 import Mamba2Config
from hybridrt.layers.attention import Attention
from hybridrt.layers.mlp import MLP
from hybridrt.layers.stack import ResidualPart
from hybridrt.models.base import CausalLM
from hybridrt.recurrent.mamba2 import Mamba2Block


class BambaForCausalLM(CausalLM):
    """Bamba (2024)."""

    norm_key = "model.final_layernorm"

    def layer(self, layer_id: int, name: str) -> Sequence[ResidualPart]:
        config, hf, hidden, build = self.config, self.config.hf, self.config.hidden_size, self.build
        if config.layer(layer_id).attention:
            own = config.attention_of(layer_id)
            attention = Attention(
                f"{name}.attn", own, layer_id, hidden, cos_sin=self.cos_sin(own), bias=hf.attention_bias, build=build
            )
            mixer = ResidualPart("input_layernorm", "self_attn", attention)
        else:
            mamba = Mamba2Block(
                f"{name}.mamba", config.linear_of(Mamba2Config), layer_id, hidden, bias=hf.mamba_proj_bias,
                conv_bias=hf.mamba_conv_bias, gated_norm=(hf.rms_norm_eps, False), build=build,
            )  # fmt: skip
            mixer = ResidualPart("input_layernorm", "mamba", mamba)
        mlp = MLP(f"{name}.mlp", hidden, hf.intermediate_size, bias=hf.mlp_bias, build=build)
        return [mixer, ResidualPart("pre_ff_layernorm", "feed_forward", mlp)]
