"""An interrupt at any line of the engine loses nothing: no row, slot, page or request, and the next call is right."""

import linecache
import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hybridrt.base.interrupts
import hybridrt.base.turns
import hybridrt.engine.core.engine
import hybridrt.mem_cache.pools.entries
from hybridrt.base.errors import EngineError
from hybridrt.base.interrupts import Interrupts
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.engine.api.llm import LLM
from tests.support.engine_harness import ByteTokenizer
from tests.support.fake_llm import FIVE, VOCAB, assert_clean, make
from tests.support.mock_executor import tokens_alone

ENGINE = Path(hybridrt.engine.core.engine.__file__).parent
LOCKS = {hybridrt.base.interrupts.__file__, hybridrt.base.turns.__file__}
FILES = {str(file) for file in ENGINE.glob("*.py")} | LOCKS | {hybridrt.mem_cache.pools.entries.__file__}
# 3 samples of 30 tokens and a prompt of 24 do not fit 32 pages of 4 tokens: one is retracted.
LONG = SamplingParams(max_tokens=30, ignore_eos=True, seed=3, n=3, stop="never")
SHORT = SamplingParams(max_tokens=6, ignore_eos=True, seed=4)


class Lines:
    """Counts the lines that run in some files, calls `strike` at line number `at`, and counts no more."""

    def __init__(self, strike: Callable[[], None] | None = None, at: int = -1, files: set[str] = FILES) -> None:
        self.strike, self.at, self.files = strike, at, files
        self.seen: list[tuple[str, int]] = []

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename not in self.files:
            return None
        if event == "line" and not (self.strike is not sigint and takes_a_turn(frame)):
            self.seen.append((frame.f_code.co_filename, frame.f_lineno))
            if self.strike is not None and len(self.seen) == self.at + 1:
                sys.settrace(None)
                self.strike()
        return self

    @contextmanager
    def traced(self) -> Iterator[None]:
        sys.settrace(self)
        try:
            yield
        finally:
            sys.settrace(None)


def takes_a_turn(frame: FrameType) -> bool:
    """A line that begins a turn and, traced again, ends it. Between a block and its exit only a tracer can raise; so it
    is at `try:`, which computes nothing, and which no block around it covers (CPython 3.11)."""
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    return line == "try:" or (line.startswith("with ") and ("turns" in line or "Interrupts" in line))


def sigint() -> None:
    signal.raise_signal(signal.SIGINT)


def anything() -> None:
    raise KeyboardInterrupt


def generate(llm: LLM) -> None:
    llm.generate(["a" * 24, "bc", [5]], [LONG, SHORT, FIVE])


def stream(llm: LLM) -> None:
    deltas = llm.stream("abc", LONG)
    for _ in range(5):
        next(deltas)
    other = llm.stream([7], FIVE)
    assert sum(len(delta.token_ids) for delta in other) == 5
    deltas.close()  # type: ignore[attr-defined]


def by_engine(llm: LLM) -> None:
    request_id = llm.engine.add_request("abcdef", LONG)
    for _ in range(6):
        llm.engine.step()
    llm.engine.abort(request_id)
    llm.engine.drain()


SCENES = {"generate": generate, "stream": stream, "engine": by_engine}


