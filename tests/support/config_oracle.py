"""What transformers' own configuration classes make of a config.json: the oracle of `read_fields`."""

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hybridrt.base.errors import ConfigError
from hybridrt.base.model_config import AttentionConfig
from hybridrt.models.config.family import Family

CLASSES = {
    "bailing_hybrid": "BailingHybridConfig", "bamba": "BambaConfig", "falcon_h1": "FalconH1Config",
    "falcon_mamba": "FalconMambaConfig", "gpt_oss": "GptOssConfig", "granitemoehybrid": "GraniteMoeHybridConfig",
    "jamba": "JambaConfig", "kimi_linear": "KimiLinearConfig", "lara_mini": "LaraMiniConfig", "lfm2": "Lfm2Config",
    "lfm2_moe": "Lfm2MoeConfig", "lfm3": "Lfm3Config", "mamba": "MambaConfig",
    "mamba2": "Mamba2Config", "minimax": "MiniMaxConfig", "nemotron_h": "NemotronHConfig",
    "olmo_hybrid": "OlmoHybridConfig", "qwen3_5_moe_text": "Qwen3_5MoeTextConfig",
    "qwen3_5_text": "Qwen3_5TextConfig", "qwen3_next": "Qwen3NextConfig", "zamba2": "Zamba2Config",
}  # fmt: skip
# Fields that classes use up, refuse, or keep for something else after they were read.
USED_UP = {
    "full_attention_interval", "full_attn_idxs", "first_k_dense_replace", "layers_num_experts",
    "head_dim:bailing_hybrid",
    *(f"{name}:{kind}" for name in ("layer_types", "layers_block_type") for kind in ("bamba", "falcon_h1", "jamba")),
}  # fmt: skip


def compared(family: Family) -> list[str]:
    """The fields that both sides have."""
    return [name for name in family.fields if not {name, f"{name}:{family.model_type}"} & USED_UP]


def their_fields(raw: Mapping[str, Any], family: Family) -> Any:
    """The object of transformers' class; older versions lack some. ConfigError where it refuses the fields."""
    name = CLASSES[family.model_type]
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    try:
        return getattr(transformers, name).from_dict(copy.deepcopy(dict(raw)))
    except Exception as e:  # of many types
        raise ConfigError(str(e)) from e


def same_fields(ours: Any, theirs: Any, family: Family) -> None:
    """Both hold the same values in all fields that the family reads."""
    for name in compared(family):
        a, b = getattr(ours, name, None), getattr(theirs, name, None)
        assert _listed(a) == _listed(b), (name, a, b)


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def their_frequencies(theirs: Any, attention: AttentionConfig) -> tuple[torch.Tensor, float]:
    """Scaled frequencies of a whole configuration, and the factor of cosines and sines."""
    whole = copy.copy(theirs)
    whole.rope_parameters, whole.head_dim = dict(attention.rope or {}), attention.rotary_dim
    return ROPE_INIT_FUNCTIONS[whole.rope_parameters["rope_type"]](whole, torch.device("cpu"))
