"""Work off the event loop: batches are prepared in parts, and long texts are refused by their beginning."""

import asyncio
import threading
from dataclasses import replace
from typing import Any

import pytest

from hybridrt.base.errors import PromptTooLongError
from hybridrt.engine.api.async_llm import AsyncLLM
from hybridrt.engine.api.lanes import INLINE, LONG_CHARACTERS, in_parts, lane_of, size_of
from hybridrt.engine.request import intake as limits
from hybridrt.engine.text.tokenizer import _AT_CUT, _USUAL, encode_prompt
from tests.support.engine_harness import ByteTokenizer
from tests.support.fake_llm import FIVE, make


class Counting:
    """A tokenizer that drops spaces, and counts the characters that it reads."""

    characters_per_token = 10**6

    def __init__(self) -> None:
        self.read = 0

    def encode(self, text: str) -> list[int]:
        self.read += len(text)
        return [1] * len(text.replace(" ", ""))

    encode_bare = encode


def test_text_that_is_too_long_is_tokenised_in_part() -> None:
    counting: Any = Counting()
    with pytest.raises(PromptTooLongError, match="may have at most 1000"):
        encode_prompt(counting, "word" * 2**20, 1000)
    assert counting.read <= _USUAL * (1000 + _AT_CUT)


@pytest.mark.parametrize("text", ["a" * 1000, " " * 10**6 + "a" * 9, "a" * 1000 + " " * 10**6, "a" * 2000])
def test_no_text_that_may_fit_is_refused_by_its_beginning(text: str) -> None:
    assert len(encode_prompt(Counting(), text, 1000)) == len(text.replace(" ", ""))  # type: ignore[arg-type]


def test_parts_cover_a_batch() -> None:
    assert list(in_parts([])) == [] and list(in_parts([10**6])) == [(0, 1)]
    parts = list(in_parts([300] * 100 + [0] * 5000))
    assert [start for start, _ in parts[1:]] == [end for _, end in parts[:-1]] and parts[-1][1] == 5100
    assert max(end - start for start, end in parts) <= INLINE + 1
    assert (lane_of(LONG_CHARACTERS - 1), lane_of(LONG_CHARACTERS)) == ("text", "long text")
    assert size_of({"prompt": "abc"}) == 3 and size_of(list(range(100))) == 10 and size_of(7) == 0


def test_a_batch_is_prepared_in_parts_and_its_parameters_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made, threads = list[object](), list[threading.Thread]()
    make_rules = limits.make_rules

    def note(*arguments: Any) -> Any:
        made.append(arguments)
        return make_rules(*arguments)

    class Noting(ByteTokenizer):
        def encode(self, text: str) -> list[int]:
            threads.append(threading.current_thread())
            return super().encode(text)

    monkeypatch.setattr(limits, "make_rules", note)
    llm, _ = make(monkeypatch, Noting())

    async def main() -> None:
        with AsyncLLM(llm) as served:
            calls, in_thread = list[str](), served.in_thread

            async def counted(work: Any, *arguments: Any, lane: Any = "text", **more: Any) -> Any:
                calls.append(lane)
                return await in_thread(work, *arguments, lane=lane, **more)

            monkeypatch.setattr(served, "in_thread", counted)
            params = replace(FIVE, stop=["END"], bad_words=["x"])
            batch = await served.prepare_all(["a" * 50] * 500, params)
            assert len(calls) >= 500 * 50 / (2 * INLINE) and len(made) == 1
            assert len({id(prepared.stop) for prepared in batch}) == 1 and batch[0].stop is not None
            assert threading.main_thread() not in threads

    asyncio.run(main())
