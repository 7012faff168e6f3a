"""Names to backends. Nothing here imports a backend before it is chosen."""

import logging
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

import torch

from hybridrt.attention.base import AttentionBackend, SegmentedAttnBackend
from hybridrt.attention.hybrid_linear import HybridLinearAttnBackend
from hybridrt.attention.paged import kernel_facts
from hybridrt.attention.prefill_decode import PrefillDecodeAttnBackend
from hybridrt.config import EngineConfig, ModelConfig
from hybridrt.errors import BackendError
from hybridrt.kernels.providers import is_installed, objection, require
from hybridrt.kinds.registry import kind_names
from hybridrt.mem_cache.kv_pool import KVPool
from hybridrt.mem_cache.req_to_token_pool import HybridReqToTokenPool
from hybridrt.plugins import load_object

# "module:class" of each full-attention backend; packages add theirs through the entry-point group below.
FULL_ATTENTION = {
    "torch": "hybridrt.attention.torch_native:TorchNativeAttnBackend",
    "triton": "hybridrt.attention.triton:TritonAttnBackend",
    "flashinfer": "hybridrt.attention.flashinfer:FlashinferAttnBackend",
    "fa3": "hybridrt.attention.fa3:Fa3AttnBackend",
}
ENTRY_POINT_GROUP = "hybridrt.attention_backends"
DEFAULT_BY_DEVICE = {"cpu": "torch", "cuda": "triton"}
# Whose kernels a backend runs. These prefill faster than ours (docs/performance.md), the fastest first.
LIBRARIES = {"fa3": "sgl_kernel", "flashinfer": "flashinfer"}

logger = logging.getLogger(__name__)


def attention_backend_names() -> list[str]:
    """Every name that `attention_backend` accepts, "auto" apart."""
    return sorted({*FULL_ATTENTION, *(e.name for e in entry_points(group=ENTRY_POINT_GROUP))})


def resolve_attention_name(name: str, device: torch.device) -> str:
    """What "auto" means on a device; every other name is itself."""
    return DEFAULT_BY_DEVICE[device.type] if name == "auto" else name


def resolve_prefill_name(config: EngineConfig, device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """The backend that serves prefill. Where neither backend is named, a faster one than ours if it is installed.

    Args:
        dtype, head_dim: of the KV cache.
    """
    if config.prefill_attention_backend is not None:
        return resolve_attention_name(config.prefill_attention_backend, device)
    if config.attention_backend == "auto" and device.type == "cuda":
        facts = kernel_facts(device, dtype, head_dim)
        for name, provider in LIBRARIES.items():
            reason = objection("attention_extend", device.type, provider, **facts)
            if reason is None:
                return name
            if is_installed(provider):
                logger.warning("prefill attention does not use %s: %s", name, reason)
    return resolve_attention_name(config.attention_backend, device)


def load_attention_backend(name: str, device: torch.device) -> type[SegmentedAttnBackend]:
    """The class behind a name; "auto" picks by platform.

    Raises:
        BackendError: the name is unknown, or what the backend needs cannot be imported.
        ProviderNotInstalledError: the library that it is named after is missing.
    """
    name = resolve_attention_name(name, device)
    third_party = {e.name: e.value for e in entry_points(group=ENTRY_POINT_GROUP)}
    target = FULL_ATTENTION.get(name) or third_party.get(name)
    if target is None:
        raise BackendError(
            f"attention_backend is {name!r}; it must be one of auto, {', '.join(attention_backend_names())}"
        )
    if name in LIBRARIES:
        require(LIBRARIES[name], f"attention_backend {name!r}")
    cls: type[SegmentedAttnBackend] = load_object(target)
    return cls


def create_backend(
    config: EngineConfig,
    model_config: ModelConfig,
    *,
    layers: Mapping[int, Any],
    kv_pool: KVPool,
    req_to_token_pool: HybridReqToTokenPool,
    device: torch.device,
    composite: type[HybridLinearAttnBackend] = HybridLinearAttnBackend,
) -> AttentionBackend:
    """The backend that a model's batches carry: full attention, split by phase if asked, in the hybrid composite.

    Args:
        layers: the model's recurrent mixers (or history branches) by layer id.
        composite: how the model puts both sides together.
    """
    full = _full_attention(config, kv_pool, req_to_token_pool, device)
    if not layers:
        return full
    _check_linear_name(config.linear_attn_backend, model_config)
    return composite.over(full, layers, model_config.full_attention_layer_ids, req_to_token_pool)


def _full_attention(
    config: EngineConfig, kv_pool: KVPool, req_to_token_pool: HybridReqToTokenPool, device: torch.device
) -> SegmentedAttnBackend:
    def build(name: str) -> SegmentedAttnBackend:
        cls: Any = load_attention_backend(name, device)
        backend: SegmentedAttnBackend = cls(kv_pool=kv_pool, req_to_token_pool=req_to_token_pool)
        return backend

    decode = resolve_attention_name(config.attention_backend, device)
    prefill = resolve_prefill_name(config, device, kv_pool.k.dtype, kv_pool.k.shape[-1])
    if prefill == decode:
        return build(decode)
    # A prefill backend that no option names was chosen for prefill alone.
    named = config.prefill_attention_backend is not None
    mode = config.speculative.speculative_attention_mode if config.speculative and named else "decode"
    return PrefillDecodeAttnBackend(build(prefill), build(decode), mode)


def _check_linear_name(name: str, model_config: ModelConfig) -> None:
    """linear_attn_backend may name the one kind that the model has."""
    kinds = sorted(model_config.linear)
    if name != "auto" and kinds != [name]:
        known = f"; kinds are {', '.join(kind_names())}" if name not in kind_names() else ""
        raise BackendError(
            f'linear_attn_backend is {name!r}, but the model has {", ".join(kinds)} layers; use "auto"{known}'
        )
