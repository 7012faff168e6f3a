"""Results for callers of an engine: deltas and their queues, whole outputs, and counters."""

import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NoReturn, Protocol, TypeVar

import msgspec

from hybridrt.base.errors import EngineError
from hybridrt.base.errors_foreign import no_attribute
from hybridrt.mem_cache.prefix_tree.prefix_cache import CacheMiss
from hybridrt.runtime.step.plan import StepPlan
from hybridrt.runtime.step.token_scores import TokenScores

FinishReason = Literal["stop", "length", "abort"]
_DELTA_NAMES = {
    "outputs": "a Delta is what one sample has gained, and has .text and .token_ids itself; whole outputs are what "
    "LLM.generate and AsyncLLM.complete give",
    "finished": "finish_reason is not None in the last delta",
    "choices": "a Delta has .text",
}
_OUTPUT_NAMES = {
    "prompt": "its tokens are prompt_token_ids",
    "finished": "a RequestOutput is always whole; finish_reason says why it has ended",
    "choices": "a RequestOutput has .text, and .outputs has all samples",
    "cumulative_logprob": "it is the sum of what .logprobs has for token_ids",
}


@dataclass(slots=True, kw_only=True)
class TokenCounters:
    """Output tokens and drafts of a request or of an engine.

    Attributes:
        output_tokens: number of tokens of a request's output, set when the sample ends.
        proposed, accepted: drafts of speculative decoding.
        target_steps: steps that gave tokens; verify_steps: those of them with drafts.
    """

    output_tokens: int = 0
    proposed: int = 0
    accepted: int = 0
    target_steps: int = 0
    verify_steps: int = 0

    @property
    def mean_accepted_length(self) -> float | None:
        """Inputs that a verify step keeps, the last known token included: 1 if every draft fails.
        None without one.
        """
        return 1 + self.accepted / self.verify_steps if self.verify_steps else None

    @property
    def tokens_per_target_step(self) -> float | None:
        """Output tokens over steps of the target that gave some; 1 without speculation. None before
        the first.
        """
        return self.output_tokens / self.target_steps if self.target_steps else None


@dataclass(slots=True)
class RequestMetrics(TokenCounters):
    """Times and counts of one sample. Times are seconds of `time.monotonic()`; `admission_time` is
    its first start. `cached_tokens` came from the prefix cache; `cache_miss` says why not more did. It
    is None if no more could, without a cache, and before the first start.
    """

    prompt_tokens: int
    arrival_time: float
    admission_time: float | None = None
    first_token_time: float | None = None
    finish_time: float | None = None
    retractions: int = 0
    cached_tokens: int = 0
    cache_miss: CacheMiss | None = None


@dataclass(slots=True)
class EngineCounters(TokenCounters):
    """Since the engine was built: steps, tokens, drafts and ends of samples. Now: running and
    waiting requests, and free entries of the pools.

    Attributes:
        cache_asked .. cache_dropped: hybridrt.mem_cache.prefix_tree.prefix_cache.CacheCounts.
        free_slots: state slots; free memory that is shared with KV pages counts too.
        free_pages, total_pages: KV pages of all page groups; free memory that they share counts as
            pages of the first group. kv_bytes_held: bytes of those that running requests hold.
        cached_slots, cached_pages: evictable entries of the prefix cache.
        step_cost_error: median relative error of predicted times; None without `target_itl_ms`, or
            before enough steps have run.
        audited, audit_differed, audit_error: hits that were computed again, those that were dropped
            because of it, and the greatest difference of log-probabilities.
        host_pages, host_states: entries of the prefix cache in main memory.
        encoded_spans, encoded_tokens: images, or their tiles, that the encoder has read, and their
            tokens. encoder_hits: those whose embeddings were still there. encoder_host_hits: that
            were in main memory. encoder_waits: prompt chunks that ended in front of one whose
            embeddings were not there.
        folds: rings folded over all steps; most_folds: in one step. 0 without rings.
    """

    steps: int = 0
    prompt_tokens: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    retractions: int = 0
    running: int = 0
    waiting: int = 0
    free_rows: int = 0
    free_slots: int = 0
    free_pages: int = 0
    total_pages: int = 0
    kv_bytes_held: int = 0
    audited: int = 0
    audit_differed: int = 0
    audit_error: float = 0.0
    cached_slots: int = 0
    cached_pages: int = 0
    cache_asked: int = 0
    cache_hit: int = 0
    cache_without_state: int = 0
    cache_without_kv: int = 0
    cache_retokenised: int = 0
    step_cost_error: float | None = None
    cache_fetched: int = 0
    cache_dropped: int = 0
    host_pages: int = 0
    host_states: int = 0
    encoded_spans: int = 0
    encoded_tokens: int = 0
    encoder_hits: int = 0
    encoder_host_hits: int = 0
    encoder_waits: int = 0
    folds: int = 0
    most_folds: int = 0

    def count_launch(self, plan: StepPlan) -> None:
        self.steps += 1
        for row in plan.extend:
            self.prompt_tokens += len(row.tokens)
        self.proposed += len(plan.decode.drafts)

    def count_folds(self, folds: int) -> None:
        self.folds += folds
        self.most_folds = max(self.most_folds, folds)

    def count_end(self, reason: FinishReason, error: EngineError | None) -> None:
        self.finished += reason != "abort"
        self.failed += error is not None
        self.aborted += reason == "abort" and error is None


