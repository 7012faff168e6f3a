"""Plans the encoder's tasks next to the prompt chunks that need them. Host integers only."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybridrt.base.spans import Span
from hybridrt.engine.cache.embedding_cache import EmbeddingCache, EmbeddingEntry, SpanKey
from hybridrt.engine.request.sample_request import Request
from hybridrt.runtime.step.plan import NO_INTEGERS, EmbeddingFetch, EncoderTask, SpanRows, StepPlan

# Limits of a step's tasks; one task is always allowed. The step's decode rows share the device with them.
STEP_TOKENS, STEP_BYTES = 4096, 64 << 20


@dataclass(slots=True)
class EncoderCounts:
    """Spans and tokens that the encoder was given, spans that were found in the cache and in main
    memory, and chunks that ended in front of a span whose embeddings were not there."""

    spans: int = 0
    tokens: int = 0
    hits: int = 0
    host_hits: int = 0
    waits: int = 0


class EncoderTasks:
    """The encoder's tasks, and the embeddings that chunks take.

    A chunk ends in front of a span whose embeddings do not exist yet. Without decode rows in the
    step, a chunk may also need those that the step's own tasks make: it runs all tasks then.

    Args:
        cache: the ledger of the embeddings on the device.
        encoded: whether the embeddings of a task can be read, by its ticket.
        mrope: tokens of spans have positions on three axes.
        host: the ledger of those in main memory, which gets all that are made. None: there is none.
    """

    def __init__(
        self, cache: EmbeddingCache, encoded: Callable[[int], bool], mrope: bool, host: EmbeddingCache | None = None
    ) -> None:
        self.cache, self.mrope, self.host, self._encoded = cache, mrope, host, encoded
        self.counts = EncoderCounts()
        self._ticket = 0
        self._done = 0  # tasks up to this ticket have ended
        self._tokens = self._bytes = 0  # of the step's tasks
        self._passed: list[tuple[SpanKey, int]] = []  # pins that the latest step needed last

    def counters(self) -> dict[str, Any]:
        """Fields of EngineCounters."""
        counts = self.counts
        return {
            "encoded_spans": counts.spans, "encoded_tokens": counts.tokens, "encoder_hits": counts.hits,
            "encoder_host_hits": counts.host_hits, "encoder_waits": counts.waits,
        }  # fmt: skip

    def clear(self) -> None:
        """Forgets all embeddings, on the device and in main memory: it is unknown which tasks have run."""
        self.cache.clear()
        if self.host is not None:
            self.host.clear()

    def begin_step(self) -> None:
        """The pins of spans that the latest step has passed end only now: its own tasks run before
        its rows, and would overwrite what these read."""
        for key, arrival in self._passed:
            self.cache.unpin(key, arrival)
        self._passed.clear()
        self._tokens = self._bytes = 0

    def end_for_spans(self, request: Request, start: int, end: int, plan: StepPlan) -> int:
        """The end of a chunk from `start` to at most `end` tokens of the prompt. Plans the tasks
        that the chunk and its next ones need, and pins what they make."""
        stop = end
        for span in _spans_between(request.spans, start, end):
            entry = self._entry(request, span, plan)
            if entry is None or (len(plan.decode.rows) and not self._has_ended(entry.ticket)):
                stop = min(stop, span.start)
            if entry is None:
                break
        # A chunk that begins within a span waits for it as a whole.
        stop = max(stop, start)
        self.counts.waits += stop < end
        return stop

    def take_rows(self, request: Request, start: int, end: int, plan: StepPlan) -> SpanRows | None:
        """The embeddings of a planned chunk; None if it has none."""
        places, rows = list[np.ndarray](), list[np.ndarray]()
        for span in _spans_between(request.spans, start, end):
            entry = self.cache.find(key := _key(request, span))
            assert entry is not None, "end_for_spans has pinned it"
            first, last = max(start, span.start), min(end, span.start + span.length)
            places.append(np.arange(first - start, last - start, dtype=np.int32))
            rows.append(entry.rows[first - span.start : last - span.start])
            plan.after_encoder = max(plan.after_encoder, entry.ticket)
            if last == span.start + span.length:
                self._passed.append((key, request.arrival))
        return SpanRows(np.concatenate(places), np.concatenate(rows)) if places else None

    def forget(self, request: Request) -> None:
        """The request no longer runs."""
        self.cache.unpin_all(request.arrival)

    def _entry(self, request: Request, span: Span, plan: StepPlan) -> EmbeddingEntry | None:
        """A span's entry, pinned, perhaps of a new task. None: it must wait."""
        key = _key(request, span)
        if (entry := self.cache.find(key)) is None:
            if self._tokens and (
                self._tokens + span.length > STEP_TOKENS or self._bytes + span.input.patches.nbytes > STEP_BYTES
            ):
                return None
            kept = self._kept(key)
            if (entry := self.cache.add(key, span.length, 0 if kept else self._ticket + 1)) is None:
                return None
            self._tokens += span.length
            self._bytes += span.input.patches.nbytes
            if kept is not None:
                plan.fetch.append(EmbeddingFetch(kept.rows, entry.rows))
                self.counts.host_hits += 1
            else:
                self._encode(key, span, entry, plan)
        elif request.arrival not in entry.readers:
            self.counts.hits += 1
        self.cache.pin(key, request.arrival)
        return entry

    def _kept(self, key: SpanKey) -> EmbeddingEntry | None:
        """The entry of a span in main memory, if it can be fetched."""
        entry = None if self.host is None else self.host.find(key)
        return entry if entry is not None and self._has_ended(entry.ticket) else None

    def _encode(self, key: SpanKey, span: Span, entry: EmbeddingEntry, plan: StepPlan) -> None:
        self._ticket += 1
        host_rows = NO_INTEGERS
        # An entry whose task has not ended stays: that task makes the same.
        if self.host is not None and self.host.find(key) is None:
            added = self.host.add(key, span.length, self._ticket)
            host_rows = NO_INTEGERS if added is None else added.rows
        plan.encode.append(EncoderTask(self._ticket, span.input, entry.rows, host_rows))
        self.counts.spans += 1
        self.counts.tokens += span.length

    def _has_ended(self, ticket: int) -> bool:
        """Tasks end in the order of their tickets."""
        if ticket > self._done and self._encoded(ticket):
            self._done = ticket
        return ticket <= self._done


def _key(request: Request, span: Span) -> SpanKey:
    return SpanKey(request.cache_key, span.digest)


def _spans_between(spans: Sequence[Span], start: int, end: int) -> list[Span]:
    return [span for span in spans if span.start < end and start < span.start + span.length]
