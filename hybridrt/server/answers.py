"""Deltas as OpenAI's answers: one object, or a stream of chunks."""

from abc import abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from hybridrt.engine.async_llm import DeltaStream
from hybridrt.engine.outputs import Delta
from hybridrt.server.protocol import Sampling
from hybridrt.server.reply import Reply
from hybridrt.server.service import Service
from hybridrt.server.sse import DONE, encode

LEAST_LOGPROB = -9999.0  # instead of minus infinity, which JSON does not have


class Answer(Reply):
    """A list of choices; sample k of prompt i is choice i * n + k. A subclass says what a choice is."""

    whole_kind: str
    chunk_kind: str

    def __init__(self, service: Service, name: str, deltas: DeltaStream, body: Sampling) -> None:
        super().__init__(service, name, deltas, body)
        self._token_text = service.token_text
        self._names = service.token_numbers if body.return_tokens_as_token_ids else service.token_text
        self._prompts = {name: prepared.tokens for name, prepared in deltas.requests.items()}
        self._scores: dict[str, list[dict[int, float] | None]] = {}  # log-probabilities of prompts, by request
        self._wants_scores = body.prompt_logprobs is not None
        self._ranks = max(prepared.params.prompt_logprobs or 0 for prepared in deltas.requests.values())
        self._places: dict[tuple[str, int], int] = {}
        for request_id, prepared in deltas.requests.items():
            self._places |= {(request_id, k): len(self._places) + k for k in range(prepared.params.n)}
        options = body.stream_options
        self._usage_at_end = options is not None and bool(options.include_usage)
        self._usage_always = self._usage_at_end and options is not None and bool(options.continuous_usage_stats)
        self._wants_tokens = bool(body.return_token_ids)
        # What all chunks of a stream have in common is encoded once.
        self._before = b'data: %b,"choices":' % encode(self._head(self.chunk_kind))[:-1]
        self._behind = b',"usage":null}\n\n' if self._usage_at_end else b"}\n\n"

    def usage(self) -> dict[str, Any]:
        """Tokens so far."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.output_tokens,
            "total_tokens": self.prompt_tokens + self.output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def opening(self) -> bytes:
        """As Reply.opening."""
        first = (self._first_choice(i) for i in range(len(self._places)))
        return b"".join(self._event([choice]) for choice in first if choice is not None)

    def gain(self, delta: Delta) -> bytes:
        """As Reply.gain."""
        choice = self._gained(delta)
        return b"" if choice is None else self._event([choice])

    def _gained(self, delta: Delta) -> dict[str, Any] | None:
        """What a delta adds to a choice; None while its text is held back and nothing else was asked for."""
        self.count(delta)
        choice = self._chunk_choice(self._place(delta), delta)
        asked = self._wants_tokens or delta.logprobs is not None or delta.prompt_logprobs is not None
        silent = not self._has_gain(choice) and delta.finish_reason is None and not asked
        return None if silent else self._with_facts(choice, delta)

    def closing(self) -> bytes:
        """As Reply.closing."""
        return (self._event([], {"usage": self.usage()}) if self._usage_at_end else b"") + DONE

    def whole(self, ended: list[Delta]) -> dict[str, Any]:
        """The answer that is no stream, of one delta a sample."""
        choices = []
        for delta in sorted(ended, key=self._place):
            self.count(delta)
            choices.append(self._with_facts(self._whole_choice(self._place(delta), delta), delta))
        return {**self._head(self.whole_kind), "choices": choices, "usage": self.usage()}

    def _prompt_logprobs(self, request_id: str) -> dict[str, Any]:
        """A prompt's log-probabilities in vLLM's form; empty if the request did not ask for them. Only the likeliest
        tokens have a rank."""
        found = self._scores.get(request_id)
        return {"prompt_logprobs": [e and self._ranked(e) for e in found]} if self._wants_scores and found else {}

    def _ranked(self, found: dict[int, float]) -> dict[str, Any]:
        best = sorted(found, key=lambda token: -found[token])[: self._ranks]
        return {
            str(token): {
                "logprob": max(value, LEAST_LOGPROB),
                "rank": best.index(token) + 1 if token in best else None,
                "decoded_token": self._token_text.text(token),
            }
            for token, value in found.items()
        }

    @abstractmethod
    def _first_choice(self, index: int) -> dict[str, Any] | None:
        """The choice that opens a stream; None if a stream begins with its first text."""

    @abstractmethod
    def _chunk_choice(self, index: int, delta: Delta) -> dict[str, Any]:
        """What a delta adds to a choice."""

    @abstractmethod
    def _whole_choice(self, index: int, delta: Delta) -> dict[str, Any]:
        """The choice of an answer that is no stream."""

    @abstractmethod
    def _has_gain(self, choice: dict[str, Any]) -> bool:
        """Whether a delta has added anything to a choice."""

    def _place(self, delta: Delta) -> int:
        return self._places[delta.request_id, delta.index]

    def count(self, delta: Delta) -> None:
        """As Reply.count."""
        super().count(delta)
        if delta.prompt_logprobs is not None:
            self._scores[delta.request_id] = delta.prompt_logprobs

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.name, "object": kind, "created": self.created, "model": self.model}

    def _event(self, choices: list[dict[str, Any]], facts: Mapping[str, Any] = MappingProxyType({})) -> bytes:
        """A chunk of choices, and what stands beside them, as a server-sent event."""
        behind = self._behind
        if facts or self._usage_always:
            usage = {"usage": self.usage() if self._usage_always else None} if self._usage_at_end else {}
            behind = b",%b\n\n" % encode({**usage, **facts})[1:]
        return b"".join((self._before, encode(choices), behind))

    def _with_facts(self, choice: dict[str, Any], delta: Delta) -> dict[str, Any]:
        """A choice with what vLLM adds to OpenAI's: what has stopped it, and its tokens if the request wants them."""
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if self._wants_tokens:
            choice["token_ids"] = delta.token_ids
        return choice
