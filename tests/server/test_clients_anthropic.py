"""What programs that are written for Anthropic's API send, beyond a plain conversation."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from hybridrt.engine.api.llm import LLM
from hybridrt.server.anthropic.messages import NO_BUDGET
from tests.server.test_messages import CITY, HELLO, anthropic, client
from tests.support.http_server import Served, serving
from tests.support.scripted_llm import Scripted, scripted

ASK: dict[str, Any] = {"model": "tested", "messages": HELLO, "max_tokens": 20}
VERSION = {"anthropic-version": "2023-06-01"}


@pytest.fixture(scope="module")
def talker() -> Iterator[tuple[Served, Scripted]]:
    with (
        scripted() as model,
        serving(model.llm, chat_template=None, tool_parser="hermes", reasoning_parser="think") as served,
    ):
        yield served, model


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_thinking_is_enabled_where_there_is_nothing_to_limit(path: str, served: Served) -> None:
    """Some clients send it with every request. The built-in model has no tags of reasoning."""
    answer = served.post(path, ASK | {"thinking": {"type": "enabled", "budget_tokens": 1024}})
    assert answer.status_code == 200, answer.text


def test_a_thinking_budget_that_cannot_hold_is_ignored_with_a_warning(embedded: LLM) -> None:
    """The built-in model's own template has tags of reasoning, which are no single tokens."""
    body = ASK | {"model": "embedded", "thinking": {"type": "enabled", "budget_tokens": 10}}
    with serving(embedded, chat_template=None, served_model_names=("embedded",)) as own:
        answer = own.post("/v1/messages", body)
        assert answer.status_code == 200 and NO_BUDGET in answer.headers["warning"], answer.text
        assert "warning" not in own.post("/v1/messages", body | {"thinking": {"type": "enabled"}}).headers
        assert own.post("/v1/messages/count_tokens", body).status_code == 200
        own.wait_until_idle()


def test_a_thinking_budget_limits_a_model_that_thinks(talker: tuple[Served, Scripted]) -> None:
    served, model = talker
    model.say("<think>\n" + "a" * 200)
    thinking: Any = {"type": "enabled", "budget_tokens": 8}
    got = client(served).messages.create(**ASK | {"max_tokens": 100}, thinking=thinking)
    assert 0 < len(got.content[0].thinking) <= 8  # type: ignore[union-attr]


def test_x_api_key_on_every_path(talker: tuple[Served, Scripted]) -> None:
    with serving(talker[1].llm, chat_template=None, api_keys=("secret", "other")) as locked, locked.http() as http:

        def status(path: str, **headers: str) -> int:
            return http.get(path, headers={k.replace("_", "-"): v for k, v in headers.items()}).status_code

        for path in ("/v1/models", "/v1/completions", "/v1/chat/completions", "/tokenize", "/metrics"):
            assert (
                status(path) == status(path, x_api_key="guessed") == status(path, authorization="Basic secret") == 401
            )
            reached = {status(path, x_api_key="other"), status(path, authorization="Bearer secret")}
            reached |= {status(path, x_api_key="none", authorization="Bearer other")}
            assert len(reached) == 1 and 401 not in reached, path


def test_models_in_anthropics_form(served: Served) -> None:
    """Where the request names a version of that API."""
    models = client(served).models.list()
    assert [(model.type, model.id) for model in models] == [("model", "tested")] and not models.has_more
    one = client(served).models.retrieve("tested")
    type(one).model_validate(one.to_dict())
    assert one.created_at.timestamp() == served.service.created
    with pytest.raises(anthropic.NotFoundError) as info:
        client(served).models.retrieve("other")
    assert info.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    assert httpx.get(f"{served.url}/v1/models/other").json()["error"]["code"] == "model_not_found"
    assert httpx.get(f"{served.url}/v1/models").json()["object"] == "list"


def test_output_format_is_the_older_name_of_a_format(served: Served) -> None:
    form = {"type": "json_schema", "schema": CITY}
    got = served.post("/v1/messages", ASK | {"max_tokens": 60, "output_format": form}).json()
    assert '"Bern"' in got["content"][0]["text"] or '"Genf"' in got["content"][0]["text"]
    twice = served.post("/v1/messages", ASK | {"output_format": form, "output_config": {"format": form}})
    assert twice.status_code == 400 and "output_format" in twice.json()["error"]["message"]


