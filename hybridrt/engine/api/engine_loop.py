"""The thread of an engine: reads commands from a queue and delivers a message for each step."""

import atexit
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue

import torch

from hybridrt.base.errors import EngineError, QueueFullError, RankError, RequestError, UnavailableError
from hybridrt.engine.core.engine import Engine
from hybridrt.engine.request.intake import PreparedPrompt
from hybridrt.engine.request.outputs import Delta, DeltaQueue, RequestMetrics

# No later step can succeed.
_FATAL = (RankError, torch.AcceleratorError)
# While the device computes, the thread waits at most so long until readers have the last step's
# tokens: later they would wait for the interpreter. The next launch must come before the device is
# idle.
HAND_OUT_SECONDS, HAND_OUT_SHARE = 0.002, 0.25
COMMANDS = 64  # most between two steps
# How often a put-off step asks if the device still computes.
ASK_SECONDS = 0.005
# How often prefill workers are heard while no request runs: what they send to a request that was aborted holds memory.
SOURCE_SECONDS = 0.1
# How long the interpreter's end waits for the last step.
LEAVE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class StepMessage:
    """The deltas of the loop's requests after one step.

    Attributes:
        deltas: one for every sample that has new tokens or has ended.
        seconds: duration of the step on the host, including waits for the device.
        handed_out: set this once the readers have the deltas. The loop's thread waits briefly for
            it.
    """

    deltas: list[Delta]
    seconds: float
    handed_out: threading.Event = field(default_factory=threading.Event)


