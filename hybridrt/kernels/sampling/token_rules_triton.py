"""Triton kernel of `apply_token_rules`: one launch a step if some row has rules."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridrt.kernels.core.jit_kernel_triton import jit_kernel
from hybridrt.kernels.core.launch import cdiv
from hybridrt.kernels.sampling.token_rules import LENGTH, START, TOKEN, UNTIL, VALUE, DrawLines, TokenRuleTable

BLOCK, RULES = 4096, 256
_TOKEN, _VALUE, _UNTIL, _START, _LENGTH = (tl.constexpr(column) for column in (TOKEN, VALUE, UNTIL, START, LENGTH))


@triton.jit
def _some_rules(columns_ptr, start, count, first, index, plane, BLOCK: tl.constexpr, RULES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The next RULES rules: places, tokens, values, and which apply to the block at `first`."""
    i = start + tl.arange(0, RULES)
    rule_ptr = columns_ptr + i
    token = tl.load(rule_ptr + _TOKEN * plane, mask=i < count, other=-1)
    until = tl.load(rule_ptr + _UNTIL * plane, mask=i < count, other=0)
    value = tl.load(rule_ptr + _VALUE * plane, mask=i < count, other=0).to(tl.float32, bitcast=True)
    return rule_ptr, token, value, (token >= first) & (token < first + BLOCK) & (index < until)


@jit_kernel(do_not_specialize=["path_sr"], do_not_specialize_on_alignment=["rows_ptr", "indices_ptr", "known_ptr"])
def _token_rules_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, out_ptr, rows_ptr, indices_ptr, known_ptr, path_ptr, counts_ptr, columns_ptr, prefixes_ptr, allowed_ptr,
    history_ptr, path_sr, logits_sr, plane, words, V, M: tl.constexpr, P: tl.constexpr, H: tl.constexpr,
    BLOCK: tl.constexpr, RULES: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    row = tl.load(rows_ptr + b).to(tl.int64)
    count = tl.load(counts_ptr + row)
    ids = first + tl.arange(0, BLOCK)
    inside = ids < V
    x = tl.load(logits_ptr + b * logits_sr + ids, mask=inside, other=0.0).to(tl.float32)
    word = tl.where(count < 0, -1, tl.load(allowed_ptr + row * words + ids // 32, mask=inside, other=0))
    out_ptr += b * V
    tl.store(out_ptr + ids, tl.where(((word >> (ids % 32)) & 1) == 1, x, float("-inf")), mask=inside)
    index, known = tl.load(indices_ptr + b), tl.load(known_ptr + b)
    columns_ptr += row * M
    tl.debug_barrier()  # other threads' stores are read below
    for start in range(0, count, RULES):
        _, token, value, holds = _some_rules(columns_ptr, start, count, first, index, plane, BLOCK, RULES)
        holds &= value > float("-inf")
        old = tl.load(out_ptr + token, mask=holds, other=0.0)
        tl.store(out_ptr + token, old + value, mask=holds)
    tl.debug_barrier()
    for start in range(0, count, RULES):
        rule_ptr, token, value, holds = _some_rules(columns_ptr, start, count, first, index, plane, BLOCK, RULES)
        holds &= value == float("-inf")
        prefix_row, history_row, path_row = prefixes_ptr + row * P, history_ptr + row * H, path_ptr + b * path_sr
        length = tl.load(rule_ptr + _LENGTH * plane, mask=holds, other=0)
        prefix_start = tl.load(rule_ptr + _START * plane, mask=holds, other=0)
        for i in range(0, tl.max(length, 0)):
            at = index - length + i
            asked = holds & (i < length)
            expected = tl.load(prefix_row + prefix_start + i, mask=asked, other=0)
            kept = tl.load(history_row + at % H, mask=asked & (at >= 0) & (at < known), other=-1)
            drafted = tl.load(path_row + at - known, mask=asked & (at >= known), other=-1)
            found = tl.where(at < known, kept, drafted)
            holds = holds & ((i >= length) | ((at >= 0) & (found == expected)))
        tl.store(out_ptr + token, tl.full([RULES], float("-inf"), tl.float32), mask=holds)


def apply_token_rules_triton(logits: Tensor, table: TokenRuleTable, lines: DrawLines) -> Tensor:
    """`rows`, `indices` and `known` are contiguous."""
    batch, vocabulary = logits.shape
    out = torch.empty(batch, vocabulary, dtype=torch.float32, device=logits.device)
    if batch:
        _, rows, rules = table.columns.shape
        _token_rules_kernel[(batch, cdiv(vocabulary, BLOCK))](
            logits, out, *lines, *table, lines.path.stride(0), logits.stride(0), rows * rules, table.allowed.shape[1],
            vocabulary, M=rules, P=table.prefixes.shape[1], H=table.history.shape[1], BLOCK=BLOCK, RULES=RULES,
            num_warps=8,
        )  # fmt: skip
    return out
