"""Conversations to token ids, and answers to events, for `LLM.chat` and all chat endpoints."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from threading import Lock
from typing import Any, Protocol

import msgspec
import numpy as np

from hybridrt.base.errors import CheckpointError, RequestError
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.base.spans import Span
from hybridrt.chat.answer_parser import AnswerParser
from hybridrt.chat.answer_reader import AnswerReader, TokenTags
from hybridrt.chat.constraints import Constraints, forces_calls
from hybridrt.chat.conversation import Conversation
from hybridrt.chat.efforts import template_variables
from hybridrt.chat.harmony import HarmonyParser
from hybridrt.chat.reasoning import Channels, ReasoningTags
from hybridrt.chat.registry import REASONING_PARSERS, TOOL_PARSERS, choose
from hybridrt.chat.renderer import FOREIGN_RENDERER, LARGE_RENDERER, RENDERER, Renderer
from hybridrt.chat.sizes import is_large
from hybridrt.chat.template_traits import TemplateTraits, find_traits, fitted, fitted_tool, has_images
from hybridrt.chat.tool_parser import ToolParser
from hybridrt.chat.tool_parsers.forced import ForcedCalls
from hybridrt.images.reader import ImageReader
from hybridrt.images.source import ImageSource

_KNOWN_STARTS = 32


class ChatTokenizer(Protocol):
    """What the core needs of hybridrt.engine.text.tokenizer.HFTokenizer."""

    hf: Any

    def encode_bare(self, text: str) -> list[int]: ...


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation as token ids, and how its answer is read.

    Attributes:
        params: the caller's, with those of the parsers and the tool choice.
        boundaries: token counts at which other conversations may differ: the system prompt's end.
        new_answer: makes the reader of one sample's answer.
        spans: tokens of images.
    """

    tokens: list[int]
    params: SamplingParams
    boundaries: tuple[int, ...]
    new_answer: Callable[[], AnswerReader]
    spans: tuple[Span, ...] = ()


