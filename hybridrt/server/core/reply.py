"""Answers of all endpoints: bytes of a stream or one object, and counts for the access log."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

from starlette.types import Scope

from hybridrt.chat.events import CallArguments, CallBegin, Content, Event, Reasoning
from hybridrt.engine.api.async_llm import DeltaStream
from hybridrt.engine.api.chats import PreparedChat
from hybridrt.engine.request.outputs import Delta
from hybridrt.engine.request.sample_request import resumed_text
from hybridrt.server.core.protocol import Sampling
from hybridrt.server.core.service import RequestBody, Service
from hybridrt.server.core.text_tokens import TextPiece
from hybridrt.server.wire.errors import APIError, stream_end
from hybridrt.server.wire.sse import named_events

BlockKind = Literal["text", "reasoning", "call"]


class Reply(ABC):
    """An answer while it is made.

    Args:
        name: the answer's id.
        deltas: the stream of the requests that run for it.
        body: body of the request; `streams` says whether as a stream.

    Attributes:
        warnings: what of the request was left out, for the header `Warning`; ASCII, without quotes.
        resumes: the client has the first tokens from another run: the rest alone is written.
        in_thread: runs work in a thread that makes large answers. `weight` says what is large.
    """

    warnings: Sequence[str] = ()

    def __init__(self, service: Service, name: str, deltas: DeltaStream, body: RequestBody) -> None:
        self.name, self.deltas, self.streams = name, deltas, bool(body.stream)
        self.model = body.model or service.names[0]
        self.created = int(time.time())
        self.prompt_tokens = sum(len(prepared.tokens) for prepared in deltas.requests.values())
        self.output_tokens = self.cached_tokens = 0
        self.in_thread = partial(service.llm.in_thread, lane="answer")
        asked = [p.params.alternatives for p in deltas.requests.values() if p.params.alternatives is not None]
        self._entries = 1 + max(asked) if asked else 0
        self._reasons: list[str] = []
        self._first: float | None = None
        self._tokenizer = service.llm.llm.tokenizer
        self.resumes = any(prepared.params.resume_token_ids for prepared in deltas.requests.values())

    def catch_up(self) -> None:
        """Reads the tokens that the client has, and writes nothing. Call it once, before the rest."""
        for _ in self.opening():
            pass
        for request_id, prepared in self.deltas.requests.items():
            text = resumed_text(self._tokenizer, prepared)
            self._take_resumed(Delta(request_id, 0, list(prepared.params.resume_token_ids), text))

    def _take_resumed(self, delta: Delta) -> None:
        for _ in self.gain(delta):
            pass

    @property
    def samples(self) -> int:
        """How many samples the answer has."""
        return sum(prepared.params.n for prepared in self.deltas.requests.values())

    @abstractmethod
    def whole(self, ended: list[Delta]) -> dict[str, Any]:
        """The object of an answer without a stream, from one delta a sample."""

    @abstractmethod
    def opening(self) -> Iterator[bytes]:
        """Bytes at the beginning of a stream, before all tokens."""

    @abstractmethod
    def gain(self, delta: Delta) -> Iterator[bytes]:
        """Bytes that a delta adds to a stream; none while its text is held back."""

    @abstractmethod
    def closing(self) -> Iterator[bytes]:
        """Bytes at the end of a stream, after all tokens."""

    def failure(self, error: APIError, scope: Scope) -> bytes:
        """Bytes at the end of a stream that an error has ended."""
        return stream_end(error, scope)

    def weight(self, delta: Delta) -> int:
        """Microseconds or so to make bytes of a delta: the event loop makes small ones itself."""
        samples = self.deltas.requests[delta.request_id].params.n  # a prompt's scores are written for each
        scores = samples * sum(len(chunk) * chunk.width for chunk in delta.prompt_scores or ())
        return len(delta.token_ids) * (1 + self._entries) // 2 + len(delta.text) // 8 + scores

    def closing_weight(self) -> int:
        """Microseconds or so to make the bytes of `closing`."""
        return 0

    def facts(self) -> dict[str, Any]:
        """Fields of the access log."""
        return {
            "output_tokens": self.output_tokens,
            "cached_tokens": self.cached_tokens,
            "finish_reasons": self._reasons,
            "time_to_first_token": self._first,
        }

    def count(self, delta: Delta) -> None:
        """Counts a delta. Subclasses call it with every one."""
        self.output_tokens += len(delta.token_ids)
        if delta.finish_reason is not None and delta.metrics is not None:
            self._reasons.append(delta.finish_reason)
            self.cached_tokens += delta.metrics.cached_tokens if delta.index == 0 else 0  # a prompt counts once
            if delta.metrics.first_token_time is not None:
                first = delta.metrics.first_token_time - delta.metrics.arrival_time
                self._first = round(first if self._first is None else min(self._first, first), 6)


class BlockReply(Reply):
    """One sample's answer as a list of blocks, in named events. The object without a stream is made
    by the same methods.

    Attributes:
        reader: parses the answer; holds the message so far.
        shows_reasoning: whether blocks of reasoning are sent.
    """

    shows_reasoning = True

    def __init__(
        self, service: Service, name: str, deltas: DeltaStream, body: Sampling, prepared: PreparedChat
    ) -> None:
        super().__init__(service, name, deltas, body)
        self.reader = prepared.new_answer()
        self.reader.name_calls(name)
        self._kind: BlockKind | None = None  # kind of the block that is open

    @abstractmethod
    def body(self) -> dict[str, Any]: ...

    @abstractmethod
    def _begin(self) -> Iterable[dict[str, Any]]: ...

    @abstractmethod
    def _start_block(self, kind: BlockKind, call: CallBegin | None) -> Iterable[dict[str, Any]]: ...

    @abstractmethod
    def _add(self, kind: BlockKind, text: str) -> Iterable[dict[str, Any]]: ...

    @abstractmethod
    def _end_block(self, kind: BlockKind) -> Iterable[dict[str, Any]]:
        """Sets `reader.finish_reason` at the last one."""

    @abstractmethod
    def _end(self) -> Iterable[dict[str, Any]]: ...

    def opening(self) -> Iterator[bytes]:
        return named_events(self._begin())

    def gain(self, delta: Delta) -> Iterator[bytes]:
        return named_events(self._read(delta))

    def closing(self) -> Iterator[bytes]:
        return named_events(self._end())

    def weight(self, delta: Delta) -> int:
        """See Reply.weight. The last event of a block repeats all of it."""
        written = self.output_tokens * (1 + self._entries) // 2 if delta.finish_reason is not None else 0
        return super().weight(delta) + written

    def closing_weight(self) -> int:
        """See Reply.closing_weight. The last event repeats the answer."""
        return self.output_tokens * (1 + self._entries) // 2

    def whole(self, ended: list[Delta]) -> dict[str, Any]:
        for events in (self._begin(), self._read(ended[0]), self._end()):
            for _ in events:
                pass
        return self.body()

    def _read(self, delta: Delta) -> Iterator[dict[str, Any]]:
        self.count(delta)
        for piece in self._pieces(delta):
            for event in self.reader.read(*piece):
                yield from self._take(event)
        if delta.finish_reason is not None:
            yield from self._close()

    def _pieces(self, delta: Delta) -> Iterator[TextPiece]:
        yield delta.text, delta.token_ids, delta.finish_reason

    def _take(self, event: Event) -> Iterator[dict[str, Any]]:
        match event:
            case CallBegin():
                yield from self._open("call", event)
            case CallArguments():
                yield from self._add("call", event.text)
            case Reasoning() if not self.shows_reasoning:
                return
            case Content() | Reasoning():
                kind: BlockKind = "text" if isinstance(event, Content) else "reasoning"
                if self._kind != kind:
                    yield from self._open(kind)
                yield from self._add(kind, event.text)

    def _open(self, kind: BlockKind, call: CallBegin | None = None) -> Iterator[dict[str, Any]]:
        yield from self._close()
        self._kind = kind
        yield from self._start_block(kind, call)

    def _close(self) -> Iterator[dict[str, Any]]:
        if self._kind is not None:
            yield from self._end_block(self._kind)
        self._kind = None
