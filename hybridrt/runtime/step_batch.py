"""The one place where the runtime makes a ForwardBatch: from device views of what `step_inputs` packed."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hybridrt.attention.base import AttentionBackend
from hybridrt.forward_batch import ForwardBatch, ForwardMode, SpecInfo
from hybridrt.kernels.decode_inputs import decode_inputs
from hybridrt.kernels.draft_tree import tree_mask, tree_positions
from hybridrt.mem_cache.req_to_token_pool import HybridReqToTokenPool
from hybridrt.runtime.step_inputs import Sections


class TokenInputs:
    """What the model reads of each token: `input_ids`, `positions` and `out_cache_loc`, [T] int32 each."""

    def __init__(self, input_ids: torch.Tensor, positions: torch.Tensor, out_cache_loc: torch.Tensor) -> None:
        self.input_ids, self.positions, self.out_cache_loc = input_ids, positions, out_cache_loc

    @classmethod
    def allocate(cls, count: int, device: torch.device) -> "TokenInputs":
        return cls(*(torch.zeros(count, dtype=torch.int32, device=device) for _ in range(3)))

    @property
    def parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.input_ids, self.positions, self.out_cache_loc

    def first(self, count: int) -> "TokenInputs":
        """Views of the first `count` tokens."""
        return TokenInputs(*(part[:count] for part in self.parts))

    def then(self, other: "TokenInputs") -> "TokenInputs":
        """These tokens, then those of `other`."""
        return TokenInputs(*(torch.cat(pair) for pair in zip(self.parts, other.parts)))

    def fill_decode(
        self, sections: Sections, bs: int, spec: SpecInfo | None, last_tokens: torch.Tensor, table: HybridReqToTokenPool
    ) -> None:
        """The inputs of the first `bs` rows of `pack_rows`; of draft trees, their masks in `spec` too."""
        drafts = None if spec is None else sections["drafts"][:bs]
        num_drafts = None if spec is None else sections["num_drafts"][:bs]
        rows, seq_lens, new_pages = (sections[name][:bs] for name in ("rows", "seq_lens", "new_pages"))
        decode_inputs(
            *self.parts, rows, seq_lens, new_pages, drafts, num_drafts, last_tokens, table.req_to_token, table.page_size
        )
        if spec is not None and spec.tree_mask is not None:
            mask = spec.tree_mask[:bs]
            mask.copy_(tree_mask(sections["ancestors"][:bs]))
            self.positions.copy_(tree_positions(self.positions, mask))


def make_batch(
    backend: AttentionBackend,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    inputs: TokenInputs,
    num_decode_rows: int,
    spec_info: SpecInfo | None,
    *,
    seq_lens_cpu: Sequence[int] | None = None,
    query_lens_cpu: Sequence[int] | None = None,
    chunk_plans: Mapping[int, Any] | None = None,
) -> ForwardBatch:
    """A step of real rows; see ForwardBatch. Its mode follows from its segments."""
    mode = ForwardMode.TARGET_VERIFY if spec_info else ForwardMode.DECODE
    if num_decode_rows < len(rows):
        mode = ForwardMode.MIXED if num_decode_rows else ForwardMode.EXTEND
    return ForwardBatch(
        forward_mode=mode,
        input_ids=inputs.input_ids,
        positions=inputs.positions,
        req_pool_indices=rows,
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
        out_cache_loc=inputs.out_cache_loc,
        num_real=len(rows),
        num_decode_rows=num_decode_rows,
        attn_backend=backend,
        seq_lens_cpu=seq_lens_cpu,
        query_lens_cpu=query_lens_cpu,
        spec_info=spec_info,
        chunk_plans=chunk_plans,
    )


def spec_info_of(sections: Sections, tokens: int, tree: bool) -> SpecInfo | None:
    """What a step of T `tokens` a row says of its drafts; None if T is 1. The masks of trees are filled by
    `TokenInputs.fill_decode`."""
    if tokens == 1:
        return None
    num_drafts = sections["num_drafts"]
    if not tree:
        return SpecInfo(tokens, num_drafts=num_drafts)
    mask = torch.zeros(len(num_drafts), tokens, tokens, dtype=torch.bool, device=num_drafts.device)
    return SpecInfo(tokens, sections["parents"], mask, num_drafts)
