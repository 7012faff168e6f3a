"""Messages between the pool and a child process that decodes pictures."""

from typing import Literal

import msgspec

from hybridrt.channel.request_child import RequestRefusedError


class UnreadablePicture(RequestRefusedError):
    """No pixels can be had of a picture. The text says why."""


class Job(msgspec.Struct):
    """A picture. `form`: whether `data` is the file itself, or base64 of it."""

    form: Literal["file", "base64"]
    data: bytes
    max_pixels: int


class Decoded(msgspec.Struct):
    """Facts of a picture that is decoded. Its pixels follow them in the answer: [height, width, 3]
    uint8. `digest`: sha256 of sides and pixels."""

    height: int
    width: int
    digest: bytes
