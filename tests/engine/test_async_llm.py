"""AsyncLLM: many tasks at once, each with its own output; readers that lag, leave or are dropped; drain and close."""

import asyncio
import gc
import threading
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from hybridrt.base.errors import EngineError, QueueFullError, RequestError, UnavailableError
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.engine.api.async_llm import AsyncLLM
from hybridrt.engine.api.llm import LLM
from tests.engine.test_engine_loop import in_step, params
from tests.engine.test_threads import WAIT, in_threads
from tests.support.engine_harness import ByteTokenizer
from tests.support.fake_llm import FIVE, VOCAB, assert_clean, make
from tests.support.mock_executor import tokens_alone
from tests.support.samples import Samples

LONG = SamplingParams(max_tokens=60, ignore_eos=True, seed=2)


def run(work: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(WAIT):
            await work

    asyncio.run(limited())


async def ended(served: AsyncLLM) -> None:
    while served.unfinished:
        await asyncio.sleep(0.001)


def assert_nothing_left(llm: LLM) -> None:
    with llm.engine.turns:
        assert_clean(llm)
        llm.engine._coordinator.check()


def test_tasks_get_their_own_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = make(monkeypatch, max_running_requests=3)

    async def stream(served: AsyncLLM, i: int) -> None:
        tokens = [t async for delta in served.generate([i], params(9, i)) for t in delta.token_ids]
        assert tokens == tokens_alone([i], i, 9, VOCAB)

    async def whole(served: AsyncLLM, i: int) -> None:
        output = await served.complete([i], params(9, i, n=2, logprobs=1))
        assert output.token_ids == tokens_alone([i], i, 9, VOCAB) and output.prompt_token_ids == [i]
        assert [o.index for o in output.outputs] == [0, 1] and output.logprobs is not None

    async def main() -> None:
        with AsyncLLM(llm) as served:
            tasks = [stream(served, i) if i % 2 else whole(served, i) for i in range(40)]
            await asyncio.gather(*tasks)

    run(main())
    assert_nothing_left(llm)
    assert llm.generate([[1]], FIVE)[0].token_ids == tokens_alone([1], 1, 5, VOCAB), "an LLM that was passed stays open"


def test_a_reader_that_lags_gets_one_delta(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = make(monkeypatch, ByteTokenizer())

    async def main() -> None:
        with AsyncLLM(llm) as served:
            deltas = served.submit(await served.prepare("abc", params(20, 5, logprobs=0)))
            await ended(served)
            await asyncio.sleep(0)
            (delta,) = [delta async for delta in deltas]
            want = llm.generate("abc", params(20, 5, logprobs=0))[0]
            assert (delta.token_ids, delta.text, delta.logprobs) == (want.token_ids, want.text, want.logprobs)
            assert delta.finish_reason == "length" and delta.metrics is not None

    run(main())


def test_one_reader_of_several_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = make(monkeypatch, max_running_requests=2)

    async def main() -> None:
        with AsyncLLM(llm, max_waiting=2) as served:
            batch = [await served.prepare([i], params(9, i)) for i in range(4)]
            samples = Samples()
            samples.add([delta async for delta in served.submit(batch, "mine")])
            for i in range(4):
                assert samples[f"mine-{i}", 0].token_ids == tokens_alone([i], i, 9, VOCAB)
            with llm.engine.turns, pytest.raises(QueueFullError):
                served.submit([*batch, batch[0]], "mine")
            await ended(served)
            with llm.engine.turns:
                stream = served.submit(batch, "mine")
                assert served.abort("mine")
            assert [delta.finish_reason async for delta in stream] == ["abort"] * 4

    run(main())
    assert_nothing_left(llm)


@pytest.mark.parametrize("how", ["break", "close", "drop", "cancel", "abort"])
def test_a_reader_that_leaves_ends_its_request(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = make(monkeypatch)

    async def main() -> None:
        with AsyncLLM(llm) as served:
            with llm.engine.turns:  # the first step comes once the reader has left
                prepared = await served.prepare([1], LONG)
                if how == "break":
                    deltas = served.generate([1], LONG)
                    task = asyncio.ensure_future(anext(deltas))
                    await asyncio.sleep(0)
                    task.cancel()
                elif how == "cancel":
                    task = asyncio.create_task(served.complete([1], LONG))  # type: ignore[arg-type]
                    await asyncio.sleep(0)
                    assert served.unfinished == 1
                    task.cancel()
                else:
                    stream = served.submit(prepared, "mine")
                    if how == "close":
                        stream.close()
                    elif how == "abort":
                        assert served.abort("mine") and not served.abort("other")
                    else:
                        del stream
                        gc.collect()
                await asyncio.sleep(0)
            await ended(served)
            if how == "abort":
                assert [delta.finish_reason async for delta in stream] == ["abort"]
                assert not served.abort("mine"), "it has ended"
        assert llm.engine.counters().aborted == 1

    run(main())
    assert_nothing_left(llm)


def test_a_request_of_a_name_whose_deltas_are_still_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that leaves and asks again under the same name gets none of what was meant for the first request."""
    llm, _ = make(monkeypatch)

    async def main() -> None:
        with AsyncLLM(llm) as served:
            prepared = await served.prepare([1], LONG)
            first = served.submit(prepared, "mine")
            await anext(first)
            first.close()
            del first
            while served.unfinished:
                time.sleep(0.001)  # the engine goes on, and the event loop waits
            with pytest.raises(RequestError, match="'mine' is in use"):
                served.submit(prepared, "mine")
            await asyncio.sleep(0)
            second = served.submit(prepared, "mine")
            assert [t async for d in second for t in d.token_ids] == tokens_alone([1], 2, 60, VOCAB)
            assert not served._left

    run(main())
    assert_nothing_left(llm)


def test_a_full_queue_and_a_taken_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = make(monkeypatch, max_running_requests=2)

    async def main() -> None:
        with AsyncLLM(llm, max_waiting=1) as served:
            with llm.engine.turns:
                prepared = await served.prepare([1], FIVE)
                kept = [served.submit(prepared, str(i)) for i in range(2)]
                with pytest.raises(RequestError, match="in use"):
                    served.submit(prepared, "0")
                kept.append(served.submit([prepared], "2-0"))
                with pytest.raises(RequestError, match="'2-0' is in use") as info:
                    served.submit([prepared], "2")  # its only request would be 2-0
                assert info.value.field == "request_id"
                with pytest.raises(QueueFullError, match="3 samples run or wait"):
                    served.submit(prepared, "3")
            for stream in kept:
                assert [t async for d in stream for t in d.token_ids] == tokens_alone([1], 1, 5, VOCAB)
            assert [t async for d in served.submit(prepared, "3") for t in d.token_ids]

    run(main())
    assert_nothing_left(llm)


def test_drain_waits_for_what_runs_and_takes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = make(monkeypatch)

    async def main() -> None:
        with AsyncLLM(llm) as served:
            with llm.engine.turns:
                stream = served.submit(await served.prepare([1], LONG))
                assert not await served.drain(0.0), "it still runs"
                with pytest.raises(UnavailableError, match="shutting down"):
                    served.submit(list(stream.requests.values()))
            assert await served.drain(WAIT)
            tokens = [t async for delta in stream for t in delta.token_ids]
            assert tokens == tokens_alone([1], 2, 60, VOCAB), "what ran has ended as it would have"

    run(main())
    assert_nothing_left(llm)


def test_a_crash_reaches_every_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = make(monkeypatch)
    monkeypatch.setattr(llm.engine, "run_step", lambda: 1 // 0)

    async def main() -> None:
        with AsyncLLM(llm) as served:
            with llm.engine.turns:
                streams = [served.submit(await served.prepare([i], LONG)) for i in range(5)]
            for stream in streams:
                with pytest.raises(UnavailableError, match="ZeroDivisionError"):
                    await anext(stream)
                with pytest.raises(StopAsyncIteration):
                    await anext(stream)
            assert isinstance(served.failure, UnavailableError)
            with pytest.raises(UnavailableError, match="ZeroDivisionError"):
                await served.complete([1], FIVE)

    run(main())


def test_a_request_that_fails_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, runner = make(monkeypatch)
    in_step(0, ValueError("this step"), runner)

    async def main() -> None:
        with AsyncLLM(llm) as served:
            with pytest.raises(EngineError, match="this step"):
                await served.complete([1], FIVE)
            del runner.launch
            assert (await served.complete([1], FIVE)).token_ids == tokens_alone([1], 1, 5, VOCAB)

    run(main())
    assert_nothing_left(llm)


def test_an_event_loop_that_ends_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = make(monkeypatch)
    served = AsyncLLM(llm)
    kept = []

    async def leave() -> None:
        kept.append(served.submit(await served.prepare([1], LONG)))

    async def other() -> None:
        assert (await served.complete([1], FIVE)).token_ids == tokens_alone([1], 1, 5, VOCAB)

    run(leave())
    run(other())
    run(ended(served))
    served.close()
    assert_nothing_left(llm)


def test_threads_generate_while_tasks_do(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = make(monkeypatch)

    async def main() -> None:
        with AsyncLLM(llm) as served:
            thread = asyncio.to_thread(in_threads, *(lambda: check_alone(llm) for _ in range(2)))
            task = asyncio.ensure_future(thread)
            outputs = await asyncio.gather(*(served.complete([i], params(9, i)) for i in range(20)))
            await task
        assert [o.token_ids for o in outputs] == [tokens_alone([i], i, 9, VOCAB) for i in range(20)]

    run(main())
    assert_nothing_left(llm)


def check_alone(llm: LLM) -> None:
    for i in range(10):
        assert llm.generate([[i]], params(7, i))[0].token_ids == tokens_alone([i], i, 7, VOCAB)


def test_long_text_is_tokenised_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    class Noting(ByteTokenizer):
        characters_per_token = 1000

        def encode(self, text: str) -> list[int]:
            threads.append(threading.current_thread())
            return super().encode(text[:9])

    llm, _ = make(monkeypatch, Noting())

    async def main() -> None:
        with AsyncLLM(llm) as served:
            await served.prepare("a" * 50, FIVE)
            for prompt in ("b" * 3000, {"prompt": "b" * 3000}):
                prepared = await served.prepare(prompt, FIVE)  # type: ignore[arg-type]
                assert prepared.tokens == [98] * 9 and prepared.params == FIVE

    run(main())
    assert [thread is threading.main_thread() for thread in threads] == [True, False, False]
