"""/v1/chat/completions: a conversation in, its next message out."""

from collections.abc import Sequence
from threading import Lock
from typing import Any

from starlette.types import Scope

from hybridrt.engine.limits import PreparedPrompt
from hybridrt.engine.outputs import Delta
from hybridrt.engine.tokenizer import HFTokenizer, encode_prompt
from hybridrt.errors import CheckpointError, RequestError
from hybridrt.sampling_params import SamplingParams
from hybridrt.server.answers import Answer
from hybridrt.server.errors import APIError
from hybridrt.server.protocol import ChatRequest, Message, TokenizeRequest
from hybridrt.server.respond import Started
from hybridrt.server.service import Service, refuse_unsupported, response_id

# What this endpoint calls fields of SamplingParams.
CHAT_NAMES = {"logprobs": "top_logprobs"}
# Arguments of transformers' apply_chat_template and of ours; a request sets variables of the template alone.
_RESERVED = {
    "self", "messages", "template", "conversation", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
    "return_assistant_tokens_mask", "tokenizer_kwargs",
}  # fmt: skip
# A template runs in a fork of this process: what one thread holds while another forks stays held in the child.
_one_template = Lock()


class ChatAnswer(Answer):
    """Choices with a message."""

    whole_kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def _first_choice(self, index: int) -> dict[str, Any] | None:
        message = {"role": "assistant", "content": ""}
        return {"index": index, "delta": message, "logprobs": None, "finish_reason": None}

    def chunk(self, delta: Delta) -> dict[str, Any] | None:
        """As `Answer.chunk`; log-probabilities of the prompt stand beside the choices, as in `whole`."""
        chunk = super().chunk(delta)
        return chunk and chunk | (self._prompt_logprobs(delta.request_id) if delta.prompt_logprobs else {})

    def whole(self, ended: list[Delta]) -> dict[str, Any]:
        return super().whole(ended) | self._prompt_logprobs(ended[0].request_id)

    def _chunk_choice(self, index: int, delta: Delta) -> dict[str, Any]:
        message = {"content": delta.text} if delta.text else {}
        return self._choice(index, delta) | {"delta": message}

    def _whole_choice(self, index: int, delta: Delta) -> dict[str, Any]:
        message = {"role": "assistant", "content": delta.text, "refusal": None}
        return self._choice(index, delta) | {"message": message}

    def _choice(self, index: int, delta: Delta) -> dict[str, Any]:
        return {"index": index, "logprobs": self._logprobs(delta), "finish_reason": delta.finish_reason}

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if delta.logprobs is None:
            return None
        content = []
        for token, found in zip(delta.token_ids, delta.logprobs, strict=True):
            ranked = sorted(found.items(), key=lambda entry: -entry[1])
            top = [self._entry(t, value) for t, value in ranked]
            content.append({**self._entry(token, found[token]), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        spelled = self._token_text.spelled(token)
        return {"token": spelled.decode(errors="replace"), "logprob": logprob, "bytes": list(spelled)}


async def start_chat(service: Service, body: ChatRequest, scope: Scope) -> Started:
    """Starts what a body asks for.

    Raises:
        APIError, HybridrtError: it cannot be done. Nothing has started.
    """
    service.check_model(body.model)
    refuse_unsupported(body)
    params = _params(service, body)
    service.check_count(1, params)
    prepared = await _prepare(service, body, params)
    name = response_id("chatcmpl", body, scope)
    deltas = service.llm.submit([prepared], name, stream=bool(body.stream))
    return Started(ChatAnswer(service, name, deltas, body), deltas, bool(body.stream))


def _params(service: Service, body: ChatRequest) -> SamplingParams:
    if body.tools or body.tool_choice not in (None, "none", "auto"):
        raise APIError(400, "tools are not supported: leave tools and tool_choice out", "tools", "unsupported")
    if body.top_logprobs is not None and not body.logprobs:
        raise APIError(400, "top_logprobs goes with logprobs: set logprobs to true", "top_logprobs")
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    # None: as many as the model has room for.
    return service.sampling_params(body, max_tokens=most, logprobs=(body.top_logprobs or 0) if body.logprobs else None)


async def _prepare(service: Service, body: ChatRequest, params: SamplingParams) -> PreparedPrompt:
    most = service.llm.llm.plan.max_model_len - 1
    tokens = await service.llm.in_thread(chat_tokens, service.tokenizer, body, service.config.chat_template, most)
    return await service.llm.prepare(tokens, params)


def chat_tokens(
    tokenizer: HFTokenizer, body: ChatRequest | TokenizeRequest, template: str | None, most_tokens: int
) -> list[int]:
    """Token ids of a conversation.

    Raises:
        RequestError: the template fails on it, or it is too long.
    """
    variables = body.chat_template_kwargs or {}
    if reserved := _RESERVED & set(variables):
        raise RequestError(f"chat_template_kwargs sets {min(reserved)}, which is no template variable; remove it")
    if body.continue_final_message and body.add_generation_prompt:
        raise RequestError("continue_final_message goes with add_generation_prompt=false: set it, too")
    try:
        with _one_template:
            text = tokenizer.render_chat(
                _plain(body.messages or ()),
                template,
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
                **variables,
            )
    except CheckpointError as e:
        raise RequestError(str(e), "messages") from e
    return encode_prompt(tokenizer, text, most_tokens, bare=True)


def _plain(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as templates read them: content is text, whose parts are lines."""
    plain = []
    for message in messages:
        fields = {name: getattr(message, name) for name in message.model_fields_set}
        if isinstance(message.content, list):
            fields["content"] = "\n".join(part.text for part in message.content)
        plain.append(fields)
    return plain
