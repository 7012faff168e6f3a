"""Prompts in chunks, and rings, through gates from 0 to -inf, against the loops over tokens in float64.

A difference of running sums of gates loses what a strong gate before both has rounded off: these errors are those of
float32 alone. No test has a gate that is only strong: what two tokens after it have in common must be there to be lost.
"""

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from hybridrt.kernels.core.chunk_plan import decay_sums, plan_chunks
from hybridrt.kernels.core.records import DeltaInputs, Prompts, StateSlots
from hybridrt.kernels.delta_rule.delta_rule import chunk_gated_delta_rule, recurrent_gated_delta_rule
from hybridrt.kernels.mamba import mamba2_scan_triton
from tests.kernels import test_gdn_replay, test_mamba1, test_mamba2_decode, test_mamba2_scan
from tests.support.gdn_loops import Tokens, random_tokens, slow_delta_rule
from tests.support.levels import sweep
from tests.support.mamba1_oracle import selective_inputs, selective_loop
from tests.support.mamba2_oracle import ScanInputs, close, int32, scan_inputs, scan_loop
from tests.support.ring_steps import materialize

pytestmark = pytest.mark.usefixtures("provider")
GATES = ["closed", "-1e6", "mixed", "-1e4", "moderate", "-90"]
KEY_DIM = VALUE_DIM = 16


def gates(what: str, *shape: int) -> Tensor:
    """Weak gates, of which some have the named strength; "moderate": all of them down to -100, the sum of a chunk far
    past what float32 resolves; "mixed": of all strengths."""
    weak, some = -0.1 * torch.rand(shape), torch.rand(shape) < 0.06
    if what == "moderate":
        return -100.0 * torch.rand(shape).square()
    if what == "mixed":
        some, strength = torch.rand(shape) < 0.3, -(10.0 ** (9 * torch.rand(shape) - 1))
        return torch.where(some, torch.where(torch.rand(shape) < 0.1, -math.inf, strength), weak)
    return torch.where(some, -math.inf if what == "closed" else float(what), weak)


class Delta(NamedTuple):
    """A kind of delta rule: heads of keys and of values, and whether channels decay apart."""

    key_heads: int
    value_heads: int
    channels: bool

    def tokens(self, count: int, what: str, dtype: torch.dtype = torch.float32) -> Tokens:
        heads = {"key_heads": self.key_heads, "value_heads": self.value_heads}
        tokens = random_tokens(count, **heads, key_dim=KEY_DIM, value_dim=VALUE_DIM, dtype=dtype)
        tokens.g = gates(what, count, self.value_heads, *[KEY_DIM] * self.channels)
        return tokens

    def states(self, slots: int) -> Tensor:
        return torch.randn(slots, self.value_heads, VALUE_DIM, KEY_DIM)


DELTAS = {"gated delta net": Delta(2, 4, False), "kimi delta attention": Delta(2, 2, True)}
EACH_DELTA = pytest.mark.parametrize("delta", DELTAS.values(), ids=DELTAS.keys())


def run(states: Tensor, tokens: Tokens, lengths: list[int], computed: list[int], chunk_size: int) -> Tensor:
    """Rows in the slots 1, 2, ..."""
    starts, slots = torch.tensor([0, *lengths]).cumsum(0).int(), int32(*range(1, len(lengths) + 1))
    prompts = Prompts(starts, torch.tensor(computed) > 0, plan_chunks(computed, lengths, chunk_size))
    return chunk_gated_delta_rule(DeltaInputs(*tokens.tensors), StateSlots(states, slots, slots), prompts)


