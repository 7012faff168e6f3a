"""Tiny random checkpoints that transformers writes, in many variations, and its logits as the oracle."""

import gc
import inspect
import json
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated

from tests.support import swa_ssm as swa
from tests.support.newer_checkpoints import NEWER, NEWER_SPLIT
from tests.support.published import PUBLISHED, PUBLISHED_SPLIT
from tests.support.seeing_checkpoints import SEEING, SEEING_SPLIT
from tests.support.sizes import LENGTH, TOKENS, VOCAB, Make
from tests.support.windowed_checkpoints import WINDOWED, WINDOWED_SPLIT

UNGROUPED = ("MambaRMSNormGated", "BambaRMSNormGated", "GraniteMoeHybridRMSNormGated")
CORRECTIONS = ("e_score_correction_bias", "expert_bias")  # of routers: buffers


def falcon(**changes: Any) -> Make:
    """Falcon-H1: every multiplier differs from 1, so that one that is lost or applied twice shows."""
    fields: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "mamba_d_ssm": 48, "mamba_n_heads": 6, "mamba_d_head": 8,
        "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_chunk_size": 16, "mamba_expand": 2,
        "max_position_embeddings": LENGTH, "embedding_multiplier": 2.3, "lm_head_multiplier": 0.7,
        "key_multiplier": 0.6, "attention_in_multiplier": 1.3, "attention_out_multiplier": 0.8,
        "ssm_in_multiplier": 0.9, "ssm_out_multiplier": 1.2,
        "ssm_multipliers": [0.9, 1.1, 0.7, 1.2, 0.5], "mlp_multipliers": [0.8, 1.2],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, **TOKENS,
    }  # fmt: skip
    return lambda: (tf.FalconH1Config(**(fields | changes)), tf.FalconH1ForCausalLM)


def nemotron(pattern: str = "M*-M", **changes: Any) -> Make:
    """Nemotron-H. transformers clamps the time step at time_step_min in prefill alone, hence the tiny one."""
    fields: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "hybrid_override_pattern": pattern,
        "num_hidden_layers": len(pattern), "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "mamba_num_heads": 6, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 8, "conv_kernel": 4,
        "chunk_size": 16,
        "max_position_embeddings": LENGTH, "time_step_min": 1e-30, "n_routed_experts": 8, "num_experts_per_tok": 3,
        "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 40, **TOKENS,
    }  # fmt: skip
    return lambda: (tf.NemotronHConfig(**(fields | changes)), tf.NemotronHForCausalLM)


