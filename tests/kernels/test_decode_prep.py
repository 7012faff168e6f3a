"""The small launches at the head of a decode step, against plain torch."""

from typing import Any

import pytest
import torch

from hybridrt.kernels.core.records import DecodeRowInputs, RowTables, TokenInputs
from hybridrt.kernels.state.decode_inputs import decode_inputs
from hybridrt.kernels.state.row_tables import DecodeBuffers, fill_decode_metadata
from tests.support.flat import flat

ROWS, CONTEXT, PAGE = 12, 32, 4
POISON = -(2**30)


def int32(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def inputs(tokens: int, context: int = CONTEXT, groups: int = 1) -> dict[str, Any]:
    """Rows far apart whose last token is on a new page, on an old one, at a page's first or last slot; padding."""
    torch.manual_seed(tokens)
    rows, drafted = int32([7, 2, 11, 0, 5]), int32([tokens - 1, 0, (tokens - 1) // 2, 0, tokens - 1])
    lens = int32([tokens + 8, tokens, tokens + 3, tokens, 32])
    buffers = torch.full((2 + groups, len(rows) * tokens + 3), POISON, dtype=torch.int32)
    whole = TokenInputs(buffers[0], buffers[1], buffers[2] if groups == 1 else buffers[2:])
    new = int32([40, -1, 41, -1, 42] if context else [-1] * 5)[:, None].repeat(1, groups)
    new[1, 1:], new[2, 1:] = 43 if context else -1, -1  # groups whose page is new where that of another one is not
    out = whole.first(len(rows) * tokens)._asdict() | {"buffers": buffers}
    return out | {
        "rows": rows, "seq_lens": lens, "last_tokens": torch.arange(13).int(),
        "new_pages": new, "page_size": PAGE,
        "tables": torch.randint(4, 160, (ROWS + 1, groups, context), dtype=torch.int32),
        "drafts": torch.randint(100, (len(rows), tokens - 1), dtype=torch.int32) if tokens > 1 else None,
        "num_drafts": drafted if tokens > 1 else None,
    }  # fmt: skip


def test_the_kernel_that_fills_the_metadata_starts_alone() -> None:
    """Kernels of the layers read the metadata before the kernel in front of them has ended (pdl_triton)."""
    from hybridrt.kernels.state import decode_prep_triton

    kernel = decode_prep_triton._fill_decode_metadata_kernel
    assert "PDL" not in kernel.arg_names and "PDL" in decode_prep_triton._decode_inputs_kernel.arg_names


@pytest.mark.parametrize("tokens", [1, 2, 5])
@pytest.mark.parametrize(("context", "groups"), [(CONTEXT, 1), (CONTEXT, 2), (CONTEXT, 3), (0, 1)])
def test_decode_inputs(provider: str, tokens: int, context: int, groups: int) -> None:
    """In the first places of larger buffers, the others of which stay as they are."""
    own, args = inputs(tokens, context, groups), inputs(tokens, context, groups)
    buffers, wanted = own.pop("buffers"), args.pop("buffers")
    flat(decode_inputs, **own)
    flat(decode_inputs.reference, **args)
    assert torch.equal(buffers, wanted) and torch.equal(own["tables"], args["tables"])
    assert (buffers[:, -3:] == POISON).all() and not (buffers[:, :-3] == POISON).any()
    before = inputs(tokens, context, groups)["tables"]
    for group in range(groups):
        assert context == 0 or not torch.equal(args["tables"][:, group], before[:, group])


@pytest.mark.parametrize("tokens", [1, 5])
def test_rows_turn_by_their_own_distance(provider: str, tokens: int) -> None:
    """Positions of rotary embeddings differ from places by a constant of the row."""
    args, deltas = inputs(tokens), -torch.arange(ROWS + 1, dtype=torch.int32)
    del args["buffers"]
    turning = torch.full((5 * tokens + 3,), POISON, dtype=torch.int32)
    flat(decode_inputs, **args | {"mrope_positions": turning[: 5 * tokens], "mrope_deltas": deltas})
    assert (turning[5 * tokens :] == POISON).all()
    assert torch.equal(turning[: 5 * tokens], args["positions"] - args["rows"].repeat_interleave(tokens))


@pytest.mark.parametrize("groups", [2, 3])
def test_places_of_each_page_group(provider: str, groups: int) -> None:
    """Row 1 has a new page in the last group alone; row 2 has one in all. Other groups read their own tables."""
    tables = torch.arange(3 * groups * 8, dtype=torch.int32).view(3, groups, 8) + 1000
    whole = TokenInputs.allocate(5, torch.device("cpu"), groups)
    new = int32([[*[-1] * (groups - 1), 7], [8 + group for group in range(groups)]])
    step = DecodeRowInputs(int32([1, 2]), int32([6, 5]), new)
    decode_inputs(whole.first(2), step, torch.arange(3).int(), tables, PAGE)
    known = [1000 + 8 * (groups + group) + 5 for group in range(groups - 1)]
    assert whole.out_cache_loc[:, 0].tolist() == [*known, 7 * PAGE + 1]
    assert whole.out_cache_loc[:, 1].tolist() == [(8 + group) * PAGE for group in range(groups)]
    assert not whole.out_cache_loc[:, 2:].any() and whole.positions[:2].tolist() == [5, 4]
    assert tables[1, -1, 4:].tolist() == [28, 29, 30, 31] and tables[1, 0, 4] == 1000 + 8 * groups + 4


@pytest.mark.parametrize(("rows", "real", "tokens"), [(5, 3, 1), (5, 5, 4), (300, 257, 2), (1, 0, 1)])
def test_fill_decode_metadata(provider: str, rows: int, real: int, tokens: int) -> None:
    """More rows than a program takes, in buffers that are a prefix of larger ones."""
    torch.manual_seed(0)
    indices, lens = torch.randint(1, 400, (rows,), dtype=torch.int32), torch.randint(tokens, 99, (rows,)).int()
    lens[0] = tokens  # a real row of length 1 is real
    tables = torch.randint(1, 1000, (3, 400), dtype=torch.int32)
    whole = [DecodeBuffers.allocate(rows + 3, "cpu") for _ in range(2)]
    for buffers, fill in zip(whole, (fill_decode_metadata, fill_decode_metadata.reference)):
        fill(buffers.prefix(rows), indices, lens, real, tokens, RowTables(*tables))
    for name, part in whole[0]._asdict().items():
        assert torch.equal(part, getattr(whole[1], name)), name
        assert not part[rows:].any(), f"{name} written past its prefix"
