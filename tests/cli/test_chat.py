"""`hybridrt chat`: the loop with a scripted model, and on a terminal; a server that answers, refuses or breaks off."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from prompt_toolkit.history import InMemoryHistory
from typer.testing import CliRunner, Result

from hybridrt.base.errors import RequestError
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.chat.conversation import read_conversation
from hybridrt.cli import conversation, line_reader
from hybridrt.cli.app import app
from hybridrt.cli.conversation import AnswerPiece, ConversationMessage, Totals, load
from hybridrt.cli.local_model import LocalModel
from hybridrt.cli.openai_server import RemoteModel
from hybridrt.cli.repl import Repl, Screen
from tests.cli.test_terminal import shell
from tests.support.http_server import serving
from tests.support.pictures import png
from tests.support.scripted_llm import scripted
from tests.support.tiny import CHAT_TEMPLATE, write_tiny

WAIT = 60


class Scripted:
    """A model that says its script, and keeps what it was asked."""

    name = "scripted"
    save_session = RemoteModel.save_session

    def __init__(self, *script: Any) -> None:
        self.script, self.asked = script, list[list[ConversationMessage]]()

    def answer(self, messages: list[ConversationMessage]) -> Any:
        self.asked.append(list(messages))
        for step in self.script:
            if isinstance(step, BaseException):
                raise step
            yield step


def repl(*script: Any) -> tuple[Repl, Scripted]:
    model = Scripted(*script)
    return Repl(model, None, Screen()), model  # type: ignore[arg-type]


def shown(messages: list[ConversationMessage]) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in messages]


HI = AnswerPiece("Hi "), AnswerPiece("there"), Totals(2, 8, 4, 10.0)


def test_a_conversation_with_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    talk, model = repl(*HI)
    file = tmp_path / "talk.json"
    for text in ("/system Be brief.", "hello\nyou", f"/save {file}", "/reset", " /etc is a directory?"):
        talk.answer_line(text)
    assert shown(model.asked[0]) == [("system", "Be brief."), ("user", "hello\nyou")]
    assert shown(model.asked[1]) == [("system", "Be brief."), ("user", "/etc is a directory?")]
    captured = capsys.readouterr()
    assert captured.out == "Hi there\nHi there\n"
    assert "2 tokens, 10.0 tokens/s, 4 of 8 prompt tokens cached" in captured.err
    talk.answer_line(f"/load {file}")
    talk.answer_line("/system")
    assert shown(talk.messages) == [("user", "hello\nyou"), ("assistant", "Hi there")]
    assert json.loads(file.read_text())["messages"][0] == {"role": "system", "content": "Be brief."}
    assert file.stat().st_mode & 0o077 == 0 and [f.name for f in tmp_path.iterdir()] == ["talk.json"]


def test_images_go_with_the_next_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    talk, model = repl(*HI)
    picture, file = tmp_path / "a.png", tmp_path / "talk.json"
    picture.write_bytes(png(1, 20, 10))
    for text in (
        f"/image {picture}",
        f"/image {picture}",
        "look",
        "and now",
        f"/save {file}",
        "/reset",
        f"/load {file}",
    ):
        talk.answer_line(text)
    first = model.asked[0][0].to_dict()["content"]
    assert [part["type"] for part in first] == ["image_url", "image_url", "text"]
    assert (
        read_conversation([{"role": "user", "content": first}]).images[0].content == b64encode(png(1, 20, 10)).decode()
    )
    assert model.asked[1][2].content == "and now"
    assert talk.messages[0].to_dict()["content"] == first
    (tmp_path / "b.txt").write_text("no image")
    with pytest.raises(RequestError, match="no image of a known format: png, jpeg"):
        talk.answer_line(f"/image {tmp_path / 'b.txt'}")
    talk.answer_line(f"/image {picture}")
    talk.answer_line("/reset")
    talk.answer_line("text")
    assert model.asked[2][0].content == "text"
    assert "2 images go with the next message" in capsys.readouterr().err


def test_reasoning_is_kept_apart(capsys: pytest.CaptureFixture[str]) -> None:
    talk, _ = repl(AnswerPiece(reasoning="Hm"), AnswerPiece(reasoning="."), AnswerPiece("Yes"))
    talk.answer_line("so?")
    assert talk.messages[-1] == ConversationMessage("assistant", "Yes", "Hm.")
    assert capsys.readouterr().out == "Hm.\n\nYes\n"


def test_an_interrupt_keeps_what_was_said_and_a_failure_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    talk, _ = repl(AnswerPiece("He"), KeyboardInterrupt())
    talk.answer_line("a")
    assert shown(talk.messages) == [("user", "a"), ("assistant", "He")]
    silent, _ = repl(KeyboardInterrupt())
    silent.answer_line("a")
    assert silent.messages == [] and "stopped" in capsys.readouterr().err
    failing, _ = repl(AnswerPiece("He"), RequestError("too long"))
    with pytest.raises(RequestError):
        failing.answer_line("a")
    assert failing.messages == [] and capsys.readouterr().out.endswith("He\n")


def test_ctrl_c_again_while_an_answer_ends_is_not_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is pressed again while an answer's last lines are written, and while the note on how to end the chat is."""
    talk, _ = repl(AnswerPiece("He"), KeyboardInterrupt())
    for name in ("end_answer", "note"):
        real = getattr(Screen, name)
        monkeypatch.setattr(Screen, name, lambda *args, real=real: (signal.raise_signal(signal.SIGINT), real(*args)))
    talk.answer_line("a")
    assert shown(talk.messages) == [("user", "a"), ("assistant", "He")]
    keys = Mock(side_effect=["/reset", KeyboardInterrupt, None])
    talk._reader = SimpleNamespace(read=keys, interactive=False)  # type: ignore[assignment]
    talk.run()
    assert keys.call_count == 3 and talk.messages == []


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("/sytem x", "did you mean /system"),
        ("/usr/bin/ls", "a space before the slash makes it a message"),
        ("/save", "needs the name of a file"),
        ("/load \0", "needs the name of a file"),
        ("/load .", "not a regular file"),
        ("/load ~nobody-of-this-name/x", "Write ./ before"),
        ("/save x.safetensors", "cannot be saved or loaded"),
        ("a\udcff", "bytes that are no text"),
    ],
)
def test_what_is_mistyped_is_an_error(text: str, error: str) -> None:
    talk, model = repl()
    with pytest.raises(RequestError, match=error):
        talk.answer_line(text)
    assert talk.messages == [] and model.asked == []


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", "not a conversation"),
        (b"\xff", "not a conversation"),
        (b'{"messages": 5}', "not a conversation"),
        (b'{"x": ' + b"[" * 100_000, "not a conversation"),
        (b'{"messages": [{"role": "tool", "content": ""}]}', "not a conversation"),
        (b'{"messages": [{"role": "user", "content": null}]}', "not a conversation"),
        (b'{"messages": [{"role": "user", "content": ""}, {"role": "system", "content": ""}]}', "only the first"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "not a conversation|surrogate"),
    ],
)
def test_a_file_that_is_no_conversation_is_neither_read_nor_replaced(
    content: bytes, error: str, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_bytes(content)
    talk, _ = repl()
    with pytest.raises(RequestError, match=error):
        load(file)
    with pytest.raises(RequestError, match="choose another name"):
        talk.answer_line(f"/save {file}")
    assert file.read_bytes() == content


def test_what_cannot_be_saved_is_said_in_the_users_words(tmp_path: Path) -> None:
    talk, _ = repl()
    with pytest.raises(FileNotFoundError) as error:
        talk.answer_line(f"/save {tmp_path / 'none' / 'talk.json'}")
    assert error.value.filename == str(tmp_path / "none" / "talk.json")
    nothing: Any = None
    with pytest.raises(RequestError, match="nothing was said yet"):
        LocalModel("x", nothing, nothing, nothing).save_session(tmp_path / "talk.safetensors", [])


def test_save_keeps_the_text_without_the_states(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    talk, _ = repl(AnswerPiece("Hello"))
    talk.answer_line("a")
    with pytest.raises(RequestError, match="cannot be saved or loaded"):
        talk.answer_line(f"/save {tmp_path / 'talk.safetensors'}")
    assert shown(load(tmp_path / "talk.json")) == [("user", "a"), ("assistant", "Hello")]
    assert "without states, 2 messages written" in capsys.readouterr().err
    other = tmp_path / "other.json"
    other.write_text("kept")
    with pytest.raises(RequestError, match="choose another name"):
        talk.answer_line(f"/save {tmp_path / 'other.safetensors'}")
    assert other.read_text() == "kept"


def test_a_file_that_is_too_long_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "MAX_FILE_BYTES", 8)
    (tmp_path / "file").write_text('{"messages": []}')
    with pytest.raises(RequestError, match="has 16 bytes; a conversation has at most 8"):
        load(tmp_path / "file")


def test_without_a_place_for_it_the_history_stays_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    assert isinstance(line_reader._history(), InMemoryHistory)


class Terminal:
    """A program on a terminal of its own."""

    def __init__(self, *command: str, **environment: str) -> None:
        self._master, child = pty.openpty()
        variables = os.environ | {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"} | environment
        self._process = subprocess.Popen(
            [sys.executable, *command], stdin=child, stdout=child, stderr=child, env=variables, start_new_session=True,
            preexec_fn=lambda: __import__("fcntl").ioctl(0, __import__("termios").TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(child)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode(errors="surrogateescape"))

    def wait_for(self, text: str) -> str:
        """What was written up to and with `text`."""
        deadline = time.monotonic() + WAIT
        while text not in self.seen:
            assert time.monotonic() < deadline, self.seen
            assert self._read(), self.seen
        before, self.seen = self.seen.split(text, 1)
        return before + text

    def end(self) -> int:
        while self._read():
            pass
        os.close(self._master)
        return self._process.wait(WAIT)

    def _read(self) -> bool:
        if not select.select([self._master], [], [], WAIT)[0]:
            raise AssertionError(f"nothing is written: {self.seen}")
        try:
            got = os.read(self._master, 65536)
        except OSError:  # the program has ended
            return False
        self.seen += got.decode(errors="replace")
        return bool(got)


LOOP = """
import time
from hybridrt.cli.conversation import AnswerPiece, ConversationMessage
from hybridrt.cli.line_reader import make_reader
from hybridrt.cli.local_model import LocalModel
from hybridrt.cli.openai_server import RemoteModel
from hybridrt.cli.repl import COMMANDS, Repl, Screen

class Model:
    name = "slow"
    def answer(self, messages):
        yield AnswerPiece(reasoning="Hm", text=f"heard {messages[-1].content!r} \\x1b[2J")
        while "wait" in messages[-1].content:
            time.sleep(0.01)

Repl(Model(), make_reader(list(COMMANDS)), Screen()).run()
"""


@pytest.mark.parametrize("term", ["xterm", pytest.param("dumb", marks=pytest.mark.slow)])
def test_on_a_terminal_ctrl_c_stops_an_answer_and_ctrl_d_ends(term: str, tmp_path: Path) -> None:
    terminal = Terminal("-c", LOOP, TERM=term, XDG_STATE_HOME=str(tmp_path))
    terminal.wait_for("Ctrl-D ends.")
    terminal.type("wait\\\rmore\r")
    heard = terminal.wait_for("heard 'wait\\nmore'")
    assert ("\x1b[2mHm\x1b[0m" in heard) == (term == "xterm")
    assert "\x1b[2J" not in terminal.wait_for("\ufffd[2J"), "what a model writes is text"
    terminal.type("\x03")
    terminal.wait_for("stopped")
    terminal.type("\udcff\r")  # a byte that is no UTF-8
    terminal.wait_for("the message holds bytes that are no text")
    terminal.type("next\r")
    terminal.wait_for("heard 'next'")
    terminal.type("/sytem\r")
    terminal.wait_for("did you mean /system?")
    terminal.wait_for(">")  # prompt_toolkit drops an interrupt that comes while it starts
    terminal.type("\x03")
    terminal.wait_for("Ctrl-D ends the chat.")
    if term == "xterm":
        terminal.type("\x1b[A\x1b[A\r")  # the last but one message again
        terminal.wait_for("heard 'next'")
        terminal.wait_for(">")
        terminal.type("\x1b[200~one\n\ttwo\n\x1b[201~\r")  # pasted
        terminal.wait_for("heard 'one\\n\\ttwo'")
    terminal.wait_for(">")
    terminal.type("\x04")
    assert terminal.end() == 0 and "Traceback" not in terminal.seen
    if term == "xterm":
        file = tmp_path / "hybridrt" / "chat_history"
        assert "+next" in file.read_text() and file.stat().st_mode & 0o077 == 0


def chat(*arguments: str, stdin: bytes = b"hi\n") -> Result:
    return CliRunner().invoke(app, ["chat", *arguments], input=stdin)


@contextmanager
def server(status: int, body: bytes) -> Iterator[str]:
    """A server that answers every chat alike, and lists one model."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(200, b'{"data": [{"id": "there"}]}')

        def do_POST(self) -> None:
            asked.append((dict(self.headers), json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            self._send(status, body)

        def _send(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None:
            pass

    asked.clear()
    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{running.server_port}/v1"
    finally:
        running.shutdown()
        running.server_close()


asked: list[tuple[dict[str, str], dict[str, Any]]] = []


def events(*chunks: Any, done: bool = True) -> bytes:
    return b"".join(b"data: %b\n\n" % json.dumps(chunk).encode() for chunk in chunks) + b"data: [DONE]\n\n" * done


def gain(reason: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": None}}


def test_a_server_is_asked_with_the_options_and_the_key() -> None:
    body = b": comment\n\n" + events(
        gain(role="assistant", content=""), gain(reasoning="Hm"), gain(reasoning_content="."), gain(content="né"),
        gain("stop"), USAGE,
    )  # fmt: skip
    with server(200, body) as url:
        result = chat(
            "--url", url, "--api-key", "secret", "--temperature", "0", "--seed", "3", "--system", "S",
            stdin=b"hi\nmore\n",
        )  # fmt: skip
    assert (result.exit_code, result.stdout) == (0, "Hm.\n\nné\n" * 2), result.output
    assert result.stderr.count("\n") == 2 and "0 of 9 prompt tokens cached" in result.stderr
    headers, sent = asked[1]
    assert headers["Authorization"] == "Bearer secret"
    assert [m["content"] for m in sent.pop("messages")] == ["S", "hi", "né", "more"]
    assert sent == {
        "model": "there", "temperature": 0.0, "seed": 3, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("status", "body", "text"),
    [
        (401, b'{"error": {"message": "no key"}}', "answers 401: no key"),
        (404, b"<html>", "answers 404: '<html>'"),
        (500, b'{"error": ' + b"[" * 100_000, "answers 500: '{"),
        (500, b"x" * (2**24 + 1), "more than 16777216 bytes"),
        (200, b"data: {\n\n", "what is not OpenAI's API"),
        (200, b'data: "\xff"\n\n', "what is not OpenAI's API"),
        (200, b'data: {"x": ' + b"[" * 100_000 + b"\n\n", "what is not OpenAI's API"),
        (200, b"x" * (2**24 + 2**21), "a line of more than 16777216 bytes"),
        (200, b'data: {"choices": 5}\n\n', "what is not OpenAI's API"),
        (200, b'data: {"error": "full"}\n\n', "error: full"),
        (200, events(gain(content="half"), done=False), "has broken off its answer"),
    ],
)
def test_a_server_that_fails_is_one_line(status: int, body: bytes, text: str) -> None:
    with server(status, body) as url:
        result = chat("--url", url, "name")
    assert result.exit_code == 1 and text in result.stderr and result.stderr.count("\n") == 1, result.output


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--url", "ftp://x"), "not a server's URL"),
        (("--url", "http://x:port"), "cannot be used"),
        (("--url", "http://x", "--timeout", "0"), "--timeout is 0.0"),
        (("--url", "http://x", "--device", "cpu"), "--device goes with a model in this process"),
        (("--chat-template", "/nowhere"), "--chat-template: /nowhere cannot be read"),
    ],
)
def test_options_that_do_not_fit_are_one_line(arguments: tuple[str, ...], text: str) -> None:
    result = chat(*arguments)
    assert result.exit_code == 2 and text in result.stderr and result.stderr.count("\n") == 1, result.output


def test_no_server_and_no_template_are_one_line(tmp_path: Path) -> None:
    with server(200, b"") as url:
        pass
    result = chat("--url", url)
    assert result.exit_code == 1 and result.stderr.count("\n") == 1 and "check the URL" in result.stderr
    result = chat(str(write_tiny(tmp_path)))
    assert result.exit_code == 2 and "brings no chat template" in result.stderr and result.stderr.count("\n") == 1


def test_a_model_in_this_process(tmp_path: Path) -> None:
    """The second question begins with the first one and its answer, which are cached. A session has them, too."""
    write_tiny(tmp_path / "model", chat_template=CHAT_TEMPLATE)
    session = tmp_path / "talk.safetensors"
    options = (
        str(tmp_path / "model"), "--load-format", "dummy", "--device", "cpu", "--max-tokens", "20", "--ignore-eos",
        "--temperature", "0", "--max-running-requests", "2",
    )  # fmt: skip
    result = chat(*options, stdin=f"What is this?\n/save {session}\nAnd that?\n".encode())
    assert result.exit_code == 0, result.output
    first, second = (line for line in result.stderr.splitlines() if "cached" in line)
    assert first.startswith("20 tokens, ") and " 0 of 20 prompt tokens cached" in first
    assert int(second.split(", ")[2].split()[0]) >= 16, second
    later = chat(*options, stdin=f"/load {session}\nAnd that?\n/save {session}\n".encode())
    assert len(later.stdout) > 1 and result.stdout.endswith(later.stdout)
    (loaded,) = (line for line in later.stderr.splitlines() if "cached" in line)
    assert loaded.split(", ")[2] == second.split(", ")[2]
    assert later.exit_code == 2 and "exists; choose another name" in later.stderr


@pytest.mark.slow
def test_closed_input_and_a_terminal_that_lacks_characters() -> None:
    done = shell("$H chat --url http://127.0.0.1:9 x <&-")
    assert (done.returncode, done.stdout, done.stderr.count(b"\n")) == (2, b"", 1)
    assert b"standard input holds nothing" in done.stderr
    with server(200, events(gain("stop", content="né π"))) as url:
        done = shell(f"echo hi | $H chat --url {url}", PYTHONIOENCODING="latin-1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "né ?\n".encode("latin-1"), b"")


def test_our_own_server() -> None:
    with scripted() as model, serving(model.llm, chat_template=None, reasoning_parser="think") as served:
        model.say("<think>\nHm.\n</think>\n\nGrüezi")
        result = chat("--url", served.url, "--system", "Be brief.", stdin=b"hi\nagain\n")
    assert (result.exit_code, result.stdout) == (0, "Hm.\n\nGrüezi\n" * 2), result.output
    assert result.stderr.count("17 tokens, ") == 2


def test_an_interrupt_stops_a_model_in_this_process_between_two_steps() -> None:
    with scripted() as model:
        model.say("a" * 1000)
        talker = LocalModel("scripted", model.llm, SamplingParams(max_tokens=None), model.llm.chats())
        answer = talker.answer([ConversationMessage("user", "hi")])
        assert next(answer) == AnswerPiece("a")
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            next(answer)
        model.llm.generate("b", SamplingParams(max_tokens=1))
        assert not model.llm.engine.has_unfinished()
