"""Page numbers of a batch, and the error for unsupported arguments."""

import torch
from torch import Tensor

from hybridrt.base.errors import BackendError


def refuse(library: str, op: str, *reasons: str | None) -> None:
    """Raises BackendError with the first reason that is not None."""
    for reason in reasons:
        if reason is not None:
            raise BackendError(f"{library} cannot serve this {op}: {reason}; name another provider")


def page_table(req_to_token: Tensor, rows: Tensor, page_size: int, longest: int) -> Tensor:
    """[B, ceil(longest / page_size)] int32 page numbers of request rows `rows` [B]."""
    return req_to_token[:, :longest:page_size].index_select(0, rows) // page_size


def page_numbers(req_to_token: Tensor, rows: Tensor, page_starts: Tensor, count: int, page_size: int) -> Tensor:
    """[count] int32 pages of request rows `rows` [B]: row b has [page_starts[b]:page_starts[b +
    1]]. Entries past the last row are arbitrary pages."""
    entry = torch.arange(count, dtype=torch.int32, device=rows.device)
    row = torch.searchsorted(page_starts[1:], entry, right=True).clamp_(max=len(rows) - 1)
    position = ((entry - page_starts[row]) * page_size).clamp_(max=req_to_token.shape[1] - 1)
    return req_to_token[rows[row], position] // page_size
