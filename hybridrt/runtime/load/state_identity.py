"""Everything that a model's state bytes depend on, as plain data that two processes can compare."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from hybridrt.base.dtypes import dtype_name
from hybridrt.base.engine_config import EngineConfig
from hybridrt.base.model_config import ModelConfig
from hybridrt.kinds.base import StateShape
from hybridrt.kinds.registry import state_shape
from hybridrt.mem_cache.pools.kv_pool import ONES, LayerScales
from hybridrt.mem_cache.pools.stored_states import storage_name
from hybridrt.runtime.load.digest import model_digest
from hybridrt.runtime.load.target import RunTarget

Identity = dict[str, int | str]


def state_identity(
    config: EngineConfig, target: RunTarget, model_path: Path, kv_scales: LayerScales = ONES
) -> Identity:
    """What every holder of a state must agree on. `kv_scales`: of layers whose codes it holds.

    model: a digest of the checkpoint's configuration and of samples of its weights. Equal names may
    be other weights.
    conv_dtype: dtype of conv inputs, keys and values.
    state_dtype: dtype of the recurrent state, and the scales of 8-bit codes.
    conv_layout: kinds of recurrent layer, sub-projections with their widths before sharding, K, and
    which layers.
    kv_layout: attention layers, KV heads before sharding, head dimension, sliding window.
    chunk_size: tokens of a scan's chunk: it decides how a prefill rounds.
    kv_codes, kv_scales: dtype of the codes of keys and values, and their scales by layer. Only where
    there are codes.
    """
    mc = target.model_config
    linear = sorted(mc.linear.items())
    return {
        "model": model_digest(model_path, config),
        "conv_dtype": dtype_name(target.dtype),
        "state_dtype": storage_name(target.state_dtype),
        "conv_layout": "; ".join(
            f"{_conv(state_shape(c))} in layers {_ids(mc.linear_layer_ids(kind))}" for kind, c in linear
        ),
        "kv_layout": _kv_layout(mc),
        "chunk_size": max((c.chunk_size for _, c in linear), default=0),
        **_kv_codes(target, kv_scales),
    }


def first_difference(ours: Mapping[str, object], theirs: Mapping[str, object]) -> str | None:
    """The first name whose values differ or that only one record has; None if they are equal. Names
    that `ours` lacks come last, in alphabetical order."""
    names = (*ours, *sorted(theirs.keys() - ours.keys()))
    return next((name for name in names if ours.get(name) != theirs.get(name)), None)


def _kv_codes(target: RunTarget, scales: LayerScales) -> Identity:
    if target.kv_codes is None:
        return {}
    text = "; ".join(f"{keys:.8g} {values:.8g} in layer {i}" for i, (keys, values) in sorted(scales.items()))
    return {"kv_codes": dtype_name(target.kv_codes), "kv_scales": text}


def _conv(shape: StateShape) -> str:
    parts = ", ".join(f"{name} {width}" for name, width in shape.segments)
    return f"{shape.kind} ({parts}) x {shape.conv_kernel - 1}, state {list(shape.temporal)}"


def _kv_layout(model: ModelConfig) -> str:
    groups: dict[str, list[int]] = {}
    for i in model.full_attention_layer_ids:
        a = model.attention_of(i)
        values = f" and {a.v_head_dim}" if a.v_head_dim not in (None, a.head_dim) else ""
        variant = "mla " if a.latent else ""
        text = f"{variant}{a.num_kv_heads} x {a.head_dim}{values}, window {a.sliding_window}"
        groups.setdefault(text, []).append(i)
    return "; ".join(f"{text} in layers {_ids(ids)}" for text, ids in groups.items())


def _ids(layer_ids: Sequence[int]) -> str:
    return ",".join(map(str, layer_ids))
