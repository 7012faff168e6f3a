"""Python code of a checkpoint, named wherever transformers looks for some: it never runs, and is never offered."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hybridrt import LLM
from hybridrt.base.errors import CheckpointError, ConfigError, HybridrtError, UnsupportedModelError
from hybridrt.cli.app import app
from tests.support.tiny import CHAT_TEMPLATE, write_tiny

CODE = """
from pathlib import Path
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
Path({marker!r}).write_text("ran")
class TrapConfig(PretrainedConfig):
    model_type = "trap"
class TrapModel(PreTrainedModel):
    config_class = TrapConfig
class TrapTokenizer(PreTrainedTokenizerFast):
    pass
def generate(*arguments, **named): pass
"""
CONFIG_CODE = {"AutoConfig": "trap.TrapConfig", "AutoModel": "trap.TrapModel", "AutoModelForCausalLM": "trap.TrapModel"}
OWN, TOKENIZER = "config.json", "tokenizer_config.json"
# What is written into which file, and the error; None: the code is not needed, and the model runs.
TRAPS: dict[str, tuple[dict[str, dict[str, Any]], type[HybridrtError] | None, str]] = {
    "architecture": (
        {OWN: {"architectures": ["TrapModel"], "model_type": "trap", "auto_map": CONFIG_CODE}},
        UnsupportedModelError,
        "asks for trust_remote_code=True: auto_map names Python code",
    ),
    "model_type": ({OWN: {"model_type": "trap", "auto_map": CONFIG_CODE}}, ConfigError, "model_type is 'trap'"),
    "known_architecture": ({OWN: {"auto_map": CONFIG_CODE}}, None, ""),
    "elsewhere": ({OWN: {"auto_map": {"AutoConfig": "someone/else--trap.TrapConfig"}}}, None, ""),
    "tokenizer": (
        {TOKENIZER: {"tokenizer_class": "TrapTokenizer", "auto_map": {"AutoTokenizer": ["trap.TrapTokenizer"] * 2}}},
        CheckpointError,
        "the tokenizer in .* asks for trust_remote_code=True",
    ),
    "known_tokenizer": ({TOKENIZER: {"auto_map": {"AutoTokenizer": [None, "trap.TrapTokenizer"]}}}, None, ""),
    "tokenizer_is_a_model": (
        {OWN: {"auto_map": CONFIG_CODE}, TOKENIZER: {"tokenizer_class": "AutoModelForCausalLM"}},
        CheckpointError,
        "which is no tokenizer",
    ),
    "tokenizer_of_the_config": (
        {OWN: {"auto_map": CONFIG_CODE, "tokenizer_class": "AutoModel"}, TOKENIZER: {"tokenizer_class": None}},
        CheckpointError,
        "which is no tokenizer",
    ),
}


@pytest.fixture(params=TRAPS)
def trap(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, str]:
    """A checkpoint whose code writes a file, and which trap it is; "y" waits on standard input."""
    path = write_tiny(tmp_path / "model", chat_template=CHAT_TEMPLATE)
    for place in (path, path / "custom_generate"):
        place.mkdir(exist_ok=True)
        for name in ("trap.py", "generate.py", "torch.py"):
            (place / name).write_text(CODE.format(marker=str(tmp_path / "ran")))
    for file, fields in TRAPS[request.param][0].items():
        (path / file).write_text(json.dumps(json.loads((path / file).read_text()) | fields))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    return path, request.param


def test_code_of_a_checkpoint_never_runs(
    trap: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, name = trap
    _, error, text = TRAPS[name]
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 20))
    if error is None:
        LLM(str(path), device="cpu", load_format="dummy", max_running_requests=2).close()
    else:
        with pytest.raises(error, match=text):
            LLM(str(path), device="cpu", load_format="dummy", max_running_requests=2)
    assert not (path.parent / "ran").exists(), "code of the checkpoint ran"
    assert sys.stdin.read() == "y\n" * 20 and "[y/N]" not in capsys.readouterr().out, "a question was asked"


@pytest.mark.parametrize("arguments", [("inspect",), ("generate", "x", "--chat", "--max-tokens", "1", "--model")])
def test_no_command_asks_or_runs_code(trap: tuple[Path, str], arguments: tuple[str, ...]) -> None:
    path, name = trap
    more = ["--load-format", "dummy", "--device", "cpu", "--max-running-requests", "2"]
    result = CliRunner().invoke(app, [*arguments, str(path), *more], input="y\n" * 20)
    _, error, _ = TRAPS[name]
    needs_tokenizer = error is CheckpointError
    assert result.exit_code == (0 if error is None or (needs_tokenizer and arguments[0] == "inspect") else 2)
    assert result.stderr.count("\n") == (result.exit_code != 0)
    assert not (path.parent / "ran").exists(), "code of the checkpoint ran"
    assert "[y/N]" not in result.output
