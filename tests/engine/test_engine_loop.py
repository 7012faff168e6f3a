"""The engine in a thread of its own: each request's outputs, whole; aborts, a full queue, a crash, the end."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hybridrt.base.errors import EngineError, QueueFullError, RankError, RequestError, UnavailableError
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.engine.api.engine_loop import EngineLoop, StepMessage
from hybridrt.engine.core.traffic_policy import TrafficPolicy
from hybridrt.engine.request.outputs import Delta
from tests.engine.test_threads import WAIT, before_launch, in_threads
from tests.support.engine_harness import Rig
from tests.support.fake_llm import FIVE, VOCAB, assert_clean, make
from tests.support.mock_executor import tokens_alone
from tests.support.samples import Samples

LONG = SamplingParams(max_tokens=40, ignore_eos=True, seed=2)


class Reader:
    """Collects messages, and lets a test wait for what they must hold."""

    def __init__(self) -> None:
        self.samples = Samples()
        self.errors: dict[str, EngineError] = {}
        self.messages: list[StepMessage] = []
        self._came = threading.Condition()

    def __call__(self, message: StepMessage) -> None:
        with self._came:
            self.messages.append(message)
            self.samples.add(message.deltas)
            self.errors |= {delta.request_id: delta.error for delta in message.deltas if delta.error is not None}
            self._came.notify_all()

    def wait(self, until: Callable[[], bool]) -> None:
        with self._came:
            assert self._came.wait_for(until, WAIT)

    def wait_for_end(self, *requests: str) -> None:
        self.wait(lambda: all((r, 0) in self.samples and self.samples[r, 0].finish_reason for r in requests))


def params(tokens: int, seed: int, **changes: Any) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, ignore_eos=True, seed=seed, **changes)


def test_requests_get_their_own_tokens_a_message_a_step() -> None:
    rig, reader = Rig(late=1), Reader()
    loop = EngineLoop(rig.engine, reader, max_samples=100)
    for i in range(9):
        loop.submit({f"r{i}": rig.engine.prepare([1, i], params(3 + i, i))})
    reader.wait_for_end(*(f"r{i}" for i in range(9)))
    assert loop.close() and loop.unfinished == 0 and loop.error is None
    for i in range(9):
        assert reader.samples[f"r{i}", 0].token_ids == tokens_alone([1, i], i, 3 + i, rig.executor.vocab)
    for message in reader.messages:
        keys = [(delta.request_id, delta.index) for delta in message.deltas]
        assert keys and len(set(keys)) == len(keys), "a delta a sample"
    rig.assert_empty()


def test_the_next_step_is_launched_when_tokens_are_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridrt.engine.api.engine_loop.HAND_OUT_SECONDS", float(WAIT))
    monkeypatch.setattr("hybridrt.engine.api.engine_loop.HAND_OUT_SHARE", 1e9)  # steps take no time here
    rig, reader, launches, threads = Rig(late=1), Reader(), list[int](), list[threading.Thread]()

    def note_launches(message: StepMessage) -> None:
        known = len(rig.executor.plans)

        def hand_out() -> None:
            time.sleep(0.01)  # a loop that does not wait launches now
            launches.append(len(rig.executor.plans) - known)
            message.handed_out.set()

        threads.append(threading.Thread(target=hand_out))
        threads[-1].start()
        reader(message)

    loop = EngineLoop(rig.engine, note_launches, max_samples=100)
    loop.submit({"one": rig.engine.prepare([1], params(6, 0))})
    reader.wait_for_end("one")
    assert loop.close()
    for thread in threads:
        thread.join()
    assert launches == [0] * 6


def test_short_steps_wait_for_readers_a_share_of_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridrt.engine.api.engine_loop.HAND_OUT_SECONDS", 2.0 * WAIT)
    rig, reader = Rig(late=1), Reader()  # whose messages are never handed out
    loop = EngineLoop(rig.engine, reader, max_samples=100)
    loop.submit({"one": rig.engine.prepare([1], FIVE)})
    reader.wait_for_end("one")
    assert loop.close()


def test_a_device_that_is_idle_waits_for_no_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridrt.engine.api.engine_loop.HAND_OUT_SECONDS", 2.0 * WAIT)
    monkeypatch.setattr("hybridrt.engine.api.engine_loop.HAND_OUT_SHARE", 1e9)
    rig, reader = Rig(late=0), Reader()  # whose messages are never handed out
    loop = EngineLoop(rig.engine, reader, max_samples=100)
    loop.submit({"one": rig.engine.prepare([1], FIVE)})
    reader.wait_for_end("one")
    assert loop.close()


def test_requests_join_a_step_that_need_not_be_scheduled_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, reader, asked = Rig(late=1), Reader(), threading.Event()

    def spare_seconds() -> float:
        """Until the second request is queued."""
        if len(rig.executor.plans) != 1 or rig.engine.counters().waiting:
            return 0.0
        asked.set()
        return float(WAIT)

    monkeypatch.setattr(rig.engine, "spare_seconds", spare_seconds)
    loop = EngineLoop(rig.engine, reader, max_samples=100)
    loop.submit({"first": rig.engine.prepare([1], FIVE)})
    assert asked.wait(WAIT)
    loop.submit({"second": rig.engine.prepare([2], FIVE)})
    reader.wait_for_end("first", "second")
    assert [len(plan.admissions) for plan in rig.executor.plans[:2]] == [1, 1]
    assert loop.close()


def test_a_loop_that_puts_a_step_off_can_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    rig, asked = Rig(late=1), threading.Event()
    monkeypatch.setattr(rig.engine, "spare_seconds", lambda: asked.set() or 2.0 * WAIT)
    loop = EngineLoop(rig.engine, Reader(), max_samples=100)
    loop.submit({"one": rig.engine.prepare([1], FIVE)})
    assert asked.wait(WAIT) and loop.close(WAIT)
    rig.assert_empty()


def test_a_step_that_ends_long_before_its_predicted_end_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that was compiled once may make such steps seem hundreds of times as long as they are."""
    rig, reader, asked, over = Rig(late=1), Reader(), threading.Event(), threading.Event()

    def spare_seconds() -> float:
        if over.is_set():
            return 0.0
        asked.set()
        return 10.0 * WAIT

    monkeypatch.setattr(rig.engine, "spare_seconds", spare_seconds)
    loop = EngineLoop(rig.engine, reader, max_samples=100)
    loop.submit({"one": rig.engine.prepare([1], FIVE)})
    assert asked.wait(WAIT)
    over.set()
    reader.wait_for_end("one")
    assert loop.close()


