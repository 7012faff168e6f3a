"""/v1/responses: OpenAI's Responses API, mapped to requests of /v1/chat/completions."""

import json
from functools import partial
from typing import Any

from starlette.types import Scope

from hybridrt.base.pace import with_rests
from hybridrt.server.core.places import Turn, named_in
from hybridrt.server.core.protocol import ChatRequest, OtherPart
from hybridrt.server.core.service import Service, check_body, owner_of
from hybridrt.server.openai.chat import as_chat_request, function_call, function_tool, prepare_chat
from hybridrt.server.openai.custom_calls import grammar_warnings
from hybridrt.server.openai.response_protocol import (
    BUILT_IN_TOOLS,
    LOGPROBS,
    BuiltIn,
    Contents,
    CustomCall,
    CustomCallOutput,
    CustomTool,
    FunctionCall,
    FunctionCallOutput,
    FunctionTool,
    InputMessage,
    InputText,
    Item,
    ReasoningItem,
    ResponseRequest,
    Texts,
    name_within,
)
from hybridrt.server.openai.response_reply import Kept, ResponseReply, repeated
from hybridrt.server.openai.stored_responses import whole_input
from hybridrt.server.wire.errors import APIError
from hybridrt.server.wire.sse import encode

# Fields of a chat request, as errors name them here.
RESPONSE_NAMES = {
    "messages": "input", "max_tokens": "max_output_tokens", "response_format": "text", "structured_outputs": "text",
    "reasoning_effort": "reasoning", "logprobs": "top_logprobs", "prompt": "input",
}  # fmt: skip


async def start_response(service: Service, body: ResponseRequest, scope: Scope) -> ResponseReply:
    """Starts the request of a body.

    Raises:
        APIError, HybridrtError: it is refused. Nothing has started.
    """
    service.check_model(body.model)
    await service.off_loop(scope, partial(check_body, "responses", body))
    if body.top_logprobs and not body.wants_logprobs:
        raise APIError(400, f"top_logprobs goes with include: send [{LOGPROBS!r}]", "top_logprobs")
    if body.background and (body.stream or not body.is_stored):
        raise APIError(
            400, "a response in the background is kept, and is no stream: leave out store and stream", "background"
        )
    if body.background and body.resume_token_ids:
        raise APIError(400, "resume_token_ids goes on with a stream: leave out background", "resume_token_ids")
    before, own = await whole_input(service, body, scope)
    chat = await service.off_loop(scope, partial(_as_chat, body, before, own))
    with named_in(lambda: _turns(body, before, own)):
        prepared = await prepare_chat(service, chat, scope)
    asked = await service.off_loop(scope, partial(repeated, body, prepared.prompt.params))
    kept = None
    if body.is_stored:
        text = await service.off_loop(scope, partial(_input_text, body, own))
        kept = Kept(service.responses, owner_of(scope), text, body.previous_response_id)
    name, deltas = service.submit([prepared.prompt], "resp_", body, scope)
    reply = ResponseReply(service, name, deltas, body, prepared, asked, kept)
    reply.warnings = _warnings(body)
    service.running[owner_of(scope) + name] = reply
    return reply


def _warnings(body: ResponseRequest) -> list[str]:
    """What was left out. The words are this server's own."""
    items = [] if isinstance(body.input, str) else body.input
    found = []
    if tools := sorted({tool.type for tool in body.tools or () if isinstance(tool, BuiltIn)}):
        found.append(f"tools left out, which this server cannot run: {' '.join(tools)}")
    if kinds := sorted({item.type for item in items if isinstance(item, BuiltIn)}):
        found.append(f"items of input left out: {' '.join(kinds)}")
    return found + grammar_warnings(map(_tool, body.own_tools))


def _input_text(body: ResponseRequest, own: list[Item]) -> bytes:
    items = _as_items(body) if isinstance(body.input, str) else own
    return encode([item.model_dump(exclude_none=True) for item in with_rests(items) if not isinstance(item, BuiltIn)])


def _as_items(body: ResponseRequest) -> list[Item]:
    return [InputMessage(role="user", content=body.input)] if isinstance(body.input, str) else []


