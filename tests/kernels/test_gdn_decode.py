"""The fused Gated Delta Net step against the conv's and the delta rule's loops, in its three state modes."""

import pytest
import torch

from hybridrt.base.errors import ConfigError
from hybridrt.kernels.delta_rule.decode import gdn_decode, split_qkv
from hybridrt.kernels.delta_rule.delta_rule import gdn_gates
from hybridrt.kernels.state.causal_conv1d import conv_window
from tests.support.flat import flat
from tests.support.gdn_loops import Tokens, relative_error, slow_delta_rule
from tests.support.levels import sweep
from tests.support.mamba2_oracle import changed_rows, conv_loop, int32, poisoned, same_bytes
from tests.support.ring_steps import commit
from tests.support.step_trees import check_draft_tree, check_windows_of_a_chain

pytestmark = pytest.mark.usefixtures("provider")
KEY_HEADS, VALUE_HEADS, TAPS = 2, 4, 4


@pytest.fixture
def small_blocks(monkeypatch):
    """A head's state is split among programs, and in each of them into tiles."""
    from hybridrt.kernels.delta_rule import decode_classic_triton

    monkeypatch.setattr(decode_classic_triton, "TILE_BYTES", 64)


class Layer:
    """Weights of one layer, its pools, and the merged projections of requests from position 0. dims: of keys and
    values. Beta is doubled: a step that loses the factor shows."""

    def __init__(self, slots, tokens, conv_width=16, ring_width=16, state_dtype=torch.float32, dims=(6, 5)):
        self.slots, (key_dim, value_dim) = slots, dims
        self.channels = 2 * KEY_HEADS * key_dim + VALUE_HEADS * value_dim
        self.merged = torch.randn(len(slots), tokens, self.channels + 2 * VALUE_HEADS)
        self.weights = {
            "weight": torch.randn(self.channels, TAPS), "bias": torch.randn(self.channels),
            "A_log": torch.randn(VALUE_HEADS) - 4, "dt_bias": torch.randn(VALUE_HEADS),
            "beta_scale": 2.0,
        }  # fmt: skip
        self.conv = poisoned(40, self.channels, conv_width)
        self.states = poisoned(40, VALUE_HEADS, value_dim, key_dim, dtype=state_dtype)
        for slot in slots:
            if slot > 0:
                self.conv[slot], self.states[slot] = 0.0, 0.0
        self.ring = {
            "values": poisoned(8, VALUE_HEADS, ring_width, value_dim),
            "keys": poisoned(8, KEY_HEADS, ring_width, key_dim),
            "gates": poisoned(8, VALUE_HEADS, ring_width),
        }
        self.start, self.length = int32(*[0] * 8), int32(*[0] * 8)

    @property
    def gate_weights(self):
        return {name: self.weights[name] for name in ("A_log", "dt_bias", "beta_scale")}

    def step(self, first, tokens, **changed):
        merged = torch.stack([row[p : p + tokens] for row, p in zip(self.merged, first, strict=True)])
        qkv, a, b = merged.split([self.channels, VALUE_HEADS, VALUE_HEADS], dim=-1)
        slots = int32(*self.slots)
        pools = {"conv": self.conv, "states": self.states, "read_state_slots": slots, "write_state_slots": slots}
        terms = {**self.weights, **pools, "start_positions": int32(*first), **changed}
        return flat(gdn_decode, qkv=qkv, a=a, b=b, **terms)

    def replay_step(self, first, tokens, rows):
        row = int32(*rows)
        return self.step(first, tokens, rows=row, start=self.start[row], length=self.length[row], **self.ring)

    def commit(self, rows, accepted, widest):
        pool = self.states, *self.ring.values()
        commit(pool, None, (self.start, self.length), int32(*rows), int32(*self.slots), int32(*accepted), widest)

    def expected(self, row):
        """Outputs and states after every token of a request, from the loops."""
        qkv, a, b = self.merged[row].split([self.channels, VALUE_HEADS, VALUE_HEADS], dim=-1)
        conved = conv_loop(qkv, self.weights["weight"], self.weights["bias"])
        gates = flat(gdn_gates, a=a, b=b, **self.gate_weights)
        tokens = Tokens(*split_qkv(conved, self.states), *gates)
        return slow_delta_rule(torch.zeros(self.states.shape[1:]), tokens)

    def conv_tail(self, row, end):
        return torch.cat([torch.zeros(TAPS - 1, self.channels), self.merged[row, :end, : self.channels]])[end:].t()


