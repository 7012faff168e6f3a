"""Checks of prompts and parameters against a model's limits, before they are queued."""

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from hybridrt.base.errors import GrammarError, PromptTooLongError, RequestError, is_text, shown
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.base.spans import Span, mrope_delta
from hybridrt.engine.grammar.grammar_compiler import GrammarCompiler
from hybridrt.engine.grammar.matcher import Matcher
from hybridrt.engine.request.prompts import Prompt, as_prompts, is_integer, text_or_ids, token_ids
from hybridrt.engine.request.spans import SpanLimits, check_spans
from hybridrt.engine.text.stop_strings import StopStrings
from hybridrt.engine.text.tokenizer import Tokenizer, encode_prompt
from hybridrt.kernels.sampling.token_rules import TokenRules
from hybridrt.mem_cache.prefix_tree.prefix_cache import PrefixMatch
from hybridrt.runtime.step.sampling_table import SamplingTable, any_allowed, make_rules

MAX_NAME_CHARACTERS = 1024
_FORBIDDING = ("allowed_token_ids", "bad_words", "min_tokens", "structured_outputs")


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A checked prompt with its parameters (`Engine.prepare`).

    Attributes:
        ids: `tokens` as [n] int32, made once: a long list takes long.
        max_len: prompt + output tokens at which a sample ends.
        stop_ids: tokens that end it.
        rules: which single tokens the parameters allow; None for all.
        boundaries: numbers of the prompt's tokens at which others may go on differently, such as
            the system prompt's.
        matcher: follows `structured_outputs`, and has read `resume_token_ids`; None without. Each
            sample gets a copy.
        stop: finds `params.stop`; None without. Samples share it.
        spans: tokens that take their embeddings from an encoder.
        mrope_delta: position of a generated token, less its index.
    """

    tokens: list[int]
    ids: np.ndarray = field(compare=False)
    params: SamplingParams
    max_len: int
    stop_ids: frozenset[int]
    rules: TokenRules | None = None
    boundaries: tuple[int, ...] = ()
    matcher: Matcher | None = None
    stop: StopStrings | None = None
    spans: tuple[Span, ...] = ()
    mrope_delta: int = 0

    @property
    def may_travel(self) -> bool:
        """All of the prompt except its last token may be computed elsewhere."""
        plain = self.params.prompt_logprobs is None and self.params.pooling is None and not self.spans
        return len(self.tokens) > 1 and plain


@dataclass(frozen=True, slots=True)
class ResolvedParams:
    """What parameters mean for the engine's model: fields of PreparedPrompt that do not depend on the prompt."""

    stop_ids: frozenset[int]
    rules: TokenRules | None
    stop: StopStrings | None


@dataclass(slots=True)
class LatestParams:
    """The parameters of a batch's last prompt, and what they mean: many prompts have the same ones.

    Attributes:
        resumed: a matcher that has read their `resume_token_ids`; None: there is none yet.
    """

    params: SamplingParams | None = None
    resolved: ResolvedParams | None = None
    resumed: Matcher | None = None


@dataclass(frozen=True)
class EngineLimits:
    """Limits of requests by the model and its memory plan.

    Attributes:
        max_model_len: longest prompt + output of a request, in tokens.
        chunked_prefill_size: as EngineConfig has it.
        eos_token_ids: end a request unless it says `ignore_eos`.
        image_tokens: those of ModelConfig.
        spans: the spans that requests may have; None: no encoder runs.
        mrope: tokens of spans have positions on three axes.
    """

    vocab_size: int
    max_model_len: int
    chunked_prefill_size: int
    eos_token_ids: Sequence[int] = ()
    image_tokens: Mapping[int, str] = field(default_factory=dict)
    spans: SpanLimits | None = None
    mrope: bool = False

    def check_length(self, num_tokens: int) -> None:
        longest = self.max_model_len - 1
        if num_tokens > longest:
            # Clients know OpenAI's words.
            raise PromptTooLongError(
                f"the prompt has {num_tokens} tokens; this model's maximum context length is {longest + 1} tokens "
                f"(max_model_len), so it may have at most {longest}, which leaves room for one output token: shorten "
                "it or raise max_model_len",
                "prompt",
            )


