"""Decode and verify steps over states in 8 bits: as over float32 states of the same numbers. And their folds."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridrt.kernels.core.records import StateCodes
from hybridrt.kernels.delta_rule.decode import gdn_decode
from hybridrt.kernels.mamba.mamba2_decode import mamba2_decode
from hybridrt.kernels.state.state_codes import encode, rounding_offsets
from hybridrt.kernels.state.state_ring import RingFolds, advance_ring, fold_ring
from tests.support.coded_states import DTYPES, EIGHT_BITS, coded, flat_codes, numbers, one_layer
from tests.support.flat import flat

pytestmark = pytest.mark.usefixtures("provider")
HEADS, GROUPS, SLOTS, ROWS, TAPS, WIDTH = 4, 2, 6, 4, 4, 16
SIZES = [(5, 6), (20, 72)]  # a head's values and keys: one block, and three
KINDS = ("gdn", "kda", "mamba2")
# Of each kind, size and number of tokens one dtype by default: codes are read in one place for all of them.
STEPS = [
    pytest.param(kind, dtype, size, tokens, marks=() if (i + k + n) % 2 else pytest.mark.slow)
    for (k, kind), (i, dtype), (n, size), tokens in product(
        enumerate(KINDS), enumerate(EIGHT_BITS), enumerate(SIZES), (1, 3)
    )
]


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Layer:
    """One layer's weights and pools, with states in 8 bits and rings that are half full."""

    def __init__(self, kind: str, dtype: torch.dtype, size: tuple[int, int]) -> None:
        torch.manual_seed(0)
        values, keys = size
        groups = HEADS if kind == "kda" else GROUPS
        self.kind, self.size, self.groups = kind, size, groups
        channels = 2 * groups * keys + HEADS * values
        self.pool, self.codes = coded(torch.randn(SLOTS, HEADS, values, keys), dtype)
        self.conv = torch.randn(SLOTS, channels, 16)
        self.ring = {
            "values": torch.randn(ROWS, HEADS, WIDTH, values),
            "keys": torch.randn(ROWS, groups, WIDTH, keys) * keys**-0.5,
            "gates": -torch.rand(ROWS, HEADS, WIDTH, *([keys] if kind == "kda" else [])) * 0.2,
        }
        self.weights = {"weight": torch.randn(channels, TAPS), "bias": torch.randn(channels)}
        if kind == "mamba2":
            self.ring["gates"] = self.ring["gates"].abs()
            self.A = -torch.rand(HEADS)
            self.weights |= {"A": self.A, "D": torch.randn(HEADS), "dt_bias": torch.randn(HEADS)}
        else:
            bias = (HEADS, keys) if kind == "kda" else (HEADS,)
            self.A = None
            self.weights |= {"A_log": torch.randn(HEADS) - 2, "dt_bias": torch.randn(*bias)}

    def step(self, tokens: int, states: Tensor, codes: StateCodes | None, last_input: float | None = None) -> Tensor:
        """`last_input`: of the last row's last channel."""
        torch.manual_seed(1)
        rows, slots = int32(1, 0, 3), int32(4, -1, 2)
        inputs = torch.randn(3, tokens, self.conv.shape[1])
        if last_input is not None:
            inputs[2, :, -1] = last_input
        args: dict[str, Any] = {
            "states": states, "conv": self.conv.clone(), "read_state_slots": slots, "write_state_slots": slots,
            "start_positions": int32(40, 0, 61), "rows": rows, "start": int32(3, 0, 14), "length": int32(7, 0, 9),
            **{name: t.clone() for name, t in self.ring.items()}, **self.weights,
        }  # fmt: skip
        args |= {} if codes is None else flat_codes(codes)
        if self.kind == "mamba2":
            z = torch.randn(3, tokens, HEADS, self.size[0])
            return flat(mamba2_decode, xBC=inputs, dt=torch.randn(3, tokens, HEADS), z=z, **args)
        gate = (HEADS, self.size[1]) if self.kind == "kda" else (HEADS,)
        return flat(gdn_decode, qkv=inputs, a=torch.randn(3, tokens, *gate), b=torch.randn(3, tokens, HEADS), **args)

    def fold(self, states: Tensor, codes: StateCodes | None, folds: RingFolds) -> None:
        A = None if self.A is None else self.A[None]
        rings = (self.ring[name][None] for name in ("values", "keys", "gates"))
        fold_ring(states[None], *rings, A, folds, codes and one_layer(codes))


@pytest.mark.parametrize(("kind", "dtype", "size", "tokens"), STEPS)
def test_a_step_reads_what_the_codes_say(kind: str, dtype: torch.dtype, size: tuple[int, int], tokens: int) -> None:
    layer = Layer(kind, dtype, size)
    out = layer.step(tokens, layer.pool, layer.codes)
    expected = layer.step(tokens, numbers(layer.pool, layer.codes), None)
    torch.testing.assert_close(out, expected, rtol=2e-5, atol=2e-5)
    assert out[0].abs().max() > 0.05
    assert not out[1].any()


