"""Cuts ragged prompts into chunks at fixed absolute positions, and sums log decays within chunks.

Token j has decayed at token i by exp(G_i - G_j), where G is the running sum of gates. In float32 a
strong gate before j makes the difference inexact, and -inf makes it NaN: so gates are clamped to
FLOOR.
"""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hybridrt.kernels.core.packed import A, arrays_of, int32_array, map_arrays, pack_arrays, packed_size, unpack


class ChunkArrays(NamedTuple, Generic[A]):
    """The arrays of a ChunkPlan, on the host or on the device; shapes and meanings as there."""

    cu_chunk_seqlens: A
    seq_idx: A
    first_chunk: A
    last_chunk: A


@dataclass(frozen=True)
class ChunkPlan:
    """Chunks of the new tokens of B requests, packed along one axis.

    Chunks end with their request and at positions that are multiples of `chunk_size`, so they do
    not depend on how steps split a prompt. A request without new tokens has no chunk. In a graph,
    empty chunks follow, and host numbers are bounds: one request has all tokens.

    Attributes:
        cu_chunk_seqlens: [n+1] int32, first token of each chunk, then the number of tokens.
        seq_idx: [n] int32, request of each chunk.
        first_chunk, last_chunk: [B] int32; 0 and -1 for a request without chunks.
        max_chunks_per_seq: chunks of the longest request.
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
    """Plans chunks of requests with `computed` tokens in their state and `new` tokens to add."""
    on_host: ChunkArrays[np.ndarray] = map_arrays(int32_array, chunk_lists(computed, new, chunk_size))
    arrays = arrays_of(on_host)
    packed = np.empty(packed_size(arrays), np.int32)
    pack_arrays(arrays, packed)
    on_device = unpack(on_host, torch.from_numpy(packed).to(device, non_blocking=True), arrays)
    return chunk_plan(on_device, on_host, new, chunk_size)


def chunk_plan(
    on_device: ChunkArrays[Tensor], on_host: ChunkArrays[np.ndarray], new: Sequence[int], chunk_size: int
) -> ChunkPlan:
    """The plan of `chunk_lists` that were copied to a device."""
    longest = int((on_host.last_chunk - on_host.first_chunk).max(initial=-1)) + 1
    return ChunkPlan(*on_device, longest, chunk_size, sum(new), tuple(new))


def chunk_lists(
    computed: Sequence[int], new: Sequence[int], chunk_size: int, cuts: Sequence[Sequence[int]] | None = None
) -> ChunkArrays[list[int]]:
    """The tensors of a ChunkPlan, as lists. `cuts`: numbers of tokens of each request after which a
    chunk also ends; 0 for none."""
    # Most steps have few chunks: a loop is fastest.
    ends, requests, first_chunks, last_chunks, start = [0], list[int](), list[int](), list[int](), 0
    for request, (done, length) in enumerate(zip(computed, new)):
        end = start + length
        stops = [*range(start + chunk_size - done % chunk_size, end, chunk_size), end] if length else []
        for cut in () if cuts is None else cuts[request]:
            if cut and start + cut not in stops:
                insort(stops, start + cut)
        first_chunks.append(len(requests) if stops else 0)
        ends += stops
        requests += [request] * len(stops)
        last_chunks.append(len(requests) - 1 if stops else -1)
        start = end
    return ChunkArrays(ends, requests, first_chunks, last_chunks)


def most_chunks(rows: int, tokens: int, chunk_size: int) -> int:
    """An upper bound of the chunks of `rows` requests with `tokens` new tokens in all."""
    return tokens // chunk_size + 2 * rows


def ith_chunks(plan: ChunkPlan, i: int) -> tuple[Tensor | slice, Tensor]:
    """The requests [b] that have an i-th chunk, and these chunks [b]."""
    chunk = plan.first_chunk + i
    having = (chunk <= plan.last_chunk).nonzero().squeeze(1)
    return (slice(None), chunk) if len(having) == len(chunk) else (having, chunk[having])


def chunk_tokens(plan: ChunkPlan, chunk: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [b, Q] of chunks [b], padded with the last one, and a mask of the real ones.

    Q is always the chunk size: other shapes round differently, so a request's numbers would depend
    on its neighbours.
    """
    token = plan.cu_chunk_seqlens[chunk][:, None] + torch.arange(plan.chunk_size, device=chunk.device)
    end = plan.cu_chunk_seqlens[chunk + 1][:, None]
    return token.clamp(max=end - 1), token < end


FLOOR = -128.0  # its exponential is 0 in float32


def decay_sums(gates: Tensor, dim: int) -> Tensor:
    """Running sums of gates along `dim`, float64. Take differences first, then `exp_of`."""
    return gates.clamp(min=FLOOR).double().cumsum(dim)


def exp_of(sums: Tensor) -> Tensor:
    """exp(sums) of sums or of their differences, float32: the share of a token that is left."""
    return sums.float().exp_()


def finite_rates(A: Tensor) -> Tensor:
    """A with -inf replaced by the lowest number: padding has a time step of 0, and 0 * -inf is
    NaN."""
    return A.clamp(min=torch.finfo(A.dtype).min)
