"""/v1/chat/completions: the next message of a conversation."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.types import Scope

from hybridrt.base.pace import with_rests
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.chat.conversation import Conversation, read_conversation
from hybridrt.chat.events import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning
from hybridrt.engine.api.async_llm import DeltaStream
from hybridrt.engine.api.chats import ChatDelta, ChatReader, PreparedChat
from hybridrt.engine.request.outputs import Delta
from hybridrt.server.core.protocol import ChatFields, ChatRequest, Sampling
from hybridrt.server.core.request_fields import refused_in
from hybridrt.server.core.service import Service, check_body, client_of
from hybridrt.server.openai.answers import Answer, in_slices
from hybridrt.server.openai.custom_calls import custom_call, custom_tools, grammar_warnings, input_of
from hybridrt.server.wire.errors import APIError
from hybridrt.server.wire.sse import SLICE

# Fields of SamplingParams, as errors name them here.
CHAT_NAMES = {"logprobs": "top_logprobs", "prompt": "messages"}


class ChatAnswer(Answer):
    """Choices with a message."""

    whole_kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(
        self, service: Service, name: str, deltas: DeltaStream, body: ChatRequest, prepared: PreparedChat
    ) -> None:
        super().__init__(service, name, deltas, body)
        self._reader = ChatReader(prepared)
        for index, answer in enumerate(self._reader.answers):
            answer.name_calls(f"{name}/{index}")
        self._reasoning = 0  # tokens
        params = prepared.prompt.params
        self._most = (params.alternatives or 0) + (params.logprob_token_ids is not None)  # the token itself
        self._custom = {tool["custom"]["name"] for tool in custom_tools(body.tools or ())}
        self._open: dict[tuple[int, int], str] = {}  # arguments so far of calls of custom tools, by choice and call
        self._shows_reasoning = body.include_reasoning is not False

    def usage(self) -> dict[str, Any]:
        return super().usage() | {"completion_tokens_details": {"reasoning_tokens": self._reasoning}}

    def weight(self, delta: Delta) -> int:
        uncounted = self._reader.answers[delta.index].uncounted if delta.finish_reason is not None else 0
        return super().weight(delta) + uncounted // 4

    def gain(self, delta: Delta) -> Iterator[bytes]:
        """See Reply.gain. The finish reason has a chunk of its own after the last call: OpenAI's
        client reads it before the calls of the same chunk, and would not end them."""
        choice = self._gained(delta)
        if choice is None:
            return
        facts = self._prompt_logprobs(delta.request_id) if delta.prompt_scores is not None else {}
        large = self.weight(delta) > SLICE
        if choice["finish_reason"] is None or "tool_calls" not in choice["delta"]:
            yield from self._event(choice, facts, large)
            return
        ending = {"finish_reason": choice["finish_reason"]}
        ending |= {name: choice.pop(name) for name in ("stop_reason", "matched_stop")}
        last = {"index": choice["index"], "delta": {}, "logprobs": None, **ending}
        yield from self._event(choice | {"finish_reason": None}, facts, large)
        yield from self._event(last)

    def opening(self) -> Iterator[bytes]:
        """See Reply.opening. The first chunk has the prompt's tokens, if they are wanted."""
        for index in range(len(self._places)):
            yield from self._event(self._first_choice(index), {} if index else self._prompt_tokens())

    def whole(self, ended: list[Delta]) -> dict[str, Any]:
        answer = super().whole(ended) | {"prompt_logprobs": None, "prompt_token_ids": None, "prompt_text": None}
        return answer | self._prompt_logprobs(ended[0].request_id) | self._prompt_tokens()

    def _prompt_tokens(self) -> dict[str, Any]:
        (tokens,) = self._prompts.values()
        return {"prompt_token_ids": tokens} if self._wants_tokens else {}

    def _first_choice(self, index: int) -> dict[str, Any]:
        message = {"role": "assistant", "content": ""}
        return {"index": index, "delta": message, "logprobs": None, "finish_reason": None}

    def _chunk_choice(self, index: int, delta: Delta) -> dict[str, Any]:
        gain = self._read(delta)
        events = (e for e in gain.events if self._shows_reasoning or not isinstance(e, Reasoning))
        return self._choice(index, delta, gain.finish_reason) | {"delta": self._message_delta(index, events)}

    def _whole_choice(self, index: int, delta: Delta) -> dict[str, Any]:
        reason = self._read(delta).finish_reason
        answer = self._reader.answers[delta.index].message
        calls = [
            custom_call(call.id, call.name, input_of(call.arguments))
            if call.name in self._custom
            else function_call(call.id, call.name, call.arguments)
            for call in answer.tool_calls
        ]
        content = None if calls and not answer.content else answer.content
        reasoning = answer.reasoning if self._shows_reasoning else ""
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None, "annotations": None}
        message |= {"audio": None, "function_call": None, "reasoning": reasoning or None}
        message |= {"reasoning_content": reasoning} if reasoning else {}
        message |= {"tool_calls": calls} if calls else {}
        return self._choice(index, delta, reason) | {"message": message}

    def _message_delta(self, index: int, events: Iterable[Event]) -> dict[str, Any]:
        """The text of a custom tool's call is known at the end of its JSON text."""
        delta: dict[str, Any] = {}
        calls: dict[int, dict[str, Any]] = {}
        for event in events:
            match event:
                case Content():
                    delta["content"] = delta.get("content", "") + event.text
                case Reasoning():
                    delta["reasoning_content"] = delta["reasoning"] = delta.get("reasoning", "") + event.text
                case CallBegin() if event.name in self._custom:
                    self._open[index, event.index] = ""
                    calls[event.index] = {"index": event.index, **custom_call(event.id, event.name, "")}
                case CallBegin():
                    calls[event.index] = {"index": event.index, **function_call(event.id, event.name, "")}
                case CallArguments() if (index, event.index) in self._open:
                    self._open[index, event.index] += event.text
                case CallArguments():
                    call = calls.setdefault(event.index, {"index": event.index, "function": {"arguments": ""}})
                    call["function"]["arguments"] += event.text
                case CallEnd() if (index, event.index) in self._open:
                    call = calls.setdefault(event.index, {"index": event.index, "custom": {}})
                    call["custom"]["input"] = input_of(self._open.pop((index, event.index)))
        return delta | ({"tool_calls": list(calls.values())} if calls else {})

    def _read(self, delta: Delta) -> ChatDelta:
        """Counts reasoning here: summing over all samples takes long."""
        answer = self._reader.answers[delta.index]
        before = answer.reasoning_tokens
        gain = self._reader.read(delta)
        self._reasoning += answer.reasoning_tokens - before
        return gain

    def _has_gain(self, choice: dict[str, Any]) -> bool:
        return bool(choice.get("delta"))

    def _choice(self, index: int, delta: Delta, reason: str | None) -> dict[str, Any]:
        return {"index": index, "logprobs": self._logprobs(delta), "finish_reason": reason}

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if delta.logprobs is None:
            return None
        scored = list(zip(delta.token_ids, delta.logprobs, strict=True))

        def entries(start: int, end: int) -> list[Any]:
            return [self._names.entry(*each, self._most) for each in scored[start:end]]

        return {"content": in_slices(entries, len(scored)), "refusal": None}


