import math

import pytest
import torch

from hybridrt.kernels.core.chunk_plan import plan_chunks
from hybridrt.kernels.core.records import DeltaInputs, GateWeights, IntermediateStates, Prompts, StateSlots
from hybridrt.kernels.delta_rule.delta_rule import chunk_gated_delta_rule, gdn_gates, recurrent_gated_delta_rule
from tests.support.gdn_loops import random_tokens, relative_error, slow_delta_rule
from tests.support.tree_paths import ancestry

pytestmark = pytest.mark.usefixtures("provider")
STATE_DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Outputs follow float32 arithmetic; a stored state is rounded once, or once a token in the recurrent form (where the
# Triton interpreter truncates to bfloat16, which is twice as coarse).
ERROR = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def make_states(slots=9, dtype=torch.float32, value_heads=4, value_dim=5, key_dim=6):
    return torch.randn(slots, value_heads, value_dim, key_dim).to(dtype)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def test_gates():
    a, b = torch.tensor([[-1.0, 30.0]], dtype=torch.bfloat16), torch.tensor([[0.5, -2.0]], dtype=torch.bfloat16)
    A_log, dt_bias = torch.tensor([0.3, -2.0]), torch.tensor([0.2, 0.1])
    g, beta = gdn_gates(a, b, GateWeights(A_log, dt_bias))
    assert g.dtype == beta.dtype == torch.float32
    expected = [-math.exp(0.3) * math.log1p(math.exp(-0.8)), -math.exp(-2.0) * math.log1p(math.exp(30.1))]
    torch.testing.assert_close(g[0], torch.tensor(expected))
    torch.testing.assert_close(beta[0], torch.tensor([1 / (1 + math.exp(-0.5)), 1 / (1 + math.exp(2.0))]))
    doubled = gdn_gates(a, b, GateWeights(A_log, dt_bias, 2.0))
    assert torch.equal(doubled[0], g) and torch.equal(doubled[1], 2 * beta)


def run_chunks(states, tokens, lengths, computed, read_slots, write_slots, chunk_size):
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    prompts = Prompts(starts, torch.tensor(computed) > 0, plan_chunks(computed, lengths, chunk_size))
    return chunk_gated_delta_rule(DeltaInputs(*tokens.tensors), StateSlots(states, read_slots, write_slots), prompts)


@pytest.mark.parametrize(
    ("state_dtype", "chunk_size", "key_heads"),
    [
        (torch.float32, 3, 1),
        (torch.float32, 16, 4),
        (torch.float32, 64, 2),
        (torch.float16, 64, 1),
        (torch.bfloat16, 16, 4),
    ],
)
def test_chunks_of_ragged_rows(state_dtype, chunk_size, key_heads):
    torch.manual_seed(0)
    lengths, computed = [7, 33, 1, 5, 18], [3, 0, 16, 0, 10]
    read_slots, write_slots = int32(5, 2, 8, -1, 3), int32(5, 7, 1, -1, 3)
    tokens = random_tokens(sum(lengths) + 2, key_heads=key_heads)
    states = make_states(dtype=state_dtype)
    states[2] = states[6] = torch.nan
    before = states.clone()
    out = run_chunks(states, tokens, lengths, computed, read_slots, write_slots, chunk_size)
    start = 0
    for b, length in enumerate(lengths):
        span = slice(start, start + length)
        start += length
        if read_slots[b] < 0:
            assert torch.equal(out[span], torch.zeros_like(out[span]))
            continue
        initial = before[read_slots[b]] if computed[b] else torch.zeros_like(before[0])
        expected, expected_states = slow_delta_rule(initial, tokens[span])
        assert relative_error(out[span], expected) < 2e-6
        assert relative_error(states[write_slots[b]], expected_states[-1]) < ERROR[state_dtype]
    assert torch.equal(out[start:], torch.zeros_like(out[start:]))
    untouched = [slot for slot in range(9) if slot not in write_slots.tolist()]
    assert torch.equal(states[untouched].view(torch.uint8), before[untouched].view(torch.uint8))


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.float16, 4e-3)])
def test_keys_that_repeat_without_decay(dtype, error):
    """The chunk's triangular system is as badly conditioned as it gets: powers of its matrix grow like binomials."""
    torch.manual_seed(0)
    tokens, states, slot = random_tokens(50, dtype=dtype), make_states(), int32(4)
    tokens.k[:] = tokens.k[:1] + 1e-3 * tokens.k
    tokens.g[:], tokens.beta[:] = -1e-4, 0.99
    out = run_chunks(states, tokens, [50], [0], slot, slot, 64)
    expected, expected_states = slow_delta_rule(torch.zeros(4, 5, 6), tokens)
    assert relative_error(out, expected) < error
    assert relative_error(states[4], expected_states[-1]) < error


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 2e-6), (torch.float16, 2e-3)])
def test_tiles_that_fill_their_blocks(dtype, error):
    """Heads as wide as blocks are, which need no mask along a row, and a state cut into several blocks."""
    torch.manual_seed(0)
    lengths, computed, slots = [37, 20], [5, 0], int32(4, 2)
    tokens = random_tokens(sum(lengths), value_heads=2, key_dim=16, value_dim=128, dtype=dtype)
    states = make_states(value_heads=2, value_dim=128, key_dim=16)
    before = states.clone()
    out = run_chunks(states, tokens, lengths, computed, slots, slots, 32)
    for b, span in enumerate((slice(37), slice(37, 57))):
        expected, expected_states = slow_delta_rule(before[slots[b]] * (computed[b] > 0), tokens[span])
        assert relative_error(out[span], expected) < error
        assert relative_error(states[slots[b]], expected_states[-1]) < error


