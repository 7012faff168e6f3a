"""What clients of vLLM, SGLang and llama.cpp read in answers and write in requests, beyond OpenAI's forms."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from hybridrt.chat import renderer
from hybridrt.server.core.protocol import CompletionRequest
from hybridrt.server.core.service import KEPT_TEMPLATES
from hybridrt.server.core.structured import structured_outputs
from tests.server.test_vllm_fields import ASK, USER, chunks
from tests.support.chat_samples import TOOLS
from tests.support.http_server import Served, serving
from tests.support.scripted_llm import Scripted, scripted

CHAT: dict[str, Any] = {"messages": USER, "max_tokens": 8, "seed": 1}
G, EOS = 40, 0  # tokens of the built-in model


@pytest.fixture(scope="module")
def talker() -> Iterator[tuple[Served, Scripted]]:
    with (
        scripted() as model,
        serving(model.llm, chat_template=None, tool_parser="hermes", reasoning_parser="think") as served,
    ):
        yield served, model


def test_keys_that_vllm_always_sends(served: Served) -> None:
    text, chat = served.post("/v1/completions", ASK).json(), served.post("/v1/chat/completions", CHAT).json()
    for answer, keys in (
        (text, ("service_tier", "kv_transfer_params", "ec_transfer_params", "metrics")),
        (chat, ("ec_transfer_params", "metrics", "prompt_logprobs", "prompt_token_ids", "prompt_text")),
        (text["choices"][0], ("token_ids", "stop_reason", "prompt_logprobs", "prompt_token_ids", "logprobs")),
        (chat["choices"][0], ("token_ids", "stop_reason", "logprobs")),
        (chat["choices"][0]["message"], ("refusal", "annotations", "audio", "function_call", "reasoning")),
    ):
        assert {key: answer[key] for key in keys} == dict.fromkeys(keys)


def test_the_system_fingerprint_is_that_of_the_settings(served: Served, talker: tuple[Served, Scripted]) -> None:
    other, model = talker
    model.say("Hi.")
    found = set()
    for path, body in (("/v1/completions", ASK), ("/v1/chat/completions", CHAT)):
        found.add(served.post(path, body).json()["system_fingerprint"])
        found |= {chunk["system_fingerprint"] for chunk in chunks(served.post(path, body | {"stream": True}).text)}
    (name,) = found
    assert name.startswith("hybridrt-")
    assert other.post("/v1/chat/completions", CHAT).json()["system_fingerprint"] != name


def test_reasoning_has_two_names(talker: tuple[Served, Scripted]) -> None:
    served, model = talker
    model.say("<think>\nHm.\n</think>\n\nSo.")
    body = CHAT | {"max_tokens": 100}
    message = served.post("/v1/chat/completions", body).json()["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] == "Hm."
    deltas = [
        c["choices"][0]["delta"] for c in chunks(served.post("/v1/chat/completions", body | {"stream": True}).text)
    ]
    for name in ("reasoning", "reasoning_content"):
        assert "".join(delta.get(name, "") for delta in deltas) == "Hm."
    hidden = served.post("/v1/chat/completions", body | {"include_reasoning": False}).json()["choices"][0]["message"]
    assert hidden["reasoning"] is None and "reasoning_content" not in hidden


def test_reasoning_is_read_by_both_names(served: Served) -> None:
    template = "{% for m in messages %}{{ m.reasoning_content | default('none') }}{% endfor %}"
    with serving(served.llm, chat_template=template) as own:
        for name in ("reasoning", "reasoning_content"):
            said = {"role": "assistant", "content": "So.", name: "GGG"}
            body = {"messages": [*USER, said], "add_generation_prompt": False}
            assert own.post("/tokenize", body).json()["tokens"][-1] == G


@pytest.mark.parametrize(
    ("given", "matched"),
    [
        ({"stop": "GG", "allowed_token_ids": [G]}, "GG"), ({"stop_token_ids": [G], "allowed_token_ids": [G]}, G),
        ({"allowed_token_ids": [EOS]}, EOS), ({"max_tokens": 2, "ignore_eos": True}, None),
    ],
)  # fmt: skip
def test_matched_stop(given: dict[str, Any], matched: Any, served: Served) -> None:
    for path, body in (("/v1/completions", ASK), ("/v1/chat/completions", CHAT)):
        whole = served.post(path, body | given).json()["choices"][0]
        *_, last = chunks(served.post(path, body | given | {"stream": True}).text)
        assert whole["matched_stop"] == last["choices"][0]["matched_stop"] == matched


def test_token_strs_are_pieces_of_the_vocabulary(served: Served) -> None:
    got = served.post("/tokenize", {"prompt": "def f():\n  é", "return_token_strs": True}).json()
    tokenizer = served.llm.tokenizer
    assert tokenizer is not None
    assert got["token_strs"] == tokenizer.hf.convert_ids_to_tokens(got["tokens"])
    assert "".join(got["token_strs"]) != "def f():\n  é"


def test_parts_of_other_forms_are_text(served: Served) -> None:
    def tokens(part: Any) -> list[int]:
        found: list[int] = served.post("/tokenize", {"messages": [{"role": "user", "content": [part]}]}).json()[
            "tokens"
        ]
        return found

    texts = [{"type": kind, "text": "Hello"} for kind in ("text", "input_text", "output_text")]
    want, *others = map(tokens, [*texts, {"type": "refusal", "refusal": "Hello"}])
    assert others == [want] * 3
    wrong = served.post("/tokenize", {"messages": [{"role": "user", "content": [{"type": "input_image"}]}]})
    assert wrong.json()["error"]["param"] == "messages.0.content.0.image_url"


SEVEN = {"type": "object", "properties": {"a": {"enum": [7]}}, "required": ["a"], "additionalProperties": False}
SHORT = SEVEN | {"x-guidance": {"whitespace_flexible": False}}  # or a small model goes on with spaces


@pytest.mark.parametrize(
    "given",
    [
        {"response_format": {"type": "json_object", "schema": SHORT}},
        {"response_format": {"type": "json_schema", "schema": SHORT}},
        {"structured_outputs": {"json": SHORT, "json_object": False}},
    ],
)
def test_a_schema_in_another_place_holds(given: Any, served: Served) -> None:
    text = served.post("/v1/completions", ASK | {"max_tokens": 60} | given).json()["choices"][0]["text"]
    assert json.loads(text) == {"a": 7}


def test_any_object(served: Served) -> None:
    body = ASK | {"structured_outputs": {"json_object": True}, "max_tokens": 60}
    assert served.post("/v1/completions", body).json()["choices"][0]["text"].startswith("{")


TAGS: dict[str, Any] = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<f=a>", "schema": SEVEN, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"type": "boolean"}, "end": "</f>"},
        {"begin": "[[", "schema": {"enum": ["x"]}, "end": ""},
    ],
    "triggers": ["<f=", "[["],
}
# The same in xgrammar's newer form.
FORMAT: dict[str, Any] = {
    "type": "triggered_tags",
    "triggers": TAGS["triggers"],
    "tags": [
        {"type": "tag", "begin": tag["begin"], "content": {"type": "json_schema", "json_schema": tag["schema"]},
         "end": tag["end"]}
        for tag in TAGS["structures"]
    ],
}  # fmt: skip
NEWER: dict[str, Any] = {"type": "structural_tag", "format": FORMAT}


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ('So: <f=a>{"a": 7}</f> and <f=b>true</f>.', True), ("no tag", True), ('[["x"<f=b>false</f>[["x"', True),
        ("So: <f=c", False), ('<f=a>{"a": 8', False), ("<f=a>7", False), ("[[x", False), ('[["x"\n<f=b>[', False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("form", ["response_format", "structured_outputs"])
@pytest.mark.parametrize("tags", [TAGS, NEWER], ids=["structures", "format"])
def test_structural_tags(tags: dict[str, Any], form: str, text: str, whole: bool, served: Served) -> None:
    """Whether an output may be this text."""
    given = {form: tags if form == "response_format" else {"structural_tag": json.dumps(tags)}}
    outputs = structured_outputs(CompletionRequest.model_validate({"prompt": "x", **given}))
    assert outputs is not None and served.llm.tokenizer is not None
    root = served.llm.engine.intake.compiler.grammar(outputs).roots[0].deep_copy()
    tokens = served.llm.tokenizer.encode_bare(text)
    assert (root.validate_tokens(tokens) == len(tokens)) == whole


@pytest.mark.parametrize(
    "changes",
    [
        {"structures": []}, {"triggers": []}, {"triggers": ["<g="]}, {"triggers": ["<f=", "[[", "<f"]},
        {"triggers": ["", "<f=", "[["]}, {"format": {"type": "tag"}}, {"triggers": ["x" * 2000, "<f=", "[["]},
        {"structures": [{"begin": "[[", "schema": {"type": "nothing"}, "end": ""}]},
        {"structures": [{"begin": "[[", "end": ""}] * 65},
    ],
)  # fmt: skip
def test_wrong_structural_tags_are_refused(changes: dict[str, Any], served: Served) -> None:
    answer = served.post("/v1/completions", ASK | {"response_format": TAGS | changes})
    assert answer.status_code == 400 and answer.json()["error"]["param"].startswith("response_format"), answer.text


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"type": "any_text"}, "type"), ({"at_least_one": True}, "at_least_one"), ({"excludes": ["x"]}, "excludes"),
        ({"stop_after_first": True}, "stop_after_first"), ({"tags": FORMAT["tags"] * 33}, "tags"),
        ({"tags": [FORMAT["tags"][0] | {"content": {"type": "regex", "pattern": "x"}}]}, "tags.0.content.type"),
    ],
)  # fmt: skip
def test_other_forms_of_structural_tags_are_refused_by_name(
    changes: dict[str, Any], named: str, served: Served
) -> None:
    answer = served.post("/v1/completions", ASK | {"response_format": NEWER | {"format": FORMAT | changes}})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "response_format.format")
    assert f"a json_schema: {named} is not supported" in error["message"]


def test_structural_tags_of_a_chat(talker: tuple[Served, Scripted]) -> None:
    served, model = talker
    model.say("So. <f=b>true</f>")
    for tools in (None, TOOLS):
        body = CHAT | {"max_tokens": 100, "response_format": TAGS, "tools": tools}
        message = served.post("/v1/chat/completions", body).json()["choices"][0]["message"]
        assert message["content"].startswith("So. <f=b>true</f>")


BAD = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def test_a_chat_template_of_a_request(served: Served) -> None:
    """Off by default."""
    refused = served.post("/v1/chat/completions", CHAT | {"chat_template": "G"}).json()["error"]
    assert (refused["param"], refused["code"]) == ("chat_template", "unsupported")
    with serving(served.llm, request_chat_templates=True) as own:
        for i in range(20):
            template = {"chat_template": "{# " + str(i) + " #}GG"}
            assert own.post("/tokenize", {"messages": USER} | template).json()["tokens"] == [G, G]
        assert len(own.service._foreign) == KEPT_TEMPLATES
        for wrong in ("", "{% if %}", "x" * 2**17):
            assert own.post("/v1/chat/completions", CHAT | {"chat_template": wrong}).status_code == 400


@pytest.mark.slow
def test_a_chat_template_that_never_ends_holds_up_no_other_request(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even one with large messages."""
    monkeypatch.setattr(renderer.FOREIGN_RENDERER, "_seconds", 1.0)
    with serving(served.llm, request_chat_templates=True) as own, ThreadPoolExecutor(4) as threads:
        stuck = [
            threads.submit(own.post, "/v1/chat/completions", CHAT | {"chat_template": BAD + "x" * i}) for i in range(2)
        ]
        assert own.post("/v1/chat/completions", CHAT).status_code == 200
        assert own.post("/tokenize", {"messages": USER * 100}).status_code == 200
        assert not all(each.done() for each in stuck)
        assert {each.result().status_code for each in stuck} == {400}
