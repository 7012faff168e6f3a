"""The engine loop: requests in, outputs out, one step at a time."""

import operator
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Protocol

from hybridrt.engine.cache_coordinator import CacheCoordinator
from hybridrt.engine.detokenizer import Detokenizer
from hybridrt.engine.request import DraftRates, FinishReason, Request, RequestMetrics, RequestOutput
from hybridrt.engine.scheduler import ScheduledStep, Scheduler
from hybridrt.engine.tokenizer import Tokenizer
from hybridrt.errors import EngineError, RequestError
from hybridrt.mem_cache.prefix_cache import PrefixMatch
from hybridrt.runtime.step import Executor, StepHandle, StepResult, TokenLogprobs
from hybridrt.sampling_params import SamplingParams
from hybridrt.speculative.drafter import Drafter

Prompt = str | Sequence[int]
NOT_FINITE = (
    "the model's logits are not finite (NaN or infinity): its weights are damaged, or its numbers leave the range of "
    "its dtype on this prompt; other requests are not affected"
)


@dataclass(frozen=True)
class EngineLimits:
    """What the engine must know of the model and its plan.

    Attributes:
        max_model_len: longest prompt + output of a request, in tokens.
        chunked_prefill_size: tokens of one step.
        eos_token_ids: end a request unless it says `ignore_eos`.
    """

    vocab_size: int
    max_model_len: int
    chunked_prefill_size: int
    eos_token_ids: Sequence[int] = ()


@dataclass(slots=True)
class EngineCounters(DraftRates):
    """Since the engine was built: steps, tokens, drafts (as RequestMetrics counts them) and how samples ended. Now: who
    runs, who waits, what is free."""

    steps: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    proposed: int = 0
    accepted: int = 0
    target_steps: int = 0
    verify_steps: int = 0
    retractions: int = 0
    running: int = 0
    waiting: int = 0
    free_rows: int = 0
    free_slots: int = 0
    free_pages: int = 0


def derive_seed(seed: int, index: int) -> int:
    """Seed number `index` of the stream that `seed` starts, in [0, 2**63): SplitMix64 (Steele, Lea and Flood 2014),
    whose output at step i is a hash of seed + i * 0x9E3779B97F4A7C15."""
    mask = 2**64 - 1
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (z ^ (z >> 31)) >> 1


class PrefillSource(Protocol):
    """Computes prompts elsewhere, all but their last token. It must call `Engine.start` or `Engine.fail` for every
    request, unless the request has ended before."""

    def request(self, request_id: str, tokens: Sequence[int]) -> None:
        """Begins, and returns at once."""
        ...

    def advance(self) -> None:
        """Called at the head of every step; never waits for long."""
        ...


