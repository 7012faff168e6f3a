"""A replica of a data-parallel engine: a process with the model and an engine of its own."""

import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import torch

from hybridrt.base.errors import EngineError, HybridrtError, MessageError, PeerGoneError, RankError
from hybridrt.base.turns import undisturbed
from hybridrt.channel.control import BEATS, Link, rank_timeout
from hybridrt.engine.core.engine import Engine
from hybridrt.engine.core.load_engine import load_engine
from hybridrt.engine.replicas.messages import (
    Abort,
    Contents,
    FromReplica,
    ReplicaBeat,
    ReplicaFailed,
    ReplicaReady,
    Reset,
    SentEvent,
    Start,
    Stepped,
    Submit,
    Tell,
    ToReplica,
    WasReset,
    array,
    as_event,
    decode,
    encode,
)
from hybridrt.engine.request.outputs import Delta, DeltaQueue, RequestMetrics
from hybridrt.engine.request.prompts import Prompt
from hybridrt.mem_cache.prefix_tree.cache_events import EVENTS
from hybridrt.parallel.rank_start import find_place
from hybridrt.parallel.ranks import ENDED_WITH_ANOTHER
from hybridrt.runtime.run.model_runner import ModelRunner

_FATAL = (RankError, torch.AcceleratorError)  # no later step can succeed
IDLE_S = 0.002  # between rounds of replicas that share experts, while none has requests
COUNTING_S = 0.5  # between counts of experts' tokens


class Front:
    """The link of a replica to the process that started it. If that process is gone, this one ends."""

    def __init__(self, link: Link) -> None:
        self._link, self._interval = link, rank_timeout() / BEATS
        self._inbox: queue.SimpleQueue[ToReplica] = queue.SimpleQueue()
        threading.Thread(target=self._receive, daemon=True).start()

    def receive(self, wait_s: float | None) -> ToReplica | None:
        """The next message; None if none came in time. `wait_s`: how long to wait; None: for ever."""
        try:
            return self._inbox.get(wait_s != 0.0, wait_s)
        except queue.Empty:
            return None

    def send(self, message: FromReplica) -> None:
        self._link.send(encode(message))

    def _put(self, message: bytes) -> None:
        self._inbox.put(decode(message, ToReplica))

    def _receive(self) -> None:
        try:
            self._link.listen_and_beat(encode(ReplicaBeat()), self._interval, self._put)
        except PeerGoneError:
            os._exit(ENDED_WITH_ANOTHER)


class Rounds:
    """This replica's part in rounds of replicas that share experts.

    Args:
        runner: of its first rank. join: `StepRunner.join`, on all of its ranks.

    Attributes:
        resting: no replica had a step in the last round.
    """

    def __init__(self, runner: ModelRunner, join: Callable[[], bool]) -> None:
        assert runner.lock_step is not None, "the runner shares experts"
        self._lock_step, self._loads, self._join = runner.lock_step, runner.expert_loads, join
        self._seen, self._counted_at = self._lock_step.rounds, 0.0
        self.resting = False

    def end_round(self) -> None:
        """Joins the round, unless a step of this replica was in it. RankError if that step has failed."""
        if self._lock_step.failed:
            raise RankError("a step of this replica failed, and other replicas wait for its experts")
        self.resting = self._lock_step.rounds == self._seen and not self._join()
        self._seen = self._lock_step.rounds

    def expert_tokens(self) -> list[list[int]]:
        """What the experts have computed, from time to time."""
        now = time.monotonic()
        if now < self._counted_at + COUNTING_S:
            return []
        self._counted_at = now
        return self._loads.read()