class EngineLoop:
    """Steps an engine while its requests run. Every method may be called from any thread, unless it
    says otherwise. Other threads may use the same engine if they take turns.

    If a step raises, or a rank or the device is lost, the loop ends: its requests end with an
    UnavailableError, `error` is set, and later requests are refused.

    Args:
        deliver: called with each StepMessage, in the loop's thread. It must not wait.
        max_samples: most unfinished samples, those in the queue included.

    Attributes:
        error: why the loop has ended; None while it runs, and after `close`.
    """

    def __init__(self, engine: Engine, deliver: Callable[[StepMessage], None], max_samples: int) -> None:
        self.error: UnavailableError | None = None
        self.max_samples = max_samples
        self._engine, self._turns = engine, engine.turns
        self._deliver = deliver
        # Finalizers may call SimpleQueue.put within itself: `abort` relies on it.
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._unfinished: dict[str, tuple[set[int], RequestMetrics]] = {}
        self._count = 0  # number of all samples in `_unfinished`
        self._lock = threading.Lock()  # guards these and `error`
        self._deltas = DeltaQueue(arrays=True)
        self._closing = False
        self._step_began: float | None = None
        self._thread = threading.Thread(target=self._run, name="hybridrt-engine", daemon=True)
        self._thread.start()
        # Python stops daemon threads anywhere; torch then aborts the process.
        atexit.register(self._leave)

    @property
    def unfinished(self) -> int:
        return self._count

    @property
    def stalled(self) -> float:
        """Seconds since the present step began; 0 between steps."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    def submit(self, batch: Mapping[str, PreparedPrompt], *, stream: bool = True, client: str = "") -> None:
        """Queues prepared prompts by their ids: all or none. Their deltas come in later messages. `stream` and
        `client` as for `Engine.submit`.

        Raises:
            QueueFullError: there would be more than `max_samples` unfinished samples.
            RequestError: an id is taken.
            UnavailableError: the loop has ended, or this is a forked process.
        """
        self.check_process()
        n = sum(prepared.params.n for prepared in batch.values())
        with self._lock:
            if self.error is not None or self._closing:
                raise self.error or UnavailableError("the engine is closed; build a new one")
            for request_id in batch.keys() & self._unfinished.keys():
                raise RequestError(
                    f"request id {request_id!r} is in use; pass another one, or None to get one", "request_id"
                )
            if self._count + n > self.max_samples:
                raise QueueFullError(
                    f"{self._count} samples run or wait, the request asks for {n} more, and {self.max_samples} may be "
                    "there at a time: try again later"
                )
            self._count += n
            for request_id, prepared in batch.items():
                metrics = RequestMetrics(prompt_tokens=len(prepared.tokens), arrival_time=time.monotonic())
                self._unfinished[request_id] = set(range(prepared.params.n)), metrics
                self._commands.put(partial(self._submit, prepared, request_id, stream, client))

    def abort(self, request_id: str) -> None:
        """Ends a request, if it runs: its samples' last deltas have the reason "abort". Finalizers
        may call this.
        """
        self._commands.put(partial(self._abort, request_id))

    def check_process(self) -> None:
        """Raises UnavailableError in a forked process, which does not have the loop's thread."""
        self._turns.check_process()

    def close(self, timeout: float | None = None) -> bool:
        """Aborts the loop's requests and ends its thread; not to be called from that thread. Does
        nothing in a forked process.

        Args:
            timeout: seconds to wait until the present step ends; None: no limit.

        Returns:
            Whether the thread has ended.
        """
        if not self._turns.in_own_process:
            return True
        with self._lock:
            self._closing = True
        self._commands.put(lambda: None)  # wakes the thread
        self._thread.join(timeout)
        if self._thread.is_alive():
            return False
        atexit.unregister(self._leave)
        self.__dict__.pop("_engine", None)  # a closed LLM now frees its memory
        return True

    def _leave(self) -> None:
        """Ends in time: a hanging step must not keep the process."""
        self.close(LEAVE_SECONDS)

    def _run(self) -> None:
        try:
            while not self._closing:
                self._run_commands()
                if self._count:
                    self._step()
                elif self._engine.wants_audit:
                    self._audit()
                elif self._engine.prefill_source is not None:
                    self._hear_prefill_workers()
            with self._turns:
                for request_id in list(self._unfinished):
                    self._engine.abort(request_id)
                self._engine.finish_launched()
                self._deliver_deltas(0.0)
        except BaseException as e:
            self._crash(e)

    def _run_commands(self) -> None:
        with suppress(Empty):
            for _ in range(COMMANDS):
                idle = not self._count and not self._closing and not self._engine.wants_audit
                self._commands.get(idle, None if self._engine.prefill_source is None else SOURCE_SECONDS)()

    def _audit(self) -> None:
        """A step of an audit. The next command breaks it off."""
        with self._turns:
            advanced = self._engine.audit_step()
            if advanced and not self._engine.wants_audit:
                self._engine.finish_launched()
        if not advanced:  # other threads use the engine
            with suppress(Empty):
                self._commands.get(timeout=ASK_SECONDS)()

    def _hear_prefill_workers(self) -> None:
        with self._turns:
            if self._engine.prefill_source is not None:
                self._engine.prefill_source.advance()

    def _put_off(self) -> None:
        while not self._closing and (seconds := self._spare_seconds()):
            with suppress(Empty):
                self._commands.get(timeout=min(seconds, ASK_SECONDS))()

    def _spare_seconds(self) -> float:
        with self._turns:
            return self._engine.spare_seconds()

    def _step(self) -> None:
        self._step_began = began = time.monotonic()
        self._put_off()
        with self._turns:
            self._engine.run_step()
            self._step_began = None
            message = self._deliver_deltas(time.monotonic() - began)
            if not self._count:
                self._engine.finish_launched()  # finished requests hold nothing
            waits = bool(message.deltas) and self._engine.awaits_tokens()
        if waits:
            message.handed_out.wait(min(HAND_OUT_SECONDS, HAND_OUT_SHARE * message.seconds))

    def _deliver_deltas(self, seconds: float) -> StepMessage:
        message = StepMessage(self._remove_ended(self._deltas.take_deltas()), seconds)
        if message.deltas:
            self._deliver(message)
            for delta in message.deltas:
                if delta.error is not None and isinstance(delta.error.__cause__, _FATAL):
                    raise delta.error
        return message

    def _remove_ended(self, deltas: list[Delta]) -> list[Delta]:
        """Returns the deltas without those of samples that had ended before: those of a request whose `submit` raised
        end again with the engine's recovery."""
        return [delta for delta in deltas if delta.finish_reason is None or self._remove_sample(delta)]

    def _remove_sample(self, delta: Delta) -> bool:
        with self._lock:
            samples, _ = self._unfinished.get(delta.request_id, (set[int](), None))
            if delta.index not in samples:
                return False
            samples.remove(delta.index)
            self._count -= 1
            if not samples:
                del self._unfinished[delta.request_id]
            return True

    def _submit(self, prepared: PreparedPrompt, request_id: str, stream: bool, client: str) -> None:
        with self._turns:
            try:
                self._engine.submit(prepared, request_id, stream=stream, queue=self._deltas, client=client)
            except Exception as e:  # another owner's id, or no memory
                error = e if isinstance(e, EngineError) else EngineError(f"request {request_id!r} failed: {e}")
                self._end([request_id], error)

    def _abort(self, request_id: str) -> None:
        if request_id in self._unfinished:  # else it may be another thread's
            with self._turns:
                self._engine.abort(request_id)

    def _end(self, requests: Iterable[str], error: EngineError) -> None:
        deltas = []
        for name in requests:
            samples, metrics = self._unfinished[name]
            metrics.finish_time = time.monotonic()
            deltas += [
                Delta(name, index, [], "", finish_reason="abort", metrics=metrics, error=error)
                for index in sorted(samples)
            ]
        if deltas:
            self._remove_ended(deltas)
            self._deliver(StepMessage(deltas, 0.0))

    def _crash(self, cause: BaseException) -> None:
        error = UnavailableError(f"the engine has failed ({type(cause).__name__}: {cause}); start it again")
        error.__cause__ = cause
        with self._lock:
            self.error, self._step_began = error, None
        self._end(list(self._unfinished), error)
