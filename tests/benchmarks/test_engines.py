"""Servers of several engines under the same client."""

import argparse
import json
import socket
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from transformers import AutoTokenizer

from benchmarks import bench_engines
from benchmarks.bench_engines import Client, engine, serving, write_model

SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body = json.dumps({"usage": {"completion_tokens": asked["max_tokens"]}}).encode()
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
        self.wfile.write(body)
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def asked() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A server's URL, and what it was asked. It gives one token fewer than asked for 7."""
    requests: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            tokens = requests[-1]["max_tokens"]
            body = json.dumps({"usage": {"completion_tokens": tokens - (tokens == 7)}}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}", requests
    server.shutdown()
    server.server_close()


def test_no_prompt_comes_twice_and_answers_have_all_tokens(asked: tuple[str, list[dict[str, Any]]]) -> None:
    url, requests = asked
    client = Client(url)
    client.seconds(3, 8, 5)
    client.decode_ms(2, 100)
    prompts = [tuple(request["prompt"]) for request in requests]
    assert len(prompts) == len(set(prompts)) == 3 + 2 * 2
    assert sorted(len(prompt) for prompt in prompts) == [8] * 3 + [20] * 4
    assert sorted(request["max_tokens"] for request in requests) == [5] * 3 + [16] * 2 + [144] * 2
    assert all(request["ignore_eos"] and request["temperature"] == 0 for request in requests)
    with pytest.raises(SystemExit, match="7 tokens were asked for, 6 came"):
        client.seconds(1, 8, 7)


def test_a_server_is_started_awaited_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    monkeypatch.setattr(bench_engines, "PORT", port)
    (tmp_path / "server.py").write_text(SERVER)
    command = f"{sys.executable} {tmp_path}/server.py {{port}} {{model}}"
    with serving(command, tmp_path, tmp_path / "log") as (client, seconds):
        assert seconds > 0
        client.seconds(2, 4, 3)
    with pytest.raises(OSError, match="refused"):
        client.seconds(1, 4, 3)


def test_a_server_that_ends_names_its_log(tmp_path: Path) -> None:
    command = f"{sys.executable} -c 'print(17); exit(3)' {{port}} {{model}}"
    with (
        pytest.raises(SystemExit, match=r"ended with status 3; .*log says why"),
        serving(command, tmp_path, tmp_path / "log"),
    ):
        pass
    assert (tmp_path / "log").read_text() == "17\n"


def test_a_model_has_a_word_for_each_token(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text('{"vocab_size": 40}')
    write_model(tmp_path / "config", tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.decode([3, 39]).split() == ["w3", "w39"]
    assert tokenizer("w39 w0 w2")["input_ids"] == [39, 0, 2]


@pytest.mark.parametrize(
    "text", ["vllm", "=run {model} {port}", "a=run {model}", "a=run {port}", "a b=run {model} {port}"]
)
def test_an_engine_is_a_name_and_a_command(text: str) -> None:
    assert engine("vllm-best=run {model} {port} x=y") == ("vllm-best", "run {model} {port} x=y")
    with pytest.raises(argparse.ArgumentTypeError, match="NAME=COMMAND"):
        engine(text)
