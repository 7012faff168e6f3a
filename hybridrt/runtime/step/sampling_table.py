"""Sampling constants, token counts and token rules by request row, in tables on the device.

`kernels/sampling/token_rules.py` applies the rules.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Generic, NamedTuple

import numpy as np
import torch

from hybridrt.base.errors import RequestError
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.kernels.core.packed import A
from hybridrt.kernels.sampling.token_rules import RULE_COLUMNS, TokenRules, TokenRuleTable

if TYPE_CHECKING:
    from hybridrt.runtime.step.plan import Admission
from operator import attrgetter
from struct import Struct
from typing import ClassVar

from torch import Tensor

from hybridrt.runtime.step.plan import Admission

MAX_RULES = 2048  # rules of a row, and tokens of all its prefixes
HISTORY = 64  # output tokens kept per row
_ALWAYS = 2**31 - 1


class AllowedArrays(NamedTuple, Generic[A]):
    """Rows with a list of allowed tokens [n], and the lists as bits [n, ceil(vocab / 32)]."""

    rows: A
    words: A


class RuleArrays(NamedTuple, Generic[A]):
    """The rules of admitted requests. Rows 0 and 1 of a matrix are the request rows and the places
    of its columns.

    Attributes:
        rows: [n], those with rules.
        rules: [2 + RULE_COLUMNS, rules of all]; prefixes, history: [3, tokens of all].
        allowed: None where all tokens are allowed to all.
    """

    rows: A
    rules: A
    prefixes: A
    history: A
    allowed: AllowedArrays[A] | None


class _Rule(NamedTuple):
    """`value` is added to a token's logit after `prefix`, before output token `until`."""

    token: int
    value: float
    until: int
    prefix: tuple[int, ...] = ()


def make_rules(
    params: SamplingParams, stop_ids: Iterable[int], words: Sequence[Sequence[int]], vocab_size: int
) -> TokenRules | None:
    """The rules of a request's parameters, None without any.

    Args:
        stop_ids: what `min_tokens` forbids.
        words: the token ids of `bad_words`.
        vocab_size: all ids are less.

    Raises:
        RequestError: too many or too long rules for a row of the table.
    """
    if not params.uses_rules:
        return None
    stop_ids = sorted(stop_ids) if params.min_tokens else []
    biases = params.logit_bias or {}
    forbidden = [_Rule(token, -np.inf, params.min_tokens) for token in stop_ids]
    biased = [_Rule(token, bias, _ALWAYS) for token, bias in biases.items()]
    bad = [_Rule(word[-1], -np.inf, _ALWAYS, tuple(word[:-1])) for word in words]
    _check_size({"min_tokens": len(forbidden), "logit_bias": len(biased), "bad_words": len(bad)}, words)
    rules = forbidden + biased + bad
    lengths = [len(rule.prefix) for rule in rules]
    columns = np.zeros((RULE_COLUMNS, len(rules)), np.int32)
    columns[0] = [rule.token for rule in rules]
    columns[1] = np.array([rule.value for rule in rules], np.float32).view(np.int32)
    columns[2] = [rule.until for rule in rules]
    columns[3], columns[4] = [0, *accumulate(lengths)][: len(rules)], lengths
    flat = np.array([token for rule in rules for token in rule.prefix], np.int32)
    permanent = biased or bad or params.allowed_token_ids is not None
    allowed = _words(params.allowed_token_ids, vocab_size)
    return TokenRules(columns.tobytes(), flat.tobytes(), allowed, _ALWAYS if permanent else params.min_tokens)


def any_allowed(rules: TokenRules | None, mask: np.ndarray | None, output: Sequence[int]) -> bool:
    """Whether any token may follow an output.

    Args:
        mask: int32 words, a bit a token, of a grammar's allowed tokens, clear past the vocabulary.
            None: all are allowed. Then, unless `rules` list the allowed tokens, the answer is True:
            so few rules do not forbid a vocabulary.
    """
    listed = np.frombuffer(rules.allowed, np.int32) if rules is not None and rules.allowed else None
    if listed is None and mask is None:
        return True
    words = mask if listed is None else listed if mask is None else listed[: len(mask)] & mask[: len(listed)]
    left = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))  # type: ignore[union-attr]
    return bool(set(left.tolist()) - (set() if rules is None else _forbidden(rules, output)))


def _forbidden(rules: TokenRules, output: Sequence[int]) -> set[int]:
    columns = np.frombuffer(rules.columns, np.int32).reshape(RULE_COLUMNS, -1)
    minus_infinity = np.float32(-np.inf).view(np.int32)
    prefixes, found = np.frombuffer(rules.prefixes, np.int32).tolist(), set[int]()
    for token, value, until, start, length in columns.T.tolist():
        follows = list(output[max(len(output) - length, 0) :]) == prefixes[start : start + length]
        if value == minus_infinity and len(output) < until and follows:
            found.add(token)
    return found


