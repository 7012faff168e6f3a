"""Every field of the OpenAPI document has an effect, which is seen with the field and not without it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from hybridrt import SamplingParams
from hybridrt.engine.api.llm import LLM
from hybridrt.server.core.protocol import Sampling
from hybridrt.server.core.service import SAMPLING_FIELDS
from tests.support.http_server import Served, serving
from tests.support.levels import sweep

PROMPT = "def main():\n    return "
SEEDED = {"max_tokens": 8, "seed": 7, "temperature": 1.0, "top_p": 1.0, "ignore_eos": True}
FREE = {"ignore_eos": False}  # a form ends by itself
EOS, G = 0, 40  # tokens of the built-in model
USER = {"role": "user", "content": "Hello"}
TOOL = {"type": "function", "function": {"name": "now"}}
NAMED = {"type": "function", "name": "now"}
ONE_CALL = {"tool_choice": "required", "parallel_tool_calls": False}
SAID = {"role": "assistant", "content": "Well"}
FORM = {"enum": [7]}
TOKEN_LOGPROBS = {"include": ["message.output_text.logprobs"]}
TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}: {{ message.content }}]{% endfor %}"
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}{{ reasoning_effort }}{{ greeting }}"
    "{% if add_generation_prompt %}A:{% endif %}"
)


@dataclass
class Seen:
    """What came of a request: with which parameters the engine was to run, and what the chat template gave."""

    answer: httpx.Response
    params: SamplingParams | None
    rendered: str

    @property
    def json(self) -> dict[str, Any]:
        return dict(self.answer.json())

    @property
    def choice(self) -> dict[str, Any]:
        return dict(self.json["choices"][0]) if self.answer.status_code == 200 else {}

    @property
    def written(self) -> dict[str, Any]:
        """The text of /v1/responses."""
        content = self.json["output"][0]["content"] if self.answer.status_code == 200 else [{}]
        return {"logprobs": [], **content[0]}

    @property
    def text(self) -> str:
        return str(self.choice["text"])

    @property
    def ids(self) -> list[int]:
        return list(self.choice["token_ids"])

    def refused(self, field: str, status: int = 400) -> bool:
        return self.answer.status_code == status and self.json["error"].get("param", field) == field


Shows = Callable[[Seen], bool]
Effects = dict[str, tuple[dict[str, Any], Shows]]


def streamed(seen: Seen) -> bool:
    return seen.answer.headers["content-type"].startswith("text/event-stream")


def reads(name: str, value: Any) -> Shows:
    """The engine's parameters hold the field's value."""
    return lambda seen: seen.params is not None and getattr(seen.params, name) == value


def limited(seen: Seen) -> bool:
    """The form of the answer has room for one call."""
    return seen.params is not None and '"maxItems"' in str(seen.params.structured_outputs).replace("\\", "")


# Fields whose effect on the tokens is that of the same field of SamplingParams.
SAMPLED: dict[str, Any] = {
    "max_tokens": 3, "temperature": 0.0, "top_p": 0.01, "top_k": 1, "min_p": 0.9, "repetition_penalty": 9.0,
    "presence_penalty": 2.0, "frequency_penalty": 2.0, "seed": 8, "truncate_prompt_tokens": 2, "min_tokens": 7,
    "logit_bias": {str(G): 100}, "allowed_token_ids": [G, G + 1], "bad_words": ["Python"], "stop_token_ids": [G],
    "ignore_eos": False,
}  # fmt: skip
# What is sent next to some of them, so that there is something to see.
BESIDE: dict[str, dict[str, Any]] = {
    "stop_token_ids": {"logit_bias": {str(G): 100}},
    "min_tokens": {"ignore_eos": False, "logit_bias": {str(EOS): 12}},
    "ignore_eos": {"logit_bias": {str(EOS): 100}},
    "seed": {},
    "repetition_penalty": {"temperature": 0.0},
    "presence_penalty": {"max_tokens": 24},
    "truncate_prompt_tokens": {"max_tokens": 24, "temperature": 2.0},
    "frequency_penalty": {"temperature": 0.0, "max_tokens": 24},
}
SHARED: Effects = {
    "model": ({"model": "other"}, lambda seen: seen.refused("model", 404)),
    "stop": ({"allowed_token_ids": [G], "stop": "GGG"}, lambda seen: seen.choice["finish_reason"] == "stop"),
    "include_stop_str_in_output": (
        {"allowed_token_ids": [G], "stop": "GGG", "include_stop_str_in_output": True},
        lambda seen: seen.text.endswith("GGG"),
    ),
    "skip_special_tokens": ({"allowed_token_ids": [EOS], "skip_special_tokens": False}, lambda seen: seen.text != ""),
    "priority": ({"priority": 3}, reads("priority", 3)),
    "cache_salt": ({"cache_salt": "own"}, reads("cache_salt", "own")),
    "resume_token_ids": ({"resume_token_ids": [G, G]}, reads("resume_token_ids", (G, G))),
    "prompt_logprobs": ({"prompt_logprobs": 1}, lambda seen: seen.choice.get("prompt_logprobs") is not None),
    "response_format": (
        FREE | {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": FORM}}},
        lambda seen: seen.text == "7",
    ),
    "structured_outputs": (FREE | {"structured_outputs": {"choice": ["yes"]}}, lambda seen: seen.text == "yes"),
    "guided_json": (FREE | {"guided_json": FORM}, lambda seen: seen.text == "7"),
    "guided_regex": (FREE | {"guided_regex": "ab?c"}, lambda seen: seen.text in ("ac", "abc")),
    "guided_choice": (FREE | {"guided_choice": ["yes", "no"]}, lambda seen: seen.text in ("yes", "no")),
    "guided_grammar": (FREE | {"guided_grammar": 'start: "yes"'}, lambda seen: seen.text == "yes"),
    "n": ({"n": 2}, lambda seen: len(seen.json["choices"]) == 2),
    "stream": ({"stream": True}, streamed),
    "stream_options": (
        {"stream": True, "stream_options": {"include_usage": True}},
        lambda seen: '"completion_tokens"' in seen.answer.text,
    ),
    "request_id": ({"request_id": "mine"}, lambda seen: seen.json["id"].endswith("-mine")),
    "return_token_ids": ({"return_token_ids": True}, lambda seen: seen.choice.get("token_ids") is not None),
    "return_tokens_as_token_ids": (
        {"logprobs": 0, "return_tokens_as_token_ids": True},
        lambda seen: "token_id:" in seen.answer.text,
    ),
}
COMPLETIONS: Effects = {
    "prompt": ({"prompt": [G]}, lambda seen: seen.json["usage"]["prompt_tokens"] == 1),
    "echo": ({"echo": True}, lambda seen: seen.text.startswith(PROMPT)),
    "logprobs": ({"logprobs": 2}, lambda seen: seen.choice["logprobs"] is not None),
    "logprob_token_ids": (
        {"logprobs": 0, "logprob_token_ids": [3, 4]},
        lambda seen: len(seen.choice["logprobs"]["top_logprobs"][0]) > 1,
    ),
}
PROMPTS: Effects = {  # of conversations
    "messages": ({"messages": [USER, USER]}, lambda seen: seen.rendered.count("Hello") == 2),
    "tools": ({"tools": [TOOL]}, lambda seen: "now" in seen.rendered),
    "tool_choice": ({"tools": [TOOL], "tool_choice": "none"}, lambda seen: "now" not in seen.rendered),
    "reasoning_effort": ({"reasoning_effort": "low"}, lambda seen: "low" in seen.rendered),
    "add_generation_prompt": ({"add_generation_prompt": False}, lambda seen: "A:" not in seen.rendered),
    "continue_final_message": (
        {"messages": [USER, SAID], "continue_final_message": True},
        lambda seen: seen.rendered.endswith("Well"),
    ),
    "chat_template_kwargs": ({"chat_template_kwargs": {"greeting": "Hey"}}, lambda seen: "Hey" in seen.rendered),
    "chat_template": (
        {"chat_template": "G"},
        lambda seen: 1 in (seen.json.get("count"), seen.json.get("usage", {}).get("prompt_tokens")),
    ),
}
CHAT: Effects = PROMPTS | {
    "parallel_tool_calls": (FREE | {"tools": [TOOL], **ONE_CALL}, limited),
    "thinking_token_budget": (
        {"thinking_token_budget": 3},  # the built-in model has no tokens for reasoning
        lambda seen: seen.refused("thinking_token_budget"),
    ),
    "max_completion_tokens": ({"max_completion_tokens": 2}, reads("max_tokens", 2)),
    "logprobs": ({"logprobs": True}, lambda seen: seen.choice["logprobs"] is not None),
    "top_logprobs": (
        {"logprobs": True, "top_logprobs": 2},
        lambda seen: len(seen.choice["logprobs"]["content"][0]["top_logprobs"]) >= 2,
    ),
    "logprob_token_ids": (
        {"logprobs": True, "logprob_token_ids": [3, 4]},
        lambda seen: len(seen.choice["logprobs"]["content"][0]["top_logprobs"]) >= 2,
    ),
}
RESPONSES: Effects = {
    "input": ({"input": "Good day"}, lambda seen: "Good day" in seen.rendered),
    "instructions": ({"instructions": "Be brief."}, lambda seen: "[system: Be brief.]" in seen.rendered),
    "max_output_tokens": ({"max_output_tokens": 17}, reads("max_tokens", 17)),
    "tools": ({"tools": [NAMED]}, lambda seen: "now" in seen.rendered),
    "tool_choice": ({"tools": [NAMED], "tool_choice": "none"}, lambda seen: "now" not in seen.rendered),
    "parallel_tool_calls": ({"tools": [NAMED], **ONE_CALL}, limited),
    "reasoning": ({"reasoning": {"effort": "low"}}, lambda seen: "low" in seen.rendered),
    "text": (
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": FORM}}},
        lambda seen: seen.params is not None and seen.params.structured_outputs is not None,
    ),
    "thinking_token_budget": (
        {"thinking_token_budget": 3},
        lambda seen: seen.refused("thinking_token_budget"),
    ),
    "chat_template_kwargs": PROMPTS["chat_template_kwargs"],
    "include": (TOKEN_LOGPROBS, lambda seen: len(seen.written["logprobs"]) > 0),
    "top_logprobs": (
        TOKEN_LOGPROBS | {"top_logprobs": 3}, lambda seen: len(seen.written["logprobs"][0]["top_logprobs"]) >= 3
    ),
    "store": ({"store": False}, lambda seen: seen.json["store"] is False),
    "background": ({"background": True}, lambda seen: seen.json["status"] == "queued"),
    "truncation": ({"truncation": "auto"}, reads("truncate_prompt_tokens", -1)),
    "metadata": ({"metadata": {"a": "b"}}, lambda seen: seen.json["metadata"] == {"a": "b"}),
    **{
        name: ({name: value}, lambda seen, name=name: seen.refused(name))  # type: ignore[misc]
        for name, value in {
            "previous_response_id": "x",
        }.items()
    },
}  # fmt: skip
COUNT: Effects = {
    "model": SHARED["model"],
    "messages": PROMPTS["messages"],
    "system": ({"system": "Be brief."}, lambda seen: "[system: Be brief.]" in seen.rendered),
    "tools": ({"tools": [{"name": "now", "input_schema": {}}]}, lambda seen: "now" in seen.rendered),
    "tool_choice": (
        {"tools": [{"name": "now", "input_schema": {}}], "tool_choice": {"type": "none"}},
        lambda seen: "now" not in seen.rendered,
    ),
    "thinking": ({"thinking": {"type": "disabled"}}, lambda seen: "none" in seen.rendered),
    "output_config": ({"output_config": {"effort": "low"}}, lambda seen: "low" in seen.rendered),
    "chat_template_kwargs": PROMPTS["chat_template_kwargs"],
}
MESSAGES: Effects = {name: effect for name, effect in COUNT.items() if name != "model"} | {
    "max_tokens": ({"max_tokens": 5}, reads("max_tokens", 5)),
    "output_format": (
        {"output_format": {"type": "json_schema", "schema": FORM}},
        lambda seen: seen.params is not None and seen.params.structured_outputs is not None,
    ),
    "stop_sequences": ({"stop_sequences": ["zz"]}, reads("stop", ("zz",))),
}
TOKENIZE: Effects = PROMPTS | {
    "model": SHARED["model"],
    "prompt": ({"prompt": "GG", "messages": None}, lambda seen: seen.json["tokens"] == [G, G]),
    "return_token_strs": ({"return_token_strs": True}, lambda seen: bool(seen.json["token_strs"])),
}
DETOKENIZE: Effects = {
    "model": SHARED["model"],
    "tokens": ({"tokens": [G, G]}, lambda seen: seen.json["prompt"] == "GG"),
}


def vector(seen: Seen) -> Any:
    return seen.json["data"][0]["embedding"]


EMBEDDINGS: Effects = {
    "model": SHARED["model"],
    "input": ({"input": [[5], [6]]}, lambda seen: len(seen.json["data"]) == 2),
    "encoding_format": ({"encoding_format": "base64"}, lambda seen: isinstance(vector(seen), str)),
    "dimensions": ({"dimensions": 3}, lambda seen: len(vector(seen)) == 3),
    "pooling": ({"pooling": "mean"}, reads("pooling", "mean")),
    "normalize": ({"normalize": False}, lambda seen: abs(sum(x * x for x in vector(seen)) - 1) > 1e-3),
    "use_activation": ({"use_activation": False}, lambda seen: abs(sum(x * x for x in vector(seen)) - 1) > 1e-3),
    "truncate_prompt_tokens": ({"truncate_prompt_tokens": 2}, lambda seen: seen.json["usage"]["prompt_tokens"] == 2),
    "priority": SHARED["priority"],
    "cache_salt": SHARED["cache_salt"],
    "request_id": SHARED["request_id"],
}
TABLES: dict[str, tuple[dict[str, Any], Effects]] = {
    "/v1/completions": ({"prompt": PROMPT, **SEEDED}, COMPLETIONS | SHARED),
    "/v1/chat/completions": ({"messages": [USER], **SEEDED}, CHAT),
    "/v1/responses": ({"input": "Hello", "max_output_tokens": 16, "seed": 1}, RESPONSES),
    "/v1/messages": ({"messages": [USER], "max_tokens": 4}, MESSAGES),
    "/v1/messages/count_tokens": ({"messages": [USER]}, COUNT),
    "/v1/embeddings": ({"input": PROMPT}, EMBEDDINGS),
    "/tokenize": ({"messages": [USER]}, TOKENIZE),
    "/detokenize": ({"tokens": [5]}, DETOKENIZE),
}
# What says how an answer is made does nothing where none is made. The built-in model's tokenizer adds no special
# tokens (tests of add_special_tokens: test_operations, test_vllm_fields), and it writes no reasoning (test_reasoning).
# /abort has a test of its own. And `user` does nothing anywhere.
WITHOUT_EFFECT: dict[str, set[str]] = {
    "/v1/completions": {"add_special_tokens"},
    "/v1/embeddings": {"add_special_tokens"},
    "/v1/chat/completions": {"include_reasoning"},
    "/v1/responses": {"include_reasoning"},
    "/tokenize": {"add_special_tokens", "parallel_tool_calls", "thinking_token_budget"},
    "/v1/messages/count_tokens": set(Sampling.model_fields) - {"model"} | {"output_format"},
    "/abort": {"request_id"},
}
CASES = sweep([(path, name) for path, (_, effects) in TABLES.items() for name in effects], 4)


@pytest.fixture(scope="module")
def own(embedded: LLM) -> Iterator[Served]:
    with serving(
        embedded, chat_template=TEMPLATE, tool_parser="hermes", reasoning_parser="think", request_chat_templates=True
    ) as served:
        yield served
    served.wait_until_idle()


@pytest.fixture
def ask(own: Served, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, dict[str, Any]], Seen]:
    found: dict[str, Any] = {}
    submit, render = own.service.llm.submit, own.service.chat.render

    def note_params(prepared: Any, *arguments: Any, **named: Any) -> Any:
        found["params"] = prepared[0].params
        return submit(prepared, *arguments, **named)

    def note_text(conversation: Any) -> str:
        return found.setdefault("rendered", render(conversation))

    monkeypatch.setattr(own.service.llm, "submit", note_params)
    monkeypatch.setattr(own.service.chat, "render", note_text)

    def post(path: str, body: dict[str, Any]) -> Seen:
        found.clear()
        answer = own.post(path, body)
        return Seen(answer, found.get("params"), found.get("rendered", ""))

    return post


@pytest.mark.parametrize(("path", "name"), CASES)
def test_a_field_has_an_effect(path: str, name: str, ask: Callable[[str, dict[str, Any]], Seen]) -> None:
    base, effects = TABLES[path]
    changes, shows = effects[name]
    seen = ask(path, base | changes)
    assert shows(seen), seen.answer.text
    without = ask(path, base | {other: value for other, value in changes.items() if other != name})
    assert without.answer.status_code == 400 or not shows(without), without.answer.text


@pytest.mark.parametrize("name", sweep(SAMPLED, 4))
def test_a_field_of_sampling_does_what_it_does_offline(
    name: str, own: Served, ask: Callable[[str, dict[str, Any]], Seen]
) -> None:
    beside = SEEDED | BESIDE.get(name, {})
    body = {"prompt": PROMPT, "return_token_ids": True, **beside}
    params = {**beside, name: SAMPLED[name]}
    params |= {"logit_bias": {int(k): v for k, v in params["logit_bias"].items()}} if "logit_bias" in params else {}
    want = own.llm.generate(PROMPT, SamplingParams(**params))[0].token_ids
    assert ask("/v1/completions", body | {name: SAMPLED[name]}).ids == want != ask("/v1/completions", body).ids


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_fields_of_sampling_reach_every_endpoint(path: str, ask: Callable[[str, dict[str, Any]], Seen]) -> None:
    values: dict[str, Any] = {
        "temperature": 0.5, "top_p": 0.5, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.5, "presence_penalty": 0.5,
        "frequency_penalty": 0.25, "stop": ("zz",), "stop_token_ids": (3,), "ignore_eos": True, "seed": 5,
        "include_stop_str_in_output": True, "skip_special_tokens": False, "truncate_prompt_tokens": 9, "priority": 2,
        "min_tokens": 1, "logit_bias": {3: 1.0}, "allowed_token_ids": (3, G), "bad_words": ("x",), "cache_salt": "s",
        "resume_token_ids": (G,),
    }  # fmt: skip
    assert values.keys() == SAMPLING_FIELDS - {"n", "max_tokens", "prompt_logprobs", "logprobs"}
    body = {"messages": [USER], "input": "Hello", "max_tokens": 4, **values}
    seen = ask(path, body)
    assert seen.answer.status_code == 200, seen.answer.text
    assert {name: getattr(seen.params, name) for name in values} == values


def test_every_field_is_listed(own: Served) -> None:
    with own.http() as client:
        document = client.get("/openapi.json").json()
    schemas, shared = document["components"]["schemas"], set(Sampling.model_fields)
    assert {*SAMPLED, *SHARED, "user"} == shared
    for path, methods in document["paths"].items():
        if "requestBody" not in methods.get("post", {}):
            continue
        reference = methods["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        known = {*TABLES.get(path, ({}, ()))[1], *WITHOUT_EFFECT.get(path, ())}
        assert set(schemas[reference.rpartition("/")[2]]["properties"]) <= known | shared, path
        assert path in TABLES or path in WITHOUT_EFFECT
