"""Chooses attention backends by name, and builds a model's composite."""

import logging
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch

from hybridrt.attention.base import AttentionBackend
from hybridrt.attention.paged import SegmentedAttnBackend
from hybridrt.attention.prefill_decode import PrefillDecodeAttnBackend
from hybridrt.base.engine_config import EngineConfig
from hybridrt.base.errors import BackendError, shown
from hybridrt.base.model_config import AttentionSpec, ModelConfig
from hybridrt.base.plugins import Plugins
from hybridrt.kernels.core.providers import is_installed, require
from hybridrt.kinds.registry import kind_names
from hybridrt.mem_cache.pools.kv_pool import KVPool
from hybridrt.mem_cache.pools.req_to_token_pool import HybridReqToTokenPool
from hybridrt.recurrent.backend import HybridLinearAttnBackend

# "auto" takes the first that fits: libraries with faster prefill first. Entry points are "name =
# module:class", a SegmentedAttnBackend.
BACKENDS = Plugins(
    "hybridrt.attention_backends",
    {
        "fa3": "hybridrt.attention.fa3:Fa3AttnBackend",
        "flashinfer": "hybridrt.attention.flashinfer:FlashinferAttnBackend",
        "triton": "hybridrt.attention.triton:TritonAttnBackend",
        "torch": "hybridrt.attention.paged:TorchNativeAttnBackend",
    },
    "attention_backend",
    SegmentedAttnBackend,
    classes=True,
)

logger = logging.getLogger(__name__)


def attention_backend_names() -> list[str]:
    """Every name that `attention_backend` accepts, except "auto"."""
    return BACKENDS.names()


def backend_class(name: str) -> type[SegmentedAttnBackend]:
    """The class of a name. What it needs may be missing.

    Raises:
        BackendError: the name is unknown, its class cannot be imported or is no
            SegmentedAttnBackend.
    """
    return BACKENDS.load(name)


def objections_to_codes(device: torch.device) -> dict[str, str | None]:
    """Why each of our backends cannot serve a KV cache of fp8_e4m3 with queries in bfloat16; None if
    it can. Imports no library."""
    spec = AttentionSpec(1, 1, 128, 128, None, 1.0, torch.float8_e4m3fn, query_dtype=torch.bfloat16)
    return {name: backend_class(name).objection(device, [spec]) for name in BACKENDS.built_in}


def resolve_attention_name(name: str, device: torch.device) -> str:
    """The backend for decode. "auto": the first with the device in `auto_decode`."""
    if name != "auto":
        return name
    return next(each for each in BACKENDS.built_in if device.type in backend_class(each).auto_decode)


def resolve_prefill_name(config: EngineConfig, device: torch.device, specs: Collection[AttentionSpec]) -> str:
    """The backend for prefill. If no option names one: the first that is installed and serves the
    model.

    Args:
        specs: a spec for each of the model's attention layers.
    """
    if config.prefill_attention_backend is not None:
        return resolve_attention_name(config.prefill_attention_backend, device)
    decode = resolve_attention_name(config.attention_backend, device)
    if config.attention_backend != "auto" or not specs:
        return decode
    for name in BACKENDS.built_in:
        cls = backend_class(name)
        if name == decode:
            break
        if device.type not in cls.auto_prefill:
            continue
        reason = cls.objection(device, specs)
        if reason is None:
            return name
        if cls.provider is None or is_installed(cls.provider):
            logger.warning("prefill attention does not use %s: %s", name, reason)
    return decode


def prompt_graph_bytes(
    config: EngineConfig, device: torch.device, specs: Collection[AttentionSpec], context: int
) -> int:
    """Bytes that backends of softmax attention take for graphs of prompts (`SegmentedAttnBackend.prompt_graph_bytes`).
    "auto" chooses no other backend for prefill that captures prompts, so it is not asked."""
    fields = config.attention_backend, config.prefill_attention_backend
    names = [resolve_attention_name(name, device) for name in fields if name is not None]
    decode, *_ = classes = [backend_class(name) for name in dict.fromkeys(names)]
    if not decode.captures_prompts:
        return 0
    return sum(cls.prompt_graph_bytes(device, specs, context) for cls in classes if cls.captures_prompts)


