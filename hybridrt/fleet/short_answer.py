"""Asks a replica for an answer that is short, and reads no more than it may have."""

from collections.abc import Mapping
from dataclasses import dataclass

import httpx

from hybridrt.base.errors import MessageError


@dataclass(frozen=True)
class ShortAnswer:
    """`kind`: the content type, if there is one."""

    status: int
    kind: str | None
    body: bytes


async def short_answer(
    client: httpx.AsyncClient,
    method: str,
    url: str,
    most: int | None,
    headers: Mapping[bytes, bytes] | None = None,
    content: bytes | None = None,
) -> ShortAnswer:
    """The answer, as it was sent: nothing is unpacked. `most` None: its body is not read. The caller
    limits the time.

    Raises:
        MessageError: its body has more than `most` bytes. httpx.HTTPError: there is none.
    """
    async with client.stream(method, url, headers=headers, content=content) as answer:
        answer.headers.encoding = "latin-1"  # each byte is a character, which goes back as this byte
        body, kind = bytearray(), answer.headers.get("content-type")
        if most is None:
            return ShortAnswer(answer.status_code, kind, b"")
        async for chunk in answer.aiter_raw():
            body += chunk
            if len(body) > most:
                raise MessageError(f"{url} answers more than {most} bytes")
        return ShortAnswer(answer.status_code, kind, bytes(body))