def test_an_engine_with_a_target_says_how_long_a_step_may_be_put_off() -> None:
    rig = Rig(late=1)
    rig.add([1], max_tokens=30, ignore_eos=True)
    rig.step()
    assert rig.engine.spare_seconds() == 0.0, "there is no target"
    rig.engine.policy = target = TrafficPolicy(1.0, clock=lambda: 0.0)
    target.cost.predict = lambda work: 2.0  # type: ignore[method-assign]
    assert 1.5 < rig.engine.spare_seconds() < 2.0
    rig.executor.run_oldest()
    assert rig.engine.spare_seconds() == 0.0, "the device is idle"
    rig.engine.drain()
    assert rig.engine.spare_seconds() == 0.0, "nothing runs"


def test_an_idle_loop_holds_nothing() -> None:
    rig, reader = Rig(late=1), Reader()
    loop = EngineLoop(rig.engine, reader, max_samples=100)
    loop.submit({"one": rig.engine.prepare([1], FIVE)})
    reader.wait_for_end("one")
    loop.abort("one")
    loop.abort("never seen")
    with rig.engine.turns:
        rig.assert_empty()
        assert not rig.engine.has_unfinished(), "no launched step is left unread"
    loop.close()


def test_abort_ends_a_request_and_no_other() -> None:
    rig, reader = Rig(), Reader()
    loop = EngineLoop(rig.engine, reader, max_samples=100)
    with rig.engine.turns:  # no step before both are there
        loop.submit({"gone": rig.engine.prepare([1], params(40, 1))})
        loop.submit({"stays": rig.engine.prepare([2], params(40, 2))})
        loop.abort("gone")
    reader.wait_for_end("gone", "stays")
    loop.close()
    assert reader.samples["gone", 0].finish_reason == "abort" and "gone" not in reader.errors
    assert reader.samples["stays", 0].token_ids == tokens_alone([2], 2, 40, rig.executor.vocab)
    rig.assert_empty()


