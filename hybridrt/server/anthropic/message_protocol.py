"""Bodies of /v1/messages."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from hybridrt.base.errors import shown
from hybridrt.server.core.protocol import MAX_MESSAGES, Body, FirstError, ListOf, Rested, Sampling, TextPart, tag_of


class PlainSource(Body):
    """A document as text."""

    type: Literal["text"]
    data: str


class PartsSource(Body):
    """A document as parts of text."""

    type: Literal["content"]
    content: str | ListOf[TextPart]


Source = Annotated[
    Annotated[PlainSource, Tag("tagged-text")] | Annotated[PartsSource, Tag("tagged-content")],
    Discriminator(
        tag_of(),
        custom_error_type="source_type",
        custom_error_message="the source of a document must be text or content: this server reads no files and no "
        "addresses",
    ),
]


class Citations(Body):
    """Whether the answer should cite: it does not."""

    enabled: Literal[False] | None = None


class Document(Body):
    """A text with a title. The model reads it as text."""

    type: Literal["document"]
    source: Source
    title: str | None = None
    context: str | None = None
    citations: Citations | None = None

    @property
    def text(self) -> str:
        """Title and context before the text, an empty line after each."""
        source = self.source
        content = source.data if isinstance(source, PlainSource) else source.content
        body = content if isinstance(content, str) else "\n".join(part.text for part in content)
        return "\n\n".join(part for part in (self.title, self.context, body) if part)


class SearchResult(Body):
    """What a search of the client has found. The model reads it as text."""

    type: Literal["search_result"]
    source: str
    title: str
    content: ListOf[TextPart]
    citations: Citations | None = None

    @property
    def text(self) -> str:
        """Title and source before the text."""
        return "\n\n".join([f"{self.title}\n{self.source}", *(part.text for part in self.content)])


class ImageBlock(Body):
    """An image. hybridrt.chat.conversation checks what becomes of its source."""

    type: Literal["image"]
    source: dict[str, Any]
    transformations: Any = None  # request_fields.py refuses it


TextBlock = Annotated[
    Annotated[TextPart, Tag("tagged-text")]
    | Annotated[Document, Tag("tagged-document")]
    | Annotated[SearchResult, Tag("tagged-search_result")]
    | Annotated[ImageBlock, Tag("tagged-image")],
    Discriminator(
        tag_of(),
        custom_error_type="block_type",
        custom_error_message="type must be text, image, document or search_result",
    ),
]
TEXTS = (TextPart, Document, SearchResult)


class ToolUse(Body):
    """A call that the model has made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResult(Body):
    """What that call has returned."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | ListOf[TextBlock] | None = None
    is_error: bool | None = None


class Thinking(Body):
    """What the model thought."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinking(Body):
    """What another model thought, encrypted. It is left out."""

    type: Literal["redacted_thinking"]


Block = Annotated[
    Annotated[TextPart, Tag("tagged-text")]
    | Annotated[Document, Tag("tagged-document")]
    | Annotated[SearchResult, Tag("tagged-search_result")]
    | Annotated[ImageBlock, Tag("tagged-image")]
    | Annotated[ToolUse, Tag("tagged-tool_use")]
    | Annotated[ToolResult, Tag("tagged-tool_result")]
    | Annotated[Thinking, Tag("tagged-thinking")]
    | Annotated[RedactedThinking, Tag("tagged-redacted_thinking")],
    Discriminator(
        tag_of(),
        custom_error_type="block_type",
        custom_error_message="type must be text, image, document, search_result, tool_use, tool_result, thinking or "
        "redacted_thinking",
    ),
]


class MessageTurn(Body):
    """One turn."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | ListOf[Block]
    clear_at: Any = None  # request_fields.py refuses this and the next one
    output_config: Any = None


def _of_client(kind: Any) -> Any:
    if isinstance(kind, str) and kind != "custom":
        raise ValueError(f"{shown(kind)} is no tool of type custom, and this server runs none of its own")
    return kind


class MessageTool(Body):
    """A function that the model may call."""

    type: Annotated[Literal["custom"] | None, BeforeValidator(_of_client)] = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    input_examples: ListOf[dict[str, Any]] | None = None


class MessageToolChoice(Body):
    """Which tools the model may call, and how many."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class ThinkingOptions(Body):
    """Whether to think, and how many tokens at most."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted", "updates"] | None = None


class OutputFormat(Body):
    """What the text must look like."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputOptions(Body):
    """How much to think, and what the text must look like."""

    effort: str | None = None
    format: OutputFormat | None = None
    task_budget: Any = None  # request_fields.py refuses it


class CountRequest(Sampling):
    """/v1/messages/count_tokens"""

    messages: Annotated[list[Rested[MessageTurn]], Field(min_length=1, max_length=MAX_MESSAGES), FirstError()]
    system: str | ListOf[TextPart] | None = None
    tools: ListOf[MessageTool] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputOptions | None = None
    output_format: OutputFormat | None = None  # the older name of output_config.format
    chat_template_kwargs: dict[str, Any] | None = None


class MessageRequest(CountRequest):
    """/v1/messages"""

    max_tokens: int
    stop_sequences: ListOf[str] | None = None
