"""Streams that are dropped half read, in any thread at any time, are only marked; the engine's next step frees them."""

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from hybridrt.base.sampling_params import SamplingParams
from hybridrt.engine.api.llm import LLM
from hybridrt.engine.request.outputs import Delta, DeltaQueue
from tests.engine.test_threads import before_launch, in_threads
from tests.support.engine_harness import Rig
from tests.support.fake_llm import FIVE, VOCAB, FakeRunner, assert_clean, make
from tests.support.mock_executor import tokens_alone

LONG = SamplingParams(max_tokens=40, ignore_eos=True, seed=2)


class Cycle:
    """Holds a half-read stream, and itself: only the collector ends both."""

    def __init__(self, stream: Iterator[Delta]) -> None:
        self.stream, self.me = stream, self
        next(stream)


def wrapped(stream: Any) -> Iterator[Delta]:
    try:
        yield from stream
    finally:
        stream.close()


def check(llm: LLM) -> None:
    assert llm.generate([[1]], FIVE)[0].token_ids == tokens_alone([1], 1, 5, VOCAB)
    assert_clean(llm)
    llm.engine._coordinator.check()


def leave_half_read(llm: LLM, rounds: int) -> None:
    for i in range(rounds):
        Cycle(llm.stream([i % VOCAB], LONG))
        Cycle(wrapped(llm.stream([i % VOCAB], LONG)))
        assert llm.generate([[1], [2]], FIVE)[0].token_ids == tokens_alone([1], 1, 5, VOCAB)


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("where", ["launch", "result"])
def test_streams_that_the_collector_closes_within_a_step(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, runner = make(monkeypatch)
    collected = []

    def collect(*_: object) -> None:
        if runner.plans and len(runner.plans) % 3 == 0:
            collected.append(gc.collect(0))

    if where == "launch":
        before_launch(runner, collect)
    else:
        run_oldest = runner.run_oldest
        monkeypatch.setattr(runner, "run_oldest", lambda: (collect(), run_oldest()))
    leave_half_read(llm, 50)
    gc.collect()
    assert sum(collected) > 50, "streams were collected within steps"
    check(llm)
    assert llm.engine.counters().aborted > 45


@pytest.mark.usefixtures("no_collector")
def test_streams_that_the_collector_closes_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = make(monkeypatch)
    done = threading.Event()

    def collect() -> None:
        while not done.is_set():
            gc.collect(0)

    def use() -> None:
        try:
            leave_half_read(llm, 30)
        finally:
            done.set()

    in_threads(use, collect)
    gc.collect()
    check(llm)


def test_dropped_closed_and_exhausted_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = make(monkeypatch)
    dropped, closed, whole = (llm.stream([i], LONG) for i in range(3))
    for stream in (dropped, closed, whole):
        next(stream)
    assert llm.engine.counters().running == 3
    closed.close()  # type: ignore[attr-defined]
    del dropped, stream
    assert len(list(whole)) == 39
    assert llm.engine.counters().aborted == 2, "freed by the next step, which was the third stream's"
    check(llm)


def test_a_stream_that_is_never_read_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, runner = make(monkeypatch)
    stream = llm.stream([1], LONG)
    del stream
    assert not runner.plans and not llm.engine.has_unfinished()
    check(llm)


def test_a_stream_may_be_finalised_after_its_llm_was_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = make(monkeypatch)
    engine = llm.engine
    streams = [llm.stream([i], LONG) for i in range(2)]
    for stream in streams:
        next(stream)
    llm.close()
    assert engine.counters().aborted == 2 and engine.counters().free_rows == llm.plan.num_rows
    streams[0].close()  # type: ignore[attr-defined]
    del streams, stream
    gc.collect()
    assert not engine.has_unfinished()


def test_a_failure_while_closing_still_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, runner = make(monkeypatch)
    ended = []
    llm._split = type("Split", (), {"close": lambda self: ended.append(self)})()  # type: ignore[assignment]
    Cycle(llm.stream([1], LONG))
    runner.interrupt = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        llm.close()
    assert ended and llm._engine is None
    llm.close()
    assert len(ended) == 1


def test_the_interrupted_reader_of_a_stream_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, runner = make(monkeypatch)
    stream = llm.stream([1], LONG)
    next(stream)
    runner.interrupt = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt) as info:  # keeps the traceback, with all of its frames
        next(stream), next(stream)
    check(llm)
    assert info.value is not None and isinstance(runner, FakeRunner)


def test_requests_of_a_queue_that_has_gone_end_with_the_next_step() -> None:
    rig = Rig()
    queue = DeltaQueue()
    rig.engine.submit(rig.engine.prepare([1], LONG), queue=queue)
    assert rig.step() == [] and rig.engine.counters().running == 1
    del queue
    assert rig.step() == rig.engine.drain() == [], "what it gave goes nowhere"
    assert rig.engine.counters().aborted == 1
    rig.assert_empty()
