"""Host state of one sample of a request, and columns over the rows of all running ones."""

import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hybridrt.base.errors import EngineError, NoTokenLeftError
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.base.spans import Span
from hybridrt.engine.grammar.matcher import Matcher
from hybridrt.engine.request.intake import PreparedPrompt, answer_has_ended
from hybridrt.engine.request.outputs import Delta, DeltaQueue, FinishReason, RequestMetrics
from hybridrt.engine.request.spans import cache_ids
from hybridrt.engine.text.tokenizer import Detokenizer, Tokenizer
from hybridrt.kernels.sampling.token_rules import TokenRules
from hybridrt.mem_cache.pools.entries import Handle
from hybridrt.mem_cache.pools.page_groups import NO_PAGES, RequestPages
from hybridrt.mem_cache.prefix_tree.cache_key import DEFAULT_KEY, CacheKey
from hybridrt.mem_cache.prefix_tree.prefix_cache import NO_MATCH, PrefixMatch
from hybridrt.runtime.step.plan import TokenLogprobs, int32s
from hybridrt.runtime.step.sampling_table import any_allowed
from hybridrt.runtime.step.token_scores import TokenScores

UNLIMITED = 2**31 - 1
_CHARACTER_TOKENS = 8  # more than one character has


class RowColumns:
    """Columns of int32 by request row. Entries are valid while a request holds the row.

    Steps are launched before earlier results are read: `computed` and `output_index` are upper
    bounds that hold once every launched step has run. If a verify step gains fewer tokens, its
    result lowers both.

    Args:
        table: [5, R + 1], one row for each column.

    Attributes:
        computed: tokens with KV and state.
        output_index: number of sampled tokens, including those the host has not read.
        prefill_end: tokens to compute before decoding starts.
        max_output: output tokens at which the request ends.
        capacity: tokens that the lent KV pages hold; UNLIMITED in a model without attention.
    """

    def __init__(self, table: np.ndarray) -> None:
        self.table = table
        # Faster than unpacking, which makes an iterator: each step selects rows.
        self.computed, self.output_index, self.prefill_end = table[0], table[1], table[2]
        self.max_output, self.capacity = table[3], table[4]

    @classmethod
    def allocate(cls, num_rows: int) -> "RowColumns":
        return cls(np.zeros((5, num_rows + 1), np.int32))

    def select_rows(self, rows: Sequence[int] | np.ndarray) -> "RowColumns":
        """Copies the entries of rows [n] (int64), in their order."""
        return RowColumns(self.table.take(rows, axis=1))

    def advance(self, rows: np.ndarray, before: "RowColumns", tokens: np.ndarray | int) -> None:
        """A launched decode step computes and samples `tokens` ([n]) of each of rows [n] (int64).
        `before`: their entries so far.
        """
        self.computed[rows] = before.computed + tokens
        self.output_index[rows] = before.output_index + tokens

    def take_back(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        """A step has gained `tokens` [n] fewer tokens for rows [n] than it could."""
        self.computed[rows] -= tokens
        self.output_index[rows] -= tokens


NOT_FINITE = (
    "the model's logits are not finite (NaN or infinity): its weights are damaged, or its numbers leave the range of "
    "its dtype on this prompt; other requests are not affected"
)
NONE_LEFT = (
    "no token is left: each one is forbidden by structured_outputs, allowed_token_ids, bad_words or min_tokens; allow "
    "more of them"
)


class NotFinite(EngineError):
    """Logits of a request are not finite."""


@dataclass(slots=True, eq=False)
class Request:
    """Host state of one sample.

    `prompt` and `output` are known. `columns` count launched work too, at its row. Fields of
    PreparedPrompt mean the same here.

    Attributes:
        arrival: order of arrival, unique.
        cache_key: what it leaves in the prefix cache has this key, and it uses nothing of another.
        prompt_scores: log-probabilities of the first `scored` tokens of the prompt, without the
            very first, by chunk. None if not asked for, and once they are in a delta.
        stream: its reader gets deltas while it runs; False: one delta at its end.
        told: tokens that are in deltas already.
        decoded: tokens that the detokenizer has read.
        queue: its reader's queue, while there is one.
        prompt_ids: `prompt` for the prefix cache (`cache_ids`), one array for all samples.
        mrope_delta: position of a generated token, less its index.
        row, state_slot, pages, prefix: lent by the cache coordinator; see there.
        saves: slots with states of its prompt, by the number of tokens, and then of its answer
            (hybridrt.engine.cache.answer_states); save_at: where its prompt leaves such states;
            spaced: where it leaves further ones, for prompts that may part there.
        answer_due: tokens before its next state within the answer. answer_gap: tokens between these.
        shared: its prompt has been offered to the prefix cache.
        pooled: sum of the hidden states so far, [hidden] float32.
        leader: the first sample of the same prompt, whose prompt this one waits for; None: it is
            the first.
        is_source: others wait for its prompt, or may (hybridrt.engine.core.prompt_waiters).
        client: name of who sent it.
        settled: tokens that consumed steps have computed: a lower bound of `computed`.
        prefill_end: how many of `tokens` are computed before decoding starts: those known at
            admission.
        arrived: the prefix that came from elsewhere, until admission: a retracted request computes
            anew.
        export_to: bytes of the executor's arena for state and KV of the computed prompt; None: no
            export.
        export_from: tokens whose KV is left out there.
        afresh: it skips the prefix cache, because with a cached prefix its logits were not finite.
            `suspect`: length of that prefix, until a step with finite logits has shown that it was
            wrong.
        audits: it compares the cache with a computation. It leaves nothing there.
        restarting: it will be released and wait again, once no launched step names it.
        broken: a step that named it failed, so its state and KV may be wrong.
        in_flight: launched steps that name the request and whose result has not been consumed.
    """

    request_id: str
    index: int
    arrival: int
    prompt: list[int]
    prompt_ids: np.ndarray
    params: SamplingParams
    seed: int
    max_len: int
    stop_ids: frozenset[int]
    metrics: RequestMetrics
    cache_key: CacheKey = DEFAULT_KEY
    spans: Sequence[Span] = ()
    mrope_delta: int = 0
    rules: TokenRules | None = None
    matcher: Matcher | None = None
    stream: bool = True
    detokenizer: Detokenizer | None = None
    output: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] | None = None
    prompt_scores: list[TokenScores] | None = None
    scored: int = 1
    pooled: np.ndarray | None = None
    finish_reason: FinishReason | None = None
    error: EngineError | None = None
    row: Handle | None = None
    state_slot: Handle | None = None
    pages: RequestPages = NO_PAGES
    prefix: PrefixMatch = NO_MATCH
    saves: dict[int, Handle] = field(default_factory=dict)
    save_at: Sequence[int] = ()
    spaced: range = range(0)
    answer_due: int = UNLIMITED
    answer_gap: int = 0
    shared: bool = False
    leader: "Request | None" = None
    is_source: bool = False
    client: str = ""
    boundaries: Sequence[int] = ()
    prefill_end: int = 0
    columns: RowColumns | None = None
    arrived: PrefixMatch | None = None
    export_to: range | None = None
    export_from: int = 0
    settled: int = 0
    afresh: bool = False
    suspect: int = 0
    audits: bool = False
    restarting: bool = False
    broken: bool = False
    in_flight: int = 0
    told: int = 0
    decoded: int = 0
    queue: weakref.ref[DeltaQueue] | None = None

    @property
    def tokens(self) -> list[int]:
        """Every known token, prompt first. Not to be changed."""
        return self.prompt + self.output if self.output else self.prompt

    @property
    def ids(self) -> np.ndarray:
        """`tokens` for the prefix cache."""
        return np.concatenate((self.prompt_ids, int32s(self.output))) if self.output else self.prompt_ids

    @property
    def reads_cache(self) -> bool:
        """True if it may start from a cached prefix. A computed prefix gives no log-probabilities and
        no hidden states."""
        return self.params.prompt_logprobs is None and self.params.pooling != "mean" and not self.afresh

    @property
    def computed(self) -> int:
        """Tokens with KV and state once every launched step has run; 0 while the request does not
        run.
        """
        return int(self.columns.computed[self.row.index]) if self.columns is not None and self.row is not None else 0

    @property
    def pending(self) -> int:
        if self.columns is None or self.row is None:
            return 0
        return int(self.columns.output_index[self.row.index]) - len(self.output)

    @property
    def end_page(self) -> int:
        """Page index up to which every page group has lent pages."""
        return self.pages.whole_end

    def score(self, start: int, found: TokenScores) -> None:
        """Adds log-probabilities of the prompt's tokens from number `start` on. Repeated ones are
        dropped: a retracted request computes its prompt again. EngineError if one is no number.
        """
        fresh = found.part(self.scored - start)
        if not fresh.finite:
            raise EngineError(NOT_FINITE)
        self.scored += len(fresh)
        if self.prompt_scores is not None:
            self.prompt_scores.append(fresh)

    def pool(self, computed: int, found: np.ndarray) -> None:
        """Adds a chunk's sum of hidden states [hidden] float32, after `computed` tokens. A retracted
        request computes its prompt again. EngineError if one is no number."""
        if not np.isfinite(found).all():
            raise EngineError(NOT_FINITE)
        begins = self.pooled is None or computed == 0 or self.params.pooling == "last"
        self.pooled = found if begins else self.pooled + found

    def append(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs] | None) -> FinishReason | None:
        """Adds a step's tokens, up to the one that ends the request; drops the rest.

        Returns:
            Why the request ends, or None.

        Raises:
            NotFinite: a token is -1, because logits were not finite.
            NoTokenLeftError: no token was allowed.
            GrammarError: the errors of Matcher.advance.
        """
        output, max_output = self.output, self.max_len - len(self.prompt)
        stop_ids, stop_strings, matcher = self.stop_ids, self.params.stop, self.matcher
        for i, token in enumerate(tokens):
            if token < 0:
                mask = None if matcher is None else matcher.mask()
                finite = not any_allowed(self.rules, mask, output)
                raise NoTokenLeftError(NONE_LEFT) if finite else NotFinite(NOT_FINITE)
            output.append(token)
            if logprobs is not None and self.logprobs is not None:
                self.logprobs.append(logprobs[i])
            if token in stop_ids or (stop_strings and self.read_text()):
                return "stop"
            if matcher is not None and matcher.advance(token):
                return "stop"
            if len(output) >= max_output:
                return "length"
        return None

    def resume(self, tokens: Sequence[int]) -> None:
        """Begins with the first tokens of an answer that another run has given: no delta has them.
        The matcher has read them (`Intake.prepare`).

        Raises:
            RequestError: the answer has ended within them.
        """
        matcher, self.matcher = self.matcher, None
        for part in _in_parts(tokens):
            if self.append(part, None) is not None or self.read_text():
                raise answer_has_ended(len(self.output))
        self.matcher = matcher
        if self.detokenizer is not None:
            self.detokenizer.take_text(False)
        self.told = len(self.output)

    def ends_within(self, tokens: Sequence[int]) -> bool:
        """True if these tokens, coming next, would end the request: by a stop token, a stop string,
        or an error of the text.
        """
        if not self.stop_ids.isdisjoint(tokens):
            return True
        if self.detokenizer is None or len(self.output) + len(tokens) <= self.params.min_tokens:
            return False
        try:
            return self.detokenizer.would_stop(tokens)
        except Exception:  # `read_text` meets the same error, and ends the request with it
            return True

    def read_text(self) -> bool:
        """Makes text of the tokens since the last call. True if a stop string has appeared; none is
        looked for in the text of the first `min_tokens`.
        """
        tokens = self.output[self.decoded :]
        self.decoded += len(tokens)
        if not tokens or self.detokenizer is None:
            return False
        return self.detokenizer.advance(tokens, may_stop=self.decoded > self.params.min_tokens)

    def finish(self, reason: FinishReason, error: EngineError | None = None) -> None:
        """Ends the request. Without an error all of its text is made: a stop string may be hidden
        in text that was held back for an unfinished character.
        """
        if error is None and self.detokenizer is not None:
            rest = self.output[self.decoded :]
            if rest and rest[-1] in self.stop_ids and not self.params.include_stop_str_in_output:
                del rest[-1]
            stopped = self.detokenizer.finish(rest, len(self.output) > self.params.min_tokens)
            reason = "stop" if stopped and reason == "length" else reason
        self.metrics.output_tokens = len(self.output)
        self.metrics.finish_time = time.monotonic()
        self.finish_reason, self.error = reason, error

    @property
    def stop_reason(self) -> int | str | None:
        if self.detokenizer is not None and self.detokenizer.stopped_by is not None:
            return self.detokenizer.stopped_by
        return self.output[-1] if self.output[-1] in self.params.stop_token_ids else None

    def delta(self) -> Delta:
        tokens = self.output[self.told :]
        self.told += len(tokens)
        reason, detokenizer, logprobs = self.finish_reason, self.detokenizer, self.logprobs
        if logprobs is not None:
            self.logprobs = []
        text = detokenizer.take_text(reason is not None) if detokenizer is not None else ""
        metrics = self.metrics if reason is not None else None
        prompt_scores, self.prompt_scores = self.prompt_scores, None
        return Delta(
            self.request_id, self.index, tokens, text, logprobs, reason, metrics, self.error, None,
            self.stop_reason if reason == "stop" else None, prompt_scores,
            None if reason is None or self.pooled is None else self.pooled.tobytes(),
        )  # fmt: skip


