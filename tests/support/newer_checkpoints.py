"""Tiny checkpoints of the families of 2025 and 2026, as in checkpoints.py."""

from typing import Any

import pytest
import transformers as tf

from tests.support.sizes import LENGTH, TOKENS, VOCAB, Make

QWEN35_FIELDS: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "full_attention_interval": 4, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4,
    "max_position_embeddings": LENGTH, **TOKENS,
}  # fmt: skip
QWEN35_DENSE = QWEN35_FIELDS | {"intermediate_size": 48}
QWEN35_MOE = QWEN35_FIELDS | {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24,
}  # fmt: skip
VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4, "out_hidden_size": 32,
    "num_position_embeddings": 16,
}  # fmt: skip


def known(name: str) -> Any:
    """A class of transformers; without it the test is skipped."""
    if not hasattr(tf, name):
        pytest.skip(f"transformers {tf.__version__} has no {name}")
    return getattr(tf, name)


# mrope_section: how many frequencies take the position in time, of rows and of columns.
MROPE = {
    "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}  # fmt: skip


def qwen35(**changes: Any) -> Make:
    """Qwen3.5, dense."""
    return lambda: (known("Qwen3_5TextConfig")(**(QWEN35_DENSE | changes)), known("Qwen3_5ForCausalLM"))


def qwen35_moe(**changes: Any) -> Make:
    """Qwen3.5 with experts."""
    return lambda: (known("Qwen3_5MoeTextConfig")(**(QWEN35_MOE | changes)), known("Qwen3_5MoeForCausalLM"))


def qwen35_seeing(experts: bool = False, tied: bool = False, **changes: Any) -> Make:
    """Qwen3.5 with a vision tower, as it is published."""
    text = (QWEN35_MOE if experts else QWEN35_DENSE) | {"rope_parameters": MROPE} | changes
    vision = VISION | {"out_hidden_size": text["hidden_size"]}
    fields = {"text_config": text, "vision_config": vision, "tie_word_embeddings": tied}
    fields |= {"image_token_id": VOCAB - 1, "video_token_id": VOCAB - 2}
    if experts:
        return lambda: (known("Qwen3_5MoeConfig")(**fields), known("Qwen3_5MoeForConditionalGeneration"))
    return lambda: (known("Qwen3_5Config")(**fields), known("Qwen3_5ForConditionalGeneration"))


def granite(**changes: Any) -> Make:
    """Granite 4-H: every multiplier differs from 1."""
    fields: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 20, "shared_intermediate_size": 32,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 6,
        "num_experts_per_tok": 2, "embedding_multiplier": 3.0, "logits_scaling": 1.7, "residual_multiplier": 0.6,
        "attention_multiplier": 0.2, "layer_types": ["mamba", "attention", "mamba", "mamba"], "mamba_n_heads": 8,
        "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_d_head": "auto", "mamba_d_conv": 4, "mamba_expand": 2,
        "mamba_chunk_size": 16, "max_position_embeddings": LENGTH, **TOKENS,
    }  # fmt: skip
    return lambda: (known("GraniteMoeHybridConfig")(**(fields | changes)), known("GraniteMoeHybridForCausalLM"))


def bamba(**changes: Any) -> Make:
    """Bamba: attention in one layer of three."""
    fields: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "attn_layer_indices": [1], "mamba_n_heads": 8,
        "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 16,
        "max_position_embeddings": LENGTH, **TOKENS,
    }  # fmt: skip
    return lambda: (known("BambaConfig")(**(fields | changes)), known("BambaForCausalLM"))


def olmo(**changes: Any) -> Make:
    """OLMo-Hybrid: one layer of attention in three."""
    fields: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 6, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "max_position_embeddings": LENGTH, **TOKENS,
    }  # fmt: skip
    return lambda: (known("OlmoHybridConfig")(**(fields | changes)), known("OlmoHybridForCausalLM"))


def zamba2(**changes: Any) -> Make:
    """Zamba2: a shared block before layers 1 and 3."""
    fields: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid", "mamba"], "num_attention_heads": 4,
        "num_key_value_heads": 4, "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_ngroups": 1,
        "n_mamba_heads": 8, "chunk_size": 16, "num_mem_blocks": 1, "adapter_rank": 4, "tie_word_embeddings": True,
        "max_position_embeddings": LENGTH, **TOKENS,
    }  # fmt: skip
    return lambda: (tf.Zamba2Config(**(fields | changes)), tf.Zamba2ForCausalLM)


