"""Answers of /v1/messages: content blocks and their events."""

from collections.abc import Iterator
from typing import Any

from pydantic_core import from_json

from hybridrt.chat.events import CallBegin, GrowingText
from hybridrt.engine.api.async_llm import DeltaStream
from hybridrt.engine.api.chats import PreparedChat
from hybridrt.engine.request.outputs import Delta
from hybridrt.server.anthropic.message_protocol import MessageRequest
from hybridrt.server.core.reply import BlockKind, BlockReply
from hybridrt.server.core.service import Service

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "abort": None}
_DELTAS: dict[BlockKind, tuple[str, str]] = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


class MessageReply(BlockReply):
    """A message of the assistant."""

    def __init__(
        self, service: Service, name: str, deltas: DeltaStream, body: MessageRequest, prepared: PreparedChat
    ) -> None:
        super().__init__(service, name, deltas, body, prepared)
        self._blocks: list[dict[str, Any]] = []
        self._written = GrowingText()  # text that the open block has written
        self._stopped_by: int | str | None = None
        self._omits_thinking = body.thinking is not None and body.thinking.display == "omitted"

    def body(self) -> dict[str, Any]:
        return {
            "id": self.name,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": self._blocks,
            **self._end_reason(),
            "usage": self._usage(),
        }

    def count(self, delta: Delta) -> None:
        super().count(delta)
        self._stopped_by = delta.stop_reason

    def _end_reason(self) -> dict[str, Any]:
        reason = self.reader.finish_reason
        by_text = reason == "stop" and isinstance(self._stopped_by, str)
        return {
            "stop_reason": "stop_sequence" if by_text else reason and _REASONS[reason],
            "stop_sequence": self._stopped_by if by_text else None,
        }

    def _usage(self) -> dict[str, Any]:
        """Tokens from the prefix cache are no input tokens. They are known at the end."""
        return {
            "input_tokens": self.prompt_tokens - self.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
        }

    def _begin(self) -> Iterator[dict[str, Any]]:
        yield {"type": "message_start", "message": self.body()}

    def _start_block(self, kind: BlockKind, call: CallBegin | None) -> Iterator[dict[str, Any]]:
        if call is not None:
            block: dict[str, Any] = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        elif kind == "text":
            block = {"type": "text", "text": ""}
        else:
            block = {"type": "thinking", "thinking": "", "signature": ""}
        self._blocks.append(block)
        self._written = GrowingText()
        yield self._event("content_block_start", content_block=block)

    def _add(self, kind: BlockKind, text: str) -> Iterator[dict[str, Any]]:
        if kind == "reasoning" and self._omits_thinking:
            return
        self._written.add(text)
        name, field = _DELTAS[kind]
        yield self._event("content_block_delta", delta={"type": name, field: text})

    def _end_block(self, kind: BlockKind) -> Iterator[dict[str, Any]]:
        if kind == "call":
            self._blocks[-1]["input"] = _object(self._written.read())
        else:
            self._blocks[-1][_DELTAS[kind][1]] = self._written.read()
        yield self._event("content_block_stop")

    def _end(self) -> Iterator[dict[str, Any]]:
        yield {"type": "message_delta", "delta": self._end_reason(), "usage": self._usage()}
        yield {"type": "message_stop"}

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": kind, "index": len(self._blocks) - 1, **fields}


def _object(arguments: str) -> dict[str, Any]:
    """Keeps the entries so far of a text that was cut off, as Anthropic's clients do. No JSON:
    empty.
    """
    try:
        value = from_json(arguments, allow_partial=True)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
