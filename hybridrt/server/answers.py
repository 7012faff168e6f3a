"""Deltas as OpenAI's answers: one object, or a stream of chunks."""

import time
from abc import ABC, abstractmethod
from typing import Any

from hybridrt.engine.async_llm import DeltaStream
from hybridrt.engine.outputs import Delta
from hybridrt.server.protocol import Sampling
from hybridrt.server.service import Service

LEAST_LOGPROB = -9999.0  # instead of minus infinity, which JSON does not have


class Answer(ABC):
    """What all endpoints that generate have in common. A subclass says what a choice is.

    Args:
        name: the answer's id.
        deltas: what runs for it. Sample k of prompt i is choice i * n + k.
    """

    whole_kind: str
    chunk_kind: str

    def __init__(self, service: Service, name: str, deltas: DeltaStream, body: Sampling) -> None:
        self.name = name
        self.model = body.model or service.names[0]
        self.created = int(time.time())
        self.prompt_tokens = sum(len(prepared.tokens) for prepared in deltas.requests.values())
        self.output_tokens = self.cached_tokens = 0
        self._token_text = service.token_text
        self._prompts = {name: prepared.tokens for name, prepared in deltas.requests.items()}
        self._scores: dict[str, list[dict[int, float] | None]] = {}  # log-probabilities of prompts, by request
        self._wants_scores = body.prompt_logprobs is not None
        self._ranks = max(prepared.params.prompt_logprobs or 0 for prepared in deltas.requests.values())
        self._reasons: list[str] = []
        self._first: float | None = None  # seconds to the first token of any sample
        self._places: dict[tuple[str, int], int] = {}
        for request_id, prepared in deltas.requests.items():
            self._places |= {(request_id, k): len(self._places) + k for k in range(prepared.params.n)}
        options = body.stream_options
        self._usage_at_end = options is not None and options.include_usage
        self._usage_always = self._usage_at_end and options is not None and options.continuous_usage_stats
        self._wants_tokens = bool(body.return_token_ids)

    def usage(self) -> dict[str, Any]:
        """Tokens so far."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.output_tokens,
            "total_tokens": self.prompt_tokens + self.output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def opening(self) -> list[dict[str, Any]]:
        """Chunks that come before all tokens."""
        return [
            self._chunk([choice]) for i in range(len(self._places)) if (choice := self._first_choice(i)) is not None
        ]

    def chunk(self, delta: Delta) -> dict[str, Any] | None:
        """What a delta adds to a stream; None while its text is held back and nothing else was asked for."""
        self._count(delta)
        choice = self._chunk_choice(self._place(delta), delta)
        asked = self._wants_tokens or delta.logprobs is not None or delta.prompt_logprobs is not None
        silent = not self._says(choice) and delta.finish_reason is None and not asked
        return None if silent else self._chunk([self._with_tokens(choice, delta)])

    def closing(self) -> dict[str, Any] | None:
        """The chunk that comes after all tokens, if there is one."""
        return {**self._chunk([]), "usage": self.usage()} if self._usage_at_end else None

    def whole(self, ended: list[Delta]) -> dict[str, Any]:
        """The answer that is no stream, of one delta a sample."""
        choices = []
        for delta in sorted(ended, key=self._place):
            self._count(delta)
            choices.append(self._with_tokens(self._whole_choice(self._place(delta), delta), delta))
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
    def _says(self, choice: dict[str, Any]) -> bool:
        """Whether what a delta adds to a choice is anything for the reader."""

    def _place(self, delta: Delta) -> int:
        return self._places[delta.request_id, delta.index]

    def facts(self) -> dict[str, Any]:
        """What the access log says of the answer."""
        return {
            "output_tokens": self.output_tokens,
            "cached_tokens": self.cached_tokens,
            "finish_reasons": self._reasons,
            "time_to_first_token": self._first,
        }

    def _count(self, delta: Delta) -> None:
        if delta.prompt_logprobs is not None:
            self._scores[delta.request_id] = delta.prompt_logprobs
        self.output_tokens += len(delta.token_ids)
        if delta.finish_reason is not None and delta.metrics is not None:
            self._reasons.append(delta.finish_reason)
            self.cached_tokens += delta.metrics.cached_tokens if delta.index == 0 else 0  # a prompt counts once
            if delta.metrics.first_token_time is not None:
                first = delta.metrics.first_token_time - delta.metrics.arrival_time
                self._first = round(first if self._first is None else min(self._first, first), 6)

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.name, "object": kind, "created": self.created, "model": self.model}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._head(self.chunk_kind), "choices": choices}
        if self._usage_at_end:
            chunk["usage"] = self.usage() if self._usage_always else None
        return chunk

    def _with_tokens(self, choice: dict[str, Any], delta: Delta) -> dict[str, Any]:
        return {**choice, "token_ids": delta.token_ids} if self._wants_tokens else choice