def new_samples(
    request_id: str,
    prepared: PreparedPrompt,
    key: CacheKey,
    seed: int,
    arrivals: Iterator[int],
    tokenizer: Tokenizer | None,
) -> list[Request]:
    """The `n` samples of a prompt. Only the first gets the log-probabilities of the prompt."""
    tokens, params, spans = prepared.tokens, prepared.params, prepared.spans
    ids = cache_ids(prepared.ids, spans) if spans else prepared.ids
    others = params if params.prompt_logprobs is None else replace(params, prompt_logprobs=None)
    samples = [
        Request(
            request_id=request_id,
            index=index,
            arrival=next(arrivals),
            prompt=tokens,
            prompt_ids=ids,
            params=params if index == 0 else others,
            seed=derive_seed(seed, index) if index else seed,
            max_len=prepared.max_len,
            stop_ids=prepared.stop_ids,
            cache_key=key,
            spans=spans,
            mrope_delta=prepared.mrope_delta,
            rules=prepared.rules,
            boundaries=prepared.boundaries,
            matcher=None if prepared.matcher is None else prepared.matcher.copy(),
            metrics=RequestMetrics(prompt_tokens=len(tokens), arrival_time=time.monotonic()),
            detokenizer=new_detokenizer(tokenizer, prepared),
            logprobs=None if params.logprobs is None else [],
            prompt_scores=[] if index == 0 and params.prompt_logprobs is not None else None,
        )
        for index in range(params.n)
    ]
    for request in samples[1:]:
        request.leader = samples[0]
    if params.resume_token_ids:
        samples[0].resume(params.resume_token_ids)
    return samples


