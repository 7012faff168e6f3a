"""State replay against the token-by-token loop: outputs, folded states, the ring and what must not change."""

import pytest
import torch

from hybridrt.kernels.core.records import DeltaInputs, StateRing, StateSlots
from hybridrt.kernels.delta_rule.decode_ring import gdn_replay
from tests.support.gdn_loops import random_tokens, relative_error, slow_delta_rule
from tests.support.ring_steps import commit, materialize

pytestmark = pytest.mark.usefixtures("provider")
KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 4, 6, 5
SLOTS, ROWS = 8, 5


class Ring:
    """Checkpoints, a ring full of NaN and zeroed cursors of one layer."""

    def __init__(self, width, state_dtype=torch.float32, ring_dtype=torch.float32):
        self.width = width
        self.states = torch.randn(SLOTS + 1, VALUE_HEADS, VALUE_DIM, KEY_DIM).to(state_dtype)
        self.values = torch.full((ROWS + 1, VALUE_HEADS, width, VALUE_DIM), torch.nan, dtype=ring_dtype)
        self.keys = torch.full((ROWS + 1, KEY_HEADS, width, KEY_DIM), torch.nan, dtype=ring_dtype)
        self.gates = torch.full((ROWS + 1, VALUE_HEADS, width), torch.nan)
        self.start = torch.zeros(ROWS + 1, dtype=torch.int32)
        self.length = torch.zeros(ROWS + 1, dtype=torch.int32)

    @property
    def tensors(self):
        return self.states, self.values, self.keys, self.gates

    def step(self, tokens, slots, rows, accepted):
        start, length = (cursor[rows.clamp(min=0)] for cursor in (self.start, self.length))
        ring = StateRing(self.values, self.keys, self.gates, rows, start, length)
        out = gdn_replay(DeltaInputs(*tokens.tensors), StateSlots(self.states, slots, slots), ring)
        cursors, widest = (self.start, self.length), tokens.q.shape[1]
        commit(self.tensors, None, cursors, rows, slots, torch.tensor(accepted).int(), widest)
        return out

    def materialize(self, slots, to_slots, rows):
        materialize(self.tensors, None, (self.start, self.length), rows, slots, to_slots)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def committed(histories, tokens, accepted):
    """Append the first accepted[b] of the step's tokens to each row's history (a list of token lists)."""
    for b, count in enumerate(accepted):
        histories[b] += [tokens[b][t : t + 1] for t in range(count)]


def joined(pieces):
    first = pieces[0]
    return first.__class__(*(torch.cat(parts) for parts in zip(*(piece.tensors for piece in pieces), strict=True)))


@pytest.mark.parametrize(("count", "width"), [(1, 2), (1, 5), (3, 8), (5, 16)])
def test_steps_with_any_accepted_length_follow_the_loop(count, width):
    torch.manual_seed(0)
    ring, slots, rows = Ring(width), int32(7, -1, 2), int32(1, 0, 4)
    initial = ring.states.clone()
    histories = [[], [], []]
    generator = torch.Generator().manual_seed(count * width)
    for _ in range(6):
        tokens = random_tokens(3, count)
        accepted = torch.randint(1, count + 1, (3,), generator=generator).tolist()
        accepted[1] = 0
        out = ring.step(tokens, slots, rows, accepted)
        for b in (0, 2):
            path = joined([*histories[b], tokens[b]])
            expected, _ = slow_delta_rule(initial[slots[b]], path)
            assert relative_error(out[b], expected[-count:]) < 5e-6
        assert torch.equal(out[1], torch.zeros_like(out[1]))
        committed(histories, tokens, accepted)
        assert int((ring.length + count).max()) <= width
    ring.materialize(slots[[0, 2]], int32(3, 5), rows[[0, 2]])
    for b, slot in ((0, 3), (2, 5)):
        assert relative_error(ring.states[slot], slow_delta_rule(initial[slots[b]], joined(histories[b]))[1][-1]) < 5e-6
    for untouched in (0, 1, 4, 6, 8):
        assert torch.equal(ring.states[untouched], initial[untouched])
    for pool in (ring.values, ring.keys, ring.gates):
        assert pool[[0, 2, 3, 5]].isnan().all()


@pytest.mark.parametrize("ring_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_step_of_several_tokens_equals_single_steps(ring_dtype, state_dtype):
    torch.manual_seed(0)
    count, slots, rows = 4, int32(3, 6), int32(2, 5)
    together = Ring(16, state_dtype, ring_dtype)
    prefix = random_tokens(2, 3, dtype=ring_dtype)
    together.step(prefix, slots, rows, [3, 1])
    single = Ring(16, state_dtype, ring_dtype)
    for name in ("states", "values", "keys", "gates", "start", "length"):
        getattr(single, name).copy_(getattr(together, name))
    tokens = random_tokens(2, count, dtype=ring_dtype)
    verified = together.step(tokens, slots, rows, [count, count])
    for t in range(count):
        out = single.step(tokens[:, t : t + 1], slots, rows, [1, 1])
        torch.testing.assert_close(verified[:, t], out[:, 0], rtol=1e-5, atol=1e-5)
    for name in ("values", "keys", "gates", "start", "length"):
        torch.testing.assert_close(getattr(together, name), getattr(single, name), equal_nan=True, rtol=1e-5, atol=1e-5)


def test_the_checkpoint_is_written_only_when_the_ring_is_nearly_full():
    torch.manual_seed(0)
    width, ring, slots, rows = 8, Ring(8), int32(4), int32(3)
    before, folds = ring.states.clone(), []
    for step in range(16):
        will_fold = int(ring.length[3]) + 2 > width  # one token now and one in the next step
        checkpoint = ring.states.clone()
        ring.step(random_tokens(1, 1), slots, rows, [1])
        changed = not torch.equal(ring.states[4], checkpoint[4])
        assert changed == will_fold
        folds += [step] * changed
    assert folds == [7, 15]
    others = [slot for slot in range(SLOTS + 1) if slot != 4]
    assert torch.equal(ring.states[others], before[others])


def test_materializing_leaves_the_ring_and_the_checkpoint_alone():
    torch.manual_seed(0)
    ring, slots, rows = Ring(16), int32(4, 2), int32(3, 1)
    for _ in range(5):
        ring.step(random_tokens(2, 1), slots, rows, [1, 1])
    before = [tensor.clone() for tensor in ring.tensors]
    ring.materialize(slots, int32(6, -1), rows)
    for tensor, kept in zip(ring.tensors[1:], before[1:], strict=True):
        torch.testing.assert_close(tensor, kept, rtol=0, atol=0, equal_nan=True)
    others = [slot for slot in range(SLOTS + 1) if slot != 6]
    assert torch.equal(ring.states[others], before[0][others])
    assert not torch.equal(ring.states[6], before[0][6])


def test_a_fold_rounds_the_state_once_and_reads_it_as_stored():
    torch.manual_seed(0)
    ring, exact = Ring(4, torch.bfloat16), Ring(4)
    exact.states.copy_(ring.states)
    slots, rows = int32(1), int32(1)
    errors = []
    for _ in range(9):
        tokens = random_tokens(1, 1)
        errors.append(relative_error(ring.step(tokens, slots, rows, [1]), exact.step(tokens, slots, rows, [1])))
    assert max(errors[:3]) == 0 and 0 < max(errors) < 2e-2
