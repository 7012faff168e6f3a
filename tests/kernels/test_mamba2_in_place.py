"""The Mamba-2 decode step that updates neighbouring pool rows where they stand, against the general operation."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridrt.kernels.core.records import NO_LIMIT, ConvWeights, SSMWeights
from hybridrt.kernels.mamba.mamba2_decode import mamba2_decode
from hybridrt.kernels.mamba.mamba2_decode_cpu import mamba2_in_place, neighbours, pool_rows
from hybridrt.kernels.state.row_tables import DecodeBuffers
from hybridrt.mem_cache.pools.mamba_pool import LayerCache
from hybridrt.recurrent import mamba2
from hybridrt.recurrent.mamba2 import Mamba2AttnBackend, Mamba2Inputs
from hybridrt.recurrent.segments import DecodeSegment
from tests.support.flat import flat
from tests.support.mamba2_oracle import changed_rows, int32, with_gaps

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


def in_place(terms: dict[str, Any], slots: list[int]) -> list[torch.Tensor]:
    """Output, conv rings and states after one step."""
    conv, states, z = with_gaps(terms["conv"]), with_gaps(terms["states"]), terms["z"]
    rows = pool_rows(int32(*slots), terms["start_positions"])
    assert rows is not None and rows.first >= K - 1
    weights = SSMWeights(*(terms[name] for name in ("A", "D", "dt_bias")), terms.get("dt_limit", NO_LIMIT))
    gate = None if z is None else z[:, 0].flatten(1)
    conv_weights = ConvWeights(terms["weight"], terms["bias"])
    place = torch.empty(len(slots), 2 * states[0, ..., 0].numel())[:, ::2]
    out = mamba2_in_place(terms["xBC"][:, 0], terms["dt"][:, 0], gate, conv_weights, weights, conv, states, rows, place)
    assert out is place
    return [out.reshape(len(slots), 1, *states.shape[1:3]), conv, states]


def general(terms: dict[str, Any], slots: list[int]) -> list[torch.Tensor]:
    terms = terms | {"conv": terms["conv"].clone(), "states": terms["states"].clone()}
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
    slots: list[int], heads: int, groups: int, width: int, changed: dict[str, Any]
) -> None:
    terms = inputs(len(slots), heads, groups, width, **changed)
    for ours, theirs in zip(in_place(terms, slots), general(terms, slots), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_rows_that_are_not_in_the_batch_keep_their_bytes() -> None:
    terms = inputs(3, 4, 2, 4)
    _, conv, states = in_place(terms, [4, 5, 6])
    assert changed_rows(terms["conv"], conv) == changed_rows(terms["states"], states) == {4, 5, 6}


@pytest.mark.parametrize(
    "changed",
    [
        {"start_positions": int32(K - 2, 50)},
        {"states": torch.zeros(SLOTS, 4, P, N, dtype=torch.bfloat16)},
        {"xBC": torch.zeros(2, 1, 10, dtype=torch.bfloat16)},
    ],
    ids=["prompt-shorter-than-the-window", "bfloat16-state", "bfloat16-model"],
)
def test_rows_that_cannot_be_updated_in_place(changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """They take the general path."""
    terms = inputs(2, 4, 2, 4, **changed)
    buffers = DecodeBuffers.allocate(2, "cpu")
    buffers.state_slots.copy_(int32(1, 2))
    buffers.start_positions.copy_(terms["start_positions"])
    cache, xBC, dt = LayerCache(terms["conv"], terms["states"]), terms["xBC"][:, 0], terms["dt"][:, 0]
    out, backend = torch.zeros(2, 1, 4, P), object.__new__(Mamba2AttnBackend)
    backend.layer_cache = lambda _: cache
    monkeypatch.setattr(mamba2, "mamba2_in_place", None)
    monkeypatch.setattr(mamba2, "mamba2_decode", lambda *_, **__: out)
    weights = ConvWeights(terms["weight"], terms["bias"])
    layer: Any = SimpleNamespace(layer_id=0, head_dim=P, conv_weights=weights, weights=None)
    segment = DecodeSegment(int32(1, 2), buffers, 1, None)
    assert backend.decode(layer, Mamba2Inputs(xBC, dt), segment).data_ptr() == out.data_ptr()


@pytest.mark.parametrize(("tokens", "ring"), [(2, False), (1, True)], ids=["verify", "replay"])
def test_steps_that_keep_the_state_take_the_general_path(
    tokens: int, ring: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verify step may have to go back, and in replay mode the state in the pool is a checkpoint."""
    buffers = DecodeBuffers.allocate(2, "cpu")
    buffers.state_slots.copy_(int32(1, 2))
    segment = DecodeSegment(int32(1, 2), buffers, tokens, None)
    none, out = torch.empty(0), torch.zeros(2, tokens, 4, 2)
    cache = LayerCache(none, none, ring_values=none if ring else None)
    backend = object.__new__(Mamba2AttnBackend)
    backend.layer_cache = lambda _: cache
    monkeypatch.setattr(DecodeSegment, "fused_step", lambda *_: None)
    monkeypatch.setattr(mamba2, "mamba2_in_place", None)
    monkeypatch.setattr(mamba2, "mamba2_decode", lambda *_, **__: out)
    inputs = Mamba2Inputs(torch.zeros(2 * tokens, 10), torch.zeros(2 * tokens, 4))
    layer: Any = SimpleNamespace(layer_id=0, head_dim=2, conv_weights=None, weights=None)
    assert backend.decode(layer, inputs, segment).data_ptr() == out.data_ptr()


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
