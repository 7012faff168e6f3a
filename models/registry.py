"""Finds the model and prediction-head classes of an architecture."""

from hybridrt.base.errors import ConfigError
from hybridrt.base.model_config import ModelConfig
from hybridrt.base.plugins import load_object
from hybridrt.models.base import CausalLM, MTPHead
from hybridrt.models.config.family_registry import family_of


def model_class(architecture: str) -> type[CausalLM]:
    """The class of an architecture. UnsupportedModelError lists those there are."""
    return load_object(family_of(architecture).model)


def make_mtp_head(model: CausalLM) -> MTPHead:
    """The prediction head of the model's config.json, its weights unset.

    Raises:
        ConfigError: it describes none, or one of a kind that is not implemented.
    """
    config: ModelConfig = model.config
    target = family_of(config.architecture).mtp_head
    if target is None or not config.mtp_layers or any(spec.linear for spec in config.mtp_layers):
        raise ConfigError(
            f'method "mtp" needs a model with one multi-token-prediction head of attention and feed-forward layers; '
            f'this {config.architecture} has none by its config.json: use "ngram" or "draft"'
        )
    return load_object(target)(model)