@dataclass(frozen=True)
class Intake:
    """Makes prepared prompts of a caller's arguments.

    Attributes:
        compiler: compiles grammars.
        check_fits: raises MemoryBudgetError if a request of so many tokens could not run even
            alone.
    """

    limits: EngineLimits
    tokenizer: Tokenizer | None
    compiler: GrammarCompiler
    check_fits: Callable[[int], None]

    def prepare(self, prompt: Prompt, params: SamplingParams, latest: LatestParams | None = None) -> PreparedPrompt:
        """Checks a prompt (see hybridrt.engine.request.prompts) and its parameters, and compiles its
        grammar. Changes nothing.

        Args:
            latest: one for all prompts of a batch, which changes here. The largest parameters take long to
                resolve, and a batch may have a thousand prompts.

        Raises:
            RequestError: the prompt is no prompt, empty, too long, holds ids outside the
                vocabulary, or needs a tokenizer; or the parameters do not fit the vocabulary; or a
                grammar cannot be compiled, or `resume_token_ids` do not fit it.
            MemoryBudgetError: the request could not run even alone.
            QueueFullError: too many grammars are being compiled.
        """
        if not isinstance(params, SamplingParams):
            raise _no_params(params)
        given = prompt.get("spans") if isinstance(prompt, Mapping) else None
        tokens, ids = self._tokens(prompt, params, placeholders=bool(given))
        spans = check_spans(given, tokens, self.limits.spans) if given else ()
        if params.prompt_logprobs is not None and any(span.input.embeds for span in spans):
            raise RequestError(
                "prompt_logprobs: embeddings have no token ids to score; leave it out", "prompt_logprobs"
            )
        latest = LatestParams() if latest is None else latest
        if latest.params is not params:
            latest.params, latest.resolved, latest.resumed = params, self._resolve(params), None
        resolved = latest.resolved
        assert resolved is not None, "it was made for these parameters"
        longest = self.limits.max_model_len
        max_len = longest if params.max_tokens is None else min(longest, len(tokens) + params.max_tokens)
        _check_resumed(len(tokens) + len(params.resume_token_ids), max_len)
        self.check_fits(max_len)
        constrained = params.structured_outputs is not None or resolved.rules is not None
        matcher = self._matcher(params, resolved, latest) if constrained else None
        delta = mrope_delta(spans) if self.limits.mrope else 0
        return PreparedPrompt(
            tokens, ids, params, max_len, resolved.stop_ids, resolved.rules, matcher=matcher, stop=resolved.stop,
            spans=spans, mrope_delta=delta,
        )  # fmt: skip

    def _matcher(self, params: SamplingParams, resolved: ResolvedParams, latest: LatestParams) -> Matcher | None:
        structured = params.structured_outputs
        matcher = None if structured is None else self.compiler.matcher(structured, params.n)
        if resolved.rules is not None:
            _check_first(params, resolved.rules, matcher)
        if matcher is None or not params.resume_token_ids:
            return matcher
        # Here, and not when it is queued: a grammar may need seconds for them, and all requests would wait.
        latest.resumed = latest.resumed or _resumed(matcher, params.resume_token_ids, resolved.stop_ids)
        return latest.resumed

    def _tokens(self, prompt: Prompt, params: SamplingParams, placeholders: bool) -> tuple[list[int], np.ndarray]:
        """The prompt's tokens as a list and as [n] int32. `placeholders`: tokens of images are allowed;
        `check_spans` follows."""
        limits = self.limits
        self._check_params(params)
        tokens = self._encode(prompt, params)
        if not tokens:
            raise RequestError("the prompt is empty; give it at least one token", "prompt")
        ids = self._ids(tokens)
        if limits.image_tokens:
            self._check_placeholders(tokens, placeholders)
        limits.check_length(len(tokens))
        return tokens, ids

    def _ids(self, tokens: list[int]) -> np.ndarray:
        """Tokens as [n] int32. RequestError if one is outside the vocabulary."""
        vocab = self.limits.vocab_size
        # Not numpy's: it lets another thread have the interpreter, and takes up to 0.2 ms until it is back.
        if min(tokens) < 0 or max(tokens) >= vocab:
            bad = next(t for t in tokens if not 0 <= t < vocab)
            raise RequestError(
                f"token id {shown(bad)} is outside the vocabulary; valid ids are 0 to {vocab - 1}", "prompt"
            )
        return np.array(tokens, np.int32)

    def _check_placeholders(self, tokens: list[int], allowed: bool) -> None:
        limits, own = self.limits, set[int]()
        if allowed and limits.spans is not None and limits.spans.token is not None:
            own = {limits.spans.token}
        held = (limits.image_tokens.keys() & set(tokens)) - own
        if not held:
            return
        named = f"{min(held)} ({limits.image_tokens[min(held)]})"
        what = f"the prompt holds token {named}, which stands for an image or a video"
        if limits.spans is None or limits.spans.token is None:
            raise RequestError(f"{what}; hybridrt runs the text part of this model alone: leave images out", "prompt")
        raise RequestError(f"{what}; pass images with the prompt, and let hybridrt write their tokens", "prompt")

    def _resolve(self, params: SamplingParams) -> ResolvedParams:
        limits = self.limits
        eos = () if params.ignore_eos else limits.eos_token_ids
        # Like vLLM, min_tokens forbids end-of-sequence ids even if they would not end the request.
        forbidden = {*limits.eos_token_ids, *params.stop_token_ids}
        rules = make_rules(params, forbidden, self._bad_words(params), limits.vocab_size)
        _check_constants(params, rules)
        stop = StopStrings(params.stop) if params.stop else None
        return ResolvedParams(frozenset((*eos, *params.stop_token_ids)), rules, stop)

    def prepare_all(
        self, prompts: object, sampling_params: SamplingParams | Sequence[SamplingParams]
    ) -> list[PreparedPrompt]:
        """`prepare` for one prompt or several. A PreparedPrompt keeps its own parameters. Raises as
        `prepare`, and RequestError if there are not as many parameters as prompts.
        """
        given = as_prompts(prompts)
        if isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params] * len(given)
        if not isinstance(sampling_params, Sequence) or isinstance(sampling_params, str | bytes):
            raise _no_params(sampling_params)
        if len(sampling_params) != len(given):
            raise RequestError(
                f"{len(given)} prompts and {len(sampling_params)} SamplingParams; pass one for all, or one each"
            )
        latest = LatestParams()
        return [
            prompt if isinstance(prompt, PreparedPrompt) else self.prepare(prompt, params, latest)
            for prompt, params in zip(given, sampling_params, strict=True)
        ]

    def _check_params(self, params: SamplingParams) -> None:
        vocab = self.limits.vocab_size
        for name, instead in (("stop", "stop_token_ids"), ("bad_words", "logit_bias")):
            if getattr(params, name) and self.tokenizer is None:
                raise RequestError(f"{name} needs a tokenizer and this model has none; use {instead}", name)
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias", "logprob_token_ids", "resume_token_ids"):
            last = max(getattr(params, name) or (), default=0)
            if last >= vocab:
                raise RequestError(f"{name} holds {last}; the vocabulary ends at {vocab - 1}: remove it", name)
        for name in ("logprobs", "prompt_logprobs"):
            number = getattr(params, name)
            if number is not None and number > vocab:
                raise RequestError(f"{name} is {number} and the vocabulary has {vocab} tokens; lower it", name)

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        """Encodes each word at the beginning of a text and, as in vLLM, after a space if that makes
        as many tokens with another first one.
        """
        found = list[list[int]]()
        if self.tokenizer is None:
            return found
        for word in params.bad_words:
            begun, after_space = (self.tokenizer.encode_bare(space + word.lstrip()) for space in ("", " "))
            if not begun or max((*begun, *after_space)) >= self.limits.vocab_size:
                raise RequestError(f"bad_words holds {shown(word)}, which the model has no tokens for", "bad_words")
            found.append(begun)
            if len(begun) == len(after_space) and begun[0] != after_space[0]:
                found.append(after_space)
        return found

    def _encode(self, prompt: Prompt, params: SamplingParams) -> list[int]:
        """Token ids of a prompt; only its last ones if `truncate_prompt_tokens` says so."""
        content, kept = text_or_ids(prompt), params.truncate_prompt_tokens
        if kept is not None:
            kept = self.limits.max_model_len - 1 if kept < 0 else kept
        if not isinstance(content, str):
            if kept is not None and kept < len(content) and isinstance(prompt, Mapping) and prompt.get("spans"):
                raise RequestError(
                    f"truncate_prompt_tokens would cut a prompt of {len(content)} tokens with images to {kept}: leave "
                    "it out",
                    "truncate_prompt_tokens",
                )
            content = content if kept is None else content[-kept:]
            self.limits.check_length(len(content))
            return token_ids(content)
        if self.tokenizer is None:
            raise RequestError("the prompt is text and this model has no tokenizer; pass a list of token ids", "prompt")
        found = encode_prompt(self.tokenizer, content, self.limits.max_model_len - 1, truncated=kept is not None)
        return found if kept is None else found[-kept:]