LATENT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "kv_lora_rank": 20, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12,
    "num_local_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 16, "routed_scaling_factor": 1.7, "max_position_embeddings": LENGTH, **TOKENS,
}  # fmt: skip


def kimi(**changes: Any) -> Make:
    """Kimi-Linear: one layer of latent attention in four, a dense layer first."""
    fields = LATENT | {"linear_head_dim": 8, "linear_num_heads": 4, "linear_conv_kernel_dim": 4}
    fields |= {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}
    return lambda: (known("KimiLinearConfig")(**(fields | changes)), known("KimiLinearForCausalLM"))


def ling(**changes: Any) -> Make:
    """Ling 3: one layer of latent attention in two, a dense layer first."""
    fields = LATENT | {"head_dim": 8, "layer_group_size": 2, "first_k_dense_replace": 1, "num_mtp_layers": 0}
    return lambda: (known("BailingHybridConfig")(**(fields | changes)), known("BailingHybridForCausalLM"))


def minimax(**changes: Any) -> Make:
    """MiniMax: softmax attention in layer 1 of 3; factors that differ from 1."""
    fields: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4,
        "num_experts_per_tok": 2, "block_size": 8, "max_position_embeddings": LENGTH,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"], "full_attn_alpha_factor": 1.3,
        "full_attn_beta_factor": 0.8, "linear_attn_alpha_factor": 0.7, "linear_attn_beta_factor": 1.2,
        "mlp_alpha_factor": 0.9, "mlp_beta_factor": 1.1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, **TOKENS,
    }  # fmt: skip
    return lambda: (known("MiniMaxConfig")(**(fields | changes)), known("MiniMaxForCausalLM"))


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LFM3_FIELDS: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "conv_L_cache": 7, "sliding_window": 9,
    "layer_types": ["conv", "full_attention", "conv", "sliding_attention", "sliding_attention"],
    "max_position_embeddings": LENGTH, **TOKENS,
}  # fmt: skip


def lfm3(**changes: Any) -> Make:
    """LFM3: windows much shorter than the prompts in layers 3 and 4, and none in layer 1."""
    return lambda: (known("Lfm3Config")(**(LFM3_FIELDS | changes)), known("Lfm3ForCausalLM"))


QWEN35: dict[str, Make] = {
    "plain": qwen35(),
    "experts": qwen35_moe(),
    "seeing_tied": qwen35_seeing(tied=True, num_hidden_layers=2, full_attention_interval=2),
    "seeing_experts": qwen35_seeing(experts=True, num_hidden_layers=2, full_attention_interval=2),
    "attention_bias_tied": qwen35(attention_bias=True, tie_word_embeddings=True, full_attention_interval=2),
    "equal_heads": qwen35_moe(linear_num_key_heads=3, linear_num_value_heads=3, num_experts=5, num_hidden_layers=3,
                              full_attention_interval=3, num_experts_per_tok=5),
    "unequal_head_dims": qwen35(linear_key_head_dim=6, linear_value_head_dim=10, linear_num_key_heads=1, head_dim=12,
                                linear_conv_kernel_dim=3, num_key_value_heads=1,
                                rope_parameters=MROPE | {"mrope_section": [1, 1, 1]}),
    "linear_alone": qwen35(layer_types=["linear_attention"] * 3, num_hidden_layers=3),
    "attention_first": qwen35_moe(layer_types=["full_attention", "linear_attention"] * 2,
                                  shared_expert_intermediate_size=16),
}  # fmt: skip

