"""`hybridrt serve` as a process: it starts, says where it is, and ends as it should."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from hybridrt.cli.app import app
from tests.support.http_server import CHAT_TEMPLATE, WAIT

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "hybridrt", "serve", "--device", "cpu", "--max-running-requests", "2", "--port", "0"]


def start(*options: str, log: Path) -> tuple[subprocess.Popen[bytes], str]:
    """The process, and its address once it is ready."""
    with log.open("wb") as file:
        process = subprocess.Popen([*COMMAND, *options], cwd=ROOT, stderr=file, stdout=file)
    deadline = time.monotonic() + WAIT
    while not (found := re.search(r"serving (\S+) on (\S+)", log.read_text())):
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
    return process, found[2]


def test_it_serves_and_drains(tmp_path: Path) -> None:
    template, keys, log = tmp_path / "template", tmp_path / "keys", tmp_path / "log"
    template.write_text(CHAT_TEMPLATE)
    keys.write_text("one\ntwo\n")
    process, url = start(
        "--chat-template", str(template), "--api-key-file", str(keys), "--max-model-len", "400", log=log
    )
    try:
        assert url.startswith("http://127.0.0.1:")
        with httpx.Client(base_url=url, timeout=WAIT, headers={"authorization": "Bearer two"}) as client:
            assert client.get("/v1/models").json()["data"][0]["id"] == "embedded"
            messages = [{"role": "user", "content": "Hi"}]
            answer = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 3})
            assert answer.status_code == 200, answer.text
            body = {"prompt": "x", "max_tokens": 300, "ignore_eos": True, "stream": True}
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
    lines_of_json = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    assert [line["status"] for line in lines_of_json] == [200, 200, 200]
    assert "shutting down" in text and "Traceback" not in text and "two" not in text.replace("two ranks", "")


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


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--port", "70000"], "port is 70000"),
        (["--tls-key", "x"], "a certificate and a key"),
        (["--api-key", "a b"], "API key"),
        (["--api-key-file", "/nowhere"], "cannot be read"),
        (["--chat-template", "/nowhere"], "cannot be read"),
        (["/nowhere"], "/nowhere"),
    ],
)
def test_it_says_what_is_wrong_before_it_loads(options: list[str], text: str) -> None:
    result = CliRunner().invoke(app, ["serve", *options])
    assert result.exit_code == 2 and text in result.output, result.output


def test_a_port_in_use(tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = subprocess.run([*COMMAND[:-1], port], cwd=ROOT, capture_output=True, text=True, timeout=WAIT)
    assert result.returncode == 1 and result.stderr.startswith(f"error: cannot listen on 127.0.0.1:{port} (")
    assert len(result.stderr.splitlines()) == 1, "one line, before anything is loaded"


def test_tls(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-days", "2",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)],
        capture_output=True,
    )  # fmt: skip
    if made.returncode:
        pytest.skip("openssl is not installed")
    process, url = start("--tls-key", str(key), "--tls-certificate", str(certificate), log=tmp_path / "log")
    try:
        import ssl

        with httpx.Client(verify=ssl.create_default_context(cafile=str(certificate))) as client:
            assert url.startswith("https://") and client.get(f"{url}/health").status_code == 200
    finally:
        process.kill()
        process.wait()


def test_importing_hybridrt_imports_no_server() -> None:
    code = (
        "import sys, hybridrt, hybridrt.cli.app, hybridrt.engine.async_llm;"
        "print([n for n in ('fastapi', 'uvicorn', 'starlette', 'prometheus_client', 'pydantic') if n in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.check_output([sys.executable, "-c", code], text=True, env=environment).strip() == "[]"
