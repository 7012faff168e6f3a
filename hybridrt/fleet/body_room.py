"""Memory for bodies of requests: bounded, however many clients send large ones."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.types import Receive

from hybridrt.server.core.bodies import SMALL
from hybridrt.server.wire.errors import APIError

MAX_BYTES = 2**30
BODY_SECONDS = 60.0  # that a body may take to come


class BodyRoom:
    """Attributes: `used`: bytes of bodies whose requests have not ended."""

    def __init__(self) -> None:
        self.used = 0

    @asynccontextmanager
    async def read(self, receive: Receive) -> AsyncIterator[bytes]:
        """A body. It has its room until the block ends. The guard limits its length.

        Raises:
            APIError: it is large and there is no room, or it takes too long.
        """
        body = bytearray()
        try:
            try:
                async with asyncio.timeout(BODY_SECONDS):
                    await self._read(receive, body)
            except TimeoutError as e:
                raise APIError(408, f"the body has not come within {BODY_SECONDS:g} seconds", code="timeout") from e
            yield bytes(body)
        finally:
            self.used -= len(body)

    async def _read(self, receive: Receive, body: bytearray) -> None:
        more = True
        while more:
            message = await receive()
            part = message.get("body", b"")
            body += part
            self.used += len(part)
            if len(body) > SMALL and self.used > MAX_BYTES:
                text = "large requests fill the router's memory; send this one again later"
                raise APIError(503, text, code="unavailable")
            more = message["type"] == "http.request" and message.get("more_body", False)
