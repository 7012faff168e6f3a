"""/v1/completions: text or token ids in, their continuation out."""

from dataclasses import replace
from typing import Any

from starlette.types import Scope

from hybridrt.engine.outputs import Delta
from hybridrt.engine.prompts import Prompt
from hybridrt.sampling_params import SamplingParams
from hybridrt.server.answers import LEAST_LOGPROB, Answer
from hybridrt.server.errors import APIError
from hybridrt.server.protocol import CompletionRequest
from hybridrt.server.service import Service, refuse_unsupported

DEFAULT_MAX_TOKENS = 16  # OpenAI's


class CompletionAnswer(Answer):
    """Choices with a text."""

    whole_kind = chunk_kind = "text_completion"

    def __init__(self, *arguments: Any, echoes: list[str] | None, scored: bool, echo_alone: bool) -> None:
        """
        Args:
            echoes: the prompts' texts, for each choice one, which come before its own text; None: they do not.
            scored: log-probabilities are asked for: those of echoed prompts, too.
            echo_alone: no output is wanted. The one token that the engine gives is left out.
        """
        super().__init__(*arguments)
        self._echoes, self._scored, self._echo_alone = echoes, scored, echo_alone
        self._offsets: dict[int, int] = {}
        self._opened = set[int]()  # choices whose prompt's tokens were told
        self._waiting: dict[str, list[Delta]] = {}  # by request: deltas that came before the prompt's log-probabilities

    def count(self, delta: Delta) -> None:
        """As Reply.count."""
        if self._echo_alone:
            delta.token_ids, delta.text, delta.stop_reason = [], "", None
            delta.logprobs = None if delta.logprobs is None else []
            delta.finish_reason = "length" if delta.finish_reason == "stop" else delta.finish_reason
        super().count(delta)

    def gain(self, delta: Delta) -> bytes:
        """As Reply.gain. Every sample of a scored prompt waits for its log-probabilities, which come with sample 0."""
        request = delta.request_id
        if self._scored and delta.prompt_logprobs is None and request not in self._scores:
            self._waiting.setdefault(request, []).append(delta)
            return b""
        return b"".join(map(super().gain, (delta, *self._waiting.pop(request, ()))))

    def _first_choice(self, index: int) -> dict[str, Any] | None:
        if self._echoes is None or self._scored:
            return None  # a scored prompt comes with the first token: its log-probabilities are known then
        return self._choice(index, self._echoes[index], None, None)

    def _chunk_choice(self, index: int, delta: Delta) -> dict[str, Any]:
        if self._scored and index not in self._offsets:
            return self._whole_choice(index, delta)
        choice = self._choice(index, delta.text, self._logprobs(index, delta), delta.finish_reason)
        scores = self._prompt_logprobs(delta.request_id) if delta.prompt_logprobs else {}
        return choice | scores | self._prompt_tokens(index, delta)

    def _whole_choice(self, index: int, delta: Delta) -> dict[str, Any]:
        echo = "" if self._echoes is None else self._echoes[index]
        choice = self._choice(index, echo + delta.text, self._logprobs(index, delta), delta.finish_reason)
        return choice | self._prompt_logprobs(delta.request_id) | self._prompt_tokens(index, delta)

    def _prompt_tokens(self, index: int, delta: Delta) -> dict[str, Any]:
        """The prompt's tokens, once for each choice, if they are wanted."""
        if not self._wants_tokens or index in self._opened:
            return {}
        self._opened.add(index)
        return {"prompt_token_ids": self._prompts[delta.request_id]}

    def _has_gain(self, choice: dict[str, Any]) -> bool:
        return bool(choice["text"])

    @staticmethod
    def _choice(index: int, text: str, logprobs: dict[str, Any] | None, reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, index: int, delta: Delta) -> dict[str, Any] | None:
        """Four lists with an entry a token, echoed ones first. Offsets count characters of the tokens' own texts."""
        if delta.logprobs is None:
            return None
        tokens, scores = delta.token_ids, list[dict[int, float] | None](delta.logprobs)
        if self._echoes is not None and index not in self._offsets:
            of_prompt = self._scores.get(delta.request_id, [])
            tokens, scores = self._prompts[delta.request_id][: len(of_prompt)] + tokens, of_prompt + scores
        offset, offsets = self._offsets.get(index, 0), []
        for token in tokens:
            offsets.append(offset)
            offset += len(self._token_text.text(token))
        self._offsets[index] = offset
        return {
            "tokens": [self._names.text(token) for token in tokens],
            "token_logprobs": [found and found[token] for token, found in zip(tokens, scores, strict=True)],
            "top_logprobs": [
                found and {self._names.text(t): max(value, LEAST_LOGPROB) for t, value in found.items()}
                for found in scores
            ],
            "text_offset": offsets,
        }


async def start_completions(service: Service, body: CompletionRequest, scope: Scope) -> CompletionAnswer:
    """Starts what a body asks for.

    Raises:
        APIError, HybridrtError: it cannot be done. Nothing has started.
    """
    service.check_model(body.model)
    refuse_unsupported(body)
    if body.suffix:
        raise APIError(400, "suffix is not supported: the models continue text, they do not fill gaps", "suffix")
    if body.best_of not in (None, body.n or 1):
        raise APIError(400, "best_of is not supported: leave it out, or set it to n", "best_of")
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    echo_alone = bool(body.echo) and max_tokens == 0
    params = service.sampling_params(body, max_tokens=1 if echo_alone else max_tokens, logprobs=body.logprobs)
    scored = bool(body.echo) and body.logprobs is not None
    if scored:
        params = replace(params, prompt_logprobs=max(body.logprobs or 0, body.prompt_logprobs or 0))
    prompts = _prompts(body)
    service.check_count(len(prompts), params)
    bare = body.add_special_tokens is False
    batch = [await service.llm.prepare(await _bare(service, p, params) if bare else p, params) for p in prompts]
    echoes = None
    if body.echo:
        # Of ids every token is shown, special ones too: offsets of log-probabilities count all of them.
        texts = [p if isinstance(p, str) else service.tokenizer.decode(list(p), False) for p in prompts]  # type: ignore[arg-type]
        echoes = [text for text in texts for _ in range(params.n)]
    name, deltas = service.submit(batch, "cmpl-", body, scope)
    return CompletionAnswer(service, name, deltas, body, echoes=echoes, scored=scored, echo_alone=echo_alone)


async def _bare(service: Service, prompt: Prompt, params: SamplingParams) -> Prompt:
    """The tokens of a text without the special ones that its tokenizer adds."""
    if not isinstance(prompt, str):
        return prompt
    return await service.encode(prompt, bare=True, truncated=params.truncate_prompt_tokens is not None)


def _prompts(body: CompletionRequest) -> list[Prompt]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise APIError(400, "prompt is an empty list; it must be text, token ids, or a list of either", "prompt")
    return [prompt] if isinstance(prompt[0], int) else list(prompt)
