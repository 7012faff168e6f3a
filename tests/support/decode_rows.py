"""Decode rows of a plan one by one: the runtime has them as columns alone."""

from collections.abc import Iterator

from hybridrt.runtime.step.plan import DecodeRow, DecodeRows


def rows_of(decode: DecodeRows) -> Iterator[DecodeRow]:
    """Decode rows one by one, as Python integers."""
    columns = decode.rows, decode.computed, decode.output_indices, decode.num_drafts
    drafts, end = decode.drafts.tolist(), 0
    parents = None if decode.predecessors is None else decode.predecessors.tolist()
    for row, computed, index, count in zip(*(column.tolist() for column in columns)):
        start, end = end, end + count
        yield DecodeRow(row, computed, index, drafts[start:end], parents and parents[start:end])
