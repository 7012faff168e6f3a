"""Chat templates are programs of checkpoints: they run in a child process with a limit of time and of memory.

transformers runs templates in a sandbox that gives them no access to files, modules or attributes. The sandbox limits
neither loops nor numbers nor strings: `{{ 9 ** (9 ** 9) }}` cannot be interrupted by the process that computes it.
"""

import os
import resource
import select
import signal
import time
import warnings
from collections.abc import Callable
from typing import NoReturn

import psutil

from hybridrt.errors import CheckpointError

TIMEOUT_S = 10.0
MAX_BYTES = 1 << 30  # that a template takes beyond what this process has
_OK, _FAILED = b"+", b"-"


def run_template(render: Callable[[], str]) -> str:
    """What `render` returns, called in a child process.

    Raises:
        CheckpointError: it raises, takes longer than TIMEOUT_S seconds, or takes more memory than MAX_BYTES.
    """
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # The child runs one thread, and takes no lock of the others: if it waits for one, it ends at the time-out.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        _answer(render, writing)
    os.close(writing)
    try:
        answer = _read(reading, time.monotonic() + TIMEOUT_S)
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    status, text = answer[:1], answer[1:].decode(errors="replace")
    if status != _OK:
        raise CheckpointError(
            f"the model's chat template fails ({text or 'its process was killed'}); repair it, or write the prompt in "
            "the model's format yourself"
        )
    return text


def _answer(render: Callable[[], str], writing: int) -> NoReturn:
    """In the child: computes, writes the answer, and ends without the parent's exit hooks."""
    try:
        limit = psutil.Process().memory_info().vms + MAX_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        try:
            answer = _OK + render().encode()
        except BaseException as e:
            answer = _FAILED + f"{type(e).__name__}: {e}".encode(errors="replace")[:1000]
        while answer:
            answer = answer[os.write(writing, answer) :]
    finally:
        os._exit(0)


def _read(reading: int, deadline: float) -> bytes:
    """All that comes before the deadline and the end; what says that it has passed, if it has."""
    data, poll = bytearray(), select.poll()
    poll.register(reading, select.POLLIN)
    while poll.poll(max(0.0, 1000 * (deadline - time.monotonic()))):
        piece = os.read(reading, 1 << 16)
        if not piece:
            return bytes(data)
        data += piece
    return _FAILED + f"it has not ended within {TIMEOUT_S:g} seconds".encode()
