"""Kimi Delta Attention through the operations of the gated delta rule: a decay for each channel of a key."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridrt.base.errors import ConfigError
from hybridrt.kernels.core.chunk_plan import plan_chunks
from hybridrt.kernels.core.records import DeltaInputs, GateWeights, IntermediateStates, Prompts, StateSlots
from hybridrt.kernels.delta_rule import kda_chunks_triton
from hybridrt.kernels.delta_rule.decode import gdn_decode, split_qkv
from hybridrt.kernels.delta_rule.delta_rule import chunk_gated_delta_rule, gdn_gates, recurrent_gated_delta_rule
from hybridrt.kernels.state.causal_conv1d import conv_window
from tests.kernels import test_gdn_decode
from tests.support.flat import flat
from tests.support.gdn_loops import Tokens, relative_error, slow_delta_rule
from tests.support.mamba2_oracle import changed_rows, conv_loop, int32, poisoned, same_bytes
from tests.support.ring_steps import commit, materialize
from tests.support.tree_paths import ancestry

pytestmark = pytest.mark.usefixtures("provider")
HEADS, KEY_DIM, VALUE_DIM = 2, 6, 5
ERROR = {torch.float32: 2e-6, torch.float16: 3e-3}


def gate_weights(lower_bound: float | None = None, key_dim: int = KEY_DIM) -> GateWeights:
    return GateWeights(torch.randn(HEADS), torch.randn(HEADS, key_dim) - 2, lower_bound=lower_bound)


def raw_tokens(*lead: int, key_dim: int = KEY_DIM, value_dim: int = VALUE_DIM, dtype: torch.dtype = torch.float32):
    """Slices of one projection: q, k, v, and gates as it left them."""
    widths = [key_dim, key_dim, value_dim, key_dim, 1]
    merged = torch.randn(*lead, HEADS * sum(widths) + 3).to(dtype)[..., 3:]
    q, k, v, a, b = merged.split([HEADS * width for width in widths], -1)
    return Tokens(*(t.unflatten(-1, (HEADS, -1)) for t in (q, k, v, a)), b)


def with_gates(tokens: Tokens, weights: GateWeights) -> Tokens:
    return Tokens(tokens.q, tokens.k, tokens.v, *gdn_gates(tokens.g, tokens.beta, weights))


def make_states(slots: int = 40, dtype: torch.dtype = torch.float32, value_dim: int = VALUE_DIM) -> Tensor:
    return torch.randn(slots, HEADS, value_dim, KEY_DIM).to(dtype)


def run_chunks(states, tokens, lengths, computed, read_slots, write_slots, chunk_size, weights=None):
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    prompts = Prompts(starts, torch.tensor(computed) > 0, plan_chunks(computed, lengths, chunk_size))
    slots = StateSlots(states, read_slots, write_slots)
    return chunk_gated_delta_rule(DeltaInputs(*tokens.tensors), slots, prompts, weights)


def run_steps(states, tokens, read_slots, write_slots, weights=None, *intermediate):
    """intermediate: stored states, rows and parents."""
    slots = StateSlots(states, read_slots, write_slots, IntermediateStates(*intermediate) if intermediate else None)
    return recurrent_gated_delta_rule(DeltaInputs(*tokens.tensors), slots, weights)


@pytest.mark.parametrize(
    ("lower_bound", "chunk_size", "dtype"),
    [(None, 3, torch.float32), (-5.0, 32, torch.float32), (None, 64, torch.float16)],
)
def test_chunks_of_ragged_rows(lower_bound: float | None, chunk_size: int, dtype: torch.dtype) -> None:
    """Far slots, states read and written elsewhere, a padding row, spare tokens, pools that hold NaN."""
    torch.manual_seed(chunk_size)
    lengths, computed = [7, 3, 35, 1], [3, 0, 0, chunk_size]
    read_slots, write_slots = int32(5, -1, 39, 8), int32(5, -1, 38, 1)
    tokens, weights = raw_tokens(sum(lengths) + 2, dtype=dtype), gate_weights(lower_bound)
    tokens.q[7:10] = torch.nan
    states = make_states()
    states[39] = states[6] = torch.nan
    before, start = states.clone(), 0
    out = run_chunks(states, tokens, lengths, computed, read_slots, write_slots, chunk_size, weights)
    for b, length in enumerate(lengths):
        span = slice(start, start + length)
        start += length
        if read_slots[b] < 0:
            assert not out[span].any()
            continue
        initial = before[read_slots[b]] if computed[b] else torch.zeros_like(before[0])
        expected, expected_states = slow_delta_rule(initial, with_gates(tokens[span], weights))
        assert relative_error(out[span], expected) < ERROR[dtype]
        assert relative_error(states[write_slots[b]], expected_states[-1]) < ERROR[dtype]
    assert not out[start:].any()
    assert changed_rows(before, states) == {5, 38, 1}


@pytest.mark.parametrize("strongest", [-0.01, -30.0, -400.0])
def test_decays_of_any_strength(strongest: float) -> None:
    """In one chunk some channels keep everything and others forget at once: no factor overflows, and what is left of a
    channel that decays slowly is exact. Gates as they are, not raw."""
    torch.manual_seed(0)
    tokens, slot, states = raw_tokens(50, key_dim=40), int32(4), torch.randn(6, HEADS, VALUE_DIM, 40)
    tokens.g, tokens.beta = strongest * torch.rand(50, HEADS, 40), torch.rand(50, HEADS)
    tokens.g[..., ::3] *= 1e-3
    initial = states[4].clone()
    out = run_chunks(states, tokens, [50], [64], slot, slot, 64)
    expected, expected_states = slow_delta_rule(initial, tokens)
    assert relative_error(out, expected) < 2e-6
    assert relative_error(states[4], expected_states[-1]) < 2e-6


@pytest.mark.parametrize("weak", [-1e-3, -1.5, -20.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_tokens_at_which_channels_forget_at_once(dtype: torch.dtype, weak: float) -> None:
    """Among gates that are weak, or so strong that no factor of half a chunk or of a quarter fits into float32: what
    two tokens after such a token have in common is not lost, nor does anything of before it come back."""
    torch.manual_seed(0)
    tokens, slot, states = raw_tokens(60, key_dim=40, dtype=dtype), int32(4), torch.randn(6, HEADS, VALUE_DIM, 40)
    tokens.g, tokens.beta = weak * torch.rand(60, HEADS, 40), torch.rand(60, HEADS)
    tokens.g[[3, 21, 38], :, 1:] = -300.0
    tokens.g[[22, 50], :, ::2] = -1000.0
    initial = states[4].clone()
    out = run_chunks(states, tokens, [60], [64], slot, slot, 64)
    expected, expected_states = slow_delta_rule(initial, tokens)
    error = {torch.float32: 2e-6, torch.float16: 3e-3}[dtype]
    assert relative_error(out, expected) < error
    assert relative_error(states[4], expected_states[-1]) < error


def test_matrices_of_a_capture_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kda_chunks_triton, "_kept_matrices", {})
    with monkeypatch.context() as capture:
        capture.setattr(torch.cuda, "is_initialized", lambda: True)
        capture.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        captured = kda_chunks_triton.sum_matrices(16, torch.device("cpu"))
    kept = kda_chunks_triton.sum_matrices(16, torch.device("cpu"))
    assert kept is not captured and torch.equal(kept, captured)
    assert kda_chunks_triton.sum_matrices(16, torch.device("cpu")) is kept


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.float16, 4e-3)])
def test_keys_that_repeat_without_decay(dtype: torch.dtype, error: float) -> None:
    """The chunk's triangular system is as badly conditioned as it gets."""
    torch.manual_seed(0)
    tokens, slot, states = raw_tokens(50, dtype=dtype), int32(4), torch.zeros(6, HEADS, VALUE_DIM, KEY_DIM)
    tokens.k[:] = tokens.k[:1] + 1e-3 * tokens.k
    tokens.g, tokens.beta = torch.full((50, HEADS, KEY_DIM), -1e-4), torch.full((50, HEADS), 0.99)
    out = run_chunks(states, tokens, [50], [0], slot, slot, 64)
    expected, expected_states = slow_delta_rule(torch.zeros_like(states[4]), tokens)
    assert relative_error(out, expected) < error
    assert relative_error(states[4], expected_states[-1]) < error


