"""Rules about single tokens: allowed ids, bad words, min_tokens, logit bias.

A rule adds a value to one token's logit, before everything else; minus infinity forbids it. It
holds below its output length, and only after its prefix, if any (the first tokens of a bad word).
Shapes: B lines of logits, V vocabulary entries, R running requests, M rules and P prefix tokens of
a row.
"""

from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from hybridrt.kernels.core.operation import By, operation
from hybridrt.kernels.sampling.sampling import only_allowed

TOKEN, VALUE, UNTIL, START, LENGTH = range(5)  # columns of a rule
RULE_COLUMNS = 5


class TokenRules(msgspec.Struct, frozen=True, array_like=True):
    """The rules of one request. `columns`, `prefixes` and `allowed` are int32 numbers as bytes, with the
    meaning of those in `TokenRuleTable`.

    Attributes:
        columns: [RULE_COLUMNS, n].
        prefixes: [p] tokens.
        allowed: [ceil(V / 32)] words; empty if all tokens are allowed.
        until: output index from which no rule holds.
    """

    columns: bytes
    prefixes: bytes
    allowed: bytes
    until: int

    @property
    def count(self) -> int:
        return len(self.columns) // (4 * RULE_COLUMNS)


class TokenRuleTable(NamedTuple):
    """The rules of all request rows, int32.

    Attributes:
        counts: [R + 1] rules of a row; -1 without rules and allowed list.
        columns: [RULE_COLUMNS, R + 1, M]: token, value (bits of a float32), output index from which
            the rule does not hold, start and length of its prefix in `prefixes`. Only forbidding
            rules have a prefix.
        prefixes: [R + 1, P] tokens.
        allowed: [R + 1, ceil(V / 32)], bit i % 32 of word i // 32 set if token i is allowed.
        history: [R + 1, H] a row's output: output index i is in column i % H. H is a power of two,
            at least the longest prefix.
    """

    counts: Tensor
    columns: Tensor
    prefixes: Tensor
    allowed: Tensor
    history: Tensor


class DrawLines(NamedTuple):
    """Rows and output indices of B lines of logits, int32.

    Attributes:
        rows: [B] request rows.
        indices: [B] output index of the token drawn from a line.
        known: [B] number of output tokens in `history`; later ones are in the line's `path`.
        path: [B, K] tokens of output index known, known + 1, ...: drafts before the line's node.
    """

    rows: Tensor
    indices: Tensor
    known: Tensor
    path: Tensor


@operation(By("triton"))
def apply_token_rules(logits: Tensor, table: TokenRuleTable, lines: DrawLines) -> Tensor:
    """[B, V] float32: the logits [B, V] with their rows' rules. Forbidden tokens get minus
    infinity, whatever their logit. A row's rules with finite values name distinct tokens."""
    rows = lines.rows.long()
    counts = table.counts[rows]
    words = table.allowed[rows].masked_fill(counts[:, None] < 0, -1)
    logits = only_allowed(logits.float(), words)
    max_rules = max(int(counts.max()), 0) if len(counts) else 0
    columns = table.columns[:, rows, :max_rules]
    holds = torch.arange(max_rules, device=rows.device) < counts[:, None]
    holds &= (lines.indices[:, None] < columns[UNTIL]) & _after_prefix(table, lines, columns)
    tokens, values = columns[TOKEN].long() * holds, columns[VALUE].contiguous().view(torch.float32)
    forbids = holds & values.isneginf()
    logits = logits.scatter_add(1, tokens, values.masked_fill(~holds | forbids, 0))
    forbidden = torch.zeros_like(logits, dtype=torch.int32).scatter_add(1, tokens, forbids.int())
    return logits.masked_fill(forbidden > 0, -torch.inf)


def _after_prefix(table: TokenRuleTable, lines: DrawLines, columns: Tensor) -> Tensor:
    rows, known, lengths = lines.rows[:, None].long(), lines.known[:, None], columns[LENGTH]
    follows = torch.ones_like(lengths, dtype=torch.bool)
    width, path = lines.path.shape[1], lines.path
    for i in range(int(lengths.max()) if lengths.numel() else 0):
        at = lines.indices[:, None] - lengths + i
        expected = table.prefixes[rows, (columns[START] + i).clamp(max=table.prefixes.shape[1] - 1).long()]
        found = table.history[rows, (at % table.history.shape[1]).long()]
        if width:
            drafted = path.gather(1, (at - known).clamp(0, width - 1).long())
            found = torch.where(at < known, found, drafted)
        follows &= (i >= lengths) | ((at >= 0) & (found == expected))
    return follows
