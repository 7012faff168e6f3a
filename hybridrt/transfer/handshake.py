"""What two workers must agree on before any state moves between them."""

from collections.abc import Sequence
from pathlib import Path

from hybridrt.config import EngineConfig, ModelConfig, dtype_name
from hybridrt.errors import HandshakeError
from hybridrt.kinds.base import StateShape
from hybridrt.kinds.registry import state_shape
from hybridrt.mem_cache.mamba_pool import ring_width
from hybridrt.runtime.build import RunTarget
from hybridrt.transfer.digest import model_digest

VERSION = 3


Handshake = dict[str, int | str]


def handshake_of(config: EngineConfig, target: RunTarget, model_path: Path) -> Handshake:
    """What a worker that runs `config` says about everything that the bytes and the meaning of a state depend on.

    version: of the messages and the image.
    model: a digest of the checkpoint's configuration and of samples of its weights: a name may lie.
    conv_dtype: of conv inputs, keys and values.
    state_dtype: of the recurrent state.
    conv_layout: kinds of recurrent layer, sub-projections with their widths before sharding, K, and which layers.
    kv_layout: attention layers, KV heads before sharding, head dimension, sliding window.
    chunk_size: tokens of a scan's chunk: it decides how a prefill rounds.
    draft_length: drafts that a verify step may hold.
    ring_width: columns of the conv ring and of the state ring.
    page_size: tokens in a KV page.
    """
    mc, tokens = target.model_config, config.num_verify_tokens
    linear = [(state_shape(c), mc.linear_layer_ids(kind), c) for kind, c in sorted(mc.linear.items())]
    widths = [shape.conv_width(tokens) for shape, _, _ in linear]
    return {
        "version": VERSION,
        "model": model_digest(model_path, config),
        "conv_dtype": dtype_name(target.dtype),
        "state_dtype": dtype_name(target.state_dtype),
        "conv_layout": "; ".join(f"{_conv(shape)} in layers {_ids(ids)}" for shape, ids, _ in linear),
        "kv_layout": _kv_layout(mc),
        "chunk_size": max((c.chunk_size for _, _, c in linear), default=0),
        "draft_length": tokens - 1,
        "ring_width": f"conv {max(widths, default=0)}, state {ring_width(tokens)}",
        "page_size": config.page_size,
    }


def check_handshake(ours: Handshake, theirs: Handshake) -> None:
    """Raises HandshakeError, which names the first field that differs and both values."""
    for name in (*ours, *(theirs.keys() - ours.keys())):
        if ours.get(name) != theirs.get(name):
            raise HandshakeError(name, ours.get(name), theirs.get(name))


def _conv(shape: StateShape) -> str:
    parts = ", ".join(f"{name} {width}" for name, width in shape.segments)
    return f"{shape.kind} ({parts}) x {shape.conv_kernel - 1}, state {list(shape.temporal)}"


def _kv_layout(model: ModelConfig) -> str:
    groups: dict[str, list[int]] = {}
    for i in model.full_attention_layer_ids:
        a = model.attention_of(i)
        values = f" and {a.v_head_dim}" if a.v_head_dim not in (None, a.head_dim) else ""
        variant = f"{a.variant} " if a.variant != "gqa" else ""
        text = f"{variant}{a.num_kv_heads} x {a.head_dim}{values}, window {a.sliding_window}"
        groups.setdefault(text, []).append(i)
    return "; ".join(f"{text} in layers {_ids(ids)}" for text, ids in groups.items())


def _ids(layer_ids: Sequence[int]) -> str:
    return ",".join(map(str, layer_ids))
