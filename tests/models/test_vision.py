"""Towers of images: their embeddings are transformers', their keys are consumed, and what is refused."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hybridrt.base.errors import CheckpointError, ConfigError
from hybridrt.base.spans import EncoderInput
from hybridrt.base.vision import VisionSpec
from hybridrt.models.config.read_config import read_model_config
from tests.models.test_loader import edit, load, skipped
from tests.models.test_models_parity import rewrite
from tests.support.checkpoints import CheckpointStore

QWEN, QWEN_MOE = "qwen35-seeing_tied", "qwen35-seeing_experts"
LFM2, LFM3, OMNI = "seeing-lfm2_vl", "seeing-lfm3_vl", "seeing-nemotron_omni"
IDLE = r"model\.vision_tower\.head\..*|vision_model\..*(layer_scale\d\.lambda1|summary_idxs|video_embedder\.weight)"
GRIDS = [(4, 6), (2, 8), (4, 6), (6, 6)]
MEAN, STD = (0.4, 0.5, 0.6), (0.3, 0.25, 0.2)


def seeing(path: Path, to: Path, **processor: Any) -> Path:
    """A copy of a checkpoint, with the file of its image processor."""
    copy = rewrite(path, to)
    fields = {"image_mean": MEAN, "image_std": STD} | processor
    (copy / "preprocessor_config.json").write_text(json.dumps(fields))
    return copy


def pictures(spec: VisionSpec, grids: Sequence[tuple[int, int]]) -> list[EncoderInput]:
    rng = np.random.default_rng(0)
    numbers = [rng.integers(0, 256, (h * w, spec.patch_numbers), dtype=np.uint8) for h, w in grids]
    if spec.patch_dtype == "float32":
        numbers = [each.astype(np.float32) * 1.1 - 10 for each in numbers]
    return [EncoderInput(each, grid) for each, grid in zip(numbers, grids)]


def normalised(inputs: Sequence[EncoderInput], channel_last: bool) -> list[Tensor]:
    """Patches with their channels normed one by one."""
    mean, std = torch.tensor(MEAN), torch.tensor(STD)
    found = []
    for each in inputs:
        channels = torch.from_numpy(each.patches).float().div(255).unflatten(1, (-1, 3) if channel_last else (3, -1))
        shape = (3,) if channel_last else (3, 1)
        found.append(((channels - mean.view(shape)) / std.view(shape)).flatten(1))
    return found


def qwen_inputs(inputs: Sequence[EncoderInput]) -> tuple[Tensor, Tensor]:
    """transformers' pixels and grids. A picture repeats in time within each channel."""
    patches = torch.cat(normalised(inputs, channel_last=False)).unflatten(1, (3, 1, -1))
    grids = torch.tensor([[1, *each.grid] for each in inputs])
    return patches.expand(-1, 3, 2, -1).flatten(1), grids


def lfm2_inputs(inputs: Sequence[EncoderInput]) -> tuple[Tensor, Tensor, Tensor]:
    """transformers' padded pixels, grids and mask."""
    patches = normalised(inputs, channel_last=True)
    padded = torch.nn.utils.rnn.pad_sequence(patches, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(each), dtype=torch.long) for each in patches], True)
    return padded, torch.tensor([each.grid for each in inputs]), mask


def omni_inputs(inputs: Sequence[EncoderInput]) -> tuple[Tensor, Tensor]:
    """transformers' pixels and grids."""
    return torch.cat(normalised(inputs, channel_last=False)), torch.tensor([each.grid for each in inputs])


def features(model: Any, name: str, inputs: Sequence[EncoderInput]) -> Sequence[Tensor]:
    """Embeddings of pictures by transformers."""
    given: Any = {LFM2: lfm2_inputs, OMNI: omni_inputs}.get(name, qwen_inputs)(inputs)
    found: Sequence[Tensor] = (model if name == OMNI else model.model).get_image_features(*given).pooler_output
    return found


