"""Bodies of /v1/responses."""

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from hybridrt.server.core.protocol import (
    MAX_MESSAGES,
    Body,
    FirstError,
    ListOf,
    OtherPart,
    Rested,
    Sampling,
    at_most,
    part_tag,
    tag_of,
)

MAX_METADATA = 64  # entries; OpenAI takes 16, with the same lengths
MAX_USER = 4096  # characters
Metadata = dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]]

# OpenAI's tools that a local server cannot run, and the items of history that they leave. Both are left out.
BUILT_IN_TOOLS = frozenset({
    "apply_patch", "code_interpreter", "computer", "computer_use_preview", "file_search", "image_generation",
    "local_shell", "mcp", "programmatic_tool_calling", "shell", "tool_search", "web_search", "web_search_2025_08_26",
    "web_search_preview", "web_search_preview_2025_03_11",
})  # fmt: skip
BUILT_IN_ITEMS = frozenset({
    "apply_patch_call", "apply_patch_call_output", "code_interpreter_call", "compaction", "computer_call",
    "computer_call_output", "file_search_call", "image_generation_call", "local_shell_call", "local_shell_call_output",
    "mcp_approval_request", "mcp_approval_response", "mcp_call", "mcp_list_tools", "program", "program_output",
    "shell_call", "shell_call_output", "tool_search_call", "tool_search_output", "web_search_call",
})  # fmt: skip
LOGPROBS = "message.output_text.logprobs"  # what `include` may ask for


class InputText(Body):
    """A piece of a message's content. Output of an earlier response may be sent back as it is."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str


_kinds = part_tag("input_text", "output_text", "text", "reasoning_text", "summary_text")


Texts = str | ListOf[InputText]
Contents = (
    str
    | ListOf[
        Annotated[
            Annotated[InputText, Tag("tagged-text")] | Annotated[OtherPart, Tag("tagged-other")],
            Discriminator(lambda part: "tagged-other" if _kinds(part) == "tagged-other" else "tagged-text"),
        ]
    ]
)


class InputMessage(Body):
    """One turn."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Contents


class FunctionCall(Body):
    """A call that the model has made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


class FunctionCallOutput(Body):
    """What that call has returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: Contents


