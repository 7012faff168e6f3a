"""How a ragged prefill is cut into chunks that no request shares and that do not move with the prefix."""

from bisect import insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

CHUNK_COLUMNS = ("cu_chunk_seqlens", "seq_idx", "first_chunk", "last_chunk")


@dataclass(frozen=True)
class ChunkPlan:
    """Logical chunks of the new tokens of B requests, packed along one axis.

    A chunk ends where the request ends or where an absolute position is a multiple of `chunk_size`, so the chunks of
    a prompt are the same however it was split into steps. A request without new tokens has no chunk.

    In a graph, chunks without tokens follow that belong to no request, and what the host knows are
    bounds: one request has all tokens.

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
    columns = chunk_columns(computed, new, chunk_size)
    return chunk_plan(dict(zip(columns, _to_device(list(columns.values()), device))), columns, new, chunk_size)


def chunk_plan(
    on_device: Mapping[str, Tensor], columns: Mapping[str, np.ndarray], new: Sequence[int], chunk_size: int
) -> ChunkPlan:
    """The plan whose `columns` (`chunk_columns`) were copied to a device."""
    longest = int((columns["last_chunk"] - columns["first_chunk"]).max(initial=-1)) + 1
    return ChunkPlan(
        **on_device, max_chunks_per_seq=longest, chunk_size=chunk_size, num_tokens=sum(new), lengths=tuple(new)
    )


def chunk_columns(computed: Sequence[int], new: Sequence[int], chunk_size: int) -> dict[str, np.ndarray]:
    """The tensors of a ChunkPlan by name, as host arrays of int32."""
    return {name: np.array(values, np.int32) for name, values in chunk_lists(computed, new, chunk_size).items()}


def chunk_lists(
    computed: Sequence[int], new: Sequence[int], chunk_size: int, cuts: Sequence[int] | None = None
) -> dict[str, list[int]]:
    """The tensors of a ChunkPlan by name, as lists.

    Args:
        cuts: for each request a number of its new tokens behind which a chunk ends, too; 0: none.
    """
    # A loop, not array operations: most steps have few chunks, and the device waits for this.
    ends, requests, first_chunks, last_chunks, start = [0], list[int](), list[int](), list[int](), 0
    for request, (done, length) in enumerate(zip(computed, new)):
        end = start + length
        stops = [*range(start + chunk_size - done % chunk_size, end, chunk_size), end] if length else []
        if cuts is not None and cuts[request] and start + cuts[request] not in stops:
            insort(stops, start + cuts[request])
        first_chunks.append(len(requests) if stops else 0)
        ends += stops
        requests += [request] * len(stops)
        last_chunks.append(len(requests) - 1 if stops else -1)
        start = end
    return dict(zip(CHUNK_COLUMNS, (ends, requests, first_chunks, last_chunks)))


def most_chunks(rows: int, tokens: int, chunk_size: int) -> int:
    """No `rows` requests with `tokens` new tokens in all have more chunks: each may begin and end within one."""
    return tokens // chunk_size + 2 * rows


def ith_chunks(plan: ChunkPlan, i: int) -> tuple[Tensor | slice, Tensor]:
    """The requests [b] that have an i-th chunk, and these chunks [b]."""
    chunk = plan.first_chunk + i
    having = (chunk <= plan.last_chunk).nonzero().squeeze(1)
    return (slice(None), chunk) if len(having) == len(chunk) else (having, chunk[having])


def chunk_tokens(plan: ChunkPlan, chunk: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [b, Q] of chunks [b], the last one repeated as padding, and which of them are real. Q is the size of a
    chunk however short the requests are: another shape of the products would round differently, and a request's numbers
    would depend on its neighbours."""
    token = plan.cu_chunk_seqlens[chunk][:, None] + torch.arange(plan.chunk_size, device=chunk.device)
    end = plan.cu_chunk_seqlens[chunk + 1][:, None]
    return token.clamp(max=end - 1), token < end


def _to_device(columns: Sequence[np.ndarray], device: torch.device | str) -> Iterator[Tensor]:
    """int32 tensors of all columns, in one copy. Each starts on 16 bytes: Triton compiles a kernel anew for every
    combination of aligned and unaligned arguments."""
    sizes = [len(column) + -len(column) % 4 for column in columns]
    packed = np.zeros(sum(sizes), np.int32)
    for part, column in zip(np.split(packed, np.cumsum(sizes)), columns):
        part[: len(column)] = column
    parts = torch.from_numpy(packed).to(device, non_blocking=True).split(sizes)
    return (part[: len(column)] for part, column in zip(parts, columns))
