"""Which bytes a decode rank reads from which prefill ranks."""

from collections.abc import Iterable, Sequence

from hybridrt.base.errors import TransferError
from hybridrt.mem_cache.pools.state_slices import RangeRead, Section, section_reads


def tp_ratio(decode_tp: int, prefill_tp: int) -> int:
    """Signed: decode ranks for each prefill rank, or minus prefill ranks for each decode rank.

    Raises:
        TransferError: neither number divides the other.
    """
    if max(decode_tp, prefill_tp) % min(decode_tp, prefill_tp):
        raise TransferError(
            f"{prefill_tp} prefill ranks cannot feed {decode_tp} decode ranks; one must divide the other"
        )
    return decode_tp // prefill_tp if decode_tp >= prefill_tp else -(prefill_tp // decode_tp)


def image_reads(
    sections: Sequence[Section], rank: int, decode_tp: int, prefill_tp: int
) -> list[tuple[int, list[RangeRead]]]:
    """(prefill rank, reads of its image) for one decode rank with these `sections`.

    Every byte is read exactly once. Prefill ranks without a read are left out.
    """
    ratio = tp_ratio(decode_tp, prefill_tp)
    if ratio > 0:
        return [(rank // ratio, _joined(section_reads(sections, decode_tp, rank, ratio)))]
    sources = range(-ratio * rank, -ratio * (rank + 1))
    found = [(source, _joined(section_reads(sections, decode_tp, source, ratio))) for source in sources]
    return [(source, reads) for source, reads in found if reads]


def _joined(reads: Iterable[RangeRead]) -> list[RangeRead]:
    """Joins neighbours. With equal numbers of ranks one read is left."""
    joined: list[RangeRead] = []
    for read in (read for read in reads if read.nbytes):
        last = joined[-1] if joined else None
        shift = read.source - read.destination
        if last and last.source - last.destination == shift and last.source + last.nbytes == read.source:
            joined[-1] = RangeRead(last.source, last.destination, last.nbytes + read.nbytes)
        else:
            joined.append(read)
    return joined
