"""Errors for clients: OpenAI's and, below ANTHROPIC_PATH, Anthropic's."""

from collections.abc import Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Scope

from hybridrt.base.errors import (
    GrammarError,
    HybridrtError,
    MemoryBudgetError,
    NoTokenLeftError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
    UnavailableError,
    shown,
)
from hybridrt.server.wire.sse import DONE, encode, event, named_events

ANTHROPIC_PATH = "/v1/messages"
# Errors of pydantic where an object's `type` is none of those that are known.
KIND_ERRORS = ("item_type", "tool_type", "block_type", "source_type")
_EITHER_PATH = "/v1/models"  # the header `anthropic-version` decides
RETRY_SECONDS = 1
NO_PATH = "there is no such path: GET /docs lists all of them, and those of OpenAI and Anthropic begin with /v1"
# Enough to quote a value; a body is not sent back.
_MESSAGE_CHARACTERS = 2000
_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = {
    401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error",
    503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


class APIError(Exception):
    """Answers a request with an error.

    Args:
        status: the HTTP status.
        field: a field of the body, as a path such as "stream_options.include_usage"; None: no
            single one is wrong.
        code: a word for programs.
        headers: headers of the answer, in addition to those of `error_response`.
    """

    def __init__(
        self,
        status: int,
        message: str,
        field: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.field, self.code, self.headers = status, message, field, code, headers or {}

    def body(self, anthropic: bool) -> dict[str, Any]:
        """{"error": {"message", "type", "param", "code"}}, or Anthropic's form."""
        message = self.message[:_MESSAGE_CHARACTERS]
        if anthropic:
            kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
            return {"type": "error", "error": {"type": kind, "message": message}}
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": message, "type": kind, "param": self.field, "code": self.code}}


def wants_anthropic(scope: Scope) -> bool:
    """Whether the client of a request reads Anthropic's forms."""
    path: str = scope["path"]
    if path.startswith(_EITHER_PATH):
        return any(name == b"anthropic-version" for name, _ in scope["headers"])
    return path.startswith(ANTHROPIC_PATH)


def as_api_error(error: BaseException, names: dict[str, str] | None = None) -> APIError:
    """An error for the client. One that was not raised on purpose says nothing of its cause.

    Args:
        names: the endpoint's other names for fields of SamplingParams.
    """
    match error:
        case APIError():
            return error
        case RequestError():
            first, *rest = (error.field or "").split(".")
            code = "context_length_exceeded" if isinstance(error, PromptTooLongError) else None
            return APIError(400, str(error), ".".join([(names or {}).get(first, first), *rest]) or None, code)
        case MemoryBudgetError():
            return APIError(400, str(error), (names or {}).get("max_tokens", "max_tokens"))
        case QueueFullError():
            return APIError(429, str(error), code="queue_full")
        case UnavailableError():
            return APIError(503, str(error), code="unavailable")
        case NoTokenLeftError():
            return APIError(400, str(error))
        case GrammarError():
            return APIError(400, str(error), (names or {}).get("structured_outputs", "structured_outputs"))
        case RequestValidationError():
            return _as_field_error(error)
        case HTTPException(status_code=400):  # FastAPI could not read the body
            text = "the body is no JSON: send UTF-8 that is not compressed, with numbers of up to 4,300 digits"
            return APIError(400, text)
        case HTTPException(status_code=404):
            return APIError(404, NO_PATH)
        case HTTPException():
            return APIError(error.status_code, str(error.detail), headers=error.headers)
        case HybridrtError():
            return APIError(500, str(error))
    return APIError(500, "the server has failed on this request; its log says why")


def stream_end(error: APIError, scope: Scope) -> bytes:
    """The end of a stream that has begun."""
    anthropic = wants_anthropic(scope)
    body = error.body(anthropic)
    return b"".join(named_events([body])) if anthropic else event(body) + DONE


def error_response(error: APIError, scope: Scope) -> Response:
    headers = dict(error.headers)
    if error.status in (429, 503):
        headers.setdefault("Retry-After", str(RETRY_SECONDS))
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return Response(encode(error.body(wants_anthropic(scope))), error.status, headers, "application/json")


def _as_field_error(error: RequestValidationError) -> APIError:
    """The error of the first wrong field. pydantic gives an error for each type that a field may have.
    The one of the deepest place is chosen; of several, one that is not about the type. If all are, the
    message names each type.
    """
    errors = error.errors()
    found = max(errors, key=lambda e: (len(e["loc"]), not e["type"].endswith("_type")), default=None)
    if found is None:
        return APIError(400, "the body cannot be used")
    if found["type"] == "json_invalid":
        return APIError(400, "the body is no JSON")
    if found["loc"] == ("body",):
        return APIError(400, "the body must be a JSON object, sent with Content-Type: application/json")
    field, message = _path(found["loc"]), found["msg"].removeprefix("Value error, ")
    if found["type"].endswith("_type"):
        others = [e["msg"] for e in errors if e["type"].endswith("_type") and _path(e["loc"]) == field]
        message = " or ".join([message, *(msg.removeprefix("Input should be ") for msg in others if msg != message)])
    if found["type"] in KIND_ERRORS and isinstance(found["input"], dict):
        message = f"type is {shown(found['input'].get('type'))}; {message.replace('type must', 'it must', 1)}"
    return APIError(400, f"{field}: {message}" if field else message, field or None)


def _path(place: tuple[str | int, ...]) -> str:
    """Writes ("body", "messages", 0, "content") as messages.0.content."""
    is_type = ("list[", "dict[", "function-", "constrained-", "tagged-", "union")
    kept = [str(part) for part in place[1:] if not str(part).startswith(is_type)]
    while len(kept) > 1 and kept[-1] in ("str", "int", "float", "bool", "dict"):
        kept.pop()
    return ".".join(kept)
