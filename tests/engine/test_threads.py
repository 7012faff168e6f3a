"""Several threads, and several owners of requests: every call gets its own outputs, whole and right."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from hybridrt.base.errors import EngineError
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.engine.api.llm import LLM
from tests.support.engine_harness import Rig
from tests.support.fake_llm import FIVE, VOCAB, FakeRunner, assert_clean, make
from tests.support.mock_executor import MockExecutor, MockHandle, tokens_alone
from tests.support.samples import Samples

WAIT = 60  # seconds after which a test gives up: nothing here waits for a clock


def before_launch(runner: FakeRunner, hook: Callable[[], None]) -> None:
    def launch(plan: Any) -> MockHandle:
        hook()
        return MockExecutor.launch(runner, plan)

    runner.launch = launch  # type: ignore[method-assign]


def in_threads(*tasks: Callable[[], None]) -> None:
    """Runs the tasks at once, each in a thread; raises what one of them raised."""
    errors: list[BaseException] = []

    def guarded(task: Callable[[], None]) -> None:
        try:
            task()
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=guarded, args=(task,), daemon=True) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    if errors:
        raise errors[0]


def endless(seed: int) -> SamplingParams:
    return SamplingParams(max_tokens=40, ignore_eos=True, seed=seed)


def test_threads_that_generate_and_stream_get_their_own_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = make(monkeypatch, max_running_requests=3)

    def generate(first: int) -> None:
        for i in range(first, first + 20):
            params = SamplingParams(max_tokens=1 + i % 7, ignore_eos=True, seed=i)
            outputs = llm.generate([[i], [i, 1]], params)
            assert [o.token_ids for o in outputs] == [
                tokens_alone(prompt, i, 1 + i % 7, VOCAB) for prompt in ([i], [i, 1])
            ]

    def stream(first: int) -> None:
        for i in range(first, first + 20):
            params = SamplingParams(max_tokens=9, ignore_eos=True, seed=i)
            deltas = llm.stream([i], params)
            want = tokens_alone([i], i, 9, VOCAB)
            got = next(deltas).token_ids  # several, where another thread's steps came between
            if i % 2:  # a call within another one's stream, in the same thread
                assert llm.generate([[1]], FIVE)[0].token_ids == tokens_alone([1], 1, 5, VOCAB)
                got += [t for delta in deltas for t in delta.token_ids]
            assert got and got == want[: len(got)] and (i % 2 == 0 or got == want)

    in_threads(*(lambda i=i: generate(30 * i) for i in range(3)), lambda: stream(100), lambda: stream(130))
    llm.engine.drain()
    assert_clean(llm)


def wait_in_third_step(llm: LLM, runner: FakeRunner) -> threading.Event:
    """Holds the third step until another thread stands in line. The event: it has been reached."""
    reached = threading.Event()

    def hook() -> None:
        if len(runner.plans) == 2:
            reached.set()
            while not llm.engine.turns._line:
                time.sleep(0.001)

    before_launch(runner, hook)
    return reached


def test_a_short_call_does_not_wait_for_a_long_one_of_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, runner = make(monkeypatch)
    reached, ended = wait_in_third_step(llm, runner), list[str]()

    def long() -> None:
        assert llm.generate([[1]], endless(1))[0].token_ids == tokens_alone([1], 1, 40, VOCAB)
        ended.append("long")

    def short() -> None:
        assert reached.wait(WAIT)
        assert llm.generate([[1]], FIVE)[0].token_ids == tokens_alone([1], 1, 5, VOCAB)
        ended.append("short")

    in_threads(long, short)
    assert ended == ["short", "long"]


def test_closing_from_another_thread_ends_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, runner = make(monkeypatch)
    engine, reached = llm.engine, wait_in_third_step(llm, runner)
    reasons: list[str | None] = []

    def close() -> None:
        assert reached.wait(WAIT)
        llm.close()

    in_threads(lambda: reasons.extend(o.finish_reason for o in llm.generate([[1]], endless(1))), close)
    assert reasons == ["abort"]
    assert not engine.has_unfinished() and engine.counters().free_rows == llm.plan.num_rows


@pytest.mark.parametrize(
    "call", ["step", "run_step", "drain", "finish_launched", "add_request", "abort", "abort_all", "fail"]
)
def test_the_engine_refuses_a_second_thread_while_one_is_inside(call: str) -> None:
    rig = Rig()
    first = rig.add([1], max_tokens=5, ignore_eos=True, seed=1)
    inside, leave = threading.Event(), threading.Event()
    launch = rig.executor.launch

    def slow(plan: Any) -> MockHandle:
        inside.set()
        assert leave.wait(WAIT)
        return launch(plan)

    rig.executor.launch = slow  # type: ignore[method-assign]
    arguments = {"add_request": ([2], FIVE), "abort": (first,), "fail": (first, ValueError())}.get(call, ())

    def second() -> None:
        assert inside.wait(WAIT)
        try:
            with pytest.raises(EngineError, match="one thread at a time"):
                getattr(rig.engine, call)(*arguments)
            rig.engine.counters(), rig.engine.has_unfinished()  # these change nothing
        finally:
            leave.set()

    in_threads(lambda: rig.step() and None, second)
    in_threads(rig.run)  # one thread after the other is no second thread
    assert rig.outputs[first, 0].token_ids == tokens_alone([1], 1, 5, rig.executor.vocab)


def test_threads_that_share_an_engine_can_take_turns() -> None:
    rig = Rig()

    def use(prompt: int) -> None:
        for _ in range(10):
            with rig.engine.turns:
                name = rig.add([prompt], max_tokens=5, ignore_eos=True, seed=prompt)
            while (name, 0) not in rig.outputs or rig.outputs[name, 0].finish_reason is None:
                with rig.engine.turns:
                    rig.step()
            assert rig.outputs[name, 0].token_ids == tokens_alone([prompt], prompt, 5, rig.executor.vocab)

    in_threads(*(lambda i=i: use(i) for i in range(4)))
    rig.run()


def test_the_engine_refuses_to_be_called_from_within_its_own_step() -> None:
    """A finalizer or a signal's handler may run in the middle of a step."""
    rig = Rig()
    name = rig.add([1], max_tokens=5, ignore_eos=True, seed=1)
    refused = []
    launch = rig.executor.launch

    def calls_back(plan: Any) -> MockHandle:
        with pytest.raises(EngineError, match="within its own step"):
            rig.engine.abort(name)
        refused.append(plan)
        return launch(plan)

    rig.executor.launch = calls_back  # type: ignore[method-assign]
    rig.run()
    assert refused and rig.outputs[name, 0].token_ids == tokens_alone([1], 1, 5, rig.executor.vocab)


def test_requests_of_the_engine_keep_their_outputs_through_other_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = make(monkeypatch)
    short = llm.engine.add_request([5], SamplingParams(max_tokens=3, ignore_eos=True, seed=5))
    long = llm.engine.add_request([6], SamplingParams(max_tokens=30, ignore_eos=True, seed=6))
    stream = llm.stream([7], endless(7))
    first = next(stream)
    assert llm.generate([[1]], FIVE)[0].token_ids == tokens_alone([1], 1, 5, VOCAB)
    samples = Samples()
    samples.add(llm.engine.step())
    assert len(samples[short, 0].token_ids) == 3 and len(samples[long, 0].token_ids) >= 4, "what came during generate"
    while llm.engine.has_unfinished():
        samples.add(llm.engine.step())
    assert samples[long, 0].token_ids == tokens_alone([6], 6, 30, VOCAB)
    rest = [t for delta in stream for t in delta.token_ids]
    assert first.token_ids + rest == tokens_alone([7], 7, 40, VOCAB), "what came while the engine was stepped"
    assert_clean(llm)
