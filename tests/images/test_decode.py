"""Bytes of pictures to pixels: every mode of the formats, bombs, and broken files."""

import random
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from hybridrt.images.decode import decode
from hybridrt.images.jobs import UnreadablePicture
from tests.support.pictures import noise, png, saved

MOST = 2**20
PIXELS = noise(1, 40, 24)
RGB = Image.fromarray(PIXELS)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def raw_png(width: int, height: int, bits: int = 8, colour: int = 2, data: bytes = b"", extra: bytes = b"") -> bytes:
    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    body = chunk(b"IHDR", header) + extra + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


LONG_TEXT = chunk(b"zTXt", b"k\0\0" + zlib.compress(b"a" * 2**26))


def grey(image: Image.Image) -> np.ndarray:
    return np.repeat(np.asarray(image.convert("L"))[..., None], 3, 2)


@pytest.mark.parametrize(("form", "options"), [("PNG", {}), ("BMP", {}), ("WEBP", {"lossless": True})])
def test_lossless_formats_give_their_pixels(form: str, options: dict[str, bool]) -> None:
    np.testing.assert_array_equal(decode(saved(RGB, form, **options), MOST), PIXELS)


@pytest.mark.parametrize("mode", ["L", "1", "P"])
def test_other_modes_become_rgb(mode: str) -> None:
    image = RGB.convert(mode)
    np.testing.assert_array_equal(decode(saved(image, "PNG"), MOST), np.asarray(image.convert("RGB")))


def test_cmyk_is_converted_as_pillow_does() -> None:
    data = saved(RGB.convert("CMYK"), "JPEG", quality=95)
    assert abs(decode(data, MOST).astype(int) - PIXELS).mean() < 12


def test_16_bits_lose_their_lower_byte() -> None:
    high = np.asarray(RGB.convert("L")).astype(np.uint16)
    data = saved(Image.fromarray(high * 256 + 255), "PNG")
    np.testing.assert_array_equal(decode(data, MOST), grey(RGB))


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_transparent_parts_are_white(mode: str) -> None:
    image = RGB.convert(mode)
    alpha = np.zeros((24, 40), np.uint8)
    alpha[:, 20:] = 255
    image.putalpha(Image.fromarray(alpha))
    found = decode(saved(image, "PNG"), MOST)
    assert (found[:, :20] == 255).all()
    np.testing.assert_array_equal(found[:, 20:], (PIXELS if mode == "RGBA" else grey(RGB))[:, 20:])


def test_a_transparent_colour_of_a_palette_is_white() -> None:
    image = RGB.quantize(8)
    found = decode(saved(image, "PNG", transparency=3), MOST)
    assert (found[np.asarray(image) == 3] == 255).all()


@pytest.mark.parametrize(("orientation", "turned"), [(3, PIXELS[::-1, ::-1]), (6, np.rot90(PIXELS, -1))])
def test_pictures_are_turned_upright(orientation: int, turned: np.ndarray) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    np.testing.assert_array_equal(decode(saved(RGB, "PNG", exif=exif.tobytes()), MOST), turned)


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_the_first_frame_of_an_animation_is_read(form: str) -> None:
    frames = [Image.new("RGB", (16, 16), colour) for colour in ((255, 0, 0), (0, 255, 0), (0, 0, 255))]
    options = {"save_all": True, "append_images": frames[1:], "duration": 80} | (
        {"lossless": True} if form == "WEBP" else {}
    )
    assert (decode(saved(frames[0], form, **options), MOST) == (255, 0, 0)).all()


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "empty"),
        (b"hello, I am no picture", "no image of the formats"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 64\n", "no image of the formats"),
        (saved(RGB, "TIFF"), "no image of the formats"),
        (saved(RGB, "PPM"), "no image of the formats"),
        (png(1, 64, 64)[:33], "broken"),
        (png(1, 64, 64)[:900], "truncated"),
        (saved(RGB, "JPEG")[:700], "truncated"),
        (raw_png(0, 0, data=zlib.compress(b"")), "broken|0 x 0"),
        (raw_png(30000, 30000, data=zlib.compress(b"\0" * 1000)), "30000 x 30000"),
        (raw_png(2**31 - 1, 2**31 - 1, data=b"x"), "2147483647 x 2147483647"),
        (raw_png(2000, 2000, 1, 0, zlib.compress(b"\0" * 251 * 2000)), "2000 x 2000"),
        (raw_png(8, 8, data=zlib.compress(b"\0" * 200), extra=LONG_TEXT), "large"),
    ],
    ids=range(13),
)  # fmt: skip
def test_what_is_wrong_is_said(data: bytes, text: str) -> None:
    with pytest.raises(UnreadablePicture, match=text):
        decode(data, MOST)


def test_a_frame_may_not_be_larger_than_the_header_says() -> None:
    data = bytearray(saved(Image.new("P", (8, 8)), "GIF"))
    place = data.index(b",", 13)  # the frame's descriptor: left, top, width, height
    data[place + 5 : place + 9] = struct.pack("<HH", 60000, 60000)
    with pytest.raises(UnreadablePicture):
        decode(bytes(data), MOST)


def seeds() -> list[bytes]:
    frames = [Image.fromarray(noise(seed, 20, 12)) for seed in range(3)]
    found = [saved(frames[0], form) for form in ("PNG", "JPEG", "WEBP", "GIF", "BMP")]
    found += [saved(frames[0].convert(mode), "PNG") for mode in ("P", "LA", "RGBA", "1")]
    found += [saved(frames[0], form, save_all=True, append_images=frames[1:]) for form in ("PNG", "WEBP", "GIF")]
    return [*found, saved(frames[0], "JPEG", progressive=True), saved(frames[0].convert("CMYK"), "JPEG")]


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Some bytes changed, a part removed, doubled or cut off; often in the header."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 6)):
        place = rng.randrange(min(len(changed), rng.choice([40, 200, len(changed)])) or 1)
        match rng.randrange(5):
            case 0 | 1:
                changed[place : place + 1] = bytes([rng.choice([0, 1, 127, 128, 255, rng.randrange(256)])])
            case 2:
                del changed[place : place + rng.randint(1, 20)]
            case 3:
                changed[place:place] = changed[place : place + rng.randint(1, 200)]
            case 4:
                changed[place : place + 4] = struct.pack(
                    rng.choice("<>") + "I", rng.choice([0, 1, 2**16, 2**31, 2**32 - 1])
                )
    return bytes(changed[: rng.randint(1, len(changed))] if changed and rng.random() < 0.1 else changed)


@pytest.mark.parametrize("count", [400, pytest.param(10_000, marks=pytest.mark.slow)])
def test_random_files_give_pixels_or_a_refusal(count: int) -> None:
    rng, given, refused = random.Random(count), seeds(), 0
    for _ in range(count):
        try:
            pixels = decode(mutated(rng.choice(given), rng), 2**16)
            assert pixels.dtype == np.uint8 and pixels.shape[2] == 3 and pixels.size <= 3 * 2**16
        except UnreadablePicture:
            refused += 1
    assert count // 10 < refused < count
