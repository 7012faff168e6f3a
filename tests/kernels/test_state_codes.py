"""States in 8 bits and states that are rounded stochastically: what is stored, and what its rounding depends on."""

import pytest
import torch

from hybridrt.kernels.core.records import StateSlots
from hybridrt.kernels.state.state_codes import (
    LARGEST,
    decode,
    element_keys,
    encode,
    head_bytes,
    load_states,
    num_scales,
    rounding_offsets,
    store_states,
)
from tests.support.coded_states import DTYPES, empty_codes
from tests.support.levels import sweep

pytestmark = pytest.mark.usefixtures("provider")
HEADS, ROWS, SLOTS = 2, 5, 4


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def pool(dtype: torch.dtype, columns: int, heads: int = HEADS, first_head: int = 0) -> StateSlots:
    """A pool of zeros; its slots are given in each test."""
    states, codes = empty_codes(SLOTS + 1, heads, ROWS, columns, dtype, first_head=first_head)
    return StateSlots(states, int32(), int32(), codes=codes)


def stored(state: StateSlots, new: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The states in `slots` after a store: what a later step reads."""
    state = state._replace(read_state_slots=slots, write_state_slots=slots)
    store_states(state, new, lengths)
    return load_states(state, torch.ones(len(slots), dtype=torch.bool))[1:]


def step_sizes(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The largest distance of neighbouring codes around each number."""
    if dtype in LARGEST:
        largest = torch.nn.functional.pad(x, (0, -x.shape[-1] % 32)).unflatten(-1, (-1, 32)).abs().amax(-1)
        unit = (largest * (1 + 2**-7) / LARGEST[dtype]).repeat_interleave(32, -1)[..., : x.shape[-1]]
        return unit if dtype == torch.int8 else torch.maximum(x.abs() / 8, unit / 64)
    return torch.maximum(x.abs() * torch.finfo(dtype).eps, torch.tensor(torch.finfo(dtype).smallest_normal))


@pytest.mark.parametrize("columns", [16, 24, 64, 72])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_state_is_stored_to_one_step(dtype: torch.dtype, columns: int) -> None:
    torch.manual_seed(0)
    new = torch.randn(2, HEADS, ROWS, columns) * torch.logspace(-3, 2, ROWS)[:, None]
    new[0, 0, 1] = 0
    state = pool(dtype, columns)
    found = stored(state, new, int32(3, 1), int32(17, 300))
    assert ((found - new).abs() <= step_sizes(new, dtype)).all()
    assert (found != new).float().mean() > 0.5
    assert (found[0, 0, 1] == 0).all()
    assert torch.equal(state.codes.state_lengths, int32(0, 300, 0, 17, 0))
    for untouched in (0, 2, 4):
        assert not state.states[untouched].float().any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_store_the_codes_of_the_reference(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    new, slots, lengths = torch.randn(3, HEADS, ROWS, 48), int32(2, -1, 4), int32(5, 7, 260)
    state = pool(dtype, 48)
    found = stored(state, new, slots, lengths)[[0, 2]]
    offsets = rounding_offsets(state.codes.element_keys, lengths, ROWS, 48)
    expected = decode(*encode(new, offsets, dtype))[[0, 2]]
    # 1 / scale may be off by its last bit, and so move a number over the border between two codes.
    assert (found != expected).float().mean() < 0.01
    assert ((found - expected).abs() <= step_sizes(new, dtype)[[0, 2]] * 1.01).all()
    assert torch.equal(state.codes.state_lengths, int32(0, 0, 5, 0, 260))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_depends_on_position_layer_and_global_head_alone(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    one = torch.randn(1, HEADS, ROWS, 32)
    alone = stored(pool(dtype, 32), one, int32(4), int32(100))
    batch = stored(pool(dtype, 32), torch.cat((torch.randn_like(one), one)), int32(3, 1), int32(9, 100))
    assert torch.equal(batch[1], alone[0])
    rank = stored(pool(dtype, 32, heads=1, first_head=1), one[:, 1:], int32(2), int32(100))
    assert torch.equal(rank, alone[:, 1:])
    other_head = stored(pool(dtype, 32, heads=1, first_head=0), one[:, 1:], int32(2), int32(100))
    assert not torch.equal(other_head, alone[:, 1:])
    assert not torch.equal(stored(pool(dtype, 32), one, int32(4), int32(101)), alone)


@pytest.mark.parametrize("dtype", sweep(DTYPES, 2))
def test_folds_that_gain_less_than_a_step_are_kept(dtype: torch.dtype) -> None:
    """What rounding to nearest loses: 64 gains of a twentieth of a step each."""
    state, slot = pool(dtype, 32), int32(1)
    value = torch.full((1, HEADS, ROWS, 32), 1.0)
    value[..., 0] = 1.2  # the largest number of each block, which stays
    step = step_sizes(value, dtype)[..., 1:]
    gain, exact = step / 20, value.clone()
    found = stored(state, value, slot, int32(0))
    for fold in range(1, 65):
        exact[..., 1:] += gain
        found[..., 1:] += gain
        found = stored(state, found, slot, int32(16 * fold))
    off = ((found - exact)[..., 1:] / step).double()
    assert off.mean().abs() < 0.1
    assert off.square().mean().sqrt() < 1.3  # with independent numbers 1.7


def test_offsets_are_uniform_and_differ_between_elements() -> None:
    offsets = rounding_offsets(element_keys(7, 0, 4), int32(16, 32, 48, 4096), 64, 64).double()
    assert abs(float(offsets.mean()) - 0.5) < 0.01
    assert abs(float(offsets.var()) - 1 / 12) < 0.002
    flat = offsets.flatten(1) - 0.5
    assert abs(float((flat[:, 1:] * flat[:, :-1]).mean())) < 0.002
    assert float(offsets.min()) >= 0 and float(offsets.max()) < 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_state_that_is_not_finite_stays_so(dtype: torch.dtype, bad: float) -> None:
    """Its request fails, and no other. The next owner of the slot starts from zeros."""
    new = torch.ones(2, HEADS, ROWS, 64)
    new[1, 1, 3, 40] = bad
    found = stored(pool(dtype, 64), new, int32(1, 2), int32(1, 2))
    assert found[0].isfinite().all()
    assert not found[1, 1, 3, 32:].isfinite().all()
    assert found[1, 0].isfinite().all()


def test_rows_without_a_state_begin_with_zeros() -> None:
    state = pool(torch.int8, 32)
    stored(state, torch.ones(4, HEADS, ROWS, 32), int32(1, 2, 3, 4), int32(1, 2, 3, 4))
    read = state._replace(read_state_slots=int32(2, 3, -1))
    found = load_states(read, torch.tensor([True, False, True]))
    assert found.dtype == torch.float32
    assert (found[1] > 0.9).all()
    assert not found[[0, 2, 3]].any()


@pytest.mark.parametrize(("rows", "columns", "nbytes"), [(128, 128, 17408), (64, 128, 8704), (3, 5, 32)])
def test_bytes_of_a_head(rows: int, columns: int, nbytes: int) -> None:
    assert head_bytes(rows, columns) == nbytes
    assert num_scales(columns) == -(-columns // 32)
