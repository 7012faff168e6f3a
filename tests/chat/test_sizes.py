"""Sizes of conversations: what is too large is refused before it is rendered, and small ones do not wait for large."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from hybridrt.base.errors import PromptTooLongError, RequestError
from hybridrt.chat import chat as chat_module
from hybridrt.chat import sizes
from hybridrt.chat.conversation import read_conversation
from hybridrt.engine.api.async_llm import AsyncLLM
from hybridrt.engine.api.lanes import THREADS, Lane
from tests.support.scripted_llm import Scripted, scripted

WAIT = 60  # seconds after which a test gives up
SMALL = [{"role": "user", "content": "Hi"}]
PART = {"type": "text", "text": "a"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def calling(*arguments: str) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": a}} for a in arguments]}


@pytest.fixture(scope="module")
def talker() -> Iterator[Scripted]:
    with scripted() as found:
        yield found


@pytest.mark.parametrize(
    ("messages", "options", "field"),
    [
        ([user([PART] * (sizes.MAX_PARTS + 1))], {}, "messages"),
        ([user([PART] * (sizes.MAX_PARTS // 2 + 1))] * 2, {}, "messages"),
        ([calling(*["{}"] * (sizes.MAX_CALLS + 1))], {}, "messages"),
        ([calling(f'{{"a": [{"1," * sizes.MAX_VALUES}1]}}')], {}, "messages"),
        ([calling(*['{"a": [%s1]}' % ("1," * (sizes.MAX_VALUES // 16))] * 16)], {}, "messages"),
        ([user("Hi") | {"more": [0] * sizes.MAX_VALUES}], {}, "messages"),
        ([user("Hi") | {"more": [[[0] * 600] * 600]}], {}, "messages"),
        (SMALL, {"tools": [{"type": "function", "function": {"name": "f", "a": [0] * sizes.MAX_VALUES}}]}, "tools"),
        (SMALL, {"chat_template_kwargs": {"a": [0] * 2000}}, "chat_template_kwargs"),
        (SMALL, {"chat_template_kwargs": {"a": "x" * 2**17}}, "chat_template_kwargs"),
        (SMALL, {"chat_template_kwargs": {"a": 10**200000}}, "chat_template_kwargs"),
        (SMALL, {"chat_template_kwargs": {"x" * 2**17: 1}}, "chat_template_kwargs"),
    ],
)  # fmt: skip
def test_what_is_too_large_is_refused_before_it_is_read(
    messages: Any, options: dict[str, Any], field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybridrt.chat.conversation.read_message", None)
    with pytest.raises(RequestError, match=r"more than [0-9]+ (content parts|tool calls|values|characters)") as caught:
        read_conversation(messages, **options)
    assert caught.value.field == field


def test_long_histories_are_taken() -> None:
    history = [user([PART, PART]), calling('{"a": 1}', "{}")] * 5000
    conversation = read_conversation(history, chat_template_kwargs={"a": ["x" * 1000] * 10})
    assert len(conversation.messages) == 10000


def test_no_more_is_counted_than_the_limit() -> None:
    looked = 0

    class Counting(list[int]):
        def __iter__(self) -> Iterator[int]:
            nonlocal looked
            for value in super().__iter__():
                looked += 1
                yield value

    sizes.measure([Counting(range(10**6))] * 5, 100, 10**9)
    assert looked <= 101
    assert sizes.measure({"a": ["xy", {"b": None}], "c": 1}, 100, 100)[0] == 6


def test_contents_that_no_prompt_has_room_for_are_not_rendered(
    talker: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = talker.llm
    monkeypatch.setattr(chat_module.Chat, "render", None)
    text = "a" * (llm.plan.max_model_len * llm.tokenizer.characters_per_token // 2 + 1)  # type: ignore[union-attr]
    with pytest.raises(PromptTooLongError, match="the messages have"):
        llm.chat([user(text), user(text)])


def test_a_small_chat_waits_for_no_large_one(talker: Scripted) -> None:
    """All threads for long texts and for answers are taken, and the process that renders large conversations too."""
    release, lock = threading.Event(), chat_module.LARGE_RENDERER._child._lock

    async def main() -> None:
        with AsyncLLM(talker.llm) as served:
            large = asyncio.ensure_future(served.chat([user("large " * 20000)]))
            lanes: list[Lane] = ["long text", "answer"]
            blocked = [
                asyncio.ensure_future(served.in_thread(release.wait, WAIT, lane=lane))
                for lane in lanes
                for _ in range(2 * THREADS[lane])
            ]
            try:
                await asyncio.wait_for(served.chat(SMALL), WAIT / 4)
                await asyncio.wait_for(served.prepare("short " * 500), WAIT / 4)
                assert not any(each.done() for each in (large, *blocked))
            finally:
                release.set()
                lock.release()
                await asyncio.gather(large, *blocked, return_exceptions=True)
        with pytest.raises(PromptTooLongError):
            await large

    talker.say("Hello")
    assert lock.acquire(timeout=WAIT)
    asyncio.run(main())


def test_large_conversations_have_a_process_of_their_own(talker: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    used = []

    class Noting:
        def __init__(self, name: str) -> None:
            self.name = name

        def render(self, *arguments: Any) -> str:
            used.append(self.name)
            return "prompt"

    monkeypatch.setattr(chat_module, "RENDERER", Noting("small"))
    monkeypatch.setattr(chat_module, "LARGE_RENDERER", Noting("large"))
    many = [user("a")] * 5000
    for messages in (SMALL, [user("a" * 70000)], many):
        talker.llm.chats().render(read_conversation(messages))
    talker.llm.chats().render(
        read_conversation(SMALL, [{"type": "function", "function": {"name": "f", "description": "a" * 70000}}])
    )
    assert used == ["small", "large", "large", "large"]


@pytest.mark.parametrize("name", ["add_generation_prompt", "continue_final_message", "parallel_tool_calls"])
@pytest.mark.parametrize("value", ["x", "false", 1, 0, [True]])
def test_switches_are_true_or_false(name: str, value: object) -> None:
    options: dict[str, Any] = {name: value}
    with pytest.raises(RequestError, match=f"{name} is .*true or false") as info:
        read_conversation([{"role": "user", "content": "Hi"}], **options)
    assert info.value.field == name