def test_a_request_of_another_owner_is_not_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = make(monkeypatch)
    loop = EngineLoop(llm.engine, Reader(), max_samples=100)
    with llm.engine.turns:
        mine = llm.engine.add_request([1], FIVE)
    loop.abort(mine)
    loop.close()
    assert llm.engine.counters().aborted == 0
    llm.engine.abort(mine)
    llm.engine.drain()
    assert_clean(llm)


def test_a_full_queue_refuses_and_takes_again() -> None:
    rig, reader = Rig(), Reader()
    loop = EngineLoop(rig.engine, reader, max_samples=4)
    with rig.engine.turns:
        loop.submit({"three": rig.engine.prepare([1], params(5, 1, n=3))})
        with pytest.raises(QueueFullError, match=r"3 samples run or wait, the request asks for 2 more, and 4 may be"):
            loop.submit({"two": rig.engine.prepare([1], params(5, 1, n=2))})
        with pytest.raises(QueueFullError, match="the request asks for 2 more"):  # none of a batch has started
            loop.submit({name: rig.engine.prepare([1], params(5, 1)) for name in ("a", "b")})
        loop.submit({"one": rig.engine.prepare([1], params(5, 1))})
        with pytest.raises(RequestError, match="in use"):
            loop.submit({"one": rig.engine.prepare([1], params(5, 1))})
    reader.wait_for_end("three", "one")
    reader.wait(lambda: loop.unfinished == 0)
    loop.submit({"two": rig.engine.prepare([1], params(5, 1, n=2))})
    reader.wait_for_end("two")
    loop.close()
    rig.assert_empty()


def test_an_id_that_another_owner_uses_fails_alone() -> None:
    rig, reader = Rig(), Reader()
    with rig.engine.turns:
        rig.add([1], "mine", max_tokens=3, ignore_eos=True)
    loop = EngineLoop(rig.engine, reader, max_samples=4)
    loop.submit({"mine": rig.engine.prepare([1], FIVE)})
    loop.submit({"other": rig.engine.prepare([2], FIVE)})
    reader.wait_for_end("mine", "other")
    loop.close()
    assert "in use" in str(reader.errors["mine"]) and "other" not in reader.errors
    rig.run()


def in_step(number: int, error: Exception, runner: Any) -> None:
    """The launch of step `number`, counted from 0, raises."""

    def hook() -> None:
        if len(runner.plans) == number:
            raise error

    before_launch(runner, hook)


def test_a_step_that_raises_ends_the_loop_and_every_request() -> None:
    rig, reader = Rig(), Reader()
    loop = EngineLoop(rig.engine, reader, max_samples=100)
    run_step = rig.engine.run_step

    def broken() -> None:
        if len(rig.executor.plans) == 5:
            raise ZeroDivisionError("a bug")
        run_step()

    rig.engine.run_step = broken  # type: ignore[method-assign]
    loop.submit({"running": rig.engine.prepare([1], params(40, 1, n=2))})
    reader.wait_for_end("running")
    loop._thread.join(WAIT)
    assert isinstance(reader.errors["running"], UnavailableError)
    assert "ZeroDivisionError: a bug" in str(loop.error)
    assert reader.samples["running", 1].finish_reason == "abort", "both samples ended"
    with pytest.raises(UnavailableError, match="a bug"):
        loop.submit({"late": rig.engine.prepare([1], FIVE)})
    assert loop.close() and loop.unfinished == 0


