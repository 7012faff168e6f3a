"""/v1/messages: Anthropic's Messages API, mapped to requests of /v1/chat/completions."""

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

from starlette.types import Scope

from hybridrt.base.errors import shown
from hybridrt.server.anthropic.message_protocol import (
    TEXTS,
    Block,
    CountRequest,
    ImageBlock,
    MessageRequest,
    MessageToolChoice,
    MessageTurn,
    OutputFormat,
    TextBlock,
    Thinking,
    ThinkingOptions,
    ToolResult,
    ToolUse,
)
from hybridrt.server.anthropic.message_reply import MessageReply
from hybridrt.server.core.protocol import ChatRequest, TextPart
from hybridrt.server.core.service import Service, check_body
from hybridrt.server.openai.chat import as_chat_request, conversation_of, function_call, function_tool, prepare_chat
from hybridrt.server.wire.errors import APIError

# Fields of a chat request, as errors name them here.
MESSAGE_NAMES = {"stop": "stop_sequences", "structured_outputs": "output_config", "thinking_token_budget": "thinking"}
_MEDIA_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


async def start_message(service: Service, body: MessageRequest, scope: Scope) -> MessageReply:
    """Starts the request of a body.

    Raises:
        APIError, HybridrtError: it is refused. Nothing has started.
    """
    service.check_model(body.model)
    check_body("messages", body)
    chat = await service.off_loop(scope, partial(as_chat, "messages", body, service.chat.reasoning is not None))
    prepared = await prepare_chat(service, chat, scope)
    name, deltas = service.submit([prepared.prompt], "msg_", body, scope)
    return MessageReply(service, name, deltas, body, prepared)


async def count_tokens(service: Service, body: CountRequest, scope: Scope) -> int:
    """Tokens of a conversation in the chat template.

    Raises:
        APIError, HybridrtError: it cannot be rendered, or is too long.
    """
    service.check_model(body.model)
    check_body("count", body)
    conversation = await service.off_loop(scope, lambda: conversation_of(as_chat("count", body, False)))
    return len(await service.chat_tokens(conversation))


def as_chat(form_name: str, body: CountRequest, limits_thinking: bool) -> ChatRequest:
    """`limits_thinking`: the model thinks between tags. Without them a budget has nothing to limit."""
    thinking, output, form = body.thinking, body.output_config, _form(body)
    effort = "none" if thinking and thinking.type == "disabled" else output and output.effort
    stops = body.stop_sequences if isinstance(body, MessageRequest) else None
    prefilled = _is_prefilled(body.messages[-1])
    return as_chat_request(
        form_name,
        body,
        messages=_messages(body),
        stop=stops or body.stop,
        tools=[function_tool(t.name, t.description, t.input_schema, t.strict) for t in body.tools or ()] or None,
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=not (body.tool_choice and body.tool_choice.disable_parallel_tool_use),
        reasoning_effort=effort,
        thinking_token_budget=thinking and thinking.budget_tokens if limits_thinking else None,
        response_format=form and _format(form.schema_),
        chat_template_kwargs=_switches(thinking) | (body.chat_template_kwargs or {}),
        add_generation_prompt=not prefilled,
        continue_final_message=prefilled,
    )


def _switches(thinking: ThinkingOptions | None) -> dict[str, Any]:
    """Sets variables of templates that reason on request; type "disabled" comes with the effort."""
    return {"enable_thinking": True, "thinking": True} if thinking and thinking.type == "enabled" else {}


def _tool_choice(choice: MessageToolChoice | None) -> Any:
    if choice is None:
        return None
    if choice.type != "tool":
        return _CHOICES[choice.type]
    if choice.name is None:
        raise APIError(400, "tool_choice of type tool needs the name of a tool", "tool_choice.name")
    return function_tool(choice.name)


def _form(body: CountRequest) -> OutputFormat | None:
    form = body.output_config and body.output_config.format
    if form is not None and body.output_format is not None:
        raise APIError(400, "output_format and output_config.format both say what the text looks like", "output_format")
    return form or body.output_format


def _format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": schema, "strict": True}}


def _is_prefilled(last: MessageTurn) -> bool:
    if last.role != "assistant":
        return False
    return isinstance(last.content, str) or all(isinstance(block, TextPart) for block in last.content)


def _messages(body: CountRequest) -> list[dict[str, Any]]:
    messages = []
    if body.system:
        messages.append({"role": "system", "content": _content(body.system)})
    for turn in body.messages:
        if isinstance(turn.content, str):
            messages.append({"role": turn.role, "content": turn.content})
        elif turn.role == "assistant":
            messages.append(_assistant(turn.content))
        else:
            messages += _user(turn.role, turn.content)
    return messages


def _assistant(blocks: list[Block]) -> dict[str, Any]:
    if any(isinstance(block, ImageBlock) for block in blocks):
        raise APIError(400, "messages: an assistant's message holds no image; send it in a user's", "messages")
    message: dict[str, Any] = {"role": "assistant"}
    message["content"] = "".join(block.text for block in blocks if isinstance(block, TEXTS))
    if thoughts := [block.thinking for block in blocks if isinstance(block, Thinking)]:
        message["reasoning_content"] = "".join(thoughts)
    calls = [function_call(b.id, b.name, json.dumps(b.input)) for b in blocks if isinstance(b, ToolUse)]
    return message | ({"tool_calls": calls} if calls else {})


def _user(role: str, blocks: list[Block]) -> list[dict[str, Any]]:
    results = [block for block in blocks if isinstance(block, ToolResult)]
    messages: list[dict[str, Any]] = [
        {"role": "tool", "tool_call_id": block.tool_use_id, "content": _content(block.content or "")}
        for block in results
    ]
    parts = [block for block in blocks if isinstance(block, (*TEXTS, ImageBlock))]
    if parts or not results:
        messages.append({"role": role, "content": _content(parts)})
    return messages


def _content(content: str | Sequence[TextBlock]) -> str | list[dict[str, Any]]:
    """The chat template joins parts."""
    return content if isinstance(content, str) else [_part(block) for block in content]


def _part(block: TextBlock) -> dict[str, Any]:
    if not isinstance(block, ImageBlock):
        return {"type": "text", "text": block.text}
    kind, media, data, url = (block.source.get(name) for name in ("type", "media_type", "data", "url"))
    if kind == "base64" and media not in (None, *_MEDIA_TYPES):
        text = f"the source of an image has the media_type {shown(media)}; it must be one of {', '.join(_MEDIA_TYPES)}"
        raise APIError(400, text, "messages")
    if kind == "base64" and isinstance(data, str) and data[:5].lower() != "data:":
        return {"type": "image_url", "image_url": f"data:;base64,{data}"}
    if kind == "url" and isinstance(url, str):
        return {"type": "image_url", "image_url": url}
    if kind == "base64":
        raise APIError(400, "the source of an image has no data, or data that is no base64", "messages")
    text = f"the source of an image is of type {shown(kind)}; it must be base64: this server keeps no files"
    raise APIError(400, text, "messages")
