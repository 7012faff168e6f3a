"""A request as the host sees it, and what its caller gets."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from hybridrt.engine.detokenizer import Detokenizer
from hybridrt.errors import EngineError
from hybridrt.mem_cache.allocator import Slot
from hybridrt.mem_cache.prefix_cache import PrefixMatch
from hybridrt.runtime.step import TokenLogprobs
from hybridrt.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort"]


class DraftRates:
    """What drafts bring, from the counters of a request or of an engine."""

    __slots__ = ()
    accepted: int
    output_tokens: int
    target_steps: int
    verify_steps: int

    @property
    def mean_accepted_length(self) -> float | None:
        """Inputs that a verify step keeps, the last known token included: 1 if every draft fails. None without one."""
        return 1 + self.accepted / self.verify_steps if self.verify_steps else None

    @property
    def tokens_per_target_step(self) -> float | None:
        """Output tokens over steps of the target that gave some; 1 without speculation. None before the first."""
        return self.output_tokens / self.target_steps if self.target_steps else None


@dataclass(slots=True)
class RequestMetrics(DraftRates):
    """Times are seconds of `time.monotonic()`. `proposed` and `accepted` count drafts of speculative decoding,
    `target_steps` the steps that gave the request tokens, `verify_steps` those of them with drafts."""

    prompt_tokens: int
    arrival_time: float
    first_token_time: float | None = None
    finish_time: float | None = None
    output_tokens: int = 0
    retractions: int = 0
    proposed: int = 0
    accepted: int = 0
    target_steps: int = 0
    verify_steps: int = 0


@dataclass(slots=True)
class RequestOutput:
    """A sample as it stood when it was handed out.

    Attributes:
        request_id: what `add_request` returned.
        index: which of the prompt's `n` samples.
        token_ids: all output tokens so far, the token that stopped the sample included.
        text: their text so far, without the stopping token or stop string; "" without a tokenizer. While the sample
            runs, what may turn out to be the start of a stop string is held back.
        finish_reason: "stop", "length" or "abort"; None while the sample runs.
        logprobs: for every token, token id -> log-probability of it and of the likeliest; None if not asked for.
        metrics: the request's own counters, which go on counting while it runs.
        error: why the request failed; finish_reason is then "abort".
        siblings: the samples 1 to n - 1 of the same prompt, on sample 0 as `LLM.generate` returns it.
    """

    request_id: str
    index: int
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason | None
    logprobs: list[dict[int, float]] | None
    metrics: RequestMetrics
    error: EngineError | None = None
    siblings: "tuple[RequestOutput, ...]" = ()

    @property
    def outputs(self) -> "list[RequestOutput]":
        """All `n` samples of the prompt, this one first."""
        return [self, *self.siblings]


class Receiver(Protocol):
    """Gets the outputs of requests, one by one, as they come."""

    def put(self, output: RequestOutput) -> None: ...


@dataclass(slots=True, eq=False)
class Request:
    """Host state of one sample.

    What the host knows trails what is launched. `prompt` and `output` are known. `computed` and `pending` are upper
    bounds that hold once every launched step has run: tokens with KV and state, and tokens sampled but not read yet
    (a verify step may gain fewer than it could; its result then lowers both bounds).

    Attributes:
        arrival: order of arrival, unique.
        max_len: prompt + output tokens at which the request ends.
        stop_ids: tokens that end it.
        stream: the caller wants outputs while it runs, not the last one alone.
        row, slot, pages, spare, prefix: what the cache coordinator lent; see there.
        first_page: which of the request's pages pages[0] is: those before it have left the sliding window.
        settled: tokens that consumed steps have computed: a lower bound of `computed`.
        prefill_tokens: tokens to compute before decoding starts: the prompt, and after a retraction the output too.
        arrived: the prefix that came from elsewhere, until admission takes it: a retracted request computes anew.
        export_to: bytes of the executor's arena for state and KV, once the prompt is computed; None leaves them.
        broken: a step that named it failed, so its state and KV may not be what its tokens say.
        in_flight: launched steps that name the request and whose result has not been consumed.
        receiver: who gets its outputs, while there is one; None: whoever steps the engine.
    """

    request_id: str
    index: int
    arrival: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    max_len: int
    stop_ids: frozenset[int]
    stream: bool
    metrics: RequestMetrics
    detokenizer: Detokenizer | None = None
    output: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] | None = None
    finish_reason: FinishReason | None = None
    error: EngineError | None = None
    row: Slot | None = None
    slot: Slot | None = None
    pages: list[Slot] = field(default_factory=list)
    spare: list[Slot] = field(default_factory=list)
    first_page: int = 0
    prefix: PrefixMatch = field(default_factory=PrefixMatch)
    prefill_tokens: Sequence[int] = ()
    arrived: PrefixMatch | None = None
    export_to: range | None = None
    computed: int = 0
    settled: int = 0
    pending: int = 0
    broken: bool = False
    in_flight: int = 0
    receiver: weakref.ref[Receiver] | None = None

    @property
    def tokens(self) -> list[int]:
        """Every known token, prompt first."""
        return self.prompt + self.output

    @property
    def tokens_left(self) -> int:
        """Tokens that may still be launched: none beyond `max_len` even if every launched one is kept."""
        return self.max_len - len(self.prompt) - len(self.output) - self.pending

    @property
    def end_page(self) -> int:
        """Pages that the request has had so far: the number of the next one."""
        return self.first_page + len(self.pages)

    @property
    def borrowed_pages(self) -> int:
        """How many of `pages` the prefix cache owns; they come first."""
        return max(len(self.prefix.pages) - self.first_page, 0)

    @property
    def prefilled(self) -> bool:
        """The launched steps compute all of `prefill_tokens`."""
        return self.computed >= len(self.prefill_tokens)

    def append(self, token: int, logprobs: TokenLogprobs | None) -> FinishReason | None:
        """Takes the next output token; returns why the request ends with it, or None."""
        self.output.append(token)
        self.metrics.output_tokens += 1
        if self.logprobs is not None and logprobs is not None:
            self.logprobs.append({token: logprobs.logprob, **logprobs.top})
        if token in self.stop_ids:
            return "stop"
        if self.detokenizer is not None:
            self.detokenizer.append(token)
            if self.params.stop and self.detokenizer.advance():
                return "stop"
        return "length" if len(self.prompt) + len(self.output) >= self.max_len else None

    def snapshot(self) -> RequestOutput:
        """The output so far. Its lists are copies."""
        detokenizer = self.detokenizer
        if detokenizer is None:
            text = ""
        elif self.finish_reason is None:
            detokenizer.advance()
            text = detokenizer.visible_text
        else:
            text = detokenizer.text
        logprobs = None if self.logprobs is None else list(self.logprobs)
        return RequestOutput(
            request_id=self.request_id,
            index=self.index,
            prompt_token_ids=list(self.prompt),
            token_ids=list(self.output),
            text=text,
            finish_reason=self.finish_reason,
            logprobs=logprobs,
            metrics=self.metrics,
            error=self.error,
        )
