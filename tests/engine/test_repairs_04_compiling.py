"""Compiling grammars: in a process with limits, which ends, and past which small and compiled forms go."""

import gc
import os
import signal
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from hybridrt.base.errors import QueueFullError, RequestError
from hybridrt.base.structured_outputs import StructuredOutputs
from hybridrt.engine.grammar import compile_limit, compile_process, grammar_compiler
from hybridrt.engine.grammar.compile_process import CompileProcess, Verdict
from hybridrt.engine.grammar.grammar_compiler import GrammarCompiler
from hybridrt.engine.grammar.grammar_text import grammar_text, remainders
from hybridrt.engine.text.tokenizer import load_tokenizer
from hybridrt.runtime.load.model_path import resolve_model_path
from tests.support.clock import Clock

SMALL = StructuredOutputs(regex="[ab]c")


def large(i: int = 0) -> StructuredOutputs:
    return StructuredOutputs(json={"properties": {f"p{i}_{j}": {"type": "string"} for j in range(1500)}})


def make_compiler(**options: Any) -> GrammarCompiler:
    return GrammarCompiler(load_tokenizer(resolve_model_path("embedded")), 4103, (0, 2), **options)


@pytest.fixture(scope="module")
def process() -> CompileProcess:
    compiler = make_compiler()
    compiler._loaded()
    return compiler._process


def forked(process: CompileProcess) -> list[int]:
    """The processes that compile now."""
    assert process._running is not None
    pid = process._running.process.pid
    with open(f"/proc/{pid}/task/{pid}/children") as children:
        return list(map(int, children.read().split()))


# An intersection of expressions: llguidance takes minutes, whatever its limits.
ENDLESS = "start: A\nA: " + " & ".join(f"/(.*{chr(97 + i)}.{{20}})*/" for i in range(10))


def test_what_compiles_for_too_long_really_ends(process: CompileProcess) -> None:
    """By the system, which counts its CPU time."""
    verdict = process.compile(ENDLESS, 0.05, 60.0)
    assert verdict.late and verdict.error and not forked(process)
    assert process.compile('start: "a"', 5.0, 60.0).error == ""


def test_what_gets_no_cpu_time_is_not_refused_for_good(process: CompileProcess) -> None:
    """Here it would use more than it gets, in time that goes by."""
    with pytest.raises(QueueFullError, match="too busy"):
        process.compile(ENDLESS, 60.0, 0.05)
    assert not forked(process)


def test_an_endless_one_is_refused_and_kept_as_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_compiler, "QUICK_CPU_SECONDS", 0.02)
    monkeypatch.setattr(grammar_compiler, "MEDIUM_CPU_SECONDS", 0.03)
    monkeypatch.setattr(grammar_compiler, "LARGE_CPU_SECONDS", 0.05)
    compiler, calls, real = make_compiler(seconds=60.0), list[float](), CompileProcess.compile

    def note(self: CompileProcess, text: str, cpu: float, seconds: float) -> Verdict:
        calls.append(cpu)
        return real(self, text, cpu, seconds)

    monkeypatch.setattr(CompileProcess, "compile", note)
    for _ in range(2):
        with pytest.raises(RequestError, match=r"more than 0\.05 seconds of CPU time; make it simpler"):
            compiler.matcher(StructuredOutputs(grammar=ENDLESS))
    assert calls == [0.02, 0.03, 0.05]
    compiler.matcher(SMALL)


