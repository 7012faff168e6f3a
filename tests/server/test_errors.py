"""What is wrong with a request is said in OpenAI's form, with the field's name; no request hurts another."""

import gzip
import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from fastapi.exceptions import RequestValidationError

from tests.support.http_server import Served
from tests.support.lazily import lazily

if TYPE_CHECKING:
    import openai
else:
    openai = lazily("openai")

COMPLETION = {"model": "tested", "prompt": [5, 6], "max_tokens": 2}
MANY = ["x"] * 500
LONG = [{"role": "user", "content": "x" * 9999}]
CHAT = {"model": "tested", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}


def assert_error(answer: httpx.Response, status: int, field: str | None, text: str) -> None:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"], text in error["message"]) == (field, True), error
    assert answer.headers["x-request-id"]


BAD: list[tuple[dict[str, Any], str | None, str]] = [
    ({"temperature": -1}, "temperature", "temperature is -1.0; it must be"),
    ({"temperature": "1"}, "temperature", "valid number"),
    ({"temperature": float("nan")}, "temperature", "nan"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens is 0; it must be an integer from 1"),
    ({"max_tokens": 2.5}, "max_tokens", "valid integer"),
    ({"max_tokens": True}, "max_tokens", "valid integer"),
    ({"max_tokens": 10**400}, "max_tokens", ""),
    ({"top_p": 0}, "top_p", "in (0, 1]"),
    ({"top_k": 2**31}, "top_k", "2**31 - 1"),
    ({"min_p": 2}, "min_p", "in [0, 1]"),
    ({"repetition_penalty": 0}, "repetition_penalty", "0.01 to 100"),
    ({"presence_penalty": 3}, "presence_penalty", "in [-2, 2]"),
    ({"frequency_penalty": [1]}, "frequency_penalty", "valid number"),
    ({"seed": -(2**63) - 1}, "seed", "0 to 2**63 - 1"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "set stream to true"),
    ({"n": 0}, "n", "1 to 1024"),
    ({"n": 2000}, "n", "1 to 1024"),
    ({"stop": [""]}, "stop", "1 to 256 characters"),
    ({"stop": ["x"] * 40}, "stop", "more than 32"),
    ({"stop": 5}, "stop", "valid string or a valid list"),
    ({"stop_token_ids": [10**6]}, "stop_token_ids", "the vocabulary ends at"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids.0", "valid integer"),
    ({"ignore_eos": "yes"}, "ignore_eos", "valid boolean"),
    ({"stream": 1}, "stream", "valid boolean"),
    ({"stream_options": {"include_usage": 3}}, "stream_options.include_usage", "valid boolean"),
    ({"request_id": "a b"}, "request_id", "pattern"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "from -100 to 100"),
    ({"logit_bias": dict.fromkeys(map(str, range(2000)), 1)}, "logit_bias", "logit_bias: it has 2000 entries; pass at"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "integers >= 0 from the vocabulary"),
    ({"logit_bias": {"1000000": 1}}, "logit_bias", "the vocabulary ends at"),
    ({"min_tokens": 5}, "min_tokens", "at most max_tokens, 2"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "at least one"),
    ({"bad_words": [" "]}, "bad_words", "not only spaces"),
    ({"bad_words": "x"}, "bad_words", "valid list"),
    ({"prompt_logprobs": 65}, "prompt_logprobs", "0 to 64"),
    ({"structured_outputs": {}}, "structured_outputs", "set one of json, regex"),
    ({"structured_outputs": {"json": {}, "xml": 1}}, "structured_outputs.xml", "not permitted"),
    ({"structured_outputs": {"regex": "(?=a)"}}, "structured_outputs", "look-ahead"),
    ({"guided_json": {"uniqueItems": True}}, "guided_json", "uniqueItems"),
    ({"guided_json": {"$ref": "file:///etc/passwd"}}, "guided_json", "not present in a registry"),
    ({"guided_json": "{"}, "guided_json", "no JSON"),
    ({"guided_choice": []}, "guided_choice", "1 to 4096"),
    ({"guided_grammar": "start: x"}, "guided_grammar", "unknown name"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "guided_regex and guided_choice"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "needs json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "thing"}}}},
        "response_format",
        "thing",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": "{}"}}},
        "response_format.json_schema.schema",
        "",
    ),
    ({"response_format": {"type": "yaml"}}, "response_format.type", "json_object"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "structured_outputs"),
]


@pytest.mark.parametrize(("change", "field", "text"), BAD, ids=[str(case[0])[:40] for case in BAD])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_field_that_is_wrong_is_named(
    path: str, change: dict[str, Any], field: str | None, text: str, served: Served
) -> None:
    body = (COMPLETION if path == "/v1/completions" else CHAT) | change
    with served.http() as client:
        answer = client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert_error(answer, 400, field, text)


@pytest.mark.parametrize(
    ("change", "field", "text"),
    [
        ({"prompt": ""}, "prompt", "the prompt is empty"),
        ({"prompt": []}, "prompt", "empty list"),
        ({"prompt": [[]]}, "prompt", "the prompt is empty"),
        ({"prompt": None}, "prompt", ""),
        ({"prompt": {"prompt": "x"}}, "prompt", "a string, a list of token ids, or a list of either"),
        ({"prompt": [1, "a"]}, "prompt.1", "valid integer"),
        ({"prompt": [-1]}, "prompt.0", "greater than or equal to 0"),
        ({"prompt": [5.5]}, "prompt.0", "valid integer"),
        ({"prompt": ["a", 5]}, "prompt.1", "valid string or a valid list"),
        ({"prompt": [[5], ["a"]]}, "prompt.1.0", "valid integer"),
        ({"prompt": [10**6]}, "prompt", "outside the vocabulary"),
        ({"prompt": [5] * 300}, "prompt", "the prompt has 300 tokens"),
        ({"prompt": "x" * 10**6}, "prompt", "the prompt has 1000000 characters"),
        ({"prompt": [[5]] * 1025}, "prompt", "1025 prompts"),
        ({"prompt": [[5]] * 600, "n": 2}, "n", "1024 in all"),
        ({"suffix": "end"}, "suffix", "suffix is not supported"),
        ({"best_of": 3}, "best_of", "best_of is not supported"),
        ({"logprobs": 65}, "logprobs", "0 to 64"),
        ({"logprobs": True}, "logprobs", "valid integer"),
        ({"prompt": "x" * (2**20 + 1), "truncate_prompt_tokens": 2}, "prompt", "takes up to 1048576 characters"),
        (
            {"prompt": "x" * (2**20 + 1), "truncate_prompt_tokens": 2, "add_special_tokens": False},
            "prompt",
            "takes up to 1048576 characters",
        ),
    ],
)
def test_completions_name_what_is_wrong(change: dict[str, Any], field: str | None, text: str, served: Served) -> None:
    assert_error(served.post("/v1/completions", COMPLETION | change), 400, field, text)


@pytest.mark.parametrize(
    ("change", "field", "text"),
    [
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": "Hi"}, "messages", "list"),
        ({"messages": [{"content": "Hi"}]}, "messages.0.role", "required"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content", ""),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content.0.image_url",
            "must be",
        ),
        ({"messages": [{"role": "judge", "content": "x"}]}, "messages", "no role judge"),
        ({"messages": [{"role": "user", "content": "x" * 9999}]}, "messages", "it may have at most 255"),
        (
            {"messages": [{"role": "user", "content": "x" * (2**20 + 1)}], "truncate_prompt_tokens": 2},
            "messages",
            "takes up to 1048576 characters",
        ),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "tokenize"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs", "chat_template"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "add_generation_prompt=false",
        ),
        ({"chat_template_kwargs": {"x": 2**70}}, "chat_template_kwargs", "ints"),
        ({"messages": [{"role": "user", "x": 2**70}]}, "messages", "ints"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "0"),
        ({"tools": [{"type": "function"}]}, "tools.0", "it must be"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "--tool-parser"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tool_choice": "maybe"}, "tool_choice", "must be 'auto'"),
        ({"reasoning_effort": "most"}, "reasoning_effort", "minimal"),
        ({"logprobs": 5}, "logprobs", "valid boolean"),
        ({"top_logprobs": 2}, "top_logprobs", "set logprobs to true"),
        ({"logprobs": True, "top_logprobs": 65}, "top_logprobs", "0 to 64"),
        ({"chat_template": "{{ 1 }}"}, "chat_template", "--chat-template"),
    ],
)
def test_chat_names_what_is_wrong(change: dict[str, Any], field: str | None, text: str, served: Served) -> None:
    assert_error(served.post("/v1/chat/completions", CHAT | change), 400, field, text)


@pytest.mark.slow
def test_too_many_messages(served: Served) -> None:
    many = [{"role": "user", "content": "a"}] * 16385
    for path, body in (
        ("/v1/chat/completions", {"messages": many}),
        ("/tokenize", {"messages": many}),
        ("/v1/responses", {"input": many}),
        ("/v1/messages", {"messages": many, "max_tokens": 1}),
    ):
        answer = served.post(path, body)
        assert answer.status_code == 400 and "at most 16384 items" in answer.text, (path, answer.text)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"null", b"[]", b"5", b'"x"', b"\xff\xfe", b"[" * 100_000,
        b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"prompt": "\\ud800", "max_tokens": 1}', b'{"prompt": 1' + b"0" * 5000 + b"}", b'{"prompt": NaN}',
    ],
)  # fmt: skip
def test_bodies_that_are_no_request(content: bytes, served: Served) -> None:
    for headers in ({"content-type": "application/json"}, {"content-type": "text/plain"}, {}):
        with served.http() as client:
            answer = client.post("/v1/completions", content=content, headers=headers)
        assert answer.status_code == 400 and answer.json()["error"]["message"], answer.text


