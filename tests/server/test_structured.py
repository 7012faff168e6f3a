"""Structured output over HTTP: every field for it, the official client's parser, and schemas of any kind."""

import json
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from hybridrt.base.engine_config import SpeculativeConfig
from hybridrt.engine.api.llm import LLM
from tests.support.http_server import Served, serving
from tests.support.schemas import MANY_RULES, SCHEMAS, SUITE, random_schema

MESSAGES: list[Any] = [{"role": "user", "content": "Name a city."}]
COMPACT = {"x-guidance": {"whitespace_flexible": False}}


class City(BaseModel):
    """What a client parses the answer into."""

    model_config = {"extra": "forbid"}
    name: str = Field(max_length=6)
    size: Literal["small", "large"]


def test_the_clients_parser_reads_what_the_server_writes(served: Served) -> None:
    completions = served.client().chat.completions
    options: dict[str, Any] = {"model": "tested", "messages": MESSAGES, "max_tokens": 200, "seed": 5}
    parsed = completions.parse(response_format=City, **options).choices[0].message.parsed
    assert isinstance(parsed, City)
    with completions.stream(response_format=City, **options) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == parsed


def test_every_field_of_structured_outputs(served: Served) -> None:
    schema = SCHEMAS[24] | COMPACT
    forms: list[dict[str, Any]] = [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}},
        {"guided_json": schema},
        {"guided_json": json.dumps(schema)},
        {"structured_outputs": {"json": schema}},
        {"guided_regex": "[0-9]{3}"},
        {"guided_choice": ["yes", "no"]},
        {"guided_grammar": 'start: "a" /b+/ "c"'},
    ]
    bodies = [{"messages": MESSAGES}, {"prompt": "x = "}]
    with served.http() as client:
        for path, body in zip(("/v1/chat/completions", "/v1/completions"), bodies):
            texts = []
            for form in forms:
                answer = client.post(path, json=body | form | {"max_tokens": 40, "temperature": 0}).json()
                choice = answer["choices"][0]
                texts.append(choice["message"]["content"] if "message" in choice else choice["text"])
                assert choice["finish_reason"] == "stop" or form == forms[-1], answer
            assert len(set(texts[:4])) == 1 and set(json.loads(texts[0])) == {"a"}
            assert len(texts[4]) == 3 and texts[4].isdigit() and texts[5] in ("yes", "no") and texts[6][:2] == "ab"
        any_object = {"response_format": {"type": "json_object"}, "max_tokens": 3, "prompt": ["x", "y"]}
        assert all(c["text"][0] == "{" for c in client.post("/v1/completions", json=any_object).json()["choices"])


def checked(served: Served, schemas: Sequence[dict[str, Any] | bool], **fields: Any) -> int:
    """Asks for a text of each schema, greedy and sampled, all at a time: it is valid, or the schema is refused by
    one of its keywords. Returns how many texts came to an end."""
    body = {"prompt": "x = x = x = ", "seed": 1} | fields
    bodies = [body | {"temperature": t, "guided_json": schema} for schema in schemas for t in (0, 1.2)]
    kind, ended = jsonschema.Draft202012Validator, 0
    with ThreadPoolExecutor(32) as pool, served.http() as client:
        answers = pool.map(lambda body: client.post("/v1/completions", json=body), bodies)
        for asked, answer in zip(bodies, answers, strict=True):
            schema, found = asked["guided_json"], answer.json()
            if answer.status_code == 400:
                assert found["error"]["param"] == "guided_json", found
                assert names_a_keyword(found["error"]["message"], schema), (schema, found)
                continue
            assert answer.status_code == 200, (schema, found)
            if found["choices"][0]["finish_reason"] == "stop":
                value = json.loads(found["choices"][0]["text"])
                jsonschema.validate(value, schema, kind, format_checker=kind.FORMAT_CHECKER)
                ended += 1
    return ended


def soon(llm: LLM) -> dict[str, int]:
    """A bias to what ends a text: most of the suite's schemas accept texts of any length."""
    assert llm.tokenizer is not None
    tokens = [id for text in ('"', "}", "]") for id in llm.tokenizer.encode_bare(text)]
    return {str(id): 20 for id in (*tokens, *llm.engine.intake.limits.eos_token_ids)}


# Keywords that llguidance does not know.
REFUSED = (
    "$dynamicAnchor", "$dynamicRef", "contains", "dependentRequired", "dependentSchemas", "else", "if", "maxContains",
    "minContains", "not", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties", "uniqueItems",
)  # fmt: skip


def names_a_keyword(message: str, schema: Any) -> bool:
    """Whether an error says which part of a schema it does not take."""
    text = json.dumps(schema)
    if "satisfiable" in message:
        return "false" in text
    # The metaschema itself has keywords that are refused.
    known = [f'"{word}"' for word in REFUSED if f'"{word}"' in text or "json-schema.org/draft" in text]
    others = (
        "oneOf constraints",
        "Unknown format: ",
        "not present in a registry",
        "patternProperty",
        "multipleOf",
        "for 'm",
    )
    return any(word in message for word in (*known, *others))