@EACH_DELTA
@pytest.mark.parametrize(
    ("what", "chunk_size"), [*sweep([(what, size) for what in GATES for size in (64, 32)], 3), ("closed", 7)]
)
def test_delta_rules_equal_the_loop(delta: Delta, what: str, chunk_size: int) -> None:
    """Odd lengths, whose first chunk ends where those of the prefix do."""
    torch.manual_seed(0)
    lengths, computed = [71, 33], [5, 64]
    tokens, states = delta.tokens(sum(lengths), what), delta.states(3)
    before = states.clone()
    out, start = run(states, tokens, lengths, computed, chunk_size), 0
    for slot, length in enumerate(lengths, 1):
        expected, after = slow_delta_rule(before[slot], tokens[start : start + length])
        close(out[start : start + length], expected, 7e-7)
        close(states[slot], after[-1], 7e-7)
        start += length


def test_strong_gates_on_both_sides_of_a_chunk_s_middle() -> None:
    """Kimi Delta Attention's kernel cuts there: sums from the middle have them in common."""
    torch.manual_seed(0)
    delta = DELTAS["kimi delta attention"]
    tokens, states = delta.tokens(64, "-90"), delta.states(2)
    tokens.g = -0.1 * torch.rand(tokens.g.shape)
    tokens.g[30], tokens.g[33] = -59.0, -60.0
    expected, after = slow_delta_rule(states[1], tokens)
    close(run(states, tokens, [64], [64], 64), expected, 7e-7)
    close(states[1], after[-1], 7e-7)


@EACH_DELTA
@pytest.mark.parametrize("what", sweep(["mixed", "closed", "moderate"], 2))
def test_prompts_cut_anywhere_equal_steps_of_one_token(delta: Delta, what: str) -> None:
    torch.manual_seed(1)
    tokens, slot = delta.tokens(45, what), int32(1)
    states = delta.states(2)
    stepwise, parts, start = states.clone(), [], 0
    step = recurrent_gated_delta_rule(DeltaInputs(*(t[None] for t in tokens.tensors)), StateSlots(stepwise, slot, slot))
    for length in (20, 1, 24):
        parts.append(run(states, tokens[start : start + length], [length], [start + 1], 32))
        start += length
    close(torch.cat(parts), step[0], 1e-6)
    close(states[1], stepwise[1], 1e-6)


@EACH_DELTA
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_nothing_of_before_a_closed_gate_comes_back(delta: Delta, dtype: torch.dtype, provider: str) -> None:
    """Not even of values ten thousand times as large, in a chunk that goes on and in the state; and tokens before it
    keep what they have."""
    if provider != "torch" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies bfloat16 matrices wrongly")
    torch.manual_seed(0)
    tokens, states = delta.tokens(50, "-90", dtype), delta.states(2)
    tokens.g[19] = -math.inf
    tokens.v[:19] *= 1e4
    states[1] *= 1e4
    expected, after = slow_delta_rule(states[1], tokens)
    out = run(states, tokens, [50], [64], 64)
    error = {torch.float16: 5e-3, torch.bfloat16: 3e-2}[dtype] if provider != "torch" else dtype.itemsize * 2e-3
    close(out[:19], expected[:19], error)
    close(out[19:], expected[19:], error)
    close(states[1], after[-1], error)


def test_a_step_of_several_tokens_with_a_ring() -> None:
    """The ring's entries and the step's own."""
    torch.manual_seed(0)
    ring, tokens = test_gdn_replay.Ring(16), random_tokens(1, 12)
    tokens.g = gates("mixed", 1, 12, 4)
    before = ring.states[5].clone()
    expected, after = slow_delta_rule(before, tokens[0])
    for start in range(0, 12, 4):
        out = ring.step(tokens[:, start : start + 4], int32(5), int32(2), int32(4))
        close(out[0], expected[start : start + 4], 1e-6)
    ring.materialize(int32(5), int32(6), int32(2))
    close(ring.states[6], after[-1], 1e-6)


RATES, TIMES = torch.tensor([-1e-3, -1e4, -30.0, -math.inf]), torch.tensor([-2.0, -14.0, 1.0, -3.0])


