"""What chat templates support, and conversations that fit them: nothing is refused or lost that a client may send."""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from hybridrt.base.errors import CheckpointError
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.chat import template_traits
from hybridrt.chat.chat import Chat
from hybridrt.chat.conversation import read_conversation
from hybridrt.chat.efforts import EFFORTS
from hybridrt.chat.renderer import RENDERER
from hybridrt.chat.template_traits import find_traits
from tests.support.scripted_llm import byte_tokenizer

USER = {"role": "user", "content": "Hi"}
SYSTEM, DEVELOPER = {"role": "system", "content": "Be brief."}, {"role": "developer", "content": "Be mild."}
ASSISTANT = {"role": "assistant", "content": "Yes?"}
PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
ANY_ROLE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
# As Qwen 3.5's: other roles, and system messages in other places, are errors.
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' %}{% if not loop.first %}{{ raise_exception('late') }}{% endif %}"
    "[sys]{{ m.content }}{% elif m.role in ('user', 'assistant', 'tool') %}[{{ m.role }}]{{ m.content }}"
    "{% else %}{{ raise_exception(m.role) }}{% endif %}{% endfor %}"
)
KNOWING = STRICT.replace("'tool')", "'tool', 'developer')")
# Only the first system message is looked at, and unknown roles leave no trace.
DROPPING = (
    "{% if messages[0].role == 'system' %}[sys]{{ messages[0].content }}{% endif %}"
    "{% for m in messages if m.role in ('user', 'assistant', 'tool') %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
ITEMS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}<{{ c.function.name }}"
    "{% for k, v in c.function.arguments | items %} {{ k }}={{ v | string }}{% endfor %}>{% endfor %}{% endfor %}"
)
LISTS = "{% for m in messages %}[{{ m.role }}]{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
WALKING = (
    "{% macro text(c) %}{% if c is string %}{{ c }}{% else %}{% for p in c %}{{ p.text }}{% endfor %}{% endif %}"
    "{% endmacro %}{% for m in messages %}[{{ m.role }}]{{ text(m.content) }}{% endfor %}"
)


def rendered(template: str, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    return Chat(byte_tokenizer(), template=template).render(read_conversation(messages, **options))


@pytest.mark.parametrize(
    ("template", "messages", "text"),
    [
        (STRICT, [DEVELOPER, USER], "[sys]Be mild.[user]Hi"),
        (STRICT, [SYSTEM, DEVELOPER, USER], "[sys]Be brief.\n\nBe mild.[user]Hi"),
        (STRICT, [SYSTEM, SYSTEM, USER], "[sys]Be brief.\n\nBe brief.[user]Hi"),
        (STRICT, [USER, ASSISTANT, SYSTEM, USER], "[sys]Be brief.[user]Hi[assistant]Yes?[user]Hi"),
        (STRICT, [SYSTEM, USER, DEVELOPER], "[sys]Be brief.\n\nBe mild.[user]Hi"),
        (DROPPING, [DEVELOPER, USER], "[sys]Be mild.[user]Hi"),
        (DROPPING, [SYSTEM, USER, SYSTEM, USER], "[sys]Be brief.\n\nBe brief.[user]Hi[user]Hi"),
        (ANY_ROLE, [DEVELOPER, USER], "[system]Be mild.[user]Hi"),
        (ANY_ROLE, [SYSTEM, DEVELOPER, USER], "[system]Be brief.\n\nBe mild.[user]Hi"),
        (ANY_ROLE, [SYSTEM, SYSTEM, USER], "[system]Be brief.[system]Be brief.[user]Hi"),
        (ANY_ROLE, [USER, SYSTEM], "[user]Hi[system]Be brief."),
        (STRICT.replace("== 'system'", "in ('system', 'developer')"), [DEVELOPER, USER], "[sys]Be mild.[user]Hi"),
        (KNOWING, [SYSTEM, DEVELOPER, USER], "[sys]Be brief.[developer]Be mild.[user]Hi"),
    ],
)
def test_instructions_reach_a_turn_that_the_template_has(
    template: str, messages: list[dict[str, Any]], text: str
) -> None:
    assert rendered(template, messages) == text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"a": 1}', " a=1"),
        ('{"a": "half a sen', ' arguments={"a": "half a sen'),
        ("[1]", " arguments=[1]"),
        ('"x"', ' arguments="x"'),
        ("", ""),
        ("null", ""),
        (r'{"a": "\ud83d"}', r' arguments={"a": "\ud83d"}'),
        ('{"a": 123456789012345678901234567890}', ' arguments={"a": 123456789012345678901234567890}'),
        ('{"a": ' + "[" * 500 + "]" * 500 + "}", ' arguments={"a": ' + "[" * 500 + "]" * 500 + "}"),
        ("[" * 100_000, " arguments=" + "[" * 100_000),
        ('{"a": ' + "9" * 5000 + "}", ' arguments={"a": ' + "9" * 5000 + "}"),
    ],
)
def test_a_broken_call_in_the_history_is_rendered(arguments: str, text: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    got = rendered(ITEMS, [USER, {"role": "assistant", "content": None, "tool_calls": [call]}])
    assert got == f"[user]Hi[assistant]<f{text}>"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        # Qwen3.8: an error for what it does not know.
        (
            "{% set e = reasoning_effort | default('xhigh') %}{% if e not in ('xhigh', 'medium', 'low') %}"
            "{{ raise_exception(e) }}{% endif %}{{ e }}",
            {"none": "low", "minimal": "low", "medium": "medium", "high": "xhigh", "max": "xhigh"},
        ),
        # What it does not know is dropped; "medium" is what it does by itself.
        (
            "{% if reasoning_effort == 'low' %}Little.{% elif reasoning_effort == 'high' %}Much.{% endif %}"
            "{{ enable_thinking }}",
            {"none": "none", "minimal": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"},
        ),
        # One level below its own: a higher one is not this one.
        ("{% if reasoning_effort == 'low' %}Little.{% endif %}", {"medium": "medium", "high": "high", "max": "max"}),
        # Words that are parts of other words.
        ("follow xhigh {{ reasoning_effort | default('') | upper }}", {effort: effort for effort in EFFORTS}),
        ("{{ messages[0].content }}", {effort: effort for effort in EFFORTS}),
        ("{{ raise_exception('never') }}", {effort: effort for effort in EFFORTS}),
    ],
)
def test_an_effort_is_the_nearest_that_the_template_has(template: str, expected: dict[str, str]) -> None:
    efforts = find_traits(template, {}).efforts
    assert {effort: efforts.get(effort, effort) for effort in expected} == expected


