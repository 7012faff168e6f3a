"""A step as the recurrent layers see it: a decode segment, then an extend segment."""

from dataclasses import dataclass

import torch

from hybridrt.kernels.chunk_plan import ChunkPlan
from hybridrt.kernels.decode_metadata import DecodeBuffers
from hybridrt.mem_cache.mamba_pool import LayerCache


@dataclass(frozen=True)
class DecodeSegment:
    """Decode or verify rows: n rows of `tokens_per_row` tokens. `rows` are request rows, [n] int32."""

    rows: torch.Tensor
    buffers: DecodeBuffers
    tokens_per_row: int
    parents: torch.Tensor | None

    @property
    def num_tokens(self) -> int:
        return self.rows.shape[0] * self.tokens_per_row

    def by_row(self, t: torch.Tensor) -> torch.Tensor:
        """[n * tokens_per_row, ...] as [n, tokens_per_row, ...]."""
        return t.view(self.rows.shape[0], self.tokens_per_row, *t.shape[1:])

    def stored(self, cache: LayerCache) -> torch.Tensor | None:
        """Where the state after each token goes. One token is final at once: only a verify step may have to go back."""
        return cache.intermediate_ssm if self.tokens_per_row > 1 else None


@dataclass(frozen=True)
class ExtendSegment:
    """Prompt chunks of n rows, packed. query_start_loc counts from the segment's first token. A row starts from the
    state in its `read_slots` entry and leaves its own in `write_slots`; -1 marks padding rows."""

    read_slots: torch.Tensor
    write_slots: torch.Tensor
    query_start_loc: torch.Tensor
    start_positions: torch.Tensor
    has_initial_states: torch.Tensor
    plan: ChunkPlan


@dataclass(frozen=True)
class ForwardMetadata:
    """One step; either segment may be absent.

    Attributes:
        query_start_loc: [B + 1] int32 over all rows.
        mamba_cache_indices: [B] int32 state slots, -1 for padding rows.
    """

    query_start_loc: torch.Tensor
    mamba_cache_indices: torch.Tensor
    decode: DecodeSegment | None
    extend: ExtendSegment | None

    @property
    def num_tokens(self) -> int:
        decode = self.decode.num_tokens if self.decode else 0
        return decode + (self.extend.plan.num_tokens if self.extend else 0)