def test_decays_far_below_the_smallest_number():
    """exp of the gates' sum over a chunk underflows: only ratios within the chunk may be formed."""
    torch.manual_seed(0)
    tokens, states, slot = random_tokens(40), make_states(), int32(4)
    tokens.g[:] = -30 * torch.rand_like(tokens.g)
    states[4] = 0
    out = run_chunks(states, tokens, [40], [7], slot, slot, 16)
    expected, expected_states = slow_delta_rule(torch.zeros(4, 5, 6), tokens)
    assert relative_error(out, expected) < 1e-6
    assert relative_error(states[4], expected_states[-1]) < 1e-6


def test_keys_next_to_nothing():
    """What a head writes over the length of its key may be past float16's largest number; its state is not."""
    torch.manual_seed(0)
    tokens, states, slot = random_tokens(40, dtype=torch.float16), make_states(), int32(4)
    tokens.k.mul_(1e-3)
    tokens.v.mul_(150)
    states[4] = 0
    out = run_chunks(states, tokens, [40], [0], slot, slot, 32)
    expected, expected_states = slow_delta_rule(torch.zeros(4, 5, 6), tokens)
    assert relative_error(out, expected) < 2e-3
    assert relative_error(states[4], expected_states[-1]) < 2e-3


@pytest.mark.parametrize("cuts", [[63], [20, 43], [1, 61, 1], [16, 16, 31]])
def test_chunked_prefill_equals_the_whole(cuts):
    torch.manual_seed(0)
    tokens = random_tokens(63)
    whole_states, states = make_states(), make_states()
    slot, start, parts = int32(4), 0, []
    whole = run_chunks(whole_states, tokens, [63], [0], slot, slot, 16)
    for length in cuts:
        parts.append(run_chunks(states, tokens[start : start + length], [length], [start], slot, slot, 16))
        start += length
    assert relative_error(torch.cat(parts), whole) < 2e-6
    assert relative_error(states[4], whole_states[4]) < 2e-6


def test_rows_without_tokens_and_an_empty_batch():
    states = make_states()
    tokens = random_tokens(3)
    before = states.clone()
    out = run_chunks(states, tokens, [0, 3], [5, 0], int32(2, 3), int32(2, 3), 4)
    assert relative_error(out, slow_delta_rule(torch.zeros(4, 5, 6), tokens)[0]) < 2e-6
    assert torch.equal(states[2], before[2])
    assert run_chunks(states, random_tokens(0), [0], [0], int32(-1), int32(-1), 4).shape == (0, 4, 5)


def run_steps(states, tokens, read_slots, write_slots, *intermediate):
    """intermediate: stored states, rows and parents."""
    stored = IntermediateStates(*intermediate) if intermediate else None
    return recurrent_gated_delta_rule(DeltaInputs(*tokens.tensors), StateSlots(states, read_slots, write_slots, stored))


