"""The data-parallel engine: each request goes to the replica with the longest usable prefix."""

import queue
import time
import weakref
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any, NoReturn, get_args

from hybridrt.base.engine_config import EngineConfig
from hybridrt.base.errors import EngineError, RankError, RequestError
from hybridrt.base.errors_foreign import no_attribute
from hybridrt.base.model_config import ModelConfig
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.base.spans import Span
from hybridrt.base.turns import Change, Turns, weakly
from hybridrt.collectives.groups import COLLECTIVE
from hybridrt.engine.cache.cache_coordinator import CacheCoordinator
from hybridrt.engine.grammar.grammar_compiler import GrammarCompiler
from hybridrt.engine.replicas.messages import (
    Abort,
    Contents,
    ReplicaFailed,
    Reset,
    SentEvent,
    SentSpan,
    Stepped,
    Submit,
    Tell,
    WasReset,
    array,
    encode,
    read_event,
)
from hybridrt.engine.replicas.start import Lost, ReplicaLink, Replicas, as_error
from hybridrt.engine.request.intake import EngineLimits, Intake, PreparedPrompt, check_submission
from hybridrt.engine.request.outputs import Abandonment, Delta, DeltaQueue, EngineCounters, RequestMetrics
from hybridrt.engine.request.prompts import Prompt
from hybridrt.engine.request.sample_request import derive_seed
from hybridrt.engine.request.spans import cache_ids, span_limits
from hybridrt.engine.text.tokenizer import Tokenizer
from hybridrt.fleet.placement import Placed, Placement, Replica
from hybridrt.fleet.prefix_mirror import CacheLayout, PrefixMirror, names_of
from hybridrt.mem_cache.pools.memory_plan import MemoryPlan
from hybridrt.mem_cache.prefix_tree.cache_events import CacheEvent, CacheEvents, CacheSubscription, Tier
from hybridrt.mem_cache.prefix_tree.cache_key import CacheKey

NAMING_S = 5.0  # for a lost replica to be named, after others have failed because of it
WAIT_S = 0.002  # for news of replicas in a step: new requests and aborts wait as long
ANSWER_S = COLLECTIVE.total_seconds()  # for an answer of a replica that sends heartbeats: a step may compile
ALL_LOST = "every replica was lost; build a new LLM"
# Counters of the present: a lost replica has none of these.
_NOW = (
    "running", "waiting", "free_rows", "free_slots", "free_pages", "total_pages", "kv_bytes_held", "cached_slots",
    "cached_pages", "host_pages", "host_states",
)  # fmt: skip
_MOST = ("audit_error", "most_folds", "step_cost_error")  # the greatest counts
_ELSEWHERE = "it belongs to one engine, and dp_size is above 1: build the LLM with dp_size=1"


class RunningRequest:
    """A request at its replica, and what its samples have gained since they were read.

    Attributes:
        spans: kept to the end, so that `ImageReader.most_held` counts what the replica keeps.
    """

    def __init__(self, request_id: str, prepared: PreparedPrompt, queue: "weakref.ref[DeltaQueue]") -> None:
        self.request_id = request_id
        self.placed: Placed | None = None
        self.metrics = RequestMetrics(len(prepared.tokens), time.monotonic())
        self.samples = {index: GainedSample(request_id, queue) for index in range(prepared.params.n)}
        self.aborted = False
        self.spans: tuple[Span, ...] = prepared.spans


class GainedSample:
    """Deltas of one sample, joined until they are read."""

    def __init__(self, request_id: str, queue: "weakref.ref[DeltaQueue]") -> None:
        self.request_id = request_id
        self.queue: weakref.ref[DeltaQueue] | None = queue
        self._gained: Delta | None = None

    def add(self, delta: Delta) -> None:
        if self._gained is None:
            self._gained = delta
        else:
            self._gained.extend(delta)

    def delta(self) -> Delta:
        """What the sample has gained since the last call."""
        gained, self._gained = self._gained, None
        assert gained is not None, "a queue names it once for each gain"
        return gained


def _together(smallest: MemoryPlan, plans: Sequence[MemoryPlan]) -> MemoryPlan:
    pages = [sum(group.num_pages for group in groups) for groups in zip(*(plan.groups for plan in plans), strict=True)]
    groups = [replace(group, num_pages=count) for group, count in zip(smallest.groups, pages, strict=True)]
    rows, slots = sum(plan.num_rows for plan in plans), sum(plan.num_slots for plan in plans)
    return replace(smallest, num_rows=rows, num_slots=slots, groups=tuple(groups))


