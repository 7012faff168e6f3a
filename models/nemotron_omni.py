"""Nemotron Omni: the text part, which is Nemotron-H.

Checkpoints hold it under `language_model`. Everything of images and of sound is skipped (NVIDIA
2026). Published checkpoints and transformers name fields, tensors and the architecture differently.
"""

from dataclasses import replace

from hybridrt.models.base import MTP_KEYS
from hybridrt.models.nemotron_h import FAMILY as NEMOTRON_H
from hybridrt.models.nemotron_h import NemotronHForCausalLM

FAMILY = replace(
    NEMOTRON_H,
    model="hybridrt.models.nemotron_omni:NemotronH_Omni_Reasoning_V3",
    section="text_config",
    outer_older={
        "llm_config": "text_config", "img_context_token_id": "image_token_id",
        "video_context_token_id": "video_token_id", "sound_context_token_id": "audio_token_id",
    },
    image_tokens=("image_token_id", "video_token_id", "audio_token_id"),
)  # fmt: skip
NANO = replace(FAMILY, model="hybridrt.models.nemotron_omni:NemotronH_Nano_Omni_Reasoning_V3")
TEXT = "language_model."


class NemotronH_Omni_Reasoning_V3(NemotronHForCausalLM):  # the architecture's name
    """The text part by transformers' name."""

    skipped_keys = (
        MTP_KEYS,
        r"(vision_model|vision_final_layernorm|multi_modal_projector|mlp1)\..*",
        r"(audio_tower|embed_audio|sound_encoder|sound_projection)\..*",
    )

    def rename_key(self, key: str) -> str:
        return super().rename_key(key.removeprefix(TEXT)) if key.startswith(TEXT) else key


class NemotronH_Nano_Omni_Reasoning_V3(NemotronH_Omni_Reasoning_V3):
    """The text part of Nemotron 3 Nano Omni by its published name."""
