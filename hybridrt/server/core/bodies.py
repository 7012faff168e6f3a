"""JSON bodies of requests: what reading one costs is known and limited before it is read.

Reading JSON and checking its fields are calls that keep Python's lock to their end: no other thread runs meanwhile, so
another thread alone does not help. 16 MiB of text are read in 30 ms, but the same length of `[1,1,1,…` in 650.
"""

import json
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.types import Scope

from hybridrt.engine.api.async_llm import AsyncLLM
from hybridrt.engine.api.lanes import lane_of

MAX_OBJECTS = 2**15  # checking the fields of one takes 4 microseconds
MAX_VALUES = 2**18  # or as many as the longest prompt has tokens
SMALL = 2**15  # bytes that are read at once, whatever they are
PART_BYTES = 2**18
_BODY_BYTES = "hybridrt.body_bytes"  # where a request's scope keeps the length of its body


def body_bytes(scope: Scope) -> int:
    """How long the body was that a request has brought."""
    found: int = scope.get(_BODY_BYTES, 0)
    return found


def route_class(llm: AsyncLLM) -> type[APIRoute]:
    """Routes whose bodies are limited."""
    most = max(MAX_VALUES, llm.llm.plan.max_model_len + SMALL)

    class LimitedRequest(Request):
        async def json(self) -> Any:
            body = await self.body()
            self.scope[_BODY_BYTES] = len(body)
            if len(body) <= SMALL:
                return json.loads(body)
            await llm.in_thread(check_body, body, most, lane=lane_of(len(body)))
            return await llm.in_thread(json.loads, body, lane=lane_of(len(body)))

    class LimitedRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def limited(request: Request) -> Response:
                return await handle(LimitedRequest(request.scope, request.receive))

            return limited

    return LimitedRoute


def check_body(body: bytes, max_values: int) -> None:
    """Looks at a JSON text, PART_BYTES at a time.

    Raises:
        HTTPException: it has too many values or objects.
    """
    values = objects = quotes = 0
    for part, outside in _parts(body):
        objects += outside.count(b"{")
        values += outside.count(b",") + outside.count(b"[") + outside.count(b"{")
        quotes += part
        for what, found, most in (("values", max(values, quotes // 4), max_values), ("objects", objects, MAX_OBJECTS)):
            if found > most:
                text = f"the body has more than {most} JSON {what}, which is the limit: send several requests"
                raise HTTPException(413, text)


def _parts(body: bytes) -> Iterator[tuple[int, bytes]]:
    """Of each part of a JSON text: its quotation marks (a value and its key have four at most), and what is outside of
    strings."""
    start, inside = 0, 0
    while start < len(body):
        part = body[start : start + PART_BYTES]
        if (len(part) - len(part.rstrip(b"\\"))) % 2:  # an escape is not cut
            part = body[start : start + PART_BYTES + 1]
        start += len(part)
        bits = part.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')
        yield len(bits) - 1, b"".join(bits[inside::2])
        inside = (inside + len(bits) - 1) % 2
