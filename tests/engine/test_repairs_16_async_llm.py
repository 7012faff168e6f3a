"""AsyncLLM: building it off the event loop, leaving it, forks, exits, and event loops that were closed."""

import asyncio
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import hybridrt
from hybridrt import LLM, AsyncLLM, ConfigError, EngineError, SamplingParams, UnavailableError
from hybridrt.engine.api import async_llm
from tests.engine.test_threads import WAIT
from tests.support.fake_llm import FIVE, VOCAB, make
from tests.support.mock_executor import tokens_alone

ROOT = Path(__file__).parents[2]
LONG = SamplingParams(max_tokens=60, ignore_eos=True, seed=2)


class SlowLLM(LLM):
    """Its constructor waits until the event loop has had a turn."""

    passed = threading.Event()
    thread: threading.Thread | None = None
    closed = threading.Event()

    def __init__(self, model: str, **options: Any) -> None:
        SlowLLM.thread = threading.current_thread()
        assert SlowLLM.passed.wait(WAIT), "the event loop stood still"
        super().__init__(model, **options)

    def close(self) -> None:
        super().close()
        SlowLLM.closed.set()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    make(monkeypatch)
    monkeypatch.setattr(async_llm, "LLM", SlowLLM)
    SlowLLM.passed.clear()
    SlowLLM.closed.clear()


def test_the_event_loop_goes_on_while_a_model_is_built(slow: None) -> None:
    async def main() -> None:
        task = asyncio.create_task(AsyncLLM.create("somewhere", max_running_requests=2, max_waiting=7))
        await asyncio.sleep(0)
        SlowLLM.passed.set()
        async with await task as served:
            assert SlowLLM.thread is not threading.main_thread()
            output = await served.complete([1], FIVE)
            assert output.token_ids == tokens_alone([1], 1, 5, VOCAB)
        with pytest.raises(EngineError, match="closed"):
            served.llm.engine.counters()
        assert SlowLLM.closed.is_set() and served.draining

    asyncio.run(asyncio.wait_for(main(), WAIT))


def test_documents_build_no_model_within_an_event_loop() -> None:
    for file in [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.py")]:
        assert not re.search(r"with AsyncLLM\(", file.read_text()), file


def test_a_model_that_nobody_waits_for_any_more_is_closed(slow: None) -> None:
    async def main() -> None:
        task = asyncio.create_task(AsyncLLM.create("somewhere"))
        await asyncio.sleep(0)
        while SlowLLM.thread is None:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    SlowLLM.passed.set()
    assert SlowLLM.closed.wait(WAIT)


def test_errors_of_building_are_raised_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = make(monkeypatch)
    for arguments, text in (
        ({"max_waiting": "x"}, "max_waiting"),
        ({"seed": "x"}, "seed"),
        ({"max_num_seqs": 2}, "max_running"),
    ):
        with pytest.raises(ConfigError, match=text):
            asyncio.run(AsyncLLM.create("somewhere", **arguments))  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=text):
            AsyncLLM("somewhere", **arguments)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="seed is an option of the LLM"):
        AsyncLLM(llm, seed=3)


