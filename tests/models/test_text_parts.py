"""The text parts of models with images or sound: which tensors are skipped, and names of fields and tensors."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hybridrt import LLM, SamplingParams, SpeculativeConfig
from hybridrt.base.errors import CheckpointError, ConfigError, RequestError
from hybridrt.models.config.read_config import read_model_config
from hybridrt.models.loading.loader import has_own_head
from tests.models.test_loader import load, skipped
from tests.models.test_models_parity import requests, rewrite
from tests.models.test_newer import texts
from tests.support.checkpoints import CheckpointStore, write
from tests.support.mtp_oracle import HEADS, write_with_head
from tests.support.seeing_checkpoints import IMAGE, SEEING, SOUND, VIDEO, lfm2_vl, nemotron_omni
from tests.support.session import Session, check_sample

# What is not of the text part, by the beginnings of keys.
OTHERS = {
    "lfm2_vl": ("model.vision_tower.", "model.multi_modal_projector."),
    "lfm3_vl": ("model.vision_tower.", "model.multi_modal_projector."),
    "minicpm_v_4_6": ("model.vision_tower.", "model.merger."),
    "minicpm_v_4_7": ("model.vision_tower.", "model.merger."),
    "nemotron_omni": ("vision_model.", "mlp1."),
}
TOKENS = {"lfm2_vl": {IMAGE}, "nemotron_omni": {IMAGE, VIDEO, SOUND}}


def edit(path: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    save_file(change(load_file(path / "model.safetensors")), path / "model.safetensors")


@pytest.mark.parametrize("name", SEEING)
def test_what_is_not_text_is_skipped_by_name(name: str, checkpoints: CheckpointStore, tmp_path: Path) -> None:
    path = checkpoints[f"seeing-{name}"].path
    keys = load_file(path / "model.safetensors").keys()
    assert set(skipped(path)) == {key for key in keys if key.startswith(OTHERS[name])} != set()
    assert {key.startswith(begin) for begin in OTHERS[name] for key in skipped(path)} == {True, False}
    strange = rewrite(path, tmp_path / "model")
    edit(strange, lambda tensors: tensors | {"model.other_tower.weight": torch.ones(2)})
    with pytest.raises(CheckpointError, match=r"nothing consumes: model\.other_tower\.weight"):
        load(strange)


@pytest.mark.parametrize("name", SEEING)
def test_placeholders_of_images_and_sound_are_known(name: str, checkpoints: CheckpointStore, tmp_path: Path) -> None:
    path = checkpoints[f"seeing-{name}"].path
    assert read_model_config(path).image_tokens.keys() == TOKENS.get(name, {IMAGE, VIDEO})


def test_prompts_with_placeholders_are_refused(checkpoints: CheckpointStore) -> None:
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    with LLM(str(checkpoints["seeing-nemotron_omni"].path), device="cpu", max_model_len=64) as llm:
        with pytest.raises(RequestError, match=rf"token {SOUND} \(audio_token_id\)"):
            llm.generate([[5, SOUND, 6]], params)
        assert len(llm.generate([[5, 6]], params)[0].token_ids) == 2


@pytest.mark.parametrize(
    ("name", "tokens"),
    [("lfm2_vl", {396}), ("lfm3_vl", {125030, 125029}), ("minicpm_v_4_6", set()), ("nemotron_omni", set())],
)
def test_placeholders_that_a_file_leaves_out(
    name: str, tokens: set[int], checkpoints: CheckpointStore, tmp_path: Path
) -> None:
    """transformers' defaults."""
    gone = dict.fromkeys(("image_token_id", "video_token_id", "audio_token_id"))
    path = rewrite(checkpoints[f"seeing-{name}"].path, tmp_path / "model", **gone)
    assert read_model_config(path).image_tokens.keys() == tokens


