"""From a configuration to a model's path and how this process runs it. Reads no weights."""

from dataclasses import replace
from pathlib import Path

from hybridrt.base.engine_config import EngineConfig
from hybridrt.base.errors import ConfigError
from hybridrt.base.model_config import ModelConfig
from hybridrt.base.quantization import QuantConfig
from hybridrt.collectives.groups import TPGroup
from hybridrt.kernels.core.providers import check_overrides
from hybridrt.models.config.quant_online import OnlineRules
from hybridrt.models.config.read_config import read_model_config
from hybridrt.models.loading.stored_modules import (
    with_plain_dtypes,
    with_stored_modules,
)
from hybridrt.runtime.load.model_path import checkpoint_path
from hybridrt.runtime.load.target import RunTarget


def load_target(config: EngineConfig, tp: TPGroup) -> tuple[Path, RunTarget]:
    """The model's path and how this process, rank `tp`, runs it. Reads no weights.

    Raises:
        ConfigError: the model or an option cannot be used, or `tp` and the configuration differ in
            the number of ranks.
        DeviceError: there is no such device.
        BackendError, ProviderNotInstalledError: HYBRIDRT_PROVIDERS names a provider that cannot
            serve its operation, or the configuration a backend that there is not.
    """
    if tp.size != config.tp_size:
        raise ConfigError(f"tp_size is {config.tp_size}, but this process belongs to a group of {tp.size}")
    path = checkpoint_path(config)
    model_config = read_model_config(path)
    if not config.images:
        model_config = replace(model_config, vision=None)
    if config.quantization is not None:
        quant = online(config.quantization, model_config, path)
        quant = quant if config.load_format == "dummy" else with_plain_dtypes(quant, path)
        model_config = replace(model_config, quant=quant)
    elif model_config.quant is not None and config.load_format != "dummy":
        model_config = replace(model_config, quant=with_stored_modules(model_config.quant, path))
    target = RunTarget.resolve(config, model_config, tp)
    check_overrides(target.device.type)
    return path, target


def online(name: str, model_config: ModelConfig, path: Path) -> QuantConfig:
    """A plain checkpoint that is quantised while it is loaded. ConfigError: it is quantised."""
    if model_config.quant is not None:
        raise ConfigError(
            f"quantization is {name!r}, but {path} is quantised already (by {model_config.quant.rules.name}): leave "
            "quantization out, or pass the checkpoint that it was made from"
        )
    return QuantConfig(OnlineRules(name), online=True)