def test_ways_that_lead_nowhere(served: Served) -> None:
    with served.http() as client:
        assert_error(client.get("/nowhere"), 404, None, "GET /docs")
        assert_error(client.post("/chat/completions", json={}), 404, None, "begin with /v1")
        wrong = client.get("/v1/completions")
        assert_error(wrong, 405, None, "Method Not Allowed")
        assert wrong.headers["allow"] == "POST"
        assert_error(client.get("/v1/models/../../etc/passwd"), 404, None, "")


def test_unknown_fields_are_ignored(served: Served) -> None:
    assert served.post("/v1/completions", COMPLETION | {"no_such_field": {"a": [1]}, "user": "me"}).status_code == 200
    neutral = {"logit_bias": {}, "min_tokens": 0, "bad_words": [], "use_beam_search": False, "priority": 0}
    assert served.post("/v1/completions", COMPLETION | neutral).status_code == 200


def test_the_client_library_raises_its_own_errors(served: Served) -> None:
    with pytest.raises(openai.BadRequestError) as info:
        served.client().completions.create(model="tested", prompt="x", temperature=-1)
    assert info.value.param == "temperature" and info.value.type == "invalid_request_error"


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("/v1/completions", {"prompt": [None] * 500}), ("/v1/completions", {"prompt": [[x] for x in MANY]}),
        ("/v1/completions", {"stop": [0] * 500}), ("/v1/completions", {"stop_token_ids": MANY}),
        ("/v1/completions", {"allowed_token_ids": MANY}), ("/v1/completions", {"bad_words": [0] * 500}),
        ("/v1/completions", {"logit_bias": dict.fromkeys(map(str, range(2000)), "x")}),
        ("/v1/completions", {"structured_outputs": {"choice": [0] * 500}}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [5] * 500}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "x"}] * 500}]}),
        ("/v1/responses", {"input": [{"role": "user", "content": [5] * 500}]}),
        ("/v1/responses", {"metadata": dict.fromkeys(map(str, range(2000)), 0)}),
        ("/detokenize", {"tokens": MANY}),
    ],
)  # fmt: skip
def test_a_list_of_wrong_elements_is_not_checked_to_its_end(
    path: str, change: dict[str, Any], served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error for each of millions took seconds, in which no other request went on."""
    found: list[int] = []
    errors = RequestValidationError.errors

    def note(error: RequestValidationError) -> Any:
        found.append(len(errors(error)))
        return errors(error)

    monkeypatch.setattr(RequestValidationError, "errors", note)
    assert served.post(path, {"max_tokens": 1, **change}).status_code == 400
    assert found and max(found) < 10, found


def test_bodies_that_cannot_be_read(served: Served) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    with served.http() as client:
        answer = client.post("/v1/completions", content=gzip.compress(b"{}"), headers=headers)
    assert_error(answer, 400, None, "not compressed")


def test_an_overlong_prompt_has_the_code_that_clients_look_for(served: Served) -> None:
    for path, body in (("/v1/completions", {"prompt": [5] * 300}), ("/v1/chat/completions", CHAT | {"messages": LONG})):
        error = served.post(path, body).json()["error"]
        assert error["code"] == "context_length_exceeded" and "maximum context length is 256 tokens" in error["message"]