def test_an_effort_without_a_level_turns_reasoning_off() -> None:
    template = "{{ reasoning_effort }} {{ enable_thinking }}{{ raise_exception('x') if reasoning_effort == 'none' }}"
    assert rendered(template, [USER], reasoning_effort="none") == "minimal False"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (WALKING, "onetwo"),
        (LISTS, "onetwo"),
        (ANY_ROLE, "one\ntwo"),
        (ANY_ROLE.replace("m.content", "m.content | tojson"), '"one\\ntwo"'),
        ("{% for m in messages %}[{{ m.role }}]{{ '' + m.content }}{% endfor %}", "one\ntwo"),
    ],
)
def test_parts_are_written_as_the_template_writes_them(template: str, text: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for turns, role in (
        ([{"role": "system", "content": PARTS}, USER], "system"),
        ([{"role": "user", "content": PARTS}], "user"),
        ([USER, {"role": "assistant", "content": PARTS}, USER], "assistant"),
        ([USER, {**ASSISTANT, "tool_calls": [call]}, {"role": "tool", "content": PARTS}], "tool"),
    ):
        assert f"[{role}]{text}" in rendered(template, turns)


def test_parts_of_roles_that_are_text_alone_are_lines() -> None:
    """Templates of pictures walk through what users say, and add texts of assistants to others."""
    template = (
        "{% for m in messages %}{% if m.role == 'user' and m.content is not string %}{% for p in m.content %}"
        "{{ p.text }}|{% endfor %}{% else %}{{ '>' + m.content }}{% endif %}{% endfor %}"
    )
    assert rendered(template, [{"role": "user", "content": PARTS}, {**ASSISTANT, "content": PARTS}]) == (
        "one|two|>one\ntwo"
    )


def test_text_reaches_a_template_that_takes_parts_alone() -> None:
    assert rendered(LISTS, [USER, ASSISTANT, USER]) == "[user]Hi[assistant]Yes?[user]Hi"


def test_parts_that_an_answer_continues_are_one_text() -> None:
    talk = read_conversation(
        [USER, {"role": "assistant", "content": [{"type": "text", "text": "<think>"}, {"type": "text", "text": "Hm"}]}],
        add_generation_prompt=False,
        continue_final_message=True,
    )
    chat = Chat(byte_tokenizer(), template=WALKING, reasoning_parser="think")
    answer = chat.prompt(talk, SamplingParams()).new_answer()
    answer.read("m.</think>Yes", (), "stop")
    assert chat.render(talk) == "[user]Hi[assistant]<think>Hm" and answer.message.content == "Yes"


def test_empty_lists_and_nulls_are_no_keys() -> None:
    template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content + '' }}"
        "{% for key in ('tool_calls', 'annotations', 'audio') %}{% if m[key] is defined %}"
        "<{{ key }}>{% endif %}{% endfor %}{% endfor %}"
    )
    said = {"role": "assistant", "content": None, "tool_calls": [], "annotations": [], "audio": None}
    assert rendered(template, [USER, said, USER]) == "[user]Hi[assistant][user]Hi"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ tools[0] | tojson }}", None),
        ("{{ tools[0].function.description }}.", "."),
        ("{{ ': ' + tools[0].function.description }}.", ": ."),
    ],
)
def test_a_tool_gets_no_description_that_it_does_not_have(template: str, text: str | None) -> None:
    tools = [{"type": "function", "function": {"name": "now", "description": None}}]
    got = rendered(template, [USER], tools=tools)
    if text is not None:
        assert got == text
    else:
        assert json.loads(got)["function"] == {"name": "now", "parameters": {"type": "object", "properties": {}}}
    tools[0]["function"] = {"name": "now", "description": "The time"}
    assert "The time" in rendered(template, [USER], tools=tools)


