"""Deltas as OpenAI's answers: one object, or a stream of chunks."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from types import MappingProxyType
from typing import Any

from hybridrt.engine.api.async_llm import DeltaStream
from hybridrt.engine.request.outputs import Delta
from hybridrt.runtime.step.token_scores import TokenScores
from hybridrt.server.core.protocol import Sampling
from hybridrt.server.core.reply import Reply
from hybridrt.server.core.service import Service
from hybridrt.server.wire.sse import DONE, SLICE, Parts, Slices, encode, fields_of, pieces

# What clients of vLLM expect to be there in an answer that is no stream.
_NULLS: dict[str, None] = dict.fromkeys(("service_tier", "kv_transfer_params", "ec_transfer_params", "metrics"))
LEAST_LOGPROB = -9999.0  # instead of minus infinity, which JSON does not have


class Answer(Reply):
    """A list of choices; sample k of prompt i is choice i * n + k. Subclasses say what a choice is."""

    whole_kind: str
    chunk_kind: str

    def __init__(self, service: Service, name: str, deltas: DeltaStream, body: Sampling) -> None:
        super().__init__(service, name, deltas, body)
        self._token_text, self._fingerprint = service.token_text, service.fingerprint
        self._ends = frozenset(service.llm.llm.model_config.eos_token_ids)
        self._names = service.token_numbers if body.return_tokens_as_token_ids else service.token_text
        self._prompts = {name: prepared.tokens for name, prepared in deltas.requests.items()}
        self._scores: dict[str, list[TokenScores]] = {}
        self._wants_scores = body.prompt_logprobs is not None
        self._places: dict[tuple[str, int], int] = {}
        for request_id, prepared in deltas.requests.items():
            self._places |= {(request_id, k): len(self._places) + k for k in range(prepared.params.n)}
        options = body.stream_options
        self._usage_at_end = options is not None and bool(options.include_usage)
        self._usage_always = self._usage_at_end and options is not None and bool(options.continuous_usage_stats)
        self._wants_tokens = bool(body.return_token_ids)
        # What all chunks begin with, and what most end with, is encoded once.
        self._before = b'data: %b,"choices":' % encode(self._head(self.chunk_kind))[:-1]
        self._end = b',"usage":null}\n\n' if self._usage_at_end else b"}\n\n"

    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.output_tokens,
            "total_tokens": self.prompt_tokens + self.output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def opening(self) -> Iterator[bytes]:
        for index in range(len(self._places)):
            if (choice := self._first_choice(index)) is not None:
                yield from self._event(choice)

    def gain(self, delta: Delta) -> Iterator[bytes]:
        choice = self._gained(delta)
        if choice is not None:
            yield from self._event(choice, large=self.weight(delta) > SLICE)

    def _gained(self, delta: Delta) -> dict[str, Any] | None:
        """Returns None while text is held back and nothing else was asked for."""
        self.count(delta)
        choice = self._chunk_choice(self._place(delta), delta)
        asked = self._wants_tokens or delta.logprobs is not None or delta.prompt_scores is not None
        silent = not self._has_gain(choice) and delta.finish_reason is None and not asked
        return None if silent else self._with_facts(choice, delta)

    def closing(self) -> Iterator[bytes]:
        if self._usage_at_end:
            yield from self._event(None, {"usage": self.usage()})
        yield DONE

    def whole(self, ended: list[Delta]) -> dict[str, Any]:
        """The answer that is no stream, of one delta a sample."""
        ended = sorted(ended, key=self._place)
        for delta in ended:
            self.count(delta)
        choices = (self._with_facts(self._whole_choice(self._place(d), d), d) for d in ended)
        return {**self._head(self.whole_kind), **_NULLS, "choices": Parts(choices), "usage": self.usage}

    def _prompt_logprobs(self, request_id: str) -> dict[str, Any]:
        found = self._scores.get(request_id)
        return {"prompt_logprobs": Slices(self._ranked(found))} if self._wants_scores and found is not None else {}

    def _ranked(self, found: Iterable[TokenScores]) -> Iterator[list[Any]]:
        """Only the likeliest tokens have a rank. The prompt's first token has no log-probability."""
        yield [None]
        for part in sliced(found):
            rows = zip(*(column.tolist() for column in (part.tokens, part.own, part.ids, part.best)), strict=True)
            yield [
                {str(token): self._with_rank(token, own, None)}
                | {str(t): self._with_rank(t, value, rank) for rank, (t, value) in enumerate(zip(ids, best), 1)}
                for token, own, ids, best in rows
            ]

    def _with_rank(self, token: int, logprob: float, rank: int | None) -> dict[str, Any]:
        return {"logprob": max(logprob, LEAST_LOGPROB), "rank": rank, "decoded_token": self._token_text.text(token)}

    @abstractmethod
    def _first_choice(self, index: int) -> dict[str, Any] | None: ...

    @abstractmethod
    def _chunk_choice(self, index: int, delta: Delta) -> dict[str, Any]: ...

    @abstractmethod
    def _whole_choice(self, index: int, delta: Delta) -> dict[str, Any]: ...

    @abstractmethod
    def _has_gain(self, choice: dict[str, Any]) -> bool: ...

    def _place(self, delta: Delta) -> int:
        return self._places[delta.request_id, delta.index]

    def count(self, delta: Delta) -> None:
        super().count(delta)
        if delta.prompt_scores is not None:
            self._scores[delta.request_id] = delta.prompt_scores

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.name,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self._fingerprint,
        }

    def _event(
        self, choice: dict[str, Any] | None, facts: Mapping[str, Any] = MappingProxyType({}), large: bool = False
    ) -> Iterator[bytes]:
        """Encodes a chunk with at most one choice, in pieces if `large`."""
        choices = [] if choice is None else [choice]
        if facts or self._usage_always:
            usage = {"usage": self.usage() if self._usage_always else None} if self._usage_at_end else {}
            end: Iterable[bytes] = chain((b",",), fields_of({**usage, **facts}), (b"\n\n",))
        else:
            end = (self._end,)
        if large:
            yield from chain((self._before,), pieces(Parts(choices)), end)
        else:
            yield b"".join((self._before, encode(choices), *end))

    def _with_facts(self, choice: dict[str, Any], delta: Delta) -> dict[str, Any]:
        """Adds vLLM's fields: what stopped it, and its tokens if wanted. SGLang's name for what
        stopped it includes the end of sequence."""
        if delta.finish_reason is not None:
            choice["stop_reason"] = choice["matched_stop"] = delta.stop_reason
            if delta.stop_reason is None and delta.finish_reason == "stop" and delta.token_ids:
                choice["matched_stop"] = delta.token_ids[-1] if delta.token_ids[-1] in self._ends else None
        choice["token_ids"] = delta.token_ids if self._wants_tokens else None
        return choice if self.streams else choice | {"routed_experts": None}


def sliced(found: Iterable[TokenScores]) -> Iterator[TokenScores]:
    """The same log-probabilities, SLICE tokens at a time."""
    for chunk in found:
        for start in range(0, len(chunk), SLICE):
            yield chunk.part(start, start + SLICE)


def in_slices(make: Callable[[int, int], list[Any]], count: int) -> Any:
    """A JSON list of `count` entries; make(start, end) makes a part. A long one is made while it is
    written."""
    if count <= SLICE:
        return make(0, count)
    return Slices(make(start, min(start + SLICE, count)) for start in range(0, count, SLICE))