def test_chunked_prefill_and_decode_equal_the_whole() -> None:
    torch.manual_seed(0)
    tokens, weights, slot = raw_tokens(45), gate_weights(-5.0), int32(4)
    whole_states, states = make_states(), make_states()
    whole = run_chunks(whole_states, tokens, [45], [0], slot, slot, 16, weights)
    parts, start = [], 0
    for length in (20, 1, 23):
        parts.append(run_chunks(states, tokens[start : start + length], [length], [start], slot, slot, 16, weights))
        start += length
    parts.append(run_steps(states, tokens[None, start:], slot, slot, weights)[0])
    assert relative_error(torch.cat(parts), whole) < 2e-6
    assert relative_error(states[4], whole_states[4]) < 2e-6


@pytest.mark.parametrize("tree", [False, True])
def test_steps_from_raw_gates_store_the_state_after_each_token(tree: bool) -> None:
    """A chain and a draft tree, next to a padding row; the pool stays as it is."""
    torch.manual_seed(0)
    parents = torch.tensor([[-1, 0, 0, 1], [-1] * 4, [-1, 0, 1, 2]], dtype=torch.int32) if tree else None
    tokens, weights, slots, rows = raw_tokens(3, 4), gate_weights(), int32(39, -1, 2), int32(1, 2, 3)
    states, stored = make_states(), poisoned(5, 4, HEADS, VALUE_DIM, KEY_DIM)
    before = states.clone(), stored.clone()
    out = run_steps(states, tokens, slots, slots, weights, stored, rows, parents)
    assert same_bytes(states, before[0]) and changed_rows(before[1], stored) == {1, 3} and not out[1].any()
    for b in (0, 2):
        for node in range(4):
            path = list(range(node + 1)) if parents is None else ancestry(parents[b], node)
            expected, expected_states = slow_delta_rule(states[slots[b]], with_gates(tokens[b][path], weights))
            assert relative_error(out[b, node], expected[-1]) < 2e-6
            assert relative_error(stored[rows[b], node], expected_states[-1]) < 2e-6


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head's state is split among programs, and in each of them into tiles."""
    from hybridrt.kernels.delta_rule import decode_classic_triton

    monkeypatch.setattr(decode_classic_triton, "TILE_BYTES", 64)


