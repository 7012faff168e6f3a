"""Every field of the request forms of OpenAI, Anthropic and vLLM: done, ignored, or refused by name.

This table decides (`refuse_fields`), and docs/request-fields.md is made of it
(scripts/field_table.py). A field that is in no row is ignored, as in vLLM.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel

from hybridrt.base.pace import with_rests
from hybridrt.server.wire.errors import APIError

# Paths by the short names that rows use.
FORMS = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "count": "/v1/messages/count_tokens",
    "embeddings": "/v1/embeddings",
}
_ALL = "completions chat responses messages count embeddings"
_MAKE = "completions chat responses messages"
_RUN = "completions chat responses messages embeddings"
_TALK = "chat responses messages count"
_OPENAI = "completions chat responses"
_CLAUDE = "messages count"
# Values of a refused field that ask for nothing.
_NEUTRAL: tuple[Any, ...] = (None, [], {}, False, 0, "")


@dataclass(frozen=True)
class Row:
    """A field, and the forms in which it is done, ignored or refused.

    Attributes:
        note: what it does, why it cannot matter, or what to do instead.
        neutral: values that are taken where the field is refused, in addition to those that ask
            for nothing. Of an object, values by key.
    """

    name: str
    note: str
    done: str = ""
    ignored: str = ""
    refused: str = ""
    neutral: tuple[Any, ...] = ()

    def state(self, form: str) -> str:
        """done, ignored, refused, or nothing."""
        return next((s for s in ("done", "ignored", "refused") if form in getattr(self, s).split()), "")


def _done(forms: str, **notes: str) -> tuple[Row, ...]:
    return tuple(Row(name, note, done=forms) for name, note in notes.items())


def _ignored(forms: str, **notes: str) -> tuple[Row, ...]:
    return tuple(Row(name, note, ignored=forms) for name, note in notes.items())


def _refused(forms: str, **notes: str) -> tuple[Row, ...]:
    return tuple(Row(name, note, refused=forms) for name, note in notes.items())


def _within(parent: str, *rows: Row) -> tuple[Row, ...]:
    """Rows of the fields of a field, or of each entry of a list."""
    return tuple(replace(row, name=f"{parent}.{row.name}") for row in rows)


_DONE = (
    *_done(_ALL, model="a name of the model; it may be left out"),
    *_done("completions", prompt="text, token ids, or a list of either", echo="the prompt before the text"),
    *_done("chat messages count", messages="the conversation"),
    *_done("responses", input="text, or items", instructions="the system prompt"),
    *_done("embeddings", input="text, token ids, or a list of either", encoding_format="float or base64"),
    *_done("embeddings", dimensions="the first so many numbers", pooling="last or mean; this server's own"),
    *_done("embeddings", normalize="false: not to length 1", use_activation="vLLM's name of normalize"),
    *_done(_CLAUDE, system="the system prompt", thinking="on, off, and the budget of models with tags of reasoning"),
    *_done(_CLAUDE, output_config="effort and format", output_format="the older name of output_config.format"),
    *_done("chat responses messages count", tools="functions; of OpenAI also custom tools"),
    *_done(_TALK, tool_choice="auto, none, required or one; of OpenAI also allowed_tools"),
    *_done("chat responses", parallel_tool_calls="false: one call an answer"),
    *_done("chat", reasoning_effort="for the chat template"),
    *_done(
        "chat responses", thinking_token_budget="tokens of reasoning", include_reasoning="false: reasoning is left out"
    ),
    *_done("responses", reasoning="effort; a summary is not made", text="format"),
    *_done("responses", include="message.output_text.logprobs"),
    *_done("responses", store="false: the response is not kept", previous_response_id="continues a kept response"),
    *_done("responses", background="true: answered at once; GET the response until it has ended"),
    *_done("responses", truncation="auto: the beginning of a long input is dropped"),
    *_done("responses", metadata="repeated in the response", user="repeated in the response"),
    *_done(_TALK, chat_template_kwargs="variables of the chat template"),
    *_done("chat", add_generation_prompt="as in vLLM", continue_final_message="as in vLLM"),
    *_done("completions chat responses messages", max_tokens="tokens of the answer"),
    *_done("chat", max_completion_tokens="tokens of the answer"),
    *_done("responses", max_output_tokens="tokens of the answer"),
    *_done("messages", stop_sequences="texts that end the answer"),
    *_done(_MAKE, stop="texts that end the answer", stop_token_ids="ids of tokens that end the answer"),
    *_done(_MAKE, include_stop_str_in_output="keeps that text", ignore_eos="goes on after the end of sequence"),
    *_done(_MAKE, min_tokens="of the answer, at least", skip_special_tokens="false: special tokens are text"),
    *_done(_MAKE, temperature="0 is greedy", top_p="nucleus", top_k="likeliest tokens"),
    *_done(_MAKE, min_p="least probability of a token, as a share of the likeliest one's"),
    *_done(_MAKE, repetition_penalty="of prompt and output", presence_penalty="of output"),
    *_done(_MAKE, frequency_penalty="of output"),
    *_done(_MAKE, logit_bias="added to logits", allowed_token_ids="no other tokens", bad_words="never written"),
    *_done(_MAKE, seed="the same seed gives the same output"),
    *_done(_RUN, truncate_prompt_tokens="the last tokens are kept"),
    *_done(_MAKE, stream="server-sent events", stream_options="usage; only with stream"),
    *_done(_RUN, request_id="names the request for /abort", priority="a lower number is started first"),
    *_done(_RUN, cache_salt="separates cached prefixes"),
    *_done(_MAKE, response_format="text, json_object, json_schema or structural_tag", structured_outputs="vLLM's form"),
    *_done(_MAKE, guided_json="a schema", guided_regex="an expression", guided_choice="texts", guided_grammar="Lark"),
    Row("n", "samples; an answer here is one sample", "completions chat", refused="responses messages", neutral=(1,)),
    Row("logprobs", "of the answer's tokens; an option of /v1/chat/completions", "completions chat", "",
        "responses messages"),
    Row("top_logprobs", "alternatives; an option of /v1/chat/completions", "chat responses", "",
        "completions messages"),
    Row("prompt_logprobs", "of the prompt; an option of /v1/chat/completions", "completions chat", "",
        "responses messages"),
    Row("logprob_token_ids", "with logprobs: these tokens instead of the likeliest; an option of /v1/chat/completions",
        "completions chat", "", "responses messages"),
    Row("return_token_ids", "tokens of prompt and answer; an option of /v1/chat/completions", "completions chat", "",
        "responses messages"),
    *_done(_MAKE, resume_token_ids="first tokens of an answer that was cut; the rest alone comes"),
    Row("return_tokens_as_token_ids", "token_id:5 for a token's text", "completions chat", "", "responses messages"),
    Row("add_special_tokens", "of the prompt's text; a chat template writes them itself", "completions embeddings", "",
        "chat"),
)  # fmt: skip
_IGNORED = (
    *_ignored("completions chat messages count embeddings", user="answers do not depend on it"),
    *_ignored(_CLAUDE, metadata="answers do not depend on it"),
    *_ignored("chat", metadata="it belongs to stored chats", store="chats are not stored"),
    *_ignored("chat responses messages", service_tier="there is one"),
    *_ignored("chat responses", safety_identifier="answers do not depend on it", moderation="nothing is moderated"),
    *_ignored(
        "chat responses", prompt_cache_key="every prompt is cached", prompt_cache_options="every prompt is cached"
    ),
    *_ignored("chat responses", prompt_cache_retention="every prompt is cached"),
    *_ignored("chat", prediction="it only makes an answer faster"),
    *_ignored("responses", max_tool_calls="it bounds OpenAI's own tools", access_programs="there are none"),
    *_ignored("responses", background_options="answers do not depend on it", image="images are parts of the input"),
    *_ignored(_CLAUDE, cache_control="every prompt is cached", speed="answers do not depend on it"),
    *_ignored(_CLAUDE, user_profile_id="answers do not depend on it", workspace_id="answers do not depend on it"),
    *_ignored(_CLAUDE, betas="a form of the client's alone"),
    *_ignored("messages", inference_geo="there is one place", diagnostics="none are made"),
    *_ignored(_CLAUDE, billing_policy="nothing is billed"),
    *_ignored("messages", fallbacks="there is one model"),
    *_ignored("messages", fallback_credit_token="there is one model"),
    *_ignored("completions chat", length_penalty="it goes with beam search"),
    *_ignored(_OPENAI, session_id="prefixes are found by their text"),
    *_ignored(_OPENAI, spaces_between_special_tokens="tokenizers add none"),
    *_ignored("embeddings", add_generation_prompt="of messages", continue_final_message="of messages"),
    *_ignored("embeddings", chat_template="of messages", chat_template_kwargs="of messages"),
    *_ignored("completions chat", stream_interval="a chunk comes when its tokens do"),
    *_ignored("completions chat", routed_experts_prompt_start="experts are not told"),
    *_ignored("completions chat", return_token_offsets="of render endpoints"),
    *_ignored(_MAKE, mm_payload="of render endpoints", return_mm_kwargs="of render endpoints"),
)
_REFUSED = (
    Row("mm_processor_kwargs", "pixels of images are limited by the checkpoint; detail low takes fewer", "",
        "embeddings", _OPENAI),
    Row("media_io_kwargs", "images are decoded in one way", "", "embeddings", _OPENAI),
    *_refused("completions", suffix="the models continue text, they do not fill gaps"),
    Row("best_of", "use n for several samples", refused=_MAKE, neutral=(1,)),
    *_refused("completions chat", use_beam_search="use n for several samples"),
    *_refused("chat", functions="use tools", function_call="use tool_choice", echo="leave it out"),
    Row("modalities", "only text is produced", refused="completions chat", neutral=(["text"],)),
    *_refused("completions chat", audio="only text is produced", documents="write them into a message"),
    *_refused(_MAKE, web_search_options="this server does not search; give the model a tool"),
    Row("verbosity", "ask for it in a message", refused="chat", neutral=("medium",)),
    *_refused("responses", conversation="use previous_response_id", prompt="send instructions and input"),
    Row("context_management", "shorten the conversation yourself", refused="responses messages count",
        neutral=({"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]})),
    *_refused("responses", previous_input_messages="send them as input", previous_response="send its items as input"),
    *_refused("responses", enable_response_messages="POST /tokenize gives the prompt's tokens"),
    *_refused(_CLAUDE, mcp_servers="this server calls no others; give the model a tool", thread="send the messages"),
    *_refused(_CLAUDE, container="this server runs no code", compaction="shorten the conversation yourself"),
    Row("chat_template", "start the server with --request-chat-templates, or --chat-template", "chat", "",
        "responses messages count"),
    *_refused("completions", prompt_embeds="send text or token ids", thinking_token_budget="it is a field of chats"),
    Row("truncation_side", "the end of the prompt is kept, as with left", refused=_RUN, neutral=("left",)),
    *_refused("embeddings", messages="send input"),
    Row("padding", "prompts are not padded", refused="embeddings", neutral=("do_not_pad",)),
    Row("embed_dtype", "numbers are float32", refused="embeddings", neutral=("float32",)),
    Row("endianness", "the least byte comes first", refused="embeddings", neutral=("native", "little")),
    *_refused(_MAKE, repetition_detection="lower max_tokens, or set frequency_penalty"),
    *_refused(_MAKE, watermarking="texts are not marked", structural_tag="use response_format"),
    *_refused(_MAKE, kv_transfer_params="the engine's own transfer is set up with the server"),
    *_refused(_MAKE, ec_transfer_params="there are no encoders", vllm_xargs="there are no plugins of vLLM"),
    *_refused("completions chat", return_weight_versions="weights do not change while the server runs"),
    *_refused("completions chat", return_prompt_text="POST /tokenize gives the prompt's tokens"),
    *_refused(_MAKE, logits_processors="logit_bias, bad_words and allowed_token_ids change logits"),
    *_refused(_MAKE, guided_decoding_backend="there is one"),
    *_refused(_MAKE, guided_whitespace_pattern='set "x-guidance" in the schema'),
    # Of SGLang and llama.cpp.
    *_refused(_MAKE, custom_logit_processor="logit_bias, bad_words and allowed_token_ids change logits"),
    *_refused(_MAKE, custom_params="there are no processors of logits", lora_path="there are no adapters"),
    *_refused(_MAKE, regex="use guided_regex", ebnf="use guided_grammar", stop_regex="stop takes texts"),
    *_refused(_MAKE, no_stop_trim="use include_stop_str_in_output", grammar="use guided_grammar"),
    *_refused(_MAKE, json_schema="use response_format or guided_json"),
    Row("n_predict", "use max_tokens", refused=_MAKE, neutral=(-1,)),
    *_refused(_MAKE, mirostat="use top_p or min_p", xtc_probability="use temperature"),
    Row("typical_p", "use top_p or min_p", refused=_MAKE, neutral=(1,)),
    *_refused(_MAKE, dry_multiplier="use frequency_penalty", dynatemp_range="use temperature"),
    Row("repeat_penalty", "use repetition_penalty", refused=_MAKE, neutral=(1,)),
    Row("top_n_sigma", "use top_p or min_p", refused=_MAKE, neutral=(-1,)),
    *_refused(_MAKE, samplers="filters have one order", return_hidden_states="POST /v1/embeddings gives vectors"),
    *_refused("completions chat", input_embeds="send text or token ids", n_probs="use logprobs"),
)  # fmt: skip
# Fields of fields that are done, one level deep, and those of functions and of parts of messages.
_NESTED = (
    *_within(
        "stream_options",
        Row("include_usage", "the usage comes at the end anyway", "completions chat", "responses messages"),
        Row("continuous_usage_stats", "the usage comes at the end", "completions chat", "responses messages"),
        *_ignored(_OPENAI, include_obfuscation="events are not padded"),
    ),
    *_within("messages", *_done("chat messages count", role="the turn's", content="text, or parts")),
    *_within(
        "messages",
        *_done("chat", name="for the chat template", tool_calls="of an earlier answer", tool_call_id="which one ran"),
        *_done("chat", reasoning="of an earlier answer", reasoning_content="the same", refusal="for the chat template"),
        *_refused("chat", audio="only text is produced", function_call="use tool_calls"),
        Row("clear_at", "leave the message out later on", refused=_CLAUDE, neutral=("never",)),
        *_refused(_CLAUDE, output_config="set it for the request"),
    ),
    *_within(
        "messages.content",
        *_done("chat messages count", type="text and image; others are refused by name", text="of a part"),
        *_done("chat", refusal="text of an earlier answer", image_url="address, and detail"),
        *_done(_CLAUDE, source="of an image or a document", title="before the text", context="before the text"),
        *_done(_CLAUDE, content="of a result, or of a document", thinking="of an earlier answer"),
        *_done(_CLAUDE, id="of a call", name="of a call", input="of a call", tool_use_id="which call has ended"),
        *_ignored(_CLAUDE, cache_control="every prompt is cached", signature="it is not checked"),
        *_ignored(_CLAUDE, data="what another model has thought, encrypted", caller="the model calls tools itself"),
        *_ignored(_CLAUDE, is_error="the content says what went wrong"),
        *_ignored(_CLAUDE, toolset_name="calls are known by their ids"),
        *_ignored("chat", prompt_cache_breakpoint="every prompt is cached"),
        *_refused(_CLAUDE, transformations="send the image as it is to be seen"),
        Row("citations", "answers cite nothing", refused=_CLAUDE, neutral=({"enabled": False},)),
    ),
    *_within(
        "system",
        *_done(_CLAUDE, type="text", text="of a part"),
        *_ignored(_CLAUDE, cache_control="every prompt is cached", citations="of an earlier answer"),
    ),
    *_within(
        "response_format",
        *_done(_MAKE, type="text, json_object, json_schema or structural_tag", json_schema="name, schema, strict"),
        *_done(_MAKE, schema="of json_object", structures="tags, and their schemas", triggers="what begins a tag"),
        *_done(_MAKE, format="triggered_tags of JSON schemas, vLLM's newer form of tags"),
    ),
    *_within(
        "structured_outputs",
        *_done(_MAKE, json="a schema", regex="an expression", choice="texts", grammar="Lark", json_object="an object"),
        *_done(_MAKE, structural_tag="JSON text of such a response_format"),
        *_refused(_MAKE, disable_any_whitespace='set "x-guidance" in the schema', disable_fallback="there is none"),
        *_refused(_MAKE, disable_additional_properties="say it in the schema"),
        *_refused(_MAKE, whitespace_pattern='set "x-guidance" in the schema'),
        *_ignored(_MAKE, _backend="of vLLM's own", _backend_was_auto="of vLLM's own"),
    ),
    *_within(
        "tools",
        *_done(_TALK, type="function; of OpenAI also custom"),
        *_done("chat", function="the definition", custom="the definition"),
        *_done("responses messages count", name="its name", description="what it does", strict="arguments follow"),
        *_done("responses", parameters="a schema", format="text, or a grammar", tools="of a namespace"),
        *_done(_CLAUDE, input_schema="a schema", input_examples="the model reads them after the description"),
        *_ignored(_TALK, defer_loading="all tools are there from the beginning"),
        *_ignored("responses messages count", allowed_callers="the model calls tools itself"),
        *_ignored("responses", output_schema="outputs are not checked", **{"async": "the client decides when it runs"}),
        *_ignored(_CLAUDE, cache_control="every prompt is cached", eager_input_streaming="all arguments are streamed"),
    ),
    *_within(
        "tools.function",
        *_done("chat", name="its name", description="what it does", parameters="a schema", strict="arguments follow"),
        *_done("chat", defer_loading="for the chat template"),
    ),
    *_within("tools.custom", *_done("chat", name="its name", description="what it does", format="text, or a grammar")),
    *_within(
        "tool_choice",
        *_done(_TALK, type="which kind of choice"),
        *_done("chat", function="which one", custom="which one", allowed_tools="which ones"),
        *_done("responses messages count", name="which one"),
        *_done("responses", mode="auto or required", tools="which ones"),
        *_done(_CLAUDE, disable_parallel_tool_use="true: one call an answer"),
        *_refused("responses", server_label="this server calls no others"),
    ),
    *_within(
        "input",
        *_done("responses", type="the kind of item", role="of a message", content="of a message, or reasoning"),
        *_done("responses", name="of a call", arguments="of a call", input="of a call of a custom tool"),
        *_done("responses", call_id="which call", output="of a call", summary="reasoning, if content has none"),
        *_done("responses", id="of an item_reference", namespace="of the called tool"),
        *_ignored("responses", status="items are complete", phase="of OpenAI's models", caller="the model itself"),
        *_ignored("responses", encrypted_content="of OpenAI's models", **{"async": "the output is there"}),
    ),
    *_within(
        "input.content",
        *_done("responses", type="text and image; others are refused by name", text="of a part", refusal="the same"),
        *_done("responses", image_url="of an image", detail="low takes fewer pixels"),
        *_refused("responses", file_id="pass image_url"),
        *_ignored("responses", annotations="of an earlier answer", logprobs="of an earlier answer"),
        *_ignored("responses", prompt_cache_breakpoint="every prompt is cached"),
    ),
    *_within(
        "reasoning",
        *_done("responses", effort="for the chat template"),
        *_ignored("responses", summary="reasoning comes as it is", generate_summary="reasoning comes as it is"),
        Row("context", "the chat template decides", refused="responses", neutral=("auto",)),
        Row("mode", "there is one", refused="responses", neutral=("standard",)),
    ),
    *_within(
        "text",
        *_done("responses", format="text, json_object or json_schema"),
        Row("verbosity", "ask for it in a message", refused="responses", neutral=("medium",)),
    ),
    *_within(
        "output_config",
        *_done(_CLAUDE, effort="for the chat template", format="a schema"),
        *_refused(_CLAUDE, task_budget="use max_tokens"),
    ),
    *_within(
        "thinking",
        *_done(_CLAUDE, type="enabled, disabled or adaptive"),
        Row("budget_tokens", "of models with tags of reasoning", done="messages", ignored="count"),
        Row("display", "omitted: blocks of thinking are empty", done="messages", ignored="count"),
        *_ignored(_CLAUDE, block_binding="signatures are not checked"),
    ),
    *_within("output_format", *_done(_CLAUDE, type="json_schema", schema="what the text looks like")),
)  # fmt: skip
ROWS = (*_DONE, *_IGNORED, *_REFUSED, *_NESTED)
_BY_FORM = {form: {row.name: row for row in ROWS if row.state(form) == "refused"} for form in FORMS}
_BY_FIRST = {form: dict[str, list[Row]]() for form in FORMS}  # by a body's own fields, of which few are given
for _form, _rows in _BY_FORM.items():
    for _row in _rows.values():
        _BY_FIRST[_form].setdefault(_row.name.partition(".")[0], []).append(_row)


def refused_in(form: str) -> frozenset[str]:
    """The fields that a form refuses."""
    return frozenset(_BY_FORM[form])


def refuse_fields(form: str, body: BaseModel) -> None:
    """APIError for a field of a body that this form refuses by name."""
    refuse_values(form, body.__dict__ | (body.model_extra or {}))


def refuse_values(form: str, given: Mapping[str, Any]) -> None:
    """APIError for a field of `given`, by name, that this form refuses."""
    for first, rows in _BY_FIRST[form].items():
        if (field := given.get(first)) is None:
            continue
        for row in rows:
            for value in _values(field, row.name.split(".")[1:]):
                plain = value.model_dump(exclude_none=True) if isinstance(value, BaseModel) else value
                if plain not in (*_NEUTRAL, *row.neutral):
                    raise APIError(400, f"{row.name} is not supported here: {row.note}", row.name, "unsupported")


def _values(value: Any, names: Sequence[str]) -> Iterator[Any]:
    """Values of a field of fields; each entry of a list may have one."""
    if not names:
        yield value
    elif isinstance(value, list):
        for entry in with_rests(value):
            yield from _values(entry, names)
    else:
        fields, more = (value.__dict__, value.model_extra) if isinstance(value, BaseModel) else (value, None)
        for each in (fields, more):
            if isinstance(each, dict) and names[0] in each:
                yield from _values(each[names[0]], names[1:])
