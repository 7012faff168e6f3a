"""The engine loop: requests in, outputs out, one step at a time."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count

import torch

from hybridrt.base.engine_config import EngineConfig
from hybridrt.base.errors import EngineError, RequestError
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.base.turns import Change, Turns, weakly
from hybridrt.engine.cache.cache_coordinator import CacheCoordinator
from hybridrt.engine.cache.cache_dump import CacheDump, cache_dump
from hybridrt.engine.cache.embedding_cache import EmbeddingCache
from hybridrt.engine.cache.request_log import RequestLog
from hybridrt.engine.cache.sessions import Sessions
from hybridrt.engine.core.audits import Audits
from hybridrt.engine.core.encoder_tasks import EncoderTasks
from hybridrt.engine.core.engine_view import EngineView, view_of
from hybridrt.engine.core.fold_counts import FoldCounts
from hybridrt.engine.core.grammar_masks import step_masks
from hybridrt.engine.core.hit_audit import EXACT_TOLERANCE, LOGPROBS, TOLERANCE, HitAudit
from hybridrt.engine.core.policy_scheduler import PolicyScheduler
from hybridrt.engine.core.prefill_source import PrefillSource
from hybridrt.engine.core.samples import Samples
from hybridrt.engine.core.scheduled_step import ScheduledStep
from hybridrt.engine.core.scheduler import Scheduler
from hybridrt.engine.core.step_times import LAST_STEPS, StepsView, StepTime
from hybridrt.engine.core.traffic_policy import TrafficPolicy
from hybridrt.engine.grammar.grammar_compiler import GrammarCompiler
from hybridrt.engine.request.intake import EngineLimits, Intake, PreparedPrompt, check_arrived, check_submission
from hybridrt.engine.request.outputs import Abandonment, Delta, DeltaQueue, EngineCounters
from hybridrt.engine.request.prompts import Prompt
from hybridrt.engine.request.sample_request import Request, derive_seed, new_samples
from hybridrt.engine.request.spans import span_limits
from hybridrt.engine.text.tokenizer import Tokenizer
from hybridrt.fleet.prefix_mirror import CacheLayout
from hybridrt.mem_cache.prefix_tree.cache_events import CacheSubscription
from hybridrt.mem_cache.prefix_tree.cache_key import CacheKey
from hybridrt.mem_cache.prefix_tree.prefix_cache import PrefixMatch
from hybridrt.parallel.tensor_parallel import TensorParallelExecutor
from hybridrt.runtime.load.draft_needs import draft_needs
from hybridrt.runtime.run.model_runner import ModelRunner
from hybridrt.runtime.step.plan import Executor, StepHandle
from hybridrt.speculative.drafter import Drafter
from hybridrt.speculative.method import make_drafter


class Engine:
    """Drives an executor: `add_request`, `step` until `has_unfinished()` is false, `abort` between
    two steps.

    One thread at a time: a call while another thread is inside raises EngineError. Threads that
    share an engine take turns (`with engine.turns:`). Ctrl-C waits until a call has ended. After
    another exception in the middle of a call, the next call ends all requests with an error and
    continues with an empty engine. A sample that fails (its step raised, or its text could not be
    made) ends alone, with finish_reason "abort" and `Delta.error`.

    A process that serves should call `gc.collect()` and `gc.freeze()` after it has built its
    engine, and `gc.unfreeze()` before it drops the last reference. Otherwise a full collection
    examines all objects of torch's import, for a tenth of a second or more between two steps.

    Args:
        executor: runs the steps.
        coordinator: lends rows, state slots and KV pages, and owns the prefix cache.
        limits: what a request may ask.
        tokenizer: None: token ids go in and come out.
        overlap: launch a step before the tokens of the step before it are read.
        seed: seed of requests whose `SamplingParams.seed` is None. Request number i gets
            derive_seed(seed, i); sample k > 0 of a request with seed s gets derive_seed(s, k), and
            sample 0 gets s itself.
        drafter: proposes drafts for speculative decoding.
        policy: decides how long steps may take and which prompts they compute (`target_itl_ms`). None:
            first come, first served, up to the limits' `chunked_prefill_size`.
        encoder: plans the tasks of an encoder; None: requests have no spans.

    Attributes:
        intake: checks prompts and parameters before they are queued.
        turns: `with engine.turns:` waits for the thread that is inside, first come, first served.
        sessions: saves parts of the prefix cache to files, and loads them.
        prefixes: shared entries of requests.
        audits: compute some cached prefixes again; None: none.
        prefill_source: the PrefillSource that computes the prompts of later requests. None: this
            engine computes them.
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
        policy: TrafficPolicy | None = None,
        encoder: EncoderTasks | None = None,
    ) -> None:
        self.executor = executor
        self._coordinator, self.prefixes = coordinator, coordinator.prefixes
        compiler = GrammarCompiler(tokenizer, limits.vocab_size, limits.eos_token_ids)
        self.intake = Intake(limits, tokenizer, compiler, coordinator.check_fits)
        self.policy, self.drafter = policy, drafter
        chunk = limits.chunked_prefill_size
        self._scheduler = (
            Scheduler(coordinator, chunk, drafter, encoder)
            if policy is None
            else PolicyScheduler(coordinator, chunk, policy, drafter, encoder)
        )
        self._max_in_flight = 1 if overlap else 0
        self._seed = seed
        self._num_requests = 0
        self._arrivals = count()
        self.prefill_source: PrefillSource | None = None
        self.audits: Audits | None = None
        self._samples, self._steps = Samples(self._scheduler), deque[StepTime](maxlen=LAST_STEPS)
        self._launched: deque[tuple[ScheduledStep, StepHandle]] = deque()
        self._deltas = DeltaQueue()
        self._abandoned = Abandonment()
        self._change = Change(weakly(self._recover))
        self.turns = Turns(self._change)
        self.sessions = Sessions(executor, coordinator, self.turns, self._change, weakly(self._sample_last))

    @classmethod
    def from_config(
        cls,
        config: EngineConfig,
        runner: ModelRunner,
        tokenizer: Tokenizer | None = None,
        *,
        split: TensorParallelExecutor | None = None,
        overlap: bool | None = None,
    ) -> "Engine":
        """An engine over a runner built from `config`, or over the `split` of all ranks, of which
        the runner is the first. `overlap` None: `config.overlap` on a GPU, False on a CPU, where
        `launch` returns after the step.
        """
        plan, model = runner.memory_plan, runner.model_config
        chunk = config.chunked_prefill_size
        spans = span_limits(config, model)
        limits = EngineLimits(
            model.vocab_size, plan.max_model_len, chunk, model.eos_token_ids, model.image_tokens, spans, model.mrope
        )
        encoder = None
        if spans is not None:
            host = EmbeddingCache(config.encoder_host_tokens) if config.encoder_host_tokens else None
            encoder = EncoderTasks(EmbeddingCache(spans.most_tokens), runner.encoded, model.mrope, host)
        overlap = config.overlap and runner.device.type == "cuda" if overlap is None else overlap
        drafter = make_drafter(runner, split.draft if split else None) if config.speculative else None
        # A prediction head's KV depends on the next token.
        lookahead = int(bool(draft_needs(config).kv_layers(model)))
        coordinator = CacheCoordinator.from_plan(
            plan, runner.copied, prefix_cache=config.prefix_cache, lookahead=lookahead
        )
        buckets = runner.prompt_graphs.captured if runner.prompt_graphs else ()
        engine = cls(
            split or runner, coordinator, limits, tokenizer, overlap=overlap, seed=config.seed, drafter=drafter,
            policy=TrafficPolicy.from_config(config, runner.device, buckets, runner.chunk_saves), encoder=encoder,
        )  # fmt: skip
        if config.request_log is not None:
            decode = None if tokenizer is None else partial(_piece, tokenizer)
            engine._samples.log = RequestLog(config.request_log, engine.prefixes, decode)
        if config.audit_hits:
            tolerance = EXACT_TOLERANCE if runner.target.dtype == torch.float32 else TOLERANCE
            engine.audit_hits(HitAudit(config.audit_hits, tolerance, config.seed))
        engine._samples.folds = FoldCounts.from_pool(runner.pools.req_to_token.mamba_pool)
        return engine

    def audit_hits(self, chosen: HitAudit) -> None:
        """From now on also audits hits: computes some cached prefixes again, and compares."""
        self._samples.audit = chosen
        self.audits = Audits(chosen, self._samples, self._coordinator, self._change, self._audit_request)

    def prepare(self, prompt: Prompt, params: SamplingParams) -> PreparedPrompt:
        """`Intake.prepare`: checks and tokenises, and queues nothing. Any thread may call it. Raises its errors."""
        return self.intake.prepare(prompt, params)

    def add_request(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None = None, *, stream: bool = True
    ) -> str:
        """`prepare`, then `submit`. Raises their errors; the engine is then unchanged."""
        return self.submit(self.prepare(prompt, params), request_id, stream=stream)

    def submit(
        self,
        prepared: PreparedPrompt,
        request_id: str | None = None,
        *,
        stream: bool = True,
        export_to: range | None = None,
        export_from: int = 0,
        queue: DeltaQueue | None = None,
        client: str = "",
    ) -> str:
        """Queues a prompt that this engine has prepared, and returns its id.

        Args:
            stream: give deltas while the request runs; False gives one delta a sample, at its end.
            export_to: bytes of the executor's arena for state and KV of the prompt, once they are
                computed.
            export_from: tokens whose KV is left out there.
            queue: gets the deltas instead of the callers of `step` and `drain`. The engine holds a
                weak reference: if the queue is garbage collected, the next step aborts the request.
            client: who sent it: with a policy, clients share prompt computation fairly.

        Raises:
            RequestError: an argument is of the wrong kind, or the id is taken. The engine is
                unchanged.
        """
        check_submission(prepared, request_id, export_to, export_from, client)
        with self.turns.now:
            if self.audits is not None:
                self.audits.break_off()
            if request_id is None:
                number = self._num_requests
                while f"request-{number}" in self._samples:
                    number += 1
                request_id = f"request-{number}"
            elif request_id in self._samples:
                raise RequestError(f"request id {request_id!r} is in use; pass another one, or None to get one")
            seed = derive_seed(self._seed, self._num_requests) if prepared.params.seed is None else prepared.params.seed
            key = self.cache_key(prepared.params)
            samples = new_samples(request_id, prepared, key, seed, self._arrivals, self.intake.tokenizer)
            reader = self._abandoned.watch(self._deltas if queue is None else queue)
            for request in samples:
                request.stream, request.queue, request.client = stream, reader, client
                request.export_to, request.export_from = export_to, export_from
            source = self.prefill_source if prepared.may_travel else None
            with self._change:
                self._num_requests += 1
                self._samples.add(request_id, samples)
                if source is None:
                    self._samples.queue(request_id, None)
            if source is not None:
                source.request(request_id, prepared.tokens[:-1], key)
        return request_id

    def cache_key(self, params: SamplingParams) -> CacheKey:
        """The key of the cached prefixes that a request with these parameters may use, and of those that it leaves."""
        return CacheKey(params.cache_salt or "")

    def start(self, request_id: str, arrived: PrefixMatch | None = None) -> None:
        """Queues a request that waited for `prefill_source`. `arrived`: the prefix that was
        computed elsewhere; None computes the whole prompt here.

        Raises:
            RequestError: it does not wait, or nothing of its prompt would be left to compute.
                Nothing has changed.
        """
        with self.turns.now:
            if not self._samples.not_queued(request_id):
                raise RequestError(f"request {request_id!r} does not wait for its prompt to be computed elsewhere")
            check_arrived(arrived, len(self._samples.samples_of_request(request_id)[0].prompt))
            with self._change:
                self._samples.queue(request_id, arrived)

    def step(self) -> list[Delta]:
        """`run_step`, then returns the deltas: one for every sample that has gained something since
        the last `step` or `drain`, or has ended; none of requests with their own queue. EngineError
        as `run_step`.
        """
        self.run_step()
        return self._deltas.take_deltas()

    def run_step(self) -> None:
        """Launches the next step, if anything can run, then reads the oldest launched step. With
        overlap, one step stays in flight. The next `step` or `drain` returns the deltas.

        Raises:
            EngineError: requests are queued, no step is in flight and no step can be scheduled: a
                pool leaked entries. Or another thread uses the engine.
        """
        with self.turns.now:
            if self._abandoned.notes:
                self._end_abandoned()
            if self._launched:
                self._sample_last()  # an interrupt may have prevented it
            if self.prefill_source is not None:
                self.prefill_source.advance()
            with self._change:
                if (scheduled := self._scheduler.schedule()) is not None:
                    self._launch(scheduled)
            if scheduled is None and not self._launched and self._samples.any_queued():
                if self._coordinator.fetches:
                    time.sleep(0.0002)  # main memory is busy
                    return
                raise EngineError(f"nothing can be scheduled and nothing runs: {self.counters()}; abort the requests")
            if scheduled is not None and scheduled.plan.constrained:
                self._sample_last()
            if len(self._launched) > (self._max_in_flight if scheduled is not None else 0):
                self._consume()

    def _launch(self, scheduled: ScheduledStep) -> None:
        """Launches a step. If that fails, its requests fail."""
        try:
            self._launched.append((scheduled, self.executor.launch(scheduled.plan)))
            if self.policy is not None:
                self.policy.note_launch(scheduled.work, scheduled.asked, scheduled.planned)
            self._coordinator.launched(scheduled.plan)
            self._samples.totals.count_launch(scheduled.plan)
        except Exception as e:
            self._coordinator.failed()
            self._scheduler.failed()
            self._samples.fail_step(scheduled, e)

    @property
    def wants_audit(self) -> bool:
        """`audit_step` has something to do once no request runs. Any thread may ask."""
        return self.audits is not None and self.audits.chosen.wants

    def audit_step(self) -> bool:
        """A step of an audit of a cached prefix, unless requests run. False if there is none to do. A
        later request breaks the audit off.

        Raises:
            EngineError: as `run_step`.
        """
        with self.turns.now:
            if self.audits is None or not self.audits.begin():
                return False
            self.run_step()
            self.audits.note_step()
            return True

    def _audit_request(self, tokens: Sequence[int], key: CacheKey, name: str, queue: DeltaQueue) -> Request:
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=LOGPROBS)
        prepared = self.intake.prepare(list(tokens), params)
        (request,) = new_samples(name, prepared, key, 0, self._arrivals, None)
        request.audits, request.stream, request.queue = True, False, self._abandoned.watch(queue)
        return request

    def drain(self) -> list[Delta]:
        """Reads every launched step and launches none: afterwards finished requests hold nothing."""
        self.finish_launched()
        return self._deltas.take_deltas()

    def finish_launched(self) -> None:
        """Waits for every launched step; the next `step` or `drain` returns their deltas."""
        with self.turns.now:
            if self._abandoned.notes:
                self._end_abandoned()
            if self._launched:
                self._sample_last()
            while self._launched:
                self._consume()

    def abort(self, request_id: str) -> bool:
        """Ends a request in any state; its samples come out of the next `step` with reason "abort".
        A waiting request holds nothing. A running one gives its row, slot and pages back at once, or
        after the last launched step that names it was consumed. False if it is unknown or has
        finished.
        """
        with self.turns.now:
            return self._end(self._samples.samples_of_request(request_id), self._samples.abort)

    def abort_all(self) -> None:
        """`abort` of every request."""
        with self.turns.now:
            self._end(self._samples.all(), self._samples.abort)

    def abandon(self, queue: DeltaQueue) -> None:
        """The next step aborts the queue's requests. Any thread may call this at any time, even
        during a step.
        """
        self._abandoned.note(queue)

    def fail(self, request_id: str, cause: BaseException) -> bool:
        """As `abort`, but the samples' last deltas have an EngineError that names the cause."""
        with self.turns.now:
            return self._end(
                self._samples.samples_of_request(request_id), lambda request: self._samples.fail(request, cause)
            )

    def gained(self, request_id: str) -> int | None:
        """The smallest number of tokens that the request's unfinished samples have gained here, or None
        without any: `resume_token_ids` were gained elsewhere. From 1 on, the step that imported their
        state is over for all of them.
        """
        samples = self._samples.samples_of_request(request_id)
        return min((len(request.output) - len(request.params.resume_token_ids) for request in samples), default=None)

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes. False if running requests still read some, which stay."""
        with self.turns.now, self._change:
            return self._coordinator.forget_prefixes()

    def cache_layout(self) -> CacheLayout | None:
        """What a mirror of the prefix cache needs to know. None: nothing is cached."""
        tree = self.prefixes.tree
        layout = CacheLayout(tree.page_size, tree.recurrent, tree.lookahead, tree.windows)
        return layout if self.prefixes.keeps else None

    def cache_events(self, limit: int) -> CacheSubscription:
        """A reader of what the prefix cache gains and loses from now on, after its present contents. At most
        `limit` events wait for it."""
        with self.turns.now:
            return self.prefixes.subscribe(limit)

    def cache_dump(self, *, text: bool = False) -> CacheDump:
        """The prefix cache at this moment. `text`: nodes have their text too, if there is a tokenizer."""
        with self.turns.now:
            decode = self.intake.tokenizer.decode if text and self.intake.tokenizer is not None else None
            return cache_dump(self._coordinator, decode)

    def view(self) -> EngineView:
        """Running samples, the prefix tree and the latest steps."""
        with self.turns.now:
            running = self._scheduler.running.values()
            steps = StepsView.of_steps(self._samples.totals.steps, self._steps)
            return view_of(running, self._coordinator, self._samples.folds, steps)

    def has_unfinished(self) -> bool:
        """True while `step` has something to do: requests, launched steps, or deltas not read."""
        return bool(self._samples or self._launched or self._deltas.moved)

    def awaits_tokens(self) -> bool:
        """Whether the last launched step has tokens that the device still computes. False if that step samples
        nothing, as its end is then unknown. False if its sampling waits for masks.
        """
        with self.turns.now:
            return bool(self._launched) and not self._launched[-1][1].ready()

    def spare_seconds(self) -> float:
        """How long `run_step` may be put off so that later requests join: 0 without
        `target_itl_ms`.
        """
        with self.turns.now:
            if self.policy is None or not self.awaits_tokens():
                return 0.0
            step, handle = self._launched[-1]
            return 0.0 if handle.needs_masks else self.policy.spare_seconds(step.work, step.planned)

    def wait_seconds(self) -> float:
        """Predicted seconds until the prompts of all requests are computed: 0 without
        `target_itl_ms`. Any thread may call it.
        """
        return 0.0 if self.policy is None else self.policy.wait_seconds

    def counters(self) -> EngineCounters:
        """Totals since the engine was built, and what runs now. Any thread may call it."""
        scheduler, pools = self._scheduler, self._coordinator
        return replace(
            self._samples.totals,
            retractions=scheduler.num_retractions,
            running=len(scheduler.running),
            waiting=scheduler.num_waiting,
            free_rows=pools.rows.num_free,
            free_slots=pools.slots.most_free,
            free_pages=pools.pages.num_free,
            total_pages=pools.pages.total,
            kv_bytes_held=pools.pages.held_bytes,
            cached_slots=pools.slots.num_cached - pools.slots.num_locked,
            cached_pages=pools.pages.num_cached - pools.pages.num_locked,
            **(self.audits.chosen.counters() if self.audits else {}),
            **({} if scheduler.encoder is None else scheduler.encoder.counters()),
            step_cost_error=self.policy.cost.error if self.policy else None,
            **pools.prefixes.counters(),
        )

    def _end(self, requests: Sequence[Request], end: Callable[[Request], None]) -> bool:
        if not requests:
            return False
        with self._change:
            for request in list(requests):
                end(request)
        return True

    def _end_abandoned(self) -> None:
        self._end(self._abandoned.take_abandoned(self._samples.all()), self._samples.abort)

    def _recover(self) -> None:
        """Ends all requests: after a broken change, ledgers may contradict each other."""
        while self._launched:
            # Reading leaves no copy pending. Stream order protects the pages.
            with suppress(Exception):
                self._launched[0][1].drop()
                self._launched[0][1].result()
            self._launched.popleft()
        with suppress(Exception):  # the handle may not have been stored
            self.executor.drop_last()
        self._scheduler.clear()
        self._coordinator.reclaim(self._samples.all())
        self._samples.clear()

    def _sample_last(self) -> None:
        """A step that waits for masks needs the results of the steps before it: reads them while
        the device computes."""
        if not self._launched or not self._launched[-1][1].needs_masks:
            return
        while len(self._launched) > 1:
            self._consume()
        step, handle = self._launched[0]
        with self._change:
            try:
                handle.sample(step_masks(step, self.intake.compiler, self._samples.fail))
                return
            except Exception as e:
                failure = e
        self._consume(failure)

    def _consume(self, failure: Exception | None = None) -> None:
        """Reads the result of the oldest launched step. `failure`: why it is dropped instead. After an
        interrupt the step is still launched."""
        step, handle = self._launched[0]
        try:
            if failure is not None:
                handle.drop()
            step.late = len(self._launched) > 1 and handle.ready()  # a lost device raises here already
            result = handle.result()
            step.read = None if self.policy is None else self.policy.clock()
            tokens = 0
            for row in step.plan.extend:
                tokens += len(row.tokens)
            self._steps.append(StepTime(step.began, time.perf_counter(), len(step.plan.decode.rows), tokens))
            if failure is not None:
                raise failure
            step.check_result(result)
        except Exception as e:
            with self._change:
                self._launched.popleft()
                self._samples.fail_step(step, failure or e)
            return
        with self._change:
            self._launched.popleft()
            self._samples.take_result(step, result)


def _piece(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.decode([token], skip_special_tokens=False)
