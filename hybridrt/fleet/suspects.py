"""Requests that may be the reason why replicas were lost."""

import asyncio
import time
from collections import OrderedDict
from hashlib import blake2b

from hybridrt.server.core.bodies import SMALL

SUSPECTS = 1024  # that are remembered
SECONDS = 600.0  # for which each one is


class Suspects:
    """Counts by path and body in how many losses a request took part. One that ends is none."""

    def __init__(self) -> None:
        self._losses = OrderedDict[bytes, tuple[int, float]]()  # and the time of the last one

    async def add_loss(self, path: str, body: bytes) -> int:
        """A replica was lost while it had the request. Returns how many were by now."""
        name = await _name(path, body)
        count, at = self._losses.pop(name, (0, 0.0))
        now = time.monotonic()
        count = count + 1 if now - at < SECONDS else 1
        self._losses[name] = count, now
        if len(self._losses) > SUSPECTS:
            self._losses.popitem(last=False)
        return count

    async def clear(self, path: str, body: bytes) -> None:
        """The request has been answered."""
        if self._losses:
            self._losses.pop(await _name(path, body), None)


async def _name(path: str, body: bytes) -> bytes:
    if len(body) > SMALL:
        return await asyncio.to_thread(_hash, path, body)
    return _hash(path, body)


def _hash(path: str, body: bytes) -> bytes:
    return blake2b(body, key=path.encode()[:64], digest_size=16).digest()
