"""Damages that leave a checkpoint usable: numbers of the usual size, other ends of answers, old files."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hybridrt.models.loading.shards import shards_of
from hybridrt.verify.files import check_config, check_hashes, check_tensors
from hybridrt.verify.results import FAILED, PASSED, WARNED, Result
from hybridrt.verify.rope import check_rope
from hybridrt.verify.subject import Subject
from hybridrt.verify.tensor_judge import judge
from hybridrt.verify.tensor_stats import scan
from hybridrt.verify.text import check_template, check_tokenizer
from tests.support import damages
from tests.support.checkpoints import CheckpointStore
from tests.verify.test_damages import checked, found

LAYERS = 6


def judged(folder: Path, name: str, tensors: list[Tensor]) -> Result:
    """Of the same tensor in some layers."""
    named = {f"model.layers.{i}.{name}": tensor.clone() for i, tensor in enumerate(tensors)}
    save_file(named, folder / "model.safetensors", {"format": "pt"})
    result = Result("tensors")
    judge(list(scan(shards_of(folder), sampled=False)), result)
    return result


def test_the_one_that_differs_where_all_are_equal_is_named(tmp_path: Path) -> None:
    norms = [torch.ones(8)] * LAYERS
    assert judged(tmp_path, "norm.weight", norms).findings == []
    norms[3] = 1.05 * torch.ones(8)
    result = judged(tmp_path, "norm.weight", norms)
    assert "model.layers.3.norm.weight differs from model.layers.0.norm" in result.findings[0]


def test_equal_numbers_that_tell_nothing(tmp_path: Path) -> None:
    """Numbers that a model begins with, and a few that are equal by chance. Two equal matrices are copies."""
    first = torch.arange(1.0, 17.0).log().repeat(8, 1)
    assert judged(tmp_path, "A_log", [first] * LAYERS).findings == []
    torch.manual_seed(0)
    few, many = torch.rand(LAYERS, 2, 1), torch.rand(LAYERS, 16, 8)
    few[4], many[4] = few[1], many[1]
    assert judged(tmp_path, "weight_scale", list(few)).findings == []
    assert "model.layers.4.weight equals model.layers.1.weight" in found([judged(tmp_path, "weight", list(many))])


def test_another_decay_is_named(tmp_path: Path) -> None:
    torch.manual_seed(0)
    logs = [1.5 + 0.5 * torch.randn(6) for _ in range(LAYERS)]
    assert judged(tmp_path, "A_log", logs).findings == []
    logs[2] = 3 * logs[2]
    assert "model.layers.2.A_log: the mean of its numbers is" in judged(tmp_path, "A_log", logs).findings[0]


def test_a_vector_of_zeros_is_wrong_where_no_other_is(tmp_path: Path) -> None:
    torch.manual_seed(0)
    steps = list(torch.rand(LAYERS, 6))
    steps[1] = torch.zeros(6)
    result = judged(tmp_path, "dt_bias", steps)
    assert result.status == FAILED and "model.layers.1.dt_bias holds zeros alone" in result.findings[0]
    zeros = [torch.zeros(6)] * (LAYERS - 1) + [torch.ones(6)]
    findings = judged(tmp_path, "norm.weight", zeros).findings
    assert len(findings) == 1 and findings[0].startswith("warned: model.layers.5.norm.weight differs")


@pytest.mark.parametrize(("bit", "seen"), [(14, True), (3, False)])
def test_one_bit_of_one_expert(tmp_path: Path, bit: int, seen: bool) -> None:
    """The first bit of an exponent makes a number that none of its siblings has. A mantissa is left to hashes."""
    torch.manual_seed(0)
    experts = [(0.02 * torch.randn(32, 48)).to(torch.bfloat16) for _ in range(LAYERS)]
    assert judged(tmp_path, "experts.5.up_proj.weight", experts).findings == []
    experts[4].view(torch.int16).view(-1)[777] ^= 1 << bit
    findings = judged(tmp_path, "experts.5.up_proj.weight", experts).findings
    assert bool(findings) == seen and all("model.layers.4.experts.5.up_proj.weight" in line for line in findings)


@pytest.fixture
def sound(checkpoints: CheckpointStore, tmp_path: Path) -> Path:
    path = damages.copied(checkpoints["falcon-plain"].path, tmp_path / "model")
    # Its vocabulary is as large as its tokenizer's.
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    size = json.loads((path / "config.json").read_text())["vocab_size"]
    words.update({f"word{i}": i for i in range(len(words), size)})
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return path


def test_weights_in_another_dtype(sound: Path) -> None:
    assert checked(sound, check_config, check_tensors)[1].status == PASSED
    tensors = {key: t.half() for key, t in load_file(sound / "model.safetensors").items()}
    save_file(tensors, sound / "model.safetensors", {"format": "pt"})
    assert "dtype is float32; most numbers are stored as float16" in found(checked(sound, check_config, check_tensors))


def test_an_end_of_answers_that_is_off_by_one(sound: Path) -> None:
    damages.change_config(sound, lambda raw: raw.update(eos_token_id=[3]))
    assert "eos_token_id is [3], and [2] in generation_config.json" in found(checked(sound, check_config))
    (sound / "generation_config.json").unlink()
    damages.change_config(sound, lambda raw: raw.update(eos_token_id=9))
    results = checked(sound, check_config, check_tokenizer, check_template)
    assert re.search(r"eos_token_id 9 ends answers, and is '[a-z]', an ordinary token of texts", found(results))
    assert results[2].status == FAILED and "'<|im_end|>', which ends no answer" in found(results)


def test_a_tokenizer_of_another_size(sound: Path) -> None:
    assert "Is the tokenizer of another model" not in found(checked(sound, check_config, check_tokenizer))
    damages.with_tokenizer(sound)
    assert "the model can give tokens without a text" in found(checked(sound, check_config, check_tokenizer))


@pytest.mark.parametrize(("template", "told"), [
    ("", "it is empty"),
    ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", "it writes no special token, and the "
     "vocabulary has <|im_start|>"),
])  # fmt: skip
def test_a_template_without_turns(sound: Path, template: str, told: str) -> None:
    (sound / "chat_template.jinja").write_text(template)
    assert told in found(checked(sound, check_config, check_tokenizer, check_template))


def test_weights_that_the_index_leaves_out(sound: Path) -> None:
    keys = load_file(sound / "model.safetensors").keys()
    index = {"weight_map": dict.fromkeys(keys, "model.safetensors")}
    (sound / "model.safetensors.index.json").write_text(json.dumps(index))
    assert checked(sound, check_config, check_hashes)[1].status == PASSED
    save_file({"x": torch.ones(2)}, sound / "model-00002-of-00002.safetensors")
    assert "model-00002-of-00002.safetensors is not in model.safetensors.index.json" in found(
        checked(sound, check_config, check_hashes)
    )


@pytest.mark.parametrize(("model", "change", "told"), [
    ("falcon-plain", {"rope_theta": 1e11}, ""),  # as published
    ("falcon-plain", {"rope_theta": 1e10}, "rope_theta is 1e+10"),
    ("falcon-plain", {"rope_type": "linear", "factor": 8.0}, "rope_type is linear"),
    ("qwen35-plain", {"partial_rotary_factor": 1.0}, "partial_rotary_factor is 1"),
])  # fmt: skip
def test_an_unusual_rope_is_a_doubt(
    checkpoints: CheckpointStore, tmp_path: Path, model: str, change: dict[str, Any], told: str
) -> None:
    path = damages.copied(checkpoints[model].path, tmp_path / "model")
    damages.change_config(path, lambda raw: raw["rope_parameters"].update({"partial_rotary_factor": None} | change))
    subject, result = Subject(str(path), device="cpu", quick=True), Result("rope")
    check_config(subject, Result("config"))
    check_rope(subject, result)
    assert result.status == (WARNED if told else PASSED) and told in found([result]), result.findings
