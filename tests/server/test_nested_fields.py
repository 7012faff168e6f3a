"""The table of request fields within fields: each row does what it says, and client libraries have no others."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args, get_origin

import httpx
import pytest
from typing_extensions import get_type_hints, is_typeddict

from hybridrt.engine.api.llm import LLM
from hybridrt.server.core.request_fields import FORMS, ROWS, Row
from hybridrt.server.openai.response_protocol import BUILT_IN_ITEMS, BUILT_IN_TOOLS
from tests.server.test_fields import Seen, ask  # noqa: F401
from tests.server.test_request_fields import BASE, anthropic_forms, forms_of, ids, openai_forms
from tests.support.http_server import Served, serving
from tests.support.levels import sweep

NESTED = [row for row in ROWS if "." in row.name]
REFUSED = [row for row in NESTED if row.refused]
IGNORED = [row for row in NESTED if row.ignored]
DONE = [row for row in NESTED if row.done]
PICTURE = "data:image/png;base64,AAAA"
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}
TOOLS: dict[str, dict[str, Any]] = {
    "chat": {"type": "function", "function": {"name": "now"}},
    "responses": {"type": "function", "name": "now"},
    "messages": {"name": "now", "input_schema": SCHEMA},
    "count": {"name": "now", "input_schema": SCHEMA},
}
CUSTOM = {"type": "custom", "custom": {"name": "now"}}
CALLED = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"n": 1}'}}
DOCUMENT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}}
# A conversation of Anthropic's with a block of each kind, by type.
BLOCKS: dict[str, dict[str, Any]] = {
    "text": {"type": "text", "text": "Hello"},
    "document": DOCUMENT,
    "image": {"type": "image", "source": {"type": "base64", "data": "x"}},
    "thinking": {"type": "thinking", "thinking": "Hm.", "signature": "s"},
    "redacted_thinking": {"type": "redacted_thinking", "data": "d"},
    "tool_use": {"type": "tool_use", "id": "c1", "name": "now", "input": {}},
    "tool_result": {"type": "tool_result", "tool_use_id": "c1", "content": "7"},
}
# The block that has a field, where it is not a text.
BLOCK_OF = {
    "transformations": "image", "toolset_name": "tool_use",
    "source": "document", "title": "document", "context": "document", "citations": "document", "thinking": "thinking",
    "signature": "thinking", "data": "redacted_thinking", "id": "tool_use", "name": "tool_use", "input": "tool_use",
    "caller": "tool_use", "tool_use_id": "tool_result", "content": "tool_result", "is_error": "tool_result",
}  # fmt: skip
# The item that has a field, where it is not a message.
CALL = {"type": "function_call", "call_id": "c", "name": "now", "arguments": "{}"}
ITEMS: dict[str, dict[str, Any]] = {
    "arguments": CALL, "caller": CALL, "async": CALL, "namespace": CALL,
    "name": {"type": "function_call", "call_id": "c", "name": "then", "arguments": "{}"},
    "call_id": {"type": "function_call_output", "call_id": "c", "output": "7"},
    "output": {"type": "function_call_output", "call_id": "c", "output": "7"},
    "input": {"type": "custom_tool_call", "call_id": "c", "name": "now", "input": "x"},
    "summary": {"type": "reasoning", "id": "r", "summary": []},
    "encrypted_content": {"type": "reasoning", "id": "r", "summary": []},
    "id": {"type": "item_reference", "id": "x"},
}  # fmt: skip


TEMPLATE = (
    "{% for message in messages %}{{ message | tojson }}{% endfor %}{{ tools | tojson }}{{ reasoning_effort }}"
    "{% if add_generation_prompt %}A:{% endif %}"
)


@pytest.fixture(scope="module")
def own(embedded: LLM) -> Iterator[Served]:
    with serving(embedded, chat_template=TEMPLATE, tool_parser="hermes", reasoning_parser="think") as served:
        yield served
    served.wait_until_idle()


def replaced(thing: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    """With the field; `...`: without it."""
    return {key: each for key, each in {**thing, name: value}.items() if each is not ...}


def blocks_with(field: str, value: Any) -> list[dict[str, Any]]:
    kind = BLOCK_OF.get(field, "text")
    changed = {**BLOCKS, kind: replaced(BLOCKS[kind], field, value)}
    thoughts = [changed["thinking"], changed["redacted_thinking"], changed["tool_use"]]
    more = [changed["image"]] if kind == "image" else []  # the model sees none
    return [
        {"role": "user", "content": [changed["text"], changed["document"], *more]},
        {"role": "assistant", "content": thoughts},
        {"role": "user", "content": [changed["tool_result"]]},
    ]


def placed(form: str, name: str, value: Any) -> dict[str, Any]:
    """A body with the field of a row; `...`: without it."""
    parent, _, field = name.rpartition(".")
    tools = [TOOLS[form]] if form in TOOLS else []
    changes: dict[str, Any]
    match parent:
        case "stream_options":
            changes = {"stream": True, parent: replaced({}, field, value)}
            changes[parent] |= {"include_usage": True} if field == "continuous_usage_stats" else {}
        case "messages":
            role = {"tool_calls": "assistant", "tool_call_id": "tool", "reasoning": "assistant"}.get(field, "user")
            changes = {
                "messages": [replaced({"role": role, "content": "Hello"}, field, value), *BASE["chat"]["messages"]]
            }
        case "messages.content" if form == "chat":
            part = replaced({"type": "text", "text": "Hello"}, field, value)
            part = replaced(part, "type", field) if field in ("refusal", "image_url") else part
            changes = {"messages": [{"role": "user", "content": [part]}]}
        case "messages.content":
            changes = {"messages": blocks_with(field, value)}
        case "input.content":
            kind = {"refusal": "refusal", "image_url": "input_image", "detail": "input_image", "file_id": "input_image"}
            part = {"type": kind.get(field, "input_text"), "text": "Hello"}
            part |= {"image_url": PICTURE} if field == "detail" else {}
            changes = {"input": [{"role": "user", "content": [replaced(part, field, value)]}]}
        case "system":
            changes = {"system": [replaced({"type": "text", "text": "Be brief."}, field, value)]}
        case "tools":
            kept = CUSTOM if field == "custom" else TOOLS[form]
            kept = {"type": "custom", "name": "now"} if field == "format" else kept
            kept = {"type": "namespace", "name": "crm"} if field == "tools" else kept
            changes = {"tools": [replaced(kept, field, value)], "tool_choice": FORCED[form]}
        case "tools.function" | "tools.custom":
            inner, kind = replaced({"name": "now"}, field, value), parent.removeprefix("tools.")
            changes = {"tools": [{"type": kind, kind: inner}], "tool_choice": FORCED[form]}
        case "tool_choice":
            choice = CHOICES.get((form, field), {"type": "tool" if form in ("messages", "count") else "function"})
            choice = {"name": "now", **choice} if form != "chat" and "tools" not in choice else choice
            changes = {"tools": tools, parent: replaced(choice, field, value)}
        case "input":
            changes = {"input": [replaced(ITEMS.get(field, {"role": "user", "content": "Hello"}), field, value)]}
            changes["input"] += [{"role": "user", "content": "Go on."}]
        case "output_format":
            changes = {parent: replaced({"type": "json_schema", "schema": {"enum": [7]}}, field, value)}
        case "thinking":
            changes = {parent: replaced({"type": "enabled", "budget_tokens": 9}, field, value)}
        case "response_format":
            changes = {parent: replaced(FORMATS.get(field, {"type": "text"}), field, value)}
        case "structured_outputs" if field.startswith("_"):
            changes = {parent: replaced({"regex": "a"}, field, value)}
        case _:
            changes = {parent: replaced({}, field, value)}
    return BASE[form] | changes


FORCED: dict[str, Any] = {
    "chat": "required", "responses": "required", "messages": {"type": "any"}, "count": {"type": "auto"},
}  # fmt: skip
CHOICES: dict[tuple[str, str], dict[str, Any]] = {
    ("chat", "custom"): {"type": "custom"},
    ("chat", "allowed_tools"): {"type": "allowed_tools"},
    ("responses", "mode"): {"type": "allowed_tools", "tools": [{"type": "function", "name": "now"}]},
    ("responses", "tools"): {"type": "allowed_tools", "mode": "required", "tools": []},
}
TAGS = {"type": "structural_tag", "structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a>"]}
FORMATS: dict[str, dict[str, Any]] = {
    "schema": {"type": "json_object"}, "json_schema": {"type": "json_schema"}, "structures": TAGS, "triggers": TAGS,
    "format": {"type": "structural_tag"},
}  # fmt: skip
# Values of refused fields where "x" is refused as a value of another kind.
VALUES: dict[str, Any] = {"messages.content.citations": {"enabled": True}}
# Kinds of parts whose fields are those of parts that are refused by name.
OTHER_PARTS = ("input_audio", "file", "input_file")


@pytest.mark.parametrize("row", REFUSED, ids=ids(REFUSED))
def test_a_refused_field_is_refused_by_name(row: Row, own: Served) -> None:
    """And taken with each value that asks for nothing."""
    field = row.name.rpartition(".")[2]
    for form in forms_of(row, "refused"):
        answer = own.post(FORMS[form], placed(form, row.name, VALUES.get(row.name, "x")))
        assert answer.status_code == 400 and field in answer.json()["error"]["message"], answer.text
        if row.name not in VALUES:
            assert f"{row.name} is not supported here: {row.note}" in answer.json()["error"]["message"]
        for value in (None, *row.neutral):
            plain, taken = (own.post(FORMS[form], placed(form, row.name, each)) for each in (..., value))
            assert taken.status_code == plain.status_code, taken.text


def said(answer: httpx.Response) -> str:
    """An answer without its names and times."""
    names = r'"(id|item_id|call_id|tool_use_id|first_id|request_id)":"[^"]*"|"created(_at)?":\d+|"cached_tokens":\d+'
    usage = r'"(cache_read_)?input_tokens":\d+'
    return re.sub(f"{names}|{usage}", "", answer.text)


@pytest.mark.parametrize("row", IGNORED, ids=ids(IGNORED))
def test_an_ignored_field_changes_nothing(row: Row, own: Served) -> None:
    for form in forms_of(row, "ignored"):
        value: Any = True if form in ("responses", "messages") and row.name.startswith("stream_options") else "x"
        value = IGNORED_VALUES.get(row.name, value)
        plain, answer = (own.post(FORMS[form], placed(form, row.name, each)) for each in (..., value))
        assert answer.status_code == 200, answer.text
        assert said(answer) == said(plain)


IGNORED_VALUES: dict[str, Any] = {
    "structured_outputs._backend": None, "structured_outputs._backend_was_auto": False, "thinking.display": "omitted",
    "messages.content.is_error": True, "thinking.budget_tokens": 3,
    "stream_options.continuous_usage_stats": True,
}  # fmt: skip
# Values of fields that are done. With each the request says something else than without it.
GIVEN: dict[str, Any] = {
    "stream_options.include_usage": True, "stream_options.continuous_usage_stats": True,
    "messages.role": "system", "messages.content": "Well", "messages.name": "Ann", "messages.tool_calls": [CALLED],
    "messages.tool_call_id": "c1", "messages.reasoning": "Hm.", "messages.reasoning_content": "Hm.",
    "messages.refusal": "No.", "messages.content.type": "video", "messages.content.text": "Well",
    "messages.content.refusal": "No.", "messages.content.image_url": {"url": "x"},
    "messages.content.source": {"type": "content", "content": "y"}, "messages.content.title": "A title",
    "messages.content.context": "Of old", "messages.content.content": "8", "messages.content.thinking": "So.",
    "messages.content.id": "c2", "messages.content.name": "then", "messages.content.input": {"n": 2},
    "messages.content.tool_use_id": "c2", "system.type": "image", "system.text": "Be long.",
    "response_format.type": "json_object", "response_format.json_schema": {"name": "a", "schema": {"enum": [7]}},
    "response_format.schema": {"enum": [7]}, "response_format.structures": [{"begin": "<a>b", "end": "b"}],
    "response_format.triggers": ["<b>"],
    "response_format.format": {
        "type": "triggered_tags", "triggers": ["<a>"],
        "tags": [{"begin": "<a>", "content": {"type": "json_schema", "json_schema": {}}, "end": "</a>"}],
    },
    "structured_outputs.json": {"enum": [7]}, "structured_outputs.regex": "a", "structured_outputs.choice": ["a"],
    "structured_outputs.grammar": 'start: "a"', "structured_outputs.json_object": True,
    "structured_outputs.structural_tag": json.dumps(TAGS),
    "tools.type": "mcp!", "tools.function": {"name": "then"}, "tools.custom": {"name": "then"}, "tools.name": "then",
    "tools.description": "Says it", "tools.strict": True, "tools.parameters": {"type": "object"},
    "tools.format": {"type": "grammar", "syntax": "regex", "definition": "a+"},
    "tools.input_schema": {"type": "object"},
    "tools.tools": [TOOLS["responses"]], "tools.input_examples": [{"n": 3}],
    "tools.function.name": "then", "tools.function.description": "Says it",
    "tools.function.parameters": SCHEMA, "tools.function.defer_loading": True,
    "tools.function.strict": True, "tools.custom.name": "then",
    "tools.custom.description": "Says it", "tools.custom.format": {"type": "text!"},
    "tool_choice.type": "nothing", "tool_choice.function": {"name": "now"}, "tool_choice.custom": {"name": "now"},
    "tool_choice.allowed_tools": {"mode": "required", "tools": [TOOLS["chat"]]}, "tool_choice.name": "then",
    "tool_choice.mode": "required", "tool_choice.tools": [{"type": "function", "name": "now"}],
    "tool_choice.disable_parallel_tool_use": True,
    "input.type": "item!", "input.role": "system", "input.content": "Well", "input.name": "now",
    "input.arguments": '{"n": 2}', "input.namespace": "crm",
    "input.input": "y", "input.call_id": "d", "input.output": "8",
    "input.summary": [{"type": "summary_text", "text": "Hm."}], "input.id": "y",
    "input.content.type": "file", "input.content.text": "Well", "input.content.refusal": "No.",
    "input.content.image_url": PICTURE, "input.content.detail": "high!",
    "reasoning.effort": "low", "text.format": {"type": "json_object"}, "output_config.effort": "low",
    "output_config.format": {"type": "json_schema", "schema": {"enum": [7]}}, "thinking.type": "disabled",
    "thinking.budget_tokens": 3, "output_format.type": "text", "output_format.schema": {"enum": [8]},
}  # fmt: skip
# Tests of their own: this server's small model thinks rarely, and calls one tool.
ELSEWHERE = {"thinking.display", "thinking.budget_tokens", "tool_choice.disable_parallel_tool_use"}
CASES = [(row.name, form) for row in DONE if row.name not in ELSEWHERE for form in forms_of(row, "done")]
# Forms are not looked at where nothing is made.
CASES = [case for case in CASES if case not in {("output_config.format", "count"), ("output_format.schema", "count")}]


@pytest.mark.parametrize(("name", "form"), sweep(CASES, 3))
def test_a_done_field_has_an_effect(name: str, form: str, ask: Callable[[str, dict[str, Any]], Seen]) -> None:  # noqa: F811
    """On the prompt, the parameters or the answer."""
    seen, without = (ask(FORMS[form], placed(form, name, value)) for value in (GIVEN[name], ...))

    def shown(each: Seen) -> tuple[str, ...]:
        return each.rendered, repr(each.params), said(each.answer)

    assert shown(seen) != shown(without)


def dicts(kind: Any) -> Iterator[Any]:
    if is_typeddict(kind):
        yield kind
    elif get_origin(kind) is not Literal:
        for each in get_args(kind):
            yield from dicts(each)


def kind_of(hints: dict[str, Any]) -> str | None:
    kinds = [str(each) for each in get_args(hints.get("type")) if isinstance(each, str)]
    return kinds[0] if kinds else None


# Kinds of objects that are refused by name, or left out with a warning: their fields do not count.
OTHER_ITEMS = {"additional_tools", "configuration_update", "compaction_trigger"}
OTHER_KINDS = {"mcp", "programmatic_tool_calling", "apply_patch", "shell", "file_search", *BUILT_IN_TOOLS}


@pytest.mark.parametrize("read", [openai_forms, anthropic_forms], ids=["openai", "anthropic"])
def test_every_field_of_a_field_has_a_row(read: Callable[[], dict[str, Any]]) -> None:
    for form, record in read().items():
        for parent, kind in get_type_hints(record).items():
            if not any(row.name == parent and row.state(form) == "done" for row in ROWS):
                continue
            for each in dicts(kind):
                hints = get_type_hints(each)
                name = kind_of(hints)
                if name in BUILT_IN_ITEMS | OTHER_ITEMS | OTHER_KINDS or (
                    read is anthropic_forms and parent == "tools" and name not in (None, "custom")
                ):
                    continue
                known = {row.name for row in NESTED if row.state(form)}
                missing = {field for field in hints if f"{parent}.{field}" not in known}
                assert not missing, (form, parent, each.__name__, missing)


# vLLM's records of these fields, where they have more than those of OpenAI and Anthropic.
VLLM: dict[str, str] = {
    "completions": """stream_options.include_usage stream_options.continuous_usage_stats response_format.type
        response_format.json_schema response_format.structures response_format.triggers response_format.format
        structured_outputs.json structured_outputs.regex structured_outputs.choice structured_outputs.grammar
        structured_outputs.json_object structured_outputs.disable_any_whitespace structured_outputs.structural_tag
        structured_outputs.disable_additional_properties structured_outputs.whitespace_pattern
        structured_outputs._backend structured_outputs._backend_was_auto""",
    "chat": """tools.type tools.function tools.defer_loading tools.function.name tools.function.description
        tools.function.parameters tools.function.strict tools.function.defer_loading messages.reasoning
        messages.reasoning_content tool_choice.type tool_choice.function""",
    "messages": """tools.name tools.description tools.input_schema tools.strict tools.defer_loading tool_choice.type
        tool_choice.name output_config.effort output_config.format messages.role
        messages.content messages.content.type messages.content.text messages.content.source messages.content.id
        messages.content.tool_use_id messages.content.name messages.content.input messages.content.content
        messages.content.is_error messages.content.thinking messages.content.signature messages.content.data""",
}
VLLM["chat"] += " " + VLLM["completions"]


def test_every_field_of_vllms_fields_has_a_row() -> None:
    for form, names in VLLM.items():
        known = {row.name for row in NESTED if row.state(form)}
        assert set(names.split()) <= known, form


def test_every_field_of_a_part_has_a_row() -> None:
    from anthropic.types import beta
    from openai.types.chat import chat_completion_assistant_message_param as answers
    from openai.types.chat import chat_completion_content_part_param as parts
    from openai.types.responses import response_input_content_param as inputs
    from openai.types.responses import response_output_message_param as outputs

    blocks = beta.beta_content_block_param.BetaContentBlockParam
    for parent, union in (
        ("messages.content", parts.ChatCompletionContentPartParam), ("input.content", outputs.Content),
        ("messages.content", answers.ContentArrayOfContentPart), ("messages.content", blocks),
        ("input.content", inputs.ResponseInputContentParam),
    ):  # fmt: skip
        for each in dicts(union):
            hints = get_type_hints(each)
            kind = kind_of(hints)
            if kind in OTHER_PARTS or (union is blocks and kind not in {*BLOCKS, "search_result"}):
                continue
            missing = {field for field in hints if not any(row.name == f"{parent}.{field}" for row in NESTED)}
            assert not missing, (each.__name__, missing)


def test_every_kind_of_tool_and_of_item_is_known() -> None:
    from openai.types.responses import response_input_item_param, tool_param

    for union, known in (
        (tool_param.ToolParam, BUILT_IN_TOOLS | {"function", "custom", "namespace"}),
        (
            response_input_item_param.ResponseInputItemParam,
            BUILT_IN_ITEMS | OTHER_ITEMS | {"message", "function_call", "function_call_output", "custom_tool_call",
                                            "custom_tool_call_output", "reasoning", "item_reference"},
        ),
    ):  # fmt: skip
        kinds = {kind for each in dicts(union) for kind in str_kinds(get_type_hints(each)["type"])}
        assert kinds <= known


def str_kinds(kind: Any) -> Iterator[str]:
    for each in get_args(kind):
        if isinstance(each, str):
            yield each
        else:
            yield from str_kinds(each)
