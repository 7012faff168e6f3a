"""Prepared weights: a later start maps them and gives the same tokens; what is damaged or other is refused."""

import json
import os
import resource
from pathlib import Path

import pytest
import torch
from torch import nn

from hybridrt.base.errors import CheckpointError
from hybridrt.base.files_safetensors import TensorFile
from hybridrt.engine.api.llm import LLM
from hybridrt.models.loading.prepared_weights import VARIABLE, PreparedWeights
from hybridrt.runtime.load import build_model
from tests.support.checkpoints import CheckpointStore
from tests.support.session import greedy

PROMPTS = [[5, 6, 7, 8], [9] * 20]
SLOW = ("nemotron-experts", "qwen-plain", "lfm3-plain", "swa_ssm-plain", "gpt_oss-plain")
FAMILIES = ("falcon-all_biases", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW))


def tokens(path: Path, **options: object) -> list[list[int]]:
    given = {"device": "cpu", "max_model_len": 128, "max_running_requests": 4} | options
    with LLM(str(path), **given) as llm:
        return [list(output.token_ids) for output in llm.generate(PROMPTS, greedy(12))]


@pytest.fixture
def prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "prepared"))
    return tmp_path / "prepared"


def files(prepared: Path) -> list[Path]:
    return sorted(prepared.iterdir()) if prepared.exists() else []


@pytest.mark.parametrize("name", FAMILIES)
def test_a_later_start_loads_nothing(
    name: str, checkpoints: CheckpointStore, prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoints[name].path
    expected = tokens(path)
    (file,) = files(prepared)

    def fail(*arguments: object) -> None:
        raise AssertionError("the checkpoint is loaded")

    monkeypatch.setattr(build_model, "load_weights", fail)
    assert tokens(path) == expected and files(prepared) == [file]


def test_other_files_and_dtypes_are_prepared_anew(checkpoints: CheckpointStore, prepared: Path) -> None:
    path = checkpoints["falcon-plain"].path
    tokens(path)
    tokens(path, dtype="bfloat16")
    assert len(files(prepared)) == 2
    weights = next(path.glob("*.safetensors"))
    found = weights.stat()
    os.utime(weights, ns=(found.st_atime_ns, found.st_mtime_ns + 1))
    tokens(path)
    assert len(files(prepared)) == 3


@pytest.mark.parametrize("damage", ["cut", "other"])
def test_a_damaged_file_is_refused(damage: str, checkpoints: CheckpointStore, prepared: Path) -> None:
    path = checkpoints["falcon-plain"].path
    tokens(path)
    (file,) = files(prepared)
    data = file.read_bytes()
    file.write_bytes(data[:-8] if damage == "cut" else data.replace(b".0.", b".9.", 1))
    with pytest.raises(CheckpointError, match="prepared"):
        tokens(path)


def test_a_directory_that_cannot_be_written_is_said(
    checkpoints: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv(VARIABLE, str(blocked))
    tokens(checkpoints["falcon-plain"].path)
    assert "prepared weights cannot be written" in caplog.text


@pytest.mark.parametrize("under", ["file", "locked"])
def test_a_directory_that_cannot_be_made_is_said(
    under: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")

    def refuse(*arguments: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    if under == "locked":  # root may write everywhere
        monkeypatch.setattr(os, "mkdir", refuse)
    prepared, model = PreparedWeights(tmp_path / under / "prepared", [], ""), nn.Linear(2, 2)
    assert not prepared.load(model)
    prepared.save(model)
    assert "prepared weights cannot be written" in caplog.text


def test_a_full_disk_leaves_no_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The last tensors are written when the buffer is flushed."""
    prepared, model = PreparedWeights(tmp_path, [], ""), nn.Linear(8, 3)
    prepared.save(model)
    size, (soft, hard) = prepared.file.stat().st_size, resource.getrlimit(resource.RLIMIT_FSIZE)
    prepared.file.unlink()
    resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1, hard))
    try:
        prepared.save(model)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "cannot be written" in caplog.text and files(tmp_path) == []


def test_a_file_is_whole_when_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared, model, replace = PreparedWeights(tmp_path, [], ""), nn.Linear(8, 3), os.replace
    seen: list[torch.Tensor] = []

    def read(source: str, target: Path) -> None:
        with TensorFile(Path(source), 4096) as file:
            seen.append(file.read("bias"))
        replace(source, target)

    monkeypatch.setattr(os, "replace", read)
    prepared.save(model)
    assert torch.equal(seen[0], model.bias)


def test_the_file_that_was_checked_is_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared, model, other = PreparedWeights(tmp_path, [], ""), nn.Linear(8, 3), nn.Linear(8, 3)
    prepared.save(model)
    mapped = TensorFile.mapped

    def replaced(file: TensorFile) -> torch.Tensor:
        (tmp_path / "short").write_bytes(b"")
        os.replace(tmp_path / "short", prepared.file)
        return mapped(file)

    monkeypatch.setattr(TensorFile, "mapped", replaced)
    assert prepared.load(other) and torch.equal(other.weight, model.weight)


def test_tensors_at_odd_places_are_refused(tmp_path: Path) -> None:
    prepared, model = PreparedWeights(tmp_path, [], ""), nn.Linear(8, 3)
    prepared.save(model)
    data = prepared.file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    text = json.dumps(json.loads(data[8 : 8 + length])).encode()
    text += b" " * (1 + -len(text) % 64)
    prepared.file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    with pytest.raises(CheckpointError, match="delete it"):
        prepared.load(model)
