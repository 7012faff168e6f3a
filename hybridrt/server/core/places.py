"""Names the part of a client's body that an error of the inner chat request means."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from hybridrt.base.errors import RequestError

_INNER = re.compile(r"messages\.(\d+)(?:\.content(?:\.(\d+)(?:\.\w+)*)?)?")


class Turn(NamedTuple):
    """A message of a chat request, and where it comes from.

    Attributes:
        place: of its content in the body.
        parts: places of the content's parts; None: the part i is at `place`.i.
    """

    message: dict[str, Any]
    place: str
    parts: Sequence[str] | None = None


@contextmanager
def named_in(turns: Callable[[], Sequence[Turn]]) -> Iterator[None]:
    """Errors name places of the body. `turns` is called if there is one."""
    try:
        yield
    except RequestError as e:
        found = _INNER.match(e.field or "")
        if type(e) is not RequestError or found is None:
            raise
        known = turns()
        if int(found[1]) >= len(known):
            raise
        text = _INNER.sub(lambda inner: _outer(inner, known), str(e), count=1) if _INNER.match(str(e)) else str(e)
        raise RequestError(text, _INNER.sub(lambda inner: _outer(inner, known), str(e.field), count=1)) from e


def _outer(inner: re.Match[str], turns: Sequence[Turn]) -> str:
    turn, part = turns[int(inner[1])], inner[2]
    if part is None:
        return turn.place if ".content" in inner[0] else turn.place.rpartition(".")[0] or turn.place
    if turn.parts is not None:
        return turn.parts[int(part)]
    return turn.place + inner[0].split(".content", 1)[1]
