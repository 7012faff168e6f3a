"""Trained weights that know no text are told from random ones; heads, ids and factors that no runtime reads alike."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybridrt.runtime.load.model_path import ASSETS
from hybridrt.verify import text_fit
from hybridrt.verify.files import check_config, check_keys_of
from hybridrt.verify.outputs import check_transformers
from hybridrt.verify.results import Result
from hybridrt.verify.subject import Subject
from hybridrt.verify.text import check_template, check_tokenizer
from tests.support import damages
from tests.support.checkpoints import CheckpointStore
from tests.verify.test_damages import checked, found


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    return shutil.copytree(ASSETS / "embedded", tmp_path / "model")


def with_other_tokenizer(path: Path) -> None:
    """As many tokens, in another order."""
    file = path / "tokenizer.json"
    fields = json.loads(file.read_text())
    added = {token["content"] for token in fields["added_tokens"]}
    words = [word for word in fields["model"]["vocab"] if word not in added]
    ids = [fields["model"]["vocab"][word] for word in words]
    random.Random(0).shuffle(ids)
    fields["model"]["vocab"].update(zip(words, ids))
    file.write_text(json.dumps(fields))


def with_other_head(path: Path) -> None:
    """A head of its own, of random numbers, which config.json calls tied."""
    tensors = load_file(path / "model.safetensors")
    table = tensors["model.embed_tokens.weight"]
    torch.manual_seed(0)
    tensors["lm_head.weight"] = (torch.randn(table.shape) * table.float().std()).to(table.dtype)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def with_other_rows(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].roll(1, 0).contiguous()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def outputs_of(path: Path) -> Result:
    subject, result = Subject(str(path), "cpu", quick=True), Result("transformers")
    check_config(subject, Result("config"))
    check_tokenizer(subject, Result("tokenizer"))
    check_transformers(subject, result)
    return result


def test_sound_weights_know_a_text(trained: Path) -> None:
    result = outputs_of(trained)
    assert result.status == "passed" and any("a text has a loss of 1.9" in note for note in result.notes)


@pytest.mark.parametrize(("damage", "status", "told"), [
    (with_other_tokenizer, "failed", "they are trained, and with another tokenizer"),
    (with_other_rows, "failed", "they are trained, and with another tokenizer, or with other embeddings"),
    (lambda path: damages.change_config(path, lambda raw: raw.update(lm_head_multiplier=4.0)), "warned", "a factor of"),
])  # fmt: skip
def test_trained_weights_that_know_no_text_are_found(
    trained: Path, damage: Callable[[Path], Any], status: str, told: str
) -> None:
    """Files, keys and numbers are fine, and both runtimes agree."""
    damage(trained)
    result = outputs_of(trained)
    assert result.status == status and told in found([result]), result.findings


def test_without_a_text_the_rest_is_compared(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python without the source of its library, or a tokenizer that knows no word of it."""
    subject = Subject(str(trained), "cpu", quick=True)
    check_config(subject, Result("config"))
    check_tokenizer(subject, Result("tokenizer"))
    assert len(text_fit.text_tokens(subject)) > 10
    with monkeypatch.context() as patched:
        patched.setattr(subject.tokenizer, "encode", lambda text: [])
        assert text_fit.text_tokens(subject) == []
    without_source = ModuleType("textwrap")
    without_source.__file__ = str(trained / "textwrap.pyc")
    monkeypatch.setattr(text_fit, "textwrap", without_source)
    assert text_fit.text_tokens(subject) == []


@pytest.mark.parametrize("name", ["falcon-plain", "zamba2-plain", "nemotron-experts"])
def test_random_weights_are_no_finding(checkpoints: CheckpointStore, tmp_path: Path, name: str) -> None:
    result = outputs_of(damages.copied(checkpoints[name].path, tmp_path / "model"))
    assert result.status == "passed", result.findings
    assert any("the weights know no text, as random ones" in note for note in result.notes)


def test_two_heads_are_named(trained: Path) -> None:
    table = load_file(trained / "model.safetensors")["model.embed_tokens.weight"]
    damages.change_tensor(trained, "model.final_layernorm.weight", lambda t: t)
    tensors = load_file(trained / "model.safetensors") | {"lm_head.weight": table.clone()}
    save_file(tensors, trained / "model.safetensors", {"format": "pt"})
    assert checked(trained, check_config, check_keys_of)[1].status == "passed"  # the same matrix twice
    with_other_head(trained)
    result = checked(trained, check_config, check_keys_of)[1]
    assert result.status == "failed" and "tie_word_embeddings is true, but the stored output head" in found([result])
    damages.change_config(trained, lambda raw: raw.update(tie_word_embeddings=False))
    assert checked(trained, check_config, check_keys_of)[1].status == "passed"


@pytest.mark.parametrize(("fields", "told"), [
    ({"pad_token_id": 4096}, "pad_token_id is 4096; vocab_size is 4096"), ({"pad_token_id": -1}, ""),
    ({"eos_token_id": [0, 70000]}, "eos_token_id is 70000"), ({"rms_norm_eps": 0.1}, "rms_norm_eps is 0.1"),
    ({"rms_norm_eps": 1e-6}, ""),
])  # fmt: skip
def test_odd_fields_are_named(trained: Path, fields: dict[str, Any], told: str) -> None:
    damages.change_config(trained, lambda raw: raw.update(fields))
    findings = found(checked(trained, check_config))
    assert told in findings and bool(findings) == bool(told)


def test_a_conversation_that_begins_twice(trained: Path) -> None:
    file = trained / "chat_template.jinja"
    file.write_text("{{ bos_token }}" + file.read_text())
    assert "twice" not in found(checked(trained, check_config, check_tokenizer, check_template))
    file.write_text("{{ bos_token }}" + file.read_text())
    told = found(checked(trained, check_config, check_tokenizer, check_template))
    assert "a conversation begins with '<|endoftext|>' twice" in told
