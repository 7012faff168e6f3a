"""Prepared weights: a later start maps them and gives the same tokens; what is damaged or other is refused."""

import os
from pathlib import Path

import pytest

from hybridrt.base.errors import CheckpointError
from hybridrt.engine.api.llm import LLM
from hybridrt.models.loading.prepared_weights import VARIABLE
from hybridrt.runtime.load import build
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

    monkeypatch.setattr(build, "load_weights", fail)
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