TEXT = {"type": "text", "media_type": "text/plain", "data": "Rain."}
PARTS = {"type": "content", "content": [{"type": "text", "text": "Rain."}]}
FOUND = {"type": "search_result", "source": "wetter.ch", "title": "Bern", "content": PARTS["content"]}


@pytest.mark.parametrize(
    ("block", "text"),
    [
        ({"type": "document", "source": TEXT}, "Rain."),
        ({"type": "document", "source": PARTS, "title": "Bern", "context": "today"}, "Bern\n\ntoday\n\nRain."),
        ({"type": "document", "source": {"type": "content", "content": "Rain."}}, "Rain."),
        (FOUND, "Bern\nwetter.ch\n\nRain."),
    ],
)
def test_documents_are_text(block: dict[str, Any], text: str, talker: tuple[Served, Scripted]) -> None:
    served, model = talker
    assert model.llm.tokenizer is not None

    def tokens(content: list[Any], *before: Any) -> int:
        messages = [*before, {"role": "user", "content": content}]
        return client(served).messages.count_tokens(model="tested", messages=messages).input_tokens

    expected = len(model.llm.tokenizer.encode_bare(f"user: {text}\nassistant: "))
    assert tokens([block]) == tokens([{"type": "text", "text": text}]) == expected
    result = {"type": "tool_result", "tool_use_id": "x"}
    assert tokens([result | {"content": [block]}]) == tokens([result | {"content": text}])


@pytest.mark.parametrize(
    ("source", "more"),
    [
        ({"type": "base64", "media_type": "application/pdf", "data": "AAAA"}, {}),
        ({"type": "url", "url": "file:///etc/passwd"}, {}),
        ({"type": "file", "file_id": "x"}, {}),
        (TEXT, {"citations": {"enabled": True}}),
    ],
)
def test_documents_that_are_no_text_are_refused(source: Any, more: Any, served: Served) -> None:
    block = {"type": "document", "source": source, **more}
    answer = served.post("/v1/messages", ASK | {"messages": [{"role": "user", "content": [block]}]})
    assert answer.status_code == 400 and "messages.0.content.0" in answer.json()["error"]["message"]


def test_examples_of_a_tools_input_are_in_its_description(served: Served) -> None:
    tool = {"name": "f", "input_schema": {"type": "object"}, "input_examples": [{"a": 1}, {"a": "é"}]}
    said = 'Says it\n\nExamples of its input:\n{"a": 1}\n{"a": "\\u00e9"}'
    same = {"name": "f", "input_schema": {"type": "object"}, "description": said}
    path, counts = "/v1/messages/count_tokens", []
    for each in (tool | {"description": "Says it"}, same, tool, same | {"description": said.replace("Says it", "f")}):
        counts.append(served.post(path, {"messages": HELLO, "tools": [each]}).json()["input_tokens"])
    assert counts[0] == counts[1] and counts[2] == counts[3]


@pytest.mark.parametrize("display", ["omitted", "summarized"])
def test_thinking_is_shown_unless_it_is_omitted(display: Any, talker: tuple[Served, Scripted]) -> None:
    served, model = talker
    model.say("<think>\nHm.\n</think>\n\nSo.")
    thinking: Any = {"type": "adaptive", "display": display}
    shown = "" if display == "omitted" else "Hm."
    whole = client(served).messages.create(**ASK | {"max_tokens": 100}, thinking=thinking)
    with client(served).messages.stream(**ASK | {"max_tokens": 100}, thinking=thinking) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        thought, text = message.content
        assert (thought.type, thought.thinking, text.text) == ("thinking", shown, "So.")  # type: ignore[union-attr]
    assert ("thinking" in kinds) == (display == "summarized")


def test_a_tool_of_anthropics_own_is_refused_by_name(served: Served) -> None:
    tool = {"type": "web_search_20250305", "name": "web_search"}
    answer = served.post("/v1/messages", ASK | {"tools": [tool]})
    assert answer.status_code == 400 and "'web_search_20250305' is no tool of type custom" in answer.text