def test_dir_shows_no_internals(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = make(monkeypatch)
    with AsyncLLM(llm) as served:
        shown = {name for name in dir(served) if not name.startswith("__")}
        assert shown == async_llm._PUBLIC
        assert all(hasattr(served, name) for name in shown)
    shown = {name for name in dir(hybridrt) if not name.startswith("__")}
    assert shown == {"errors", *hybridrt.__all__}


def test_requests_of_a_closed_event_loop_leave_it_to_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = make(monkeypatch)
    with AsyncLLM(llm) as served:
        kept = []

        async def leave() -> None:
            with llm.engine.turns:
                kept.append(served.submit(await served.prepare([1], LONG), "mine"))

        events = asyncio.new_event_loop()
        events.run_until_complete(leave())
        events.close()

        async def use() -> None:
            for i in range(3):
                output = await served.complete([i], SamplingParams(max_tokens=5, ignore_eos=True, seed=i))
                assert output.token_ids == tokens_alone([i], i, 5, VOCAB)
            while served.unfinished:
                await asyncio.sleep(0.001)
            assert [d.token_ids async for d in served.submit(await served.prepare([1], FIVE), "mine")]

        for _ in range(2):
            asyncio.run(asyncio.wait_for(use(), WAIT))
        assert not kept[0].running


def test_an_open_event_loop_keeps_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = make(monkeypatch)
    first = asyncio.new_event_loop()

    async def submit() -> Any:
        return served.submit(await served.prepare([1], LONG))

    with AsyncLLM(llm) as served:
        with llm.engine.turns:
            stream = first.run_until_complete(submit())
            with pytest.raises(EngineError, match="one event loop at a time"):
                asyncio.run(submit())
        stream.close()
    first.close()


def in_child(work: Any) -> str:
    """What `work` raises in a forked process, which has WAIT seconds."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            import signal

            signal.alarm(int(WAIT))
            work()
            os.write(writer, b"nothing")
        except BaseException as e:
            os.write(writer, f"{type(e).__name__}: {e}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with open(reader, "rb") as file:
        return file.read().decode()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_gets_an_error_and_leaves_the_parent_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = make(monkeypatch)
    with AsyncLLM(llm) as served:
        asyncio.run(served.complete([1], FIVE))
        prepared = llm.engine.prepare([1], FIVE)

        async def submit() -> None:
            async for _ in served.submit(prepared):
                pass

        for work in (
            lambda: asyncio.run(served.complete([1], FIVE)),
            lambda: asyncio.run(submit()),
            lambda: asyncio.run(served.in_thread(len, "x")),
            lambda: asyncio.run(served.drain(5)),
            lambda: llm.generate([[1]], FIVE),
            lambda: next(iter(llm.stream([1], FIVE))),
            lambda: llm.engine.step(),
        ):
            with llm.engine.turns:  # a lock that nobody in the child would release
                said = in_child(work) if work.__code__.co_names[:1] != ("llm",) else None
            said = said or in_child(work)
            assert said.startswith("UnavailableError: ") and "forked" in said, said
        for close in (served.close, llm.close):
            assert in_child(close) == "nothing"
        assert asyncio.run(served.complete([1], FIVE)).token_ids == tokens_alone([1], 1, 5, VOCAB)
    assert issubclass(UnavailableError, EngineError)


EXIT = """
import asyncio, sys
from hybridrt import AsyncLLM, SamplingParams
served = AsyncLLM("embedded", device="cpu", max_model_len=256)
async def main():
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    tasks = [asyncio.create_task(served.complete("def f(", params)) for _ in range(8)]
    async for _ in served.generate("class A:", params):
        break
    kept.extend(tasks)
kept = []
events = asyncio.new_event_loop()
events.run_until_complete(main())
print("left", served.unfinished > 0)
sys.exit(3)
"""


@pytest.mark.slow
def test_the_interpreter_ends_while_requests_run() -> None:
    result = subprocess.run([sys.executable, "-c", EXIT], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert (result.returncode, result.stdout) == (3, "left True\n"), result.stderr
    assert "Fatal" not in result.stderr and "terminate" not in result.stderr


def test_the_end_of_the_interpreter_joins_the_engines_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `atexit` calls, without the end: the thread has ended after it, and `close` takes the callback back."""
    noted: list[Any] = []
    monkeypatch.setattr("hybridrt.engine.api.engine_loop.atexit.register", noted.append)
    monkeypatch.setattr("hybridrt.engine.api.engine_loop.atexit.unregister", noted.remove)
    llm, _ = make(monkeypatch)
    served = AsyncLLM(llm)
    (leave,) = noted
    leave()
    assert not served._loop._thread.is_alive() and not noted
