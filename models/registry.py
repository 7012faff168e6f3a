"""Architectures by the name that config.json gives them, imported when first asked for."""

import importlib

from hybridrt.config import ModelConfig
from hybridrt.errors import ConfigError, UnsupportedModelError
from hybridrt.models.base import CausalLM, MTPHead

MODELS = {
    "FalconH1ForCausalLM": "hybridrt.models.falcon_h1",
    "FalconMambaForCausalLM": "hybridrt.models.falcon_mamba",
    "JambaForCausalLM": "hybridrt.models.jamba",
    "NemotronHForCausalLM": "hybridrt.models.nemotron_h",
    "Qwen3NextForCausalLM": "hybridrt.models.qwen3_next",
    "SwaSsmForCausalLM": "hybridrt.models.swa_ssm",
}
# Their multi-token-prediction heads, "module:class".
MTP_HEADS = {
    "NemotronHForCausalLM": "hybridrt.models.nemotron_h_mtp:NemotronHMTP",
    "Qwen3NextForCausalLM": "hybridrt.models.qwen3_next_mtp:Qwen3NextMTP",
}


def model_class(architecture: str) -> type[CausalLM]:
    """The class that implements an architecture; UnsupportedModelError lists those there are."""
    if architecture not in MODELS:
        raise UnsupportedModelError(f"architecture {architecture!r} is not supported; supported are {sorted(MODELS)}")
    cls: type[CausalLM] = getattr(importlib.import_module(MODELS[architecture]), architecture)
    return cls


def make_mtp_head(model: CausalLM) -> MTPHead:
    """The prediction head that the model's config.json describes, its weights unset.

    Raises:
        ConfigError: it describes none, or one of a kind that is not implemented.
    """
    config: ModelConfig = model.config
    target = MTP_HEADS.get(config.architecture)
    if target is None or not config.mtp_layers or any(spec.linear for spec in config.mtp_layers):
        raise ConfigError(
            f'method "mtp" needs a model with one multi-token-prediction head of attention and feed-forward layers; '
            f'this {config.architecture} has none by its config.json: use "ngram" or "draft"'
        )
    module, _, name = target.partition(":")
    head: MTPHead = getattr(importlib.import_module(module), name)(model)
    return head
