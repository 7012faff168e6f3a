"""The table of request fields: each row does what it says, and the forms of client libraries have no other fields."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybridrt.server.anthropic.message_protocol import CountRequest, MessageRequest
from hybridrt.server.core.protocol import Body, ChatRequest, CompletionRequest, Sampling
from hybridrt.server.core.request_fields import FORMS, ROWS, Row
from hybridrt.server.openai.embeddings import EmbeddingRequest
from hybridrt.server.openai.response_protocol import ResponseRequest
from scripts.field_table import document
from tests.server import test_fields
from tests.support.http_server import Served
from tests.support.levels import sweep

USER = [{"role": "user", "content": "Hello"}]
BASE: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "Hello", "max_tokens": 2, "seed": 1},
    "chat": {"messages": USER, "max_tokens": 2, "seed": 1},
    "responses": {"input": "Hello", "max_output_tokens": 2, "seed": 1, "store": False},
    "messages": {"messages": USER, "max_tokens": 2, "seed": 1},
    "count": {"messages": USER},
    "embeddings": {"input": "Hello"},
}
MODELS: dict[str, type[Body]] = {
    "completions": CompletionRequest, "chat": ChatRequest, "responses": ResponseRequest, "messages": MessageRequest,
    "count": CountRequest, "embeddings": EmbeddingRequest,
}  # fmt: skip
# Values where "x" has the wrong type.
VALUES: dict[str, Any] = {
    "n": 2, "logprobs": 1, "top_logprobs": 1, "prompt_logprobs": 1, "return_token_ids": True,
    "return_tokens_as_token_ids": True, "modalities": ["audio"],
    "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
}  # fmt: skip
# Fields of forms by their newest public definitions; those of OpenAI and Anthropic are compared with their packages.
VLLM: dict[str, str] = {
    "completions": """model prompt echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop
        stream stream_options suffix temperature top_p user use_beam_search top_k min_p repetition_penalty watermarking
        length_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens skip_special_tokens
        spaces_between_special_tokens truncate_prompt_tokens truncation_side allowed_token_ids prompt_logprobs
        logprob_token_ids bad_words prompt_embeds add_special_tokens response_format structured_outputs priority
        request_id session_id return_tokens_as_token_ids return_token_ids routed_experts_prompt_start
        return_token_offsets return_mm_kwargs mm_payload return_weight_versions cache_salt kv_transfer_params
        ec_transfer_params vllm_xargs repetition_detection thinking_token_budget stream_interval""",
    "chat": """messages model frequency_penalty logit_bias logprobs top_logprobs max_tokens max_completion_tokens n
        presence_penalty response_format seed stop stream stream_options temperature top_p tools tool_choice
        reasoning_effort thinking_token_budget include_reasoning parallel_tool_calls user use_beam_search top_k min_p
        repetition_penalty watermarking length_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens
        skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side prompt_logprobs
        logprob_token_ids allowed_token_ids bad_words echo add_generation_prompt continue_final_message
        add_special_tokens documents chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs
        structured_outputs priority request_id session_id return_tokens_as_token_ids return_token_ids
        routed_experts_prompt_start return_token_offsets return_prompt_text return_mm_kwargs mm_payload
        return_weight_versions cache_salt kv_transfer_params ec_transfer_params vllm_xargs repetition_detection
        stream_interval""",
    "responses": """background include input instructions max_output_tokens max_tool_calls metadata model logit_bias
        parallel_tool_calls previous_response_id prompt reasoning service_tier store stream temperature text
        tool_choice tools top_logprobs top_p top_k truncation user skip_special_tokens include_stop_str_in_output
        prompt_cache_key request_id mm_processor_kwargs priority cache_salt enable_response_messages
        previous_input_messages previous_response structured_outputs repetition_penalty seed stop ignore_eos
        vllm_xargs chat_template_kwargs ec_transfer_params frequency_penalty include_reasoning kv_transfer_params
        media_io_kwargs min_p mm_payload presence_penalty prompt_cache_options prompt_cache_retention return_mm_kwargs
        safety_identifier session_id spaces_between_special_tokens stop_token_ids watermarking""",
    "messages": """model messages max_tokens metadata output_config stop_sequences stream system temperature
        tool_choice tools top_k top_p kv_transfer_params chat_template_kwargs cache_salt ec_transfer_params mm_payload
        return_mm_kwargs thinking vllm_xargs watermarking""",
    "count": "model messages system tool_choice tools chat_template_kwargs output_config thinking",
    "embeddings": """model user truncate_prompt_tokens padding truncation_side request_id priority mm_processor_kwargs
        cache_salt input add_special_tokens encoding_format embed_dtype endianness dimensions use_activation messages
        add_generation_prompt continue_final_message chat_template chat_template_kwargs media_io_kwargs""",
}


def forms_of(row: Row, state: str) -> list[str]:
    return [form for form in FORMS if row.state(form) == state]


def ids(rows: list[Row]) -> list[str]:
    return [f"{row.name}-{'-'.join(row.refused.split() or row.ignored.split())}" for row in rows]


TOP = [row for row in ROWS if "." not in row.name]  # test_nested_fields has the others
REFUSED = [row for row in TOP if row.refused]
IGNORED = [row for row in TOP if row.ignored]


@pytest.mark.parametrize("row", sweep(REFUSED, 2), ids=ids(REFUSED))
def test_a_refused_field_is_refused_by_name(row: Row, served: Served) -> None:
    """And taken with each value that asks for nothing."""
    for form in forms_of(row, "refused"):
        answer = served.post(FORMS[form], BASE[form] | {row.name: VALUES.get(row.name, "x")})
        error = answer.json()["error"]
        assert answer.status_code == 400 and f"{row.name} is not supported here" in error["message"], answer.text
        if form in ("completions", "chat", "responses", "embeddings"):
            assert (error["param"], error["code"]) == (row.name, "unsupported")
        for value in (None, *row.neutral):
            answer = served.post(FORMS[form], BASE[form] | {row.name: value})
            assert answer.status_code == 200, answer.text


def said(answer: dict[str, Any]) -> Any:
    if "choices" in answer:
        return [{**choice} for choice in answer["choices"]]
    if "data" in answer:
        return answer["data"]
    items = answer.get("output", answer.get("content", [answer]))
    return [{name: value for name, value in item.items() if name != "id"} for item in items]


@pytest.mark.parametrize("row", sweep(IGNORED, 2), ids=ids(IGNORED))
def test_an_ignored_field_changes_nothing(row: Row, served: Served) -> None:
    for form in forms_of(row, "ignored"):
        plain = served.post(FORMS[form], BASE[form])
        answer = served.post(FORMS[form], BASE[form] | {row.name: "x"})
        assert answer.status_code == 200, answer.text
        assert said(answer.json()) == said(plain.json())


@pytest.mark.parametrize("form", FORMS)
def test_a_done_field_is_one_that_the_form_reads(form: str) -> None:
    """Each has a test of its effect (test_fields), but for those with tests of their own."""
    done = {row.name for row in TOP if row.state(form) == "done"}
    read = set(MODELS[form].model_fields) - (set(Sampling.model_fields) - {"model"} if form == "count" else set())
    known = {row.name for row in TOP if row.state(form)}
    assert done <= read and read <= known
    shared = {*test_fields.SAMPLED, *test_fields.SHARED, "user"}
    tested = {*test_fields.TABLES[FORMS[form]][1], *test_fields.WITHOUT_EFFECT.get(FORMS[form], ()), *shared}
    assert done <= tested


def test_no_field_is_in_two_rows_of_a_form() -> None:
    for form in FORMS:
        names = Counter(row.name for row in ROWS if row.state(form))
        assert not [name for name, count in names.items() if count > 1], form
    for row in ROWS:
        listed = [*row.done.split(), *row.ignored.split(), *row.refused.split()]
        assert listed and set(listed) <= set(FORMS) and len(listed) == len(set(listed)), row.name


def openai_forms() -> dict[str, Any]:
    from openai.types import completion_create_params as completions
    from openai.types import embedding_create_params as embeddings
    from openai.types.chat import completion_create_params as chat
    from openai.types.responses import response_create_params as responses

    return {
        "completions": completions.CompletionCreateParamsStreaming,
        "chat": chat.CompletionCreateParamsStreaming,
        "responses": responses.ResponseCreateParamsStreaming,
        "embeddings": embeddings.EmbeddingCreateParams,
    }


def anthropic_forms() -> dict[str, Any]:
    from anthropic.types.beta import message_count_tokens_params as count
    from anthropic.types.beta import message_create_params as messages

    return {"messages": messages.MessageCreateParamsStreaming, "count": count.MessageCountTokensParams}


@pytest.mark.parametrize("read", [openai_forms, anthropic_forms, lambda: VLLM], ids=["openai", "anthropic", "vllm"])
def test_every_field_of_a_form_has_a_row(read: Callable[[], dict[str, Any]]) -> None:
    for form, fields in read().items():
        names = fields.split() if isinstance(fields, str) else fields.__required_keys__ | fields.__optional_keys__
        missing = {name for name in names if not any(row.name == name and row.state(form) for row in ROWS)}
        assert not missing, (form, missing)


def test_the_page_is_made_of_the_table() -> None:
    """python scripts/field_table.py writes it."""
    assert (Path(__file__).parents[2] / "docs" / "request-fields.md").read_text() == document()
