"""Running sums against sums taken request by request."""

import json
from pathlib import Path

import pytest
import torch

from hybridrt.base.errors import ConfigError
from hybridrt.kernels.core.records import IntermediateStates, StateSlots
from hybridrt.kernels.mamba.prefix_sum import prefix_sum_update, prefix_sum_varlen

pytestmark = pytest.mark.usefixtures("provider")
VECTOR = json.loads((Path(__file__).parents[1] / "vectors" / "prefix_sum.json").read_text())


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def test_the_given_vector():
    """One mixed batch, then a decode step: states by slot, in an order of their own."""
    requests, slots = VECTOR["requests"], ints(5, 2, 3)
    states = torch.full((7, 1), torch.nan)
    states[slots.long(), 0] = torch.tensor([r["state"] for r in requests], dtype=torch.float32)
    x = torch.cat([torch.tensor(r["x"], dtype=torch.float32) for r in requests])[:, None]
    starts = torch.tensor([0, *(len(r["x"]) for r in requests)]).cumsum(0).int()
    y = prefix_sum_varlen(x, StateSlots(states, slots, slots), starts)
    assert y[:, 0].tolist() == [value for r in requests for value in r["y"]]
    assert states[slots.long(), 0].tolist() == VECTOR["state_after"]
    x = torch.tensor(VECTOR["then_decode_x"], dtype=torch.float32).view(3, 1, 1)
    assert prefix_sum_update(x, StateSlots(states, slots, slots)).flatten().tolist() == VECTOR["then_decode_y"]
    assert states[[0, 1, 4, 6]].isnan().all()


@pytest.mark.parametrize("columns", [1, 3, 260])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ragged_rows(columns, dtype):
    """Padding rows, rows without tokens, tokens past the last row; a NaN in one row stays there."""
    torch.manual_seed(0)
    lens, read, write = [4, 0, 3, 2, 1], ints(3, 1, 5, -1, 2), ints(3, 1, 6, -1, 2)
    states, x = torch.randn(8, columns), torch.randn(12, columns).to(dtype)
    x[4] = torch.nan
    before, starts = states.clone(), torch.tensor([0, *lens]).cumsum(0).int()
    y = prefix_sum_varlen(x, StateSlots(states, read, write), starts)
    assert y.dtype == dtype and y.shape == x.shape
    first = 0
    for count, source, target in zip(lens, read.tolist(), write.tolist(), strict=True):
        sums = before[source] + x[first : first + count].float().cumsum(0)
        wanted = sums if source >= 0 else torch.zeros_like(sums)
        torch.testing.assert_close(y[first : first + count], wanted.to(dtype), equal_nan=True)
        if count and source >= 0:
            torch.testing.assert_close(states[target], sums[-1], equal_nan=True)
        first += count
    assert not y[first:].any()
    untouched = [0, 1, 4, 5, 7]
    assert torch.equal(states[untouched], before[untouched])


def test_sums_are_float32_whatever_the_activations_are():
    """512 times 1/8 in bfloat16 sums of 8 bits would stop growing at 32."""
    states, x = torch.zeros(2, 1), torch.full((512, 1), 0.125, dtype=torch.bfloat16)
    state = StateSlots(states, ints(1), ints(1))
    prefix_sum_varlen(x, state, ints(0, 512))
    for _ in range(8):
        prefix_sum_update(x[:1, None], state)
    assert states[1].item() == 65.0


@pytest.mark.parametrize("tree", [False, True])
def test_a_verified_row_leaves_the_sum_alone_and_returns_the_next_one(tree):
    torch.manual_seed(0)
    x, states, stored = torch.randn(3, 4, 6), torch.randn(6, 6), torch.full((5, 7, 6), torch.nan)
    slots, rows, before = ints(2, -1, 4), ints(3, 0, 1), states.clone()
    parents = torch.tensor([[-1, 0, 0, 2]] * 3, dtype=torch.int32) if tree else None
    y = prefix_sum_update(x, StateSlots(states, slots, slots, IntermediateStates(stored, rows, parents)))
    paths = [[0], [0, 1], [0, 2], [0, 2, 3]] if tree else [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]
    for b, (slot, row) in enumerate(zip(slots.tolist(), rows.tolist(), strict=True)):
        for t, path in enumerate(paths):
            if slot < 0:
                assert not y[b, t].any()
                continue
            wanted = before[slot] + x[b, path].sum(0)
            torch.testing.assert_close(y[b, t], wanted)
            torch.testing.assert_close(stored[row, t], wanted)
    assert torch.equal(states, before) and stored[[0, 2, 4]].isnan().all() and stored[:, 4:].isnan().all()


def test_states_must_hold_float32_of_the_same_size():
    x, slots = torch.zeros(2, 3), ints(1)
    for states in (torch.zeros(2, 4), torch.zeros(2, 3, dtype=torch.bfloat16)):
        with pytest.raises(ConfigError, match="3 numbers a token"):
            prefix_sum_varlen(x, StateSlots(states, slots, slots), ints(0, 2))
