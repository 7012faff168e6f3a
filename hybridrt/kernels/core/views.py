"""Views and copies that keep strides.

Triton compiles kernels by the strides of their arguments: other strides would cause a compilation
during serving.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor


def by_head(channels: Tensor, heads: int, dim: int) -> Tensor:
    """[..., heads * dim] as [..., heads, dim]. `unflatten` would change the token stride of one
    token."""
    *outer, inner = channels.stride()
    return channels.as_strided((*channels.shape[:-1], heads, dim), (*outer, dim * inner, inner))


def split_heads(channels: Tensor, *shapes: tuple[int, int]) -> list[Tensor]:
    """The neighbouring parts of [..., C], by (heads, dim) each: [..., heads, dim], as `by_head`."""
    *outer, inner = channels.stride()
    start, found = channels.storage_offset(), []
    for heads, dim in shapes:
        strides = (*outer, dim * inner, inner)
        found.append(channels.as_strided((*channels.shape[:-1], heads, dim), strides, start))
        start += heads * dim * inner
    return found


def take_tokens(inputs: Sequence[Tensor | None], tokens: Tensor) -> list[Tensor | None]:
    """Each input at some tokens, with its own strides. Parts of one projection become parts of one
    copy.

    Args:
        inputs: [T, ...] each. If tokens interleave in memory, the copy is dense.
        tokens: [t] int64.
    Returns:
        [t, ...] each; None for None.
    """
    merged = defaultdict[tuple[int, int, torch.dtype], dict[int, Tensor]](dict)
    for i, t in enumerate(inputs):
        if t is not None:
            merged[t.untyped_storage().data_ptr(), t.stride(0), t.dtype][i] = t
    taken: list[Tensor | None] = [None] * len(inputs)
    for (_, stride, _), parts in merged.items():
        first = min(t.storage_offset() for t in parts.values())
        width = max(t.storage_offset() + _span(t) for t in parts.values()) - first
        if width > stride and len(parts) > 1:  # they are in different rows of one storage
            for i, t in parts.items():
                (taken[i],) = take_tokens((t,), tokens)
            continue
        if width > stride:  # tokens interleave: no copy has these strides
            for i, t in parts.items():
                taken[i] = t.index_select(0, tokens)
            continue
        source = next(iter(parts.values()))
        rows = source.as_strided((len(source), width), (stride, 1), first)
        copy = source.new_empty_strided((len(tokens), width), (stride, 1))
        torch.index_select(rows, 0, tokens, out=copy)
        for i, t in parts.items():
            taken[i] = copy.as_strided((len(tokens), *t.shape[1:]), t.stride(), t.storage_offset() - first)
    return taken


def _span(t: Tensor) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(t.shape[1:], t.stride()[1:], strict=True))
