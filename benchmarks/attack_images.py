"""Cases of benchmarks.attacks with images, for a server with a model that sees (benchmarks/seeing_model.py)."""

import base64
import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.attack_cases import COUNTER, Attack, request


def cases_of_images() -> list[Attack]:
    """Images that must be decoded, encoded, or refused. What is encoded is another picture each time."""
    return [
        Attack("new-images", (_chat([_changing(1024)]),), 4, sees=True),
        Attack("largest-images", (_chat([_changing(4096)]),), 4, sees=True),
        Attack("many-images", (_chat([_changing(64, seed) for seed in range(100)]),), 4, sees=True),
        Attack("one-bit-images", (_chat([_file(_one_bit(5700))] * 4),), 4, sees=True),
        Attack("jpegs-of-many-scans", (_chat([_file(_progressive(4000))] * 4),), 4, sees=True),
        Attack("bombs", (_chat([_file(_bomb(30_000))]),), 8, sees=True),
        Attack("texts-in-pngs", (_chat([_file(_long_text())] * 8),), 4, sees=True),
    ]


def small_picture() -> str:
    """Of a neighbour, in base64."""
    return _file(_saved(Image.new("RGB", (64, 64), "green"), "PNG"))


def _chat(images: list[str]) -> bytes:
    parts: list[Any] = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{each}"}} for each in images]
    content = [*parts, {"type": "text", "text": "What is this?"}]
    return request("/v1/chat/completions", {"messages": [{"role": "user", "content": content}], "max_tokens": 1})


def _file(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _changing(side: int, seed: int = 0) -> str:
    """A picture of one bit a pixel that has the counter among its pixels, in base64."""
    pixels = np.random.default_rng(seed).integers(0, 2, (side, side), np.uint8) * 255
    text, place = _file(_saved(Image.fromarray(pixels).convert("1"), "BMP")), 200
    return text[:place] + COUNTER.decode() + text[place + len(COUNTER) :]


def _one_bit(side: int) -> bytes:
    return _saved(Image.new("1", (side, side)), "PNG", optimize=True)


def _progressive(side: int) -> bytes:
    pixels = np.add.outer(np.arange(side), np.arange(side)) // 64 % 256
    return _saved(Image.fromarray(pixels.astype(np.uint8)), "JPEG", progressive=True, quality=50)


def _bomb(side: int) -> bytes:
    """What its header says would take gigabytes."""
    return _png(struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0), zlib.compress(b"\0" * 1000))


def _long_text() -> bytes:
    header = struct.pack(">IIBBBBB", 8, 8, 8, 0, 0, 0, 0)
    return _png(header, zlib.compress(b"\0" * 72), _chunk(b"zTXt", b"k\0\0" + zlib.compress(b"a" * 2**26)))


def _png(header: bytes, data: bytes, extra: bytes = b"") -> bytes:
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + extra + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _saved(image: Image.Image, form: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()