def function_call(name: str, function: str, arguments: str) -> dict[str, Any]:
    """A call of a message, in OpenAI's form."""
    return {"id": name, "type": "function", "function": {"name": function, "arguments": arguments}}


def function_tool(
    name: str,
    description: str | None = None,
    parameters: dict[str, Any] | None = None,
    strict: bool | None = None,
) -> dict[str, Any]:
    """A tool, or the choice of one, in OpenAI's form."""
    function = {"name": name, "description": description, "parameters": parameters, "strict": strict}
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


async def start_chat(service: Service, body: ChatRequest, scope: Scope) -> ChatAnswer:
    """Starts the request of a body.

    Raises:
        APIError, HybridrtError: it is refused. Nothing has started.
    """
    service.check_model(body.model)
    await service.off_loop(scope, partial(check_body, "chat", body))
    prepared = await prepare_chat(service, body, scope)
    name, deltas = service.submit([prepared.prompt], "chatcmpl-", body, scope)
    answer = ChatAnswer(service, name, deltas, body, prepared)
    answer.warnings = grammar_warnings(body.tools or ())
    return answer


def as_chat_request(form: str, body: Sampling, **fields: Any) -> ChatRequest:
    """The chat request for the body of another endpoint.

    Args:
        form: the endpoint's (request_fields.py).
        fields: fields of ChatRequest, in addition to those of Sampling that the body sets. None:
            not set.

    Raises:
        RequestValidationError: a field is invalid.
    """
    names = (body.model_fields_set & Sampling.model_fields.keys()) - refused_in(form)
    shared = {name: getattr(body, name) for name in names}
    given = {name: value for name, value in fields.items() if value is not None}
    try:
        return ChatRequest.model_validate({**shared, **given})
    except ValidationError as e:
        raise RequestValidationError([{**error, "loc": ("body", *error["loc"])} for error in e.errors()]) from e


async def prepare_chat(service: Service, body: ChatRequest, scope: Scope) -> PreparedChat:
    """Checks and tokenises the conversation of a body, for every endpoint of conversations.

    Raises:
        APIError, HybridrtError: it is refused.
    """
    service.check_model(body.model)
    params = await service.off_loop(scope, partial(_params, service, body))
    service.check_count(1, params)
    conversation = await service.off_loop(scope, partial(conversation_of, body, client_of(scope)))
    return await service.prepare_chat(conversation, params, body.chat_template)


def _params(service: Service, body: ChatRequest) -> SamplingParams:
    if body.top_logprobs and not body.logprobs:  # vLLM's clients send its default, 0
        raise APIError(400, "top_logprobs goes with logprobs: set logprobs to true", "top_logprobs")
    if body.logprob_token_ids and not body.logprobs:
        raise APIError(400, "logprob_token_ids goes with logprobs: set logprobs to true", "logprob_token_ids")
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    ids = body.logprob_token_ids
    return service.sampling_params(body, max_tokens=max_tokens, logprobs=logprobs, logprob_token_ids=ids)


def conversation_of(body: ChatFields, client: str = "") -> Conversation:
    """The conversation of a body. `client`: for whom.

    Raises:
        RequestError: something in it is wrong.
    """
    asked, continued = body.add_generation_prompt, body.continue_final_message
    found = read_conversation(
        [message.model_dump(exclude_unset=True) for message in with_rests(body.messages or ())],
        body.tools,
        body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=body.reasoning_effort,
        thinking_budget=body.thinking_token_budget,
        add_generation_prompt=not continued if asked is None else asked,
        continue_final_message=continued,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    return replace(found, client=client)
