"""Reads JSON bodies; the cost is known and limited before.

Reading JSON keeps Python's lock to its end, so a thread alone does not help others: 16 MiB of text
take 30 ms, but the same length of `[1,1,1,…` 650. The fields of a large body are checked in a
thread that rests between two elements of a list (hybridrt/base/pace.py).
"""

import json
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, get_type_hints

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Scope

from hybridrt.base.pace import rest
from hybridrt.engine.api.async_llm import AsyncLLM
from hybridrt.engine.api.lanes import lane_of

MAX_OBJECTS = 2**15  # checking one takes 4 microseconds
MAX_VALUES = 2**18  # the longest prompt's tokens
SMALL = 2**15  # bytes that are read at once
PART_BYTES = 2**18
_BODY_BYTES = "hybridrt.body_bytes"


def body_bytes(scope: Scope) -> int:
    """How long the body was that a request has brought."""
    found: int = scope.get(_BODY_BYTES, 0)
    return found


def add_body_bytes(scope: Scope, more: int) -> None:
    """Counts bytes that a request has not brought and names, as those of its body."""
    scope[_BODY_BYTES] = body_bytes(scope) + more


def route_class(llm: AsyncLLM) -> type[APIRoute]:
    """Routes whose bodies are limited."""
    most = max(MAX_VALUES, llm.llm.plan.max_model_len + SMALL)

    class LimitedRequest(Request):
        """A request with its checked body: `read` is the body, or the error that it gave; None: not read yet."""

        read: Any = None

        async def json(self) -> Any:
            if isinstance(self.read, Exception):
                raise self.read
            return json.loads(await self.body()) if self.read is None else self.read

        async def prepare(self, model: type[BaseModel]) -> None:
            """Uses a thread: FastAPI would check in the event loop, but takes an object of the
            model as it is.
            """
            body = await self.body()
            self.scope[_BODY_BYTES] = len(body)
            if len(body) > SMALL:
                self.read = await llm.in_thread(partial(read_body, body, most, model), lane=lane_of(len(body)))

    class LimitedRoute(APIRoute):
        """Checks the body before FastAPI does."""

        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle, model = super().get_route_handler(), _model_of(self.endpoint)

            async def limited(request: Request) -> Response:
                found = LimitedRequest(request.scope, request.receive)
                if model is not None:
                    with suppress(ClientDisconnect):  # FastAPI meets it again
                        await found.prepare(model)
                return await handle(found)

            return limited

    return LimitedRoute


def _model_of(endpoint: Callable[..., Any]) -> type[BaseModel] | None:
    kinds = [kind for name, kind in get_type_hints(endpoint).items() if name != "return" and isinstance(kind, type)]
    return next((kind for kind in kinds if issubclass(kind, BaseModel)), None)


def read_body(body: bytes, max_values: int, model: type[BaseModel]) -> Any:
    """An object of a model from a JSON text. JSON that is no object comes as it is; for other text,
    the exception.

    Raises:
        HTTPException: the errors of `check_body`.
        RequestValidationError: a field is invalid.
    """
    check_body(body, max_values)
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as e:
        return e
    rest()
    if not isinstance(value, dict):
        return value
    try:
        return model.model_validate(value, from_attributes=True)  # as FastAPI does
    except ValidationError as e:
        raise RequestValidationError([{**error, "loc": ("body", *error["loc"])} for error in e.errors()]) from e


def check_body(body: bytes, max_values: int) -> None:
    """Counts a JSON text, PART_BYTES at a time.

    Raises:
        HTTPException: it has too many values or objects.
    """
    values = objects = quotes = 0
    for part, outside in _parts(body):
        rest()
        objects += outside.count(b"{")
        values += outside.count(b",") + outside.count(b"[") + outside.count(b"{")
        quotes += part
        for what, found, most in (("values", max(values, quotes // 4), max_values), ("objects", objects, MAX_OBJECTS)):
            if found > most:
                text = f"the body has more than {most} JSON {what}, which is the limit: send several requests"
                raise HTTPException(413, text)


def _parts(body: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields for each part of a JSON text its quotation marks (at most four for a value and its
    key), and the text outside of strings.
    """
    start, inside = 0, 0
    while start < len(body):
        part = body[start : start + PART_BYTES]
        if (len(part) - len(part.rstrip(b"\\"))) % 2:  # an escape is not cut
            part = body[start : start + PART_BYTES + 1]
        start += len(part)
        bits = part.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')
        yield len(bits) - 1, b"".join(bits[inside::2])
        inside = (inside + len(bits) - 1) % 2
