"""A model's device and dtypes, and how its recurrent state is kept."""

from collections.abc import Collection
from dataclasses import dataclass

import torch

from hybridrt.base.device import resolve_device
from hybridrt.base.dtypes import resolve_dtype, resolve_kv_codes, resolve_state_dtype
from hybridrt.base.engine_config import EngineConfig
from hybridrt.base.model_config import ModelConfig
from hybridrt.collectives.groups import TPGroup
from hybridrt.kinds.registry import can_replay, check_replay, replay_pays
from hybridrt.mem_cache.pools.stored_states import check_codes


@dataclass(frozen=True)
class RunTarget:
    """A model's device and dtypes.

    Attributes:
        kv_codes: dtype of the KV cache's codes; None: it holds plain numbers in `dtype`.
        gpu: a name of GPUS that `device` means; it need not be here. None: the device itself.
    """

    model_config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    state_dtype: torch.dtype
    state_mode: str
    tp: TPGroup
    kv_codes: torch.dtype | None = None
    gpu: str | None = None

    @classmethod
    def resolve(cls, config: EngineConfig, model_config: ModelConfig, tp: TPGroup) -> "RunTarget":
        device = resolve_device(config.device)
        dtype = resolve_dtype(config.dtype, model_config.dtype, device)
        mode = resolve_state_mode(config, model_config.linear, device)
        state_dtype = resolve_state_dtype(config.mamba_ssm_dtype, device)
        check_codes(model_config.linear, state_dtype, config.rounds_stochastically, mode)
        codes = resolve_kv_codes(config.kv_cache_dtype, device)
        return cls(model_config, device, dtype, state_dtype, mode, tp, codes)


def resolve_state_mode(config: EngineConfig, kinds: Collection[str], device: torch.device) -> str:
    """The MambaPool mode: without speculation "classic" or "replay", with it "intermediate" or
    "replay".

    Args:
        kinds: the model's kinds of recurrent layer.

    Raises:
        ConfigError: "replay" was asked for, and a layer has none.
    """
    spec = config.speculative
    asked = config.state_mode if spec is None else spec.state_mode
    if asked == "replay":
        check_replay(kinds)
    if asked != "auto":
        return asked
    if config.rounds_stochastically and can_replay(kinds) and (spec is None or not spec.forks):
        return "replay"
    # Replay pays only with kernels. Drafts that fork need every state.
    if device.type == "cuda" and replay_pays(kinds) and (spec is None or not spec.forks):
        return "replay"
    return "classic" if spec is None else "intermediate"
