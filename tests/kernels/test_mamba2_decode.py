from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hybridrt.base.errors import ConfigError
from hybridrt.kernels.mamba.mamba2_decode import mamba2_decode
from hybridrt.kernels.state.causal_conv1d import conv_window
from tests.support.flat import flat
from tests.support.mamba2_oracle import (
    ScanInputs,
    changed_rows,
    close,
    conv_loop,
    int32,
    poisoned,
    same_bytes,
    scan_loop,
)
from tests.support.ring_steps import commit
from tests.support.step_trees import check_draft_tree, check_windows_of_a_chain

pytestmark = pytest.mark.usefixtures("provider")
H, P, N, G, K = 4, 3, 5, 2, 4
CHANNELS = H * P + 2 * G * N


class Layer:
    """Weights of one layer, its pools, and the merged projections of requests from position 0."""

    def __init__(self, slots: list[int], tokens: int, conv_width: int = 16, ring_width: int = 16) -> None:
        self.slots, batch = slots, len(slots)
        self.merged = torch.randn(batch, tokens, CHANNELS + H + H * P) * 0.5
        self.weight, self.bias = torch.randn(CHANNELS, K), torch.randn(CHANNELS)
        self.head_terms = {
            "A": -torch.linspace(0.002, 0.3, H),
            "D": torch.randn(H),
            "dt_bias": torch.linspace(-3, 0.5, H),
        }
        self.conv, self.states = poisoned(40, CHANNELS, conv_width), poisoned(40, H, P, N)
        for slot in slots:
            if slot > 0:
                self.states[slot] = 0.0
        self.ring = {
            "values": poisoned(8, H, ring_width, P),
            "keys": poisoned(8, G, ring_width, N),
            "gates": poisoned(8, H, ring_width),
        }
        self.start, self.length = int32(*[0] * 8), int32(*[0] * 8)

    def step(self, first: list[int], tokens: int, **changed: Any) -> Tensor:
        merged = torch.stack([row[p : p + tokens] for row, p in zip(self.merged, first, strict=True)])
        xBC, dt, z = merged.split([CHANNELS, H, H * P], dim=-1)
        slots = int32(*self.slots)
        terms: dict[str, Any] = {
            **self.head_terms, "weight": self.weight, "bias": self.bias, "conv": self.conv, "states": self.states,
            "read_state_slots": slots, "write_state_slots": slots, "start_positions": int32(*first), **changed,
        }  # fmt: skip
        return flat(mamba2_decode, xBC=xBC, dt=dt, z=z.unflatten(-1, (H, P)), **terms)

    def replay_step(self, first: list[int], tokens: int, rows: list[int]) -> Tensor:
        row = int32(*rows)
        return self.step(first, tokens, rows=row, start=self.start[row], length=self.length[row], **self.ring)

    def commit(self, rows: list[int], accepted: tuple[int, ...], widest: int) -> None:
        pool = self.states, *self.ring.values()
        cursors = self.start, self.length
        commit(pool, self.head_terms["A"], cursors, int32(*rows), int32(*self.slots), int32(*accepted), widest)

    def expected(self, row: int) -> tuple[Tensor, Tensor]:
        """Outputs and states after every token of a request, from the loops."""
        conved = conv_loop(self.merged[row, :, :CHANNELS], self.weight, self.bias)
        return scan_loop(self.scan_inputs(row, conved), torch.zeros(H, P, N))

    def scan_inputs(self, row: int, conved: Tensor) -> ScanInputs:
        _, dt, z = self.merged[row].split([CHANNELS, H, H * P], dim=-1)
        x, B, C = conved.split([H * P, G * N, G * N], dim=-1)
        return ScanInputs(
            x.unflatten(-1, (H, P)), dt, B.unflatten(-1, (G, N)), C.unflatten(-1, (G, N)), z.unflatten(-1, (H, P)),
            **self.head_terms,
        )  # fmt: skip

    def conv_tail(self, row: int, end: int) -> Tensor:
        return torch.cat([torch.zeros(K - 1, CHANNELS), self.merged[row, :end, :CHANNELS]])[end:].t()


def test_classic_decode_equals_loop() -> None:
    torch.manual_seed(0)
    layer = Layer([7, 39], 12)
    expected = [layer.expected(b) for b in range(2)]
    for t in range(12):
        out = layer.step([t, t], 1)
        for b in range(2):
            close(out[b], expected[b][0][t : t + 1], 1e-5)
            close(layer.states[layer.slots[b]], expected[b][1][t], 1e-5)


def test_conv_output_is_rounded_to_the_activations_dtype() -> None:
    """As it is in prefill, whose conv stores it: unrounded here, the state would depend on how the prompt was split."""
    torch.manual_seed(4)
    layer = Layer([7], 1)
    layer.merged, layer.weight, layer.bias = layer.merged.half(), layer.weight.half(), layer.bias.half()
    layer.conv, layer.states = layer.conv.half(), torch.zeros(40, H, P, N)
    layer.step([0], 1)
    conved = conv_loop(layer.merged[0, :, :CHANNELS], layer.weight, layer.bias).half()
    after = scan_loop(layer.scan_inputs(0, conved), torch.zeros(H, P, N))[1][-1]
    wrong = (layer.states[7] - after).abs() > 1e-5 * after.abs().max()
    assert wrong.float().mean() < 0.1, "float16 roundings of the conv that differ, beyond the odd tie"


