"""Ling 2.5 and Ring 2.5: blocks as in Ling 3, with simple gated linear attention, and latent attention without gates.

    x ─ norm ─ simple GLA or MLA ─ + ─ norm ─ MoE or MLP ─ +

Decays grow slower from layer to layer, down to almost none in the last one. So the vendor's training code, SGLang and
vLLM count layers. modeling_bailing_moe_v2_5.py, which is published beside the weights, counts from one layer earlier:
its decays are those of the layer before (Ant Group 2026).
"""

from typing import Any, ClassVar

from hybridrt.base.config import AttentionConfig
from hybridrt.kinds.simple_gla import SimpleGLAConfig
from hybridrt.models.bailing_hybrid import BailingHybridForCausalLM
from hybridrt.recurrent.lightning import alibi_rates
from hybridrt.recurrent.simple_gla import SimpleGLAMixer


class BailingMoeV2_5ForCausalLM(BailingHybridForCausalLM):
    """Ling 2.5 and Ring 2.5, as they are published."""

    gated: ClassVar[bool] = False

    def recurrent(self, layer_id: int, name: str) -> Any:
        config, hf = self.config, self.config.hf
        linear = config.linear_of(SimpleGLAConfig)
        heads = AttentionConfig(linear.num_heads, linear.num_heads, linear.head_dim, dict(hf.rope_parameters))
        table = self.cos_sin(heads)
        assert table is not None, "heads are rotated"
        rates = alibi_rates(linear.num_heads) * (1.0 - layer_id / (len(config.layers) - 1) + 1e-5)
        return SimpleGLAMixer(
            f"{name}.gla", linear, layer_id, config.hidden_size, rates=rates, cos_sin=table, eps=hf.rms_norm_eps,
            groups=hf.group_norm_size, build=self.build,
        )  # fmt: skip