@pytest.mark.parametrize(("state_dtype", "error"), [(torch.float32, 1e-5), (torch.float16, 5e-3)])
def test_classic_decode_equals_the_loop(small_blocks, state_dtype, error):
    torch.manual_seed(0)
    layer = Layer([7, 39], 4, state_dtype=state_dtype)
    expected = [layer.expected(b) for b in range(2)]
    for t in range(4):
        out = layer.step([t, t], 1)
        for b in range(2):
            assert relative_error(out[b], expected[b][0][t : t + 1]) < error
            assert relative_error(layer.states[layer.slots[b]], expected[b][1][t]) < error


@pytest.mark.parametrize("dims", [(6, 5), (24, 20)])
def test_classic_decode_to_other_slots(dims):
    torch.manual_seed(1)
    layer = Layer([7, 39], 2, dims=dims)
    layer.step([0, 0], 1)
    before = layer.conv.clone(), layer.states.clone()
    layer.step([1, 1], 1, write_state_slots=int32(8, 3))
    assert changed_rows(before[0], layer.conv) == changed_rows(before[1], layer.states) == {3, 8}
    for b, slot in enumerate((8, 3)):
        assert relative_error(layer.states[slot], layer.expected(b)[1][1]) < 1e-5
        assert same_bytes(conv_window(layer.conv, int32(slot), int32(2), TAPS)[0], layer.conv_tail(b, 2))


@pytest.mark.parametrize("mode", ["intermediate", "replay"])
@pytest.mark.parametrize("tokens", [1, 3])
def test_verify_equals_the_loop_for_each_accepted_length(mode, tokens):
    torch.manual_seed(tokens)
    rows, done = [6, 2], [0, 0]
    width = 2 * tokens + 2
    layer = Layer([7, 39], 30, ring_width=width)
    stored = poisoned(8, tokens, *layer.states.shape[1:])
    expected = [layer.expected(b) for b in range(2)]
    lengths = list(zip(range(1, tokens + 1), range(tokens, 0, -1), strict=True))
    for accepted in lengths * 5 if (mode, tokens) == ("replay", 1) else lengths:
        if mode == "replay":
            out = layer.replay_step(done, tokens, rows)
            layer.commit(rows, accepted, tokens)
        else:
            out = layer.step(done, tokens, stored=stored, rows=int32(*rows))
        for b, count in enumerate(accepted):
            assert relative_error(out[b], expected[b][0][done[b] : done[b] + tokens]) < 1e-5
            done[b] += count
            if mode == "intermediate":
                layer.states[layer.slots[b]] = stored[rows[b], count - 1]
                assert relative_error(layer.states[layer.slots[b]], expected[b][1][done[b] - 1]) < 1e-5


