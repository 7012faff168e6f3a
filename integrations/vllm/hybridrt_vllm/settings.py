"""When the plugin's decode applies, and how wide its rings are. Both follow from vLLM's configuration alone, so that
the model, which plans memory, and each layer come to the same answer."""

import logging
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import torch

from hybridrt.errors import ConfigError
from hybridrt_vllm import ARCHITECTURES

KEY = "hybridrt"  # of vLLM's --additional-config
STATE_DTYPES = ("auto", "float32", "bfloat16", "float16")
MODEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_COLUMNS = 64
logger = logging.getLogger("vllm.hybridrt")  # below vLLM's own, whose level and handler it has


@dataclass(frozen=True)
class ReplaySettings:
    """`--additional-config '{"hybridrt": {"replay": true, "columns": 16}}'`.

    Attributes:
        replay: False leaves everything to vLLM.
        columns: recent inputs that a block keeps. A state is written once in as many tokens.

    Raises:
        ConfigError: an unknown name, or a value of another type or out of bounds.
    """

    replay: bool = True
    columns: int = 16

    @classmethod
    def from_config(cls, vllm_config: Any) -> "ReplaySettings":
        extra = vllm_config.additional_config
        given = extra.get(KEY, {}) if isinstance(extra, dict) else {}
        known = [field.name for field in fields(cls)]
        if not isinstance(given, dict) or (unknown := given.keys() - set(known)):
            wrong = given if not isinstance(given, dict) else sorted(unknown)
            raise ConfigError(f"additional_config[{KEY!r}] has {wrong!r}; it is an object with the keys {known}")
        settings = cls(**given)
        if not isinstance(settings.replay, bool):
            raise ConfigError(f"additional_config[{KEY!r}]['replay'] is {settings.replay!r}: it is true or false")
        if type(settings.columns) is not int or not 2 <= settings.columns <= MAX_COLUMNS:
            raise ConfigError(f"additional_config[{KEY!r}]['columns'] is {settings.columns!r}: it is an integer from 2 "
                              f"to {MAX_COLUMNS}")  # fmt: skip
        return settings


def reason_against(vllm_config: Any, *, on_cuda: bool) -> str | None:
    """Why vLLM's own decode runs, with what to change; None if the plugin's does."""
    cache, model = vllm_config.cache_config, vllm_config.model_config
    rules = (
        (not on_cuda, "the kernels were written for CUDA devices"),
        (model.architecture not in ARCHITECTURES, f"{model.architecture} is not one of {', '.join(ARCHITECTURES)}"),
        (
            cache.mamba_cache_mode != "none",
            f"mamba_cache_mode is {cache.mamba_cache_mode!r}, and vLLM then copies states without their rings: start "
            "with --no-enable-prefix-caching",
        ),
        (vllm_config.speculative_config is not None, "drafts are verified: start without --speculative-config"),
        (vllm_config.kv_transfer_config is not None, "states are sent to others: start without --kv-transfer-config"),
        (model.dtype not in MODEL_DTYPES, f"the model's dtype is {model.dtype}"),
        (
            cache.mamba_ssm_cache_dtype not in STATE_DTYPES,
            f"mamba_ssm_cache_dtype is {cache.mamba_ssm_cache_dtype!r}: choose one of {', '.join(STATE_DTYPES)}",
        ),
    )
    return next((text for applies, text in rules if applies), None)


def resolve(vllm_config: Any, *, on_cuda: bool) -> ReplaySettings | None:
    """The settings if the plugin's decode applies. Else None, and the log says why."""
    settings = ReplaySettings.from_config(vllm_config)
    if not settings.replay:
        return None
    if reason := reason_against(vllm_config, on_cuda=on_cuda):
        _log_once(reason)
        return None
    return settings


@cache
def _log_once(reason: str) -> None:
    logger.warning("hybridrt: vLLM's own decode of Gated Delta Nets runs, because %s", reason)
