"""Conversations on an engine: messages to prompts, and outputs to answers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from hybridrt.base.errors import PromptTooLongError, RequestError, shown
from hybridrt.base.errors_foreign import no_attribute
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.chat.answer_reader import AnswerReader, ChatFinishReason
from hybridrt.chat.chat import Chat
from hybridrt.chat.conversation import Conversation, read_conversation
from hybridrt.chat.events import Event, ToolCall
from hybridrt.chat.sizes import is_large
from hybridrt.engine.core.engine import Engine
from hybridrt.engine.request.intake import PreparedPrompt
from hybridrt.engine.request.outputs import Delta, RequestMetrics, RequestOutput
from hybridrt.engine.request.prompts import Prompt
from hybridrt.engine.text.tokenizer import HFTokenizer, encode_prompt
from hybridrt.images.reader import ImageReader

Messages = Sequence[Mapping[str, Any]]
_OUTPUT_NAMES = {
    "text": "a ChatOutput has .content, .reasoning and .tool_calls; .output.text is the raw text",
    "choices": "a ChatOutput has .content, and .outputs has all samples",
    "token_ids": "they are those of .output",
    "metrics": "they are those of .output",
}


class Chats:
    """Makes and caches a model's `Chat` for a template and two parsers.

    Raises:
        RequestError: the model has no tokenizer, or an argument is no text.
        ConfigError: unknown parser.
    """

    def __init__(self, tokenizer: HFTokenizer | None, images: ImageReader | None = None) -> None:
        self._tokenizer, self._images = tokenizer, images
        self._made: dict[tuple[str | None, str, str], Chat] = {}

    def __call__(self, template: str | None = None, tool_parser: str = "auto", reasoning_parser: str = "auto") -> Chat:
        if template is not None:
            _check_kind("chat_template", template, str)
        _check_kind("tool_parser", tool_parser, str)
        _check_kind("reasoning_parser", reasoning_parser, str)
        key = (template, tool_parser, reasoning_parser)
        if key not in self._made:
            if self._tokenizer is None:
                raise RequestError("this model has no tokenizer, and so no chat template: pass token ids without one")
            self._made[key] = Chat(
                self._tokenizer,
                template=template,
                tool_parser=tool_parser,
                reasoning_parser=reasoning_parser,
                images=self._images,
            )
        return self._made[key]


@dataclass(frozen=True)
class PreparedChat:
    """A checked and tokenised conversation.

    Attributes:
        prompt: for the engine.
        new_answer: makes the reader of one sample's answer.
    """

    prompt: PreparedPrompt
    new_answer: Callable[[], AnswerReader]


def prepare_chat(
    engine: Engine, tokenizer: HFTokenizer, chat: Chat, conversation: Conversation, params: SamplingParams
) -> PreparedChat:
    """Renders, tokenises and checks a conversation. Changes nothing; call it off an event loop.

    Raises:
        RequestError, MemoryBudgetError: the errors of `Engine.prepare`; also if the template fails
            on these messages.
    """
    _check_kind("conversation", conversation, Conversation)
    _check_kind("sampling_params", params, SamplingParams)
    _check_kind("chat", chat, Chat)
    max_prompt = engine.intake.limits.max_model_len - 1

    def encode(text: str) -> list[int]:
        truncated = params.truncate_prompt_tokens is not None
        return encode_prompt(tokenizer, text, max_prompt, bare=True, truncated=truncated)

    if params.truncate_prompt_tokens is None:
        check_characters(conversation, max_prompt * tokenizer.characters_per_token)
    prompt = chat.prompt(conversation, params, encode, max_prompt)
    given, wanted = params.structured_outputs, prompt.params.structured_outputs
    _check_grammars(engine, conversation)
    if given is not None and wanted is not given:
        # Within a larger grammar, an impossible form would fail only after the reasoning.
        engine.intake.compiler.grammar(given)
    try:
        plain: Prompt = prompt.tokens
        seeing: Prompt = {"prompt_token_ids": prompt.tokens, "spans": prompt.spans}
        prepared = engine.prepare(seeing if prompt.spans else plain, prompt.params)
    except RequestError as e:
        if e.field == "structured_outputs" and wanted is not given and conversation.offered:
            raise RequestError(f"what the tools ask for cannot be enforced: {e}", "tools") from e
        raise
    cut = len(prompt.tokens) - len(prepared.tokens)
    boundaries = tuple(place - cut for place in prompt.boundaries if place > cut)
    return PreparedChat(replace(prepared, boundaries=boundaries), prompt.new_answer)


def _check_grammars(engine: Engine, conversation: Conversation) -> None:
    """Compiles the grammars of custom tools. One that does not hold must be a grammar, too."""
    for tool in conversation.offered:
        if tool.grammar is not None:
            try:
                engine.intake.compiler.grammar(tool.grammar)
            except RequestError as e:
                raise RequestError(f"the grammar of the tool {tool.name} cannot be used: {e}", "tools") from e


def _length(content: Any) -> int:
    """Characters of a text, or of the texts among parts."""
    return len(content) if isinstance(content, str) else sum(len(part.get("text", "")) for part in content)


def check_characters(conversation: Conversation, most: int) -> None:
    """Raises PromptTooLongError for contents that no prompt has room for, before rendering.
    Templates may leave out earlier reasoning and calls.
    """
    found = sum(_length(message.get("content", "")) for message in conversation.messages)
    if found > most:
        raise PromptTooLongError(
            f"the messages have {found} characters, and a prompt of this model's maximum context length has at most "
            f"{most}: shorten them or raise max_model_len",
            "messages",
        )


def is_large_chat(conversation: Conversation) -> bool:
    tools = [tool.definition for tool in conversation.tools]
    return is_large(conversation.messages, tools, conversation.chat_template_kwargs)


def _check_kind(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise RequestError(f"{name} is {shown(value)}; pass {'text' if kind is str else f'a {kind.__name__}'}", name)


@dataclass(frozen=True, slots=True)
class ChatDelta:
    """New parts of a sample of an answer.

    Attributes:
        index: which of the conversation's `n` samples.
        events: pieces of content, reasoning and tool calls, in order; may be empty.
        token_ids: new output tokens. They may come before their events.
        finish_reason, metrics: in the last delta; None before.
    """

    index: int
    events: list[Event]
    token_ids: list[int]
    finish_reason: ChatFinishReason | None = None
    metrics: RequestMetrics | None = None


class ChatReader:
    """Turns a conversation's Deltas into ChatDeltas. `answers` has one reader a sample."""

    def __init__(self, chat: PreparedChat) -> None:
        self.answers = [chat.new_answer() for _ in range(chat.prompt.params.n)]

    def read(self, delta: Delta) -> ChatDelta:
        answer = self.answers[delta.index]
        events = answer.read(delta.text, delta.token_ids, delta.finish_reason)
        return ChatDelta(delta.index, events, delta.token_ids, answer.finish_reason, delta.metrics)


