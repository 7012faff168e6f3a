import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridrt.kernels.mamba.selective_state_update import selective_state_update
from tests.support.flat import flat
from tests.support.mamba2_oracle import (
    ScanInputs,
    changed_rows,
    close,
    int32,
    poisoned,
    same_bytes,
    scan_inputs,
    scan_loop,
)
from tests.support.tree_paths import ancestry

pytestmark = pytest.mark.usefixtures("provider")
TOLERANCE = {torch.float32: 2e-6, torch.float16: 5e-3, torch.bfloat16: 4e-2}


def update(inputs: ScanInputs, states: Tensor, slots: list[int], **changed: Any) -> Tensor:
    own = {"states": states, "read_state_slots": int32(*slots), "write_state_slots": int32(*slots)}
    return flat(selective_state_update, **{**inputs.terms(), **own, **changed})


def filled(rows: int, slots: list[int], dtype: torch.dtype = torch.float32) -> Tensor:
    states = poisoned(rows, 4, 3, 5, dtype=dtype)
    for slot in slots:
        if slot > 0:
            states[slot] = (torch.randn(4, 3, 5) * 3).to(dtype)
    return states


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "groups"), [(1, 1), (1, 4), (5, 2)])
@pytest.mark.parametrize("separate", [False, True])
def test_update_equals_loop(dtype: torch.dtype, tokens: int, groups: int, separate: bool) -> None:
    torch.manual_seed(tokens)
    read = [3, 39, 17]
    write = [4, 38, 16] if separate else read
    states, inputs = filled(40, read, dtype), scan_inputs(3, tokens, groups=groups)
    before = states.clone()
    out = update(inputs, states, read, write_state_slots=int32(*write))
    for row, slot in enumerate(read):
        expected, after = scan_loop(inputs[row], before[slot])
        close(out[row], expected, TOLERANCE[dtype])
        close(states[write[row]], after[-1], TOLERANCE[dtype])
    assert changed_rows(before, states) == set(write)


def test_heads_of_several_blocks() -> None:
    torch.manual_seed(11)
    inputs = scan_inputs(1, 2, heads=2, dim=40, state=128, groups=1)
    states = torch.randn(3, 2, 40, 128)
    expected, after = scan_loop(inputs[0], states[2])
    close(update(inputs, states, [2])[0], expected, 2e-6)
    close(states[2], after[-1], 2e-6)


def test_small_time_steps_keep_their_digits() -> None:
    """log(1 + e^x) of a very negative x, naively, is a multiple of float32's epsilon."""
    torch.manual_seed(12)
    inputs, states = scan_inputs(1, 1), torch.zeros(2, 4, 3, 5)
    inputs.dt_bias = torch.full((4,), -14.0)
    expected, after = scan_loop(inputs[0], states[1], D=False, z=False)
    close(update(inputs, states, [1], D=None, z=None)[0], expected, 2e-6)
    close(states[1], after[-1], 2e-6)


def test_output_has_the_dtype_of_x() -> None:
    torch.manual_seed(0)
    inputs = scan_inputs(2, 1, dtype=torch.bfloat16)
    states = filled(6, [1, 4])
    expected = torch.stack([scan_loop(inputs[row], states[slot])[0] for row, slot in enumerate([1, 4])])
    out = update(inputs, states, [1, 4])
    assert out.dtype == torch.bfloat16
    close(out, expected, 1e-2)


@pytest.mark.parametrize("changed", [{"D": None}, {"z": None}, {"dt_limit": (0.1, 0.4)}])
def test_optional_terms(changed: dict[str, Any]) -> None:
    torch.manual_seed(3)
    inputs, states = scan_inputs(1, 2), filled(4, [2])
    limit = (0.1, 0.4) if "dt_limit" in changed else (0.0, math.inf)
    expected, after = scan_loop(inputs[0], states[2], limit, "D" not in changed, "z" not in changed)
    close(update(inputs, states, [2], **changed)[0], expected, 2e-6)
    close(states[2], after[-1], 2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_stored_states_equal_single_steps(dtype: torch.dtype) -> None:
    """Whatever number of tokens is accepted, the stored state is the one that plain decoding reaches.

    Only the exponentials may differ, by the last bit of a float32 (vector lanes against the scalar tail); in half
    precision that moves an occasional rounding, so nearly all elements must be bit-equal.
    """
    torch.manual_seed(7)
    tokens, slots = 6, [2, 9]
    inputs, states = scan_inputs(2, tokens), filled(10, slots, dtype)
    before, stored = states.clone(), poisoned(5, tokens, 4, 3, 5, dtype=dtype)
    stored_before = stored.clone()
    out = update(inputs, states, slots, stored=stored, rows=int32(4, 2))
    assert same_bytes(before, states)
    assert changed_rows(stored_before, stored) == {2, 4}
    for t in range(tokens):
        single = update(inputs[:, t : t + 1], states, slots)
        close(out[:, t : t + 1], single, TOLERANCE[dtype])
        close(stored[[4, 2], t], states[slots], TOLERANCE[dtype])
        if dtype != torch.float32:
            assert (stored[[4, 2], t] == states[slots]).float().mean() > 0.97
        states[slots] = stored[[4, 2], t]


def test_tokens_at_once_equal_single_steps() -> None:
    torch.manual_seed(8)
    tokens = 5
    inputs, at_once = scan_inputs(2, tokens), filled(5, [1, 4], torch.float16)
    one_by_one = at_once.clone()
    out = update(inputs, at_once, [1, 4])
    singles = [update(inputs[:, t : t + 1], one_by_one, [1, 4]) for t in range(tokens)]
    close(out, torch.cat(singles, 1), 1e-3)
    assert (at_once[[1, 4]] == one_by_one[[1, 4]]).float().mean() > 0.97


def test_tree_follows_ancestors() -> None:
    torch.manual_seed(9)
    parents = int32(-1, 0, 0, 2, 1, 4, -1)
    inputs, states = scan_inputs(1, 7), filled(4, [3])
    before, stored = states.clone(), poisoned(3, 7, 4, 3, 5)
    out = update(inputs, states, [3], stored=stored, rows=int32(2), predecessors=parents[None])
    for node in range(7):
        path = ancestry(parents, node)
        expected, after = scan_loop(inputs[0][path], before[3])
        close(out[0, node], expected[-1], 2e-6)
        close(stored[2, node], after[-1], 2e-6)
    assert same_bytes(before, states)


@pytest.mark.parametrize("mode", ["classic", "chain", "tree"])
def test_padding_rows_leave_no_trace(mode: str) -> None:
    torch.manual_seed(10)
    inputs, states = scan_inputs(4, 2), filled(6, [2, 5])
    for part in (inputs.x, inputs.dt, inputs.B, inputs.C, inputs.z):
        part[1::2] = math.nan
    before, stored = states.clone(), poisoned(4, 2, 4, 3, 5)
    stored_before = stored.clone()
    changed: dict[str, Any] = {}
    if mode != "classic":
        changed = {"stored": stored, "rows": int32(3, 2, 1, 2)}
    if mode == "tree":
        changed["predecessors"] = int32(-1, 0).repeat(4, 1)
    out = update(inputs, states, [5, -1, 2, -1], **changed)
    assert not out[1::2].any()
    close(out[2], scan_loop(inputs[2], before[2])[0], 2e-6)
    assert changed_rows(before, states) == ({2, 5} if mode == "classic" else set())
    assert changed_rows(stored_before, stored) == (set() if mode == "classic" else {1, 3})