@pytest.mark.parametrize("size", [(20, 72), (20, 70), (70, 160)])
def test_a_query_that_is_not_finite_spoils_its_row_alone(size: tuple[int, int]) -> None:
    """Also where int8 codes are multiplied as integers, which have no NaN: scores have it. A last channel of Mamba-2 is
    one of C."""
    layer = Layer("mamba2", torch.int8, size)
    out = layer.step(1, layer.pool, layer.codes, last_input=float("nan"))
    assert out[2, :, HEADS // GROUPS :].isnan().all()
    assert out[0].isfinite().all()


@pytest.mark.parametrize("size", [(20, 72), (70, 160)])
def test_queries_that_span_many_sizes(size: tuple[int, int]) -> None:
    """The step in which a query is taken is that of its largest number."""
    layer = Layer("mamba2", torch.int8, size)
    out = layer.step(1, layer.pool, layer.codes, last_input=3e5)
    expected = layer.step(1, numbers(layer.pool, layer.codes), None, last_input=3e5)
    torch.testing.assert_close(out[2], expected[2], rtol=1e-5, atol=1e-5 * float(expected[2].abs().max()))
    torch.testing.assert_close(out[0], expected[0], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("size", [(20, 72), (70, 160)])
def test_tiles_of_many_rows_of_mamba2(size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    from hybridrt.kernels.mamba import mamba2_replay_decode_triton

    layer = Layer("mamba2", torch.float8_e4m3fn, size)
    few = layer.step(1, layer.pool, layer.codes)
    tile = mamba2_replay_decode_triton.codes_tile(1, 1, layer.pool)
    monkeypatch.setattr(mamba2_replay_decode_triton, "SOME_ROWS", 0)
    assert mamba2_replay_decode_triton.codes_tile(1, 1, layer.pool) != tile
    torch.testing.assert_close(layer.step(1, layer.pool, layer.codes), few, rtol=2e-5, atol=2e-5)


def test_many_programs_and_few_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    from hybridrt.kernels.delta_rule import decode_ring_few_rows_triton

    layer = Layer("gdn", torch.int8, (20, 72))
    few = layer.step(1, layer.pool, layer.codes)
    monkeypatch.setattr(decode_ring_few_rows_triton, "FEW_PROGRAMS", 0)
    torch.testing.assert_close(layer.step(1, layer.pool, layer.codes), few, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_fold_rounds_by_position(kind: str, dtype: torch.dtype, size: tuple[int, int]) -> None:
    """In place and to another slot. Slots that are not named keep their bytes."""
    layer = Layer(kind, dtype, size)
    before, exact = numbers(layer.pool, layer.codes), numbers(layer.pool, layer.codes)
    of_rows = int32(4, 2, -1), int32(1, 3, 0), int32(3, 14, 0), int32(7, 9, 0), int32(3), int32(4, 5, -1)
    folds = RingFolds(*of_rows, state_lengths=int32(300, 77, 0))
    layer.fold(layer.pool, layer.codes, folds)
    layer.fold(exact, None, folds)
    offsets = rounding_offsets(layer.codes.element_keys, int32(300, 77), *size)
    expected = coded_numbers(exact[[4, 5]], offsets, dtype)
    found = numbers(layer.pool, layer.codes)
    assert (found[[4, 5]] != expected).float().mean() < 0.01
    assert ((found[[4, 5]] - expected).abs().amax() / expected.abs().amax()) < (0.02 if dtype in EIGHT_BITS else 0.01)
    assert torch.equal(found[[0, 1, 2, 3]], before[[0, 1, 2, 3]])
    assert layer.codes.state_lengths.tolist() == [5, 5, 5, 5, 300, 77]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fold_of_an_empty_ring_copies(dtype: torch.dtype) -> None:
    """In place and to another slot, next to a row that is folded."""
    layer = Layer("gdn", dtype, (20, 72))
    stored = [part.view(torch.uint8) for part in (layer.pool, layer.codes.state_scales) if part is not None]
    before = [part.clone() for part in stored]
    of_rows = int32(4, 2, 3), int32(1, 3, 0), int32(3, 14, 0), int32(0, 0, 9), int32(3), int32(4, 5, 3)
    layer.fold(layer.pool, layer.codes, RingFolds(*of_rows, state_lengths=int32(5, 5, 14)))
    for now, old in zip(stored, before, strict=True):
        assert torch.equal(now[[0, 1, 2, 4, 5]], old[[0, 1, 2, 4, 2]])
        assert not torch.equal(now[3], old[3])
    assert layer.codes.state_lengths.tolist() == [5, 5, 5, 14, 5, 5]


def coded_numbers(states: Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
    pool, scales = encode(states, offsets, dtype)
    return numbers(pool, StateCodes(int32(), int32(), scales))


def test_the_end_of_a_step_moves_the_lengths_of_folded_states() -> None:
    start, length, lengths = int32(0, 2, 0, 9), int32(0, 13, 4, 7), int32(0, 100, 200, 300, 400)
    rows, accepted, slots = int32(3, 1, 2, 0), int32(1, 1, 1, 0), int32(4, 2, 1, -1)
    folds = advance_ring(start, length, rows, accepted, slots, width=16, widest=1, state_lengths=lengths)
    assert int(folds.count) == 2
    assert folds.state_lengths is not None
    assert {*zip(folds.state_slots[:2].tolist(), folds.state_lengths[:2].tolist())} == {(4, 408), (2, 214)}
    assert lengths.tolist() == [0, 100, 214, 300, 408]