class Delta(msgspec.Struct):
    """A sample's gains since its last delta. All deltas of a sample, joined in order, are its
    output.

    Plain data: `msgspec.msgpack.encode(deltas, enc_hook=str)` carries a step's deltas, each error
    as its text.

    Attributes:
        request_id: what `add_request` returned.
        index: which of the prompt's `n` samples.
        token_ids: new output tokens, the token that stopped the sample included. They may come
            before their text.
        text: new text, without the stopping token or stop string; "" without a tokenizer. Text is
            held back while its last character is unfinished, or while it may be the start of a stop
            string.
        logprobs: for every new token, token id -> log-probability of it and of the likeliest; None
            if not asked for.
        finish_reason: "stop", "length" or "abort" in the last delta; None before.
        metrics: the sample's counters, in the last delta; None before.
        error: why the request failed; finish_reason is then "abort".
        prompt_logprobs: in the first delta of sample 0, if asked for: `logprobs` for every prompt
            token, None for the first.
        stop_reason: in the last delta, the stop string or the one of `stop_token_ids` that has
            ended the sample. None if something else has, such as the end-of-sequence token.
        prompt_scores: `prompt_logprobs` as arrays, one for each chunk of the prompt. A DeltaQueue
            calls `spell_out` unless its reader wants arrays.
        pooled: in the last delta of a request of `LLM.embed`, the sum of its hidden states in float32.
    """

    request_id: str
    index: int
    token_ids: list[int]
    text: str
    logprobs: list[dict[int, float]] | None = None
    finish_reason: FinishReason | None = None
    metrics: RequestMetrics | None = None
    error: EngineError | None = None
    prompt_logprobs: list[dict[int, float] | None] | None = None
    stop_reason: int | str | None = None
    prompt_scores: list[TokenScores] | None = None
    pooled: bytes | None = None

    def spell_out(self) -> None:
        """Makes `prompt_logprobs` of `prompt_scores`, which hold the same numbers as arrays."""
        if self.prompt_scores is not None:
            self.prompt_logprobs = [None, *(entry for chunk in self.prompt_scores for entry in chunk.entries())]
            self.prompt_scores = None

    def __getattr__(self, name: str) -> NoReturn:
        raise no_attribute(self, name, _DELTA_NAMES)

    def extend(self, later: "Delta") -> None:
        """Adds the next delta of the same sample: for a reader that was away for both."""
        self.token_ids += later.token_ids
        self.text += later.text
        if later.logprobs is not None:
            self.logprobs = (self.logprobs or []) + later.logprobs
        self.finish_reason, self.metrics, self.error = later.finish_reason, later.metrics, later.error
        self.stop_reason, self.pooled = later.stop_reason, later.pooled


