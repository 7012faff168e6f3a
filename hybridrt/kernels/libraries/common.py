"""What the files of this folder share: pages of a batch, and saying what a library cannot do."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hybridrt.errors import BackendError

HALF = (torch.bfloat16, torch.float16)


def refuse(library: str, op: str, *reasons: str | None) -> None:
    """Raises BackendError with the first reason that is not None."""
    for reason in reasons:
        if reason is not None:
            raise BackendError(f"{library} cannot serve this {op}: {reason}; name another provider")


def attention_limits(
    *, head_dims: tuple[int, ...], architectures: tuple[int, ...]
) -> Callable[[Mapping[str, Any]], str | None]:
    """A `supports` predicate of attention on a KV cache: its `dtype` and `head_dim`, and the GPU's `capability` (major,
    minor). What a caller does not tell is not held against the library."""

    def supports(facts: Mapping[str, Any]) -> str | None:
        if facts.get("dtype", HALF[0]) not in HALF:
            return f"the KV cache is {facts['dtype']}, it takes bfloat16 and float16"
        if facts.get("head_dim", head_dims[0]) not in head_dims:
            return f"head_dim is {facts['head_dim']}, it takes {', '.join(map(str, head_dims))}"
        if facts.get("capability", architectures)[0] not in architectures:
            major, minor = facts["capability"]
            return f"the GPU is sm_{major}{minor}, it supports sm_{', sm_'.join(f'{a}x' for a in architectures)}"
        return None

    return supports


def page_table(req_to_token: Tensor, rows: Tensor, page_size: int, longest: int) -> Tensor:
    """[B, ceil(longest / page_size)] int32 page numbers of request rows `rows` [B]."""
    return req_to_token[:, :longest:page_size].index_select(0, rows) // page_size


def page_numbers(req_to_token: Tensor, rows: Tensor, page_starts: Tensor, count: int, page_size: int) -> Tensor:
    """[count] int32 pages of request rows `rows` [B] one row behind the other: those of row b are
    [page_starts[b]:page_starts[b + 1]], and what lies past the last is any page."""
    entry = torch.arange(count, dtype=torch.int32, device=rows.device)
    row = torch.searchsorted(page_starts[1:], entry, right=True).clamp_(max=len(rows) - 1)
    position = ((entry - page_starts[row]) * page_size).clamp_(max=req_to_token.shape[1] - 1)
    return req_to_token[rows[row], position] // page_size
