"""Where a model is: its directory, a hub name that is downloaded, or a model of the package."""

from pathlib import Path

from hybridrt.base.device import resolve_device
from hybridrt.base.engine_config import EngineConfig
from hybridrt.base.errors import ConfigError, reason, shown
from hybridrt.models.config.read_config import refuse_gguf
from hybridrt.recurrent.backends import check_names

HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.jinja", "*.model"]
OTHER_FORMS = ["original/*", "metal/*"]  # of the same weights, in gpt-oss's repositories
EMBEDDED = ("embedded", "embedded_draft")
ASSETS = Path(__file__).parents[2] / "assets"


def resolve_model_path(name: str) -> Path:
    """The directory of a model.

    Args:
        name: a checkpoint directory, a hub name (org/model), which is downloaded to the hub's
            cache, or "embedded" or "embedded_draft" for the package's small models (./embedded is a
            directory).

    Raises:
        ConfigError: it is none of them, or cannot be downloaded.
        UnsupportedModelError: it is a GGUF file, or a repository of such files.
    """
    path = find_checkpoint(name)
    if path.is_dir():
        return path
    if name in EMBEDDED:
        raise ConfigError(f"this installation lacks its {name} model ({path}); pass a checkpoint directory")
    raise ConfigError(
        f"{_legible(name)} is no directory; pass a checkpoint directory, a hub name such as org/model, or embedded, "
        "which is the built-in model"
    )


def check_places(config: EngineConfig) -> None:
    """What can be said without a model. BackendError, DeviceError: the configuration names a backend or a device that
    there is not."""
    check_names(config)
    resolve_device(config.device)


def checkpoint_path(config: EngineConfig) -> Path:
    """The directory of a configuration's model. Raises as `check_places` before it is looked for, then as
    `resolve_model_path`."""
    check_places(config)
    return resolve_model_path(config.model)


def find_checkpoint(name: str) -> Path:
    """The directory of a checkpoint. Downloads a hub name (org/model); "embedded" and
    "embedded_draft" are the package's small models. Any other name is returned as a path, which
    may not be a directory.

    Raises:
        ConfigError: no path can have such a name, it cannot be read, or the hub name cannot be
            downloaded.
        UnsupportedModelError: it is a GGUF file, or a repository of such files.
    """
    if name in EMBEDDED:
        return ASSETS / name
    try:
        path = Path(name).expanduser()
        if not path.is_dir():
            refuse_gguf(name)
        if path.is_dir() or path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
            return path
    except (OSError, RuntimeError) as e:  # too long, unreadable, or of an unknown user
        raise ConfigError(
            f"{_legible(name)} is no checkpoint directory ({reason(e)}); pass one, or a hub name such as org/model"
        ) from e
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES, ignore_patterns=OTHER_FORMS))
    except Exception as e:  # the hub client's own errors, those of requests, and OS errors
        raise ConfigError(f"{_legible(name)} is no directory here, and the hub does not give it: {reason(e)}") from e


def _legible(name: str) -> str:
    return name if name.isprintable() and 0 < len(name) <= 200 else shown(name)
