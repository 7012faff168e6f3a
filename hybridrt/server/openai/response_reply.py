"""Answers of /v1/responses: items and their events."""

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, NamedTuple

from starlette.types import Scope

from hybridrt.base.sampling_params import SamplingParams
from hybridrt.chat.events import CallBegin, GrowingText
from hybridrt.engine.api.async_llm import DeltaStream
from hybridrt.engine.api.chats import PreparedChat
from hybridrt.engine.request.outputs import Delta
from hybridrt.server.core.reply import BlockKind, BlockReply
from hybridrt.server.core.response_store import ResponseStore, StoredResponse
from hybridrt.server.core.service import Service
from hybridrt.server.core.text_tokens import TextPiece, TextTokens
from hybridrt.server.openai.custom_calls import input_of
from hybridrt.server.openai.response_protocol import BuiltIn, CustomTool, ResponseRequest
from hybridrt.server.wire.errors import APIError
from hybridrt.server.wire.sse import encode, named_events

_ITEMS: dict[BlockKind, tuple[str, str, str]] = {
    "text": ("message", "msg", "output_text"),
    "reasoning": ("reasoning", "rs", "reasoning_text"),
    "call": ("function_call", "fc", "function_call_arguments"),
}
_CUSTOM = ("custom_tool_call", "ctc", "custom_tool_call_input")
_STATUS = {"length": "incomplete", "abort": "cancelled"}


class Repeated(NamedTuple):
    """The fields of a request that its response repeats, and their length as JSON."""

    fields: dict[str, Any]
    size: int


def repeated(body: ResponseRequest, params: SamplingParams) -> Repeated:
    """The fields of a request that its response repeats.

    Raises:
        APIError: something in them cannot be written as JSON.
    """
    asked = _asked(body, params)
    try:
        return Repeated(asked, len(encode(asked)))
    except (ValueError, OverflowError, RecursionError) as e:
        raise APIError(400, f"a response repeats metadata, tools and text, and these cannot be written: {e}") from e


