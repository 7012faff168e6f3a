"""Samples as an engine's deltas make them."""

from collections.abc import Iterable
from dataclasses import dataclass

from hybridrt.base.errors import EngineError
from hybridrt.engine.request.outputs import Delta, FinishReason, RequestMetrics


@dataclass
class Sample:
    """The deltas of a sample so far, joined."""

    request_id: str
    index: int
    token_ids: list[int]
    text: str
    logprobs: list[dict[int, float]] | None
    finish_reason: FinishReason | None
    error: EngineError | None
    metrics: RequestMetrics | None

    def add(self, delta: Delta) -> None:
        assert self.finish_reason is None, "a delta after the last one"
        self.token_ids += delta.token_ids
        self.text += delta.text
        if self.logprobs is not None and delta.logprobs is not None:
            self.logprobs += delta.logprobs
        self.finish_reason, self.error, self.metrics = delta.finish_reason, delta.error, delta.metrics


class Samples(dict[tuple[str, int], Sample]):
    """By request id and index."""

    def add(self, deltas: Iterable[Delta]) -> None:
        for delta in deltas:
            assert (delta.metrics is None) == (delta.finish_reason is None)
            assert delta.logprobs is None or len(delta.logprobs) == len(delta.token_ids)
            key = delta.request_id, delta.index
            if key not in self:
                self[key] = Sample(*key, [], "", None if delta.logprobs is None else [], None, None, None)
            self[key].add(delta)
