"""Architectures by the name that config.json gives them, imported when first asked for."""

import importlib

from hybridrt.errors import UnsupportedModelError
from hybridrt.models.base import CausalLM

MODELS = {
    "FalconH1ForCausalLM": "hybridrt.models.falcon_h1",
    "FalconMambaForCausalLM": "hybridrt.models.falcon_mamba",
    "JambaForCausalLM": "hybridrt.models.jamba",
    "NemotronHForCausalLM": "hybridrt.models.nemotron_h",
    "Qwen3NextForCausalLM": "hybridrt.models.qwen3_next",
    "SwaSsmForCausalLM": "hybridrt.models.swa_ssm",
}


def model_class(architecture: str) -> type[CausalLM]:
    """The class that implements an architecture; UnsupportedModelError lists those there are."""
    if architecture not in MODELS:
        raise UnsupportedModelError(f"architecture {architecture!r} is not supported; supported are {sorted(MODELS)}")
    cls: type[CausalLM] = getattr(importlib.import_module(MODELS[architecture]), architecture)
    return cls