def test_classic_decode_to_other_slots() -> None:
    torch.manual_seed(1)
    layer = Layer([7, 39], 2)
    layer.step([0, 0], 1)
    before = layer.conv.clone(), layer.states.clone()
    layer.step([1, 1], 1, write_state_slots=int32(8, 3))
    assert changed_rows(before[0], layer.conv) == changed_rows(before[1], layer.states) == {3, 8}
    for b, slot in enumerate((8, 3)):
        close(layer.states[slot], layer.expected(b)[1][1], 1e-5)
        assert same_bytes(conv_window(layer.conv, int32(slot), int32(2), K)[0], layer.conv_tail(b, 2))


@pytest.mark.parametrize("mode", ["intermediate", "replay"])
@pytest.mark.parametrize("tokens", [1, 3, 5])
def test_verify_equals_loop_for_each_accepted_length(mode: str, tokens: int, provider: str) -> None:
    torch.manual_seed(tokens)
    rows = [6, 2]
    layer = Layer([7, 39], 60)
    stored = poisoned(8, tokens, H, P, N)
    expected = [layer.expected(b) for b in range(2)]
    done = [0, 0]
    for accepted in [*zip(range(1, tokens + 1), range(tokens, 0, -1), strict=True)] * (3 if provider == "torch" else 1):
        if mode == "replay":
            out = layer.replay_step(done, tokens, rows)
            layer.commit(rows, accepted, tokens)
        else:
            out = layer.step(done, tokens, stored=stored, rows=int32(*rows))
        for b, count in enumerate(accepted):
            close(out[b], expected[b][0][done[b] : done[b] + tokens], 1e-5)
            done[b] += count
            if mode == "intermediate":
                layer.states[layer.slots[b]] = stored[rows[b], count - 1]
                close(layer.states[layer.slots[b]], expected[b][1][done[b] - 1], 1e-5)


def test_a_draft_tree_equals_the_loop_along_each_path() -> None:
    """The conv's ring is too narrow for the nodes."""
    torch.manual_seed(4)
    check_draft_tree(Layer([7, 39], 6, conv_width=4), K, partial(close, tolerance=1e-5))