def test_texts_of_schemas_are_valid(served: Served) -> None:
    assert checked(served, [s | COMPACT for s in SCHEMAS[3:33:6]], max_tokens=60) >= 9
    assert checked(served, SUITE[::24], max_tokens=60, logit_bias=soon(served.llm)) > 8


@pytest.mark.slow
@pytest.mark.parametrize(
    "drafts",
    [SpeculativeConfig("ngram", num_draft_tokens=3), pytest.param(None, marks=pytest.mark.soak)],
    ids=["drafts", "plain"],
)
def test_texts_of_many_schemas_are_valid(drafts: SpeculativeConfig | None) -> None:
    check_many(drafts, SUITE[1::24], 10)


@pytest.mark.soak
@pytest.mark.parametrize("drafts", [None, SpeculativeConfig("ngram", num_draft_tokens=3)], ids=["plain", "drafts"])
def test_texts_of_all_schemas_are_valid(drafts: SpeculativeConfig | None) -> None:
    check_many(drafts, SUITE, 300)


def check_many(drafts: SpeculativeConfig | None, suite: Sequence[dict[str, Any] | bool], num_random: int) -> None:
    rng = random.Random(2)
    schemas = [s | COMPACT for s in (*SCHEMAS, *(random_schema(rng) for _ in range(num_random)))]
    options: dict[str, Any] = {"device": "cpu", "max_running_requests": 32, "max_model_len": 256}
    with LLM("embedded", speculative=drafts, **options) as llm, serving(llm) as served:
        # Fractions of a second have as many digits as the model likes.
        assert checked(served, schemas, max_tokens=90) >= 2 * len(schemas) - 2
        assert checked(served, suite, max_tokens=60, logit_bias=soon(llm)) > len(suite) / 2
        assert (llm.engine.counters().accepted > 0) == (drafts is not None)


KEYWORDS = (
    "type", "enum", "const", "properties", "required", "additionalProperties", "patternProperties", "items",
    "prefixItems", "minItems", "maxItems", "anyOf", "oneOf", "allOf", "not", "$ref", "$defs", "pattern", "format",
    "minLength", "maxLength", "minimum", "maximum", "multipleOf", "x-guidance", "uniqueItems", "if", "$id", "$schema",
)  # fmt: skip
WORDS = ["string", "integer", "object", "array", "#", "#/$defs/a", "file:///etc/passwd", "(a|b)*", "[", "date"]
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.sampled_from([10**30, -1e300, 0.1, 2**63]), st.text(max_size=4),
    st.sampled_from(WORDS),
)  # fmt: skip
schemas = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from((*KEYWORDS, "a", "b")), inner, max_size=4)
    ),
    max_leaves=12,
)


def fuzz(served: Served, schema: Any) -> None:
    answer = served.post("/v1/completions", {"prompt": [5], "max_tokens": 2, "guided_json": schema}, timeout=60)
    assert answer.status_code in (200, 400), (schema, answer.text)
    if answer.status_code == 400:
        assert answer.json()["error"]["param"].startswith("guided_json"), answer.text


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schema=st.dictionaries(st.sampled_from(KEYWORDS), schemas, min_size=1, max_size=4))
def test_odd_schemas_are_taken_or_refused(schema: Any, served: Served) -> None:
    fuzz(served, schema)


@pytest.mark.slow
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schema=st.dictionaries(st.sampled_from(KEYWORDS), schemas, min_size=1, max_size=6))
def test_many_odd_schemas(schema: Any, served: Served) -> None:
    fuzz(served, schema)


def test_a_grammar_that_exceeds_a_limit_later_is_the_callers_error(served: Served) -> None:
    body = {"prompt": "x", "max_tokens": 9, "structured_outputs": {"grammar": MANY_RULES}}
    answer = served.post("/v1/completions", body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "structured_outputs", answer.text
    stream = served.post("/v1/completions", body | {"stream": True}).text
    assert '"invalid_request_error"' in stream and "cannot be followed any further" in stream


def test_fields_that_forbid_every_token_are_the_callers_error(served: Served) -> None:
    """Known before the request is queued, or after some of its output."""
    (g,) = served.post("/tokenize", {"prompt": "g"}).json()["tokens"]
    body = {"prompt": "x", "max_tokens": 9, "allowed_token_ids": [g]}
    answer = served.post("/v1/completions", body | {"bad_words": ["g"]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "allowed_token_ids"), answer.text
    for later in ({"bad_words": ["gg"]}, {"guided_regex": "gb"}):
        answer = served.post("/v1/completions", body | later)
        assert answer.status_code == 400 and "no token is left" in answer.text, answer.text
        stream = served.post("/v1/completions", body | later | {"stream": True}).text
        assert '"invalid_request_error"' in stream and "no token is left" in stream
