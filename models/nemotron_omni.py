"""Nemotron Omni and Nano VL v2: a tower of images, and the text part, which is Nemotron-H.

Checkpoints hold the text part under `language_model`. Everything of sound is skipped, and of images
what serves videos (NVIDIA 2026). Published checkpoints and transformers name fields and the
architecture differently.
"""

import re
from dataclasses import replace

import torch

from hybridrt.base.errors import CheckpointError
from hybridrt.models.base import MTP_KEYS
from hybridrt.models.nemotron_h import FAMILY as NEMOTRON_H
from hybridrt.models.nemotron_h import NemotronHForCausalLM
from hybridrt.models.vision.radio import FINAL_NORM, RadioTower, read

FAMILY = replace(
    NEMOTRON_H,
    model="hybridrt.models.nemotron_omni:NemotronH_Omni_Reasoning_V3",
    section="text_config",
    outer_older={
        "llm_config": "text_config", "img_context_token_id": "image_token_id",
        "video_context_token_id": "video_token_id", "sound_context_token_id": "audio_token_id",
        "vit_hidden_size": "vision_hidden_size",
    },
    image_tokens=("image_token_id", "video_token_id", "audio_token_id"),
    vision=read,
)  # fmt: skip
NANO = replace(FAMILY, model="hybridrt.models.nemotron_omni:NemotronH_Nano_Omni_Reasoning_V3")
NANO_VL = replace(FAMILY, model="hybridrt.models.nemotron_omni:NemotronH_Nano_VL_V2")
TEXT, PROJECTOR = "language_model.", "vision_projector."
TOWER_KEYS = r"(vision_model|mlp1)\..*"
# Tensors that do nothing where they are stored, and what they hold then.
IDLE = {
    r"vision_model\..*\.layer_scale[12]\.lambda1": 1.0,
    rf"({PROJECTOR})?{FINAL_NORM}\.weight": 1.0,
    rf"({PROJECTOR})?{FINAL_NORM}\.bias": 0.0,
}


class NemotronH_Omni_Reasoning_V3(NemotronHForCausalLM):  # the architecture's name
    """Nemotron Omni by transformers' name."""

    skipped_keys = (
        MTP_KEYS,
        TOWER_KEYS,
        *IDLE,
        r"vision_model\.radio_model\.(input_conditioner\..*|summary_idxs)",
        r"vision_model\.radio_model\.model\.patch_generator\.video_embedder\..*",
        r"multi_modal_projector\..*",  # mlp1, by the name of transformers' modules
        r"(audio_tower|embed_audio|sound_encoder|sound_projection)\..*",
    )
    optional_keys = rf"{FINAL_NORM}\.(weight|bias)"
    tower_class, tower_keys = RadioTower, TOWER_KEYS

    def rename_key(self, key: str) -> str:
        if key.startswith(TEXT):
            return super().rename_key(key.removeprefix(TEXT))
        return key.removeprefix(PROJECTOR)

    def check_skipped(self, key: str, tensor: torch.Tensor) -> None:
        idle = next((value for keys, value in IDLE.items() if re.fullmatch(keys, key)), None)
        if self.tower is not None and idle is not None and bool((tensor != idle).any()):
            raise CheckpointError(
                f"{key} is not {idle:g} everywhere, and the tower of {self.config.architecture} has none"
            )


class NemotronH_Nano_Omni_Reasoning_V3(NemotronH_Omni_Reasoning_V3):
    """Nemotron 3 Nano Omni by its published name."""


class NemotronH_Nano_VL_V2(NemotronH_Omni_Reasoning_V3):
    """Nemotron Nano VL v2: the same tower, with images in tiles."""
