"""Programs share contexts of different lengths: every block of every row is in one part, and no part is long."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from hybridrt.kernels.attention.decode_shares_triton import (  # noqa: E402
    blocks_of,
    of_row,
    parts_of,
    parts_of_rows,
    row_of,
)
from hybridrt.kernels.core.jit_kernel_triton import jit_kernel  # noqa: E402
from hybridrt.kernels.core.launch import next_power_of_2  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="runs in Triton's interpreter"),
    pytest.mark.filterwarnings("error"),  # a division by zero
]
BLOCK_N = 16


@jit_kernel
def _parts_kernel(  # type: ignore[no-untyped-def]
    seq_lens_ptr, out_ptr, rows, T: tl.constexpr, WINDOW: tl.constexpr, ROOM: tl.constexpr, FEW: tl.constexpr,
    LEAST: tl.constexpr, WHOLE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """Stores a part's row, its number in the row, its first and end block, and what `of_row` says of the row."""
    own = tl.program_id(0)
    share, parts = parts_of_rows(seq_lens_ptr, rows, T, WINDOW, ROOM, FEW, LEAST, WHOLE, BLOCK_N, BLOCK_B)
    row, first_part = row_of(own, parts)
    if row >= rows:
        return
    _, blocks = blocks_of(tl.load(seq_lens_ptr + row), T, WINDOW, BLOCK_N)
    part, used = parts_of(blocks, share, FEW, LEAST, WHOLE)
    again, same = of_row(row, parts)
    split = own - first_part
    tl.store(out_ptr + own * 6, row)
    tl.store(out_ptr + own * 6 + 1, split)
    tl.store(out_ptr + own * 6 + 2, split * part)
    tl.store(out_ptr + own * 6 + 3, tl.minimum((split + 1) * part, blocks))
    tl.store(out_ptr + own * 6 + 4, used)
    tl.store(out_ptr + own * 6 + 5, (again == first_part) & (same == used))


def parts(
    lengths: list[int], room: int, few: int, least: int, whole: bool, window: int, tokens: int
) -> list[list[int]]:  # fmt: skip
    """Of each part: row, number in the row, first and end block, parts of the row."""
    rows = len(lengths)
    out = torch.full((2 * room + rows + 1, 6), -1, dtype=torch.int32)
    _parts_kernel[(len(out),)](
        torch.tensor(lengths, dtype=torch.int32), out, rows, T=tokens, WINDOW=window, ROOM=room, FEW=few, LEAST=least,
        WHOLE=whole, BLOCK_N=BLOCK_N, BLOCK_B=next_power_of_2(rows),
    )  # fmt: skip
    found = out[out[:, 0] >= 0]
    assert torch.equal(found, out[: len(found)]), "parts come first, and what finds none stores nothing"
    assert len(found) < len(out), "there is a program more than parts can be"
    assert (found[:, 5] == 1).all()
    return found[:, :5].tolist()


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 400), min_size=1, max_size=9), room=st.integers(1, 12), few=st.integers(1, 4),
    least=st.integers(1, 5), whole=st.booleans(), window=st.sampled_from([0, 40]), tokens=st.integers(1, 3),
)  # fmt: skip
def test_each_block_of_each_row_is_in_one_part(
    lengths: list[int], room: int, few: int, least: int, whole: bool, window: int, tokens: int
) -> None:
    found = parts(lengths, room, few, least, whole, window, tokens)
    origins = [max(n - tokens - window + 1, 0) // BLOCK_N * BLOCK_N if window else 0 for n in lengths]
    blocks = [-(-(n - origin) // BLOCK_N) for n, origin in zip(lengths, origins, strict=True)]
    share = max(-(-sum(blocks) // room), 1)
    for row, count in enumerate(blocks):
        own = [part for part in found if part[0] == row]
        assert [number for _, number, *_ in own] == list(range(len(own))) and {used for *_, used in own} == {len(own)}
        covered = [block for *_, first, end, _ in own for block in range(first, end)]
        assert covered == list(range(count)), "in order, each once; an empty row has a part that writes its zeros"
        sizes = [end - first for *_, first, end, _ in own]
        assert min(sizes) > 0 or count == 0
        assert set(sizes[:-1]) <= {-(-count // len(own))}, "equal parts, but for the last one"
        assert max(sizes) <= max(-(-share // 2), least) or (whole and len(own) == 1 and 2 * count <= 3 * share)
        assert len(own) <= 2 * room, "as the launch that joins them expects"


def test_a_long_context_among_short_ones_has_parts_of_its_own() -> None:
    """And short ones are whole if rows fill the device, equal ones too."""
    found = parts([600] * 15 + [9600], room=20, few=1, least=8, whole=True, window=0, tokens=1)
    assert [sum(part[0] == row for part in found) for row in range(16)] == [1] * 15 + [20]
    assert len(parts([600] * 16, room=20, few=1, least=8, whole=True, window=0, tokens=1)) == 16
    assert len(parts([600] * 4, room=20, few=16, least=8, whole=False, window=0, tokens=1)) == 40
    few = [len(parts([600], room=20, few=n, least=8, whole=False, window=0, tokens=1)) for n in (1, 8, 16, 64)]
    assert few == [5, 8, 13, 38], "short parts only where there are few of them"
