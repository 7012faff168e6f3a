"""Checks of a batch before it is planned: host values always, device values for debugging."""

from collections.abc import Callable, Sequence

import torch

from hybridrt.base.errors import BackendError
from hybridrt.base.forward_batch import ForwardBatch, ForwardMode, GraphView
from hybridrt.kernels.core.slots import DEBUG, check_range, may_look
from hybridrt.mem_cache.pools.req_to_token_pool import HybridReqToTokenPool

_GRAPH_MODES = (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND)


def check_eager_batch(batch: ForwardBatch, check_places: Callable[[ForwardBatch], None]) -> None:
    """Checks shapes, segments and host lengths; on a CPU also `check_places`. HYBRIDRT_DEBUG=1 adds
    `check_places` on a GPU and the device's lengths.

    Raises:
        BackendError: they contradict each other.
    """
    _check_shapes(batch)
    _check_mode(batch)
    _check_lengths(batch)
    if may_look(batch.seq_lens.device):
        check_places(batch)
    if DEBUG:
        _check_device_lengths(batch)


def check_graph_batch(batch: ForwardBatch, view: GraphView) -> None:
    """Checks mode, drafts and size of a captured or replayed step. HYBRIDRT_DEBUG=1 adds its
    padding rows and waits for the device."""
    mode, spec = batch.forward_mode, batch.spec_info
    if view.prompts:
        return _check_prompt_graph(batch, view)
    if mode not in _GRAPH_MODES or batch.num_extend_rows:
        raise BackendError(f"{mode.name} steps cannot be captured; only decode, verify and draft-extend can")
    if mode is not ForwardMode.DRAFT_EXTEND and (mode is ForwardMode.DECODE) != (spec is None):
        raise BackendError(f"forward_mode is {mode.name} and spec_info {spec}: verify steps have one alone")
    if batch.tokens_per_row != view.tokens_per_row or batch.batch_size > view.max_bs:
        raise BackendError(
            f"{batch.batch_size} rows of {batch.tokens_per_row} tokens in a view of graphs of up to {view.max_bs} rows "
            f"of {view.tokens_per_row}"
        )
    if not 0 <= batch.num_real <= batch.batch_size:
        raise BackendError(
            f"num_real is {batch.num_real}; in a graph of {batch.batch_size} rows it is 0 to that number"
        )
    if DEBUG and batch.num_real:  # rows of a capture may hold anything
        _check_padding(batch)


def _check_prompt_graph(batch: ForwardBatch, view: GraphView) -> None:
    if batch.forward_mode not in (ForwardMode.EXTEND, ForwardMode.MIXED) or batch.spec_info is not None:
        mode = batch.forward_mode.name
        raise BackendError(f"{mode} step in a view of graphs of prompts; use a step of prompts and plain decode rows")
    if not 0 <= batch.num_real <= batch.num_decode_rows <= view.max_bs:
        raise BackendError(
            f"{batch.num_real} real ones of {batch.num_decode_rows} decode rows in a view of graphs of up to "
            f"{view.max_bs}"
        )
    if batch.query_lens_cpu is None or not batch.num_extend_rows:
        raise BackendError("a graph of prompts needs extend rows, and bounds of their tokens: query_lens_cpu")


def check_own(name: str, values: torch.Tensor) -> None:
    """With HYBRIDRT_DEBUG=1, checks that real rows share no value and none is 0 (scratch). Waits
    for the device.

    Raises:
        BackendError: two rows share one, or a row has scratch.
    """
    if not DEBUG:
        return
    seen: set[int] = set()
    for row, value in enumerate(values.tolist()):
        if value == 0 or value in seen:
            why = "is scratch" if value == 0 else "belongs to another row of the batch"
            raise BackendError(f"{name} of row {row} is {value}, which {why}")
        seen.add(value)


def _check_device_lengths(batch: ForwardBatch) -> None:
    """Checks lengths, positions and padding rows. Waits for the device."""
    if not batch.batch_size:
        return
    starts, lens = batch.query_start_loc, batch.seq_lens
    if int(starts[0]):
        raise BackendError(f"query_start_loc begins with {int(starts[0])}; it must begin with 0")
    new = starts.diff()
    real, split = batch.num_real, batch.num_decode_rows
    _check_padding(batch)
    if batch.query_lens_cpu is not None and batch.seq_lens_cpu is not None:
        _compare("query_start_loc", new[:real], batch.query_lens_cpu[:real])
        _compare("seq_lens", lens[split:real], batch.seq_lens_cpu[split:real], split)
        over = [i for i, (on, off) in enumerate(zip(lens[:real].tolist(), batch.seq_lens_cpu)) if on > off]
        if over:
            raise BackendError(f"seq_lens of row {over[0]} is {int(lens[over[0]])}; seq_lens_cpu is its upper bound")
    forks = batch.spec_info is not None and batch.spec_info.mask is not None
    first = split if forks else 0  # a row's last draft need not have its last position
    last = batch.positions[(starts[first + 1 : real + 1] - 1).clamp(min=0).long()]
    _compare(
        "positions", torch.where(new[first:real] > 0, last + 1, lens[first:real]), lens[first:real].tolist(), first
    )


def _check_padding(batch: ForwardBatch) -> None:
    real = batch.num_real
    for row, number in enumerate(batch.req_pool_indices[real:].tolist(), real):
        if number:
            raise BackendError(f"num_real is {real}, but row {row} is request row {number}; padding rows are row 0")