class Layer:
    """A layer's weights and pools, and the merged projections of requests from position 0."""

    def __init__(self, slots: list[int], tokens: int, lower_bound: float | None = None,
                 state_dtype: torch.dtype = torch.float32) -> None:  # fmt: skip
        self.slots, self.channels = slots, HEADS * (2 * KEY_DIM + VALUE_DIM)
        self.merged = torch.randn(len(slots), tokens, self.channels + HEADS * (KEY_DIM + 1))
        self.gates = gate_weights(lower_bound)
        self.weight = torch.randn(self.channels, test_gdn_decode.TAPS)
        self.conv = poisoned(40, self.channels, 16)
        self.states = poisoned(40, HEADS, VALUE_DIM, KEY_DIM, dtype=state_dtype)
        for slot in slots:
            if slot > 0:
                self.conv[slot], self.states[slot] = 0.0, 0.0

    def split(self, merged: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        qkv, a, b = merged.split([self.channels, HEADS * KEY_DIM, HEADS], -1)
        return qkv, a.unflatten(-1, (HEADS, KEY_DIM)), b

    def step(self, first: int, tokens: int, merged: Tensor | None = None, **changed: object) -> Tensor:
        qkv, a, b = self.split(self.merged[:, first : first + tokens] if merged is None else merged)
        slots = int32(*self.slots)
        args = {"read_state_slots": slots, "write_state_slots": slots, "conv": self.conv, "states": self.states}
        args |= {"weight": self.weight, "bias": None, "start_positions": int32(*[first] * len(self.slots))}
        out: Tensor = flat(gdn_decode, qkv=qkv, a=a, b=b, **self.gates._asdict(), **{**args, **changed})
        return out

    def expected(self, row: int, initial: Tensor | None = None) -> tuple[Tensor, Tensor]:
        qkv, a, b = self.split(self.merged[row])
        conved = conv_loop(qkv, self.weight, torch.zeros(self.channels))
        tokens = Tokens(*split_qkv(conved, self.states), *gdn_gates(a, b, self.gates))
        return slow_delta_rule(torch.zeros(self.states.shape[1:]) if initial is None else initial.clone(), tokens)


@pytest.mark.parametrize(
    ("lower_bound", "state_dtype", "error"), [(None, torch.float32, 1e-5), (-5.0, torch.float16, 5e-3)]
)
def test_decode_equals_the_loop(
    small_blocks: None, lower_bound: float | None, state_dtype: torch.dtype, error: float
) -> None:
    """Then to other slots, whose conv windows follow, and back, twice alike."""
    torch.manual_seed(0)
    layer = Layer([7, 39], 4, lower_bound, state_dtype)
    expected = [layer.expected(b) for b in range(2)]
    for t in range(3):
        out = layer.step(t, 1)
        for b in range(2):
            assert relative_error(out[b], expected[b][0][t : t + 1]) < error
            assert relative_error(layer.states[layer.slots[b]], expected[b][1][t]) < error
    before = layer.conv.clone(), layer.states.clone()
    outs = [layer.step(3, 1, write_state_slots=int32(*slots)) for slots in ((8, 3), (9, 2))]
    assert same_bytes(*outs) and relative_error(outs[0][1], expected[1][0][3:]) < error
    assert changed_rows(before[0], layer.conv) == changed_rows(before[1], layer.states) == {2, 3, 8, 9}
    tails = conv_window(layer.conv, int32(8, 3), int32(4, 4), test_gdn_decode.TAPS)
    for b, slot in enumerate((8, 3)):
        assert relative_error(layer.states[slot], expected[b][1][3]) < error
        assert same_bytes(tails[b], layer.merged[b, 1:4, : layer.channels].t())
        assert same_bytes(layer.states[slot], layer.states[(9, 2)[b]])


@pytest.mark.parametrize("mode", ["classic", "intermediate"])
def test_verify_and_padding_rows(small_blocks: None, mode: str) -> None:
    torch.manual_seed(3)
    layer = Layer([-1, 39, -1], 3, -5.0)
    layer.merged[0::2] = torch.nan
    stored = poisoned(8, 3, *layer.states.shape[1:])
    pools = {"conv": layer.conv, "states": layer.states, "stored": stored}
    before = {name: pool.clone() for name, pool in pools.items()}
    out = layer.step(0, 3, **({"stored": stored, "rows": int32(0, 4, 3)} if mode == "intermediate" else {}))
    expected, states = layer.expected(1)
    assert not out[0::2].any() and relative_error(out[1], expected) < 1e-5
    changed = {name: changed_rows(before[name], pool) for name, pool in pools.items()}
    if mode == "classic":
        assert changed == {"conv": {39}, "states": {39}, "stored": set()}
        assert relative_error(layer.states[39], states[-1]) < 1e-5
    else:
        assert changed == {"conv": {39}, "states": set(), "stored": {4}}
        assert relative_error(stored[4], states) < 1e-5


class RingLayer(Layer):
    """A layer in replay mode: its requests' rings begin full of NaN."""

    def __init__(self, slots: list[int], rows: list[int], tokens: int, width: int, **options: Any) -> None:
        super().__init__(slots, tokens, **options)
        self.rows = int32(*rows)
        shapes = {"values": (VALUE_DIM,), "keys": (KEY_DIM,), "gates": (KEY_DIM,)}
        self.ring = {name: poisoned(8, HEADS, width, *dims) for name, dims in shapes.items()}
        self.start, self.length = int32(*[0] * 8), int32(*[0] * 8)

    def replay_step(self, first: Sequence[int], tokens: int) -> Tensor:
        merged = torch.stack([row[p : p + tokens] for row, p in zip(self.merged, first, strict=True)])
        cursors = {"rows": self.rows, "start": self.start[self.rows], "length": self.length[self.rows]}
        return self.step(0, tokens, merged, start_positions=int32(*first), **self.ring, **cursors)

    def commit(self, accepted: Sequence[int], widest: int) -> None:
        pool = self.states, *self.ring.values()
        commit(pool, None, (self.start, self.length), self.rows, int32(*self.slots), int32(*accepted), widest)


@pytest.mark.parametrize(("tokens", "lower_bound"), [(1, None), (3, -5.0)])
def test_replay_equals_the_loop_for_each_accepted_length(tokens: int, lower_bound: float | None) -> None:
    """Steps whose drafts are dropped, rings that begin at columns of their own and fold, a padding row; then a fold of
    what is left."""
    torch.manual_seed(tokens)
    done, width = [0, 0, 0], 2 * tokens + 2
    layer = RingLayer([7, -1, 39], [6, 0, 2], 30, width, lower_bound=lower_bound)
    layer.merged[1], layer.start[6] = torch.nan, 2
    expected = {b: layer.expected(b) for b in (0, 2)}
    pools = {"states": layer.states, **layer.ring}
    before = {name: pool.clone() for name, pool in pools.items()}
    lengths = list(zip(range(1, tokens + 1), range(tokens, 0, -1), strict=True))
    for first, last in (lengths * 9)[: 11 if tokens == 1 else 7]:
        out = layer.replay_step(done, tokens)
        layer.commit((first, 0, last), tokens)
        assert not out[1].any()
        for b, count in ((0, first), (2, last)):
            assert relative_error(out[b], expected[b][0][done[b] : done[b] + tokens]) < 1e-5
            done[b] += count
    assert layer.length[6] and layer.length[2]
    cursors, slots = (layer.start, layer.length), int32(*layer.slots)
    materialize((layer.states, *layer.ring.values()), None, cursors, layer.rows, slots, int32(3, -1, 5))
    for b, slot in ((0, 3), (2, 5)):
        assert relative_error(layer.states[slot], expected[b][1][done[b] - 1]) < 1e-5
    changed = {name: changed_rows(before[name], pool) for name, pool in pools.items()}
    assert changed == {"states": {3, 5, 7, 39}} | {name: {6, 2} for name in layer.ring}


def test_replay_keeps_accuracy_through_strong_and_weak_decays() -> None:
    """Logs of decays of -4000 and -1e-4 in turn, not at once in all channels, and a fold of them: what is left of the
    entries after a strong decay is exact."""
    torch.manual_seed(0)
    layer = RingLayer([7], [3], 17, 16)
    layer.states[7] = torch.randn(layer.states.shape[1:])
    layer.gates = GateWeights(torch.full((HEADS,), 2.0), torch.zeros(HEADS, KEY_DIM))
    step = torch.arange(17)[:, None] + torch.arange(KEY_DIM * HEADS)
    layer.merged[0, :, layer.channels : -HEADS] = torch.where(step % 5 > 0, -11.0, 540.0)
    expected, states = layer.expected(0, layer.states[7])
    for t in range(17):
        out = layer.replay_step([t], 1)
        layer.commit([1], 1)
        assert relative_error(out[0], expected[t : t + 1]) < 5e-6
        if t == 15:
            assert relative_error(layer.states[7], states[15]) < 5e-6


def test_rounded_rings_do_not_depend_on_how_tokens_are_grouped() -> None:
    torch.manual_seed(0)
    layers = [RingLayer([7], [3], 8, 16) for _ in range(2)]
    layers[1].merged, layers[1].weight, layers[1].gates = layers[0].merged, layers[0].weight, layers[0].gates
    for layer in layers:
        layer.ring |= {name: layer.ring[name].half() for name in ("values", "keys")}

    def outputs(layer: RingLayer, tokens: int) -> Tensor:
        steps = []
        for first in range(0, 8, tokens):
            layer.length[3] = first
            steps.append(layer.replay_step([first], tokens)[0])
        return torch.cat(steps)

    assert relative_error(outputs(layers[0], 4), outputs(layers[1], 1)) < 1e-6


def test_a_ring_with_gates_of_heads_is_refused() -> None:
    layer = RingLayer([7], [1], 1, 16)
    layer.ring["gates"] = poisoned(8, HEADS, 16)
    before = layer.conv.clone()
    with pytest.raises(ConfigError, match="gates have 3 dimensions, and raw gates of 4"):
        layer.replay_step([0], 1)
    assert same_bytes(before, layer.conv)
