"""/v1/completions: continues text or token ids."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain
from typing import Any

from starlette.types import Scope

from hybridrt.base.sampling_params import SamplingParams
from hybridrt.engine.request.outputs import Delta
from hybridrt.engine.request.prompts import Prompt
from hybridrt.runtime.step.token_scores import TokenScores
from hybridrt.server.core.answer_size import check_repeated
from hybridrt.server.core.protocol import CompletionRequest
from hybridrt.server.core.service import Service, check_body
from hybridrt.server.openai.answers import LEAST_LOGPROB, Answer, sliced
from hybridrt.server.wire.errors import APIError
from hybridrt.server.wire.sse import SLICE, Slices

DEFAULT_MAX_TOKENS = 16  # OpenAI's


class CompletionAnswer(Answer):
    """Choices with a text."""

    whole_kind = chunk_kind = "text_completion"

    def __init__(self, *arguments: Any, echoes: list[str] | None, scored: bool, echo_alone: bool) -> None:
        """`echoes`: each choice's prompt text before its own. `scored`: log-probabilities, those of
        echoed prompts too. `echo_alone`: drops the one token that the engine gives.
        """
        super().__init__(*arguments)
        self._echoes, self._scored, self._echo_alone = echoes, scored, echo_alone
        self._offsets: dict[int, int] = {}
        self._opened = set[int]()
        self._waiting: dict[str, list[Delta]] = {}  # deltas by request, before the prompt's log-probabilities

    def count(self, delta: Delta) -> None:
        if self._echo_alone:
            delta.token_ids, delta.text, delta.stop_reason = [], "", None
            delta.logprobs = None if delta.logprobs is None else []
            delta.finish_reason = "length" if delta.finish_reason == "stop" else delta.finish_reason
        super().count(delta)

    def _take_resumed(self, delta: Delta) -> None:
        self.count(delta)

    def weight(self, delta: Delta) -> int:
        """See Reply.weight. A sample's first delta brings its prompt's text and
        log-probabilities."""
        index, more = self._place(delta), 0
        if self._scored and index not in self._offsets:
            more = sum(len(chunk) * chunk.width for chunk in self._scores.get(delta.request_id, ()))
        echo = 0 if self._echoes is None or self.streams else len(self._echoes[index])
        return super().weight(delta) + more + echo // 64

    def gain(self, delta: Delta) -> Iterator[bytes]:
        """See Reply.gain. Every sample of a scored prompt waits for its log-probabilities, which
        come with sample 0."""
        request = delta.request_id
        if self._scored and delta.prompt_scores is None and request not in self._scores:
            self._waiting.setdefault(request, []).append(delta)
            return
        yield from super().gain(delta)
        for waited in self._waiting.pop(request, ()):
            yield from super().gain(waited)

    def _first_choice(self, index: int) -> dict[str, Any] | None:
        if self._echoes is None or self._scored:
            return None  # known with the first token
        return self._choice(index, self._echoes[index], None, None)

    def _chunk_choice(self, index: int, delta: Delta) -> dict[str, Any]:
        if self._scored and index not in self._offsets:
            return self._whole_choice(index, delta)
        choice = self._choice(index, delta.text, self._logprobs(index, delta), delta.finish_reason)
        scores = self._prompt_logprobs(delta.request_id) if delta.prompt_scores is not None else {}
        return choice | scores | self._prompt_tokens(index, delta)

    def _whole_choice(self, index: int, delta: Delta) -> dict[str, Any]:
        echo = "" if self._echoes is None else self._echoes[index]
        choice = self._choice(index, echo + delta.text, self._logprobs(index, delta), delta.finish_reason)
        known = self._prompt_logprobs(delta.request_id) | self._prompt_tokens(index, delta)
        return choice | ({} if self.streams else {"prompt_logprobs": None, "prompt_token_ids": None}) | known

    def _prompt_tokens(self, index: int, delta: Delta) -> dict[str, Any]:
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
        """Returns four lists with an entry a token, echoed ones first. Offsets count characters of
        the tokens' own texts.
        """
        if delta.logprobs is None:
            return None
        tokens, scores, prompt = delta.token_ids, delta.logprobs, list[TokenScores]()
        own = [found[token] for token, found in zip(tokens, scores, strict=True)]
        first = list[float | None]()
        if self._echoes is not None and index not in self._offsets and delta.request_id in self._scores:
            prompt = self._scores[delta.request_id]
            tokens = self._prompts[delta.request_id] + tokens
            first = [None, *(value for chunk in prompt for value in chunk.own.tolist())]
        widths = (len(self._token_text.text(token)) for token in tokens)
        *offsets, self._offsets[index] = accumulate(widths, initial=self._offsets.get(index, 0))
        return {
            "tokens": [self._names.text(token) for token in tokens],
            "token_logprobs": first + own,
            "top_logprobs": Slices(self._top(prompt, scores, bool(first)))
            if len(tokens) > SLICE
            else [entry for part in self._top(prompt, scores, bool(first)) for entry in part],
            "text_offset": offsets,
        }

    def _top(
        self, prompt: list[TokenScores], scores: list[dict[int, float]], begins: bool
    ) -> Iterator[list[dict[str, float] | None]]:
        parts = (part.entries() for part in sliced(prompt))
        later = (scores[start : start + SLICE] for start in range(0, len(scores), SLICE))
        yield [None] * begins
        for part in chain(parts, later):
            yield [{self._names.text(t): max(v, LEAST_LOGPROB) for t, v in found.items()} for found in part]


async def start_completions(service: Service, body: CompletionRequest, scope: Scope) -> CompletionAnswer:
    """Starts the requests of a body.

    Raises:
        APIError, HybridrtError: refused. Nothing has started.
    """
    service.check_model(body.model)
    await service.off_loop(scope, partial(check_body, "completions", body))
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    echo_alone = bool(body.echo) and max_tokens == 0
    most = 1 if echo_alone else max_tokens
    if body.logprob_token_ids and body.logprobs is None:
        raise APIError(400, "logprob_token_ids goes with logprobs: set logprobs to 0", "logprob_token_ids")
    if body.echo and body.truncate_prompt_tokens is not None:
        text = "echo shows the whole prompt, and truncate_prompt_tokens leaves out its beginning: pass one of them"
        raise APIError(400, text, "truncate_prompt_tokens", "unsupported")
    changes = {
        "max_tokens": most, "logprobs": body.logprobs, "logprob_token_ids": body.logprob_token_ids,
    }  # fmt: skip
    settings = partial(service.sampling_params, body, **changes)
    params = await service.off_loop(scope, settings)
    scored = bool(body.echo) and body.logprobs is not None
    if scored:
        params = replace(params, prompt_logprobs=max(body.logprobs or 0, body.prompt_logprobs or 0))
    prompts = read_prompts(body.prompt, "prompt")
    service.check_count(len(prompts), params)
    bare = body.add_special_tokens is False
    given = [await bare_prompt(service, prompt, params) for prompt in prompts] if bare else prompts
    batch = await service.llm.prepare_all(given, params)
    echoes = None
    if body.echo:
        texts = await service.off_loop(scope, partial(_texts, service, prompts))
        check_repeated(map(len, texts), params.n, "characters", "echo")
        echoes = [text for text in texts for _ in range(params.n)]
    forms = params.n * (int(body.prompt_logprobs is not None) + scored)
    name, deltas = service.submit(batch, "cmpl-", body, scope, forms)
    return CompletionAnswer(service, name, deltas, body, echoes=echoes, scored=scored, echo_alone=echo_alone)


def _texts(service: Service, prompts: list[Prompt]) -> list[str]:
    """Shows every token of ids: offsets of log-probabilities count special ones, too."""
    return [p if isinstance(p, str) else service.tokenizer.decode(list(p), False) for p in prompts]  # type: ignore[arg-type]


async def bare_prompt(service: Service, prompt: Prompt, params: SamplingParams) -> Prompt:
    """A text without special tokens, as token ids."""
    if not isinstance(prompt, str):
        return prompt
    return await service.encode(prompt, bare=True, truncated=params.truncate_prompt_tokens is not None)


def read_prompts(prompt: Any, field: str) -> list[Prompt]:
    """The prompts of a field of type Prompts. APIError for an empty list."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise APIError(400, f"{field} is an empty list; it must be text, token ids, or a list of either", field)
    return [prompt] if isinstance(prompt[0], int) else list(prompt)
