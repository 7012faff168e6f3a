"""Tiny checkpoints of families whose layers mix windows and full attention, as in checkpoints.py."""

from typing import Any

import pytest

from tests.support.newer_checkpoints import known
from tests.support.sizes import LENGTH, TOKENS, VOCAB, Make

WINDOW, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
YARN: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": LENGTH // 4,
}  # fmt: skip


def gpt_oss(**changes: Any) -> Make:
    """gpt-oss: windows in every second layer, limits that clamp, a stretched rotary."""
    fields: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4,
        "num_experts_per_tok": 2, "sliding_window": 9, "swiglu_limit": 0.5, "rope_parameters": YARN,
        "max_position_embeddings": LENGTH, **TOKENS,
    }  # fmt: skip

    def make() -> tuple[Any, Any]:
        config = known("GptOssConfig")(**(fields | changes))
        if not hasattr(config, "swiglu_alpha"):
            pytest.skip("transformers before 5.23 clamps at 7, whatever swiglu_limit says")
        return config, known("GptOssForCausalLM")

    return make


def lara(**changes: Any) -> Make:
    """Lara 4 Mini: two layers of Gated Delta Net, two with windows and one without."""
    fields: dict[str, Any] = {
        "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 5, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24, "sliding_window": 9,
        "max_position_embeddings": LENGTH, "tie_word_embeddings": False, **TOKENS,
    }  # fmt: skip
    return lambda: (known("LaraMiniConfig")(**(fields | changes)), known("LaraMiniForCausalLM"))


GPT_OSS: dict[str, Make] = {
    "plain": gpt_oss(),
    "no_biases_tied": gpt_oss(attention_bias=False, tie_word_embeddings=True, num_hidden_layers=2, swiglu_alpha=1.1),
    "windows_alone": gpt_oss(layer_types=[WINDOW] * 2, num_hidden_layers=2, sliding_window=6),
    "odd_sizes": gpt_oss(
        hidden_size=28, num_attention_heads=5, num_key_value_heads=1, head_dim=6, num_local_experts=3,
        num_experts_per_tok=3, intermediate_size=20, layer_types=[FULL, WINDOW], num_hidden_layers=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
}  # fmt: skip
LARA: dict[str, Make] = {
    "plain": lara(),
    "biases_tied": lara(attention_bias=True, tie_word_embeddings=True, norm_topk_prob=False,
                        shared_expert_intermediate_size=16),
    "windows_alone": lara(layer_types=[LINEAR, WINDOW], num_hidden_layers=2, sliding_window=6),
    "odd_sizes": lara(
        hidden_size=28, num_attention_heads=5, num_key_value_heads=1, head_dim=6, num_experts=3, num_experts_per_tok=3,
        layer_types=[FULL, LINEAR, WINDOW], num_hidden_layers=3, linear_num_key_heads=1, linear_num_value_heads=3,
        linear_key_head_dim=6, linear_value_head_dim=10, linear_conv_kernel_dim=3,
    ),
}  # fmt: skip
WINDOWED: dict[str, dict[str, Make]] = {"gpt_oss": GPT_OSS, "lara": LARA}
WINDOWED_SPLIT: dict[str, Make] = {
    "gpt_oss-split": gpt_oss(num_attention_heads=8, num_key_value_heads=2, num_hidden_layers=2),
    "lara-split": lara(
        linear_num_key_heads=4, linear_num_value_heads=8, num_key_value_heads=1, attention_bias=True,
        layer_types=[LINEAR, WINDOW, FULL], num_hidden_layers=3,
    ),
}  # fmt: skip