class CustomCall(Body):
    """A call of a custom tool that the model has made."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    input: str


class CustomCallOutput(Body):
    """What that call has returned."""

    type: Literal["custom_tool_call_output"]
    call_id: str
    output: Contents


class ItemReference(Body):
    """An item of a stored response."""

    type: Literal["item_reference"] | None = None  # OpenAI's clients may leave it out
    id: str


class BuiltIn(Body):
    """A tool of BUILT_IN_TOOLS, or an item of BUILT_IN_ITEMS."""

    type: str


class ReasoningItem(Body):
    """What the model thought."""

    type: Literal["reasoning"]
    content: ListOf[InputText] | None = None
    summary: ListOf[InputText] | None = None  # all that another server may have sent


def _tag_or(built_in: frozenset[str], default: str | None = None) -> Callable[[Any], str]:
    """`tag_of` with one tag for all built-in kinds."""
    tag = tag_of(default)

    def found(item: Any) -> str:
        if isinstance(item, dict) and item.get("type") is None and item.keys() - {"type"} == {"id"}:
            return "tagged-item_reference"
        kind = tag(item)
        return "tagged-built-in" if kind.removeprefix("tagged-") in built_in else kind

    return found


Item = Annotated[
    Annotated[InputMessage, Tag("tagged-message")]
    | Annotated[FunctionCall, Tag("tagged-function_call")]
    | Annotated[FunctionCallOutput, Tag("tagged-function_call_output")]
    | Annotated[CustomCall, Tag("tagged-custom_tool_call")]
    | Annotated[CustomCallOutput, Tag("tagged-custom_tool_call_output")]
    | Annotated[ItemReference, Tag("tagged-item_reference")]
    | Annotated[ReasoningItem, Tag("tagged-reasoning")]
    | Annotated[BuiltIn, Tag("tagged-built-in")],
    Discriminator(
        _tag_or(BUILT_IN_ITEMS, "message"),
        custom_error_type="item_type",
        custom_error_message="type must be message, function_call, function_call_output, custom_tool_call, "
        "custom_tool_call_output, item_reference, reasoning or one of OpenAI's own tools",
    ),
]
Items = Annotated[list[Rested[Item]], Field(min_length=1, max_length=MAX_MESSAGES), FirstError()]


class FunctionTool(Body):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomTool(Body):
    """A tool that takes one text. hybridrt.chat.tools checks its format."""

    type: Literal["custom"]
    name: str
    description: str | None = None
    format: dict[str, Any] | None = None


class NamespaceTool(Body):
    """Tools under a common name, such as those of one MCP server."""

    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: ListOf[
        Annotated[
            Annotated[FunctionTool, Tag("tagged-function")] | Annotated[CustomTool, Tag("tagged-custom")],
            Discriminator(
                tag_of(), custom_error_type="tool_type", custom_error_message="type must be function or custom"
            ),
        ]
    ]


def name_within(namespace: str | None, name: str) -> str:
    """What the model calls a tool of a namespace; None: of no namespace."""
    return name if namespace is None else f"{namespace.rstrip('_')}__{name}"


ResponseTool = Annotated[
    Annotated[FunctionTool, Tag("tagged-function")]
    | Annotated[CustomTool, Tag("tagged-custom")]
    | Annotated[NamespaceTool, Tag("tagged-namespace")]
    | Annotated[BuiltIn, Tag("tagged-built-in")],
    Discriminator(
        _tag_or(BUILT_IN_TOOLS),
        custom_error_type="tool_type",
        custom_error_message="type must be function, custom, namespace or one of OpenAI's own tools",
    ),
]


class ReasoningOptions(Body):
    """How much to think."""

    effort: str | None = None
    context: Any = None  # request_fields.py refuses this and the next one
    mode: Any = None


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
    verbosity: Any = None  # request_fields.py refuses it


class ResponseRequest(Sampling):
    """/v1/responses"""

    input: str | Items
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: ListOf[ResponseTool] | None = None
    tool_choice: Any = None  # hybridrt.chat.conversation checks it
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    include_reasoning: bool | None = True
    thinking_token_budget: int | None = None
    text: TextOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    metadata: Annotated[Metadata | None, at_most(MAX_METADATA)] = None
    user: Annotated[str | None, Field(max_length=MAX_USER)] = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    truncation: Literal["auto", "disabled"] | None = None
    top_logprobs: int | None = None
    include: ListOf[str] | None = None

    @property
    def own_tools(self) -> list[FunctionTool | CustomTool]:
        """The tools that the client runs, as the model sees them."""
        return [own for tool in self.tools or () for own in _flat(tool)]

    @property
    def namespaces(self) -> dict[str, tuple[str, str]]:
        """Namespace and own name of each tool in a namespace, by the model's name for it."""
        spaces = [tool for tool in self.tools or () if isinstance(tool, NamespaceTool)]
        return {name_within(each.name, tool.name): (each.name, tool.name) for each in spaces for tool in each.tools}

    @property
    def is_stored(self) -> bool:
        """Whether the response is kept, as at OpenAI unless the request says otherwise."""
        return self.store is not False

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities are added to the text."""
        return LOGPROBS in (self.include or ())


def _flat(tool: FunctionTool | CustomTool | NamespaceTool | BuiltIn) -> list[FunctionTool | CustomTool]:
    if isinstance(tool, NamespaceTool):
        return [
            own.model_copy(
                update={
                    "name": name_within(tool.name, own.name),
                    "description": "\n".join(filter(None, (own.description, tool.description))) or None,
                }
            )
            for own in tool.tools
        ]
    return [] if isinstance(tool, BuiltIn) else [tool]


class StoredItems(Body):
    """Items of earlier responses."""

    input: ListOf[Item]
