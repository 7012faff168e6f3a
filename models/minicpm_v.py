"""MiniCPM-V 4.6 and 4.7: the text part, which is Qwen3.5.

Checkpoints hold it under `model.language_model`. The vision tower (older checkpoints: vpm) and the
mergers are skipped (OpenBMB 2026). The positions of M-RoPE are those of the tokens, because there
is only text.
"""

from dataclasses import replace

from hybridrt.models.base import MTP_KEYS
from hybridrt.models.qwen3_5 import DEFAULTS, SEEING, Qwen3_5ForCausalLM

V4_6 = replace(
    SEEING,
    model="hybridrt.models.minicpm_v:MiniCPMV4_6ForConditionalGeneration",
    defaults=DEFAULTS,
    vision=None,
)
V4_7 = replace(V4_6, model="hybridrt.models.minicpm_v:MiniCPMV4_7ForConditionalGeneration")


class MiniCPMV4_6ForConditionalGeneration(Qwen3_5ForCausalLM):
    """The text part of MiniCPM-V 4.6."""

    skipped_keys = (MTP_KEYS, r"model\.(vision_tower|vpm|vit_merger|merger)\..*")


class MiniCPMV4_7ForConditionalGeneration(MiniCPMV4_6ForConditionalGeneration):
    """The text part of MiniCPM-V 4.7."""
