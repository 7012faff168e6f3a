"""Options that take one of some words: a wrong word is refused before the model is looked for, or downloaded."""

from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from hybridrt import LLM, EngineConfig, SpeculativeConfig
from hybridrt.base.errors import BackendError, ConfigError, DeviceError, ProviderNotInstalledError
from hybridrt.cli.app import app
from hybridrt.collectives.groups import TPGroup
from hybridrt.runtime.load import build_model, model_path
from hybridrt.runtime.load.load_target import load_target

COMMANDS = ("serve", "generate", "chat", "bench offline")
# They name what plug-ins may bring.
NAMES = (
    "--attention-backend", "--prefill-attention-backend", "--linear-attn-backend", "--tool-parser",
    "--reasoning-parser",
)  # fmt: skip
NO_MODEL = "/no/such/model"


def _options() -> Iterator[tuple[str, str]]:
    """Each command with each of its options that has alternatives."""
    for line in COMMANDS:
        command: Any = get_command(app)
        for word in line.split():
            command = command.commands[word]
        for option in command.params:
            words = (option.metavar or "").split("|")
            closed = len(words) > 1 and "FILE" not in words
            if option.param_type_name == "option" and (closed or option.opts[0] in NAMES):
                yield line, option.opts[0]


@pytest.mark.parametrize(("command", "option"), list(_options()))
def test_a_wrong_word_is_refused_before_anything_is_read(
    command: str, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_path, "find_checkpoint", None)
    model = ["--model", NO_MODEL] if command in ("generate", "bench offline") else [NO_MODEL]
    prompt = ["x"] if command == "generate" else []
    found = CliRunner().invoke(app, [*command.split(), *model, option, "zzz", *prompt])
    text = option.lstrip("-").replace("-", " ") if option.endswith("parser") else option
    assert found.exit_code == 2 and text in found.stderr and "zzz" in found.stderr, found.output


def test_all_options_of_an_engine_with_alternatives_are_there() -> None:
    found = {option for command, option in _options() if command == "serve"}
    assert found >= {"--dtype", "--state-mode", "--speculative", "--log-level", "--role", *NAMES}, found


@pytest.mark.parametrize(
    "field",
    ["device", "dtype", "load_format", "quantization", "mamba_ssm_dtype", "mamba_ssm_rounding", "kv_cache_dtype",
     "kv_scales", "state_mode", "attention_backend", "prefill_attention_backend", "linear_attn_backend",
     "target_itl_ms"],
)  # fmt: skip
def test_so_does_the_api(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_path, "find_checkpoint", None)
    with pytest.raises((ConfigError, BackendError), match=rf"^{field} .*zzz.* (must be|supported are)"):
        LLM(NO_MODEL, **{field: "zzz"})  # type: ignore[arg-type]


def test_a_gpu_that_is_not_there_is_refused_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_path, "find_checkpoint", None)
    with pytest.raises(DeviceError, match="torch sees"):
        LLM(NO_MODEL, device="cuda:99")
    with pytest.raises(ConfigError, match="'nope' is not supported"):
        SpeculativeConfig("nope")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"attention_backend": "fa3"}, "fa3.*which is|'fa3' cannot serve"),
        ({"prefill_attention_backend": "flashinfer"}, "flashinfer.*which is|'flashinfer' cannot serve"),
        ({"linear_attn_backend": "gdn"}, "the model has mamba2 layers"),
    ],
)
def test_a_backend_that_cannot_serve_is_refused_before_weights_are_read(
    given: dict[str, str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_model, "empty_model", None)
    monkeypatch.setattr(build_model, "load_or_map", None)
    config = EngineConfig("embedded", device="cpu", **given)  # type: ignore[arg-type]
    path, target = load_target(config, TPGroup())
    with pytest.raises((BackendError, ProviderNotInstalledError), match=text):
        build_model.build_model(config, target, path, False)