class Engine:
    """Drives an executor. `add_request`, `step` until `has_unfinished()` is false, `abort` at any time; one thread.

    A sample that fails (its step raised, or its text could not be made) ends alone, with finish_reason "abort" and
    `RequestOutput.error`; the others go on.

    A process that serves should call `gc.collect()` and `gc.freeze()` once its engine stands: else a full collection
    looks through everything that torch has imported, for a tenth of a second or more between two steps. `gc.unfreeze()`
    comes before such a process lets its engine go.

    Args:
        tokenizer: None means that token ids go in and come out.
        overlap: launch a step before the tokens of the step before it are read.
        seed: of requests whose `SamplingParams.seed` is None. Request number i gets derive_seed(seed, i); sample k > 0
            of a request with seed s gets derive_seed(s, k), and sample 0 gets s itself.
        drafter: proposes drafts for speculative decoding.

    Attributes:
        prefill_source: whoever computes the prompts of requests from here on; None computes them here.
    """

    def __init__(
        self,
        executor: Executor,
        coordinator: CacheCoordinator,
        limits: EngineLimits,
        tokenizer: Tokenizer | None = None,
        *,
        overlap: bool = True,
        seed: int = 0,
        drafter: Drafter | None = None,
    ) -> None:
        self.limits = limits
        self.executor = executor
        self._coordinator = coordinator
        self._tokenizer = tokenizer
        self._scheduler = Scheduler(coordinator, limits.chunked_prefill_size, drafter)
        self._most_in_flight = 1 if overlap else 0
        self._seed = seed
        self._num_requests = 0
        self._arrivals = count()
        self._eos = frozenset(limits.eos_token_ids)
        self.prefill_source: PrefillSource | None = None
        self._samples: dict[str, list[Request]] = {}
        self._held: set[str] = set()
        self._launched: deque[tuple[ScheduledStep, StepHandle]] = deque()
        self._outputs: list[RequestOutput] = []
        self._totals = EngineCounters()

    def prepare(self, prompt: Prompt, params: SamplingParams) -> list[int]:
        """Token ids of a prompt that the engine would take. Changes nothing.

        Raises:
            RequestError: the prompt is empty, too long, holds ids outside the vocabulary, or needs a tokenizer.
            MemoryBudgetError: the request could not run even alone.
        """
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params is {type(params).__name__}; pass a hybridrt.SamplingParams")
        if params.stop and self._tokenizer is None:
            raise RequestError("stop strings need a tokenizer and this model has none; use stop_token_ids")
        tokens = self._encode(prompt)
        vocab, longest = self.limits.vocab_size, self.limits.max_model_len - 1
        if not tokens:
            raise RequestError("the prompt is empty; give it at least one token")
        if min(tokens) < 0 or max(tokens) >= vocab:
            bad = next(t for t in tokens if not 0 <= t < vocab)
            raise RequestError(f"token id {bad} is outside the vocabulary; valid ids are 0 to {vocab - 1}")
        if len(tokens) > longest:
            raise RequestError(
                f"the prompt has {len(tokens)} tokens; with max_model_len={longest + 1} it may have at most {longest}, "
                "which leaves room for one output token: shorten it or raise max_model_len"
            )
        self._coordinator.check_fits(self._max_len(tokens, params))
        return tokens

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None = None,
        *,
        stream: bool = True,
        export_to: int | None = None,
    ) -> str:
        """Queues a prompt and returns its id.

        Args:
            stream: hand out outputs while the request runs; False hands out the finished samples alone.
            export_to: where in the executor's arena state and KV of the prompt go once they are computed.

        Raises:
            RequestError, MemoryBudgetError: as `prepare`, or the id is taken. The engine is unchanged.
        """
        tokens = self.prepare(prompt, params)
        if request_id is None:
            names = (f"request-{i}" for i in count(self._num_requests))
            request_id = next(name for name in names if name not in self._samples)
        if request_id in self._samples:
            raise RequestError(f"request id {request_id!r} is in use; pass another one, or None to get one")
        seed = derive_seed(self._seed, self._num_requests) if params.seed is None else params.seed
        samples = [self._new_request(request_id, i, tokens, params, seed, stream) for i in range(params.n)]
        self._num_requests += 1
        self._samples[request_id] = samples
        for request in samples:
            request.export_to = export_to
        self._held.add(request_id)
        if self.prefill_source is None or len(tokens) == 1:
            self.start(request_id)
        else:
            self.prefill_source.request(request_id, tokens[:-1])
        return request_id

    def start(self, request_id: str, arrived: PrefixMatch | None = None) -> None:
        """Queues a request that waited for `prefill_source`.

        Args:
            arrived: what has been computed elsewhere; None computes the whole prompt here.

        Raises:
            RequestError: it does not wait, or nothing of its prompt would be left to compute. Nothing has changed.
        """
        if request_id not in self._held:
            raise RequestError(f"request {request_id!r} does not wait for its prompt to be computed elsewhere")
        samples = self._samples[request_id]
        if arrived is not None and not 0 < arrived.length < len(samples[0].prompt):
            raise RequestError(
                f"{arrived.length} tokens of a prompt of {len(samples[0].prompt)} have arrived; the last token is "
                f"always computed here: pass 1 to {len(samples[0].prompt) - 1}, or None"
            )
        self._held.remove(request_id)
        for request in samples:
            request.arrived = arrived
            self._scheduler.add(request)

    def step(self) -> list[RequestOutput]:
        """Launches the next step, if anything can run, and reads the oldest one once more than enough are launched.

        Returns:
            An output for every sample that moved, each with all its tokens so far.

        Raises:
            EngineError: requests wait, but nothing runs and nothing can: a pool lost entries.
        """
        if self.prefill_source is not None:
            self.prefill_source.advance()
        scheduled = self._scheduler.schedule()
        if scheduled is not None:
            try:
                handle = self.executor.launch(scheduled.plan)
            except BaseException as e:
                self._fail_step(scheduled, e)
                if not isinstance(e, Exception):
                    raise
            else:
                self._launched.append((scheduled, handle))
                self._count(scheduled)
        elif not self._launched and len(self._samples) > len(self._held):
            raise EngineError(f"nothing can be scheduled and nothing is running: {self.counters()}; abort the requests")
        if len(self._launched) > (self._most_in_flight if scheduled is not None else 0):
            self._consume()
        return self._take_outputs()

    def drain(self) -> list[RequestOutput]:
        """Reads every launched step and launches none: afterwards finished requests hold nothing."""
        self.settle()
        return self._take_outputs()

    def settle(self) -> None:
        """Waits for every launched step; the next `step` or `drain` hands out what they gave."""
        while self._launched:
            self._consume()

    def abort(self, request_id: str) -> bool:
        """Ends a request, whatever it is doing; its samples come out of the next `step` with reason "abort". False if
        it is not known or has finished."""
        samples = list(self._samples.get(request_id, ()))
        for request in samples:
            try:
                self._finish(request, "abort")
            except Exception as e:  # its text cannot be made: it must go all the same
                self._fail(request, e)
        return bool(samples)

    def fail(self, request_id: str, cause: BaseException) -> bool:
        """Ends a request as `abort` does, with an error that says why."""
        samples = list(self._samples.get(request_id, ()))
        for request in samples:
            self._fail(request, cause)
        return bool(samples)

    def gained(self, request_id: str) -> int | None:
        """Output tokens of whichever unfinished sample has fewest, None if all are finished. With its first token the
        step that took in what had arrived for a sample is over."""
        samples = self._samples.get(request_id)
        return min(len(request.output) for request in samples) if samples else None

    def has_unfinished(self) -> bool:
        """True while `step` has something to do: requests, launched steps, or outputs not handed out."""
        return bool(self._samples or self._launched or self._outputs)

    def counters(self) -> EngineCounters:
        """A snapshot."""
        scheduler, pools = self._scheduler, self._coordinator
        return replace(
            self._totals,
            retractions=scheduler.num_retractions,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            free_rows=pools.rows.num_free,
            free_slots=pools.slots.num_free,
            free_pages=pools.pages.num_free,
        )

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise RequestError("the prompt is text and this model has no tokenizer; pass a list of token ids")
            return self._tokenizer.encode(prompt)
        try:
            return [operator.index(t) for t in prompt]
        except TypeError as e:
            raise RequestError(f"a prompt is a string or a sequence of token ids: {e}") from e

    def _max_len(self, tokens: list[int], params: SamplingParams) -> int:
        longest = self.limits.max_model_len
        return longest if params.max_tokens is None else min(longest, len(tokens) + params.max_tokens)

    def _new_request(
        self, request_id: str, index: int, tokens: list[int], params: SamplingParams, seed: int, stream: bool
    ) -> Request:
        eos = frozenset() if params.ignore_eos else self._eos
        tokenizer = self._tokenizer
        return Request(
            request_id=request_id,
            index=index,
            arrival=next(self._arrivals),
            prompt=tokens,
            params=params,
            seed=derive_seed(seed, index) if index else seed,
            max_len=self._max_len(tokens, params),
            stop_ids=eos.union(params.stop_token_ids),
            stream=stream,
            metrics=RequestMetrics(prompt_tokens=len(tokens), arrival_time=time.monotonic()),
            detokenizer=Detokenizer(tokenizer, tokens, params.stop) if tokenizer is not None else None,
            logprobs=None if params.logprobs is None else [],
        )

    def _count(self, scheduled: ScheduledStep) -> None:
        self._totals.steps += 1
        self._totals.prompt_tokens += sum(len(row.tokens) for row in scheduled.plan.extend)
        self._totals.proposed += sum(len(row.drafts) for row in scheduled.plan.decode)

    def _count_gain(self, request: Request, tokens: int, verified: bool) -> None:
        for counters in (request.metrics, self._totals):
            counters.accepted += tokens - 1
            counters.target_steps += 1
            counters.verify_steps += verified

    def _consume(self) -> None:
        """Reads the oldest launched step. An interrupt while waiting for it leaves it launched."""
        step, handle = self._launched[0]
        try:
            result = handle.result()
            _check_result(step, result)
        except Exception as e:
            self._launched.popleft()
            self._fail_step(step, e)
            return
        self._launched.popleft()
        gains = iter(zip(result.tokens, result.logprobs, strict=True))
        gained = []
        for request, most in step.rows:
            tokens, logprobs = next(gains) if most else ([], None)
            gained.append(len(tokens))
            if tokens and request.finish_reason is None:
                self._count_gain(request, len(tokens), verified=most > 1)
                self._accept(request, tokens, logprobs)
        self._scheduler.complete(step, gained)

    def _accept(self, request: Request, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs] | None) -> None:
        """Appends what a step gained, up to the token that ends the request; the surplus is dropped."""
        if request.metrics.first_token_time is None:
            request.metrics.first_token_time = time.monotonic()
        try:
            for i, token in enumerate(tokens):
                if token < 0:
                    raise EngineError(NOT_FINITE)
                self._totals.output_tokens += 1
                reason = request.append(token, logprobs[i] if logprobs else None)
                if reason is not None:
                    return self._finish(request, reason)
            if request.stream:
                self._outputs.append(request.snapshot())
        except Exception as e:
            self._fail(request, e)

    def _finish(self, request: Request, reason: FinishReason, error: EngineError | None = None) -> None:
        # A stop string may be hidden in text that was held back for an unfinished character.
        if error is None and request.detokenizer is not None and request.detokenizer.finish() and reason == "length":
            reason = "stop"
        request.finish_reason, request.error = reason, error
        request.metrics.finish_time = time.monotonic()
        if request.request_id not in self._held:
            self._scheduler.remove(request)
        samples = self._samples[request.request_id]
        samples.remove(request)
        if not samples:
            del self._samples[request.request_id]
            self._held.discard(request.request_id)
        self._totals.finished += reason != "abort"
        self._totals.failed += error is not None
        self._totals.aborted += reason == "abort" and error is None
        self._outputs.append(request.snapshot())

    def _fail_step(self, step: ScheduledStep, cause: BaseException) -> None:
        for request, _ in step.rows:
            if request.finish_reason is None:
                self._fail(request, cause)
        self._scheduler.complete(step, [0] * len(step.rows))

    def _fail(self, request: Request, cause: BaseException) -> None:
        error = EngineError(f"request {request.request_id!r} failed: {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        self._finish(request, "abort", error)

    def _take_outputs(self) -> list[RequestOutput]:
        outputs, self._outputs = self._outputs, []
        return outputs


def _check_result(step: ScheduledStep, result: StepResult) -> None:
    """Raises EngineError unless every sampling row gained at least one token and at most what it could."""
    rows = [(request, most) for request, most in step.rows if most]
    if not len(rows) == len(result.tokens) == len(result.logprobs):
        raise EngineError(
            f"{len(rows)} rows sampled; the result has {len(result.tokens)} lists of tokens and "
            f"{len(result.logprobs)} of log-probabilities"
        )
    for (request, most), tokens in zip(rows, result.tokens, strict=True):
        if not len(tokens) <= most or (not tokens and request.finish_reason is None):
            raise EngineError(
                f"row of request {request.request_id!r} gained {len(tokens)} tokens; 1 to {most} expected"
            )