GRANITE: dict[str, Make] = {
    "plain": granite(),
    "dense": granite(num_local_experts=0, num_experts_per_tok=0),
    "rotary_tied": granite(position_embedding_type="rope", tie_word_embeddings=True, num_hidden_layers=2,
                           layer_types=["attention", "mamba"], shared_intermediate_size=20),
    "groups_biases": granite(mamba_n_groups=4, mamba_proj_bias=True, attention_bias=True, num_experts_per_tok=6,
                             shared_intermediate_size=12),
    "dense_biases": granite(num_local_experts=0, mamba_conv_bias=False, attention_bias=True, mamba_proj_bias=True,
                            position_embedding_type="nope", num_key_value_heads=1),
    "mamba_alone": granite(layer_types=None, num_hidden_layers=2),
    "odd_sizes": granite(hidden_size=28, num_attention_heads=7, num_key_value_heads=7, mamba_expand=3, mamba_n_heads=4,
                         mamba_d_state=5, mamba_d_conv=3, mamba_chunk_size=7, num_local_experts=3),
}  # fmt: skip
BAMBA: dict[str, Make] = {
    "plain": bamba(),
    "all_biases": bamba(mamba_proj_bias=True, attention_bias=True, mlp_bias=True, mamba_n_groups=2),
    "no_conv_bias_tied": bamba(mamba_conv_bias=False, tie_word_embeddings=True, attn_layer_indices=[0, 2]),
    "mamba_alone": bamba(attn_layer_indices=None, num_hidden_layers=2, time_step_limit=(0.05, 0.2)),
}
OLMO: dict[str, Make] = {
    "plain": olmo(),
    "equal_heads_tied": olmo(linear_num_key_heads=4, linear_key_head_dim=8, tie_word_embeddings=True),
    "positive_eigenvalues": olmo(linear_allow_neg_eigval=False, num_key_value_heads=1, attention_bias=True),
    "attention_first": olmo(layer_types=["full_attention", "linear_attention"], num_hidden_layers=2,
                            linear_conv_kernel_dim=3, num_key_value_heads=4),
    "no_positions": olmo(rope_parameters={"rope_type": "default", "rope_theta": None}),
}  # fmt: skip

ZAMBA2: dict[str, Make] = {
    "plain": zamba2(),
    "two_blocks_adapters_rope": zamba2(
        num_mem_blocks=2, use_shared_attention_adapter=True, use_mem_rope=True, tie_word_embeddings=True,
        layers_block_type=["hybrid", "mamba", "hybrid", "hybrid", "mamba", "hybrid", "hybrid"], num_hidden_layers=7,
    ),
    "biases": zamba2(time_step_min=0.05, num_key_value_heads=2, add_bias_linear=True, mamba_ngroups=2),
    "odd_sizes": zamba2(
        hidden_size=30, num_attention_heads=5, num_key_value_heads=5, n_mamba_heads=3, mamba_expand=1, mamba_d_state=5,
        mamba_d_conv=3, chunk_size=7, adapter_rank=3, use_shared_attention_adapter=True, num_mem_blocks=3,
        intermediate_size=20,
    ),
    "nothing_tied": zamba2(
        num_mem_blocks=2, use_shared_attention_adapter=True, tie_word_embeddings=False,
        layers_block_type=["hybrid", "mamba", "hybrid", "hybrid", "mamba"],
    ),
    "mamba_alone": zamba2(layers_block_type=["mamba"] * 2, num_hidden_layers=2),
}  # fmt: skip

