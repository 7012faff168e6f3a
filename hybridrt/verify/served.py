"""Runs `hybridrt serve` for a check."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from hybridrt.base.errors import ServerError
from hybridrt.verify.subject import Subject

START_S = 600.0


@contextmanager
def served(subject: Subject) -> Iterator[str]:
    """The URL of `hybridrt serve` on this machine.

    Raises:
        ServerError: it does not start.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "hybridrt", "serve", str(subject.path), "--port", str(port)]
    command += ["--device", subject.device, "--dtype", subject.dtype]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait(process, url := f"http://127.0.0.1:{port}")
        yield url
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(process: "subprocess.Popen[bytes]", url: str) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerError(f"the server of the checkpoint ended with status {process.returncode}")
        try:
            if httpx.get(f"{url}/health", timeout=2.0).status_code == 200:
                return
        except httpx.HTTPError:
            pass  # it is not there yet
        time.sleep(0.3)
    raise ServerError(f"the server of the checkpoint was not ready within {START_S:g} seconds")
