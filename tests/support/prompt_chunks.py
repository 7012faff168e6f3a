"""Chunks of prompts in scattered pages, as eager steps and graphs of prompts give them to attention."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridrt.kernels.attention.paged_attention import attention_extend
from hybridrt.kernels.core.records import AttentionPrompts, PagedKV


@dataclass(frozen=True)
class Heads:
    """Of queries and of keys, their width, the page's tokens, dtype and device."""

    query: int
    keys: int
    dim: int
    page: int
    dtype: torch.dtype
    device: str = "cpu"


class Chunks:
    """Random chunks after random contexts; every slot without a token of theirs is NaN."""

    def __init__(
        self, heads: Heads, query_lens: Sequence[int], contexts: Sequence[int], *, sinks: bool = False, seed: int = 0
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.heads, self.query_lens = heads, list(query_lens)
        self.lens = [n + context for n, context in zip(query_lens, contexts, strict=True)]
        pages = [-(-n // heads.page) for n in self.lens]
        order = (torch.randperm(sum(pages), generator=generator) + 1).split(pages)
        self.table = torch.zeros(len(self.lens) + 1, (max(pages) + 1) * heads.page, dtype=torch.int32)
        caches = torch.full((2, sum(pages) + 1, heads.page, heads.keys, heads.dim), float("nan"), dtype=heads.dtype)
        caches[:, 0] = 0.0  # scratch
        for row, (mine, length) in enumerate(zip(order, self.lens), 1):
            slots = (mine[:, None] * heads.page + torch.arange(heads.page)).flatten()
            self.table[row, : len(slots)] = slots
            numbers = torch.randn(2, length, heads.keys, heads.dim, generator=generator)
            caches.flatten(1, 2)[:, slots[:length].long()] = numbers.to(heads.dtype)
        q = torch.randn(sum(query_lens), heads.query, heads.dim, generator=generator).to(heads.dtype)
        weights = torch.randn(heads.query, generator=generator) if sinks else None
        self.q = q.to(heads.device)
        keys, values = caches.to(heads.device)
        self.kv = PagedKV(
            keys, values, self.table.to(heads.device), heads.dim**-0.5, None,
            None if weights is None else weights.to(heads.device),
        )  # fmt: skip

    def batch(self) -> AttentionPrompts:
        """Of an eager step."""
        rows = [*range(1, len(self.lens) + 1)]
        return AttentionPrompts(*self._lines(rows, self.query_lens, self.lens), self.query_lens, self.lens)

    def in_graph(self, rows: int, tokens: int, copies: Tensor | None) -> tuple[Tensor, AttentionPrompts]:
        """Queries and a batch of a graph with so many rows and tokens, the last row padding."""
        left, empty = tokens - sum(self.query_lens), rows - 1 - len(self.lens)
        numbers = [*range(1, len(self.lens) + 1), *[0] * (empty + 1)]
        lines = self._lines(numbers, [*self.query_lens, left, *[0] * empty], [*self.lens, left, *[0] * empty])
        q = torch.cat((self.q, self.q.new_zeros(left, *self.q.shape[1:])))
        return q, AttentionPrompts(*lines, [0] * (rows - 1) + [tokens], (), copies)

    def _lines(self, rows: Sequence[int], query_lens: Sequence[int], lens: Sequence[int]) -> list[Tensor]:
        starts = torch.tensor([0, *query_lens]).cumsum(0)
        return [each.int().to(self.heads.device) for each in (torch.tensor(rows), starts, torch.tensor(lens))]

    def wanted(self) -> Tensor:
        """By plain torch, in float32."""
        kv = self.kv._replace(k_cache=self.kv.k_cache.float(), v_cache=self.kv.v_cache.float())
        return attention_extend.reference(self.q.float(), kv, self.batch())