def struck(scene: Callable[[LLM], None], lines: Lines, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Plays a scene, which an interrupt strikes; True if it was raised. Then checks that nothing was lost."""
    llm, _ = make(monkeypatch, ByteTokenizer())
    raised = False
    try:
        with lines.traced():
            scene(llm)
    except (KeyboardInterrupt, EngineError) as e:
        raised = isinstance(e, KeyboardInterrupt) or "broke a step off" in str(e)
        assert raised, e
    with Interrupts():
        pass
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    # Requests that were added to the engine itself end here.
    llm.engine.abort_all()
    llm.engine.drain()
    (output,) = llm.generate([[1]], FIVE)
    assert output.token_ids == tokens_alone([1], 1, 5, VOCAB)
    assert_clean(llm)
    llm.engine._coordinator.check()
    llm.close()
    return raised


def runs_of_lines(
    name: str, strike: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> dict[tuple[str, int], list[int]]:
    """The lines of a scene, and the numbers of their runs among all."""
    lines = Lines(strike, files=files_of(strike))
    assert not struck(SCENES[name], lines, monkeypatch)
    runs = defaultdict[tuple[str, int], list[int]](list)
    for i, line in enumerate(lines.seen):
        runs[line].append(i)
    return runs


def files_of(strike: Callable[[], None]) -> set[str]:
    return FILES if strike is sigint else FILES - LOCKS


def sample(name: str, strike: Callable[[], None], monkeypatch: pytest.MonkeyPatch, most: int) -> list[int]:
    """Numbers of lines to strike: of the times that each line runs at most so many, evenly spread from the first."""
    runs_of_each = runs_of_lines(name, strike, monkeypatch).values()
    return sorted({runs[k * (len(runs) - 1) // max(most - 1, 1)] for runs in runs_of_each for k in range(most)})


def share(name: str, strike: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The first runs of this scene's lines, but for those that another scene strikes: of the scenes that run a line
    one does, the next one for the next line."""
    runs = {each: runs_of_lines(each, strike, monkeypatch) for each in SCENES}
    found = []
    for line, (first, *_) in runs[name].items():
        having = [each for each in SCENES if line in runs[each]]
        if having[line[1] % len(having)] == name:
            found.append(first)
    return found


def sweep(name: str, strike: Callable[[], None], chosen: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Strikes these of a scene's lines, one in each run."""
    lost = []
    assert len(chosen) > 20
    for at in chosen:
        lines = Lines(strike, at, files_of(strike))
        try:
            raised = struck(SCENES[name], lines, monkeypatch)
            assert raised, "the interrupt was swallowed"
        except (AssertionError, EngineError) as e:
            file, line = lines.seen[at]
            lost.append(f"{Path(file).name}:{line} (line {at} of the run): {type(e).__name__}: {str(e)[:80]}")
    assert not lost, f"{len(lost)} of {len(chosen)} lines:\n" + "\n".join(lost)


@pytest.mark.parametrize("strike", [sigint, anything])
@pytest.mark.parametrize("name", SCENES)
def test_an_interrupt_at_any_line_leaves_nothing_behind(
    name: str, strike: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`sigint` is Ctrl-C; `anything` is an exception that some other means raises in the middle of a line."""
    sweep(name, strike, sample(name, strike, monkeypatch, 1)[::10], monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("strike", [sigint, pytest.param(anything, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", SCENES)
def test_an_interrupt_at_every_line_once(
    name: str, strike: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one of the scenes. The soak level strikes it in all of them."""
    sweep(name, strike, share(name, strike, monkeypatch), monkeypatch)


@pytest.mark.soak
@pytest.mark.parametrize("strike", [sigint, anything])
@pytest.mark.parametrize("name", SCENES)
def test_an_interrupt_at_every_line_twelve_times(
    name: str, strike: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line runs up to 800 times in a scene of 20,000 lines."""
    sweep(name, strike, sample(name, strike, monkeypatch, 12), monkeypatch)


def test_interrupts_end_a_call_between_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle of a step: the step ends, the call's requests end, another call's go on."""
    llm, runner = make(monkeypatch)
    other = llm.stream([9], SamplingParams(max_tokens=20, ignore_eos=True, seed=3))
    got = next(other).token_ids
    launch = runner.launch

    def struck(plan: Any) -> Any:
        if len(runner.plans) == 5:
            sigint(), sigint()
        return launch(plan)

    runner.launch = struck  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1], [2]], SHORT)
    assert len(runner.plans) == 6, "the step was launched, and none after it"
    assert llm.engine.counters().aborted == 2 and llm.engine.counters().failed == 0
    got += [t for delta in other for t in delta.token_ids]
    assert got == tokens_alone([9], 3, 20, VOCAB)
    assert_clean(llm)


def test_a_handler_of_the_application_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, runner = make(monkeypatch)
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(len(runner.plans)))
    try:
        launch = runner.launch
        runner.launch = lambda plan: (sigint(), launch(plan))[1]  # type: ignore[method-assign]
        assert llm.generate([[1]], FIVE)[0].token_ids == tokens_alone([1], 1, 5, VOCAB)
        assert came == list(range(len(runner.plans))), "it is called at once"
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_that_is_set_meanwhile_stays() -> None:
    def mine(number: int, frame: object) -> None: ...

    try:
        with Interrupts():
            signal.signal(signal.SIGINT, mine)
        assert signal.getsignal(signal.SIGINT) is mine
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_inner_contexts_leave_the_handler_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """To ask for a handler takes 2 microseconds, to set one 3: every step of `LLM.generate` would pay for it."""
    with pytest.raises(KeyboardInterrupt), Interrupts() as outer:
        handler = signal.getsignal(signal.SIGINT)
        with monkeypatch.context() as patched:
            for name in ("signal", "getsignal"):
                patched.delattr(signal, name)
            with Interrupts() as inner:
                sigint()
            assert outer.waiting and not inner.waiting
        assert signal.getsignal(signal.SIGINT) is handler
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with Interrupts():
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler, "the next one is outermost again"


