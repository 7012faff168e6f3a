"""Entries in the tables of request rows, against plain loops; other rows stay as they are."""

import pytest
import torch
from torch import Tensor

from hybridrt.kernels.core.records import RowTables
from hybridrt.kernels.state.row_tables import clear_slots, enter_pages, enter_rows, enter_tokens

pytestmark = pytest.mark.usefixtures("provider")


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("phases", [None, int32(0, 7, 34)])
def test_rows(phases: Tensor | None) -> None:
    tables = RowTables(*torch.full((3, 9), 5, dtype=torch.int32))
    enter_rows(int32(2, 7, 4), int32(11, 3, 8), phases, 16, tables)
    assert tables.req_to_state_slot.tolist() == [5, 5, 11, 5, 8, 5, 5, 3, 5]
    assert tables.ring_start.tolist() == [5, 5, 0, 5, 0 if phases is None else 2, 5, 5, 0 if phases is None else 7, 5]
    assert tables.ring_length.tolist() == [5, 5, 0, 5, 0, 5, 5, 0, 5]


def test_padding_leaves_the_scratch_slot_as_it_is() -> None:
    states = torch.full((2, 3, 4), 5.0)
    clear_slots(states, int32(0, 1, 0))
    assert states.tolist() == [[[5] * 4, [0] * 4, [5] * 4]] * 2


@pytest.mark.parametrize("size", [3, 1024, 5000])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_slots_are_cleared_in_all_layers(size: int, dtype: torch.dtype) -> None:
    states = torch.full((3, 6, size), 7, dtype=dtype)
    clear_slots(states, int32(4, 1))
    assert (states[:, [1, 4]] == 0).all() and (states[:, [0, 2, 3, 5]] == 7).all()


def test_slots_are_cleared_where_they_are_apart_in_memory() -> None:
    memory = torch.full((6, 40), 7.0)
    states = memory.as_strided((3, 6, 5), (8, 40, 1), 2)  # three layers in each slot of 40 numbers
    clear_slots(states, int32(4, 1))
    assert (states[:, [1, 4]] == 0).all() and memory.sum() == 7 * (240 - 30)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_pages(dtype: torch.dtype, groups: int) -> None:
    """Each page group gets pages of its own: here 10 further ones than the group before. 0 is a page too."""
    tables = torch.full((4, groups, 12), -1, dtype=torch.int32)
    pages = int32(5, 2, 7)[:, None] + 10 * torch.arange(groups)
    pages[1, -1] = 0
    enter_pages(int32(3, 1, 3).to(dtype), int32(0, 2, 1).to(dtype), pages.to(dtype), tables, 4)
    for group in range(groups):
        first, second = 20 + 40 * group, 28 + 40 * group
        assert tables[3, group].tolist() == [*range(first, first + 4), *range(second, second + 4), *[-1] * 4]
        other = 0 if group == groups - 1 else 8 + 40 * group
        assert tables[1, group].tolist() == [-1] * 8 + [*range(other, other + 4)]
    assert (tables[[0, 2]] == -1).all()


@pytest.mark.parametrize("groups", [2, 3])
def test_no_pages_are_entered_as_none(groups: int) -> None:
    tables = torch.full((4, groups, 12), -1, dtype=torch.int32)
    enter_pages(int32(), int32(), torch.empty(0, groups, dtype=torch.int32), tables, 4)
    assert (tables == -1).all()


def test_tokens() -> None:
    rows, last = torch.randperm(300)[:200].int(), torch.full((300,), 6, dtype=torch.int32)
    tokens = torch.arange(100, 300)
    enter_tokens(rows, tokens, last)
    assert torch.equal(last[rows], tokens.int()) and int((last == 6).sum()) == 100
