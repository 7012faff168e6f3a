"""Terminals, pipes and shells as they are: closed or full streams, other encodings, bytes that are no text."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from hybridrt.chat import renderer
from hybridrt.cli import app as app_module
from hybridrt.cli.app import app
from hybridrt.engine.api.llm import LLM
from tests.support.tiny import CHAT_TEMPLATE, write_tiny

COMMAND = f'{sys.executable} -c "from hybridrt.cli import main; main()"'
TINY = ("--load-format", "dummy", "--device", "cpu", "--max-running-requests", "2", "--max-tokens", "4")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"), chat_template=CHAT_TEMPLATE)


def shell(line: str, **environment: str) -> "subprocess.CompletedProcess[bytes]":
    """A line of bash, in which $H is the command line."""
    line = line.replace("$H", COMMAND)
    return subprocess.run(["bash", "-c", line], capture_output=True, env=os.environ | environment, timeout=120)


def run(model: Path, *arguments: str, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(app, ["generate", "--model", str(model), *TINY, *arguments], input=stdin)


def check_one_line(result: Result, text: str, status: int = 2) -> None:
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (status, "", 1), result.output
    assert text in result.stderr


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("$H --help >&-", b"error: standard output is closed; send it to a terminal, a file or /dev/null\n"),
        ("$H --help >/dev/full", b"error: No space left on device\n"),
        ("$H --help >/dev/full 2>/dev/full", b""),
        ("$H --help >&- 2>&-", b""),
        ("$H generate <&-", b"error: the prompt is empty, for standard input holds nothing: "),
    ],
)
def test_a_stream_that_is_closed_or_full_is_one_line(line: str, text: bytes) -> None:
    done = shell(line)
    assert done.returncode != 0 and done.stdout == b""
    assert done.stderr.startswith(text) and done.stderr.count(b"\n") == bool(text)


@pytest.mark.soak  # a table's lines go through the same stream
def test_a_full_disk_while_text_is_written_is_one_line(tiny: Path) -> None:
    done = shell(f"$H generate --model {tiny} {' '.join(TINY)} x >/dev/full")
    assert (done.returncode, done.stderr) == (1, b"error: No space left on device\n")


@pytest.mark.slow
def test_a_full_disk_while_a_table_is_written_is_one_line() -> None:
    done = shell("$H inspect --device cpu >/dev/full")
    assert (done.returncode, done.stderr) == (1, b"error: No space left on device\n")


@pytest.mark.slow
def test_without_input_errors_and_characters_text_is_still_written(tiny: Path) -> None:
    """Standard input and error are closed, and the terminal lacks the characters. No file that is opened takes the
    number of a closed stream, and a model is read from files."""
    done = shell(f"$H generate --model {tiny} {' '.join(TINY)} --echo 'é π €' <&- 2>&-", PYTHONIOENCODING="latin-1")
    assert done.returncode == 0
    assert done.stdout.startswith("é ? ?".encode("latin-1")) and done.stdout.endswith(b"\n")


def test_a_reader_that_has_gone_is_no_error_message() -> None:
    done = shell("(sleep 0.1; exec $H --help) | true; exit ${PIPESTATUS[0]}")
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.parametrize("raw", [b"a\xff", b"\xc3", b"\xed\xa0\x80"])
def test_input_that_is_no_text_is_one_line(raw: bytes, tiny: Path) -> None:
    check_one_line(run(tiny, stdin=raw), "standard input is no utf-8 text (byte ")


def test_a_prompt_with_a_lone_surrogate_is_one_line(tiny: Path) -> None:
    """How Python hands over a byte of the command line, or of input in the C locale, that is no text."""
    check_one_line(run(tiny, "text", os.fsdecode(b"a\xff")), "the prompt's character 1 is U+DCFF")


def test_a_prompt_that_is_no_text_is_refused_before_the_model_is_looked_for(tmp_path: Path) -> None:
    """It may have to be downloaded."""
    check_one_line(run(tmp_path / "none", "a", os.fsdecode(b"b\xff")), "no UTF-8")


def test_errors_with_a_lone_surrogate_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")
    monkeypatch.setattr(sys, "stderr", stderr)
    app_module._print_error("\udcff")
    stderr.flush()
    assert b"\\udcff" in stderr.buffer.getvalue()  # type: ignore[attr-defined]


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **named: object) -> None:
        raise AssertionError("weights would be read")

    monkeypatch.setattr(LLM, "__init__", refuse)


def with_template(path: Path, template: str) -> Path:
    write_tiny(path)
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
    return path


@pytest.mark.parametrize(
    "template",
    [
        "{{ nothing.at.all }}",
        "{% for %}",
        "{{ 1 / 0 }}",
        "{{ raise_exception('no users here') }}",
        "{{ messages[7].x.y }}",
    ],
)
@pytest.mark.usefixtures("no_model")
def test_a_failing_chat_template_is_one_line(template: str, tmp_path: Path) -> None:
    check_one_line(run(with_template(tmp_path, template), "--chat", "hi"), "the chat template fails")


LOOP = "{% for i in range(99999) %}"
ENDLESS = f"{LOOP * 3}{'{% endfor %}' * 3}"


@pytest.mark.soak  # tests/chat/test_chat.py has such templates in the slow level, and a template that fails is above
@pytest.mark.parametrize("template", [ENDLESS, "{{ 9 ** (9 ** 9) }}"])
@pytest.mark.usefixtures("no_model")
def test_a_chat_template_that_does_not_end_is_cut_off(
    template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renderer, "TIMEOUT_S", 1.0)
    result = run(with_template(tmp_path, template), "--chat", "hi")
    check_one_line(result, "the chat template fails (it has not ended within 1 seconds)")


@pytest.mark.usefixtures("no_model")
@pytest.mark.soak
def test_a_chat_template_that_fills_the_memory_is_cut_off(tmp_path: Path) -> None:
    result = run(with_template(tmp_path, "{{ 'ab' * (2 ** 30) }}"), "--chat", "hi")
    check_one_line(result, "the chat template fails (it needs too much memory")


@pytest.mark.usefixtures("no_model")
def test_a_missing_chat_template_is_said_before_weights_are_read(tmp_path: Path) -> None:
    check_one_line(run(write_tiny(tmp_path / "a"), "--chat", "hi"), "the model brings no chat template")
    check_one_line(run(write_tiny(tmp_path / "b", tokenizer=False), "--chat", "hi"), "no tokenizer, and so no chat")


@pytest.mark.usefixtures("no_model")
def test_logprobs_without_json_are_refused_not_ignored(tiny: Path) -> None:
    check_one_line(run(tiny, "x", "--logprobs", "2"), "--logprobs goes with --json")


@pytest.mark.usefixtures("no_model")
def test_token_ids_that_are_none_are_said_before_weights_are_read(tiny: Path) -> None:
    check_one_line(run(tiny, "--token-ids", "5 x"), "no list of integers")


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_a_file_that_cannot_be_read_is_one_line(file: str, tmp_path: Path) -> None:
    write_tiny(tmp_path, generation={})
    (tmp_path / file).unlink()
    (tmp_path / file).mkdir()
    result = run(tmp_path, "x")
    check_one_line(result, f"{file} cannot be read: Is a directory")


def test_traceback_shows_where_a_stream_failed() -> None:
    done = shell("$H --traceback --help >/dev/full")
    assert done.returncode != 0 and b"Traceback" in done.stderr and b"No space left" in done.stderr


@pytest.mark.slow
def test_a_script_without_standard_error_loads_and_generates(tiny: Path, tmp_path: Path) -> None:
    """Python sets sys.stderr to None there; the progress bars asked whether it is a terminal."""
    script, found = tmp_path / "script.py", tmp_path / "found"
    script.write_text(
        "from hybridrt import LLM, SamplingParams\n"
        f"llm = LLM({str(tiny)!r}, load_format='dummy', device='cpu', max_running_requests=2)\n"
        "outputs = llm.generate([[5], [6]], SamplingParams(max_tokens=2, ignore_eos=True))\n"
        f"open({str(found)!r}, 'w').write(str([len(o.token_ids) for o in outputs]))\n"
    )
    assert shell(f"{sys.executable} {script} <&- >&- 2>&-").returncode == 0
    assert found.read_text() == "[2, 2]"


def test_a_stop_string_with_a_lone_surrogate_is_one_line(tiny: Path) -> None:
    check_one_line(run(tiny, "x", "--stop", os.fsdecode(b"\xff")), "lone surrogate")