class PuzzleForCausalLM(tf.NemotronHForCausalLM):
    """Nemotron-H whose blocks of experts differ: transformers' own blocks, each made of a configuration of its own."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.own: dict[int, dict[str, int]] = config.own
        for i, own in self.own.items():
            block = copy(config)
            vars(block).update(own)
            self.model.layers[i].mixer = type(self.model.layers[i].mixer)(block, layer_idx=i)

    def save_pretrained(self, path: Path, **save: Any) -> None:
        super().save_pretrained(path, **save)
        fields = json.loads((path / "config.json").read_text())
        kinds = fields.pop("layers_block_type")
        blocks = [{"block_type": OLD_KINDS.get(kind, kind), **self.own.get(i, {})} for i, kind in enumerate(kinds)]
        fields |= {"architectures": ["NemotronHPuzzleForCausalLM"], "model_type": "nemotron_h_puzzle"}
        (path / "config.json").write_text(json.dumps(fields | {"block_configs": blocks}))


OLD_KINDS = {"linear_attention": "mamba", "full_attention": "attention"}


def puzzle(pattern: str, own: dict[int, dict[str, int]], **changes: Any) -> Make:
    def make() -> tuple[Any, Any]:
        config, _ = nemotron(pattern, **changes)()
        config.own = own
        return config, PuzzleForCausalLM

    return make


def qwen(**changes: Any) -> Make:
    """Qwen3-Next: three Gated Delta Net layers to one of gated attention."""
    fields: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "full_attention_interval": 4,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "max_position_embeddings": LENGTH, **TOKENS,
    }  # fmt: skip
    return lambda: (tf.Qwen3NextConfig(**(fields | changes)), tf.Qwen3NextForCausalLM)


def falcon_mamba(**changes: Any) -> Make:
    """Falcon-Mamba: Mamba-1 alone."""
    fields: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2, "expand": 2, "conv_kernel": 4,
        "time_step_rank": 5, "tie_word_embeddings": False, **TOKENS,
    }  # fmt: skip
    return lambda: (tf.FalconMambaConfig(**(fields | changes)), tf.FalconMambaForCausalLM)


def mamba(**changes: Any) -> Make:
    """Mamba: Mamba-1 alone."""
    fields: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2, "expand": 2, "conv_kernel": 4,
        "time_step_rank": 5, "tie_word_embeddings": False, **TOKENS,
    }  # fmt: skip
    return lambda: (tf.MambaConfig(**(fields | changes)), tf.MambaForCausalLM)


def mamba2(**changes: Any) -> Make:
    """Mamba-2 alone. Older transformers normalise all groups together, newer ones each group, as mamba-ssm does: with
    older ones there is one group."""
    if "group_size" not in inspect.signature(MambaRMSNormGated).parameters:
        changes["n_groups"] = 1
    fields: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 32, "state_size": 8, "num_hidden_layers": 2, "expand": 2, "conv_kernel": 4,
        "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 16, "tie_word_embeddings": False, **TOKENS,
    }  # fmt: skip
    return lambda: (tf.Mamba2Config(**(fields | changes)), tf.Mamba2ForCausalLM)


def jamba(**changes: Any) -> Make:
    """Jamba: attention in layer 1 of every 3, experts in every second layer."""
    fields: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "attn_layer_period": 3, "attn_layer_offset": 1,
        "num_experts": 4, "num_experts_per_tok": 2, "expert_layer_period": 2, "expert_layer_offset": 1,
        "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 6,
        "max_position_embeddings": LENGTH, **TOKENS,
    }  # fmt: skip
    return lambda: (tf.JambaConfig(**(fields | changes)), tf.JambaForCausalLM)


def lfm2(**changes: Any) -> Make:
    """LFM2: attention in layer 1 of 4, short convs in the others."""
    fields: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "conv_L_cache": 3, "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention", "conv", "conv"], "tie_word_embeddings": False,
        "max_position_embeddings": LENGTH, **TOKENS,
    }  # fmt: skip
    return lambda: (tf.Lfm2Config(**(fields | changes)), tf.Lfm2ForCausalLM)


def lfm2_moe(**changes: Any) -> Make:
    """LFM2 with experts after its first layer."""
    fields: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "conv_L_cache": 3,
        "layer_types": ["conv", "full_attention", "conv", "conv"], "num_dense_layers": 1, "num_experts": 8,
        "num_experts_per_tok": 2, "tie_word_embeddings": False, "max_position_embeddings": LENGTH, **TOKENS,
    }  # fmt: skip
    return lambda: (tf.Lfm2MoeConfig(**(fields | changes)), tf.Lfm2MoeForCausalLM)


def swa_ssm(**changes: Any) -> Make:
    """Windows much shorter than the prompts, and a history branch in every mode that a layer may have."""
    fields: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 9, "ssm_intermediate_size": 40,
        "ssm_state_size": 6, "history_mode": ["enabled", "prefix_sum", "disabled", "enabled"],
        "max_position_embeddings": LENGTH, **TOKENS,
    }  # fmt: skip
    return lambda: (swa.Config(**(fields | changes)), swa.SwaSsmForCausalLM)


def rope(kind: str, **numbers: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **numbers}}


LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
LONGROPE = rope(
    "longrope", factor=2.0, original_max_position_embeddings=128, short_factor=[1.0, 1.1, 1.3, 1.5],
    long_factor=[2.0, 3.0, 4.0, 5.0],
)  # fmt: skip
YARN = rope("yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=32.0, beta_slow=1.0)

FALCON: dict[str, Make] = {
    "plain": falcon(),
    "groups_no_conv_bias_tied": falcon(mamba_n_groups=2, mamba_conv_bias=False, tie_word_embeddings=True),
    "projection_biases": falcon(mamba_proj_bias=True, projectors_bias=True),
    "all_biases": falcon(mamba_proj_bias=True, projectors_bias=True, attention_bias=True, mlp_bias=True),
    "attention_bias": falcon(attention_bias=True, mamba_n_groups=3),
    "norm_after_gate": falcon(mamba_rms_norm=True, mamba_norm_before_gate=False, mamba_n_groups=2),
    "norm_before_gate": falcon(mamba_rms_norm=True, mamba_norm_before_gate=True, mamba_n_groups=2, mlp_bias=True),
    "d_ssm_from_expand": falcon(mamba_d_ssm=None, mamba_n_heads=4, mamba_d_head="auto"),
    "odd_sizes": falcon(
        num_attention_heads=5, num_key_value_heads=1, head_dim=6, mamba_d_conv=3, mamba_chunk_size=7, mamba_d_state=5,
        mamba_d_ssm=27, mamba_n_heads=3, mamba_d_head=9,
    ),
    "two_taps_clamped_steps": falcon(mamba_d_conv=2, time_step_limit=(0.05, 0.2), mamba_chunk_size=64),
    "llama3_rope": falcon(**LLAMA3, num_key_value_heads=4),
    "linear_rope_huge_theta": falcon(**rope("linear", factor=3.0), tie_word_embeddings=True),
    "yarn_rope": falcon(**YARN, num_hidden_layers=1),
    "longrope": falcon(**LONGROPE, num_hidden_layers=1, head_dim=8),
    "dynamic_rope": falcon(**rope("dynamic", factor=2.0), num_hidden_layers=1),
}  # fmt: skip

NEMOTRON: dict[str, Make] = {
    "plain": nemotron("M*-M-*M"),
    "one_group_biases": nemotron("M-*M", n_groups=1, use_bias=True, mlp_bias=True),
    "no_conv_bias_tied": nemotron("*M-M", use_conv_bias=False, tie_word_embeddings=True, n_groups=3),
    "experts": nemotron("ME*EM", routed_scaling_factor=2.5),
    "latent_experts_in_groups": nemotron(
        "EM*E", moe_latent_size=20, n_group=4, topk_group=2, norm_topk_prob=False, mlp_bias=True,
        routed_scaling_factor=1.5,
    ),
    "groups_of_experts": nemotron("ME-", n_group=2, topk_group=1, num_experts_per_tok=4),
    "attention_alone": nemotron("*-*-"),
    "mamba_alone": nemotron("MM-M"),
    "odd_sizes": nemotron(
        "M*M-", num_attention_heads=6, num_key_value_heads=1, head_dim=10, mamba_num_heads=3, mamba_head_dim=7,
        n_groups=1, ssm_state_size=5, conv_kernel=3, chunk_size=5,
    ),
    "float32_residuals": nemotron("M*M", residual_in_fp32=True),
    "options_without_effect": nemotron("M*E", attention_bias=True, mamba_proj_bias=True, n_shared_experts=2, expand=5,
                                       moe_shared_expert_overlap=False, time_step_limit=(0.05, 0.2)),
    "puzzle": puzzle("ME*EM-", {
        1: {"moe_intermediate_size": 16, "num_experts_per_tok": 2},
        3: {"moe_intermediate_size": 40, "num_experts_per_tok": 5, "n_routed_experts": 6},
        5: {"intermediate_size": 20},
    }, moe_latent_size=20),
}  # fmt: skip

QWEN: dict[str, Make] = {
    "plain": qwen(),
    "dense": qwen(num_experts=0, mlp_only_layers=[0, 1, 2, 3]),
    "dense_by_number": qwen(num_experts=0, num_experts_per_tok=0, num_hidden_layers=2, full_attention_interval=2),
    "every_second_sparse": qwen(decoder_sparse_step=2, mlp_only_layers=[3], norm_topk_prob=False),
    "attention_bias_tied": qwen(attention_bias=True, tie_word_embeddings=True, full_attention_interval=2),
    "equal_heads": qwen(linear_num_key_heads=3, linear_num_value_heads=3, num_experts=5, num_hidden_layers=3,
                        full_attention_interval=3),
    "unequal_head_dims": qwen(linear_key_head_dim=6, linear_value_head_dim=10, linear_num_key_heads=1, head_dim=12,
                              linear_conv_kernel_dim=3, partial_rotary_factor=0.5, num_key_value_heads=1),
    "attention_first": qwen(layer_types=["full_attention", "linear_attention", "full_attention", "linear_attention"],
                            partial_rotary_factor=1.0),
    "linear_alone": qwen(layer_types=["linear_attention"] * 3, num_hidden_layers=3),
    "yarn_rope": qwen(**{"rope_parameters": YARN["rope_parameters"] | {"partial_rotary_factor": 0.5}},
                      full_attention_interval=2, num_hidden_layers=2),
    "odd_rotary_part": qwen(head_dim=12, partial_rotary_factor=0.25, full_attention_interval=2, num_hidden_layers=2),
    "linear_rope": qwen(**rope("linear", factor=2.0, partial_rotary_factor=0.25), full_attention_interval=2,
                        num_hidden_layers=2),
}  # fmt: skip

FALCON_MAMBA: dict[str, Make] = {
    "plain": falcon_mamba(),
    "projection_bias_tied": falcon_mamba(use_bias=True, tie_word_embeddings=True, time_step_rank="auto"),
    "no_conv_bias": falcon_mamba(use_conv_bias=False, conv_kernel=3, expand=3, residual_in_fp32=False),
    "inner_size_beside_expand": falcon_mamba(expand=16, intermediate_size=48),
    "odd_sizes": falcon_mamba(hidden_size=27, state_size=5, conv_kernel=2, expand=1, time_step_rank=1),
}

JAMBA: dict[str, Make] = {
    "plain": jamba(),
    "dense": jamba(num_experts=1, attn_layer_offset=2),
    "every_layer_sparse_tied": jamba(
        expert_layer_period=1, expert_layer_offset=0, tie_word_embeddings=True, num_experts_per_tok=3,
    ),
    "projection_bias": jamba(mamba_proj_bias=True, mamba_conv_bias=False, mamba_dt_rank="auto", num_key_value_heads=4),
    "odd_sizes": jamba(
        hidden_size=28, num_attention_heads=7, num_key_value_heads=1, mamba_d_state=5, mamba_d_conv=3, mamba_expand=1,
        mamba_dt_rank=3, num_experts=3, num_experts_per_tok=1, attn_layer_period=2, intermediate_size=20,
    ),
    "wide_heads": jamba(head_dim=16, num_experts=2, attn_layer_period=2, use_associative_scan=False),
    "mamba_alone": jamba(attn_layer_period=9, attn_layer_offset=8, num_hidden_layers=2),
}  # fmt: skip

MAMBA: dict[str, Make] = {
    "plain": mamba(),
    "biases_tied": mamba(use_bias=True, tie_word_embeddings=True, time_step_rank="auto", residual_in_fp32=False),
    "odd_sizes": mamba(hidden_size=27, state_size=5, conv_kernel=2, expand=1, time_step_rank=1, use_conv_bias=False),
}

MAMBA2: dict[str, Make] = {
    "plain": mamba2(),
    "biases_tied": mamba2(use_bias=True, tie_word_embeddings=True, n_groups=1, residual_in_fp32=False),
    "odd_sizes": mamba2(
        hidden_size=27, expand=1, num_heads=3, head_dim=9, n_groups=3, state_size=5, conv_kernel=3, chunk_size=7,
        use_conv_bias=False, time_step_limit=(0.02, 0.3),
    ),
}  # fmt: skip

LFM2: dict[str, Make] = {
    "plain": lfm2(),
    "biases_tied": lfm2(conv_bias=True, tie_word_embeddings=True, num_key_value_heads=4),
    "adjusted_width": lfm2(block_auto_adjust_ff_dim=True, block_multiple_of=7, block_ffn_dim_multiplier=1.3),
    "odd_sizes": lfm2(
        hidden_size=30, num_attention_heads=5, num_key_value_heads=1, conv_L_cache=2, intermediate_size=20,
        full_attn_idxs=[2], layer_types=None,
    ),
    "conv_alone": lfm2(layer_types=["conv"] * 3, num_hidden_layers=3, conv_L_cache=5),
    "attention_alone": lfm2(layer_types=["full_attention"] * 2, num_hidden_layers=2, **LLAMA3),
}  # fmt: skip

LFM2_MOE: dict[str, Make] = {
    "plain": lfm2_moe(),
    "no_expert_bias_tied": lfm2_moe(use_expert_bias=False, norm_topk_prob=False, tie_word_embeddings=True),
    "all_sparse_scaled": lfm2_moe(
        num_dense_layers=0, routed_scaling_factor=1.7, num_experts=5, num_experts_per_tok=3, conv_bias=True,
    ),
    "dense": lfm2_moe(num_dense_layers=4),
}  # fmt: skip

SWA_SSM: dict[str, Make] = {
    "plain": swa_ssm(),
    "benchmark_tied": swa_ssm(
        history_mode=["benchmark", "enabled"], num_hidden_layers=2, sliding_window=6, tie_word_embeddings=True,
    ),
    "window_alone": swa_ssm(history_mode="disabled", num_hidden_layers=2, sliding_window=16),
    "odd_sizes": swa_ssm(
        hidden_size=28, num_attention_heads=7, num_key_value_heads=1, sliding_window=5, ssm_intermediate_size=27,
        ssm_state_size=5, ssm_conv_kernel=3, ssm_time_step_rank=3, num_hidden_layers=2, history_mode="enabled",
    ),
}  # fmt: skip

CASES: dict[str, Make] = {
    f"{family}-{name}": make
    for family, cases in (
        ("falcon", FALCON), ("falcon_mamba", FALCON_MAMBA), ("jamba", JAMBA), ("lfm2", LFM2), ("lfm2_moe", LFM2_MOE),
        ("mamba", MAMBA), ("mamba2", MAMBA2), ("nemotron", NEMOTRON), ("qwen", QWEN), ("swa_ssm", SWA_SSM),
        *NEWER.items(), *PUBLISHED.items(), ("seeing", SEEING), *WINDOWED.items(),
    )
    for name, make in cases.items()
}  # fmt: skip


def has_replay(name: str) -> bool:
    """Whether a case's recurrent layers have state mode "replay": all but Mamba-1, sums and simple GLA do. gpt-oss has
    none."""
    return not name.startswith(("falcon_mamba", "jamba", "mamba-", "swa_ssm", "ling25", "gpt_oss"))


# What 2 and 4 ranks can share; the models whose tests split them. KV heads are fewer than 4 ranks.
WIDE = {"mamba_n_heads": 8, "mamba_d_ssm": 64, "mamba_rms_norm": True}
SPLIT: dict[str, Make] = {
    "falcon-split": falcon(**WIDE, mamba_norm_before_gate=False, num_key_value_heads=1, tie_word_embeddings=True),
    "falcon-split_groups": falcon(
        **WIDE, mamba_norm_before_gate=True, mamba_n_groups=4, mamba_proj_bias=True, projectors_bias=True,
        attention_bias=True, mlp_bias=True,
    ),
    "nemotron-split": nemotron("M*-EM", mamba_num_heads=8, n_groups=1, use_bias=True, mlp_bias=True),
    "nemotron-split_groups": nemotron(
        "ME*E", mamba_num_heads=8, n_groups=4, moe_latent_size=20, num_key_value_heads=1, tie_word_embeddings=True,
    ),
    "qwen-split": qwen(
        linear_num_key_heads=4, linear_num_value_heads=8, attention_bias=True, tie_word_embeddings=True,
        full_attention_interval=2, num_hidden_layers=2,
    ),
    "falcon_mamba-split": CASES["falcon_mamba-projection_bias_tied"],
    "jamba-split": CASES["jamba-every_layer_sparse_tied"],
    "mamba-split": mamba(use_bias=True, tie_word_embeddings=True),
    "mamba2-split": mamba2(use_bias=True, n_groups=4),
    "lfm2-split": lfm2(conv_bias=True, tie_word_embeddings=True, num_key_value_heads=1),
    "lfm2_moe-split": lfm2_moe(),
    "swa_ssm-split": CASES["swa_ssm-plain"],
    "nemotron-split_puzzle": puzzle("ME*E-", {
        1: {"moe_intermediate_size": 16, "num_experts_per_tok": 2},
        3: {"moe_intermediate_size": 40, "num_experts_per_tok": 4, "n_routed_experts": 6},
        4: {"intermediate_size": 20},
    }, moe_latent_size=20, mamba_num_heads=8, n_groups=4),
    **SEEING_SPLIT,
    **NEWER_SPLIT,
    **PUBLISHED_SPLIT,
    **WINDOWED_SPLIT,
}  # fmt: skip


def write(make: Make, path: Path, *, seed: int = 0, **save: Any) -> Any:
    """Saves a random model as transformers does (`save` goes to save_pretrained) and returns it."""
    torch.manual_seed(seed)
    config, cls = make()
    for part in (config, *(getattr(config, name) for name in getattr(config, "sub_configs", ()))):
        if part is not None:  # no sound
            part.dtype = "float32"
    model = cls(config).eval().float()
    _skip_ungrouped_norms(model)
    with torch.no_grad():
        corrections = ((name, t) for name, t in model.named_buffers() if name.endswith(CORRECTIONS))
        for name, tensor in [*model.named_parameters(), *corrections]:
            _randomize(name, tensor)
    model.generation_config = tf.GenerationConfig(**TOKENS)
    model.save_pretrained(path, **save)
    return model


def _skip_ungrouped_norms(model: Any) -> None:
    """Older versions of transformers norm all groups of these Mamba-2 layers as one: they are no oracle then."""
    groups = max(getattr(model.config, name, 1) or 1 for name in ("n_groups", "mamba_n_groups"))
    for module in model.modules():
        name = type(module).__name__
        if groups > 1 and name in UNGROUPED and not hasattr(module, "group_size"):
            pytest.skip(f"transformers {tf.__version__}: {name} knows no groups")


def _randomize(name: str, t: Tensor) -> None:
    """Weights that keep activations near 1, and decays so slow that a state from hundreds of tokens ago still shows."""
    if "A_log" in name:
        t.copy_(torch.rand_like(t) * 4.0 - 5.0)
    elif "dt_bias" in name or "dt_proj.bias" in name:
        t.copy_(torch.rand_like(t) * 2.5 - 3.0)
    elif name.endswith(CORRECTIONS):
        t.copy_(torch.rand_like(t) * 0.2)
    elif name.endswith(".D") or ("norm" in name and t.dim() == 1):
        t.add_(torch.randn_like(t) * 0.2)
    elif "embed" in name:
        t.copy_(torch.randn_like(t) * 0.3)  # the layers outweigh it: with tied embeddings it would just repeat itself
    elif t.dim() >= 2:
        t.copy_(torch.randn_like(t) * (0.9 / t.shape[-1] ** 0.5))
    elif "bias" in name:
        t.copy_(torch.randn_like(t) * 0.2)
    elif "sinks" in name:
        t.copy_(torch.randn_like(t))


@dataclass
class Checkpoint:
    """A saved model and the model that saved it."""

    path: Path
    model: Any

    @torch.no_grad()
    def logits(self, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
        """What each output token was chosen from, given the prompt and the output before it: [len(output), vocab].
        One forward over everything, without a cache."""
        ids = torch.tensor([[*prompt, *output[:-1]]])
        logits: Tensor = self.model(ids, use_cache=False).logits[0, len(prompt) - 1 :].float()
        return logits

    @torch.no_grad()
    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """`count` tokens, each by a whole forward."""
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(self.model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        return ids[len(prompt) :]


class CheckpointStore:
    """Writes each case (of CASES or SPLIT) once, and keeps the oracles in memory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._made: dict[str, Checkpoint] = {}

    def __getitem__(self, name: str) -> Checkpoint:
        if name not in self._made:
            path = self.root / name
            self._made[name] = Checkpoint(path, write((CASES | SPLIT)[name], path))
            gc.collect()
            gc.freeze()  # what is left lives to the end; the next collection need not go through it
        return self._made[name]
