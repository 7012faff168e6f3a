"""Frames over the pipes of a child process: four bytes of length, then that many bytes."""

import os
import select
import subprocess
import time
from contextlib import suppress

MAX_FRAME = 2**32 - 1  # bytes


def write_frame(child: "subprocess.Popen[bytes]", data: bytes, seconds: float) -> None:
    """Raises TimeoutError, or OSError if the child has ended."""
    assert child.stdin is not None, "it is a pipe"
    fd, deadline = child.stdin.fileno(), time.monotonic() + seconds
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    os.set_blocking(fd, False)
    for part in (len(data).to_bytes(4, "little"), data):
        left = memoryview(part)
        while left:
            if not poll.poll(max(0.0, 1000 * (deadline - time.monotonic()))):
                raise TimeoutError
            left = left[os.write(fd, left) :]


def read_frame(child: "subprocess.Popen[bytes]", seconds: float) -> bytearray:
    """Raises TimeoutError, or EOFError if the child has ended."""
    assert child.stdout is not None, "it is a pipe"
    fd, deadline = child.stdout.fileno(), time.monotonic() + seconds
    return _read(fd, int.from_bytes(_read(fd, 4, deadline), "little"), deadline)


def end_child(child: "subprocess.Popen[bytes]") -> None:
    """Kills the process and closes its pipes."""
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        assert pipe is not None, "it is a pipe"
        with suppress(OSError):  # closing flushes what was written
            pipe.close()


def _read(fd: int, count: int, deadline: float) -> bytearray:
    data, poll = bytearray(), select.poll()
    poll.register(fd, select.POLLIN)
    while len(data) < count:
        if not poll.poll(max(0.0, 1000 * (deadline - time.monotonic()))):
            raise TimeoutError
        piece = os.read(fd, min(count - len(data), 1 << 20))
        if not piece:
            raise EOFError
        data += piece
    return data
