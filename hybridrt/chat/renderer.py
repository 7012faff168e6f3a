"""Renders chat templates, which are programs of checkpoints, in a child process with limits of time and memory.

transformers' sandbox limits neither loops nor sizes, and a process that computes `{{ 9 ** (9 ** 9)
}}` cannot be interrupted from inside.
"""

import atexit
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import msgspec

from hybridrt.base.errors import CheckpointError, RequestError
from hybridrt.base.frames import end_child, read_frame, write_frame

TIMEOUT_S = 10.0
START_TIMEOUT_S = 120.0
MAX_BYTES = 1 << 30  # memory for a template, in addition to the process at its start
_CHILD = Path(__file__).with_name("render_child.py")


class Renderer:
    """A child process, started by the first call and again after it was killed. Calls of several
    threads wait for each other: RENDERER is for small conversations, LARGE_RENDERER for others,
    which take up to TIMEOUT_S each, FOREIGN_RENDERER for templates of requests."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._child: subprocess.Popen[bytes] | None = None
        atexit.register(self.close)

    def render(self, template: str, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        """A conversation as text.

        Args:
            template: Jinja text.
            options: keyword arguments of transformers' render_jinja_template, and variables of the
                template.

        Raises:
            CheckpointError: the template raises, or exceeds TIMEOUT_S seconds or MAX_BYTES of
                memory.
            RequestError: a message or an option is no plain data.
        """
        request = {"template": template, "messages": messages, "options": options}
        try:
            data = msgspec.msgpack.encode(request)
        except (TypeError, ValueError, OverflowError, RecursionError) as e:
            text = f"the conversation cannot be passed on to its template: {e}"
            raise RequestError(text, _unfit(messages, options.get("tools"))) from e
        if len(data) > MAX_BYTES:
            raise RequestError(f"the conversation has {len(data)} bytes; there may be {MAX_BYTES}", "messages")
        with self._lock:
            answer = self._call_child(data)
        status, text = answer[:1], answer[1:].decode(errors="replace")
        if status != b"+":
            raise CheckpointError(
                f"the model's chat template fails ({text or 'its process was killed'}); repair it, or write the prompt "
                "in the model's format yourself"
            )
        return text

    def start(self) -> None:
        """Starts the child before it is needed. CheckpointError if it does not start."""
        with self._lock:
            self._running()

    def close(self) -> None:
        """Ends the child process. A later call starts another one."""
        with self._lock:
            self._end()

    def after_fork(self) -> None:
        """In a forked process: the child is the parent's, and another thread may hold the lock."""
        self._lock, self._child = Lock(), None

    def _call_child(self, data: bytes) -> bytes:
        """Returns "-" and an error if it failed; such a child is ended."""
        try:
            child = self._running()
            write_frame(child, data, TIMEOUT_S)
            answer = bytes(read_frame(child, TIMEOUT_S))
        except TimeoutError:
            self._end()
            return f"-it has not ended within {TIMEOUT_S:g} seconds".encode()
        except (EOFError, OSError):
            self._end()
            return b"-"
        except BaseException:  # the next call must not read this answer
            self._end()
            raise
        if answer[:1] == b"!":
            self._end()
        return answer

    def _running(self) -> subprocess.Popen[bytes]:
        if self._child is not None and self._child.poll() is None:
            return self._child
        self._end()
        command = [sys.executable, "-P", str(_CHILD), str(MAX_BYTES)]
        # A session of its own: Ctrl-C on the terminal does not end it.
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            read_frame(self._child, START_TIMEOUT_S)
        except (EOFError, TimeoutError) as e:
            self._end()
            raise CheckpointError(f"the process for chat templates does not start; try {' '.join(command)}") from e
        return self._child

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            end_child(child)


def _unfit(messages: Any, tools: Any) -> str:
    for name, value in (("messages", messages), ("tools", tools)):
        try:
            msgspec.msgpack.encode(value)
        except (TypeError, ValueError, OverflowError, RecursionError):
            return name
    return "chat_template_kwargs"


RENDERER, LARGE_RENDERER, FOREIGN_RENDERER = Renderer(), Renderer(), Renderer()
for _renderer in (RENDERER, LARGE_RENDERER, FOREIGN_RENDERER):
    os.register_at_fork(after_in_child=_renderer.after_fork)