def _asked(body: ResponseRequest, params: SamplingParams) -> dict[str, Any]:
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
        "temperature": params.temperature,
        "text": {"format": body.text.format.model_dump(by_alias=True, exclude_none=True)}
        if body.text and body.text.format
        else {"format": {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": [tool.model_dump() for tool in body.tools or () if not isinstance(tool, BuiltIn)],
        "truncation": body.truncation or "disabled",
        "previous_response_id": body.previous_response_id,
        "top_p": params.top_p,
        "user": body.user,
    }


@dataclass(frozen=True)
class Kept:
    """Where a response is stored: the store, whose it is, the items of its request, and the
    response that it continues."""

    store: ResponseStore
    owner: str
    input: bytes
    previous: str | None


class ResponseReply(BlockReply):
    """A response. Its events are numbered from 0.

    Args:
        asked: `repeated`.
        kept: where it is stored at its end; None: nowhere.
    """

    def __init__(
        self,
        service: Service,
        name: str,
        deltas: DeltaStream,
        body: ResponseRequest,
        prepared: PreparedChat,
        asked: Repeated,
        kept: Kept | None = None,
    ) -> None:
        super().__init__(service, name, deltas, body, prepared)
        self.shows_reasoning = body.include_reasoning is not False
        self._items: list[dict[str, Any]] = []
        self._written = GrowingText()  # text that the open item has written
        self._tokens = TextTokens(service.token_text, body.top_logprobs or 0) if body.wants_logprobs else None
        self._logprobs: list[dict[str, Any]] = []  # those of the open item's text
        self._sent = 0
        self._error: dict[str, Any] | None = None
        self._asked = asked
        self._kept, self._stored = kept, kept is not None
        self._background = bool(body.background)
        self._custom = {tool.name for tool in body.own_tools if isinstance(tool, CustomTool)}
        self._namespaces = body.namespaces

    @property
    def has_ended(self) -> bool:
        """Whether it is complete, cut, cancelled or has failed."""
        return bool(self.reader.finish_reason or self._error)

    def body(self) -> dict[str, Any]:
        reason = self.reader.finish_reason
        status = "failed" if self._error else _STATUS.get(reason, "completed") if reason else "in_progress"
        return {
            "id": self.name,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": self._background,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.model,
            "output": self._items,
            "store": self._stored,
            "usage": self._usage() if reason else None,
            **self._asked.fields,
        }

    def weight(self, delta: Delta) -> int:
        """See Reply.weight. A whole response repeats fields of its request, and is stored."""
        return super().weight(delta) + (self._asked.size // 32 if delta.finish_reason is not None else 0)

    def closing_weight(self) -> int:
        """See Reply.closing_weight."""
        return super().closing_weight() + self._asked.size // 32

    def fail(self, error: APIError) -> None:
        """Keeps a response that has failed, for those who ask for it."""
        self._error = {"code": "server_error", "message": error.message}
        self._keep()

    def failure(self, error: APIError, scope: Scope) -> bytes:
        self.fail(error)
        return b"".join(named_events([self._event("response.failed", response=self.body())]))

    def _usage(self) -> dict[str, Any]:
        return {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": self.output_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reader.reasoning_tokens},
            "total_tokens": self.prompt_tokens + self.output_tokens,
        }

    def _keep(self) -> bool:
        if self._kept is None:
            return False
        head = encode({name: value for name, value in self.body().items() if name != "output"})
        output = {item["id"]: encode(_without_logprobs(item)) for item in self._items}
        stored = StoredResponse(head, output, self._kept.input, self._kept.previous)
        return self._kept.store.put(self._kept.owner, self.name, stored)

    def _begin(self) -> Iterator[dict[str, Any]]:
        yield self._event("response.created", response=self.body())
        yield self._event("response.in_progress", response=self.body())

    def _start_block(self, kind: BlockKind, call: CallBegin | None) -> Iterator[dict[str, Any]]:
        custom = call is not None and call.name in self._custom
        name, prefix, _ = _CUSTOM if custom else _ITEMS[kind]
        # It follows from the response's id, so that a response which is resumed keeps it.
        number = sha256(f"{self.name}/{len(self._items)}".encode()).hexdigest()[:32]
        item: dict[str, Any] = {"id": f"{prefix}_{number}", "type": name, "status": "in_progress"}
        if call is not None:
            space, own = self._namespaces.get(call.name, (None, call.name))
            item |= {"call_id": call.id, "name": own, "input" if custom else "arguments": ""}
            item |= {} if space is None else {"namespace": space}
        elif kind == "text":
            item |= {"role": "assistant", "content": []}
        else:
            item |= {"summary": [], "content": []}
        self._items.append(item)
        self._written, self._logprobs = GrowingText(), []
        yield self._of_output("response.output_item.added", item=item)
        if call is None:
            yield self._of_item("response.content_part.added", content_index=0, part=self._part(kind))

    def _pieces(self, delta: Delta) -> Iterator[TextPiece]:
        if self._tokens is None or delta.logprobs is None:  # those of another run have none
            return super()._pieces(delta)
        return self._tokens.pieces(delta)

    def _add(self, kind: BlockKind, text: str) -> Iterator[dict[str, Any]]:
        self._written.add(text)
        tokens = self._tokens
        found = [] if tokens is None else tokens.tokens_of_text(text) if kind != "call" else tokens.drop()
        if kind == "call" and "input" in self._items[-1]:
            return  # known at the end of its JSON text
        if kind != "text":
            yield self._of_text(kind, "delta", delta=text)
            return
        self._logprobs += found
        yield self._of_text(kind, "delta", delta=text, logprobs=found)

    def _end_block(self, kind: BlockKind) -> Iterator[dict[str, Any]]:
        item = self._items[-1]
        if kind == "call" and "input" in item:
            item["input"] = input_of(self._written.read())
            for what, field in (("delta", "delta"), ("done", "input")):
                yield self._of_item(f"response.{_CUSTOM[2]}.{what}", **{field: item["input"]})
        elif kind == "call":
            item["arguments"] = self._written.read()
            yield self._of_text(kind, "done", arguments=self._written.read(), name=item["name"])
        else:
            part = self._part(kind)
            item["content"] = [part]
            logprobs = {"logprobs": self._logprobs} if kind == "text" else {}
            yield self._of_text(kind, "done", text=self._written.read(), **logprobs)
            yield self._of_item("response.content_part.done", content_index=0, part=part)
        item["status"] = "incomplete" if self.reader.finish_reason in _STATUS else "completed"
        yield self._of_output("response.output_item.done", item=item)

    def _end(self) -> Iterator[dict[str, Any]]:
        if not self._items:  # clients expect a message
            yield from self._open("text")
            yield from self._close()
        end = "incomplete" if self.reader.finish_reason in _STATUS else "completed"
        self._stored = self._keep()  # before the client knows of the end
        yield self._event(f"response.{end}", response=self.body())

    def _of_text(self, kind: BlockKind, what: str, **fields: Any) -> dict[str, Any]:
        place = {} if kind == "call" else {"content_index": 0}
        return self._of_item(f"response.{_ITEMS[kind][2]}.{what}", **place, **fields)

    def _of_item(self, kind: str, **fields: Any) -> dict[str, Any]:
        return self._of_output(kind, item_id=self._items[-1]["id"], **fields)

    def _of_output(self, kind: str, **fields: Any) -> dict[str, Any]:
        return self._event(kind, output_index=len(self._items) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        number = self._sent
        self._sent += 1
        return {"type": kind, "sequence_number": number, **fields}

    def _part(self, kind: BlockKind) -> dict[str, Any]:
        if kind == "reasoning":
            return {"type": "reasoning_text", "text": self._written.read()}
        return {"type": "output_text", "text": self._written.read(), "annotations": [], "logprobs": self._logprobs}


def _without_logprobs(item: dict[str, Any]) -> dict[str, Any]:
    """A conversation goes on without them, and they are most of its JSON values."""
    parts = item.get("content")
    if not parts:
        return item
    return item | {"content": [part | {"logprobs": []} if "logprobs" in part else part for part in parts]}
