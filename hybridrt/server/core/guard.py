"""Guards every request: name, key, size, time, and line in the access log."""

import asyncio
import hmac
import json
import logging
import re
import time
import uuid
from collections.abc import Sequence
from itertools import product
from typing import Any

from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hybridrt.server.core.api_keys import client_names
from hybridrt.server.core.browser_page import wants_page
from hybridrt.server.core.config import ServerConfig
from hybridrt.server.core.pages import PageRules, check_content_type
from hybridrt.server.core.refusals import LargeBody, Refusals
from hybridrt.server.core.respond import CLIENT_GONE, FAILURE, ClientGone
from hybridrt.server.core.service import CLIENT, OWNER, RECORD
from hybridrt.server.wire.errors import APIError, error_response

OPEN_PATHS = ("/health", "/ping", "/ready")
FLEET_PATH = "/fleet/"
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_SECONDS = re.compile(rb"\d{1,9}(\.\d{1,9})?")
_SENT = "hybridrt.sent"
SECONDS = "hybridrt.seconds"  # of a scope: that its request may take
_SEND_SECONDS = 5.0  # the client may not read
access_log = logging.getLogger("hybridrt.access")
log = logging.getLogger("hybridrt.server")


class Guard:
    """An ASGI application around another one. Whatever happens inside, the client gets an answer or
    its connection ends.

    - `X-Request-Id` is taken from the request, or made, and sent back.
    - A request that names another host, comes from a page that may not call, or has a body that is
      not JSON is refused before its body is read, on every path (hybridrt/server/core/pages.py).
    - Pages of the allowed origins can read every answer, errors included (CORS).
    - Without a valid key only OPEN_PATHS answer, and the page for browsers if the application has
      one. Keys are compared in constant time. Below FLEET_PATH the fleet key is needed, and there
      is no limit of time.
    - A body that is too long is refused, before it is read if possible. The client then rests
      (hybridrt/server/core/refusals.py).
    - A request that takes too long ends with 504, or with an error event in a stream. The header
      `X-Request-Timeout` (seconds) sets a shorter time than the server's.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig, has_page: bool = False) -> None:
        self._app = app
        self._has_page = has_page
        self._config = config
        self._keys = [key.key.encode() for key in config.keys]
        self._clients = client_names(config.keys)
        self._refusals = Refusals()
        self._pages = PageRules(config.host, config.allowed_hosts, config.allowed_origins)
        self._entry: ASGIApp = self._answer
        if config.allowed_origins:
            self._entry = CORSMiddleware(
                self._answer,
                allow_origins=config.allowed_origins,
                allow_methods=("GET", "POST", "DELETE"),
                allow_headers=("*",),
                expose_headers=("Retry-After", "Warning", "X-Request-Id"),
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        root = self._config.root_path
        if root and scope["path"].startswith(root + "/"):  # a proxy may strip it or not
            scope["path"] = scope["path"][len(root) :]
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex.encode()
        answer = scope[_SENT] = _Sent(send, request_id)
        scope[RECORD] = {}
        began = time.monotonic()
        try:
            self._pages.check_sender(scope)
            await self._entry(scope, receive, answer)
        except APIError as e:  # before CORS: no page reads it
            await error_response(e, scope)(scope, receive, answer)
        finally:
            scope[RECORD].setdefault("status", answer.status)
            scope.pop(FAILURE, None)  # uvicorn keeps the scope until the next request
            probed = scope["path"] in OPEN_PATHS and answer.status == 200  # a router and Kubernetes ask each second
            if self._config.access_log and not probed:
                _write_line(scope, request_id, time.monotonic() - began)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, answer = dict(scope["headers"]), scope[_SENT]
        body = LargeBody(self._refusals, headers, receive)
        try:
            body.client = (scope.get("client") or ("",))[0], self._check(scope, headers)
            endless = scope["path"].startswith(FLEET_PATH)
            scope[SECONDS] = seconds = self._seconds(headers)
            async with asyncio.timeout(None if endless else seconds):
                await self._app(scope, _limited(body.receive, self._config.max_body_bytes), send)
        except ClientGone:
            answer.status = CLIENT_GONE
        except APIError as e:
            await error_response(e, scope)(scope, receive, send)
        except asyncio.CancelledError:
            # The event loop closes, after a second signal; uvicorn would write tracebacks.
            log.info("request %s is cut off", answer.request_id.decode())
        except TimeoutError:
            error = APIError(504, "the request has taken longer than it may", code="timeout")
            await answer.send_end(error, scope, receive, send)
        except Exception:
            log.exception("request %s failed", answer.request_id.decode())
            error = APIError(500, "the server has failed on this request; its log says why")
            await answer.send_end(error, scope, receive, send)
        finally:
            body.ended(answer.status)

    def _check(self, scope: Scope, headers: dict[bytes, bytes]) -> bytes:
        """Returns the key, b"" if none is needed. APIError refuses without reading the body."""
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and len(length) < 19 and int(length) > self._config.max_body_bytes:
            raise _too_long(self._config.max_body_bytes)
        if scope["path"].startswith(FLEET_PATH):
            return self._check_fleet_key(headers)
        is_open = scope["path"] in OPEN_PATHS or (self._has_page and wants_page(scope))
        asked = self._keys and not is_open
        key = self._check_key(headers, self._keys) if asked else b""
        if key:
            number = self._keys.index(key)
            scope[OWNER], scope[CLIENT] = f"key{number}/", self._clients[number]
        check_content_type(scope)
        return key

    def _check_fleet_key(self, headers: dict[bytes, bytes]) -> bytes:
        if self._config.fleet_key is None:
            raise APIError(404, "routers are not wanted here: start the server with a fleet key")
        return self._check_key(headers, [self._config.fleet_key.encode()])

    def _check_key(self, headers: dict[bytes, bytes], keys: Sequence[bytes]) -> bytes:
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        brought = bearer.strip() if scheme.lower() == b"bearer" else b"", headers.get(b"x-api-key", b"").strip()
        # All are compared: the time does not tell which one is near.
        matches = [known for key, known in product(brought, keys) if hmac.compare_digest(key, known)]
        if not matches:
            text = "a valid API key is needed: send it as Authorization: Bearer KEY, or as x-api-key: KEY"
            raise APIError(401, text, code="invalid_api_key")
        return matches[0]

    def _seconds(self, headers: dict[bytes, bytes]) -> float:
        asked = headers.get(b"x-request-timeout")
        if asked is None:
            return self._config.request_timeout
        if not _SECONDS.fullmatch(asked.strip()):
            raise APIError(400, "X-Request-Timeout must be a number of seconds, such as 2.5")
        return min(float(asked), self._config.request_timeout)


class _Sent:
    def __init__(self, send: Send, request_id: bytes) -> None:
        self._send = send
        self.request_id = request_id
        self.status = 0
        self.is_stream = self.ended = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [*message.get("headers", ()), (b"x-request-id", self.request_id)]
            message = {**message, "headers": headers}
            self.is_stream = any(n == b"content-type" and v.startswith(b"text/event-stream") for n, v in headers)
        await self._send(message)  # not sent if the deadline interrupts it
        self.ended = message["type"] == "http.response.body" and not message.get("more_body", False)

    async def send_end(self, error: APIError, scope: Scope, receive: Receive, send: Send) -> None:
        if not self.status:
            await error_response(error, scope)(scope, receive, send)
        elif self.is_stream and not self.ended:
            self.status = error.status
            last = scope[FAILURE](error, scope)
            try:
                async with asyncio.timeout(_SEND_SECONDS):
                    await self._send({"type": "http.response.body", "body": last, "more_body": False})
            except TimeoutError:
                log.info("request %s: the client does not read", self.request_id.decode())


def _limited(receive: Receive, max_bytes: int) -> Receive:
    got = 0

    async def limited() -> Message:
        nonlocal got
        message = await receive()
        got += len(message.get("body", b""))
        if got > max_bytes:
            raise HTTPException(413, _too_long(max_bytes).message)
        return message

    return limited


def _too_long(max_bytes: int) -> APIError:
    return APIError(413, f"the body has more than {max_bytes} bytes: send less, or serve with more --max-body-bytes")


def _write_line(scope: Scope, request_id: bytes, seconds: float) -> None:
    """Writes lengths, but no headers, query or body: secrets and texts are not logged."""
    line: dict[str, Any] = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "request_id": request_id.decode(),
        "client": (scope.get("client") or ("",))[0],
        "method": scope["method"],
        "path": scope["path"][:200],
        "seconds": round(seconds, 6),
        **scope[RECORD],
    }
    access_log.info(json.dumps(line))
