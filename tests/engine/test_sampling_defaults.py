"""Requests that say nothing are sampled as the checkpoint's generation_config.json says, in Python and on the command
line."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hybridrt import LLM, CheckpointError, SamplingParams
from hybridrt.cli.app import app
from hybridrt.engine.api.sampling_defaults import default_sampling_params
from tests.support.levels import sweep
from tests.support.tiny import write_tiny

PROMPT = "def f():"


def write(path: Path, text: str) -> Path:
    (path / "generation_config.json").write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        (None, {"temperature": 1.0}),
        ("{}", {"temperature": 1.0}),
        ('{"eos_token_id": 3, "do_sample": true}', {"temperature": 1.0}),
        ('{"temperature": 0.7}', {"temperature": 0.7}),
        ('{"do_sample": true, "temperature": 0.7, "top_p": 0.9, "top_k": null}', {"temperature": 0.7, "top_p": 0.9}),
        ('{"do_sample": false}', {"temperature": 0.0}),
        ('{"do_sample": false, "temperature": 0.7, "top_p": 0.9}', {"temperature": 0.0, "top_p": 0.9}),
        (
            '{"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1}',
            {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1},
        ),
        ('{"max_new_tokens": 9, "stop_strings": ["a"]}', {"max_tokens": 9, "stop": ["a"]}),
    ],
)
def test_the_file_gives_the_defaults(tmp_path: Path, text: str | None, fields: dict[str, Any]) -> None:
    if text is not None:
        write(tmp_path, text)
    assert default_sampling_params(tmp_path) == SamplingParams(**fields)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ("[]", "holds a list; it must be"),
        ("5", "holds a int; it must be"),
        ('{"temperature": NaN}', "temperature is nan"),
        ('{"temperature": "hot"}', "temperature is 'hot'"),
        ('{"top_k": 2147483648}', "top_k is 2147483648"),
        ('{"top_p": {}}', "top_p is {}"),
        ('{"do_sample": "no"}', "do_sample is 'no'"),
        ('{"max_new_tokens": -1}', "max_tokens is -1"),
        ('{"stop_strings": 5}', "stop is 5"),
    ],
)
def test_a_file_that_is_no_default_is_a_typed_error_that_names_it(tmp_path: Path, text: str, error: str) -> None:
    with pytest.raises(CheckpointError) as info:
        default_sampling_params(write(tmp_path, text))
    assert str(info.value).startswith(str(tmp_path / "generation_config.json")) and error in str(info.value)
    (tmp_path / "generation_config.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(CheckpointError, match="is not valid JSON"):
        default_sampling_params(tmp_path)


def command_line(path: Path, *options: str) -> list[int]:
    line = ["generate", "--model", str(path), "--load-format", "dummy", "--device", "cpu", "--json", *options, PROMPT]
    result = CliRunner().invoke(app, [*line, "--max-model-len", "64"])
    assert result.exit_code == 0, result.output
    ids: list[int] = json.loads(result.stdout)["token_ids"]
    return ids


@pytest.mark.parametrize(
    "generation", sweep([{"temperature": 2.0, "top_k": 50, "max_new_tokens": 12}, {}, {"do_sample": False}], 3)
)
def test_python_and_the_command_line_sample_alike(tmp_path: Path, generation: dict[str, Any]) -> None:
    path = write_tiny(tmp_path, generation={"eos_token_id": 2} | generation)
    options: dict[str, Any] = dict(load_format="dummy", device="cpu", max_model_len=64)
    with LLM(str(path), **options) as llm:
        assert llm.default_sampling_params == default_sampling_params(path)
        generated = llm.generate(PROMPT)[0].token_ids
    with LLM(str(path), **options) as llm:
        streamed = [t for delta in llm.stream(PROMPT) for t in delta.token_ids]
    with LLM(str(path), **options) as llm:
        passed = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=7))[0].token_ids
    assert generated == streamed == command_line(path)
    assert (generated[:7] == passed) == (generation == {"do_sample": False}), "what is passed stands as it is"
    assert command_line(path, "--temperature", "0", "--max-tokens", "7") == passed, "options override single fields"


def test_options_override_single_fields_alone(tmp_path: Path) -> None:
    path = write_tiny(tmp_path, generation={"temperature": 2.0, "top_k": 3, "max_new_tokens": 12})
    with LLM(str(path), load_format="dummy", device="cpu", max_model_len=64) as llm:
        want = llm.generate(PROMPT, SamplingParams(temperature=2.0, top_k=3, max_tokens=5))[0].token_ids
    assert command_line(path, "--max-tokens", "5") == want


def test_the_built_in_model_samples() -> None:
    """Its greedy text repeats itself (docs/embedded-model.md)."""
    from hybridrt.runtime.load.model_path import ASSETS

    assert default_sampling_params(ASSETS / "embedded") == SamplingParams(temperature=0.8, top_p=0.95)
