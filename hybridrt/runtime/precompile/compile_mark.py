"""Marks the configurations of which Triton's cache has all kernels, so that none is traced again."""

import contextlib
import hashlib
import os
import sys
from dataclasses import asdict
from pathlib import Path

import msgspec
import torch

from hybridrt.base.device import GPUFacts
from hybridrt.base.engine_config import EngineConfig
from hybridrt.base.files import CONFIG_BYTES, read_bytes
from hybridrt.base.version import __version__
from hybridrt.runtime.load.kernel_digest import kernel_digest
from hybridrt.runtime.load.tuned_choices import MAX_BYTES, tuned_path

# No kernel depends on these.
_CONFIG = ("model", "device", "seed", "overlap", "load_format", "client_weights", "request_log", "audit_hits")
_GPU = ("free_bytes", "total_bytes")


def find_mark(config: EngineConfig, gpu: GPUFacts) -> Path:
    """Path of the mark of a configuration and a GPU. `config.model` is a directory."""
    facts = {name: value for name, value in asdict(gpu).items() if name not in _GPU}
    digest = hashlib.sha256(msgspec.json.encode(facts))
    tuned = tuned_path(gpu)
    if tuned is not None and tuned.exists():  # other tiles are other kernels
        digest.update(read_bytes(tuned, MAX_BYTES))
    return _folder(config) / digest.hexdigest()


def has_marks(config: EngineConfig) -> bool:
    """Whether the cache has all kernels of a configuration for some GPU."""
    return _folder(config).is_dir()


def _folder(config: EngineConfig) -> Path:
    import triton

    fields = {name: value for name, value in asdict(config).items() if name not in _CONFIG}
    versions = (__version__, triton.__version__, str(torch.__version__), sys.implementation.cache_tag)
    digest = hashlib.sha256(msgspec.json.encode((fields, versions)))
    digest.update(read_bytes(Path(config.model, "config.json"), CONFIG_BYTES) + kernel_digest())
    return Path(triton.knobs.cache.dir, "hybridrt", digest.hexdigest())


def write_mark(mark: Path, kernels: int) -> None:
    """Notes that the cache has all `kernels`. If this fails, the next run traces again."""
    with contextlib.suppress(OSError):
        mark.parent.mkdir(parents=True, exist_ok=True)
        temporary = mark.with_suffix(f".{os.getpid()}")
        temporary.write_text(f"{kernels}\n")
        temporary.replace(mark)