@pytest.mark.parametrize("name", [QWEN, pytest.param(QWEN_MOE, marks=pytest.mark.slow), LFM2, LFM3, OMNI])
@torch.no_grad()
def test_embeddings_are_those_of_transformers(name: str, checkpoints: CheckpointStore, tmp_path: Path) -> None:
    """Every key is consumed, and pictures of other sizes and in another order change nothing."""
    checkpoint = checkpoints[name]
    path = seeing(checkpoint.path, tmp_path / "model")
    model = load(path)
    assert model.config.vision is not None
    assert all(re.fullmatch(IDLE, key) for key in skipped(path))
    inputs = pictures(model.config.vision, GRIDS)
    for some in (inputs, inputs[1:2], inputs[::-1]):
        got, want = model.encode(some), features(checkpoint.model, name, some)
        for ours, theirs, each in zip(got, want, some, strict=True):
            assert ours.shape == (each.grid[0] * each.grid[1] // 4, model.config.hidden_size)
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(model.encode(inputs[:1])[0], model.encode(inputs[2:3])[0])


def test_a_tower_that_is_not_wanted_is_not_loaded(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    path = seeing(checkpoints[QWEN].path, tmp_path / "model")
    model, blind = load(path, images=True), load(path, images=False)
    assert model.tower is not None and model.config.mrope
    assert blind.tower is None and not blind.config.mrope
    assert all(key.startswith("model.visual.") for key in model.all_targets().keys() - blind.all_targets().keys())


@pytest.mark.parametrize("name", [QWEN, LFM2])
def test_without_an_image_processor_only_text_runs(name: str, checkpoints: CheckpointStore, tmp_path: Path) -> None:
    """transformers 5 writes it into processor_config.json, next to other processors."""
    path = rewrite(checkpoints[name].path, tmp_path / "model")
    assert read_model_config(path).vision is None
    (path / "processor_config.json").write_text(json.dumps({"processor_class": "X"}))
    assert read_model_config(path).vision is None
    (path / "processor_config.json").write_text(json.dumps({"image_processor": {"image_std": STD}}))
    vision = read_model_config(path).vision
    assert vision is not None and vision.std == STD and vision.mean != MEAN


def test_keys_of_the_tower_that_are_missing_or_strange(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    path = seeing(checkpoints[QWEN].path, tmp_path / "model")
    edit(path, lambda tensors: tensors.pop("model.visual.blocks.0.norm2.bias"))
    with pytest.raises(CheckpointError, match=r"1 missing: model\.visual\.blocks\.0\.norm2\.bias"):
        load(path)
    path = seeing(checkpoints[LFM2].path, tmp_path / "other")
    edit(path, lambda tensors: tensors.update({"model.vision_tower.other.probe": torch.ones(2)}))
    with pytest.raises(CheckpointError, match=r"nothing consumes: model\.vision_tower\.other\.probe"):
        load(path)


def test_older_names_of_the_tower_of_lfm2(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    path, older = (seeing(checkpoints[LFM2].path, tmp_path / name) for name in ("new", "old"))

    def rename(tensors: dict[str, Tensor]) -> None:
        for key in [key for key in tensors if key.startswith("model.vision_tower.")]:
            tensors[key.replace("vision_tower.", "vision_tower.vision_model.")] = tensors.pop(key)

    edit(older, rename)
    model, other = load(path), load(older)
    assert model.config.vision is not None
    inputs = pictures(model.config.vision, GRIDS[:1])
    assert torch.equal(model.encode(inputs)[0], other.encode(inputs)[0])


@pytest.mark.parametrize("prefix", ["", "vision_projector.", None])
@torch.no_grad()
def test_a_final_norm_of_the_tower_of_nemotron_omni(
    prefix: str | None, checkpoints: CheckpointStore, tmp_path: Path
) -> None:
    """Checkpoints with a prediction head have one; older ones leave its weights out, which are 1 and 0 then."""
    checkpoint, norm = checkpoints[OMNI], torch.nn.LayerNorm(16, eps=1e-6)
    path = with_prediction_head(seeing(checkpoint.path, tmp_path / "model"), tmp_path / "other")
    if prefix is not None:
        norm.weight.normal_(1.0, 0.3)
        norm.bias.normal_(0.0, 0.3)
        stored = {f"{prefix}vision_final_layernorm.{name}": param.data for name, param in norm.named_parameters()}
        edit(path, lambda tensors: tensors.update(stored))
    model = load(path)
    assert model.config.vision is not None
    inputs = pictures(model.config.vision, GRIDS[:2])
    checkpoint.model.vision_final_layernorm = norm
    try:
        want = features(checkpoint.model, OMNI, inputs)
    finally:
        checkpoint.model.vision_final_layernorm = None
    for ours, theirs in zip(model.encode(inputs), want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def with_prediction_head(path: Path, to: Path) -> Path:
    fields = json.loads((path / "config.json").read_text())
    return rewrite(path, to, text_config=fields["text_config"] | {"num_nextn_predict_layers": 1})


def test_a_final_norm_without_a_prediction_head_is_refused(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    path = seeing(checkpoints[OMNI].path, tmp_path / "model")
    norm = {"vision_final_layernorm.weight": torch.ones(16), "vision_final_layernorm.bias": torch.zeros(16)}
    edit(path, lambda tensors: tensors.update(norm))
    load(path)
    edit(path, lambda tensors: tensors["vision_final_layernorm.bias"].add_(1))
    with pytest.raises(CheckpointError, match=r"vision_final_layernorm\.bias is not 0 everywhere"):
        load(path)


@pytest.mark.parametrize(("name", "change", "text"), [
    (QWEN, {"deepstack_visual_indexes": [1]}, r"deepstack_visual_indexes is \[1\]; .*DeepStack.* not supported"),
    (QWEN, {"num_position_embeddings": 17}, "num_position_embeddings is 17; it must be a square"),
    (QWEN, {"out_hidden_size": 16}, "out_hidden_size is 16; it must be 32"),
    (QWEN, {"num_heads": 8}, "hidden_size is 16 and num_heads 8"),
    (QWEN, {"in_channels": 1}, "in_channels is 1; it must be 3"),
    (QWEN, {"hidden_act": "silu"}, "hidden_act is 'silu'"),
    (QWEN, {"depth": 2**20}, "depth is 1048576"),
    (LFM2, {"num_patches": 17}, "num_patches is 17; it must be a square"),
    (LFM2, {"num_attention_heads": 3}, "hidden_size is 16; it must be a multiple of num_attention_heads 3"),
    (LFM2, {"patch_size": 0}, "patch_size is 0"),
    (OMNI, {"use_swiglu_ffn": True}, "use_swiglu_ffn is True"),
    (OMNI, {"hidden_size": 32}, "hidden_size is 32; it must be .* vision_hidden_size, which is 16"),
    (OMNI, {"args": {"model": "vit_giant"}}, "model is 'vit_giant'; it must be one of vit_base"),
    (LFM3, {"layer_types": ["conv"]}, "layer_types has 1 entries; there are 3 layers"),
    (LFM3, {"num_key_value_heads": 3}, "num_attention_heads 2 and num_key_value_heads 3"),
    (LFM3, {"conv_kernel_size": 2}, "conv_kernel_size is 2; it must be an odd number"),
    (LFM3, {"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters: rope_type is 'yarn'"),
])  # fmt: skip
def test_towers_that_are_refused(
    name: str, change: dict[str, Any], text: str, checkpoints: CheckpointStore, tmp_path: Path
) -> None:
    path = seeing(checkpoints[name].path, tmp_path / "model")
    fields = json.loads((path / "config.json").read_text())
    rewritten = rewrite(path, tmp_path / "other", vision_config=fields["vision_config"] | change)
    with pytest.raises(ConfigError, match=text):
        read_model_config(rewritten)


@pytest.mark.parametrize(("change", "text"), [
    ({"image_mean": [0.5, 0.5]}, "image_mean is"),
    ({"image_std": [0.5, 0.0, 0.5]}, "image_std is"),
    ({"rescale_factor": 1.0}, "rescale_factor is 1.0; it must be 1/255"),
    ({"do_normalize": False}, "do_normalize is False"),
])  # fmt: skip
def test_processors_that_are_refused(
    change: dict[str, Any], text: str, checkpoints: CheckpointStore, tmp_path: Path
) -> None:
    path = seeing(checkpoints[QWEN].path, tmp_path / "model", **change)
    with pytest.raises(ConfigError, match=f"preprocessor_config.json: {text}"):
        read_model_config(path)


@pytest.mark.parametrize("name", [QWEN, pytest.param(LFM2, marks=pytest.mark.slow), LFM3, OMNI])
def test_slices_of_a_large_picture_are_the_whole(name: str, checkpoints: CheckpointStore, tmp_path: Path) -> None:
    tower = load(seeing(checkpoints[name].path, tmp_path / "model")).tower
    assert tower is not None
    given = pictures(tower.spec, [(6, 8)])
    slices, costs = tower.slices(given, most=5), list[int]()
    with torch.inference_mode():
        (whole,) = tower.encode(given)
        while True:
            try:
                costs.append(next(slices))
            except StopIteration as end:
                torch.testing.assert_close(end.value[0], whole, rtol=1e-5, atol=1e-5)
                break
    assert costs.pop(0) == len(given[0].patches)  # before the first block
    assert set(costs) == {5} and len(costs) > 20 * tower.spec.num_layers - 20 * len(tower.spec.convolutions)
