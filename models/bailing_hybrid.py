"""Ling 3: blocks as in Kimi-Linear, with gates of full rank, rotary embeddings and gated outputs.

    x ─ norm ─ KDA or MLA ─ + ─ norm ─ MoE or MLP ─ +

The decay of Kimi Delta Attention has a lower bound, the outputs of latent attention are multiplied head by head by a
sigmoid, and the last layers of Ling-3.0-flash clamp the SwiGLU of their experts (Ant Group 2026). transformers 5.23
leaves the clamps out; Ant Group's branch of vLLM has them.
"""

from typing import ClassVar

from hybridrt.layers.weights import CheckpointMap
from hybridrt.models.base import MTPHead
from hybridrt.models.kimi_linear import KimiLinearForCausalLM


class BailingHybridForCausalLM(KimiLinearForCausalLM):
    """Ling 3, as transformers names it. Its prediction head is one more layer in the checkpoint."""

    gated: ClassVar[bool] = True
    spellings: ClassVar[dict[str, str]] = {
        "model.word_embeddings.": "model.embed_tokens.",
        ".attention.": ".self_attn.",
        ".dense.": ".o_proj.",
        ".expert_bias": ".e_score_correction_bias",
        ".forget_gate.": ".",
    }

    def limits(self, layer_id: int) -> tuple[float | None, float | None]:
        """Where the lists of config.json end, as in layers with 0 or null, nothing is clamped."""
        lists = (getattr(self.config.hf, f"{part}_swiglu_limit_list", None) for part in ("expert", "share_expert"))
        routed, shared = ((each or [])[layer_id : layer_id + 1] for each in lists)
        return (float(routed[0]) if any(routed) else None), (float(shared[0]) if any(shared) else None)

    def rename_key(self, key: str) -> str:
        first = f"{self.layers_key}.{len(self.config.layers)}."
        return super().rename_key(f"mtp.{key.removeprefix(first)}" if key.startswith(first) else key)


class BailingMoeV3ForCausalLM(BailingHybridForCausalLM):
    """Ling 3, as it is published."""


class BailingHybridMTP(MTPHead):
    """The prediction head: one more block of gated latent attention and experts."""

    def checkpoint_map(self) -> CheckpointMap:
        return {
            **self.embedding_norm.targets("mtp.enorm"),
            **self.hidden_norm.targets("mtp.hnorm"),
            **self.fuse.targets("mtp.eh_proj", "both"),
            **{key.replace("mtp.0.", "mtp."): target for key, target in self.stack.targets("mtp").items()},
            **self.norm.targets("mtp.final_layernorm"),
        }