@pytest.mark.parametrize("block_t", [1, 16])
@pytest.mark.parametrize(("dim", "state_dim"), [(20, 40), (32, 48)])
def test_states_larger_than_a_piece(dim: int, state_dim: int, block_t: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads cut into pieces of rows and columns, whole ones and not; with tensor cores and without."""
    from hybridrt.kernels.mamba import mamba2_replay_decode_triton as kernels

    tile = {"BLOCK_T": block_t, "BLOCK_P": 16, "BLOCK_N": 16, "STAGES": 2, "num_warps": 4}
    monkeypatch.setattr(kernels, "stream_tile", lambda *_: tile)
    torch.manual_seed(5)
    tokens, heads, channels = 1 if block_t == 1 else 3, 2, 2 * dim + 2 * state_dim
    xBC, dt, z = torch.randn(2, tokens, channels), torch.randn(2, tokens, heads), torch.randn(2, tokens, heads, dim)
    terms: dict[str, Any] = {
        "weight": torch.randn(channels, K), "bias": None, "A": -torch.rand(heads), "D": None, "dt_bias": None,
        "read_state_slots": int32(3, -1), "write_state_slots": int32(3, -1), "start_positions": int32(0, 0),
        "rows": int32(2, 1), "start": int32(6, 0), "length": int32(4, 0),
    }  # fmt: skip
    pools = {
        "conv": torch.zeros(5, channels, 8), "states": torch.randn(5, heads, dim, state_dim),
        "values": torch.randn(4, heads, 8, dim), "keys": torch.randn(4, 1, 8, state_dim),
        "gates": torch.rand(4, heads, 8),
    }  # fmt: skip
    terms |= {"xBC": xBC, "dt": dt, "z": z}
    out = flat(mamba2_decode, **terms, **{name: pool.clone() for name, pool in pools.items()})
    close(out, flat(mamba2_decode.reference, **terms, **pools), 1e-5)


@pytest.mark.parametrize("mode", ["classic", "intermediate", "replay"])
def test_padding_rows_leave_no_trace(mode: str) -> None:
    torch.manual_seed(3)
    layer = Layer([-1, 7, -1], 4)
    layer.merged[0::2] = torch.nan
    stored = poisoned(8, 2, H, P, N)
    pools = {"conv": layer.conv, "states": layer.states, "stored": stored, **layer.ring}
    before = {name: pool.clone() for name, pool in pools.items()}
    if mode == "replay":
        out = layer.replay_step([0, 0, 0], 2, [0, 4, 3])
    else:
        changed = {"stored": stored, "rows": int32(0, 4, 3)} if mode == "intermediate" else {}
        out = layer.step([0, 0, 0], 2, **changed)
    assert not out[0::2].any()
    close(out[1], layer.expected(1)[0][:2], 1e-5)
    touched = {name: changed_rows(before[name], pool) for name, pool in pools.items()}
    ring = {4} if mode == "replay" else set()
    assert touched == {
        "conv": {7},
        "states": {7} if mode == "classic" else set(),
        "stored": {4} if mode == "intermediate" else set(),
        "values": ring,
        "keys": ring,
        "gates": ring,
    }


@pytest.mark.parametrize(("mode", "tokens"), [("classic", 1), ("intermediate", 3), ("replay", 1), ("replay", 3)])
def test_results_are_left_where_they_are_asked_for(mode: str, tokens: int) -> None:
    """Next to other columns, which stay; padding rows leave zeros."""

    def step(out: Tensor | None) -> Tensor:
        torch.manual_seed(3)
        layer = Layer([7, -1, 39], tokens)
        if mode == "replay":
            return layer.step(
                [0] * 3, tokens, rows=int32(6, 0, 2), start=int32(0, 0, 0), length=int32(0, 0, 0), out=out, **layer.ring
            )
        stored = {"stored": poisoned(8, tokens, H, P, N), "rows": int32(6, 0, 2)}
        return layer.step([0] * 3, tokens, out=out, **(stored if mode == "intermediate" else {}))

    wide = torch.full((3 * tokens, H * P + 5), torch.nan)
    place = wide[:, 5:].view(3, tokens, H, P)
    left = step(place)
    assert left.data_ptr() == place.data_ptr() and wide[:, :5].isnan().all()
    assert torch.equal(place, step(None)) and not place[1].any()


def test_narrow_rings_are_refused() -> None:
    layer = Layer([7], 8, conv_width=4, ring_width=3)
    with pytest.raises(ConfigError, match="conv ring of 4"):
        layer.step([0], 2)
    layer.conv = torch.zeros(40, CHANNELS, 8)
    with pytest.raises(ConfigError, match="3 columns cannot take a step of 4"):
        layer.replay_step([0], 4, [1])
    assert not layer.conv.any()


def test_windows_of_a_chain_are_refused() -> None:
    check_windows_of_a_chain(Layer([7, 39], 2), K)


def test_a_fused_step_s_conv_must_end_in_silu() -> None:
    layer = Layer([7, 39], 2)
    before = layer.conv.clone(), layer.states.clone()
    with pytest.raises(ConfigError, match="ends in SiLU, not in None"):
        layer.step([0, 0], 1, activation=None)
    with pytest.raises(ConfigError, match="applies SiLU to inputs without a conv"):
        layer.step([0, 0], 1, activation=None, weight=torch.empty(CHANNELS, 0))
    assert same_bytes(layer.conv, before[0]) and same_bytes(layer.states, before[1])


@pytest.mark.parametrize("mode", ["classic", "replay"])
@pytest.mark.parametrize("tokens", [1, 3])
def test_without_a_conv(mode: str, tokens: int) -> None:
    """Heads that decay at a fixed rate, a group for each (lightning attention), against a loop from the formula."""
    torch.manual_seed(tokens)
    rows, slots, steps, A = int32(6, 2), int32(7, 39), 4, -torch.linspace(0.01, 0.9, H)
    inputs = torch.randn(2, steps * tokens, H * (P + 2 * N))
    states, expected = poisoned(40, H, P, N), torch.zeros(2, H, P, N, dtype=torch.float64)
    states[slots.long()] = 0.0
    ring = {"values": poisoned(8, H, 16, P), "keys": poisoned(8, H, 16, N), "gates": poisoned(8, H, 16)}
    for step in range(steps):
        xBC = inputs[:, step * tokens : (step + 1) * tokens]
        length = int32(step * tokens, step * tokens)
        replay = ring | {"rows": rows, "start": length * 0 + 3, "length": length} if mode == "replay" else {}
        out = flat(
            mamba2_decode, xBC=xBC, dt=torch.zeros(H).expand(2, tokens, H), z=None, A=A, dt_limit=(1.0, 1.0),
            weight=torch.empty(H * (P + 2 * N), 0), conv=torch.empty(40, 0, 4), states=states, read_state_slots=slots,
            write_state_slots=slots, start_positions=length, **replay,
        )  # fmt: skip
        v, k, q = (part.unflatten(-1, (H, -1)) for part in F.silu(xBC.double()).split([H * P, H * N, H * N], -1))
        for t in range(tokens):
            decayed = A.double().exp()[:, None, None] * expected
            expected = decayed + v[:, t, :, :, None] * k[:, t, :, None]
            close(out[:, t], (expected * q[:, t, :, None]).sum(-1), 1e-5)
    if mode == "classic":
        close(states[slots.long()], expected, 1e-5)