@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("key_heads", [1, 4])
def test_recurrent_steps_with_padding(state_dtype, count, key_heads):
    torch.manual_seed(0)
    read_slots, write_slots = int32(6, -1, 1), int32(2, -1, 1)
    tokens = random_tokens(3, count, key_heads=key_heads)
    states = make_states(dtype=state_dtype)
    states[5] = torch.nan
    before = states.clone()
    out = run_steps(states, tokens, read_slots, write_slots)
    for b in (0, 2):
        expected, expected_states = slow_delta_rule(before[read_slots[b]], tokens[b])
        assert relative_error(out[b], expected) < ERROR[state_dtype]
        assert relative_error(states[write_slots[b]], expected_states[-1]) < ERROR[state_dtype]
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    untouched = [0, 3, 4, 5, 6, 7, 8]
    assert torch.equal(states[untouched].view(torch.uint8), before[untouched].view(torch.uint8))


@pytest.mark.parametrize("state_dtype", STATE_DTYPES)
def test_verified_states_equal_single_steps_for_every_accepted_length(state_dtype):
    torch.manual_seed(0)
    count, slots, rows = 4, int32(3, -1, 7), int32(2, 3, 1)
    tokens = random_tokens(3, count)
    states = make_states(dtype=state_dtype)
    before, stepwise = states.clone(), states.clone()
    stored = torch.full((4, count, 4, 5, 6), torch.nan).to(state_dtype)
    verified = run_steps(states, tokens, slots, slots, stored, rows)
    assert torch.equal(states, before)
    for t in range(count):
        out = run_steps(stepwise, tokens[:, t : t + 1], slots, slots)
        torch.testing.assert_close(verified[:, t], out[:, 0], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(stored[[2, 1], t], stepwise[[3, 7]], rtol=1e-6, atol=1e-6)
    assert stored[[0, 3]].isnan().all()


def test_a_tree_starts_each_node_from_its_parent():
    torch.manual_seed(0)
    parents = torch.tensor([[-1, 0, 0, 1, 2], [-1, 0, 1, 2, 2]], dtype=torch.int32)
    tokens, states, slots, rows = random_tokens(2, 5), make_states(), int32(4, 2), int32(1, 3)
    stored = torch.full((4, 5, 4, 5, 6), torch.nan)
    out = run_steps(states, tokens, slots, slots, stored, rows, parents)
    for b in range(2):
        for node in range(5):
            expected, expected_states = slow_delta_rule(states[slots[b]], tokens[b][ancestry(parents[b], node)])
            assert relative_error(out[b, node], expected[-1]) < 2e-6
            assert relative_error(stored[rows[b], node], expected_states[-1]) < 2e-6


def test_raw_gates_beside_weights_are_made_within():
    torch.manual_seed(0)
    (q, k, v, *_), (a, b) = random_tokens(7).tensors, torch.randn(7, 8).half().chunk(2, -1)
    weights, slot = GateWeights(torch.randn(4) - 4, torch.randn(4), 2.0), int32(3)
    made, raw = DeltaInputs(q, k, v, *gdn_gates(a, b, weights)), DeltaInputs(q, k, v, a, b)
    prompts = Prompts(int32(0, 7), torch.tensor([True]), plan_chunks([1], [7], 4))
    for rule, more in ((chunk_gated_delta_rule, (prompts,)), (recurrent_gated_delta_rule, ())):
        states, found = make_states(), []
        for tokens, given in ((made, ()), (raw, (weights,))):
            after = StateSlots(states.clone(), slot, slot)
            tokens = tokens if more else DeltaInputs(*(t[None] for t in tokens))
            found.append((rule(tokens, after, *more, *given), after.states))
        torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-6)


def test_keys_and_queries_of_zero_stay_finite():
    tokens, states, slot = random_tokens(1, 2), make_states(), int32(3)
    tokens.q.zero_(), tokens.k.zero_()
    assert run_steps(states, tokens, slot, slot).eq(0).all()
    assert run_chunks(states, tokens[0], [2], [0], slot, slot, 4).eq(0).all()
    assert states.isfinite().all()


def test_decode_continues_a_prefill():
    torch.manual_seed(0)
    tokens, states, slot = random_tokens(21), make_states(), int32(6)
    run_chunks(states, tokens[:20], [20], [0], slot, slot, 8)
    last = run_steps(states, tokens[None, 20:], slot, slot)
    expected, expected_states = slow_delta_rule(torch.zeros(4, 5, 6), tokens)
    assert relative_error(last[0, 0], expected[-1]) < 2e-6
    assert relative_error(states[6], expected_states[-1]) < 2e-6
