"""Sizes of copies of keys and values in graphs of prompts: kernels read whole tiles of them faster than pages."""

BLOCK_N = 64  # context positions of a tile: each row has whole ones
DIM = 128  # of the heads whose kernels were measured
MOST_ROWS = 16  # prompts of a step, with padding
# Query rows of a KV head in a graph. Fewer gain less than the copy's launch takes, and read pages in place.
GRAPH_COPY_FROM = 6144


def copied_tokens(numbers: int, kv_heads: int) -> int:
    """Tokens whose keys and values so many numbers hold, in whole tiles."""
    return numbers // (2 * kv_heads * DIM * BLOCK_N) * BLOCK_N