def derive_seed(seed: int, index: int) -> int:
    """Seed number `index` of the stream that `seed` starts, in [0, 2**63): SplitMix64 (Steele, Lea
    and Flood 2014), whose output at step i is a hash of seed + i * 0x9E3779B97F4A7C15.
    """
    mask = 2**64 - 1
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (z ^ (z >> 31)) >> 1


def new_detokenizer(tokenizer: Tokenizer | None, prepared: PreparedPrompt) -> Detokenizer | None:
    if tokenizer is None:
        return None
    include, skip = prepared.params.include_stop_str_in_output, prepared.params.skip_special_tokens
    return Detokenizer(tokenizer, prepared.tokens, prepared.stop, include_stop=include, skip_special_tokens=skip)


def resumed_text(tokenizer: Tokenizer | None, prepared: PreparedPrompt) -> str:
    """The text that came with the `resume_token_ids` of a request; "" without a tokenizer."""
    detokenizer = new_detokenizer(tokenizer, prepared)
    if detokenizer is None:
        return ""
    for part in _in_parts(prepared.params.resume_token_ids):
        detokenizer.advance(part, may_stop=False)
    return detokenizer.take_text(False)


def _in_parts(tokens: Sequence[int]) -> Iterator[Sequence[int]]:
    """The last tokens one by one: if they end within a character, the text before it has come."""
    first = max(len(tokens) - _CHARACTER_TOKENS, 0)
    yield tokens[:first]
    for place in range(first, len(tokens)):
        yield tokens[place : place + 1]
