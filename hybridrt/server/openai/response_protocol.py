"""Bodies of /v1/responses."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from hybridrt.server.core.protocol import MAX_MESSAGES, Body, ListOf, Rested, Sampling, at_most, tag_of

MAX_METADATA = 1024  # OpenAI takes 16

LOGPROBS = "message.output_text.logprobs"  # what `include` may ask for


class InputText(Body):
    """A piece of a message's content. Output of an earlier response may be sent back as it is."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str


Texts = str | ListOf[InputText]


class InputMessage(Body):
    """One turn."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Texts


class FunctionCall(Body):
    """A call that the model has made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionCallOutput(Body):
    """What that call has returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: Texts


class ReasoningItem(Body):
    """What the model thought."""

    type: Literal["reasoning"]
    content: ListOf[InputText] | None = None


Item = Annotated[
    Annotated[InputMessage, Tag("tagged-message")]
    | Annotated[FunctionCall, Tag("tagged-function_call")]
    | Annotated[FunctionCallOutput, Tag("tagged-function_call_output")]
    | Annotated[ReasoningItem, Tag("tagged-reasoning")],
    Discriminator(
        tag_of("message"),
        custom_error_type="item_type",
        custom_error_message="type must be message, function_call, function_call_output or reasoning",
    ),
]


class FunctionTool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ReasoningOptions(Body):
    """How much to think."""

    effort: str | None = None


class TextFormat(Body):
    """What the text must look like."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextOptions(Body):
    """The text of the answer."""

    format: TextFormat | None = None


class ResponseRequest(Sampling):
    """/v1/responses"""

    input: str | Annotated[list[Rested[Item]], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: ListOf[FunctionTool] | None = None
    tool_choice: Any = None  # hybridrt.chat.conversation checks it
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    thinking_token_budget: int | None = None
    text: TextOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: Annotated[dict[str, str] | None, at_most(MAX_METADATA)] = None
    store: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    prompt: Any = None
    truncation: str | None = None
    top_logprobs: int | None = None
    include: ListOf[str] | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities are added to the text."""
        return LOGPROBS in (self.include or ())