KIMI: dict[str, Make] = {
    "plain": kimi(),
    "compressed_queries_biases": kimi(q_lora_rank=12, attention_bias=True, n_group=1, topk_group=1,
                                      norm_topk_prob=False, rms_norm_eps=0.05),  # not of latent vectors
    "dense_alone": kimi(mlp_layer_types=["dense"] * 2, layer_types=["full_attention", "linear_attention"],
                        num_hidden_layers=2),
    "odd_sizes": kimi(hidden_size=28, num_attention_heads=3, num_key_value_heads=4, kv_lora_rank=7, v_head_dim=5,
                      qk_nope_head_dim=3, qk_rope_head_dim=6, linear_head_dim=6, linear_num_heads=5,
                      linear_conv_kernel_dim=3, n_shared_experts=2, num_local_experts=5, n_group=1, topk_group=1),
    "linear_alone_tied": kimi(layer_types=["linear_attention"] * 2, num_hidden_layers=2,
                              mlp_layer_types=["sparse"] * 2, tie_word_embeddings=True),
}  # fmt: skip
LING: dict[str, Make] = {
    "plain": ling(),
    "softplus_biases": ling(kda_safe_gate=False, attention_bias=True, num_hidden_layers=2, rope_parameters={
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64,
        "mscale_all_dim": 0.7,
    }),
    "other_bound_tied": ling(kda_lower_bound=-2.5, n_group=1, topk_group=1, norm_topk_prob=False, n_shared_experts=3,
                             rope_parameters={"rope_type": "default", "rope_theta": 100.0}, num_hidden_layers=3,
                             tie_word_embeddings=True),
    "odd_sizes": ling(hidden_size=28, num_attention_heads=3, num_key_value_heads=3, kv_lora_rank=7, v_head_dim=5,
                      qk_nope_head_dim=3, qk_rope_head_dim=6, head_dim=6, num_local_experts=5, n_group=1, topk_group=1,
                      short_conv_kernel_size=3, first_k_dense_replace=0, num_hidden_layers=2),
}  # fmt: skip
MINIMAX: dict[str, Make] = {
    "plain": minimax(),
    "factors_of_one_tied": minimax(
        **{f"{part}_{name}_factor": 1 for part in ("full_attn", "linear_attn", "mlp") for name in ("alpha", "beta")},
        tie_word_embeddings=True, num_key_value_heads=4,
    ),
    "odd_sizes": minimax(
        hidden_size=28, num_attention_heads=5, num_key_value_heads=1, head_dim=6, num_local_experts=3,
        num_experts_per_tok=3, intermediate_size=20, layer_types=None, num_hidden_layers=2,
    ),
    "lightning_alone": minimax(layer_types=["linear_attention"] * 2, num_hidden_layers=2, num_local_experts=2),
    "windows": minimax(sliding_window=9),
    "attention_alone": minimax(layer_types=["full_attention"] * 2, num_hidden_layers=2, num_experts_per_tok=1),
}  # fmt: skip
LFM3: dict[str, Make] = {
    "plain": lfm3(),
    "nothing_optional": lfm3(use_attention_gate=False, use_sandwich_norm=False, tie_word_embeddings=False),
    "biases": lfm3(conv_bias=True, attention_bias=True, conv_L_cache=3, num_key_value_heads=4),
    "other_rotary": lfm3(sliding_window=6, rope_parameters={
        "sliding_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.3, "factor": 2.0},
        "full_attention": YARN,
    }),
    "windows_alone": lfm3(layer_types=["conv", "sliding_attention"], num_hidden_layers=2, sliding_window=5),
    "conv_alone": lfm3(layer_types=["conv"] * 2, num_hidden_layers=2, tie_word_embeddings=False),
    "odd_sizes": lfm3(
        hidden_size=30, num_attention_heads=5, num_key_value_heads=1, head_dim=6, conv_L_cache=2, intermediate_size=20,
        layer_types=None, num_hidden_layers=6, sliding_window=1,
    ),
}  # fmt: skip

NEWER: dict[str, dict[str, Make]] = {
    "qwen35": QWEN35,
    "granite": GRANITE,
    "bamba": BAMBA,
    "olmo": OLMO,
    "zamba2": ZAMBA2,
    "kimi": KIMI,
    "ling": LING,
    "minimax": MINIMAX,
    "lfm3": LFM3,
}
NEWER_SPLIT: dict[str, Make] = {
    "qwen35-split": qwen35(linear_num_key_heads=4, linear_num_value_heads=8, attention_bias=True,
                           full_attention_interval=2, num_hidden_layers=2, num_key_value_heads=1),
    "qwen35-split_experts": qwen35_moe(linear_num_key_heads=4, linear_num_value_heads=4, tie_word_embeddings=True,
                                       full_attention_interval=2, num_hidden_layers=2),
    "granite-split": granite(num_key_value_heads=1, num_hidden_layers=2, layer_types=["mamba", "attention"],
                             mamba_proj_bias=True, attention_bias=True, shared_intermediate_size=28),
    "olmo-split": olmo(linear_num_key_heads=4, linear_num_value_heads=8, num_attention_heads=8, num_key_value_heads=2,
                       num_hidden_layers=2, layer_types=["full_attention", "linear_attention"], attention_bias=True),
    "zamba2-split": zamba2(use_shared_attention_adapter=True, use_mem_rope=True, mamba_ngroups=4),
    "kimi-split": kimi(q_lora_rank=12, attention_bias=True, num_hidden_layers=2,
                       layer_types=["full_attention", "linear_attention"]),
    "ling-split": ling(num_hidden_layers=2),
    "minimax-split": minimax(num_attention_heads=8, num_key_value_heads=2, head_dim=6),
    "lfm3-split": lfm3(conv_bias=True, attention_bias=True, num_key_value_heads=1),
    "bamba-split": bamba(mamba_n_groups=4, num_hidden_layers=2, mlp_bias=True),
}  # fmt: skip
