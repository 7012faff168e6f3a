"""The child process that decodes pictures (hybridrt/channel/request_child.py)."""

import base64
import io
from contextlib import suppress

import msgspec
from PIL import Image

from hybridrt.channel.request_child import Parts, answer_requests
from hybridrt.images.decode import FORMATS, decode, digest_of
from hybridrt.images.jobs import Decoded, Job, UnreadablePicture


def main(max_bytes: int) -> None:
    _import_all()
    answer_requests(_compute, max_bytes)


def _import_all() -> None:
    """Decodes pictures of all formats, whole and cut, which imports all modules."""
    exif = Image.Exif()
    exif[0x0112] = 6  # a turned picture
    for form in (*FORMATS, "MPO"):
        file = io.BytesIO()
        Image.new("RGB", (70, 70)).save(file, form, **({} if form in ("GIF", "BMP") else {"exif": exif.tobytes()}))
        _compute(msgspec.msgpack.encode(Job("file", file.getvalue(), 2**20)))
        with suppress(UnreadablePicture):
            _compute(msgspec.msgpack.encode(Job("file", file.getvalue()[:40], 2**20)))


def _compute(request: bytes) -> Parts:
    """Length of the facts; facts; pixels."""
    job = msgspec.msgpack.decode(request, type=Job)
    pixels = decode(_unpacked(job), job.max_pixels)
    facts = msgspec.msgpack.encode(Decoded(pixels.shape[0], pixels.shape[1], digest_of(pixels)))
    return [len(facts).to_bytes(4, "little"), facts, pixels.data.cast("B")]


def _unpacked(job: Job) -> bytes:
    if job.form == "file":
        return job.data
    try:
        return base64.b64decode(job.data, validate=True)
    except ValueError as e:
        raise UnreadablePicture(f"its data is no base64: {e}") from e
