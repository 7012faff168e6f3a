"""Pictures of requests: data: URIs, bytes, files, arrays, Pillow's images, https addresses."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from hybridrt.base.errors import RequestError, reason, shown
from hybridrt.base.files import as_path, read_bytes
from hybridrt.images.jobs import UnreadablePicture

MAX_FILE_BYTES = 1 << 26
DETAILS = ("auto", "low", "high", "original")
IMAGE_PARTS = ("image_url", "image", "input_image", "image_pil")
FORMS = 'a "data:image/png;base64,..." URI'
_DATA = re.compile(r"data:([^,;]*)((?:;[^,;]*)*?)(;base64)?,", re.IGNORECASE)
_HEAD_CHARACTERS = 1024  # of a data: URI, before its data
_SCHEME = re.compile(r"\s*([a-zA-Z][a-zA-Z0-9+.-]*):")


@dataclass(frozen=True)
class Address:
    """An https address that is yet to be fetched."""

    url: str
    host: str
    port: int
    target: str


@dataclass(frozen=True)
class ImageSource:
    """A picture that is not decoded yet.

    Attributes:
        content: encoded bytes, base64 text of these, [h, w, 3] uint8 pixels, or an address.
        place: path of the part in the request, for errors.
        low: few pixels suffice.
    """

    content: bytes | str | np.ndarray | Address
    place: str
    low: bool = False


def read_image_part(part: Mapping[str, Any], place: str) -> ImageSource:
    """The picture of a part of a message: {"type": "image_url", "image_url": {"url", "detail"}} or
    a bare value under the type's name.

    Raises:
        RequestError: there is no picture, or of no known form.
    """
    kind = part["type"]
    name = "image_url" if kind == "input_image" or (kind == "image" and "image_url" in part) else kind
    value, detail = part.get(name), part.get("detail")
    where = f"{place}.{name}"
    if kind == "input_image" and value is None and part.get("file_id") is not None:
        raise RequestError(
            f"{place}.file_id: this server keeps no files; pass {FORMS} as image_url", f"{place}.file_id"
        )
    if isinstance(value, Mapping):
        where, detail = f"{where}.url", value.get("detail", detail)
        value = value.get("url")
    if detail is not None and detail not in DETAILS:
        raise RequestError(
            f"{place}: detail is {shown(detail)}; it must be one of {', '.join(DETAILS)}", f"{place}.detail"
        )
    return read_image(value, where, low=detail == "low")


def read_image(value: object, place: str, low: bool = False) -> ImageSource:
    """A picture given by a value.

    Args:
        value: a data: URI or an https address; in Python also bytes, a pathlib.Path, a Pillow
            image, or a uint8 array [h, w], [h, w, 1], [h, w, 3] or [h, w, 4].

    Raises:
        RequestError: it is something else, or a file that cannot be read.
    """
    if isinstance(value, str):
        return ImageSource(_from_text(value, place), place, low)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return ImageSource(bytes(value), place, low)
    if isinstance(value, os.PathLike):
        try:
            return ImageSource(read_bytes(as_path(place, value), MAX_FILE_BYTES), place, low)
        except OSError as e:
            raise RequestError(f"{place}: the image {value} cannot be read: {e.strerror or e}", place) from e
    if isinstance(value, np.ndarray):
        return ImageSource(_from_array(value, place), place, low)
    if hasattr(value, "getbands") and hasattr(value, "convert"):
        return ImageSource(_from_pillow(value, place), place, low)
    raise RequestError(
        f"{place} is {shown(value)}; it must be {FORMS}, in Python also bytes, a pathlib.Path, a Pillow image or a "
        "uint8 array",
        place,
    )


def _from_text(text: str, place: str) -> str | Address:
    found = _DATA.match(text, 0, _HEAD_CHARACTERS)
    if found is not None:
        if found[3] is None:
            raise RequestError(f"{place}: the data: URI of an image has no base64 data; it must be {FORMS}", place)
        return text[found.end() :]
    scheme = _SCHEME.match(text[:64])
    name = scheme[1].lower() if scheme else ""
    if name == "https" and not text[0].isspace():
        return _address(text, place)
    if name == "data":
        raise RequestError(
            f"{place}: the data: URI has no comma within {_HEAD_CHARACTERS} characters; it must be {FORMS}", place
        )
    if name == "http":
        raise RequestError(f"{place}: http: addresses of images are never fetched; pass {FORMS}", place)
    if name:
        raise RequestError(f"{place}: the scheme {name}: is not allowed for an image; pass {FORMS}", place)
    raise RequestError(
        f"{place} is {shown(text)}; an image must be {FORMS}; a path is read from Python alone, as a pathlib.Path",
        place,
    )


def _address(text: str, place: str) -> Address:
    refused = RequestError(f"{place} is {shown(text)}, which is no https address of an image; pass {FORMS}", place)
    if len(text) > 8192 or not text.isascii() or not text.isprintable() or " " in text:
        raise refused
    try:
        parts = urlsplit(text)
        port = parts.port or 443
    except ValueError as e:
        raise refused from e
    if parts.username is not None or parts.password is not None or not parts.hostname:
        raise refused
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Address(text, parts.hostname, port, target)


def _from_array(array: np.ndarray, place: str) -> np.ndarray:
    shaped = array[..., None] if array.ndim == 2 else array
    if array.dtype != np.uint8 or shaped.ndim != 3 or shaped.shape[2] not in (1, 3, 4) or 0 in shaped.shape:
        raise RequestError(
            f"{place} is an array {list(array.shape)} of {array.dtype}; an image is uint8 of [h, w], [h, w, 1], [h, w, "
            "3] or [h, w, 4]",
            place,
        )
    if shaped.shape[2] == 4:
        from PIL import Image

        return _from_pillow(Image.fromarray(np.ascontiguousarray(shaped)), place)
    return np.array(np.broadcast_to(shaped, (*shaped.shape[:2], 3)))  # the caller may change its own


def _from_pillow(image: Any, place: str) -> np.ndarray:
    from hybridrt.images.decode import pixels_of  # Pillow is slow to import

    try:
        return pixels_of(image)
    except (MemoryError, UnreadablePicture) as e:
        raise RequestError(f"{place}: the image cannot be used: {e}", place) from e
    except Exception as e:
        raise RequestError(f"{place}: the image cannot be read: {type(e).__name__}: {reason(e)}", place) from e
