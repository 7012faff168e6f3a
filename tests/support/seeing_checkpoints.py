"""Tiny checkpoints of models with images or sound, in which only the text part runs, as in checkpoints.py."""

from typing import Any

from tests.support.newer_checkpoints import LFM3_FIELDS, QWEN35_DENSE, known
from tests.support.sizes import LENGTH, TOKENS, VOCAB, Make

IMAGE, VIDEO, SOUND = VOCAB - 1, VOCAB - 2, VOCAB - 3
TOWER = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
LFM2_TEXT: dict[str, Any] = {
    "model_type": "lfm2", "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "block_auto_adjust_ff_dim": False,
    "layer_types": ["conv", "full_attention", "conv"], "max_position_embeddings": LENGTH, **TOKENS,
}  # fmt: skip
NEMOTRON_TEXT: dict[str, Any] = {
    "model_type": "nemotron_h", "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48,
    "layers_block_type": ["linear_attention", "moe", "full_attention"], "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "mamba_num_heads": 6, "mamba_head_dim": 8, "n_groups": 2,
    "ssm_state_size": 8, "chunk_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 40, "time_step_min": 1e-30,
    "max_position_embeddings": LENGTH, **TOKENS,
}  # fmt: skip


def lfm2_vl(tied: bool = True, **changes: Any) -> Make:
    """LFM2-VL."""
    vision = TOWER | {"model_type": "siglip2_vision_model", "num_patches": 16, "patch_size": 4}
    fields = {"text_config": LFM2_TEXT | {"tie_word_embeddings": tied} | changes, "vision_config": vision}
    fields |= {"projector_hidden_size": 16, "image_token_id": IMAGE, "tie_word_embeddings": tied}
    return lambda: (known("Lfm2VlConfig")(**fields), known("Lfm2VlForConditionalGeneration"))


def lfm3_vl(**changes: Any) -> Make:
    """LFM3-VL."""
    vision = TOWER | {"num_hidden_layers": 3, "num_key_value_heads": 1, "patch_size": 4}
    fields = {"text_config": LFM3_FIELDS | {"model_type": "lfm3"} | changes, "vision_config": vision}
    fields |= {"projector_hidden_size": 16, "image_token_id": IMAGE, "video_token_id": VIDEO}
    return lambda: (known("Lfm3VlConfig")(**fields), known("Lfm3VlForConditionalGeneration"))


def minicpm_v(version: str, **changes: Any) -> Make:
    """MiniCPM-V."""
    vision = TOWER | {"num_hidden_layers": 2, "patch_size": 4, "image_size": 16}
    text = QWEN35_DENSE | {"model_type": "qwen3_5_text", "num_hidden_layers": 2, "full_attention_interval": 2}
    fields = {"text_config": text | changes, "vision_config": vision, "insert_layer_id": 0}
    fields |= {"image_token_id": IMAGE, "video_token_id": VIDEO}
    return lambda: (known(f"MiniCPMV{version}Config")(**fields), known(f"MiniCPMV{version}ForConditionalGeneration"))


def nemotron_omni(**changes: Any) -> Make:
    """Nemotron Omni, without sound."""
    vision = {**TOWER, "model_type": "radio", "patch_size": 4, "image_size": 16, "max_img_size": 16}
    vision |= {"video_temporal_patch_size": 2}
    fields = {"text_config": NEMOTRON_TEXT | changes, "vision_config": vision, "vision_hidden_size": 16}
    fields |= {"image_token_id": IMAGE, "video_token_id": VIDEO, "audio_token_id": SOUND, "projector_hidden_size": 16}
    name = "NemotronH_Omni_Reasoning_V3"
    return lambda: (known(f"{name}_Config")(**fields), known(name))


SEEING: dict[str, Make] = {
    "lfm2_vl": lfm2_vl(),
    "lfm3_vl": lfm3_vl(),
    "minicpm_v_4_6": minicpm_v("4_6"),
    "minicpm_v_4_7": minicpm_v("4_7"),
    "nemotron_omni": nemotron_omni(),
}
SEEING_SPLIT: dict[str, Make] = {
    "lfm2_vl-split": lfm2_vl(),
    "lfm3_vl-split": lfm3_vl(),
    "minicpm_v_4_6-split": minicpm_v("4_6", linear_num_key_heads=4, linear_num_value_heads=8),
    "minicpm_v_4_7-split": minicpm_v("4_7", linear_num_key_heads=4, linear_num_value_heads=8),
    "nemotron_omni-split": nemotron_omni(mamba_num_heads=8, n_groups=4),
}