def test_an_engine_that_was_broken_off_ends_every_request_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = make(monkeypatch, ByteTokenizer())
    mine = llm.engine.add_request([5], LONG)
    stream = llm.stream([6], SHORT)
    next(stream)
    schedule = llm.engine._scheduler._schedule_running
    monkeypatch.setattr(llm.engine._scheduler, "_schedule_running", lambda *a: (schedule(*a), anything()))
    with pytest.raises(KeyboardInterrupt):
        llm.engine.step()
    monkeypatch.undo()
    outputs = llm.engine.drain()
    assert {(o.request_id, o.finish_reason) for o in outputs if o.finish_reason} == {(mine, "abort")}
    assert all("broke a step off" in str(o.error) for o in outputs if o.finish_reason)
    with pytest.raises(EngineError, match="broke a step off"):
        list(stream)
    assert_clean(llm)
    assert llm.generate([[1]], FIVE)[0].token_ids == tokens_alone([1], 1, 5, VOCAB)


@dataclass(frozen=True)
class Call:
    """A call of `generate`, and at one of its lines, if it has so many, SIGINT or an exception of other origin."""

    prompts: int
    at: int
    strike: Callable[[], None]


@dataclass(frozen=True)
class Do:
    """ "open", "read", "close" or "drop" a stream; "add", "step" or "abort" in the engine."""

    what: str
    which: int


calls = st.builds(Call, st.integers(1, 4), st.integers(0, 2500), st.sampled_from([sigint, anything]))
does = st.builds(
    Do, st.sampled_from(["open", "open", "read", "read", "close", "drop", "add", "step", "abort"]), st.integers(0, 3)
)


@settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))
@given(st.lists(st.one_of(does, does, calls), min_size=3, max_size=14))
def test_random_histories_with_interrupts_conserve_the_pools(history: list[Call | Do]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        llm, _ = make(monkeypatch, ByteTokenizer(), max_running_requests=3)
        play(llm, history)
        llm.engine.abort_all()
        llm.engine.drain()
        assert llm.generate([[1]], FIVE)[0].token_ids == tokens_alone([1], 1, 5, VOCAB)
        assert_clean(llm)
        llm.engine._coordinator.check()


def play(llm: LLM, history: list[Call | Do]) -> None:
    streams: dict[int, Any] = {}
    for event in history:
        if isinstance(event, Call):
            lines = Lines(event.strike, event.at, FILES if event.strike is sigint else FILES - LOCKS)
            with suppress(KeyboardInterrupt, EngineError), lines.traced():
                llm.generate([[i] * 9 for i in range(event.prompts)], LONG)
        elif event.what == "open":
            streams[event.which] = llm.stream([event.which], SHORT)
        elif event.what == "read":
            with suppress(EngineError):
                next(streams.get(event.which, iter(())), None)
        elif event.what == "close" and event.which in streams:
            streams[event.which].close()
        elif event.what == "drop":
            streams.pop(event.which, None)
        elif event.what == "add":
            llm.engine.add_request([event.which] * 5, LONG)
        elif event.what == "step":
            llm.engine.step()
        elif event.what == "abort":
            llm.engine.abort(f"request-{event.which}")
        llm.engine._coordinator.check()
