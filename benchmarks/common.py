"""What the benchmarks share: where a run happened, where its results go, and random prompts."""

import gc
import json
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from hybridrt.base.model_config import ModelConfig
from hybridrt.kinds.gdn import GDNConfig
from hybridrt.kinds.kda import KDAConfig
from hybridrt.kinds.mamba1 import Mamba1Config
from hybridrt.kinds.mamba2 import Mamba2Config

RESULTS = Path(__file__).parent / "results"
HBM_BYTES_PER_S = 4.0e12  # the bandwidth that the floors of docs/performance.md are computed with
PRODUCT_FLOPS_PER_S = 700e12  # the rate of products that prefills are compared with


def environment() -> dict[str, str]:
    """GPU or CPU, versions and commit of a run."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    try:
        command = ["git", "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    versions = {"torch": torch.__version__, "cuda": str(torch.version.cuda), "python": platform.python_version()}
    try:
        import triton

        versions["triton"] = triton.__version__
    except ImportError:
        versions["triton"] = "none"
    return {"device": gpu, "commit": commit, **versions}


def settle() -> None:
    """What a serving process should do once it stands: a full collection would look through all that torch and its
    like have imported, for 160 ms between two steps (440,000 objects)."""
    gc.collect()
    gc.freeze()


def free() -> None:
    """Frees the memory of engines that have no reference any more: parts of them are cycles, which `settle` has kept
    from the collector."""
    gc.unfreeze()
    gc.collect()


def save(name: str, rows: Any) -> Path:
    """Writes a run's rows and environment to benchmarks/results/<name>.json."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")
    return path


def plain_vocab(config: ModelConfig) -> int:
    """Token ids below it are no placeholders of images."""
    return min([config.vocab_size, *config.image_tokens])


def prompts(count: int, length: int, vocab: int, seed: int = 0) -> list[list[int]]:
    """`count` random prompts of `length` tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab, (count, length), generator=generator).tolist()


def mamba1_of(config: ModelConfig) -> Mamba1Config:
    return config.linear_of(Mamba1Config)


def mamba2_of(config: ModelConfig) -> Mamba2Config:
    return config.linear_of(Mamba2Config)


def gdn_of(config: ModelConfig) -> GDNConfig:
    return config.linear_of(GDNConfig)


def kda_of(config: ModelConfig) -> KDAConfig:
    return config.linear_of(KDAConfig)
