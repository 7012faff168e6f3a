"""Bodies of completion and chat requests as records: a field of a wrong type is refused.

Unlisted fields are ignored, as in vLLM.

SamplingParams and the engine check the values themselves.
"""

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, FailFast, Field, Tag

from hybridrt.base.pace import rest
from hybridrt.base.sampling_params import MAX_BIASES

# Limit of one request: more would hold up other requests, and few models have room for as many.
MAX_MESSAGES = 16384
MAX_STRUCTURES = 64
MAX_TEMPLATE = 2**16  # characters
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class FirstError(FailFast):
    """Ends the check of a list: millions of errors would hold up all requests."""

    __hash__ = object.__hash__  # typing.Union compares its members


def _rested(value: Any) -> Any:
    rest()
    return value


T = TypeVar("T")
Rested = Annotated[T, BeforeValidator(_rested)]  # an element of a list that may be long
ListOf = Annotated[list[Rested[T]], FirstError()]
TokenIds = Annotated[list[TokenId], Field(max_length=2**24), FirstError()]


def at_most(entries: int) -> BeforeValidator:
    """For a dict: more entries are refused before each is checked."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > entries:
            raise ValueError(f"it has {len(value)} entries; pass at most {entries}")
        return value

    return BeforeValidator(check)


class Body(BaseModel):
    """A JSON object. No value is converted: "5" is no number, 5.0 no integer, 1 no bool."""

    model_config = ConfigDict(strict=True, extra="ignore")


def tag_of(default: str | None = None) -> Callable[[Any], str]:
    """Distinguishes members of a union for pydantic: Tag("tagged-X") is for objects whose `type` is
    X.

    Pydantic puts the tag into an error's place; messages leave out names that begin with "tagged-".

    Args:
        default: the type of an object that names none.
    """

    def tag(item: Any) -> str:
        kind = item.get("type", default) if isinstance(item, dict) else getattr(item, "type", None)
        return f"tagged-{kind}"

    return tag


class StreamOptions(Body):
    """What a stream tells in addition to text."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class JSONSchema(Body):
    """A schema, and what it is called. It always holds, whatever `strict` says."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class Structure(Body):
    """A tag within text, and the schema of what is in it."""

    begin: str
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    end: str


class ResponseFormat(Body):
    """Text of any form, a JSON object, JSON that a schema accepts, or text with tags."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JSONSchema | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")  # llama.cpp's place
    structures: Annotated[list[Structure], Field(max_length=MAX_STRUCTURES), FirstError()] | None = None
    triggers: Annotated[list[str], Field(max_length=MAX_STRUCTURES), FirstError()] | None = None
    format: Any = None  # xgrammar's newer form of structural tags (structural_tags.py)