def load_attention_backend(name: str, device: torch.device) -> type[SegmentedAttnBackend]:
    """The class of a name, with its library installed. "auto" chooses by device.

    Raises:
        BackendError: the errors of `backend_class`.
        ProviderNotInstalledError: its library is missing.
    """
    name = resolve_attention_name(name, device)
    cls = backend_class(name)
    if cls.provider is not None:
        require(cls.provider, f"attention_backend {name!r}")
    return cls


def check_names(config: EngineConfig) -> None:
    """BackendError for a name of a backend that there is for no model and no device. Imports none."""
    for field, name in _named(config).items():
        replace(BACKENDS, what=field).place(name)
    if config.linear_attn_backend not in ("auto", *kind_names()):
        raise BackendError(
            f"linear_attn_backend {shown(config.linear_attn_backend)} is not supported; supported are auto, "
            f"{', '.join(kind_names())}"
        )


def check_backends(
    config: EngineConfig, model_config: ModelConfig, device: torch.device, specs: Collection[AttentionSpec]
) -> None:
    """Raises what `create_backend` would, of backends that the configuration names.

    Args:
        specs: a spec for each of the model's attention layers.
    """
    for field, name in _named(config).items():
        cls = load_attention_backend(name, device)
        if reason := cls.objection(device, specs):
            raise BackendError(f"{field} {name!r} cannot serve attention on {device.type!r}: {reason}")
    if model_config.linear:
        _check_linear_name(config.linear_attn_backend, model_config)


def _named(config: EngineConfig) -> dict[str, str]:
    """Backends of softmax attention, by the field that names them."""
    fields = {name: getattr(config, name) for name in ("attention_backend", "prefill_attention_backend")}
    return {field: name for field, name in fields.items() if name not in (None, "auto")}


def create_backend(
    config: EngineConfig,
    model_config: ModelConfig,
    *,
    layers: Mapping[int, Any],
    kv_pool: KVPool,
    req_to_token_pool: HybridReqToTokenPool,
    composite: type[HybridLinearAttnBackend] = HybridLinearAttnBackend,
) -> AttentionBackend:
    """Builds a model's backend: full attention (one backend, or one each for prefill and decode), in the composite.

    Args:
        layers: recurrent mixers (or history branches) by layer id.
        composite: the class that joins both sides.
    """
    full = _full_attention(config, kv_pool, req_to_token_pool)
    if not layers:
        return full
    _check_linear_name(config.linear_attn_backend, model_config)
    return composite.over(full, layers, model_config.full_attention_layer_ids, req_to_token_pool)


def _full_attention(
    config: EngineConfig, kv_pool: KVPool, req_to_token_pool: HybridReqToTokenPool
) -> SegmentedAttnBackend:
    device = kv_pool.device

    def build(name: str) -> SegmentedAttnBackend:
        cls: Any = load_attention_backend(name, device)
        return cls(kv_pool=kv_pool, req_to_token_pool=req_to_token_pool)

    decode = resolve_attention_name(config.attention_backend, device)
    prefill = resolve_prefill_name(config, device, set(kv_pool.specs.values()))
    if prefill == decode:
        return build(decode)
    # An automatic backend serves only prefill.
    named = config.prefill_attention_backend is not None
    mode = config.speculative.speculative_attention_mode if config.speculative and named else "decode"
    return PrefillDecodeAttnBackend(build(prefill), build(decode), mode)


def _check_linear_name(name: str, model_config: ModelConfig) -> None:
    kinds = sorted(model_config.linear)
    if name != "auto" and kinds != [name]:
        raise BackendError(f'linear_attn_backend is {name!r}, but the model has {", ".join(kinds)} layers; use "auto"')
