"""Answers that were cut go on after the tokens that have come: in every form the events are those of a whole stream."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from hybridrt.server.core.respond import COUNT_HEADER
from tests.support.chat_samples import TOOLS
from tests.support.http_server import Served, serving
from tests.support.levels import sweep
from tests.support.scripted_llm import Scripted, scripted

CALL = '{"name": "get_weather", "arguments": {"city": "Ö", "days": 3}}'
SAID = f"Zürich 😀 is<think> x</think>\n<tool_call>\n{CALL}\n</tool_call>"
ASK = [{"role": "user", "content": "Weather?"}]
COUNTED = {COUNT_HEADER.decode(): "1"}
TOOL = TOOLS[0]["function"]
FORMS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Weather?"},
    "/v1/chat/completions": {"messages": ASK, "tools": TOOLS, "stream_options": {"include_usage": True}},
    "/v1/responses": {"input": "Weather?", "tools": [{"type": "function", **TOOL}], "store": False},
    "/v1/messages": {
        "messages": ASK, "tools": [{"name": TOOL["name"], "input_schema": TOOL["parameters"]}],
    },
}  # fmt: skip
_COUNT = re.compile(r"(?:^|(?<=\n\n)): tokens (\d+)((?: \d+)*)\n\n")


@pytest.fixture(scope="module")
def talker() -> Iterator[tuple[Served, Scripted]]:
    options: Any = {"chat_template": None, "tool_parser": "hermes", "reasoning_parser": "think"}
    with scripted() as model, serving(model.llm, **options) as served:
        yield served, model


def asked(served: Served, path: str, **changes: Any) -> str:
    most = {"max_output_tokens" if path == "/v1/responses" else "max_tokens": 200}
    body = {"request_id": "a", "stream": True, **FORMS[path], **most, **changes}
    answer = served.post(path, body, headers=COUNTED)
    while "is in use" in answer.text:  # the answer before is just ending
        answer = served.post(path, body, headers=COUNTED)
    assert answer.status_code == 200, answer.text
    return answer.text


def counted(served: Served, path: str) -> tuple[str, list[re.Match[str]]]:
    """A whole stream, and its counts of more than 50 tokens. On a busy machine the rest of an answer may come as one
    delta, after which no count is told: then another one is asked for."""
    for _ in range(20):
        whole = asked(served, path)
        cuts = list(_COUNT.finditer(whole))
        if cuts and int(cuts[-1][1]) > 50:
            return whole, cuts
    raise AssertionError(whole)


CHANGING = ("created", "created_at", "sequence_number", "input_tokens", "cached_tokens", "cache_read_input_tokens")
PIECES = ("text", "delta", "content", "reasoning", "reasoning_content", "arguments", "thinking", "partial_json")


def joined(text: str) -> tuple[set[Any], dict[Any, str]]:
    """Values of a stream's events, and the sum of each piece of text. A stream may be cut into other pieces."""
    values, texts = set[Any](), dict[Any, str]()
    for line in text.splitlines():
        if line.startswith("data: {"):
            event = json.loads(line[6:])
            kind = event.get("type", event.get("object", ""))
            is_piece = "delta" in kind or kind.endswith(("chunk", "text_completion"))
            for place, value in leaves(event, (kind,)):
                if is_piece and place[-1] in PIECES and isinstance(value, str):
                    texts[place] = texts.get(place, "") + value
                else:
                    values.add((place, value))
    return values, {place: said for place, said in texts.items() if said}


def leaves(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, Any]]:
    """What is in a JSON value and may not change, with its place."""
    if isinstance(value, dict):
        for name, each in value.items():
            if name not in CHANGING:
                yield from leaves(each, (*place, name))
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from leaves(each, (*place, index))
    else:
        yield place, value


@pytest.mark.parametrize("path", FORMS)
def test_before_and_rest_are_the_whole_stream(path: str, talker: tuple[Served, Scripted]) -> None:
    served, model = talker
    model.say(SAID)
    whole, cuts = counted(served, path)
    ids = [int(token) for cut in cuts for token in cut[2].split()]
    assert int(cuts[-1][1]) == len(ids)
    for cut in cuts[::3]:
        kept = int(cut[1])
        rest = asked(served, path, resume_token_ids=ids[:kept])
        assert joined(whole[: cut.end()] + rest) == joined(whole), kept


@pytest.mark.parametrize("path", sweep(list(FORMS)[1:], 3))
def test_an_answer_that_is_no_stream_is_whole(path: str, talker: tuple[Served, Scripted]) -> None:
    """Half of a call means nothing."""
    served, model = talker
    model.say(SAID)
    ids = [int(token) for cut in counted(served, path)[1] for token in cut[2].split()]
    options = {"stream": False, "stream_options": None}
    rest, whole = (json.loads(asked(served, path, **options, **more)) for more in ({"resume_token_ids": ids[:50]}, {}))
    assert list(leaves(rest)) == list(leaves(whole))