def check_arrived(arrived: PrefixMatch | None, num_tokens: int) -> None:
    """Raises RequestError unless the part computed elsewhere fits a prompt of so many tokens."""
    if arrived is not None and not 0 < arrived.length < num_tokens:
        raise RequestError(
            f"{arrived.length} tokens of a prompt of {num_tokens} have arrived; the last token is always computed "
            f"here: pass 1 to {num_tokens - 1}, or None"
        )


def _check_constants(params: SamplingParams, rules: TokenRules | None) -> None:
    """Refuses here: in a step they would fail all rows, and end other ranks."""
    try:
        SamplingTable.constants(params, params.seed or 0, rules)
    except (struct.error, OverflowError, TypeError) as e:
        raise RequestError(f"sampling_params holds a number that no buffer of the device holds: {e}") from e


def _check_resumed(num_tokens: int, max_len: int) -> None:
    if num_tokens >= max_len:
        text = f"prompt and resume_token_ids have {num_tokens} tokens, and the answer ends at {max_len}"
        raise RequestError(f"{text}: there is nothing to resume", "resume_token_ids")


def _resumed(matcher: Matcher, tokens: Sequence[int], stop_ids: frozenset[int]) -> Matcher:
    try:
        for at, token in enumerate(tokens, 1):
            if token in stop_ids or matcher.advance(token):
                raise answer_has_ended(at)
    except GrammarError as e:
        raise RequestError(f"resume_token_ids cannot be read: {e}", "resume_token_ids") from e
    return matcher


