"""The selective scan and the recurrent step of Mamba-1 against a loop over tokens, and against each other."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridrt.kernels.core.chunk_plan import plan_chunks
from hybridrt.kernels.core.records import BCNorms
from hybridrt.kernels.dense.norm_activation import rms_norm
from hybridrt.kernels.mamba.mamba1_update import mamba1_update
from hybridrt.kernels.mamba.selective_scan import selective_scan
from tests.kernels.test_mamba2_slots import FAR, far_pool
from tests.support.flat import flat
from tests.support.mamba1_oracle import selective_inputs, selective_loop
from tests.support.mamba2_oracle import ScanInputs, changed_rows, close, int32, poisoned, same_bytes
from tests.support.tree_paths import ancestry

pytestmark = pytest.mark.usefixtures("provider")
STATE = (6, 5)
TOLERANCE = {torch.float32: 2e-6, torch.float16: 5e-3, torch.bfloat16: 4e-2}


def scan(
    inputs: ScanInputs,
    states: Tensor,
    computed: list[int],
    new: list[int],
    slots: list[int],
    *,
    write_slots: list[int] | None = None,
    chunk_size: int = 16,
) -> Tensor:
    return flat(
        selective_scan, **inputs.terms(), states=states, read_state_slots=int32(*slots),
        write_state_slots=int32(*(write_slots or slots)), has_initial_state=torch.tensor(computed) > 0,
        query_start_loc=int32(0, *torch.tensor(new).cumsum(0).tolist()), plan=plan_chunks(computed, new, chunk_size),
    )  # fmt: skip


def update(inputs: ScanInputs, states: Tensor, slots: list[int], **changed: Any) -> Tensor:
    own = {"states": states, "read_state_slots": int32(*slots), "write_state_slots": int32(*slots)}
    return flat(mamba1_update, **{**inputs.terms(), **own, **changed})


def filled(rows: int, slots: list[int], dtype: torch.dtype = torch.float32) -> Tensor:
    states = poisoned(rows, *STATE, dtype=dtype)
    for slot in slots:
        states[slot] = (torch.randn(STATE) * 3).to(dtype)
    return states


@pytest.mark.parametrize(("chunk_size", "separate"), [(16, False), (7, True), (64, True)])
def test_scan_equals_loop(chunk_size: int, separate: bool) -> None:
    torch.manual_seed(chunk_size)
    computed, new = [0, 5, 16, 0, 40, 3], [1, 63, 2, 70, 0, 17]
    read = [9, 3, 21, 5, 30, 1]
    write = [10, 4, 22, 6, 29, 2] if separate else read
    inputs = selective_inputs(sum(new))
    states = filled(31, [slot for slot, done in zip(read, computed) if done])
    before = states.clone()
    out = scan(inputs, states, computed, new, read, write_slots=write, chunk_size=chunk_size)
    start = 0
    for row, count in enumerate(new):
        initial = before[read[row]] if computed[row] else torch.zeros(STATE)
        if count:
            expected, after = selective_loop(inputs[start : start + count], initial)
            close(out[start : start + count], expected, 2e-6)
            close(states[write[row]], after[-1], 2e-6)
        else:
            assert same_bytes(states[write[row]], initial)
        start += count
    assert changed_rows(before, states) == {slot for slot, count in zip(write, new) if count or separate}


@pytest.mark.parametrize(("channels", "state"), [(70, 16), (33, 3), (3, 64)])
def test_blocks_of_channels_and_states(channels: int, state: int) -> None:
    torch.manual_seed(channels)
    inputs, initial = selective_inputs(9, channels=channels, state=state), torch.randn(channels, state)
    expected, after = selective_loop(inputs, initial)
    scanned, stepped = torch.zeros(2, 3, channels, state)
    scanned[2], stepped[1] = initial, initial
    close(scan(inputs, scanned, [7], [9], [2], chunk_size=4), expected, 2e-6)
    close(update(inputs[None], stepped, [1])[0], expected, 2e-6)
    close(scanned[2], after[-1], 2e-6)
    close(stepped[1], after[-1], 2e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scan_of_rounded_inputs_and_states(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    inputs, states = selective_inputs(37, dtype=torch.float16), filled(4, [2], dtype)
    expected, after = selective_loop(inputs, states[2])
    out = scan(inputs, states, [3], [37], [2], chunk_size=8)
    assert out.dtype == torch.float16
    close(out, expected, 2e-3)
    close(states[2], after[-1], TOLERANCE[dtype])


def test_scan_split_anywhere_is_the_same_scan(provider: str) -> None:
    """Chunks end at absolute positions, so a prefill in pieces that end there too gives the same bits (where softplus
    does not depend on a token's place in a vector)."""
    torch.manual_seed(2)
    inputs, whole = selective_inputs(40), torch.zeros(2, *STATE)
    pieces = whole.clone()
    expected = scan(inputs, whole, [0], [40], [1], chunk_size=8)
    parts = [scan(inputs[a:b], pieces, [a], [b - a], [1], chunk_size=8) for a, b in ((0, 8), (8, 32), (32, 40))]
    assert provider == "torch" or (same_bytes(torch.cat(parts), expected) and same_bytes(pieces, whole))
    close(torch.cat(parts), expected, 1e-6)
    odd = torch.zeros(2, *STATE)
    parts = [scan(inputs[a:b], odd, [a], [b - a], [1], chunk_size=8) for a, b in ((0, 3), (3, 4), (4, 29), (29, 40))]
    close(torch.cat(parts), expected, 2e-6)
    close(odd[1], whole[1], 2e-6)


def test_scan_pads_and_leaves_no_trace() -> None:
    torch.manual_seed(3)
    inputs, states = selective_inputs(12), filled(6, [2, 5])
    for part in (inputs.x, inputs.dt, inputs.B, inputs.C, inputs.z):
        part[3:7], part[10:] = math.nan, math.nan
    before = states.clone()
    out = scan(inputs, states, [4, 0, 9], [3, 4, 3], [5, -1, 2], chunk_size=8)
    assert not out[3:7].any() and not out[10:].any()
    close(out[7:10], selective_loop(inputs[7:10], before[2])[0], 2e-6)
    assert changed_rows(before, states) == {2, 5}


def test_nothing_overflows_where_states_live_for_no_time_at_all() -> None:
    """Decays of e^-800 a token: a scan that divided by them would give infinities."""
    torch.manual_seed(4)
    inputs, states = selective_inputs(50), torch.randn(2, *STATE)
    inputs.A[::2] = -1000.0
    expected, after = selective_loop(inputs, states[1])
    close(scan(inputs, states, [5], [50], [1], chunk_size=16), expected, 2e-6)
    close(states[1], after[-1], 2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("separate", [False, True])
def test_update_equals_loop(dtype: torch.dtype, tokens: int, separate: bool) -> None:
    torch.manual_seed(tokens)
    read = [3, 39, 17]
    write = [4, 38, 16] if separate else read
    states, inputs = filled(40, read, dtype), selective_inputs(3, tokens)
    before = states.clone()
    out = update(inputs, states, read, write_state_slots=int32(*write))
    for row, slot in enumerate(read):
        expected, after = selective_loop(inputs[row], before[slot])
        close(out[row], expected, TOLERANCE[dtype])
        close(states[write[row]], after[-1], TOLERANCE[dtype])
    assert changed_rows(before, states) == set(write)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_stored_states_equal_single_steps(dtype: torch.dtype) -> None:
    """Whatever number of tokens is accepted, the stored state is the one that plain decoding reaches (but for the last
    bit of an exponential, which may differ between vector lanes and a scalar tail)."""
    torch.manual_seed(7)
    tokens, slots = 5, [2, 9]
    inputs, states = selective_inputs(2, tokens), filled(10, slots, dtype)
    before, stored = states.clone(), poisoned(5, tokens, *STATE, dtype=dtype)
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


@pytest.mark.parametrize(("dtype", "state"), [(torch.float32, 5), (torch.float16, 16)])
def test_norms_of_what_is_written_and_read(dtype: torch.dtype, state: int) -> None:
    torch.manual_seed(8)
    inputs, states = selective_inputs(2, 3, state=state, dtype=dtype), torch.randn(3, 6, state)
    norms = BCNorms(torch.rand(state) + 0.5, torch.rand(state) + 0.5, 1e-3)
    normed = replace(inputs, B=rms_norm(inputs.B, norms.B_weight, 1e-3), C=rms_norm(inputs.C, norms.C_weight, 1e-3))
    before = states.clone()
    out = update(inputs, states, [2, 1], norms=norms)
    for row, slot in enumerate([2, 1]):
        expected, after = selective_loop(normed[row], before[slot])
        close(out[row], expected, TOLERANCE[dtype])
        close(states[slot], after[-1], 2e-6)  # float32: a norm rounds its result as if it stood alone


def test_tree_follows_ancestors() -> None:
    torch.manual_seed(9)
    parents = int32(-1, 0, 0, 2, 1, 4, -1)
    inputs, states = selective_inputs(1, 7), filled(4, [3])
    before, stored = states.clone(), poisoned(3, 7, *STATE)
    out = update(inputs, states, [3], stored=stored, rows=int32(2), predecessors=parents[None])
    for node in range(7):
        path = ancestry(parents, node)
        expected, after = selective_loop(inputs[0][path], before[3])
        close(out[0, node], expected[-1], 2e-6)
        close(stored[2, node], after[-1], 2e-6)
    assert same_bytes(before, states)


@pytest.mark.parametrize("mode", ["classic", "chain", "tree"])
def test_padding_rows_leave_no_trace(mode: str) -> None:
    torch.manual_seed(10)
    inputs, states = selective_inputs(4, 2), filled(6, [2, 5])
    for part in (inputs.x, inputs.dt, inputs.B, inputs.C, inputs.z):
        part[1::2] = math.nan
    before, stored = states.clone(), poisoned(4, 2, *STATE)
    stored_before = stored.clone()
    changed: dict[str, Any] = {}
    if mode != "classic":
        changed = {"stored": stored, "rows": int32(3, 2, 1, 2)}
    if mode == "tree":
        changed["predecessors"] = int32(-1, 0).repeat(4, 1)
    out = update(inputs, states, [5, -1, 2, -1], **changed)
    assert not out[1::2].any()
    close(out[2], selective_loop(inputs[2], before[2])[0], 2e-6)
    assert changed_rows(before, states) == ({2, 5} if mode == "classic" else set())
    assert changed_rows(stored_before, stored) == (set() if mode == "classic" else {1, 3})


def test_slots_past_4096() -> None:
    torch.manual_seed(11)
    inputs, initial = selective_inputs(1, 9), torch.randn(STATE).half()
    expected, after = selective_loop(inputs[0], initial)
    states = far_pool(*STATE)
    states[FAR] = initial
    close(scan(inputs[0], states, [3], [9], [FAR], write_slots=[FAR - 1], chunk_size=4), expected, 1e-5)
    close(states[FAR - 1], after[-1], 2e-3)
    close(update(inputs, states, [FAR], write_state_slots=int32(FAR - 2))[0], expected, 5e-3)
    close(states[FAR - 2], after[-1], 5e-3)
