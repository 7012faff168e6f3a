"""Every option that names a file, with names that lead to something endless: one line of an error, soon."""

import io
import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from prompt_toolkit.history import InMemoryHistory
from typer.testing import CliRunner

from hybridrt import ConfigError
from hybridrt.base import files
from hybridrt.base.errors import RequestError, SessionError
from hybridrt.bench.workload import WorkloadConfig, make_work
from hybridrt.cli import conversation, line_reader
from hybridrt.cli.app import app
from hybridrt.engine.cache.session_file import SessionReader
from hybridrt.transfer.keys import find_key
from tests.support.levels import sweep
from tests.support.tiny import CHAT_TEMPLATE, write_tiny

OPTIONS = {
    "a trace": ("bench", "serve", "--data"),
    "a trace without a server": ("bench", "offline", "--data"),
    "keys": ("serve", "--api-key-file"),
    "a template": ("serve", "--chat-template"),
    "a template of a chat": ("chat", "--chat-template"),
    "a certificate": ("serve", "--tls-key", __file__, "--tls-certificate"),
    "a key of a certificate": ("serve", "--tls-certificate", __file__, "--tls-key"),
    "a schema": ("generate", "x", "--json-schema"),
    "a dump": ("inspect", "--cache"),
}  # fmt: skip
IN_A_CHECKPOINT = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
)


@pytest.fixture(params=sweep(["device", "directory", "pipe", "huge file"], 2))
def endless(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Something that cannot be read whole. Meanwhile this process may take 2 GiB more and half a minute."""
    monkeypatch.setattr(files, "PATIENCE", 0.01)
    path = tmp_path / "named"
    if request.param == "device":
        path.symlink_to("/dev/zero")
    elif request.param == "pipe":
        os.mkfifo(path)
    elif request.param == "directory":
        path.mkdir()
    else:
        with path.open("wb") as file:
            file.truncate(1 << 40)
    with _limited():
        yield path


class _limited:
    def __enter__(self) -> None:
        self._limits = resource.getrlimit(resource.RLIMIT_AS)
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + (2 << 30), self._limits[1]))
        signal.alarm(30)

    def __exit__(self, *_: object) -> None:
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_AS, self._limits)


def check_one_line(arguments: list[str], what: str, stdin: bytes = b"") -> None:
    result = CliRunner().invoke(app, arguments, input=stdin)
    text = " ".join(result.stderr.split())
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), (what, result.output, result.exception)
    assert text.startswith("error: ") and len(text) < 800, what


def test_options(endless: Path) -> None:
    for what, arguments in OPTIONS.items():
        check_one_line([*arguments, str(endless)], what)
    with pytest.raises(ConfigError, match="transfer key cannot be read"):
        find_key(endless)


@pytest.mark.parametrize("name", IN_A_CHECKPOINT)
def test_a_checkpoint(name: str, endless: Path, tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "model", chat_template=CHAT_TEMPLATE)
    (model / name).unlink(missing_ok=True)
    (model / name).symlink_to(endless)
    check_one_line(["generate", "x", "--model", str(model), "--load-format", "dummy", "--device", "cpu"], name)


def test_weights(endless: Path, tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "model", chat_template=CHAT_TEMPLATE)
    for name in ("model.safetensors", "model.safetensors.index.json"):
        (model / name).symlink_to(endless)
        check_one_line(["generate", "x", "--model", str(model), "--device", "cpu"], name)


def test_files_of_a_chat(endless: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(endless.parent))
    with pytest.raises((RequestError, OSError), match=r"regular file|directory|has .* bytes"):
        conversation.load(endless)
    with pytest.raises((SessionError, OSError), match=r"regular file|directory|header"):
        SessionReader(endless, {})
    history = endless.parent / "hybridrt" / "chat_history"
    history.parent.mkdir()
    history.symlink_to(endless)
    assert isinstance(line_reader._history(), InMemoryHistory)


@pytest.mark.parametrize("text", [b"x" * 1025, b"\\\n" * 513], ids=["line", "lines"])
def test_standard_input(text: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["hybridrt.cli.generate"], "MAX_CHARS", 1024)
    monkeypatch.setattr(line_reader, "MAX_CHARS", 1024)
    with _limited():
        check_one_line(["generate", "--load-format", "dummy"], "a prompt", text)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
        with pytest.raises(RequestError, match="a message has more"):
            line_reader.PlainLines().read()


def test_of_a_pipe_and_of_a_long_trace_what_is_asked_for_is_read(tmp_path: Path) -> None:
    """A pipe is read to its end, in whatever pieces it comes; of an endless trace the first lines suffice."""
    reading, writing = os.pipe()
    os.write(writing, b"\xc3")
    later = threading.Timer(0.05, lambda: (os.write(writing, b"\xa9\r\n"), os.close(writing)))
    later.start()
    assert files.read_text(f"/dev/fd/{reading}") == "é\n"
    os.close(reading)
    trace = tmp_path / "trace"
    line = b'{"input_length": 3, "output_length": 2}\n'
    with trace.open("wb") as file:
        file.write(line * 5)
        file.truncate(1 << 40)
    with _limited():
        assert len(make_work(WorkloadConfig(data=str(trace), requests=5))) == 5


@pytest.mark.parametrize(
    "entry",
    ['{"input_length": 1e12, "output_length": 1}', '{"input_length": 1, "output_length": 0}',
     '{"input_length": 1, "output_length": 1, "timestamp": Infinity}', "[" * 100_000,
     '{"input_length": 9, "output_length": 1, "hash_ids": 5}'],
)  # fmt: skip
def test_a_trace_asks_for_no_endless_prompt(entry: str, tmp_path: Path) -> None:
    (tmp_path / "trace").write_text(entry)
    with _limited(), pytest.raises(ConfigError, match="cannot be used"):
        make_work(WorkloadConfig(data=str(tmp_path / "trace")))
    with pytest.raises(ConfigError, match="prompt_tokens"):
        WorkloadConfig(prompt_tokens=10**12)
