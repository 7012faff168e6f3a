import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from hybridrt.kernels.core.chunk_plan import chunk_lists, chunk_plan, plan_chunks
from hybridrt.kernels.core.packed import int32_array, map_arrays
from hybridrt.kernels.core.records import SAVES_PER_PROMPT, SavedStates
from hybridrt.kernels.mamba import mamba2_scan_triton
from hybridrt.kernels.mamba.mamba2_scan import mamba2_chunk_scan
from tests.support.flat import flat
from tests.support.levels import sweep
from tests.support.mamba2_oracle import ScanInputs, changed_rows, close, int32, poisoned, scan_inputs, scan_loop

pytestmark = pytest.mark.usefixtures("provider")
VECTORS = Path(__file__).parents[1] / "vectors" / "mamba2_chunks.json"


class Form(NamedTuple):
    """A form of the scan: what differs from `scan_inputs`, as arguments of the operation and of `scan_loop`."""

    changed: dict[str, Any]
    terms: tuple[Any, ...]


FULL = Form({}, ())
FIXED = Form({"dt_limit": (0.4, 0.4), "D": None, "z": None}, ((0.4, 0.4), False, False))  # tokens decay alike
FORMS = pytest.mark.parametrize("form", [FULL, FIXED], ids=["full", "fixed decays"])


def scan(
    inputs: ScanInputs,
    states: Tensor,
    computed: list[int],
    new: list[int],
    slots: list[int],
    *,
    write_slots: list[int] | None = None,
    chunk_size: int = 16,
    **changed: Any,
) -> Tensor:
    return flat(
        mamba2_chunk_scan, **{**inputs.terms(), **changed},
        states=states,
        read_state_slots=int32(*slots),
        write_state_slots=int32(*(write_slots or slots)),
        has_initial_state=torch.tensor(computed) > 0,
        query_start_loc=int32(0, *torch.tensor(new).cumsum(0).tolist()),
        plan=plan_chunks(computed, new, chunk_size),
    )  # fmt: skip


