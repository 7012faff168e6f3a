"""Conversations that clients send and a strict template refuses: every way in makes the same prompt of them."""

from collections.abc import Iterator
from typing import Any

import pytest

from hybridrt.base.sampling_params import SamplingParams
from hybridrt.chat.renderer import RENDERER
from tests.support.http_server import Served, serving
from tests.support.scripted_llm import Scripted, scripted

# Other roles, later system messages, other efforts and calls without an object are errors; parts are walked through.
STRICT = (
    "{% set effort = reasoning_effort | default('xhigh') %}"
    "{% if effort not in ('xhigh', 'medium', 'low') %}{{ raise_exception(effort) }}{% endif %}<{{ effort }}>"
    "{% macro text(c) %}{% if c is string %}{{ c }}{% else %}{% for p in c %}{{ p.text }}{% endfor %}{% endif %}"
    "{% endmacro %}{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}"
    "{% elif m.role not in ('system', 'user', 'assistant', 'tool') %}{{ raise_exception(m.role) }}{% endif %}"
    "[{{ m.role }}]{{ text(m.content) }}{% if m.tool_calls is defined %}<calls>{% for c in m.tool_calls %}"
    "{% for k, v in c.function.arguments | items %}{{ k }}={{ v }}{% endfor %}{% endfor %}{% endif %}{% endfor %}"
)
BROKEN = '{"text": "half a sen'
LATE: dict[str, Any] = {"role": "system", "content": "Be mild."}
PARTS: Any = [{"type": "text", "text": "on"}, {"type": "text", "text": "e"}]
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": BROKEN}}
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "developer", "content": "Be fair."},
    {"role": "user", "content": PARTS},
    {"role": "assistant", "content": "two", "tool_calls": []},
    LATE,
    {"role": "user", "content": "three"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": PARTS},
    {"role": "user", "content": "go on"},
]
RESPONSES: list[dict[str, Any]] = [
    {"role": "developer", "content": "Be fair."},
    {"role": "user", "content": [{"type": "input_text", "text": "on"}, {"type": "input_text", "text": "e"}]},
    {"role": "assistant", "content": [{"type": "output_text", "text": "two"}]},
    LATE,
    {"role": "user", "content": "three"},
    {"type": "function_call", "call_id": "c1", "name": "f", "arguments": BROKEN},
    {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "one"}]},
    {"role": "user", "content": "go on"},
]
# Anthropic's clients send objects, which never break off.
MESSAGES: list[dict[str, Any]] = [
    {"role": "developer", "content": "Be fair."},
    {"role": "user", "content": PARTS},
    {"role": "assistant", "content": "two"},
    LATE,
    {"role": "user", "content": "three"},
    {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "c1", "name": "f", "input": {"arguments": BROKEN}}],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": PARTS}]},
    {"role": "user", "content": "go on"},
]
TEXT = (
    "<xhigh>[system]Be brief.\n\nBe fair.\n\nBe mild.[user]one[assistant]two[user]three"
    f"[assistant]<calls>arguments={BROKEN}[tool]one[user]go on"
)


@pytest.fixture(scope="module")
def talker() -> Iterator[tuple[Served, Scripted]]:
    with scripted() as model, serving(model.llm, chat_template=STRICT) as served:
        assert STRICT in served.service.chat._traits, "it is tried before the first conversation"
        model.say("Fine.")
        yield served, model


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Texts of prompts that are rendered from here on, without those of the search for boundaries."""
    found: list[str] = []
    render = RENDERER.render

    def noting(template: str, messages: Any, options: Any) -> str:
        text = render(template, messages, options)
        if options["add_generation_prompt"]:
            found.append(text)
        return text

    monkeypatch.setattr(RENDERER, "render", noting)
    return found


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": CHAT, "reasoning_effort": "high"}),
        ("/v1/responses", {"instructions": "Be brief.", "input": RESPONSES, "reasoning": {"effort": "high"}}),
        (
            "/v1/messages",
            {"system": "Be brief.", "messages": MESSAGES, "output_config": {"effort": "high"}, "max_tokens": 9},
        ),
    ],
)  # fmt: skip
def test_every_endpoint_fits_a_conversation_to_the_template(
    path: str, body: dict[str, Any], talker: tuple[Served, Scripted], prompts: list[str]
) -> None:
    answer = talker[0].post(path, {"model": "tested", **body})
    assert answer.status_code == 200, answer.text
    assert prompts == [TEXT]


def test_python_fits_a_conversation_to_the_template(talker: tuple[Served, Scripted], prompts: list[str]) -> None:
    params = SamplingParams(max_tokens=9)
    (answer,) = talker[1].llm.chat(CHAT, params, reasoning_effort="high", chat_template=STRICT)
    assert answer.content == "Fine." and prompts[-1] == TEXT