@dataclass(slots=True)
class ChatOutput:
    """A sample of an answer.

    Attributes:
        content: the text, without reasoning and tool calls; "" if none.
        reasoning: its reasoning before that; "" if none.
        tool_calls: each with `id`, `name` and `arguments` (JSON text).
        finish_reason: "stop", "length", "abort", or "tool_calls" if it has stopped after a call.
        reasoning_tokens: number of the output's tokens that were reasoning.
        output: tokens, raw text and metrics.
        siblings: the samples 1 to n - 1 of the same conversation, on sample 0.
    """

    content: str
    reasoning: str
    tool_calls: list[ToolCall]
    finish_reason: ChatFinishReason
    reasoning_tokens: int
    output: RequestOutput
    siblings: "tuple[ChatOutput, ...]" = ()

    def __getattr__(self, name: str) -> NoReturn:
        raise no_attribute(self, name, _OUTPUT_NAMES)

    @property
    def outputs(self) -> "list[ChatOutput]":
        """All `n` samples of the conversation, this one first."""
        return [self, *self.siblings]

    def message(self) -> dict[str, Any]:
        """The answer as a message in OpenAI's form, to be appended to the conversation's `messages`."""
        calls = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in self.tool_calls
        ]
        plain: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            plain["reasoning_content"] = self.reasoning
        return plain | ({"tool_calls": calls} if calls else {})


def as_conversations(messages: object, options: Mapping[str, Any]) -> list[Conversation]:
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise RequestError(f"messages is {shown(messages)}; pass a list of messages, or a list of such lists")
    if isinstance(messages[0], Mapping):
        return [read_conversation(messages, **options)]
    return [read_conversation(each, **options) for each in messages]


def read_output(chat: PreparedChat, output: RequestOutput) -> ChatOutput:
    first, *siblings = (_read(chat.new_answer(), sample) for sample in output.outputs)
    first.siblings = tuple(siblings)
    return first


def _read(answer: AnswerReader, sample: RequestOutput) -> ChatOutput:
    answer.read(sample.text, sample.token_ids, sample.finish_reason)
    message = answer.message
    return ChatOutput(
        content=message.content,
        reasoning=message.reasoning,
        tool_calls=message.tool_calls,
        finish_reason=answer.finish_reason or sample.finish_reason,
        reasoning_tokens=answer.reasoning_tokens,
        output=sample,
    )
