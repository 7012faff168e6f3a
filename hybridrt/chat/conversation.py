"""A caller's messages, tools and options, checked before a template sees them."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import msgspec

from hybridrt.base.errors import RequestError, shown
from hybridrt.base.errors_foreign import CALLS, refuse
from hybridrt.base.pace import with_rests
from hybridrt.base.structured_outputs import StructuredOutputs
from hybridrt.chat.efforts import EFFORTS
from hybridrt.chat.sizes import check_sizes
from hybridrt.chat.tools import NamedTool, Tool, ToolChoice, allowed_tools, read_tool_choice, read_tools
from hybridrt.images.source import IMAGE_PARTS, ImageSource, read_image_part

MAX_DEPTH = 64  # depth of objects and lists within arguments of earlier calls
BROKEN = "arguments"
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")  # types of parts that are text
IMAGE = {"type": "image"}  # what templates get of an image
# Types of parts that clients know, and what they are.
UNSUPPORTED = {
    **dict.fromkeys(("video", "video_url", "input_video"), "video"),
    **dict.fromkeys(("audio", "audio_url", "input_audio"), "audio"),
    **dict.fromkeys(("file", "input_file"), "a file"),
}
# Arguments of apply_chat_template and of ours.
RESERVED = {
    "self", "messages", "template", "conversation", "conversations", "tools", "documents", "chat_template",
    "add_generation_prompt", "continue_final_message", "tokenize", "padding", "truncation", "max_length",
    "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "sanitize_control_tokens",
}  # fmt: skip


class ChatOptions(TypedDict, total=False):
    """Fields of Conversation that a caller may set in addition to messages and tools."""

    parallel_tool_calls: bool | None
    reasoning_effort: str | None
    thinking_budget: int | None
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template_kwargs: Mapping[str, Any] | None


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Checked input of a chat; `read_conversation` makes it.

    Attributes:
        messages: plain data. Content is text or a list of parts, which are texts or IMAGE;
            arguments of earlier calls are objects.
        images: those of the parts, in order.
        parallel_tool_calls: False: at most one call an answer.
        reasoning_effort: one of EFFORTS; templates get the nearest that they know. "none" turns
            reasoning off.
        thinking_budget: reasoning tokens at which the reasoning is ended; None: no limit.
        chat_template_kwargs: further variables of the template.
        client: for whom. Clients share the processes that read images.
    """

    messages: Sequence[Mapping[str, Any]]
    images: Sequence[ImageSource] = ()
    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    thinking_budget: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    client: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.chat_template_kwargs, Mapping) or not all(
            isinstance(key, str) for key in self.chat_template_kwargs
        ):
            raise RequestError(
                f"chat_template_kwargs is {shown(self.chat_template_kwargs)}; it must be a mapping of names to values",
                "chat_template_kwargs",
            )
        if reserved := RESERVED & set(self.chat_template_kwargs):
            text = f"chat_template_kwargs sets {min(reserved)}, which is no template variable; remove it"
            raise RequestError(text, "chat_template_kwargs")
        for name in ("parallel_tool_calls", "add_generation_prompt", "continue_final_message"):
            if not isinstance(value := getattr(self, name), bool):
                raise RequestError(f"{name} is {shown(value)}; it must be true or false", name)
        if self.continue_final_message and self.add_generation_prompt:
            name = "continue_final_message"
            raise RequestError(f"{name} goes with add_generation_prompt=false: set it, too", name)
        if self.reasoning_effort is not None and self.reasoning_effort not in EFFORTS:
            raise RequestError(
                f"reasoning_effort is {shown(self.reasoning_effort)}; it must be one of {', '.join(EFFORTS)}",
                "reasoning_effort",
            )
        budget = self.thinking_budget
        if budget is not None and not (type(budget) is int and 0 <= budget < 2**31):
            raise RequestError(
                f"the thinking budget is {shown(budget)}; it must be an integer from 0 to 2**31 - 1",
                "thinking_token_budget",
            )
        if self.tool_choice in ("auto", "none"):
            return
        if not self.tools:
            raise RequestError("tool_choice asks for a call and there are no tools: pass tools", "tool_choice")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.name not in self.schemas:
            raise RequestError(
                f"tool_choice names {shown(self.tool_choice.name)}, which is none of tools ({', '.join(self.schemas)})",
                "tool_choice",
            )

    @property
    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """JSON schema of each tool's parameters, by name."""
        return {tool.name: tool.parameters for tool in self.tools}

    @property
    def continued(self) -> str:
        """Text that the answer continues."""
        content = self.messages[-1].get("content", "") if self.continue_final_message else ""
        return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)

    @property
    def offered(self) -> Sequence[Tool]:
        return () if self.tool_choice == "none" else self.tools

    @property
    def forced_form(self) -> StructuredOutputs | None:
        """The grammar of a custom tool that is forced: the whole answer is its text."""
        choice = self.tool_choice
        named = [tool for tool in self.tools if isinstance(choice, NamedTool) and tool.name == choice.name]
        return named[0].grammar if named else None

    @property
    def forced_custom(self) -> str | None:
        """The name of that tool."""
        choice = self.tool_choice
        return choice.name if isinstance(choice, NamedTool) and self.forced_form is not None else None