@pytest.fixture(params=["two launches", "five launches", "one launch"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Form:
    """A form for each of the ways in which kernels take a scan of few tokens."""
    if request.param == "five launches":
        monkeypatch.setattr(mamba2_scan_triton, "FEW_TOKENS", 0)
    elif request.param == "one launch":  # the kernels of the others fail
        monkeypatch.setattr(mamba2_scan_triton, "walk_states", None)
        monkeypatch.setattr(mamba2_scan_triton, "_scores", None)
        return FIXED
    return FULL


def test_plan_equals_the_vectors() -> None:
    case = json.loads(VECTORS.read_text())
    plan = plan_chunks(case["computed"], case["new"], case["chunk_size"])
    assert plan.cu_chunk_seqlens.tolist() == case["cu_chunk_seqlens"]
    assert plan.seq_idx.tolist() == case["seq_idx"]
    assert plan.last_chunk.tolist() == case["last_chunk"]
    assert plan.first_chunk.tolist() == [0, 2, 5]
    assert (plan.max_chunks_per_seq, plan.chunk_size) == (3, 4)
    assert all(part.dtype == torch.int32 for part in (plan.cu_chunk_seqlens, plan.seq_idx, plan.last_chunk))


def test_plan_of_rows_without_tokens() -> None:
    plan = plan_chunks([5, 8, 0], [0, 4, 0], 4)
    assert plan.cu_chunk_seqlens.tolist() == [0, 4] and plan.seq_idx.tolist() == [1]
    assert plan.last_chunk.tolist() == [-1, 0, -1] and plan.first_chunk.tolist() == [0, 0, 0]
    assert plan_chunks([], [], 4).max_chunks_per_seq == 0


@pytest.mark.parametrize(("groups", "chunk_size"), sweep([(2, 16), (1, 65), (4, 7), (2, 256)], 4))
@pytest.mark.parametrize("separate", [False, True])
def test_scan_equals_loop(groups: int, chunk_size: int, separate: bool, form: Form) -> None:
    torch.manual_seed(groups)
    computed, new = [0, 5, 16, 0, 40, 3], [1, 63, 2, 100, 0, 17]
    read = [9, 3, 21, 5, 30, 1]
    write = [10, 4, 22, 6, 29, 2] if separate else read
    inputs = scan_inputs(sum(new), groups=groups)
    states = poisoned(31, 4, 3, 5)
    for slot, done in zip(read, computed, strict=True):
        if done:
            states[slot] = torch.randn(4, 3, 5) * 4
    before = states.clone()
    out = scan(inputs, states, computed, new, read, write_slots=write, chunk_size=chunk_size, **form.changed)
    start = 0
    for row, (slot, count) in enumerate(zip(read, new, strict=True)):
        initial = before[slot] if computed[row] else torch.zeros(4, 3, 5)
        if count:
            expected, after = scan_loop(inputs[start : start + count], initial, *form.terms)
            close(out[start : start + count], expected, 1e-5)
            close(states[write[row]], after[-1], 1e-5)
        else:
            close(states[write[row]], initial, 0.0)
        start += count
    assert changed_rows(before, states) == set(write) - ({30} if not separate else set())


def test_heads_of_several_blocks(form: Form) -> None:
    torch.manual_seed(8)
    inputs = scan_inputs(21, heads=2, dim=70, state=70, groups=1)
    states = torch.randn(3, 2, 70, 70)
    expected, after = scan_loop(inputs, states[2], *form.terms)
    close(scan(inputs, states, [5], [21], [2], **form.changed), expected, 1e-5)
    close(states[2], after[-1], 1e-5)


@FORMS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype, form: Form, provider: str) -> None:
    if provider != "torch" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies bfloat16 matrices wrongly")
    torch.manual_seed(0)
    inputs = scan_inputs(37, dtype=dtype)
    states = poisoned(4, 4, 3, 5, dtype=dtype)
    states[2] = torch.randn(4, 3, 5).to(dtype)
    expected, after = scan_loop(inputs, states[2], *form.terms)
    out = scan(inputs, states, [8], [37], [2], **form.changed)
    assert out.dtype == dtype
    close(out, expected, 1e-2)
    close(states[2], after[-1], 1e-2)


@pytest.mark.parametrize("split", sweep([1, 7, 16, 23, 31, 32, 49], 3))
def test_two_steps_equal_one(split: int) -> None:
    torch.manual_seed(1)
    inputs = scan_inputs(50)
    whole, parts = poisoned(3, 4, 3, 5), poisoned(3, 4, 3, 5)
    expected = scan(inputs, whole, [0], [50], [1])
    first = scan(inputs[:split], parts, [0], [split], [1])
    second = scan(inputs[split:], parts, [split], [50 - split], [1])
    close(torch.cat([first, second]), expected, 2e-6)
    close(parts[1], whole[1], 2e-6)


@pytest.mark.parametrize("saved", [(16,), (32,), (48,), (16, 80), (40, 41), (64, 80)])
def test_states_within_prompts_stay(form: Form, saved: tuple[int, ...]) -> None:
    """Chunks end there, too: within the first one, at its end, and within later ones."""
    torch.manual_seed(7)
    inputs, states = scan_inputs(93), poisoned(5, 4, 3, 5)
    cuts = (*saved, *[0] * (SAVES_PER_PROMPT - len(saved)))
    on_host = map_arrays(int32_array, chunk_lists([0, 0], [84, 9], 32, [cuts, (0,)]))
    plan = chunk_plan(map_arrays(torch.from_numpy, on_host), on_host, [84, 9], 32)
    slot_of = dict(zip(saved, (3, 4)))
    slots = [slot_of.get(end, 0) for end in on_host.cu_chunk_seqlens[1:]]
    by_row = [[slot_of.get(cut, 0) for cut in cuts], [0] * SAVES_PER_PROMPT], [cuts, [0] * SAVES_PER_PROMPT]
    out = flat(
        mamba2_chunk_scan, **inputs.terms() | form.changed, states=states, read_state_slots=int32(1, 2),
        write_state_slots=int32(1, 2), has_initial_state=torch.tensor([False, False]),
        query_start_loc=int32(0, 84, 93), plan=plan, saves=SavedStates(int32(*slots), *map(torch.tensor, by_row)),
    )  # fmt: skip
    expected, after = scan_loop(inputs[:84], torch.zeros(4, 3, 5), *form.terms)
    close(out[:84], expected, 1e-5)
    for end, slot in slot_of.items():
        close(states[slot], after[end - 1], 1e-5)
    close(states[1], after[-1], 1e-5)
    close(states[2], scan_loop(inputs[84:], torch.zeros(4, 3, 5), *form.terms)[1][-1], 1e-5)


def test_neighbours_change_nothing() -> None:
    torch.manual_seed(2)
    inputs = scan_inputs(60)
    together, alone = poisoned(4, 4, 3, 5), poisoned(4, 4, 3, 5)
    out = scan(inputs, together, [0, 0, 0], [20, 33, 7], [1, 2, 3])
    middle = scan(inputs[20:53], alone, [0], [33], [2])
    close(out[20:53], middle, 1e-6)
    close(together[2], alone[2], 1e-6)


@pytest.mark.parametrize(
    "changed",
    [
        {"D": None}, {"z": None}, {"dt_limit": (0.1, 0.4)}, {"dt_limit": (0.4, 0.4), "D": None},
        {"dt_limit": (0.4, 0.4), "z": None},
    ],
)  # fmt: skip
def test_optional_terms(changed: dict[str, Any]) -> None:
    torch.manual_seed(3)
    inputs = scan_inputs(21)
    states = poisoned(3, 4, 3, 5)
    limit = changed.get("dt_limit", (0.0, math.inf))
    expected, after = scan_loop(inputs, torch.zeros(4, 3, 5), limit, "D" not in changed, "z" not in changed)
    close(scan(inputs, states, [0], [21], [2], **changed), expected, 1e-5)
    close(states[2], after[-1], 1e-5)


def test_without_dt_bias() -> None:
    torch.manual_seed(4)
    inputs = scan_inputs(9)
    inputs.dt_bias = torch.zeros(4)
    expected, _ = scan_loop(inputs, torch.zeros(4, 3, 5))
    close(scan(inputs, poisoned(3, 4, 3, 5), [0], [9], [2], dt_bias=None), expected, 1e-5)


@FORMS
def test_padding_rows_and_spare_tokens_leave_no_trace(form: Form) -> None:
    torch.manual_seed(5)
    inputs = scan_inputs(25)
    for part in (inputs.x, inputs.dt, inputs.B, inputs.C, inputs.z):
        part[8:12] = math.nan
        part[20:] = math.nan
    states = poisoned(6, 4, 3, 5)
    before = states.clone()
    out = scan(inputs, states, [0, 0, 0], [8, 4, 8], [5, -1, 2], **form.changed)
    assert not out[8:12].any() and not out[20:].any()
    expected, _ = scan_loop(inputs[12:20], torch.zeros(4, 3, 5), *form.terms)
    close(out[12:20], expected, 1e-5)
    assert changed_rows(before, states) == {2, 5}


@FORMS
def test_the_result_goes_where_it_is_wanted(form: Form) -> None:
    torch.manual_seed(6)
    inputs, states = scan_inputs(25), poisoned(6, 4, 3, 5)
    wide = torch.full((25, 2 + 4 * 3 + 1), math.nan)
    place = wide[:, 2:14].unflatten(1, (4, 3))
    out = scan(inputs, states, [0, 0], [15, 10], [5, 2], out=place, **form.changed)
    assert out.data_ptr() == place.data_ptr() and int(wide.isnan().sum()) == 25 * 3
    expected, _ = scan_loop(inputs[:15], torch.zeros(4, 3, 5), *form.terms)
    close(place[:15], expected, 1e-5)


def test_without_tokens() -> None:
    states = poisoned(3, 4, 3, 5)
    before = states.clone()
    assert scan(scan_inputs(0), states, [], [], []).shape == (0, 4, 3)
    assert not changed_rows(before, states)
