"""MiniMax-Text-01 and MiniMax-M1 as they are published: transformers' model with the fields and tensors of the hub.

The facts are those of modeling_minimax_text_01.py and config.json in MiniMaxAI/MiniMax-Text-01. Apart from spelling,
three things differ from transformers: the decays where heads are no power of two, a small number in the divisor of the
decays of layers, and that a part of each head is rotated (`rotary_dim`).
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support.newer_checkpoints import minimax
from tests.support.sizes import TOKENS, Make

SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "num_local_experts", "num_experts_per_tok", "max_position_embeddings",
    "rms_norm_eps", "hidden_act", "tie_word_embeddings",
)  # fmt: skip


def slopes(heads: int) -> list[float]:
    """Of ALiBi."""
    if math.log2(heads).is_integer():
        return [2.0 ** (-8.0 * (i + 1) / heads) for i in range(heads)]
    below = 2 ** math.floor(math.log2(heads))
    return slopes(below) + slopes(2 * below)[0::2][: heads - below]


def published(architecture: str, rotary_dim: int | None = None, **changes: Any) -> Make:
    """A checkpoint of MiniMaxText01ForCausalLM or MiniMaxM1ForCausalLM."""

    def make() -> tuple[Any, Any]:
        config, cls = minimax(**changes)()

        class Published(cls):  # type: ignore[misc, valid-type]
            """transformers' model with published numbers."""

            def __init__(self, config: Any) -> None:
                super().__init__(config)
                _use_published_decays(self.model.layers)
                size = config.head_dim // 2
                frequencies = torch.zeros(size)  # of pairs of numbers that are `size` apart; 0 turns nothing
                turned = rotary_dim or config.head_dim
                frequencies[: turned // 2] = 1e4 ** -(torch.arange(0, turned, 2) / turned)
                self.model.rotary_emb.inv_freq = frequencies

            def save_pretrained(self, path: Path, **save: Any) -> None:
                path.mkdir(parents=True, exist_ok=True)
                fields = _fields(self.config, architecture, rotary_dim)
                (path / "config.json").write_text(json.dumps(fields))
                tensors = {key: t.detach().contiguous() for key, t in _tensors(self, rotary_dim).items()}
                save_file(tensors, path / "model.safetensors")
                self.generation_config.save_pretrained(path)

        Published.__name__ = cls.__name__
        return config, Published

    return make


def _use_published_decays(layers: Any) -> None:
    for i, mixer in enumerate(layer.self_attn for layer in layers):
        if hasattr(mixer, "slope_rate"):
            rate = torch.tensor(slopes(mixer.num_attention_heads)) * (1 - i / max(len(layers) - 1, 1) + 1e-5)
            mixer.slope_rate = rate[:, None, None]
            mixer.query_decay, mixer.key_decay, mixer.diagonal_decay = mixer.decay_factors(mixer.slope_rate)


def _fields(config: Any, architecture: str, rotary_dim: int | None) -> dict[str, Any]:
    """config.json as on the hub."""
    names = ("full_attention", "full_attn"), ("linear_attention", "linear_attn"), ("mlp", "mlp")
    factors = {
        f"layernorm_{theirs}_{factor}": getattr(config, f"{ours}_{factor}_factor")
        for theirs, ours in names
        for factor in ("alpha", "beta")
    }
    kind = {"MiniMaxText01ForCausalLM": "minimax_text_01", "MiniMaxM1ForCausalLM": "minimax_m1"}[architecture]
    return {
        "architectures": [architecture], "model_type": kind, "attention_dropout": 0.0,
        "attn_type_list": [int(kind == "full_attention") for kind in config.layer_types],
        "auto_map": {"AutoConfig": f"configuration_{kind}.Config"}, "initializer_range": 0.02,
        **{name: getattr(config, name) for name in SIZES}, **factors, "output_router_logits": False, "postnorm": True,
        "rope_theta": 10000, "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "shared_intermediate_size": 0,
        "shared_moe_mode": "sigmoid", "sliding_window": None, "transformers_version": "4.45.2", "use_cache": True,
        "torch_dtype": "float32", **({} if rotary_dim is None else {"rotary_dim": rotary_dim}), **TOKENS,
    }  # fmt: skip


def _tensors(model: Any, rotary_dim: int | None) -> dict[str, Tensor]:
    """Every tensor by its name on the hub."""
    found = {"model.embed_tokens.weight": model.model.embed_tokens.weight, "model.norm.weight": model.model.norm.weight}
    if not model.config.tie_word_embeddings:
        found["lm_head.weight"] = model.lm_head.weight
    for i, layer in enumerate(model.model.layers):
        mixer, key = layer.self_attn, f"model.layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{key}.{norm}.weight"] = getattr(layer, norm).weight
        lightning = hasattr(mixer, "slope_rate")
        parts = ("qkv_proj", "output_gate", "out_proj", "norm") if lightning else ("v_proj", "o_proj")
        found |= {f"{key}.self_attn.{part}.weight": getattr(mixer, part).weight for part in parts}
        if not lightning:
            for part in ("q_proj", "k_proj"):
                weight = getattr(mixer, part).weight
                found[f"{key}.self_attn.{part}.weight"] = _turned_first(weight, model.config.head_dim, rotary_dim)
        moe = f"{key}.block_sparse_moe"
        found[f"{moe}.gate.weight"] = layer.mlp.gate.weight
        for e, (gate_up, down) in enumerate(
            zip(layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj, strict=True)
        ):
            gate, up = gate_up.chunk(2)
            found |= {f"{moe}.experts.{e}.{name}.weight": t for name, t in (("w1", gate), ("w2", down), ("w3", up))}
    return found


def _turned_first(weight: Tensor, head_dim: int, rotary_dim: int | None) -> Tensor:
    """Rows of heads whose pairs are head_dim / 2 apart, sorted so that those that turn come first, rotary_dim / 2
    apart: published code turns the first `rotary_dim` numbers of a head."""
    half, turned = head_dim // 2, (rotary_dim or head_dim) // 2
    order = [*range(turned), *range(half, half + turned), *range(turned, half), *range(half + turned, head_dim)]
    return weight.unflatten(0, (-1, head_dim))[:, order].flatten(0, 1)


TEXT_01, M1 = "MiniMaxText01ForCausalLM", "MiniMaxM1ForCausalLM"
CASES: dict[str, Make] = {
    "plain": published(TEXT_01, rotary_dim=4),
    "m1_tied": published(M1, tie_word_embeddings=True, num_key_value_heads=4),
    "one_layer": published(TEXT_01, num_hidden_layers=1, layer_types=["linear_attention"]),
    "odd_heads": published(
        M1, rotary_dim=2, hidden_size=28, num_attention_heads=6, num_key_value_heads=3, head_dim=6,
        num_local_experts=3, intermediate_size=20, num_hidden_layers=4, layer_types=["linear_attention"] * 4,
    ),
}  # fmt: skip
SPLIT = published(TEXT_01, rotary_dim=4, num_attention_heads=8, num_key_value_heads=2)