def _as_chat(body: ResponseRequest, before: list[Item], own: list[Item]) -> ChatRequest:
    return as_chat_request(
        "responses",
        body,
        messages=[turn.message for turn in _turns(body, before, own)],
        max_completion_tokens=body.max_output_tokens,
        tools=[_tool(tool) for tool in body.own_tools] or None,
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=body.reasoning and body.reasoning.effort,
        thinking_token_budget=body.thinking_token_budget,
        response_format=_response_format(body),
        logprobs=body.wants_logprobs,
        top_logprobs=body.top_logprobs if body.wants_logprobs else None,
        chat_template_kwargs=body.chat_template_kwargs,
        truncate_prompt_tokens=-1 if body.truncation == "auto" else None,
    )


def _tool(tool: FunctionTool | CustomTool) -> dict[str, Any]:
    if isinstance(tool, CustomTool):
        return {"type": "custom", "custom": tool.model_dump(exclude={"type"}, exclude_none=True)}
    return function_tool(tool.name, tool.description, tool.parameters, tool.strict)


def _tool_choice(choice: Any) -> Any:
    """Leaves built-in tools out of those that are allowed."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
        return choice | {"tools": [tool for tool in choice["tools"] if not _is_built_in(tool)]}
    if _is_built_in(choice):
        text = f"tool_choice names {choice['type']}, which this server cannot run: choose a tool of your own"
        raise APIError(400, text, "tool_choice", "unsupported")
    return choice


def _is_built_in(tool: Any) -> bool:
    return isinstance(tool, dict) and str(tool.get("type")) in BUILT_IN_TOOLS


def _response_format(body: ResponseRequest) -> dict[str, Any] | None:
    if body.text is None or body.text.format is None:
        return None
    found = body.text.format
    if found.type != "json_schema":
        return {"type": found.type}
    return {"type": found.type, "json_schema": found.model_dump(by_alias=True, exclude_none=True, exclude={"type"})}


def _turns(body: ResponseRequest, before: list[Item], own: list[Item]) -> list[Turn]:
    """`before`: items of the responses that this one continues."""
    turns: list[Turn] = []
    if body.instructions:
        turns.append(Turn({"role": "system", "content": body.instructions}, "instructions"))
    items = [(item, "previous_response_id") for item in before]
    items += [(item, f"input.{i}") for i, item in enumerate(own)] + [(item, "input") for item in _as_items(body)]
    for item, place in items:
        match item:
            case InputMessage(role="assistant"):
                _assistant(turns, place, ("content", "tool_calls"))["content"] = _content(item.content)
                turns[-1] = turns[-1]._replace(place=_within(place, "content"))
            case InputMessage():
                message = {"role": item.role, "content": _content(item.content)}
                turns.append(Turn(message, _within(place, "content")))
            case ReasoningItem():
                earlier = _assistant(turns, place, ("content", "tool_calls", "reasoning_content"))
                earlier["reasoning_content"] = _text(item.content or item.summary or [])
            case FunctionCall():
                call = function_call(item.call_id, name_within(item.namespace, item.name), item.arguments)
                _assistant(turns, place, ()).setdefault("tool_calls", []).append(call)
            case CustomCall():
                name = name_within(item.namespace, item.name)
                call = function_call(item.call_id, name, json.dumps({"input": item.input}))
                _assistant(turns, place, ()).setdefault("tool_calls", []).append(call)
            case FunctionCallOutput() | CustomCallOutput():
                message = {"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)}
                turns.append(Turn(message, _within(place, "output")))
    return turns


def _within(place: str, field: str) -> str:
    """The place of a field in the body. For an item that the body does not hold, its name alone."""
    return f"{place}.{field}" if "." in place else place


def _assistant(turns: list[Turn], place: str, without: tuple[str, ...]) -> dict[str, Any]:
    """Continues the last message if it has none of these fields."""
    last = turns[-1].message if turns else {}
    if last.get("role") != "assistant" or any(field in last for field in without):
        turns.append(Turn({"role": "assistant"}, place))
    return turns[-1].message


def _content(parts: Contents) -> str | list[dict[str, Any]]:
    """The chat template joins parts."""
    return parts if isinstance(parts, str) else [_part(part) for part in parts]


def _part(part: InputText | OtherPart) -> dict[str, Any]:
    return {"type": "text", "text": part.text} if isinstance(part, InputText) else part.model_dump()


def _text(texts: Texts) -> str:
    return texts if isinstance(texts, str) else "\n".join(part.text for part in texts)