def read_conversation(messages: object, tools: object = None, tool_choice: object = None, **rest: Any) -> Conversation:
    """A conversation from plain data in OpenAI's form.

    Args:
        messages: mappings with `role` and `content`, text or a list of parts, which are texts or
            images (hybridrt/images/source.py); of an assistant also `tool_calls`, of a tool
            `tool_call_id`. Further keys reach the template as they are.
        tools: a list of {"type": "function", "function": {"name", "description", "parameters",
            "strict"}}, or of {"type": "custom", "custom": {"name", "description", "format"}}.
        tool_choice: "auto" (also None), "none", "required", {"type": "function", "function":
            {"name"}}, or {"type": "allowed_tools", "mode", "tools"}, which offers these alone.
        rest: other fields of Conversation. None: the default.

    Raises:
        RequestError: something is wrong; `field` is a path such as "messages.0.content".
        UnknownNameError: there is no such option.
    """
    for name in rest.keys() - ChatOptions.__annotations__.keys():
        refuse("a chat", name, CALLS, ChatOptions.__annotations__)
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence) or not messages:
        raise RequestError(f"messages is {shown(messages)}; pass a list of at least one message", "messages")
    check_sizes(messages, tools, rest.get("chat_template_kwargs"))
    offered, tool_choice = allowed_tools(read_tools(tools), tool_choice)
    images = list[ImageSource]()
    return Conversation(
        messages=[read_message(message, f"messages.{i}", images) for i, message in enumerate(with_rests(messages))],
        images=images,
        tools=offered,
        tool_choice=read_tool_choice(tool_choice),
        **{name: value for name, value in rest.items() if value is not None},
    )


def read_message(message: object, place: str, images: list[ImageSource]) -> dict[str, Any]:
    """A message as plain data; its images are added to `images`. Drops keys with None or an empty
    list: templates ask whether a key is defined. Every message has content: templates concatenate
    it without a check."""
    if not isinstance(message, Mapping) or not all(isinstance(key, str) for key in message):
        raise RequestError(f"{place} is {shown(message)}; it must be an object with role and content", place)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{place}.role is {shown(role)}; it must be text such as 'user'", f"{place}.role")
    plain = {key: value for key, value in message.items() if value is not None and value != []}
    if "reasoning" in plain:  # vLLM's name
        plain.setdefault("reasoning_content", plain["reasoning"])
    content = plain.setdefault("content", "")
    if isinstance(content, Sequence) and not isinstance(content, (str, bytes)):
        plain["content"] = [_part(part, f"{place}.content.{i}", images) for i, part in enumerate(content)]
    elif not isinstance(content, str):
        raise RequestError(
            f"{place}.content is {shown(content)}; it must be text or a list of parts", f"{place}.content"
        )
    if "tool_calls" in plain:
        plain["tool_calls"] = _earlier_calls(plain["tool_calls"], f"{place}.tool_calls")
    return plain


def _part(part: object, place: str, images: list[ImageSource]) -> dict[str, str]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or not isinstance(kind, str):
        raise RequestError(
            f'{place} is {shown(part)}; it must be an object such as {{"type": "text", "text": ...}}', place
        )
    if kind in IMAGE_PARTS:
        images.append(read_image_part(part, place))
        return IMAGE
    if kind in UNSUPPORTED:
        text = f"{place}: {UNSUPPORTED[kind]} (a part of type {kind}) is not supported; send text and images"
        raise RequestError(text, place)
    if kind not in TEXT_PARTS:
        names = ", ".join((*TEXT_PARTS, *IMAGE_PARTS[:-1]))
        raise RequestError(f"{place}: type is {shown(kind)}; it must be one of {names}", f"{place}.type")
    name = "refusal" if kind == "refusal" else "text"
    if not isinstance(written := part.get(name), str):
        raise RequestError(f"{place}.{name} is {shown(written)}; it must be text", f"{place}.{name}")
    return {"type": "text", "text": written}


def _earlier_calls(calls: object, place: str) -> list[dict[str, Any]]:
    """Turns arguments into objects: templates write them as JSON, or key by key."""
    if not isinstance(calls, Iterable) or isinstance(calls, (str, bytes, Mapping)):
        raise RequestError(f"{place} is {shown(calls)}; it must be a list of calls", place)
    found = []
    for i, call in enumerate(map(_as_function, calls)):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(
                f'{place}.{i} is {shown(call)}; it must be {{"id", "type": "function", "function": {{"name", '
                '"arguments"}}}',
                f"{place}.{i}",
            )
        arguments = function.get("arguments")
        found.append({**call, "function": {**function, "arguments": _arguments(arguments, f"{place}.{i}")}})
    return found


def _as_function(call: Any) -> Any:
    """A call of a custom tool as the model sees it."""
    custom = call.get("custom") if isinstance(call, Mapping) and call.get("type") == "custom" else None
    if not isinstance(custom, Mapping) or not isinstance(custom.get("input"), str):
        return call
    function = {"name": custom.get("name"), "arguments": {"input": custom["input"]}}
    return {"id": call.get("id"), "type": "function", "function": function}


def _arguments(arguments: object, place: str) -> dict[str, Any]:
    """Returns an object always: templates iterate over it, and a model that reads its broken calls
    writes more of them.
    """
    if arguments in (None, ""):
        return {}
    if isinstance(arguments, Mapping):
        return dict(arguments)
    if not isinstance(arguments, str):
        where = f"{place}.function.arguments"
        raise RequestError(f"{where} is {shown(arguments)}; it must be the JSON text of an object", where)
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):  # a call that broke off (docs/chat.md)
        return {BROKEN: arguments}
    if value is None:
        return {}
    return value if isinstance(value, dict) and _can_be_rendered(value) else {BROKEN: arguments}


def _can_be_rendered(value: object) -> bool:
    """Models write endless numbers, half surrogate pairs and deep brackets."""
    try:
        msgspec.msgpack.encode(value)
    except (ValueError, OverflowError, RecursionError):
        return False
    parts = [value]
    for _ in range(MAX_DEPTH):
        parts = [child for part in parts for child in _children(part)]
        if not parts:
            return True
    return False


def _children(value: object) -> Iterable[object]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
