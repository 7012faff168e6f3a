"""/v1/responses: OpenAI's Responses API, mapped to requests of /v1/chat/completions."""

from functools import partial
from typing import Any

from starlette.types import Scope

from hybridrt.server.core.protocol import ChatRequest
from hybridrt.server.core.service import Service
from hybridrt.server.openai.chat import as_chat_request, function_call, function_tool, prepare_chat
from hybridrt.server.openai.response_protocol import (
    LOGPROBS,
    FunctionCall,
    FunctionCallOutput,
    InputMessage,
    Item,
    ReasoningItem,
    ResponseRequest,
    Texts,
)
from hybridrt.server.openai.response_reply import ResponseReply, repeated
from hybridrt.server.wire.errors import APIError

# Fields of a chat request, as errors name them here.
RESPONSE_NAMES = {
    "messages": "input", "max_tokens": "max_output_tokens", "response_format": "text", "structured_outputs": "text",
    "reasoning_effort": "reasoning", "logprobs": "top_logprobs", "prompt": "input",
}  # fmt: skip
_NO_STORE = "this server stores no responses: send the whole conversation as input"
_REFUSED = {
    "store": _NO_STORE,
    "previous_response_id": _NO_STORE,
    "conversation": _NO_STORE,
    "background": "answers are not made in the background: leave it out",
    "prompt": "this server stores no prompts: send instructions and input",
}


async def start_response(service: Service, body: ResponseRequest, scope: Scope) -> ResponseReply:
    """Starts the request of a body.

    Raises:
        APIError, HybridrtError: it is refused. Nothing has started.
    """
    _refuse(body)
    chat = await service.off_loop(scope, partial(_as_chat, body))
    prepared = await prepare_chat(service, chat, scope)
    asked = await service.off_loop(scope, partial(repeated, body, prepared.prompt.params))
    name, deltas = service.submit([prepared.prompt], "resp_", body, scope)
    return ResponseReply(service, name, deltas, body, prepared, asked)


def _refuse(body: ResponseRequest) -> None:
    for name, reason in _REFUSED.items():
        if getattr(body, name):
            raise APIError(400, f"{name} is not supported: {reason}", name, "unsupported")
    if body.truncation not in (None, "disabled"):
        raise APIError(400, "truncation is not supported: shorten the input, or send disabled", "truncation")
    if body.top_logprobs and not body.wants_logprobs:
        raise APIError(400, f"top_logprobs goes with include: send [{LOGPROBS!r}]", "top_logprobs")


def _as_chat(body: ResponseRequest) -> ChatRequest:
    return as_chat_request(
        body,
        messages=_messages(body),
        max_completion_tokens=body.max_output_tokens,
        tools=[function_tool(t.name, t.description, t.parameters, t.strict) for t in body.tools or ()] or None,
        tool_choice=body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=body.reasoning and body.reasoning.effort,
        thinking_token_budget=body.thinking_token_budget,
        response_format=_response_format(body),
        logprobs=body.wants_logprobs,
        top_logprobs=body.top_logprobs if body.wants_logprobs else None,
        chat_template_kwargs=body.chat_template_kwargs,
    )


def _response_format(body: ResponseRequest) -> dict[str, Any] | None:
    if body.text is None or body.text.format is None:
        return None
    found = body.text.format
    if found.type != "json_schema":
        return {"type": found.type}
    return {"type": found.type, "json_schema": found.model_dump(by_alias=True, exclude_none=True, exclude={"type"})}


def _messages(body: ResponseRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    items: list[Item] = [InputMessage(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    for item in items:
        match item:
            case InputMessage(role="assistant"):
                _assistant(messages, ("content", "tool_calls"))["content"] = _content(item.content)
            case InputMessage():
                messages.append({"role": item.role, "content": _content(item.content)})
            case ReasoningItem():
                earlier = _assistant(messages, ("content", "tool_calls", "reasoning_content"))
                earlier["reasoning_content"] = _text(item.content or [])
            case FunctionCall():
                call = function_call(item.call_id, item.name, item.arguments)
                _assistant(messages, ()).setdefault("tool_calls", []).append(call)
            case FunctionCallOutput():
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)})
    return messages


def _assistant(messages: list[dict[str, Any]], without: tuple[str, ...]) -> dict[str, Any]:
    """Continues the last message if it has none of these fields."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(field in last for field in without):
        messages.append({"role": "assistant"})
    return messages[-1]


def _content(texts: Texts) -> str | list[dict[str, str]]:
    """The chat template joins parts."""
    return texts if isinstance(texts, str) else [{"type": "text", "text": part.text} for part in texts]


def _text(texts: Texts) -> str:
    return texts if isinstance(texts, str) else "\n".join(part.text for part in texts)