@dataclass(slots=True)
class RequestOutput:
    """A whole sample, as `LLM.generate` returns it. Fields not listed are those of Delta, for all
    tokens.

    Attributes:
        index: which of the prompt's `n` samples.
        prompt_token_ids, prompt_logprobs: shared by the prompt's samples.
        siblings: the samples 1 to n - 1 of the same prompt, on sample 0.
    """

    request_id: str
    index: int
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    logprobs: list[dict[int, float]] | None
    metrics: RequestMetrics
    siblings: "tuple[RequestOutput, ...]" = ()
    prompt_logprobs: list[dict[int, float] | None] | None = None
    stop_reason: int | str | None = None

    def __getattr__(self, name: str) -> NoReturn:
        raise no_attribute(self, name, _OUTPUT_NAMES)

    @property
    def outputs(self) -> "list[RequestOutput]":
        """All `n` samples of the prompt, this one first."""
        return [self, *self.siblings]


def whole_output(request_id: str, prompt: list[int], n: int, ended: Mapping[tuple[str, int], Delta]) -> RequestOutput:
    scores = ended[request_id, 0].prompt_logprobs
    first, *siblings = (_sample(prompt, scores, ended[request_id, index]) for index in range(n))
    first.siblings = tuple(siblings)
    return first


def _sample(prompt: list[int], scores: list[dict[int, float] | None] | None, delta: Delta) -> RequestOutput:
    assert delta.finish_reason is not None and delta.metrics is not None, "it has ended"
    return RequestOutput(
        request_id=delta.request_id,
        index=delta.index,
        prompt_token_ids=prompt,
        token_ids=delta.token_ids,
        text=delta.text,
        finish_reason=delta.finish_reason,
        logprobs=delta.logprobs,
        metrics=delta.metrics,
        prompt_logprobs=scores,
        stop_reason=delta.stop_reason,
    )


class DeltaSource(Protocol):
    """A sample with deltas for a reader. `queue`: the reader's, None without one."""

    queue: "weakref.ref[DeltaQueue] | None"

    def delta(self) -> Delta:
        """What the sample has gained since the last call."""


S = TypeVar("S", bound=DeltaSource)


class DeltaQueue:
    """Samples with news for one reader. A delta is built when it is read: a slow reader gets the
    gains of several steps in one, and waiting costs nothing.

    Use it within the engine's turns (`with engine.turns:`) if several threads share the engine.

    Args:
        arrays: keep log-probabilities of prompts as arrays (`Delta.prompt_scores`): the reader does
            the slow conversion to dictionaries.

    Attributes:
        moved: the samples, in the order of their first gain. Empty while there are none.
    """

    def __init__(self, *, arrays: bool = False) -> None:
        self._arrays = arrays
        self.moved: dict[DeltaSource, None] = {}

    def put(self, request: DeltaSource) -> None:
        self.moved[request] = None

    def take_deltas(self) -> list[Delta]:
        """One delta for each sample that has gained something since the last call, or has ended."""
        moved, self.moved = self.moved, {}
        deltas = list[Delta]()
        for sample in moved:
            deltas.append(delta := sample.delta())
            if not self._arrays:
                delta.spell_out()
        return deltas


class Abandonment:
    """Notes queues that were abandoned or collected: their requests are to end.

    Attributes:
        notes: empty while there are none.
    """

    def __init__(self) -> None:
        self.notes: deque[weakref.ref[DeltaQueue]] = deque()

    def watch(self, queue: DeltaQueue) -> "weakref.ref[DeltaQueue]":
        """The reference that a request keeps. When the queue goes, in any thread, C code alone
        leaves the note: no interrupt can come between.
        """
        return weakref.ref(queue, self.notes.append)

    def note(self, queue: DeltaQueue) -> None:
        """Any thread may call this at any time."""
        self.notes.append(weakref.ref(queue))

    def take_abandoned(self, requests: Iterable[S]) -> list[S]:
        gone = [None, *(self.notes.popleft()() for _ in range(len(self.notes)))]
        return [r for r in requests if r.queue is not None and r.queue() in gone]