class StructuredFields(Body):
    """vLLM's `structured_outputs`: exactly one of these is set."""

    model_config = ConfigDict(strict=True, extra="forbid")
    json_: str | dict[str, Any] | bool | None = Field(None, alias="json")
    regex: str | None = None
    choice: ListOf[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    # Further fields of vLLM's record; request_fields.py refuses the first four.
    disable_any_whitespace: Any = None
    disable_additional_properties: Any = None
    disable_fallback: Any = None
    whitespace_pattern: Any = None
    backend_: Any = Field(None, alias="_backend")
    backend_was_auto_: Any = Field(None, alias="_backend_was_auto")


class Sampling(Body):
    """Fields that all endpoints which generate share. None: the model's default (`LLM.default_sampling_params`)."""

    model_config = ConfigDict(strict=True, extra="allow")  # others would change the output
    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: str | ListOf[str] | None = None
    stop_token_ids: ListOf[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    min_tokens: int | None = None
    logit_bias: Annotated[dict[str, float] | None, at_most(MAX_BIASES)] = None
    allowed_token_ids: ListOf[int] | None = None
    bad_words: ListOf[str] | None = None
    prompt_logprobs: int | None = None
    cache_salt: str | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredFields | None = None
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: ListOf[str] | None = None
    guided_grammar: str | None = None
    seed: int | None = None
    n: int | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    request_id: Annotated[str | None, Field(pattern=r"^[\x21-\x7e]{1,128}$")] = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    resume_token_ids: ListOf[int] | None = None
    user: str | None = None


def _prompt_tag(prompt: Any) -> str | None:
    """Decides by the first entry, so that errors are about that member of `Prompts`."""
    if isinstance(prompt, str):
        return "tagged-text"
    if not isinstance(prompt, list):
        return None
    return "tagged-ids" if prompt and isinstance(prompt[0], (int, float)) else "tagged-list"


Prompts = Annotated[
    Annotated[str, Tag("tagged-text")]
    | Annotated[TokenIds, Tag("tagged-ids")]
    | Annotated[list[Rested[str | TokenIds]], Field(max_length=2**16), FirstError(), Tag("tagged-list")],
    Discriminator(
        _prompt_tag,
        custom_error_type="prompt_type",
        custom_error_message="Input should be a string, a list of token ids, or a list of either",
    ),
]


class CompletionRequest(Sampling):
    """/v1/completions"""

    prompt: Prompts
    logprob_token_ids: ListOf[int] | None = None
    echo: bool | None = False
    logprobs: int | None = None
    add_special_tokens: bool | None = True


class TextPart(Body):
    """A piece of a message's content."""

    type: Literal["text"]
    text: str


class NamedPart(Body):
    """A piece of a message's content, by the names of /v1/responses."""

    type: Literal["input_text", "output_text"]
    text: str


class RefusalPart(Body):
    """An assistant's refusal, which is text for the model."""

    type: Literal["refusal"]
    refusal: str


class OtherPart(Body):
    """A part that is no text. hybridrt.chat.conversation checks it: an image, or refused by name."""

    model_config = ConfigDict(strict=True, extra="allow")
    type: str


def part_tag(*texts: str) -> Callable[[Any], str]:
    """`tag_of` with one tag for all parts that are none of these texts."""
    tag = tag_of()

    def found(part: Any) -> str:
        kind = tag(part)
        return kind if kind.removeprefix("tagged-") in texts else "tagged-other"

    return found


Part = Annotated[
    Annotated[TextPart, Tag("tagged-text")]
    | Annotated[NamedPart, Tag("tagged-input_text")]
    | Annotated[NamedPart, Tag("tagged-output_text")]
    | Annotated[RefusalPart, Tag("tagged-refusal")]
    | Annotated[OtherPart, Tag("tagged-other")],
    Discriminator(part_tag("text", "input_text", "output_text", "refusal")),
]


class Message(BaseModel):
    """One turn of a conversation. Further fields reach the chat template as they are."""

    model_config = ConfigDict(strict=True, extra="allow")
    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | ListOf[Part] | None = None


Messages = Annotated[list[Rested[Message]], Field(min_length=1, max_length=MAX_MESSAGES), FirstError()]


class ChatFields(BaseModel):
    """What makes a prompt of a conversation; hybridrt.chat.conversation checks tools and tool_choice."""

    messages: Messages | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    thinking_token_budget: int | None = None
    chat_template: Annotated[str | None, Field(min_length=1, max_length=MAX_TEMPLATE)] = None
    add_generation_prompt: bool | None = None  # None: unless the last message is continued
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class ChatRequest(ChatFields, Sampling):
    """/v1/chat/completions"""

    messages: Messages
    max_completion_tokens: int | None = None
    include_reasoning: bool | None = True
    logprob_token_ids: ListOf[int] | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None


class TokenizeRequest(ChatFields, Body):
    """/tokenize: a prompt, or a conversation."""

    model_config = ConfigDict(strict=True, extra="allow")  # others would change the tokens
    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """/detokenize"""

    model: str | None = None
    tokens: TokenIds


class AbortRequest(Body):
    """/abort: the `id` of a response, or the `request_id` that its request set."""

    request_id: str
