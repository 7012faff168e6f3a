"""Qwen3.5 and its successors: blocks as in Qwen3-Next, whose projections have tensors of their own in a checkpoint.

    x ─ norm ─ GDN or gated attention ─ + ─ norm ─ MLP or MoE ─ +

Checkpoints that see images hold the text part under `model.language_model`; the rest is skipped (Qwen team 2026).
"""

from typing import ClassVar

from hybridrt.models.base import MTP_KEYS
from hybridrt.models.qwen3_next import Qwen3NextForCausalLM
from hybridrt.recurrent.gdn import GDNKeys


class Qwen3_5ForCausalLM(Qwen3NextForCausalLM):
    """Qwen3.5, dense."""

    gdn_keys: ClassVar[GDNKeys] = GDNKeys({"in_proj_qkv": "qkv", "in_proj_z": "z", "in_proj_b": "b", "in_proj_a": "a"})
    skipped_keys = (MTP_KEYS, r"model\.visual\..*")
    spellings: ClassVar[dict[str, str]] = {"model.language_model.": "model."}

    def renormalizes(self) -> bool:
        return True


class Qwen3_5MoeForCausalLM(Qwen3_5ForCausalLM):
    """Qwen3.5 with experts."""


class Qwen3_5ForConditionalGeneration(Qwen3_5ForCausalLM):
    """The text part of Qwen3.5."""


class Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeForCausalLM):
    """The text part of Qwen3.5 with experts."""