def mamba2_inputs(*leading: int) -> ScanInputs:
    """Heads with rates as different as can be. Time steps of the second are next to 0, or 1, which closes its state."""
    inputs = scan_inputs(*leading)
    inputs.A, inputs.dt_bias = RATES, TIMES
    inputs.dt[..., 1] = torch.where(torch.rand(leading) < 0.1, 14.0, inputs.dt[..., 1])
    return inputs


@pytest.fixture(params=["two launches", "five launches"])
def few_tokens(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "five launches":
        monkeypatch.setattr(mamba2_scan_triton, "FEW_TOKENS", 0)


@pytest.mark.parametrize("chunk_size", sweep([64, 17, 256], 2))
def test_mamba2_equals_the_loop(few_tokens: None, chunk_size: int) -> None:
    torch.manual_seed(0)
    new, inputs, states = [90, 31], mamba2_inputs(121), torch.randn(3, 4, 3, 5)
    before, start = states.clone(), 0
    out = test_mamba2_scan.scan(inputs, states, [5, 64], new, [1, 2], chunk_size=chunk_size)
    for slot, length in enumerate(new, 1):
        expected, after = scan_loop(inputs[start : start + length], before[slot])
        for head in range(4):  # one may drown in another
            close(out[start : start + length, head], expected[:, head], 1e-6)
            close(states[slot, head], after[-1, head], 1e-6)
        start += length


def test_fixed_rates_equal_the_loop() -> None:
    """Lightning attention and simple gated linear attention."""
    torch.manual_seed(0)
    form, inputs, states = test_mamba2_scan.FIXED, mamba2_inputs(50), torch.randn(2, 4, 3, 5)
    expected, after = scan_loop(inputs, states[1], *form.terms)
    out = test_mamba2_scan.scan(inputs, states, [5], [50], [1], chunk_size=32, **form.changed)
    close(out, expected, 1e-6)
    close(states[1], after[-1], 1e-6)


def test_mamba1_equals_the_loop() -> None:
    torch.manual_seed(0)
    inputs, states = selective_inputs(50), torch.randn(2, *test_mamba1.STATE)
    inputs.A[:, ::2], inputs.A[1:3, 1] = -1e5, -math.inf
    expected, after = selective_loop(inputs, states[1])
    out = test_mamba1.scan(inputs, states, [5], [50], [1], chunk_size=16)
    close(out, expected, 2e-6)
    close(states[1], after[-1], 2e-6)


@pytest.mark.parametrize("tokens", [1, 3])
def test_mamba2_with_a_ring(tokens: int) -> None:
    """Steps that read it, and a fold of what is in it."""
    torch.manual_seed(0)
    layer = test_mamba2_decode.Layer([7], 12)
    layer.head_terms |= {"A": RATES, "dt_bias": TIMES}
    channels = test_mamba2_decode.CHANNELS
    layer.merged[0, :, channels + 1] = torch.where(torch.rand(12) < 0.3, 14.0, layer.merged[0, :, channels + 1])
    (expected, after), outs = layer.expected(0), []
    for start in range(0, 12, tokens):
        outs.append(layer.replay_step([start], tokens, [3])[0])
        layer.commit([3], (tokens,), 1)
    pool, cursors = (layer.states, *layer.ring.values()), (layer.start, layer.length)
    materialize(pool, RATES, cursors, int32(3), int32(7), int32(5))
    for head in range(4):
        close(torch.cat(outs)[:, head], expected[:, head], 3e-6)
        close(layer.states[5, head], after[-1, head], 3e-6)


def test_sums_of_strong_gates_keep_what_is_between_two_tokens() -> None:
    torch.manual_seed(0)
    given = gates("mixed", 256)
    sums = decay_sums(given, 0)
    for i, j in torch.randint(256, (200, 2)).sort(1, descending=True).values.tolist():
        between = given[j + 1 : i + 1].double().sum().clamp(min=-104)
        torch.testing.assert_close((sums[i] - sums[j]).clamp(min=-104), between, rtol=0, atol=1e-10)