class ReplicatedEngine:
    """The methods of `Engine` that LLM, AsyncLLM and servers call, over `config.dp_size` replicas.

    Replicas step at their own pace; `step` waits for their news. If a replica is lost, its requests
    end with an error and the others go on.

    Args:
        model: for limits of requests.

    Attributes:
        plan: rows, slots and pages of all replicas; the rest of it is that of the smallest.
    """

    drafter = policy = audits = prefill_source = None
    wants_audit = False

    def __init__(self, config: EngineConfig, model: ModelConfig, tokenizer: Tokenizer | None) -> None:
        self._replicas = Replicas(config)
        plans = [each.plan for each in self._replicas.ready]
        smallest = min(plans, key=lambda plan: plan.max_model_len)
        self.plan = _together(smallest, plans)
        limits = EngineLimits(
            model.vocab_size, smallest.max_model_len, config.chunked_prefill_size, model.eos_token_ids,
            model.image_tokens, span_limits(config, model), model.mrope,
        )  # fmt: skip
        compiler = GrammarCompiler(tokenizer, limits.vocab_size, limits.eos_token_ids)
        fits = CacheCoordinator.from_plan(smallest, lambda ticket: True).check_fits
        self.intake = Intake(limits, tokenizer, compiler, fits)
        self._placement = Placement()
        for number, ready in enumerate(self._replicas.ready):
            mirror = None if ready.layout is None else PrefixMirror(ready.layout)
            self._placement.add(Replica(str(number), mirror))
        count = len(self._replicas.links)
        self._counters, self._waits = [EngineCounters()] * count, [0.0] * count
        self._expert_tokens: list[Sequence[Sequence[int]]] = [()] * count
        self._shares_experts = config.expert_parallel
        self._running: dict[str, RunningRequest] = {}
        self._deltas, self._abandoned, self._resets = DeltaQueue(), Abandonment(), dict[str, bool]()
        self._events = CacheEvents()
        self._present: dict[int, list[CacheEvent]] | None = None  # of a subscription that begins, by replica
        self._seed, self._num_requests = config.seed, 0
        self.turns = Turns(Change(weakly(self.abort_all)))

    def prepare(self, prompt: Prompt, params: SamplingParams) -> PreparedPrompt:
        return self.intake.prepare(prompt, params)

    def add_request(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None = None, *, stream: bool = True
    ) -> str:
        """As `Engine.add_request`."""
        return self.submit(self.prepare(prompt, params), request_id, stream=stream)

    def submit(
        self, prepared: PreparedPrompt, request_id: str | None = None, *, stream: bool = True,
        queue: DeltaQueue | None = None, client: str = "",
    ) -> str:  # fmt: skip
        """As `Engine.submit`. MessageError if it cannot be sent; nothing has changed then."""
        check_submission(prepared, request_id, None, 0, client)
        with self.turns.now:
            name = self._free_name() if request_id is None else request_id
            if name in self._running:
                raise RequestError(f"request id {name!r} is in use; pass another one, or None to get one")
            self._take_news(0.0)  # of lost replicas
            params = prepared.params
            if params.seed is None:  # as one engine draws it, wherever the request goes
                params = replace(params, seed=derive_seed(self._seed, self._num_requests))
            tokens, spans = prepared.ids.astype("<i4"), tuple(map(SentSpan.from_span, prepared.spans))
            message = Submit(name, tokens.tobytes(), spans, params, prepared.boundaries, stream, client)
            data = encode(message)  # before anything changes
            request = RunningRequest(name, prepared, self._abandoned.watch(self._deltas if queue is None else queue))
            self._running[name] = request
            self._num_requests += 1
            if self._placement.replicas:
                ids = cache_ids(prepared.ids, prepared.spans).astype("<i4")
                request.placed = self._placement.place(names_of(ids, self.cache_key(params)))
                self._link(request).send(data)
            else:
                self._fail(request, RankError(ALL_LOST))
        return name

    def cache_key(self, params: SamplingParams) -> CacheKey:
        """As `Engine.cache_key`."""
        return CacheKey(params.cache_salt or "")

    def step(self) -> list[Delta]:
        """As `Engine.step`."""
        self.run_step()
        return self._deltas.take_deltas()

    def run_step(self) -> None:
        """Waits up to WAIT_S for news, and takes all that there is."""
        with self.turns.now:
            self._abort_abandoned()
            self._take_news(WAIT_S)

    def drain(self) -> list[Delta]:
        """As `Engine.drain`."""
        self.finish_launched()
        return self._deltas.take_deltas()

    def finish_launched(self) -> None:
        """Waits until aborted requests have ended."""
        with self.turns.now:
            self._abort_abandoned()
            self._await(lambda: {r.placed.replica.name for r in self._running.values() if r.aborted and r.placed})

    def abort(self, request_id: str) -> bool:
        """As `Engine.abort`, but the last deltas come once the replica has ended its step."""
        with self.turns.now:
            request = self._running.get(request_id)
            if request is None:
                return False
            if not request.aborted:
                request.aborted = True
                self._link(request).send(encode(Abort(request_id)))
            return True

    def abort_all(self) -> None:
        for request_id in list(self._running):
            self.abort(request_id)

    def abandon(self, queue: DeltaQueue) -> None:
        """As `Engine.abandon`."""
        self._abandoned.note(queue)

    def reset_prefix_cache(self) -> bool:
        """As `Engine.reset_prefix_cache`, of all replicas. EngineError if all are lost."""
        with self.turns.now:
            self._resets.clear()
            for name in self._placement.replicas:
                self._replicas.links[int(name)].send(encode(Reset()))
            self._await(lambda: self._placement.replicas.keys() - self._resets.keys())
            if not self._placement.replicas:
                raise EngineError(ALL_LOST)
            return all(self._resets.values())

    def has_unfinished(self) -> bool:
        return bool(self._running or self._deltas.moved)

    def awaits_tokens(self) -> bool:
        """False: this engine launches nothing itself."""
        return False

    def spare_seconds(self) -> float:
        """0: replicas choose their own prompts."""
        return 0.0

    def audit_step(self) -> bool:
        """False: replicas audit their own hits."""
        return False

    def wait_seconds(self) -> float:
        """The shortest of the replicas'."""
        return min([self._waits[int(name)] for name in self._placement.replicas], default=0.0)

    def counters(self) -> EngineCounters:
        """The sums of the replicas'."""
        found = EngineCounters()
        for field in fields(EngineCounters):
            values = [value for each in self._counters if (value := getattr(each, field.name)) is not None]
            total = max if field.name in _MOST else sum
            setattr(found, field.name, total(values) if values else None)
        return found

    @property
    def expert_tokens(self) -> list[list[int]]:
        """[layers][ranks of all replicas] tokens that each rank's experts have computed, as of half a second ago or
        less; [] if experts are not shared."""
        known = [each for each in self._expert_tokens if each]
        return [[sum(counts) for counts in zip(*layers, strict=True)] for layers in zip(*known, strict=True)]

    def cache_layout(self) -> CacheLayout | None:
        """As `Engine.cache_layout`, of all replicas."""
        layout = self._replicas.ready[0].layout
        return None if layout is None else replace(layout, ranks=len(self._replicas.links))

    def cache_events(self, limit: int) -> CacheSubscription:
        """As `Engine.cache_events`, of all replicas."""
        with self.turns.now:
            present: dict[int, list[CacheEvent]] = {}
            self._present = present
            for name in self._placement.replicas:
                self._replicas.links[int(name)].send(encode(Tell()))
            self._await(lambda: {name for name in self._placement.replicas if int(name) not in present})
            self._present = None
            return self._events.subscribe_after([event for events in present.values() for event in events], limit)

    def cache_dump(self, *, text: bool = False) -> NoReturn:
        raise EngineError(f"dump_cache is not available: {_ELSEWHERE}")

    def view(self) -> None:
        """None: replicas keep their rows and their trees."""
        return None

    @property
    def sessions(self) -> NoReturn:
        raise EngineError(f"a session cannot be saved or loaded: {_ELSEWHERE}")

    def close(self) -> None:
        """Ends the replicas. May be repeated."""
        self._replicas.close()

    def __getattr__(self, name: str) -> NoReturn:
        raise no_attribute(self, name, {name: _ELSEWHERE})

    def _link(self, request: RunningRequest) -> ReplicaLink:
        assert request.placed is not None, "it was placed when it was submitted"
        return self._replicas.links[int(request.placed.replica.name)]

    def _free_name(self) -> str:
        number = self._num_requests
        while f"request-{number}" in self._running:
            number += 1
        return f"request-{number}"

    def _abort_abandoned(self) -> None:
        if self._abandoned.notes:
            samples = [sample for request in self._running.values() for sample in request.samples.values()]
            for sample in self._abandoned.take_abandoned(samples):
                self.abort(sample.request_id)

    def _take_news(self, wait_s: float) -> None:
        with suppress(queue.Empty):
            self._handle(*self._replicas.inbox.get(wait_s > 0, wait_s))
            while True:
                self._handle(*self._replicas.inbox.get_nowait())

    def _await(self, missing: Callable[[], Set[str]]) -> None:
        """Takes news until no replica is missing. One that does not answer within ANSWER_S is lost."""
        deadline = time.monotonic() + ANSWER_S
        while missing():
            self._take_news(WAIT_S)
            if time.monotonic() > deadline:
                for number in map(int, missing()):
                    self._replicas.links[number].end()
                    self._handle(number, Lost(f"it has not answered for {ANSWER_S:g} seconds"))

    def _handle(self, number: int, message: Any) -> None:
        if str(number) not in self._placement.replicas:
            return  # it is lost: its requests have ended
        if isinstance(message, Stepped):
            self._counters[number], self._waits[number] = message.counters, message.wait_seconds
            self._expert_tokens[number] = message.expert_tokens or self._expert_tokens[number]
            self._update_mirror(number, message.events)
            for delta in message.deltas:
                self._gain(delta)
        elif isinstance(message, WasReset):
            self._resets[str(number)] = message.done
        elif isinstance(message, Contents):
            if self._present is not None:
                self._present[number] = [read_event(event, self._events.number, number) for event in message.events]
        else:
            if self._shares_experts and isinstance(message, ReplicaFailed):
                number, message = self._cause(number, message)
            self._lose(number, as_error(number, message))

    def _update_mirror(self, number: int, events: list[SentEvent]) -> None:
        replica = self._placement.replicas.get(str(number))
        if replica is None or replica.mirror is None:
            return
        for event in events:
            names = names_of(array(event.tokens), event.key)
            replica.mirror.change(event.what, event.tier, names, array(event.pages, -1, 3), event.states)
            made = read_event(event, self._events.number, number)
            if self._present is not None and number in self._present:
                self._present[number].append(made)
            if self._events.readers:
                self._events.put(made)

    def _gain(self, delta: Delta) -> None:
        request = self._running.get(delta.request_id)
        if request is None:
            return
        sample = request.samples[delta.index]
        reader = None if sample.queue is None else sample.queue()
        sample.add(delta)
        if reader is not None:
            reader.put(sample)
        if request.placed is not None:
            request.placed.computed()
        if delta.finish_reason is not None:
            del request.samples[delta.index]
            if not request.samples:
                del self._running[delta.request_id]
                if request.placed is not None:
                    request.placed.ended()

    def _cause(self, number: int, failed: ReplicaFailed) -> tuple[int, ReplicaFailed | Lost]:
        """A lost replica makes those fail that share its experts, which may be heard first: then it is
        named instead."""
        have_failed, deadline = {number}, time.monotonic() + NAMING_S
        while len(have_failed) < len(self._counters) and (left := deadline - time.monotonic()) > 0:
            with suppress(queue.Empty):
                other, message = self._replicas.inbox.get(True, left)
                if isinstance(message, Lost) and other not in have_failed:
                    return other, message
                if isinstance(message, ReplicaFailed):
                    have_failed.add(other)
        return number, failed

    def _lose(self, number: int, error: Exception) -> None:
        """Ends the requests of a lost replica. If the others share its experts, ends them, too: their kernels would
        wait for it for ever."""
        names = [str(number), *self._placement.replicas] if self._shares_experts else [str(number)]
        for name in dict.fromkeys(names):
            self._placement.remove(name)
            for tier in get_args(Tier):
                self._events.cleared("failed", tier, int(name))
        if not self._placement.replicas and not self._shares_experts:
            error = RankError(f"{error}; every other replica was lost before")
        if self._shares_experts:
            for link in self._replicas.links:
                link.end()
        for name in dict.fromkeys(names):
            self._end_requests(name, error)

    def _end_requests(self, name: str, error: Exception) -> None:
        lost = replace(self._counters[int(name)], **dict.fromkeys(_NOW, 0), step_cost_error=None)
        for request in list(self._running.values()):
            if request.placed is not None and request.placed.replica.name == name:
                lost.failed += len(request.samples)
                self._fail(request, error)
        self._counters[int(name)] = lost

    def _fail(self, request: RunningRequest, error: Exception) -> None:
        request.metrics.finish_time = time.monotonic()
        for index in list(request.samples):
            failed = EngineError(f"request {request.request_id!r} failed: {error}")
            failed.__cause__ = error
            self._gain(Delta(request.request_id, index, [], "", None, "abort", request.metrics, failed))