def _check_size(rules: dict[str, int], words: Sequence[Sequence[int]]) -> None:
    for field, total in zip(rules, accumulate(rules.values())):
        if total > MAX_RULES:
            raise RequestError(
                f"{field} brings this request to {total} rules about tokens (stop tokens before min_tokens, biases, "
                f"bad words with and without a space); at most {MAX_RULES} are kept for it: pass fewer",
                field,
            )
    longest, total = max(map(len, words), default=0), sum(len(word) - 1 for word in words)
    if longest > HISTORY + 1 or total > MAX_RULES:
        raise RequestError(
            f"bad_words holds a word of {longest} tokens, and {total + len(words)} tokens in all; a word may have "
            f"{HISTORY + 1}, and all of them {MAX_RULES}, not counting their last ones: shorten them",
            "bad_words",
        )


def _words(allowed: Sequence[int] | None, vocab_size: int) -> bytes:
    if allowed is None:
        return b""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[list(allowed)] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def allocate_rules(counts: torch.Tensor, vocab_size: int) -> TokenRuleTable:
    """A table without rules, which includes `counts` [R + 1] int32."""
    rows, device = len(counts), counts.device

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.int32, device=device)

    columns, words = zeros(RULE_COLUMNS, rows, MAX_RULES), zeros(rows, -(-vocab_size // 32))
    return TokenRuleTable(counts.fill_(-1), columns, zeros(rows, MAX_RULES), words, zeros(rows, HISTORY))


def rule_row_bytes(vocab_size: int) -> int:
    """Bytes of one row, without its count."""
    return 4 * ((RULE_COLUMNS + 1) * MAX_RULES + -(-vocab_size // 32) + HISTORY)


def pack_rules(admissions: Sequence["Admission"]) -> RuleArrays[np.ndarray] | None:
    """Table entries of these requests, as int32; None where no admission has rules."""
    ruled = [(a, a.rules) for a in admissions if a.rules is not None]
    if not ruled:
        return None
    columns = [np.frombuffer(rules.columns, np.int32).reshape(RULE_COLUMNS, -1) for _, rules in ruled]
    prefixes = [np.frombuffer(rules.prefixes, np.int32) for _, rules in ruled]
    restricted = [(a.row, np.frombuffer(rules.allowed, np.int32)) for a, rules in ruled if rules.allowed]
    outputs = [a.output[-HISTORY:] for a, _ in ruled]
    starts = [max(len(a.output) - HISTORY, 0) for a, _ in ruled]
    rows = [a.row for a, _ in ruled]
    allowed = None
    if restricted:
        allowed_rows = np.array([row for row, _ in restricted], np.int32)
        allowed = AllowedArrays(allowed_rows, np.stack([words for _, words in restricted]))
    return RuleArrays(
        np.array(rows, np.int32),
        np.concatenate((_places(rows, [c.shape[1] for c in columns]), np.concatenate(columns, 1))),
        np.concatenate((_places(rows, list(map(len, prefixes))), np.concatenate(prefixes)[None])),
        np.concatenate((_places(rows, list(map(len, outputs)), starts), np.concatenate(outputs)[None])),
        allowed,
    )


def _places(rows: Sequence[int], lengths: Sequence[int], starts: Sequence[int] | None = None) -> np.ndarray:
    """[2, sum(lengths)]: each entry's row, and its place in the row."""
    starts = starts or [0] * len(rows)
    places = [np.arange(start, start + n, dtype=np.int32) for start, n in zip(starts, lengths)]
    return np.stack((np.repeat(np.array(rows, np.int32), lengths), np.concatenate(places)))


def admit_rules(table: TokenRuleTable, arrays: RuleArrays[torch.Tensor]) -> None:
    """Stores what `pack_rules` packed, except the rows' counts."""
    # Assignment would copy a Python number, and the host would wait for it.
    table.allowed.index_fill_(0, arrays.rows.long(), -1)
    if (allowed := arrays.allowed) is not None:
        table.allowed[allowed.rows] = allowed.words
    rules = arrays.rules
    table.columns[:, rules[0], rules[1]] = rules[2:]
    for into, tokens in ((table.prefixes, arrays.prefixes), (table.history, arrays.history)):
        into[tokens[0], tokens[1] % into.shape[1]] = tokens[2]


FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_NUMBERS = attrgetter(*FLOATS, "top_k")
_CONSTANTS = Struct(f"=q{len(FLOATS)}f2i")


class PenaltyArrays(NamedTuple, Generic[A]):
    """Rows with penalties [n], and (row, token) [m, 2] of their outputs and of their prompts."""

    rows: A
    outputs: A
    prompts: A


class SamplingArrays(NamedTuple, Generic[A]):
    """Table entries of n admitted requests: `SamplingTable.constants` as bits, the seeds [n, 2]
    separate; penalties and rules are None where no request has any."""

    seeds: A
    constants: A
    penalties: PenaltyArrays[A] | None = None
    rules: RuleArrays[A] | None = None


class SamplingTable:
    """Sampling constants, token counts and rules by request row, on the device.

    `floats` is [len(FLOATS), R + 1], the rest [R + 1, ...]: the constants of any rows, [n] each,
    are contiguous.
    """

    CONSTANTS: ClassVar[int] = _CONSTANTS.size // 4 - 2  # integers without the seed

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._constants = torch.zeros(len(FLOATS) + 2, num_rows + 1, dtype=torch.int32, device=device)
        self.top_k, rule_counts = self._constants[-2:]
        self.rules = allocate_rules(rule_counts, vocab_size)
        self.seeds = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)
        self.output_counts = torch.zeros(num_rows + 1, vocab_size, dtype=torch.int32, device=device)
        self.prompt_mask = torch.zeros(num_rows + 1, vocab_size, dtype=torch.bool, device=device)

    @property
    def floats(self) -> torch.Tensor:
        """[n, R + 1] float32: the constants named in FLOATS, by request row."""
        return self._constants[:-2].view(torch.float32)

    @staticmethod
    def row_bytes(vocab_size: int) -> int:
        """Bytes of one row."""
        return 4 * len(FLOATS) + 8 + 8 + 5 * vocab_size + rule_row_bytes(vocab_size)

    @staticmethod
    def constants(params: SamplingParams, seed: int, rules: TokenRules | None = None) -> bytes:
        """A request's row of `pack`: its seed, its FLOATS, its top_k and its number of rules, -1
        for none.

        Raises:
            struct.error, OverflowError: a number does not fit the table.
        """
        count = -1 if rules is None else rules.count
        return _CONSTANTS.pack(seed, *_NUMBERS(params), count)

    @classmethod
    def pack_constants(cls, admissions: Sequence[Admission]) -> np.ndarray:
        """[n, 2 + CONSTANTS] int32: each request's seed and the rest of its `constants`, as bits."""
        rows = bytearray().join([cls.constants(a.params, a.seed, a.rules) for a in admissions])
        return np.frombuffer(rows, np.int32).reshape(-1, 2 + cls.CONSTANTS)

    @classmethod
    def pack(cls, admissions: Sequence[Admission]) -> SamplingArrays[np.ndarray]:
        constants = cls.pack_constants(admissions)
        counted = [a for a in admissions if a.params.uses_penalties]
        penalties = _pack_penalties(counted) if counted else None
        return SamplingArrays(constants[:, :2], constants[:, 2:], penalties, pack_rules(admissions))

    def enter_rows(self, rows: Tensor, arrays: SamplingArrays[Tensor]) -> None:
        """Stores what `pack` packed, for request rows `rows` [n]."""
        self._constants[:, rows] = arrays.constants.t()
        self.seeds[rows] = arrays.seeds.view(torch.int64).squeeze(1)
        if arrays.rules is not None:
            admit_rules(self.rules, arrays.rules)
        if (penalties := arrays.penalties) is not None:
            counted, prompts = penalties.rows.long(), penalties.prompts
            # Assignment would copy a Python number, and the host would wait for it.
            self.output_counts.index_fill_(0, counted, 0)
            self.prompt_mask.index_fill_(0, counted, False)
            self.prompt_mask[prompts[:, 0], prompts[:, 1]] = torch.ones((), dtype=torch.bool, device=rows.device)
            self.count(*penalties.outputs.unbind(1))

    def count(self, rows: Tensor, tokens: Tensor) -> None:
        """Counts `tokens` [n] as output of `rows` [n]; pairs may repeat. -1 counts as token 0: its
        request ends, and its counts no longer matter."""
        one = torch.ones((), dtype=torch.int32, device=rows.device).expand(rows.shape)
        self.output_counts.index_put_((rows, tokens.clamp(min=0)), one, accumulate=True)

    def remember(self, rows: Tensor, output_indices: Tensor, tokens: Tensor) -> None:
        """Stores `tokens` [n] at `output_indices` [n] of `rows` [n], for rules about words."""
        history = self.rules.history
        history[rows, output_indices % history.shape[1]] = tokens.int()


def _pack_penalties(counted: Sequence[Admission]) -> PenaltyArrays[np.ndarray]:
    return PenaltyArrays(
        np.array([a.row for a in counted], np.int32),
        _with_rows((a.row, a.output) for a in counted),
        _with_rows((a.row, a.counted) for a in counted),
    )


def _with_rows(tokens: Iterable[tuple[int, np.ndarray]]) -> np.ndarray:
    """[n, 2] int32: row, token."""
    return np.concatenate([np.stack((np.full(len(column), row, np.int32), column), 1) for row, column in tokens])