def test_a_template_is_tried_once_and_its_variant_for_tools_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    renderings: list[str] = []
    render = RENDERER.render

    def counted(template: str, *args: Any) -> str:
        renderings.append(template)
        return render(template, *args)

    monkeypatch.setattr(RENDERER, "render", counted)
    tokenizer = byte_tokenizer()
    tokenizer.hf.chat_template = {"default": ANY_ROLE, "tool_use": STRICT}
    chat = Chat(tokenizer, tool_parser="hermes")
    chat.examine()
    tried = len(renderings)
    assert 0 < renderings.count(ANY_ROLE) <= 32 and 0 < renderings.count(STRICT) <= 32
    tools = [{"type": "function", "function": {"name": "now"}}]
    assert chat.render(read_conversation([SYSTEM, SYSTEM, USER])).count("[system]") == 2
    assert chat.render(read_conversation([SYSTEM, SYSTEM, USER], tools)).count("[sys]") == 1
    assert len(renderings) == tried + 2


def test_a_template_that_renders_nothing_is_not_tried_further(monkeypatch: pytest.MonkeyPatch) -> None:
    renderings: list[int] = []

    def fail(*_: object) -> str:
        renderings.append(1)
        raise CheckpointError("it fails")

    monkeypatch.setattr(RENDERER, "render", fail)
    assert find_traits("x", {}) == template_traits.TemplateTraits() and len(renderings) == 3
    ticks = iter(range(0, 100, 4))  # seconds
    monkeypatch.setattr(time, "monotonic", lambda: float(next(ticks)))
    assert find_traits("x", {}) == template_traits.TemplateTraits() and len(renderings) == 4


def test_a_slow_template_is_given_up(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    renderings: list[int] = []

    def render(*_: object) -> str:
        renderings.append(1)
        return "x"

    ticks = iter(range(0, 1000, 4))
    monkeypatch.setattr(RENDERER, "render", render)
    monkeypatch.setattr(time, "monotonic", lambda: float(next(ticks)))
    assert find_traits("x", {}) == template_traits.TemplateTraits()
    assert len(renderings) <= 3 and "more than 10 seconds" in caplog.text
    everyone = frozenset(template_traits.ROLES)
    assert find_traits("x", {}, placeholder="<i>") == template_traits.TemplateTraits(parts=everyone, images=everyone)


def test_a_template_that_fails_slowly_is_not_rendered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its error can be raised: a conversation would take as long."""
    renderings: list[int] = []

    def render(*_: object) -> str:
        renderings.append(1)
        raise CheckpointError("it has not ended")

    monkeypatch.setattr(RENDERER, "render", render)
    ticks = iter(range(0, 1000, 2))
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: float(next(ticks)))
        with pytest.raises(CheckpointError, match="it has not ended"):
            find_traits("x", {}, refuses_slow=True)
        assert len(renderings) == 1
        assert find_traits("x", {}) == template_traits.TemplateTraits() and len(renderings) == 2
    assert find_traits("x", {}, refuses_slow=True) == template_traits.TemplateTraits()  # it fails at once
