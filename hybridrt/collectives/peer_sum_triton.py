"""Sums and exchanges over ranks in one launch: each rank writes its numbers into the others' memory.

A rank has a box, with a part for each sender. A word of it has 8 bytes: 4 of data, and the number of
the round as a flag. 8 bytes arrive at once, so a word with the right flag is complete (the LL protocol
of NCCL). Every rank adds the same numbers in the order of ranks, in float32.

A program has the same words in every launch, and counts its rounds, which alternate between two halves
of a box. That is enough: a rank sends for round k + 2 after it has received round k + 1, which its peer
sent after it had read round k.
"""

import triton
import triton.language as tl

from hybridrt.kernels.core.jit_kernel_triton import jit_kernel
from hybridrt.kernels.core.pdl_triton import begin


@triton.jit
def _as_floats(words, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """The two numbers of each word as float32; the same one twice if they are float32."""
    if dtype == tl.float32:
        first = words.to(tl.float32, bitcast=True)
        second = first
    else:
        first = (words & 0xFFFF).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
        second = (words >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    return first, second


@triton.jit
def _as_words(first, second, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    if dtype == tl.float32:
        words = first.to(tl.int32, bitcast=True)
    else:
        low = first.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        words = low | (second.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) << 16)
    return words


@triton.jit
def _received(cells, mask, epoch, stop_ptr, SPINS: tl.constexpr):  # type: ignore[no-untyped-def]
    """A sender's words, when all have come; garbage after a stop."""
    found = tl.load(cells, mask=mask, other=0, volatile=True)
    late = tl.sum(((found >> 32) != epoch).to(tl.int32) * mask.to(tl.int32))
    tries = 0
    while late > 0:
        found = tl.load(cells, mask=mask, other=0, volatile=True)
        late = tl.sum(((found >> 32) != epoch).to(tl.int32) * mask.to(tl.int32))
        tries += 1
        if tries == SPINS:
            tries = 0
            late = tl.where(tl.load(stop_ptr, volatile=True) == 0, late, 0)  # in main memory
    return found.to(tl.int32)


@triton.jit
def _send(words, box_ptr, place, mask, epoch):  # type: ignore[no-untyped-def]
    """Writes words to a place in the box of which box_ptr has the address."""
    box = tl.load(box_ptr).to(tl.pointer_type(tl.int64))
    sent = (epoch.to(tl.int64) << 32) | (words.to(tl.int64) & 0xFFFFFFFF)
    tl.store(box + place, sent, mask=mask, cache_modifier=".wt")


@triton.jit
def _sum_of_box(  # type: ignore[no-untyped-def]
    own, place, mask, boxes_ptr, epoch, stop_ptr,
    RANK: tl.constexpr, SIZE: tl.constexpr, ROOM: tl.constexpr, DTYPE: tl.constexpr, SPINS: tl.constexpr,
):  # fmt: skip
    """The first and the second number of each word that came from the other ranks, and of `own`, summed in the order of
    ranks in float32. `place` as sent."""
    mine = tl.load(boxes_ptr + RANK).to(tl.pointer_type(tl.int64))
    first, second = tl.zeros(own.shape, tl.float32), tl.zeros(own.shape, tl.float32)
    for rank in tl.static_range(SIZE):
        words = own
        if rank != RANK:
            words = _received(mine + rank * ROOM + place, mask, epoch.to(tl.int64), stop_ptr, SPINS)
        one, two = _as_floats(words, DTYPE)
        first, second = first + one, second + two
    return first, second


@triton.jit
def _sum_of_ranks(  # type: ignore[no-untyped-def]
    own, place, mask, first_box, boxes_ptr, epoch, stop_ptr,
    RANK: tl.constexpr, SIZE: tl.constexpr, ROOM: tl.constexpr, DTYPE: tl.constexpr, SPINS: tl.constexpr,
):  # fmt: skip
    """The two numbers of each word, summed over the ranks in float32.

    Args:
        own: this rank's words; `place`: of these in the part of a sender.
        first_box: first word of the parts in a box. ROOM: words of a sender in one half.
        boxes_ptr: [SIZE] int64 addresses of the ranks' boxes.
        epoch: the round.
    """
    place += first_box + (epoch & 1) * (SIZE * ROOM)
    for step in tl.static_range(1, SIZE):
        _send(own, boxes_ptr + (RANK + step) % SIZE, RANK * ROOM + place, mask, epoch)
    return _sum_of_box(own, place, mask, boxes_ptr, epoch, stop_ptr, RANK, SIZE, ROOM, DTYPE, SPINS)


@jit_kernel(do_not_specialize=["num_words"])
def sum_kernel(  # type: ignore[no-untyped-def]
    x_ptr, boxes_ptr, epochs_ptr, stop_ptr, num_words,
    RANK: tl.constexpr, SIZE: tl.constexpr, ROOM: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr,
    SPINS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid [programs of BLOCK words]: x, as int32 words, becomes its sum over the ranks."""
    part = tl.program_id(0)
    w = part * BLOCK + tl.arange(0, BLOCK)
    mask = w < num_words
    begin(PDL)
    epoch = tl.load(epochs_ptr + part) + 1
    own = tl.load(x_ptr + w, mask=mask, other=0)
    first, second = _sum_of_ranks(own, w, mask, 0, boxes_ptr, epoch, stop_ptr, RANK, SIZE, ROOM, DTYPE, SPINS)
    tl.store(x_ptr + w, _as_words(first, second, DTYPE), mask=mask)
    tl.store(epochs_ptr + part, epoch)


@jit_kernel
def sum_add_norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr, residual_ptr, weight_ptr, out_ptr, boxes_ptr, epochs_ptr, stop_ptr, residual_sr, eps,
    RANK: tl.constexpr, SIZE: tl.constexpr, FIRST: tl.constexpr, ROOM: tl.constexpr, ROW: tl.constexpr,
    WIDTH: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr, SPINS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid [rows]: `add_rms_norm` of x's sum over the ranks. x, residual, out: int32 words of two numbers, WIDTH a row.

    FIRST: where the rows' parts begin in a box. ROW: words from a row to the next one there.
    """
    row = tl.program_id(0)
    w = tl.arange(0, BLOCK)
    mask = w < WIDTH
    even = tl.load(weight_ptr + 2 * w, mask=mask, other=0.0)
    odd = tl.load(weight_ptr + 2 * w + 1, mask=mask, other=0.0)
    begin(PDL)
    epoch = tl.load(epochs_ptr + row) + 1
    own = tl.load(x_ptr + row * WIDTH + w, mask=mask, other=0)
    target = residual_ptr + row.to(tl.int64) * residual_sr + w
    before = tl.load(target, mask=mask, other=0)
    first, second = _sum_of_ranks(
        own, row * ROW + w, mask, FIRST, boxes_ptr, epoch, stop_ptr, RANK, SIZE, ROOM, DTYPE, SPINS
    )
    # Rounded twice, as by a sum and a norm apart.
    first, second = _as_floats(_as_words(first, second, DTYPE), DTYPE)
    first_before, second_before = _as_floats(before, DTYPE)
    total = _as_words(first + first_before, second + second_before, DTYPE)
    tl.store(target, total, mask=mask)
    first, second = _as_floats(total, DTYPE)
    scale = 1.0 / tl.sqrt(tl.sum(first * first + second * second, 0) / (2 * WIDTH) + eps)
    tl.store(out_ptr + row * WIDTH + w, _as_words(first * scale * even, second * scale * odd, DTYPE), mask=mask)
    tl.store(epochs_ptr + row, epoch)


@jit_kernel(do_not_specialize=["num_words"])
def gather_kernel(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, boxes_ptr, epochs_ptr, stop_ptr, num_words,
    RANK: tl.constexpr, SIZE: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr, SPINS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid [programs of BLOCK words]: out [SIZE, num_words] becomes x of all ranks, in their order; int32 words."""
    part = tl.program_id(0)
    w = part * BLOCK + tl.arange(0, BLOCK)
    mask = w < num_words
    begin(PDL)
    epoch = tl.load(epochs_ptr + part) + 1
    own = tl.load(x_ptr + w, mask=mask, other=0)
    place = w + (epoch & 1) * (SIZE * ROOM)
    for step in tl.static_range(1, SIZE):
        _send(own, boxes_ptr + (RANK + step) % SIZE, RANK * ROOM + place, mask, epoch)
    mine = tl.load(boxes_ptr + RANK).to(tl.pointer_type(tl.int64))
    for rank in tl.static_range(SIZE):
        words = own
        if rank != RANK:
            words = _received(mine + rank * ROOM + place, mask, epoch.to(tl.int64), stop_ptr, SPINS)
        tl.store(out_ptr + rank * num_words + w, words, mask=mask)
    tl.store(epochs_ptr + part, epoch)


@jit_kernel(do_not_specialize=["num_words"])
def scatter_sum_kernel(  # type: ignore[no-untyped-def]
    y_ptr, out_ptr, boxes_ptr, epochs_ptr, stop_ptr, num_words,
    RANK: tl.constexpr, SIZE: tl.constexpr, ROOM: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr,
    SPINS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid [programs of BLOCK words]: out [num_words] becomes the sum over the ranks of part RANK of their y
    [SIZE, num_words], as int32 words."""
    part = tl.program_id(0)
    w = part * BLOCK + tl.arange(0, BLOCK)
    mask = w < num_words
    begin(PDL)
    epoch = tl.load(epochs_ptr + part) + 1
    place = w + (epoch & 1) * (SIZE * ROOM)
    for step in tl.static_range(1, SIZE):
        words = tl.load(y_ptr + (RANK + step) % SIZE * num_words + w, mask=mask, other=0)
        _send(words, boxes_ptr + (RANK + step) % SIZE, RANK * ROOM + place, mask, epoch)
    own = tl.load(y_ptr + RANK * num_words + w, mask=mask, other=0)
    first, second = _sum_of_box(own, place, mask, boxes_ptr, epoch, stop_ptr, RANK, SIZE, ROOM, DTYPE, SPINS)
    tl.store(out_ptr + w, _as_words(first, second, DTYPE), mask=mask)
    tl.store(epochs_ptr + part, epoch)
