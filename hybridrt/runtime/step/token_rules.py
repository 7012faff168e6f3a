"""Rules about single tokens: made of a request's parameters, packed into a device table.

`kernels/sampling/token_rules.py` applies them.
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