class Chat:
    """Renders conversations of one model and parses its answers. Thread-safe.

    Args:
        template: Jinja text; None: the tokenizer's own.
        tool_parser, reasoning_parser: names in hybridrt.chat.registry; "auto": by the chat
            template; "none": off.
        foreign: the template came with a request. It runs in a process apart from other templates,
            so that it cannot delay them.
        images: reads pictures; None: the model takes none.

    Raises:
        ConfigError: there is no parser of such a name.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        *,
        template: str | None = None,
        tool_parser: str = "auto",
        reasoning_parser: str = "auto",
        foreign: bool = False,
        images: ImageReader | None = None,
    ) -> None:
        self.foreign, self._images = foreign, images
        self._tokenizer, self._template = tokenizer, template
        self._templates = [template] if template else _all_templates(tokenizer.hf.chat_template)
        everything = "\n".join(self._templates)
        self.tool_parser: type[ToolParser] | None = choose(
            TOOL_PARSERS, tool_parser, everything, tokenizer.hf.get_added_vocab()
        )
        self.reasoning: ReasoningTags | None = choose(REASONING_PARSERS, reasoning_parser, everything)
        self._starts = OrderedDict[bytes, np.ndarray]()
        self._traits = dict[str, TemplateTraits]()
        self._lock, self._examining = Lock(), Lock()

    @property
    def limits_reasoning(self) -> bool:
        """Whether a thinking budget can hold for this model."""
        return self.reasoning is not None and self._constraints.limits(self.reasoning)

    def examine(self) -> None:
        """Finds what the templates support before the first conversation needs it.

        Raises:
            CheckpointError: the process for templates does not start.
        """
        for template in self._templates:
            self._traits_of(template)

    def render(self, conversation: Conversation) -> str:
        """The conversation as text, fitted to what the template supports.

        Raises:
            CheckpointError: there is no template, it fails, or it takes too long or too much
                memory.
        """
        conversation = self._fitted(conversation)
        template = self._template_for(conversation)
        traits = self._traits_of(template)
        options = {
            **self._tokenizer.hf.special_tokens_map,
            **template_variables(conversation.reasoning_effort, traits.efforts),
            **conversation.chat_template_kwargs,
            "tools": [fitted_tool(tool.definition, traits) for tool in conversation.offered] or None,
            "add_generation_prompt": conversation.add_generation_prompt,
            "continue_final_message": conversation.continue_final_message,
        }
        large = is_large(conversation.messages, options)
        return self._renderer(large).render(template, conversation.messages, options)

    def prompt(
        self,
        conversation: Conversation,
        params: SamplingParams,
        encode: Callable[[str], list[int]] | None = None,
        max_tokens: int = 2**31,
    ) -> ChatPrompt:
        """The engine's prompt and the reader of its answer. Takes milliseconds, and longer with
        images: call it off an event loop.

        Args:
            encode: text to token ids; None: the tokenizer's `encode_bare`. One that refuses long
                text bounds the work.
            max_tokens: of a prompt; more tokens of images are refused.

        Raises:
            CheckpointError: the errors of `render`.
            RequestError: the model or its parsers do not support what the conversation needs.
        """
        tools, reasoning = self._parsers(conversation)
        conversation = self._fitted(conversation)
        text = self.render(conversation)
        tokens = (encode or self._tokenizer.encode_bare)(text)
        tokens, spans = self._with_spans(tokens, conversation, max_tokens)
        inside = reasoning is not None and reasoning.opened_by(text, conversation.continued)
        special = set(self._special_tokens)
        tags = {*(tools.opens if tools else ()), *(tools.closes if tools else ())}
        tags |= {*reasoning.opens, *reasoning.closes} if reasoning else set()
        dropped: Sequence[str] = ()
        if params.skip_special_tokens and special & tags:
            params, dropped = replace(params, skip_special_tokens=False), sorted(special - tags)
        grammar = self._constraints.grammar(conversation, params.structured_outputs, tools, reasoning, text)
        if grammar is not params.structured_outputs:
            params = replace(params, structured_outputs=grammar)
        max_calls = None if conversation.parallel_tool_calls else 1
        token_tags = self._token_tags(reasoning)

        def new_answer() -> AnswerReader:
            read = HarmonyParser if isinstance(reasoning, Channels) else AnswerParser
            parser = read(tools, reasoning, in_reasoning=inside, max_calls=max_calls, dropped=dropped)
            return AnswerReader(parser, token_tags, self._tokenizer.encode_bare, conversation.forced_custom)

        return ChatPrompt(tokens, params, self._boundaries(conversation, tokens), new_answer, spans)

    def _with_spans(
        self, tokens: list[int], conversation: Conversation, max_tokens: int
    ) -> tuple[list[int], tuple[Span, ...]]:
        if not conversation.images:
            return tokens, ()
        assert self._images is not None, "render has refused images"
        try:
            return self._images.expand(tokens, conversation.images, max_tokens, conversation.client)
        except RequestError as e:
            if e.field == "prompt":
                e.field = "messages"
            raise

    def _renderer(self, large: bool) -> Renderer:
        return FOREIGN_RENDERER if self.foreign else LARGE_RENDERER if large else RENDERER

    def _template_for(self, conversation: Conversation) -> str:
        return self._template or _template_of(self._tokenizer.hf.chat_template, bool(conversation.offered))

    def _traits_of(self, template: str) -> TemplateTraits:
        with self._examining:
            if template not in self._traits:
                variables, renderer = self._tokenizer.hf.special_tokens_map, self._renderer(large=False)
                placeholder = self._images.text if self._images else None
                self._traits[template] = find_traits(
                    template, variables, renderer, placeholder, refuses_slow=self.foreign
                )
            return self._traits[template]

    def _fitted(self, conversation: Conversation) -> Conversation:
        """Replaces the messages by those that the template gets."""
        if conversation.images:
            self._check_images(conversation.images)
        traits = self._traits_of(self._template_for(conversation))
        messages = fitted(conversation.messages, traits, continued=conversation.continue_final_message)
        return replace(conversation, messages=messages)

    def _check_images(self, images: Sequence[ImageSource]) -> None:
        """Before a template writes a line for each."""
        if self._images is None:
            place = images[0].place
            raise RequestError(f"{place}: this model reads text alone here; leave images out", place)
        self._images.check_count(len(images), "messages")

    def _parsers(self, conversation: Conversation) -> tuple[ToolParser | None, ReasoningTags | None]:
        if conversation.forced_form is not None:
            return None, self.reasoning
        if forces_calls(conversation):
            return ForcedCalls(conversation.schemas), self.reasoning
        if not conversation.offered:
            return None, self.reasoning
        if self.tool_parser is None:
            raise RequestError(
                "how this model writes tool calls is not known from its chat template; name a tool parser (option "
                f"--tool-parser of the server): {', '.join(TOOL_PARSERS.names())}",
                "tools",
            )
        return self.tool_parser(conversation.schemas), self.reasoning

    @cached_property
    def _special_tokens(self) -> list[str]:
        hf = self._tokenizer.hf
        added = [str(token) for token in hf.added_tokens_decoder.values() if token.special]
        return sorted({*hf.all_special_tokens, *added})

    @cached_property
    def _constraints(self) -> Constraints:
        added = self._tokenizer.hf.get_added_vocab()
        return Constraints({tag: token for tag, token in added.items() if token != self._tokenizer.hf.eos_token_id})

    def _token_tags(self, reasoning: ReasoningTags | None) -> TokenTags | None:
        if reasoning is None:
            return None
        added = self._tokenizer.hf.get_added_vocab()
        opens = frozenset(added[tag] for tag in reasoning.opens if tag in added)
        closes = frozenset(added[tag] for tag in reasoning.closes if tag in added)
        return TokenTags(opens, closes) if opens and closes else None

    def _boundaries(self, conversation: Conversation, tokens: list[int]) -> tuple[int, ...]:
        """Counts the first tokens that all conversations with this system prompt and these tools
        share, by comparison with a short one: one number or none.
        """
        head = conversation.messages[:1]
        if head[0]["role"] not in ("system", "developer"):
            head = ()
        if any(map(has_images, head)):
            return ()
        if not head and not conversation.offered:
            return ()
        other = replace(
            conversation,
            messages=[*head, {"role": "user", "content": "?"}],
            add_generation_prompt=False,
            continue_final_message=False,
        )
        try:
            start = self._start(other)
        except CheckpointError:
            return ()  # the template refuses the short conversation
        shared = min(len(start), len(tokens))
        differ = np.flatnonzero(start[:shared] != np.asarray(tokens[:shared]))
        length = int(differ[0]) if differ.size else shared
        return (length,) if 0 < length < len(tokens) else ()

    def _start(self, other: Conversation) -> np.ndarray:
        """Returns [n] int32, cached for other requests."""
        offered = [tool.definition for tool in other.offered]
        said = msgspec.msgpack.encode([other.messages, offered, other.reasoning_effort, other.chat_template_kwargs])
        key = sha256(said).digest()
        with self._lock:
            found = self._starts.get(key)
        if found is None:
            found = np.asarray(self._tokenizer.encode_bare(self.render(other)), np.int32)
        with self._lock:
            self._starts[key] = found
            self._starts.move_to_end(key)
            while len(self._starts) > _KNOWN_STARTS:
                self._starts.popitem(last=False)
        return found


def _template_of(templates: Any, with_tools: bool) -> str:
    if isinstance(templates, dict):
        templates = (with_tools and templates.get("tool_use")) or templates.get("default")
    if not templates:
        raise CheckpointError("the model brings no chat template; pass its prompt without one")
    text: str = templates
    return text


def _all_templates(templates: Any) -> list[str]:
    return list(templates.values()) if isinstance(templates, dict) else [templates] if templates else []