def check_written_places(batch: ForwardBatch, places: torch.Tensor, req_to_token: torch.Tensor) -> None:
    """With HYBRIDRT_DEBUG=1, checks that the new tokens' `places` [N] are those of the page table. Padding
    drafts are not written. Waits for the device."""
    if not DEBUG:
        return
    starts, drafts = batch.query_start_loc.tolist(), batch.spec_info.num_drafts if batch.spec_info else None
    for row in range(batch.num_real):
        count = new = starts[row + 1] - starts[row]
        if drafts is not None and row < batch.num_decode_rows:
            count = 1 + int(drafts[row])
        first, begin = int(batch.seq_lens[row]) - new, starts[row]
        named = req_to_token[batch.req_pool_indices[row], first : first + count]
        for i, (on, off) in enumerate(zip(places[begin : begin + count].tolist(), named.tolist())):
            if on != off:
                raise BackendError(
                    f"out_cache_loc is {on} for position {first + i} of row {row}, for which req_to_token names {off}"
                )


def _compare(name: str, found: torch.Tensor, expected: Sequence[int], first: int = 0) -> None:
    for row, (on, off) in enumerate(zip(found.tolist(), expected, strict=True), first):
        if on != off:
            raise BackendError(f"{name} gives {on} for row {row} where the lengths say {off}")


def _check_shapes(batch: ForwardBatch) -> None:
    rows, tokens = batch.batch_size, batch.input_ids.shape[0]
    for name, count in (("seq_lens", rows), ("query_start_loc", rows + 1), ("positions", tokens),
                        ("out_cache_loc", tokens)):  # fmt: skip
        shape = getattr(batch, name).shape[-1:] if name == "out_cache_loc" else getattr(batch, name).shape
        if shape != (count,):
            raise BackendError(f"{name} has shape {tuple(shape)}; {rows} rows and {tokens} tokens need ({count},)")
    reads = batch.read_state_slots
    if reads is not None and reads.shape != (batch.num_extend_rows,):
        raise BackendError(
            f"read_state_slots has shape {tuple(reads.shape)}; {batch.num_extend_rows} extend rows need one entry each"
        )
    if not (0 <= batch.num_real <= rows and 0 <= batch.num_decode_rows <= rows):
        raise BackendError(
            f"num_real is {batch.num_real} and num_decode_rows {batch.num_decode_rows} in a batch of {rows} rows"
        )
    if batch.num_decode_tokens > tokens:
        raise BackendError(
            f"{batch.num_decode_rows} decode rows of {batch.tokens_per_row} tokens in a batch of {tokens} tokens"
        )


def _check_mode(batch: ForwardBatch) -> None:
    decode, extend = batch.num_decode_rows > 0, batch.num_extend_rows > 0
    fits = {
        ForwardMode.EXTEND: not decode,
        ForwardMode.DECODE: not extend and batch.spec_info is None,
        ForwardMode.TARGET_VERIFY: not extend and batch.spec_info is not None,
        ForwardMode.MIXED: decode and extend,
        ForwardMode.DRAFT_EXTEND: True,
        ForwardMode.IDLE: not decode and not extend,
    }
    mode = batch.forward_mode
    if not fits.get(mode, False):
        raise BackendError(
            f"forward_mode is {mode.name if mode in fits else repr(mode)} in a batch of {batch.num_decode_rows} decode "
            f"rows of {batch.tokens_per_row} tokens and {batch.num_extend_rows} extend rows; see ForwardMode"
        )


def _check_lengths(batch: ForwardBatch) -> None:
    totals, new = batch.seq_lens_cpu, batch.query_lens_cpu
    if totals is None or new is None:
        if batch.num_extend_rows:
            raise BackendError("a batch with extend rows needs the host's lengths: seq_lens_cpu and query_lens_cpu")
        return
    rows, width, split = batch.batch_size, batch.tokens_per_row, batch.num_decode_rows
    if not len(totals) == len(new) == rows:
        raise BackendError(f"seq_lens_cpu has {len(totals)} and query_lens_cpu {len(new)} entries for {rows} rows")
    if any(n != width for n in new[:split]):
        raise BackendError(f"query_lens_cpu of decode rows is {list(new[:split])}; each has {width} tokens")
    if sum(new) > batch.input_ids.shape[0]:
        raise BackendError(f"query_lens_cpu counts {sum(new)} tokens; the batch has {batch.input_ids.shape[0]}")
    for row, (total, count) in enumerate(zip(totals[: batch.num_real], new)):
        if not 0 <= count <= total:
            raise BackendError(f"row {row} has {count} new tokens and a length of {total} that counts them")


def check_states(batch: ForwardBatch, pools: HybridReqToTokenPool, num_slots: int) -> None:
    """BackendError unless the rows and state slots of a step exist, and no two rows share a slot.
    Waits for the device."""
    end = num_slots + 1
    check_range("req_pool_indices", batch.req_pool_indices, pools.num_rows + 1, BackendError)
    state_slots = pools.state_slots(batch.req_pool_indices[: batch.num_real])
    check_range("req_to_state_slot", state_slots, end, BackendError)
    check_own("req_to_state_slot", state_slots)
    if batch.read_state_slots is not None:
        check_range("read_state_slots", batch.read_state_slots, end, BackendError)
    for part in batch.extend_passes:
        for name in ("read_state_slots", "write_state_slots"):
            check_range(f"{name} of a pass", getattr(part, name).clamp(min=0), end, BackendError)
    for saved in batch.saved_states.values():
        check_range("row_slots of saved states", saved.row_slots, end, BackendError)
        check_range("chunk_slots of saved states", saved.chunk_slots, end, BackendError)