def test_memory_has_a_limit(process: CompileProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = compile_process._verdict("!", "memory")
    assert "512 MiB of memory" in verdict.error and not verdict.late
    assert process._running is not None
    pids, done = list[int](), ThreadPoolExecutor(1)
    job = done.submit(process.compile, ENDLESS, 60.0, 60.0)
    while not pids:
        pids = forked(process)
    os.kill(pids[0], signal.SIGKILL)  # as the system does when memory runs out
    assert "memory" in job.result(60).error
    done.shutdown()


@pytest.fixture
def blocked(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Large grammars compile until the event."""
    release, real = threading.Event(), CompileProcess.compile
    running = list[str]()

    def wait(self: CompileProcess, text: str, cpu: float, seconds: float) -> Verdict:
        if cpu == grammar_compiler.LARGE_CPU_SECONDS:
            running.append(text)
            release.wait(60)
            return Verdict("too large")
        return real(self, text, cpu, seconds)

    monkeypatch.setattr(CompileProcess, "compile", wait)
    yield release, running
    release.set()


def test_small_and_compiled_forms_go_past_large_ones(blocked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many large ones as may wait; one more is told to come again."""
    release, running = blocked
    monkeypatch.setattr(grammar_compiler, "WAITING", 5)
    compiler = make_compiler(seconds=60.0)
    known = StructuredOutputs(regex="known")
    compiler.matcher(known)
    with ThreadPoolExecutor(6) as threads:
        jobs = [threads.submit(compiler.matcher, large(i)) for i in range(5)]
        while compiler._waiting._value:  # type: ignore[attr-defined]
            time.sleep(0.001)
        assert len(running) <= grammar_compiler.LARGE
        compiler.matcher(known)
        compiler.matcher(SMALL)
        for outputs in (large(9), large(0)):  # a new one, and one that is on its way
            with pytest.raises(QueueFullError, match="try again later"):
                compiler.matcher(outputs)
        release.set()
        for job in jobs:
            with pytest.raises(RequestError, match="too large"):
                job.result(60)
    assert compiler._waiting._value == 5  # type: ignore[attr-defined]


def of_patterns(count: int, i: int = 0) -> StructuredOutputs:
    kind = {"type": "string", "pattern": "^[a-z]{1,200}$"}
    properties = {f"p{i}_{j}": kind for j in range(count)}
    return StructuredOutputs(json={"type": "object", "properties": properties, "required": [*properties]})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(compile_limit, "time", made)
    return made


@pytest.mark.parametrize(("count", "rests"), [(5, 0), (300, 5), (600, 5)])
def test_costly_forms_take_turns_and_rest_between_them(
    count: int, rests: int, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many come at a time. Each takes a tenth of a second here; small ones have no rests."""
    running, most, real = [0], list[int](), CompileProcess.compile

    def note(self: CompileProcess, text: str, cpu: float, seconds: float) -> Verdict:
        running[0] += 1
        most.append(running[0])
        try:
            return real(self, text, cpu, seconds)
        finally:
            clock.now += 0.1
            running[0] -= 1

    monkeypatch.setattr(CompileProcess, "compile", note)
    compiler = make_compiler(seconds=60.0)
    with ThreadPoolExecutor(6 if rests else 1) as threads:
        list(threads.map(compiler.matcher, [of_patterns(count, i) for i in range(6)]))
    assert len(most) == 6 and max(most) == 1
    assert clock.slept == [pytest.approx(compile_limit.REST * 0.1)] * rests


def test_a_small_form_waits_for_no_rest_and_a_costly_one_not_for_ever(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = make_compiler(seconds=1.0)
    with pytest.raises(KeyError), compiler._medium.enter(1.0):
        clock.now += 100.0
        raise KeyError
    assert compiler._medium._begin == clock.now + compile_limit.MAX_REST
    with pytest.raises(QueueFullError, match="try again later"):
        compiler.matcher(of_patterns(300))
    compiler.matcher(SMALL)
    assert clock.slept == []
    clock.now += compile_limit.MAX_REST
    compiler.matcher(of_patterns(300))


def test_many_requests_with_one_new_form_compile_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, calls, real = make_compiler(), list[str](), grammar_compiler.grammar_text
    monkeypatch.setattr(grammar_compiler, "grammar_text", lambda o: calls.append(o.kind) or real(o))  # type: ignore[func-returns-value]
    with ThreadPoolExecutor(16) as threads:
        found = list(threads.map(compiler.grammar, [SMALL] * 64))
    assert len(set(found)) == 1 and calls == ["regex"]


def test_closing_ends_what_compiles_and_a_new_process_is_not_started() -> None:
    compiler = make_compiler(seconds=60.0)
    with ThreadPoolExecutor(1) as threads:
        compiler.matcher(SMALL)
        job = threads.submit(compiler.matcher, StructuredOutputs(grammar=ENDLESS))
        while not forked(compiler._process):
            time.sleep(0.001)
        child = compiler._process._running.process  # type: ignore[union-attr]
        compiler.close()
        with pytest.raises(QueueFullError):
            job.result(60)
    assert child.wait(60) == -signal.SIGKILL
    compiler.matcher(SMALL)  # it is compiled
    with pytest.raises(QueueFullError, match="closed"):
        compiler.matcher(StructuredOutputs(regex="other"))


def test_a_process_that_has_ended_is_replaced() -> None:
    compiler = make_compiler()
    compiler.matcher(SMALL)
    first = compiler._process._running
    assert first is not None
    first.process.kill()
    while not first.ended:
        time.sleep(0.001)
    compiler.matcher(StructuredOutputs(regex="x"))
    assert compiler._process._running is not first
    second = compiler._process._running
    for process, alive in ((first, False), (second, True)):
        assert process is not None and process.process.stdin is not None and process.process.stdout is not None
        assert process.process.stdin.closed == process.process.stdout.closed == (not alive), "pipes are open files"
    held = weakref.ref(first)
    del compiler, first, process  # nobody closes it
    gc.collect()
    assert second is not None and second.process.wait(60) == -signal.SIGKILL and held() is None


def test_an_interrupted_compilation_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = make_compiler()

    def interrupt(*args: Any) -> Verdict:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(CompileProcess, "compile", interrupt)
        with pytest.raises(KeyboardInterrupt):
            compiler.matcher(SMALL)
    compiler.matcher(SMALL)


def test_strings_hold_no_multiples() -> None:
    """Numbers are looked for, not keys: there may be thousands of strings."""
    text = grammar_text(
        StructuredOutputs(json={"enum": ["multipleOf", '"multipleOf": 7', "7", *map(str, range(3000))]})
    )
    assert remainders(text) == 1
    assert remainders(grammar_text(StructuredOutputs(json={"type": "number", "multipleOf": 7}))) == 7


def test_errors_of_expressions_keep_their_lines() -> None:
    with pytest.raises(RequestError) as info:
        make_compiler().matcher(StructuredOutputs(regex="ab[c"))
    lines = str(info.value).split("\n")
    assert lines[1].strip() == "ab[c" and lines[2].index("^") == lines[1].index("[") and "no_forcing" not in lines[-1]
