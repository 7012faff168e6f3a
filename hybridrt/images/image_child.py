"""The child process that decodes pictures.

It answers frames (hybridrt/base/frames.py) with msgpack in both directions, cannot open files while
it decodes, and has a limit of memory. Nobody waits for it longer than the pool says.
"""

import base64
import io
import resource
import signal
import sys
from typing import BinaryIO

import msgspec
import psutil
from PIL import Image

from hybridrt.images.decode import FORMATS, decode, digest_of
from hybridrt.images.jobs import Decoded, Job, UnreadablePicture

_LAST_SECONDS = 120  # life of a process without its parent
Parts = list[bytes | memoryview]


def main(max_bytes: int) -> None:
    """Answers until the other process closes its end."""
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    _import_all()
    limit = psutil.Process().memory_info().vms + max_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _write(answers, [b""])
    while head := requests.read(4):
        request = requests.read(int.from_bytes(head, "little"))
        signal.setitimer(signal.ITIMER_REAL, _LAST_SECONDS)
        answer = _answer(request)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _write(answers, answer)


def _import_all() -> None:
    """Decodes pictures of all formats: modules are imported while files can be opened."""
    exif = Image.Exif()
    exif[0x0112] = 6  # a turned picture
    for form in (*FORMATS, "MPO"):
        file = io.BytesIO()
        Image.new("RGB", (70, 70)).save(file, form, **({} if form in ("GIF", "BMP") else {"exif": exif.tobytes()}))
        for cut in (None, 40):
            answer = _answer(msgspec.msgpack.encode(Job("file", file.getvalue()[:cut], 2**20)))
            assert (answer[0] == b"+") == (cut is None), answer[0]


def _answer(request: bytes) -> Parts:
    """Returns "+", facts and pixels; an error's text after "-", or after "!" if this process must
    be replaced: out of memory, any object may be incomplete.
    """
    try:
        job = msgspec.msgpack.decode(request, type=Job)
        pixels = decode(_unpacked(job), job.max_pixels)
        facts = msgspec.msgpack.encode(Decoded(pixels.shape[0], pixels.shape[1], digest_of(pixels)))
        return [b"+", len(facts).to_bytes(4, "little"), facts, pixels.data.cast("B")]
    except MemoryError:
        return [b"!it needs too much memory"]
    except UnreadablePicture as e:
        return [b"-" + str(e).encode(errors="replace")]
    except Exception as e:
        return [b"-" + f"{type(e).__name__}: {e}"[:300].encode(errors="replace")]


def _unpacked(job: Job) -> bytes:
    if job.form == "file":
        return job.data
    try:
        return base64.b64decode(job.data, validate=True)
    except ValueError as e:
        raise UnreadablePicture(f"its data is no base64: {e}") from e


def _write(stream: BinaryIO, parts: Parts) -> None:
    stream.write(sum(map(len, parts)).to_bytes(4, "little"))
    for part in parts:
        stream.write(part)
    stream.flush()
