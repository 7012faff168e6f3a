"""How a ragged prefill is cut into chunks that no request shares and that do not move with the prefix."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ChunkPlan:
    """Logical chunks of the new tokens of B requests, packed along one axis.

    A chunk ends where the request ends or where an absolute position is a multiple of `chunk_size`, so the chunks of
    a prompt are the same however it was split into steps. A request without new tokens has no chunk.

    Attributes:
        cu_chunk_seqlens: [n+1] int32, first token of each chunk, then the number of tokens.
        seq_idx: [n] int32, request of each chunk.
        first_chunk: [B] int32; last_chunk: [B] int32, -1 for a request without chunks (first_chunk is 0 then).
        max_chunks_per_seq: chunks of the longest request.
        chunk_size: most tokens of a chunk.
        num_tokens: new tokens of all requests.
        lengths: new tokens of each request, on the host.
    """

    cu_chunk_seqlens: Tensor
    seq_idx: Tensor
    first_chunk: Tensor
    last_chunk: Tensor
    max_chunks_per_seq: int
    chunk_size: int
    num_tokens: int
    lengths: tuple[int, ...]


def plan_chunks(
    computed: Sequence[int], new: Sequence[int], chunk_size: int, device: torch.device | str = "cpu"
) -> ChunkPlan:
    """Plans the chunks of requests with `computed` tokens in their state and `new` ones to add (host integers)."""
    ends, seq_idx, first, last = [0], list[int](), list[int](), list[int]()
    for request, (done, count) in enumerate(zip(computed, new, strict=True)):
        lengths = _chunk_lengths(done, count, chunk_size)
        first.append(len(seq_idx) if lengths else 0)
        seq_idx += [request] * len(lengths)
        last.append(len(seq_idx) - 1 if lengths else -1)
        for length in lengths:
            ends.append(ends[-1] + length)
    longest = max((b - a + 1 for a, b in zip(first, last, strict=True)), default=0)
    starts, requests, firsts, lasts = _to_device((ends, seq_idx, first, last), device)
    return ChunkPlan(starts, requests, firsts, lasts, longest, chunk_size, ends[-1], tuple(new))


def ith_chunks(plan: ChunkPlan, i: int) -> tuple[Tensor | slice, Tensor]:
    """The requests [b] that have an i-th chunk, and these chunks [b]."""
    chunk = plan.first_chunk + i
    having = (chunk <= plan.last_chunk).nonzero().squeeze(1)
    return (slice(None), chunk) if len(having) == len(chunk) else (having, chunk[having])


def chunk_tokens(plan: ChunkPlan, chunk: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [b, Q] of chunks [b], the last one repeated as padding, and which of them are real."""
    token = plan.cu_chunk_seqlens[chunk][:, None] + torch.arange(plan.chunk_size, device=chunk.device)
    end = plan.cu_chunk_seqlens[chunk + 1][:, None]
    return token.clamp(max=end - 1), token < end


def _to_device(parts: Sequence[list[int]], device: torch.device | str) -> Iterator[Tensor]:
    """int32 tensors of all parts, in one copy. Each starts on 16 bytes: Triton compiles a kernel anew for every
    combination of aligned and unaligned arguments."""
    aligned = [part + [0] * (-len(part) % 4) for part in parts]
    packed = torch.tensor([n for part in aligned for n in part], dtype=torch.int32).to(device, non_blocking=True)
    return (t[: len(part)] for t, part in zip(packed.split([len(part) for part in aligned]), parts))


def _chunk_lengths(done: int, count: int, chunk_size: int) -> list[int]:
    boundary = min(count, chunk_size - done % chunk_size)
    full, rest = divmod(count - boundary, chunk_size)
    return [n for n in (boundary, *[chunk_size] * full, rest) if n]