def answer_has_ended(at: int) -> RequestError:
    return RequestError(f"the answer has ended with token {at} of resume_token_ids", "resume_token_ids")


def _check_first(params: SamplingParams, rules: TokenRules, matcher: Matcher | None) -> None:
    if any_allowed(rules, None if matcher is None else matcher.mask(), ()):
        return
    fields = [name for name in _FORBIDDING if getattr(params, name)]
    raise RequestError(f"{' and '.join(fields)} forbid every first token: change one of them", fields[0])


def _no_params(value: object) -> RequestError:
    return RequestError(
        f"sampling_params is {shown(value)}, a {type(value).__name__}; pass a hybridrt.SamplingParams, for several "
        "prompts also a list of them"
    )


def check_prepared(prepared: object) -> None:
    if not isinstance(prepared, PreparedPrompt):
        raise RequestError(f"prepared is {shown(prepared)}; pass what `prepare` returns for a prompt", "prompt")


def check_name(request_id: object) -> None:
    """Raises RequestError unless it is text of 1 to MAX_NAME_CHARACTERS (1024) characters."""
    if not isinstance(request_id, str) or not 0 < len(request_id) <= MAX_NAME_CHARACTERS or not is_text(request_id):
        raise RequestError(
            f"request_id is {shown(request_id)}; pass a string of text of 1 to {MAX_NAME_CHARACTERS} characters, or "
            "None to get one",
            "request_id",
        )


def check_client(client: object) -> None:
    """Raises RequestError unless it is text of at most MAX_NAME_CHARACTERS characters."""
    if not isinstance(client, str) or len(client) > MAX_NAME_CHARACTERS or not (client.isascii() or is_text(client)):
        raise RequestError(f"client is {shown(client)}; pass a name of up to {MAX_NAME_CHARACTERS} characters")


def check_submission(
    prepared: object, request_id: object, export_to: object, export_from: object, client: object
) -> None:
    check_prepared(prepared)
    if type(client) is not str or client:  # most requests name none
        check_client(client)
    if request_id is not None:
        check_name(request_id)
    if not is_integer(export_from) or not 0 <= cast(int, export_from) < 2**63:
        raise RequestError(f"export_from is {shown(export_from)}; pass a number of tokens")
    if export_to is not None and not (isinstance(export_to, range) and 0 <= export_to.start < export_to.stop < 2**63):
        raise RequestError(f"export_to is {shown(export_to)}; pass a range of bytes in the arena, or None")