def test_nemotron_nano_omni_as_published(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    """Older names of fields and the published name of the architecture; tensors of sound are skipped too."""
    checkpoint = checkpoints["seeing-nemotron_omni"]
    fields = json.loads((checkpoint.path / "config.json").read_text())
    names = {
        "text_config": "llm_config", "image_token_id": "img_context_token_id",
        "video_token_id": "video_context_token_id", "audio_token_id": "sound_context_token_id",
    }  # fmt: skip
    older: dict[str, Any] = {older: fields[name] for name, older in names.items()} | dict.fromkeys(names)
    published = {
        "architectures": ["NemotronH_Nano_Omni_Reasoning_V3"],
        "model_type": "NemotronH_Nano_Omni_Reasoning_V3",
    }
    path = rewrite(checkpoint.path, tmp_path / "model", **older, **published)
    sound = {"sound_encoder.encoder.layers.0.weight": torch.ones(2), "sound_projection.norm.weight": torch.ones(2)}
    edit(path, lambda tensors: tensors | sound)
    assert read_model_config(path).image_tokens.keys() == {IMAGE, VIDEO, SOUND}
    assert sound.keys() <= set(skipped(path))
    check_sample(checkpoint, Session(path).run(requests(9, steps=6))[0], "published")


def test_older_names_of_the_tower_of_minicpm_v(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    path = rewrite(checkpoints["seeing-minicpm_v_4_6"].path, tmp_path / "model")
    older = {f"model.{name}.weight": torch.ones(2) for name in ("vpm.encoder.layers.0.fc1", "vit_merger.linear_1")}
    edit(path, lambda tensors: tensors | older)
    assert older.keys() <= set(skipped(path))


def test_a_null_of_an_older_name_hides_no_field(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    path = rewrite(checkpoints["seeing-nemotron_omni"].path, tmp_path / "model")
    fields = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(fields | {"llm_config": None, "img_context_token_id": 7}))
    assert read_model_config(path).image_tokens.keys() == {7, VIDEO, SOUND}


@pytest.mark.parametrize(("older", "tied"), [({"tie_embedding": True}, True), ({"tie_embedding": False}, False)])
def test_the_older_name_of_the_tie_next_to_the_text_part(older: dict[str, bool], tied: bool, tmp_path: Path) -> None:
    write(lfm2_vl(tied=not tied), tmp_path / "saved")
    path = rewrite(tmp_path / "saved", tmp_path / "model", **older)
    assert read_model_config(path).tie_word_embeddings is tied


def test_a_head_of_its_own_below_the_language_model(tmp_path: Path) -> None:
    write(nemotron_omni(), tmp_path)
    assert has_own_head(tmp_path)
    tied = "language_model.backbone.embeddings.weight"
    edit(tmp_path, lambda tensors: tensors | {"language_model.lm_head.weight": tensors[tied].clone()})
    assert not has_own_head(tmp_path)


@pytest.mark.parametrize(
    ("head", "architecture", "keys"),
    [
        ("qwen35", "MiniCPMV4_7ForConditionalGeneration", {"model.": "model.language_model."}),
        ("nemotron", "NemotronH_Omni_Reasoning_V3", {"": "language_model."}),
    ],
)
def test_a_prediction_head_changes_no_text(head: str, architecture: str, keys: dict[str, str], tmp_path: Path) -> None:
    write_with_head(HEADS[head], tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], "text_config": text}))
    ((begin, wrapped),) = keys.items()
    edit(
        tmp_path,
        lambda tensors: {
            wrapped + key.removeprefix(begin) if key.startswith(begin) else key: t for key, t in tensors.items()
        },
    )
    assert texts(tmp_path, speculative=SpeculativeConfig("mtp", num_draft_tokens=2)) == texts(tmp_path)


@pytest.mark.parametrize(("name", "change", "text"), [
    ("lfm2_vl", {"text_config": {"model_type": "lfm2_moe"}}, "model_type is 'lfm2_moe'"),
    ("lfm3_vl", {"text_config": None}, "text_config is None; it must describe the model's text part"),
    ("minicpm_v_4_7", {"text_config": {"model_type": "qwen3"}}, "model_type is 'qwen3'"),
    ("nemotron_omni", {"llm_config": 3}, "text_config is 3"),
    ("nemotron_omni", {"audio_token_id": "x"}, "audio_token_id is 'x'"),
])  # fmt: skip
def test_files_that_are_refused(
    name: str, change: dict[str, Any], text: str, checkpoints: CheckpointStore, tmp_path: Path
) -> None:
    path = rewrite(checkpoints[f"seeing-{name}"].path, tmp_path / "model", **change)
    with pytest.raises(ConfigError, match=text):
        read_model_config(path)
