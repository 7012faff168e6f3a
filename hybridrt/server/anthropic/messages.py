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
    MessageTool,
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
from hybridrt.server.core.places import Turn, named_in
from hybridrt.server.core.protocol import ChatRequest, TextPart
from hybridrt.server.core.service import Service, check_body, client_of
from hybridrt.server.openai.chat import as_chat_request, conversation_of, function_call, function_tool, prepare_chat
from hybridrt.server.wire.errors import APIError

# Fields of a chat request, as errors name them here.
MESSAGE_NAMES = {"stop": "stop_sequences", "structured_outputs": "output_config", "thinking_token_budget": "thinking"}
_MEDIA_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
NO_BUDGET = "budget_tokens of thinking is ignored: the tags of reasoning of this model are not single tokens"


async def start_message(service: Service, body: MessageRequest, scope: Scope) -> MessageReply:
    """Starts the request of a body.

    Raises:
        APIError, HybridrtError: it is refused. Nothing has started.
    """
    service.check_model(body.model)
    await service.off_loop(scope, partial(check_body, "messages", body))
    chat = await service.off_loop(scope, partial(as_chat, "messages", body, service.chat.limits_reasoning))
    with named_in(lambda: _turns(body)):
        prepared = await prepare_chat(service, chat, scope)
    name, deltas = service.submit([prepared.prompt], "msg_", body, scope)
    reply = MessageReply(service, name, deltas, body, prepared)
    reply.warnings = _warnings(service, body)
    return reply


def _warnings(service: Service, body: MessageRequest) -> list[str]:
    """A model that shows its reasoning has something to limit."""
    asked = body.thinking is not None and body.thinking.budget_tokens is not None
    return [NO_BUDGET] if asked and service.chat.reasoning is not None and not service.chat.limits_reasoning else []


async def count_tokens(service: Service, body: CountRequest, scope: Scope) -> int:
    """Tokens of a conversation in the chat template.

    Raises:
        APIError, HybridrtError: it cannot be rendered, or is too long.
    """
    service.check_model(body.model)
    await service.off_loop(scope, partial(check_body, "count", body))
    chat = await service.off_loop(scope, partial(as_chat, "count", body, False))
    with named_in(lambda: _turns(body)):
        conversation = await service.off_loop(scope, partial(conversation_of, chat, client_of(scope)))
        return len(await service.chat_tokens(conversation))


def as_chat(form_name: str, body: CountRequest, limits_thinking: bool) -> ChatRequest:
    """`limits_thinking`: a budget can hold. Else it is left out, because some clients always send one."""
    thinking, output, form = body.thinking, body.output_config, _form(body)
    effort = "none" if thinking and thinking.type == "disabled" else output and output.effort
    stops = body.stop_sequences if isinstance(body, MessageRequest) else None
    prefilled = _is_prefilled(body.messages[-1])
    return as_chat_request(
        form_name,
        body,
        messages=[turn.message for turn in _turns(body)],
        stop=stops or body.stop,
        tools=[_tool(tool) for tool in body.tools or ()] or None,
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
    """Variables of templates that reason only on request. "disabled" is not here: the reasoning effort says it."""
    return {"enable_thinking": True, "thinking": True} if thinking and thinking.type == "enabled" else {}


def _tool(tool: MessageTool) -> dict[str, Any]:
    said = tool.description
    if tool.input_examples:
        examples = "\n".join(json.dumps(example) for example in tool.input_examples)
        said = f"{said or tool.name}\n\nExamples of its input:\n{examples}"
    return function_tool(tool.name, said, tool.input_schema, tool.strict)


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


def _turns(body: CountRequest) -> list[Turn]:
    turns = []
    if body.system:
        turns.append(_turn({"role": "system"}, "system", body.system))
    for i, turn in enumerate(body.messages):
        place = f"messages.{i}.content"
        if isinstance(turn.content, str):
            turns.append(Turn({"role": turn.role, "content": turn.content}, place))
        elif turn.role == "assistant":
            turns.append(Turn(_assistant(turn.content, place), place))
        else:
            turns += _user(turn.role, turn.content, place)
    return turns


def _assistant(blocks: list[Block], place: str) -> dict[str, Any]:
    if images := [i for i, block in enumerate(blocks) if isinstance(block, ImageBlock)]:
        where = f"{place}.{images[0]}"
        raise APIError(400, f"{where}: an assistant's message holds no image; send it in a user's", where)
    message: dict[str, Any] = {"role": "assistant"}
    message["content"] = "".join(block.text for block in blocks if isinstance(block, TEXTS))
    if thoughts := [block.thinking for block in blocks if isinstance(block, Thinking)]:
        message["reasoning_content"] = "".join(thoughts)
    calls = [function_call(b.id, b.name, json.dumps(b.input)) for b in blocks if isinstance(b, ToolUse)]
    return message | ({"tool_calls": calls} if calls else {})


def _user(role: str, blocks: list[Block], place: str) -> list[Turn]:
    results = [(block, f"{place}.{i}.content") for i, block in enumerate(blocks) if isinstance(block, ToolResult)]
    turns = [
        _turn({"role": "tool", "tool_call_id": block.tool_use_id}, where, block.content or "")
        for block, where in results
    ]
    kept = {f"{place}.{i}": block for i, block in enumerate(blocks) if isinstance(block, (*TEXTS, ImageBlock))}
    if kept or not results:
        turns.append(_turn({"role": role}, place, list(kept.values()), list(kept)))
    return turns


def _turn(
    message: dict[str, Any], place: str, content: str | Sequence[TextBlock], places: Sequence[str] | None = None
) -> Turn:
    """A message with content; the chat template joins its parts. `places`: of these; None: in order
    at `place`."""
    if isinstance(content, str):
        return Turn(message | {"content": content}, place)
    found = places if places is not None else [f"{place}.{i}" for i in range(len(content))]
    parts = [_part(block, where) for block, where in zip(content, found, strict=True)]
    sources = [f"{where}.source" if isinstance(b, ImageBlock) else where for b, where in zip(content, found)]
    return Turn(message | {"content": parts}, place, sources)


def _part(block: TextBlock, place: str) -> dict[str, Any]:
    if not isinstance(block, ImageBlock):
        return {"type": "text", "text": block.text}
    where = f"{place}.source"
    kind, media, data, url = (block.source.get(name) for name in ("type", "media_type", "data", "url"))
    if kind == "base64" and media not in (None, *_MEDIA_TYPES):
        text = f"{where}: media_type is {shown(media)}; it must be one of {', '.join(_MEDIA_TYPES)}"
        raise APIError(400, text, where)
    if kind == "base64" and isinstance(data, str) and data[:5].lower() != "data:":
        return {"type": "image_url", "image_url": f"data:;base64,{data}"}
    if kind == "url" and isinstance(url, str):
        return {"type": "image_url", "image_url": url}
    if kind == "base64":
        raise APIError(400, f"{where}: the image has no data, or data that is no base64", where)
    text = f"{where}: type is {shown(kind)}; it must be base64: this server keeps no files"
    raise APIError(400, text, where)