@pytest.mark.parametrize("fatal", [RankError("rank 1 is lost"), torch.AcceleratorError("device-side assert", 710)])
def test_what_no_later_step_gets_over_ends_the_loop(fatal: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, runner = make(monkeypatch)
    reader = Reader()
    in_step(5, fatal, runner)
    loop = EngineLoop(llm.engine, reader, max_samples=100)
    loop.submit({"first": llm.engine.prepare([1], LONG)})
    reader.wait_for_end("first")
    loop._thread.join(WAIT)
    assert isinstance(reader.errors["first"], EngineError)
    assert isinstance(loop.error, UnavailableError) and str(fatal) in str(loop.error)


def test_a_step_that_fails_ends_its_requests_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, runner = make(monkeypatch)
    reader = Reader()
    loop = EngineLoop(llm.engine, reader, max_samples=100)
    in_step(0, ValueError("this step alone"), runner)
    loop.submit({"first": llm.engine.prepare([1], LONG)})
    reader.wait_for_end("first")
    del runner.launch
    assert "this step alone" in str(reader.errors["first"]) and loop.error is None
    loop.submit({"second": llm.engine.prepare([1], FIVE)})
    reader.wait_for_end("second")
    assert reader.samples["second", 0].token_ids == tokens_alone([1], 1, 5, VOCAB)
    loop.close()
    assert_clean(llm)


def test_closing_ends_what_runs_and_refuses_the_rest() -> None:
    rig, reader = Rig(late=1), Reader()
    loop = EngineLoop(rig.engine, reader, max_samples=100)
    loop.submit({"running": rig.engine.prepare([1], params(60, 1, n=2))})
    reader.wait(lambda: ("running", 1) in reader.samples)
    assert loop.close() and loop.close()
    assert {reader.samples["running", i].finish_reason for i in range(2)} <= {"abort", "length"}
    with pytest.raises(UnavailableError, match="closed"):
        loop.submit({"late": rig.engine.prepare([1], FIVE)})
    rig.assert_empty()


def test_a_step_that_hangs_shows_and_close_gives_up_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, runner = make(monkeypatch)
    inside, leave = threading.Event(), threading.Event()

    def hang() -> None:
        inside.set()
        assert leave.wait(WAIT)

    before_launch(runner, hang)
    loop = EngineLoop(llm.engine, Reader(), max_samples=100)
    assert loop.stalled == 0
    loop.submit({"hangs": llm.engine.prepare([1], FIVE)})
    assert inside.wait(WAIT) and loop.stalled > 0
    assert not loop.close(timeout=0.01)
    leave.set()
    assert loop.close() and loop.stalled == 0
    assert_clean(llm)


def test_other_threads_generate_while_the_loop_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = make(monkeypatch, max_running_requests=3)
    reader = Reader()
    loop = EngineLoop(llm.engine, reader, max_samples=100)
    for i in range(6):
        loop.submit({f"r{i}": llm.engine.prepare([i], params(40, i))})

    def generate(first: int) -> None:
        for i in range(first, first + 10):
            assert llm.generate([[i]], params(7, i))[0].token_ids == tokens_alone([i], i, 7, VOCAB)
            deltas: list[Delta] = list(llm.stream([i], params(7, i)))
            assert [t for delta in deltas for t in delta.token_ids] == tokens_alone([i], i, 7, VOCAB)

    in_threads(lambda: generate(20), lambda: generate(40))
    reader.wait_for_end(*(f"r{i}" for i in range(6)))
    for i in range(6):
        assert reader.samples[f"r{i}", 0].token_ids == tokens_alone([i], i, 40, VOCAB)
    loop.close()
    llm.engine.drain()
    assert_clean(llm)
