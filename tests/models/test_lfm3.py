"""LFM3: windows and rotary embeddings by layer type, gates of heads, norms on both sides of a part."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hybridrt.base.errors import CheckpointError, ConfigError
from hybridrt.base.model_config import AttentionConfig, LayerSpec
from hybridrt.kinds.short_conv import ShortConvConfig
from hybridrt.layers.rotary import rotary_table
from hybridrt.models.config.read_config import read_model_config
from tests.models.test_loader import load
from tests.models.test_models_parity import requests, rewrite
from tests.support.checkpoints import CheckpointStore
from tests.support.session import Session, check_sample

SLIDING = {"rope_type": "default", "rope_theta": 1e4}
FULL = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5}


def test_layers_by_type(checkpoints: CheckpointStore) -> None:
    config = read_model_config(checkpoints["lfm3-plain"].path)
    full, sliding = AttentionConfig(4, 2, 8, FULL), AttentionConfig(4, 2, 8, SLIDING, sliding_window=9)
    conv = LayerSpec(False, "short_conv", "mlp")
    first = (conv, LayerSpec(full, None, "mlp"), conv)
    assert config.layers == (*first, LayerSpec(sliding, None, "mlp"), LayerSpec(sliding, None, "mlp"))
    assert config.linear_of(ShortConvConfig) == ShortConvConfig(channels=32, conv_kernel=7)


def test_a_window_without_a_layer_that_has_one_is_ignored(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    """Every file names a window."""
    path = rewrite(checkpoints["lfm3-conv_alone"].path, tmp_path / "model", sliding_window=64)
    assert not read_model_config(path).full_attention_layer_ids


@pytest.mark.parametrize(("size", "part", "factor"), [(128, 0.5, None), (10, 0.3, 2.0), (6, 1.0, 3.0), (8, None, None)])
def test_proportional_frequencies_are_those_of_transformers(
    size: int, part: float | None, factor: float | None, checkpoints: CheckpointStore
) -> None:
    if "proportional" not in ROPE_INIT_FUNCTIONS:
        pytest.skip("an older transformers")
    checkpoint = checkpoints["lfm3-plain"]
    rope = {"rope_type": "proportional", "rope_theta": 500.0, "partial_rotary_factor": part, "factor": factor}
    theirs = type(checkpoint.model.config)(head_dim=size)
    theirs.rope_parameters = {name: value for name, value in rope.items() if value is not None}
    angles = torch.arange(7.0).outer(ROPE_INIT_FUNCTIONS["proportional"](theirs, torch.device("cpu"))[0])
    config, attention = read_model_config(checkpoint.path), AttentionConfig(2, 1, size, rope)
    table = rotary_table(config, attention, 7, torch.device("cpu"))
    assert torch.equal(table, torch.cat((angles.cos(), angles.sin()), -1))


@pytest.mark.parametrize("kind", [{"rope_type": "default"}, {"type": "default"}, {}])
def test_a_part_of_a_head_is_proportional_whatever_published_files_say(
    kind: dict[str, str], checkpoints: CheckpointStore, tmp_path: Path
) -> None:
    """The oracle has the file that says so."""
    checkpoint = checkpoints["lfm3-plain"]
    published = {"partial_rotary_factor": 0.5, "rope_theta": 1e6, **kind}
    ropes = {"full_attention": published, "sliding_attention": SLIDING}
    path = rewrite(checkpoint.path, tmp_path / "model", rope_parameters=ropes)
    check_sample(checkpoint, Session(path).run(requests(30, steps=6))[0], "published")


def test_layer_types_share_no_rotary_table(checkpoints: CheckpointStore) -> None:
    """Equal ones do."""
    parts = [
        part.part.rope.cos_sin
        for part in load(checkpoints["lfm3-plain"].path).stack.parts
        if hasattr(part.part, "rope")
    ]
    assert len(parts) == 3 and parts[1] is parts[2] and not torch.equal(parts[0], parts[1])


@pytest.mark.parametrize("name", ["gate_proj", "g_proj"])
def test_both_names_of_the_gate(name: str, checkpoints: CheckpointStore, tmp_path: Path) -> None:
    """The first in published checkpoints."""
    checkpoint = checkpoints["lfm3-plain"]
    path = rewrite(checkpoint.path, tmp_path / "model")
    tensors = {
        key.replace(".self_attn.gate_proj.", ".self_attn.g_proj.").replace(
            ".self_attn.g_proj.", f".self_attn.{name}."
        ): t
        for key, t in load_file(path / "model.safetensors").items()
    }
    save_file(tensors, path / "model.safetensors")
    assert sum(f".self_attn.{name}." in key for key in tensors) == 3
    check_sample(checkpoint, Session(path).run(requests(9, steps=6))[0], name)


@pytest.mark.parametrize("gone", ["layers.0.post_operator_norm", "layers.3.post_ffn_norm", "layers.1.self_attn.g"])
def test_a_norm_or_a_gate_that_is_missing_is_named(gone: str, checkpoints: CheckpointStore, tmp_path: Path) -> None:
    path = rewrite(checkpoints["lfm3-plain"].path, tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    left = {key: t for key, t in tensors.items() if gone not in key}
    assert len(left) == len(tensors) - 1
    save_file(left, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"1 missing: model\.{gone}"):
        load(path)


@pytest.mark.parametrize(("change", "text"), [
    ({"sliding_window": 0}, "sliding_window is 0; it must be"), ({"use_attention_gate": "x"}, "use_attention_gate"),
    ({"use_sandwich_norm": 1}, "use_sandwich_norm is 1"), ({"num_experts": 8}, "num_experts is 8"),
    ({"layer_types": ["conv", "chunked_attention"]}, "layer_types"), ({"conv_L_cache": 0}, "conv_L_cache is 0"),
    ({"rope_parameters": SLIDING}, "rope_parameters has no object 'full_attention'"),
    ({"rope_parameters": {"full_attention": FULL}}, "rope_parameters has no object 'sliding_attention'"),
    ({"rope_parameters": {"full_attention": FULL, "sliding_attention": 3}}, "sliding_attention is 3; it must be"),
    ({"rope_parameters": {"full_attention": FULL | {"rope_type": "linear"}, "sliding_attention": SLIDING}},
     "partial_rotary_factor is 1 or null unless its rope_type is default or proportional"),
    ({"rope_parameters": {"full_attention": FULL, "sliding_attention": {"rope_theta": 0}}}, "rope_theta is 0"),
    ({"head_dim": 7}, "would turn 7 of 7"),
])  # fmt: skip
def test_fields_that_are_refused(
    change: dict[str, Any], text: str, checkpoints: CheckpointStore, tmp_path: Path
) -> None:
    path = rewrite(checkpoints["lfm3-plain"].path, tmp_path / "model", **change)
    with pytest.raises(ConfigError, match=text) as error:
        read_model_config(path)
    assert "\n" not in str(error.value)


def test_a_window_of_null_is_refused_where_layers_need_one(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    path = rewrite(checkpoints["lfm3-plain"].path, tmp_path / "model")
    text = (path / "config.json").read_text()
    (path / "config.json").write_text(text.replace('"sliding_window": 9', '"sliding_window": null'))
    with pytest.raises(ConfigError, match="sliding_window is null; with sliding_attention in layer_types it must be"):
        read_model_config(path)
