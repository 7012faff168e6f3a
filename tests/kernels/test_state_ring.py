"""The state ring with Mamba-2 in it, against the token-by-token loop: cursors, folds, and what must not change."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridrt.base.errors import ConfigError
from hybridrt.kernels.mamba.mamba2_replay import mamba2_replay
from hybridrt.kernels.mamba.selective_state_update import selective_state_update
from hybridrt.kernels.state.state_ring import RingFolds, advance_ring, fold_ring
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
from tests.support.ring_steps import commit, materialize

pytestmark = pytest.mark.usefixtures("provider")
TOLERANCE = {torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}


@dataclass
class Ring:
    """Checkpoints of one layer and its ring, poisoned where nothing was written."""

    states: Tensor
    values: Tensor
    keys: Tensor
    gates: Tensor
    start: Tensor
    length: Tensor

    @classmethod
    def make(
        cls,
        slots: list[int],
        width: int,
        groups: int = 2,
        dtype: torch.dtype = torch.float32,
        heads: int = 4,
        dim: int = 3,
        state: int = 5,
    ) -> "Ring":
        states = poisoned(40, heads, dim, state, dtype=dtype)
        for slot in slots:
            if slot > 0:
                states[slot] = (torch.randn(heads, dim, state) * 3).to(dtype)
        rings = poisoned(8, heads, width, dim), poisoned(8, groups, width, state), poisoned(8, heads, width)
        return cls(states, *rings, int32(*[0] * 8), int32(*[0] * 8))

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.states, self.values, self.keys, self.gates

    def step(self, inputs: ScanInputs, slots: list[int], rows: list[int], **changed: Any) -> Tensor:
        row, state_slots = int32(*rows), int32(*slots)
        return flat(
            mamba2_replay, **{**inputs.terms(), **changed}, states=self.states, read_state_slots=state_slots,
            write_state_slots=state_slots, values=self.values, keys=self.keys, gates=self.gates, rows=row,
            start=self.start[row], length=self.length[row],
        )  # fmt: skip

    def commit(self, inputs: ScanInputs, slots: list[int], rows: list[int], accepted: list[int], widest: int) -> None:
        cursors = self.start, self.length
        commit(self.tensors, inputs.A, cursors, int32(*rows), int32(*slots), int32(*accepted), widest)

    def materialize(self, inputs: ScanInputs, row: int, slot: int, into: int) -> Tensor:
        materialize(self.tensors, inputs.A, (self.start, self.length), int32(row), int32(slot), int32(into))
        return self.states[into]


@pytest.mark.parametrize(
    ("dtype", "width", "groups"),
    [
        (torch.float32, 2, 1),
        (torch.float32, 3, 2),
        (torch.float32, 16, 2),
        (torch.float16, 16, 1),
        (torch.bfloat16, 16, 2),
    ],
)
def test_decode_equals_loop(dtype: torch.dtype, width: int, groups: int, provider: str) -> None:
    """Many plain decode steps: outputs and the materialised state, while the checkpoint moves only on folds."""
    torch.manual_seed(width)
    slots, rows, steps = [7, 39], [3, 6], 50 if provider == "torch" else 18
    ring, inputs = Ring.make(slots, width, groups, dtype, heads=2), scan_inputs(2, steps, heads=2, groups=groups)
    expected = [scan_loop(inputs[b], ring.states[slot]) for b, slot in enumerate(slots)]
    writes, outs = 0, []
    for t in range(steps):
        before = ring.states.clone()
        outs.append(ring.step(inputs[:, t : t + 1], slots, rows))
        assert not changed_rows(before, ring.states)
        ring.commit(inputs, slots, rows, [1, 1], 1)
        writes += bool(changed_rows(before, ring.states))
        if provider == "torch" or t % 4 == 1:
            for b in range(2):
                close(ring.materialize(inputs, rows[b], slots[b], into=20), expected[b][1][t], TOLERANCE[dtype])
    close(torch.cat(outs, 1), torch.stack([out for out, _ in expected]), TOLERANCE[dtype])
    assert writes == steps // width
    assert not ring.start[[0, 1, 2, 4, 5, 7]].any() and not ring.length[[0, 1, 2, 4, 5, 7]].any()


@pytest.mark.parametrize("tokens", [1, 2, 4, 7])
def test_verify_equals_decodes_for_each_accepted_length(tokens: int, provider: str) -> None:
    """A schedule that accepts every length, with rejected inputs left behind in the ring."""
    torch.manual_seed(tokens)
    ring, plain = Ring.make([5], 16, heads=2), Ring.make([5], 16, heads=2).states
    plain[5] = ring.states[5]
    for accepted in [*range(1, tokens + 1), *range(tokens, 0, -1)] * (3 if provider == "torch" else 1):
        inputs = scan_inputs(1, tokens, heads=2)
        out = ring.step(inputs, [5], [2])
        ring.commit(inputs, [5], [2], [accepted], tokens)
        for t in range(accepted):
            i = inputs[:, t : t + 1]
            pool = {"states": plain, "read_state_slots": int32(5), "write_state_slots": int32(5)}
            single = flat(selective_state_update, **i.terms(), **pool)
            close(out[:, t : t + 1], single, 1e-5)
        close(ring.materialize(inputs, 2, 5, into=20), plain[5], 5e-6)
        assert int(ring.length[2]) + tokens <= 16


def test_rows_at_different_cursors() -> None:
    """Rows that fold and rows that do not share a step, and neither changes the other."""
    torch.manual_seed(11)
    slots, rows = [3, 8, 30], [1, 5, 7]
    ring, inputs = Ring.make(slots, 8), scan_inputs(3, 12)
    expected = [scan_loop(inputs[b], ring.states[slot]) for b, slot in enumerate(slots)]
    done = [0, 0, 0]
    for accepted in ([1, 3, 2], [2, 1, 3], [3, 3, 1], [1, 2, 2]):
        part = [inputs[b][d : d + 3] for b, d in enumerate(done)]
        batch = inputs[:, :3]
        for name in ("x", "dt", "B", "C", "z"):
            setattr(batch, name, torch.stack([getattr(p, name) for p in part]))
        out = ring.step(batch, slots, rows)
        ring.commit(inputs, slots, rows, accepted, 3)
        for b, d in enumerate(done):
            close(out[b], expected[b][0][d : d + 3], 3e-6)
            done[b] = d + accepted[b]
            close(ring.materialize(inputs, rows[b], slots[b], into=20), expected[b][1][done[b] - 1], 3e-6)


def test_heads_of_several_blocks() -> None:
    torch.manual_seed(15)
    ring = Ring.make([5], 8, 1, heads=2, dim=40, state=128)
    inputs = scan_inputs(1, 9, heads=2, dim=40, state=128, groups=1)
    expected, after = scan_loop(inputs[0], ring.states[5])
    for t in range(0, 9, 3):
        close(ring.step(inputs[:, t : t + 3], [5], [2])[0], expected[t : t + 3], 3e-6)
        ring.commit(inputs, [5], [2], [3], 3)
        close(ring.materialize(inputs, 2, 5, into=20), after[t + 2], 3e-6)


def test_materialize_leaves_ring_and_checkpoint() -> None:
    torch.manual_seed(12)
    ring, inputs = Ring.make([5], 16), scan_inputs(1, 4)
    ring.step(inputs, [5], [2])
    ring.commit(inputs, [5], [2], [3], 4)
    before = [tensor.clone() for tensor in (*ring.tensors, ring.start, ring.length)]
    ring.materialize(inputs, 2, 5, into=20)
    after = (*ring.tensors, ring.start, ring.length)
    assert changed_rows(before[0], after[0]) == {20}
    assert all(same_bytes(a, b) for a, b in zip(before[1:], after[1:], strict=True))


@pytest.mark.parametrize("length", [0, 13])
def test_padding_rows_leave_no_trace(length: int) -> None:
    torch.manual_seed(13)
    ring, inputs, slots, rows = Ring.make([5], 16), scan_inputs(3, 2), [-1, 5, -1], [3, 4, 0]
    ring.gates[4], ring.values[4], ring.keys[4] = 0.5, 1.0, 2.0
    ring.length[4] = length
    ring.length[3] = 14
    for part in (inputs.x, inputs.dt, inputs.B, inputs.C, inputs.z):
        part[0::2] = math.nan
    before = [tensor.clone() for tensor in ring.tensors]
    out = ring.step(inputs, slots, rows)
    assert not out[0::2].any() and not out.isnan().any()
    for old, new in zip(before[1:], ring.tensors[1:], strict=True):
        assert changed_rows(old, new) == {4}
    cursors = ring.start.clone(), ring.length.clone()
    ring.commit(inputs, slots, rows, [0, 2, 0], 2)
    assert changed_rows(before[0], ring.states) == ({5} if length else set())
    assert {*changed_rows(cursors[0], ring.start), *changed_rows(cursors[1], ring.length)} == {4}
    assert (int(ring.start[4]), int(ring.length[4])) == ((0, 0) if length else (0, 2))


@pytest.mark.parametrize("count", [0, 1])
def test_folds_past_the_count_and_of_padding_leave_no_trace(count: int) -> None:
    ring, inputs = Ring.make([5], 16), scan_inputs(1, 1)
    before = ring.states.clone()
    folds = RingFolds(int32(-1, 5), int32(0, 2), int32(0, 0), int32(0, 3), int32(count))
    fold_ring(*(part[None] for part in ring.tensors), inputs.A[None], folds)
    assert same_bytes(before, ring.states)


def test_layers_fold_each_their_own_ring() -> None:
    torch.manual_seed(16)
    rings, inputs = [Ring.make([5, 9], 16), Ring.make([5, 9], 16)], scan_inputs(2, 3)
    stacked = [torch.stack(parts) for parts in zip(*(ring.tensors for ring in rings), strict=True)]
    decays = torch.stack([inputs.A, inputs.A * 0.25])
    for layer, ring in enumerate(rings):
        inputs.A = decays[layer]
        ring.step(inputs, [5, 9], [2, 6])
        for pool, part in zip(stacked, ring.tensors, strict=True):
            pool[layer] = part
    fold_ring(*stacked, decays, RingFolds(int32(9, 5), int32(6, 2), int32(0, 0), int32(3, 2), int32(2)))
    for layer, ring in enumerate(rings):
        inputs.A = decays[layer]
        for b, (slot, length) in enumerate(((5, 2), (9, 3))):
            close(stacked[0][layer, slot], scan_loop(inputs[b], ring.states[slot])[1][length - 1], 3e-6)
        assert changed_rows(stacked[0][layer], ring.states) == {5, 9}


@pytest.mark.parametrize("changed", [{"D": None}, {"z": None}, {"dt_limit": (0.1, 0.4)}])
def test_optional_terms(changed: dict[str, Any]) -> None:
    torch.manual_seed(14)
    ring, inputs = Ring.make([5], 16), scan_inputs(1, 3)
    limit = (0.1, 0.4) if "dt_limit" in changed else (0.0, math.inf)
    expected, after = scan_loop(inputs[0], ring.states[5], limit, "D" not in changed, "z" not in changed)
    close(ring.step(inputs, [5], [2], **changed)[0], expected, 3e-6)
    ring.commit(inputs, [5], [2], [3], 3)
    close(ring.materialize(inputs, 2, 5, into=20), after[-1], 3e-6)


def test_advance_names_the_rows_that_fold_and_begins_their_rings_anew() -> None:
    start, length = int32(0, 2, 0, 7, 0), int32(0, 5, 10, 5, 13)
    folds = advance_ring(start, length, int32(1, 2, 3, 4), int32(4, 1, 2, 0), int32(7, 8, 9, -1), width=16, widest=4)
    assert start.tolist() == [0, 2, 0, 0, 0] and length.tolist() == [0, 9, 11, 0, 13]
    assert int(folds.count) == 1
    assert [int(part[0]) for part in (folds.state_slots, folds.rows, folds.start, folds.length)] == [9, 3, 7, 7]


def test_advance_names_the_folds_of_many_rows() -> None:
    """More rows than one block of the kernel."""
    generator = torch.Generator().manual_seed(17)
    before = torch.randint(0, 14, (301,), generator=generator).int()
    first = torch.randint(0, 14, (301,), generator=generator).int() * (before == 0)
    start, length, rows = first.clone(), before.clone(), torch.arange(1, 301).int()
    accepted = torch.randint(0, 3, (300,), generator=generator).int()
    folds = advance_ring(start, length, rows, accepted, rows + 1000, width=16, widest=3)
    full = (accepted > 0) & ((first + before)[1:] + accepted + 3 > 16)
    count = int(folds.count)
    assert folds.rows[:count].tolist() == rows[full].tolist()
    assert folds.state_slots[:count].tolist() == (rows[full] + 1000).tolist()
    assert folds.length[:count].tolist() == (before[1:] + accepted)[full].tolist()
    assert length[1:].tolist() == torch.where(full, 0, before[1:] + accepted).tolist()
    assert start[1:].tolist() == torch.where(full, 0, first[1:]).tolist()


def test_a_narrow_ring_is_refused_before_anything_changes() -> None:
    start, length = int32(0, 0), int32(0, 2)
    with pytest.raises(ConfigError, match="3 columns cannot take a step of 4 tokens"):
        advance_ring(start, length, int32(1), int32(1), int32(1), width=3, widest=4)
    assert length.tolist() == [0, 2]
