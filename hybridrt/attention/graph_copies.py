"""How much room graphs of prompts have for copies of keys and values.

A graph makes the copies of one layer after the other in the same memory, whose size is fixed before the lengths are
known.
"""

from collections.abc import Iterable

import torch

from hybridrt.base.device import gpu_count, shared_memory
from hybridrt.base.model_config import AttentionSpec
from hybridrt.kernels.attention.graph_copies import BLOCK_N, DIM, GRAPH_COPY_FROM, MOST_ROWS, copied_tokens
from hybridrt.kernels.core.launch import LARGE_SHARED_MEMORY

MOST_BYTES = 1 << 30  # steps with longer contexts run without a graph


def copies_in_graphs(device: torch.device) -> bool:
    """Whether graphs of a device have copies: they do where the tiles of the kernel fit a program. Plans for a GPU that
    are made where there is none assume so."""
    return device.type == "cuda" and (not gpu_count() or shared_memory(device) >= LARGE_SHARED_MEMORY)


def copied(spec: AttentionSpec) -> bool:
    """Whether graphs copy the keys and values of such layers: `prefill_attention_triton._may_cut` says which kernels
    read them."""
    wide = spec.head_dim == spec.v_head_dim == DIM and spec.sliding_window is None
    return wide and spec.variant == "gqa" and (spec.query_dtype or spec.dtype).itemsize == 2


def copy_numbers(specs: Iterable[AttentionSpec], context: int) -> int:
    """Numbers of 2 bytes that hold the copies of the layer with the most heads, of contexts of `context` tokens in all.
    0: no layer has copies."""
    return min(2 * _heads(specs) * DIM * (-(-context // BLOCK_N) + MOST_ROWS) * BLOCK_N, MOST_BYTES // 2)


def longest_context(specs: Iterable[AttentionSpec], numbers: int) -> int:
    """Tokens of all contexts for which so many numbers are enough in each layer, whatever the rows."""
    return copied_tokens(numbers, _heads(specs)) - MOST_ROWS * BLOCK_N


def first_copied(specs: Iterable[AttentionSpec]) -> int:
    """Prompt tokens of the smallest graph that has copies in some layer."""
    return -(-GRAPH_COPY_FROM // max(spec.num_heads // spec.num_kv_heads for spec in specs))


def _heads(specs: Iterable[AttentionSpec]) -> int:
    return max((spec.num_kv_heads for spec in specs if copied(spec)), default=0)
