"""Formats of files and streams that another version may read: a name, a number, and why others are refused."""

import re
from dataclasses import dataclass

import msgspec

from hybridrt.base.errors import shown
from hybridrt.base.version import __version__

MAX_NUMBER = 9  # digits


@dataclass(frozen=True)
class Format:
    """What a version writes into each file of a kind, and the only one that it reads.

    Attributes:
        name: of the kind; the same in all versions.
        number: of the form. A form that earlier readers would misread has the next number.
        remedy: what to do with a file of another number.
    """

    name: str
    number: int
    remedy: str

    def __str__(self) -> str:
        return f"{self.name} {self.number}"

    def refusal(self, found: object) -> str | None:
        """Why a file is not read whose format is `found` (None: it has none), with what to do. None if it is this
        one."""
        if found == str(self):
            return None
        number = re.fullmatch(rf"{self.name} ([0-9]{{1,{MAX_NUMBER}}})", found) if isinstance(found, str) else None
        if number is None:
            return f"its format is {shown(found)}, not '{self}'"
        newer = int(number[1]) > self.number
        whose, remedy = ("a newer", f"use that version, or {self.remedy}") if newer else ("an earlier", self.remedy)
        return f"its format is {found!r}, of {whose} version; hybridrt {__version__} reads '{self}': {remedy}"


class Head(msgspec.Struct):
    """The format of a JSON object, and nothing else of it."""

    format: object = None


def json_format(data: bytes) -> object:
    """The field "format" of a JSON object, whatever else is in it; None if it has none.

    Raises msgspec.MsgspecError if it is no JSON object.
    """
    return msgspec.json.decode(data, type=Head).format
