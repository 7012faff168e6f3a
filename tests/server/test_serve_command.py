"""`hybridrt serve` as a process: it starts, says where it is, and ends as it should."""

import json
import re
import resource
import signal
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from hybridrt.base.engine_config import EngineConfig
from hybridrt.base.errors import ConfigError
from hybridrt.channel.keys import FLEET_VARIABLE
from hybridrt.cli import app as app_module
from hybridrt.cli import main
from hybridrt.cli.app import app
from hybridrt.engine.api.llm import LLM
from hybridrt.transfer import keys
from tests.support.http_server import CHAT_TEMPLATE, WAIT, serving
from tests.support.listening import LOOPBACK, listening

FILES = resource.RLIMIT_NOFILE
ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "hybridrt", "serve", "--device", "cpu", "--max-running-requests", "2", "--port", "0"]


def start(*options: str, log: Path) -> tuple[subprocess.Popen[bytes], str]:
    """The process, and its address once it is ready."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*COMMAND, *options],
            cwd=ROOT,
            stderr=file,
            stdout=file,
            preexec_fn=lambda: resource.setrlimit(FILES, (256, 2000)),
        )
    deadline = time.monotonic() + WAIT
    while not (found := re.search(r"serving (\S+) on (\S+)", log.read_text())):
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
    return process, found[2]


def test_it_serves_and_drains(tmp_path: Path) -> None:
    template, key_file, log = tmp_path / "template", tmp_path / "keys", tmp_path / "log"
    template.write_text(CHAT_TEMPLATE)
    key_file.write_text("one\ntwo\n")
    process, url = start(
        "--chat-template", str(template), "--api-key-file", str(key_file), "--max-model-len", "400", log=log
    )
    try:
        assert url.startswith("http://127.0.0.1:")
        assert resource.prlimit(process.pid, FILES) == (2000, 2000), "files of many connections may be open"
        with httpx.Client(base_url=url, timeout=WAIT, headers={"authorization": "Bearer two"}) as client:
            assert client.get("/v1/models").json()["data"][0]["id"] == "embedded"
            messages = [{"role": "user", "content": "Hi"}]
            answer = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 3})
            assert answer.status_code == 200, answer.text
            assert listening(process.pid) == {LOOPBACK}
            body = {"prompt": "x", "max_tokens": 120, "ignore_eos": True, "stream": True}
            with client.stream("POST", "/v1/completions", json=body) as stream:
                lines = stream.iter_lines()
                next(lines)
                process.send_signal(signal.SIGTERM)
                rest = list(lines)
        assert rest[-2] == "data: [DONE]" and '"length"' in rest[-4], "what ran has ended as it would have"
        assert process.wait(WAIT) == 0
    finally:
        process.kill()
        process.wait()
    text = log.read_text()
    model = "model: FalconH1ForCausalLM in float32 on cpu"
    phases = ("is a demonstration", "weights: ", "memory plan: ", model, "warm-up: ")
    places = [text.index(phase) for phase in phases]
    assert places == sorted(places), "a line a phase, in order"
    assert "contexts up to 400 tokens" in text and "2 running" in text and "2 API keys" in text
    lines_of_json = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    assert [line["status"] for line in lines_of_json] == [200, 200, 200]
    assert "shutting down" in text and "Traceback" not in text and "two" not in text.replace("two ranks", "")


@pytest.mark.slow
def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    process, url = start("--drain-timeout", "600", log=tmp_path / "log")
    try:
        body = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        with httpx.Client(timeout=WAIT) as client, client.stream("POST", f"{url}/v1/completions", json=body) as stream:
            next(stream.iter_lines())
            process.send_signal(signal.SIGINT)
            time.sleep(0.3)
            process.send_signal(signal.SIGINT)
            assert process.wait(WAIT) in (0, 130, -signal.SIGINT)
    except httpx.RemoteProtocolError:
        pass  # the answer was cut off
    finally:
        process.kill()
        process.wait()
    assert "Traceback" not in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--port", "70000"], "port is 70000"),
        (["--tls-key", "x"], "a certificate and a key"),
        (["--api-key", "a b"], "API key"),
        (["--api-key-file", "/nowhere"], "cannot be read"),
        (["--chat-template", "/nowhere"], "cannot be read"),
        (["/nowhere"], "/nowhere"),
        (["--target-itl-ms", "soon"], "--target-itl-ms is 'soon'"),
        (["--target-itl-ms", "-1"], "--target-itl-ms is -1.0"),
        (["--role", "prefill", "--dp-size", "2"], "--role prefill belongs to one engine, and --dp-size is 2"),
    ],
)
def test_errors_are_reported_before_weights_are_loaded(
    options: list[str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in (FLEET_VARIABLE, keys.VARIABLE):
        monkeypatch.setenv(variable, "k" * 32)
    result = CliRunner().invoke(app, ["serve", *options])
    assert result.exit_code == 2 and text in result.output, result.output


@pytest.mark.parametrize(
    ("command", "options", "target"),
    [
        ("serve", [], "auto"),
        ("serve", ["--target-itl-ms", "none"], None),
        ("serve", ["--target-itl-ms", "15"], 15.0),
        ("generate", [], None),
        ("generate", ["--target-itl-ms", "auto"], "auto"),
    ],
)
def test_a_server_bounds_the_time_between_tokens_unless_told(
    command: str, options: list[str], target: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[EngineConfig] = []

    def note(self: LLM, model: str, **given: Any) -> None:
        asked.append(EngineConfig(model, **given))
        raise ConfigError("seen")

    monkeypatch.setattr(LLM, "__init__", note)
    end = ["--port", "0"] if command == "serve" else ["x"]
    result = CliRunner().invoke(app, [command, "embedded", *options, *end])
    assert [config.target_itl_ms for config in asked] == [target], result.output


def test_a_port_in_use(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(*arguments: object, **named: object) -> None:
        raise AssertionError("weights would be read")

    monkeypatch.setattr(LLM, "__init__", refuse)
    monkeypatch.setattr(app_module, "discard_output", lambda: None)  # it closes what this process writes to
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        monkeypatch.setattr(sys, "argv", ["hybridrt", "serve", "--device", "cpu", "--port", port])
        with pytest.raises(SystemExit) as ended:
            main()
    stderr = capsys.readouterr().err
    assert ended.value.code == 1 and stderr.startswith(f"error: cannot listen on 127.0.0.1:{port} (")
    assert len(stderr.splitlines()) == 1, "one line, before anything is loaded"


def test_tls(tmp_path: Path, embedded: LLM) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-days", "2",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)],
        capture_output=True,
    )  # fmt: skip
    if made.returncode:
        pytest.skip("openssl is not installed")
    context = ssl.create_default_context(cafile=str(certificate))
    with (
        serving(embedded, tls_key=str(key), tls_certificate=str(certificate)) as served,
        httpx.Client(verify=context) as client,
    ):
        assert served.url.startswith("https://") and client.get(f"{served.url}/health").status_code == 200
