"""The Mamba-2 decode step that updates neighbouring pool rows where they stand, against the general path."""

from typing import Any

import pytest
import torch

from hybridrt.kernels import mamba2_decode as module
from hybridrt.kernels.mamba2_decode import mamba2_decode
from hybridrt.kernels.slots import neighbours
from tests.support.flat import flat
from tests.support.mamba2_oracle import changed_rows, int32

P, N, K, SLOTS = 3, 5, 4, 9


def inputs(batch: int, heads: int, groups: int, width: int, **changed: Any) -> dict[str, Any]:
    torch.manual_seed(batch + heads + width)
    channels = heads * P + 2 * groups * N
    merged = torch.randn(batch, 1, heads * P + channels + heads)
    z, xBC, dt = merged.split([heads * P, channels, heads], dim=-1)
    terms: dict[str, Any] = {
        "xBC": xBC, "dt": dt, "z": z.unflatten(-1, (heads, P)), "weight": torch.randn(channels, K),
        "bias": torch.randn(channels), "A": -torch.rand(heads), "D": torch.randn(heads), "dt_bias": torch.randn(heads),
        "conv": torch.randn(SLOTS, channels, width), "states": torch.randn(SLOTS, heads, P, N),
        "start_positions": torch.arange(K, K + batch, dtype=torch.int32) * 7,
    }  # fmt: skip
    return terms | changed


def step(
    terms: dict[str, Any], slots: list[int], in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> list[torch.Tensor]:
    """Output, conv rings and states after one step; `in_place` False takes the general path."""
    terms = terms | {"conv": terms["conv"].clone(), "states": terms["states"].clone()}
    with monkeypatch.context() as patched:
        forbidden = "causal_conv1d_update" if in_place else "_one_token"
        patched.setattr(module, forbidden, None)
        if not in_place:
            patched.setattr(module, "neighbours", lambda slots: None)
        ids = int32(*slots)
        out = flat(mamba2_decode.reference, read_state_slots=ids, write_state_slots=ids, **terms)
    return [out, terms["conv"], terms["states"]]


@pytest.mark.parametrize(
    "changed",
    [{}, {"bias": None, "D": None}, {"z": None, "dt_bias": None}, {"dt_limit": (0.05, 0.2)}],
    ids=["all", "no-bias-no-skip", "no-gate", "clamped"],
)
@pytest.mark.parametrize(
    ("slots", "heads", "groups", "width"),
    [([2], 4, 1, 4), ([4, 2, 3], 4, 2, 8), ([2, 3, 4], 4, 2, 8), ([3, 6, 4, 2, 5], 3, 3, 4)],
)
def test_in_place_equals_the_general_path(
    slots: list[int], heads: int, groups: int, width: int, changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    terms = inputs(len(slots), heads, groups, width, **changed)
    for ours, theirs in zip(step(terms, slots, True, monkeypatch), step(terms, slots, False, monkeypatch)):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_rows_that_are_not_in_the_batch_keep_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    terms = inputs(3, 4, 2, 4)
    _, conv, states = step(terms, [4, 5, 6], True, monkeypatch)
    assert changed_rows(terms["conv"], conv) == changed_rows(terms["states"], states) == {4, 5, 6}


@pytest.mark.parametrize(
    "changed",
    [
        {"start_positions": int32(K - 2, 50)},
        {"states": torch.zeros(SLOTS, 4, P, N, dtype=torch.bfloat16)},
        {"stored": torch.zeros(3, 1, 4, P, N), "rows": int32(1, 2)},
    ],
    ids=["prompt-shorter-than-the-window", "bfloat16-state", "state-kept"],
)
def test_other_steps_take_the_general_path(changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_one_token", None)
    ids = int32(1, 2)
    terms = inputs(2, 4, 2, 4, **changed)
    flat(mamba2_decode.reference, read_state_slots=ids, write_state_slots=ids, **terms)


@pytest.mark.parametrize(
    ("slots", "run", "rows"),
    [([3], slice(3, 4), None), ([0, 1, 2], slice(0, 3), None), ([5, 3, 4], slice(3, 6), [1, 2, 0])],
)
def test_neighbouring_slots_are_a_slice(slots: list[int], run: slice, rows: list[int] | None) -> None:
    found = neighbours(int32(*slots))
    assert found is not None and found[0] == run
    assert rows == (None if found[1] is None else found[1].tolist())


@pytest.mark.parametrize("slots", [[1, 3], [1, 1], [-1, 0]])
def test_other_slots_are_none(slots: list[int]) -> None:
    assert neighbours(int32(*slots)) is None