class ReplicaLoop:
    """Steps an engine, and tells the front of each step. `rounds`: None if it shares no experts."""

    def __init__(self, front: Front, engine: Engine, rounds: Rounds | None = None) -> None:
        self._front, self._engine, self._deltas, self._rounds = front, engine, DeltaQueue(), rounds
        self._events = engine.cache_events(EVENTS)
        self._told_wait = 0.0  # seconds that a request would wait, as the front knows them

    def run(self) -> None:
        """Takes messages and runs steps until this process ends."""
        engine = self._engine
        while True:
            wait_s = 0.0 if engine.has_unfinished() or engine.wants_audit else self._patience()
            while message := self._front.receive(wait_s):
                self._handle(message)
                wait_s = 0.0
            with engine.turns:
                if engine.has_unfinished():
                    engine.run_step()
                elif engine.wants_audit:
                    engine.audit_step()
                if self._rounds is not None:
                    self._rounds.end_round()
            self._tell()

    def _patience(self) -> float | None:
        """Seconds to wait for a message without requests; None: for ever."""
        if self._rounds is None:
            return None
        return IDLE_S if self._rounds.resting else 0.0

    def _handle(self, message: ToReplica) -> None:
        engine = self._engine
        with engine.turns:
            if isinstance(message, Submit):
                self._submit(message)
            elif isinstance(message, Abort):
                engine.abort(message.request_id)
            elif isinstance(message, Reset):
                self._front.send(WasReset(engine.reset_prefix_cache()))
            elif isinstance(message, Tell):
                if events := self._read_events():  # earlier readers get them
                    self._send_step([], events)
                self._front.send(Contents(self._contents()))
            else:
                raise MessageError(f"a replica that runs was sent {type(message).__name__}")

    def _submit(self, message: Submit) -> None:
        tokens = array(message.tokens).tolist()
        try:
            prompt: Prompt = tokens
            if message.spans:
                prompt = {"prompt_token_ids": tokens, "spans": [span.as_span() for span in message.spans]}
            prepared = replace(self._engine.prepare(prompt, message.params), boundaries=message.boundaries)
            self._engine.submit(
                prepared, message.request_id, queue=self._deltas, stream=message.stream, client=message.client
            )
        except HybridrtError as e:  # grammars are compiled here, too
            metrics = RequestMetrics(len(tokens), time.monotonic())
            error = e if isinstance(e, EngineError) else EngineError(str(e))
            failed = [
                Delta(message.request_id, index, [], "", None, "abort", metrics, error)
                for index in range(message.params.n)
            ]
            self._send_step(failed, [])

    def _tell(self) -> None:
        engine = self._engine
        with engine.turns:
            deltas = self._deltas.take_deltas()
            if not engine.has_unfinished():
                engine.finish_launched()
        events = self._read_events()
        # Requests without streams decode without a word: the front would refuse others for what has been computed.
        none_waits = self._told_wait > 0.0 and not engine.wait_seconds()
        if deltas or events or none_waits:
            self._send_step(deltas, events, [] if self._rounds is None else self._rounds.expert_tokens())
        for delta in deltas:
            if delta.error is not None and isinstance(delta.error.__cause__, _FATAL):
                raise delta.error

    def _send_step(self, deltas: list[Delta], events: list[SentEvent], expert_tokens: Sequence[list[int]] = ()) -> None:
        self._told_wait = self._engine.wait_seconds()
        self._front.send(Stepped(deltas, self._engine.counters(), self._told_wait, events, expert_tokens))

    def _read_events(self) -> list[SentEvent]:
        found = [as_event(event) for event in self._events.read()]
        return self._contents() if self._events.missed else found

    def _contents(self) -> list[SentEvent]:
        """What is cached now, after events that empty the mirrors."""
        self._events.close()
        self._events = self._engine.cache_events(EVENTS)
        cleared = [SentEvent("cleared", "reset", "device"), SentEvent("cleared", "reset", "host")]
        return cleared + [as_event(event) for event in self._events.read()]


def _serve(front: Front) -> None:
    start = front.receive(None)
    if not isinstance(start, Start):
        raise MessageError(f"a replica was sent {type(start).__name__} first")
    loaded = load_engine(start.config, progress=False, experts=start.experts)
    front.send(ReplicaReady(loaded.runner.memory_plan, loaded.engine.cache_layout()))
    rounds = None if start.experts is None else Rounds(loaded.runner, (loaded.split or loaded.runner).join)
    ReplicaLoop(front, loaded.engine, rounds).run()


def main(directory: str, number: int) -> None:
    """The process that `hybridrt.engine.replicas.start` starts."""
    try:
        front = Front(find_place(directory).join(number))
    except (PeerGoneError, FileNotFoundError):  # the front ended while this process started
        os._exit(ENDED_WITH_ANOTHER)
    try:
        with undisturbed():
            _serve(front)
    except BaseException as e:
        if not isinstance(e, HybridrtError):
            traceback.print_exc()
        with suppress(PeerGoneError):
            front.send(ReplicaFailed(type(e).__name__, str(e)[:10_000]))
    sys.stdout.flush()
    os._exit(1)
