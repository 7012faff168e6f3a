"""The process of `tests/support/sm90.py`, which compiles kernels without Triton's interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class Compiler:
    """A process without Triton's interpreter, which all tables share, because it takes longer to start than to compile
    most of them."""

    def __init__(self, errors: Path, gpu: str | None = None) -> None:
        """`gpu`: a name of KNOWN; None for sm_90."""
        self._errors, self._arguments = errors, [] if gpu is None else [gpu]
        self._process: subprocess.Popen[str] | None = None

    def __call__(self, table: str) -> list[dict[str, Any]]:
        """What each kernel of a table uses."""
        if self._process is None or self._process.poll() is not None:
            self._process = self._start()
        assert self._process.stdin is not None and self._process.stdout is not None
        print(table, file=self._process.stdin, flush=True)
        found = []
        while (line := self._process.stdout.readline()) != "\n":
            assert line, self._errors.read_text()[-2000:]
            found.append(json.loads(line))
        return found

    def close(self) -> None:
        if self._process is not None:
            self._process.communicate()

    def _start(self) -> subprocess.Popen[str]:
        env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        command = [sys.executable, "-m", "tests.support.sm90", *self._arguments]
        with self._errors.open("w") as errors:
            pipe = subprocess.PIPE
            return subprocess.Popen(command, cwd=ROOT, env=env, stdin=pipe, stdout=pipe, stderr=errors, text=True)