def test_a_draft_tree_equals_the_loop_along_each_path(small_blocks):
    """The conv's ring is too narrow for the nodes."""

    def near(got, want):
        assert relative_error(got, want) < 1e-5

    torch.manual_seed(4)
    check_draft_tree(Layer([7, 39], 6, conv_width=4), TAPS, near)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "vectors", "block_v", "block_k", "dims"),
    [
        (1, 2, 16, 16, (24, 20)),
        (1, 2, 16, 32, (24, 20)),
        (1, 16, 16, 16, (32, 32)),
        (2, 16, 16, 16, (24, 20)),
        (8, 16, 32, 32, (20, 24)),
        (16, 32, 16, 16, (32, 16)),
    ],
)
def test_replay_streams_in_tiles(provider, monkeypatch, tokens, vectors, block_v, block_k, dims):
    """Several tiles of V and of K, whole or with ragged ends, and vectors one by one or by tensor cores."""
    if provider != "triton-shuffled":
        pytest.skip("tiles are the kernel's, and one order is enough")
    from hybridrt.kernels.delta_rule import decode_ring_few_rows_triton as gdn_few_triton
    from hybridrt.kernels.delta_rule import decode_ring_triton

    monkeypatch.setattr(gdn_few_triton, "FEW_PROGRAMS", 0)
    tile = {"BLOCK_N": vectors, "BLOCK_V": block_v, "BLOCK_K": block_k, "STAGES": 2, "num_warps": 4}
    monkeypatch.setattr(decode_ring_triton, "stream_tile", lambda *_: tile)
    torch.manual_seed(tokens)
    rows, done, width = [6, 2], [0, 0], max(4, 2 * tokens)
    layer = Layer([7, 39], 5 * tokens, conv_width=32, ring_width=width, dims=dims)
    expected = [layer.expected(b) for b in range(2)]
    for accepted in ([tokens, 1], [(tokens + 1) // 2, tokens], [1, 1], [1, 1]):
        out = layer.replay_step(done, tokens, rows)
        layer.commit(rows, accepted, tokens)
        for b, count in enumerate(accepted):
            assert relative_error(out[b], expected[b][0][done[b] : done[b] + tokens]) < 1e-5
            done[b] += count


@pytest.mark.parametrize("few", sweep([True, False], 2))
def test_replay_of_one_token_in_one_launch_and_in_two(provider, monkeypatch, few):
    """Tiles with ragged ends, through a fold, next to a row that is padding. What one step writes, and nothing else, is
    the same."""
    if not provider.startswith("triton"):
        pytest.skip("one operation of the reference")
    from hybridrt.kernels.delta_rule import decode_classic_triton
    from hybridrt.kernels.delta_rule import decode_ring_few_rows_triton as gdn_few_triton

    monkeypatch.setattr(gdn_few_triton, "FEW_PROGRAMS", 512 if few else 0)
    monkeypatch.setattr(decode_classic_triton, "TILE_BYTES", 512)  # four rows of a state in float32
    torch.manual_seed(5)
    layer = Layer([7, -1, 39], 6, ring_width=4, dims=(24, 10))
    layer.merged[1] = torch.nan
    expected = {b: layer.expected(b)[0] for b in (0, 2)}
    for t in range(6):
        before = {name: pool.clone() for name, pool in layer.ring.items()}
        out = layer.replay_step([t, 0, t], 1, [6, 0, 2])
        assert not out[1].any()
        for b in (0, 2):
            assert relative_error(out[b], expected[b][t : t + 1]) < 1e-5
        assert all(changed_rows(before[name], pool) == {2, 6} for name, pool in layer.ring.items())
        layer.commit([6, 0, 2], [1, 0, 1], 1)


def test_replay_keeps_accuracy_through_strong_and_weak_decays():
    """Logs of decays from -40 to -1e-4 next to each other: sums of them lose nothing that the later ones need."""
    torch.manual_seed(0)
    layer = Layer([7], 16)
    layer.states[7] = torch.randn(layer.states.shape[1:])
    layer.weights["A_log"], layer.weights["dt_bias"] = torch.full((VALUE_HEADS,), 2.0), torch.zeros(VALUE_HEADS)
    layer.merged[0, :, -VALUE_HEADS * 2 : -VALUE_HEADS] = torch.linspace(5.5, -11, 15).repeat(2)[:16, None]
    qkv, a, b = layer.merged[0].split([layer.channels, VALUE_HEADS, VALUE_HEADS], dim=-1)
    tokens = Tokens(
        *split_qkv(conv_loop(qkv, layer.weights["weight"], layer.weights["bias"]), layer.states),
        *flat(gdn_gates, a=a, b=b, **layer.gate_weights),
    )
    expected, _ = slow_delta_rule(layer.states[7].clone(), tokens)
    for t in range(16):
        out = layer.replay_step([t], 1, [3])
        layer.length[3] += 1
        assert relative_error(out[0], expected[t : t + 1]) < 1e-6


@pytest.mark.parametrize("mode", ["classic", "intermediate", "replay"])
def test_padding_rows_leave_no_trace(small_blocks, mode):
    torch.manual_seed(3)
    layer = Layer([-1, 7, -1], 4)
    layer.merged[0::2] = torch.nan
    stored = poisoned(8, 2, *layer.states.shape[1:])
    pools = {"conv": layer.conv, "states": layer.states, "stored": stored, **layer.ring}
    before = {name: pool.clone() for name, pool in pools.items()}
    if mode == "replay":
        out = layer.replay_step([0, 0, 0], 2, [0, 4, 3])
    else:
        changed = {"stored": stored, "rows": int32(0, 4, 3)} if mode == "intermediate" else {}
        out = layer.step([0, 0, 0], 2, **changed)
    assert not out[0::2].any()
    assert relative_error(out[1], layer.expected(1)[0][:2]) < 1e-5
    ring = {4} if mode == "replay" else set()
    assert {name: changed_rows(before[name], pool) for name, pool in pools.items()} == {
        "conv": {7},
        "states": {7} if mode == "classic" else set(),
        "stored": {4} if mode == "intermediate" else set(),
        "values": ring,
        "keys": ring,
        "gates": ring,
    }


def test_narrow_rings_are_refused():
    layer = Layer([7], 8, conv_width=4, ring_width=3)
    with pytest.raises(ConfigError, match="conv ring of 4"):
        layer.step([0], 2)
    layer.conv = torch.zeros(40, layer.channels, 8)
    with pytest.raises(ConfigError, match="3 columns cannot take a step of 4"):
        layer.replay_step([0], 4, [1])
    assert not layer.conv.any()


def test_windows_of_a_chain_are_refused():
    check_windows_of_a_chain(Layer([7, 39], 2), TAPS)


def test_a_fused_step_s_conv_must_end_in_silu():
    layer = Layer([7, 39], 2)
    before = layer.conv.clone(), layer.states.clone()
    with pytest.raises(ConfigError, match="ends in SiLU, not in None"):
        layer.step([0, 0], 1, activation=None)
    assert same_bytes(layer.conv, before[0]) and same_bytes(layer.states, before[1])


@pytest.mark.parametrize("mode", ["classic", "replay"])
@pytest.mark.parametrize("tokens", [1, 2])
def test_inputs_after_a_conv_are_taken_as_they_are(mode, tokens):
    """The same outputs and states as with a conv that these inputs went through before; no ring of a conv is read."""
    torch.manual_seed(6)
    layer = Layer([7, -1, 39], 8, ring_width=6)
    layer.merged[1] = torch.nan
    none = {"weight": torch.ones(layer.channels, 0), "bias": None, "activation": None}
    expected = {b: layer.expected(b) for b in (0, 2)}
    qkv = layer.merged[..., : layer.channels]
    for b in (0, 2):
        qkv[b] = conv_loop(qkv[b].clone(), layer.weights["weight"], layer.weights["bias"])
    layer.weights |= none
    layer.conv = poisoned(1, layer.channels, 1)
    stored = poisoned(8, tokens, *layer.states.shape[1:])
    for t in range(0, 8, tokens):
        if mode == "replay":
            out = layer.replay_step([t, 0, t], tokens, [6, 0, 2])
            layer.commit([6, 0, 2], [tokens, 0, tokens], tokens)
        else:
            extra = {} if tokens == 1 else {"stored": stored, "rows": int32(6, 0, 2)}
            out = layer.step([t, 0, t], tokens, **extra)
        assert not out[1].any()
        for b, row in ((0, 6), (2, 2)):
            assert relative_error(out[b], expected[b][0][t : t + tokens]) < 1e-5
            if mode == "classic" and tokens > 1:
                layer.states[layer.slots[b]] = stored[row, -1]


def test_a_conv_without_taps_and_with_silu_is_refused():
    layer = Layer([7], 1)
    before = layer.states.clone()
    layer.weights["weight"] = torch.ones(layer.channels, 0)
    with pytest.raises(ConfigError, match="no activation without a conv"):
        layer.step([0], 1)
    assert same_bytes(layer.states, before)
