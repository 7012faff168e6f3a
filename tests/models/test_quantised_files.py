"""Files next to config.json that tell of quantisation, and GGUF: what is not read is refused by its name everywhere."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hybridrt import LLM
from hybridrt.base.errors import ConfigError, UnsupportedModelError
from hybridrt.cli.app import app
from hybridrt.models.config.read_config import read_model_config
from tests.support.tiny import write_tiny

COMMANDS = [
    ("inspect", "MODEL"),
    ("generate", "--model", "MODEL", "hello"),
    ("generate", "--model", "MODEL", "--chat", "hello"),
    ("generate", "--model", "MODEL", "--load-format", "dummy", "hello"),
    ("serve", "MODEL", "--port", "0"),
    ("chat", "MODEL"),
    ("bench", "offline", "--model", "MODEL"),
]


def refusals(model: str) -> list[str]:
    """What each way in says, without the class of the error."""
    said = []
    for command in COMMANDS:
        result = CliRunner().invoke(app, [model if word == "MODEL" else word for word in command])
        assert result.exit_code == 2, result.output
        said.append(result.stderr)
    with pytest.raises(UnsupportedModelError) as error:
        LLM(model, device="cpu")
    return [*said, str(error.value)]


def with_quant_file(folder: Path, written: Any) -> Path:
    path = write_tiny(folder)
    (path / "hf_quant_config.json").write_text(json.dumps(written))
    return path


@pytest.mark.parametrize("algorithm", ["INT8_SQ", "W4A8_AWQ"])
def test_a_quantised_checkpoint_is_refused_by_its_file(tmp_path: Path, algorithm: str) -> None:
    quantization = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8"}
    path = with_quant_file(tmp_path, {"producer": {"name": "modelopt"}, "quantization": quantization})
    for said in refusals(str(path)):
        assert "hf_quant_config.json: quant_algo is" in said and algorithm in said


@pytest.mark.parametrize(
    ("written", "error", "text"),
    [
        ({"quantization": {"quant_algo": ["x"] * 99}}, ConfigError, "quant_algo"),
        ({"quantization": "FP8"}, ConfigError, "must be an object with quant_algo"),
        ({}, ConfigError, "must be an object with quant_algo"),
        ([], ConfigError, "hf_quant_config.json"),
    ],
)
def test_other_quant_files(tmp_path: Path, written: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        read_model_config(with_quant_file(tmp_path, written))


def test_a_quant_file_that_names_no_algorithm_changes_nothing(tmp_path: Path) -> None:
    assert read_model_config(with_quant_file(tmp_path, {"quantization": {"quant_algo": None}})).quant is None


@pytest.mark.parametrize("name", ["model.gguf", "./model-Q4_K_M.GGUF", "org/some-model-GGUF", "org/repo/model.gguf"])
def test_gguf_is_refused_by_its_name_before_anything_is_downloaded(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(*_: object, **__: object) -> str:
        raise AssertionError("nothing is downloaded")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"GGUF\3\0\0\0")
    for said in refusals(name):
        assert f"{name} is a model in the format GGUF" in said


@pytest.mark.parametrize("config", [True, False])
def test_a_directory_of_gguf_is_refused_by_its_file(tmp_path: Path, config: bool) -> None:
    if config:
        write_tiny(tmp_path)
    (tmp_path / "model-Q4.gguf").write_bytes(b"GGUF\3\0\0\0")
    with pytest.raises(UnsupportedModelError, match=r"model-Q4\.gguf is a model in the format GGUF"):
        read_model_config(tmp_path)


def test_a_checkpoint_next_to_a_gguf_file_is_read(tmp_path: Path) -> None:
    path = write_tiny(tmp_path)
    for name in ("model.gguf", "model.safetensors"):
        (path / name).write_bytes(b"")
    assert read_model_config(path).layers
