"""One verify step of T tokens against T decode steps, T from 1 to 16, whatever number of inputs stays: the plain-torch
operations of Mamba-2 and Gated Delta Net, rows of several lengths and padding rows among them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from hybridrt.kernels.state.causal_conv1d import conv_window
from tests.kernels.test_gdn_decode import TAPS
from tests.kernels.test_gdn_decode import Layer as DeltaNet
from tests.kernels.test_mamba2_decode import K
from tests.kernels.test_mamba2_decode import Layer as Mamba2
from tests.support.levels import sweep
from tests.support.mamba2_oracle import int32, same_bytes
from tests.support.ring_steps import materialize

LAYERS: dict[str, tuple[type[Any], int]] = {"mamba2": (Mamba2, K), "gdn": (DeltaNet, TAPS)}
# The third row is padding. Eight rows make whole vectors of the few heads: an exponential in a vector's lane may differ
# from one that is computed by itself in the last bit.
SLOTS, ROWS = [7, 39, -1, 5, 11, 20, 2, 31], [6, 2, 0, 3, 5, 1, 7, 4]
FIRST = [0, 3, 0, 1, 9, 5, 2, 4]
REAL = [i for i, slot in enumerate(SLOTS) if slot > 0]


def layer_of(kind: str, tokens: int, first: list[int]) -> Any:
    """Rows that have computed `first` tokens each, one decode step after the other."""
    torch.manual_seed(tokens)
    make, _ = LAYERS[kind]
    layer = make(SLOTS, max(FIRST) + 20, conv_width=32, ring_width=32)
    layer.done = [0] * len(SLOTS)
    while layer.done != first:
        behind = [done < wanted for done, wanted in zip(layer.done, first, strict=True)]
        slots, layer.slots = layer.slots, [s if b else -1 for s, b in zip(layer.slots, behind, strict=True)]
        layer.step(layer.done, 1)
        layer.slots, layer.done = slots, [d + b for d, b in zip(layer.done, behind, strict=True)]
    return layer


def decoded(layer: Any, tokens: int) -> tuple[Tensor, list[Tensor]]:
    """Outputs [rows, tokens, ...] of as many decode steps, and the real rows' states after each."""
    outputs, states = [], []
    for t in range(tokens):
        outputs.append(layer.step([f + t for f in FIRST], 1))
        states.append(layer.states[[SLOTS[i] for i in REAL]].clone())
    return torch.cat(outputs, 1), states


@pytest.mark.parametrize("tokens", sweep(range(1, 17), 3))
@pytest.mark.parametrize("kind", LAYERS)
def test_states_after_each_token_are_those_of_decoding(kind: str, tokens: int) -> None:
    """Bit for bit: the same operations in the same order."""
    layer, taps = layer_of(kind, tokens, FIRST), LAYERS[kind][1]
    stored = torch.full((8, tokens, *layer.states.shape[1:]), torch.nan)
    before = layer.states.clone()
    out = layer.step(FIRST, tokens, stored=stored, rows=int32(*ROWS))
    assert same_bytes(layer.states, before), "the state itself waits for the commit"
    verified = layer.conv.clone()
    outputs, states = decoded(layer_of(kind, tokens, FIRST), tokens)
    assert same_bytes(out, outputs) and not out[2].any()
    for t, after in enumerate(states):
        assert same_bytes(stored[[ROWS[i] for i in REAL], t], after)
        for i in REAL:
            window = conv_window(verified, int32(SLOTS[i]), int32(FIRST[i] + t + 1), taps)[0]
            assert same_bytes(window, layer.conv_tail(i, FIRST[i] + t + 1))


@pytest.mark.parametrize("tokens", sweep(range(1, 17), 5))
@pytest.mark.parametrize("kind", LAYERS)
def test_a_ring_reads_as_if_it_had_decoded_what_stays(kind: str, tokens: int) -> None:
    """Each accepted length in turn, another one in each row; then the whole history is what decoding gives."""
    first = [0] * len(SLOTS)
    layer, done = layer_of(kind, tokens, first), list(first)
    outputs, states = decoded_all(kind, tokens)
    for count in range(1, tokens + 1):
        accepted = [(count + 5 * i) % tokens + 1 for i in range(len(SLOTS))]
        out = layer.replay_step(done, tokens, ROWS)
        for i in REAL:
            torch.testing.assert_close(out[i], outputs[i, done[i] : done[i] + tokens], rtol=0, atol=2e-5)
        stays = [a if done[i] + a + tokens <= outputs.shape[1] else 0 for i, a in enumerate(accepted)]
        layer.commit(ROWS, tuple(a if i in REAL else 0 for i, a in enumerate(stays)), tokens)
        done = [d + a * (i in REAL) for i, (d, a) in enumerate(zip(done, stays, strict=True))]
    spare = [12 + i if slot > 0 else -1 for i, slot in enumerate(SLOTS)]
    pool, A = (layer.states, *layer.ring.values()), layer.head_terms["A"] if kind == "mamba2" else None
    materialize(pool, A, (layer.start, layer.length), int32(*ROWS), int32(*SLOTS), int32(*spare))
    for i in REAL:
        torch.testing.assert_close(layer.states[spare[i]], states[i][done[i]], rtol=0, atol=2e-5)


def decoded_all(kind: str, tokens: int) -> tuple[Tensor, list[list[Tensor]]]:
    """Outputs of every row's tokens, and its states after each number of them, by the loops."""
    layer = layer_of(kind, tokens, [0] * len(SLOTS))
    outputs, states = zip(*(layer.expected(i) for i in range(len(SLOTS))), strict=True)
    return torch.stack(list(outputs)).float(), [
        [torch.zeros_like(s[0]).float(), *(t.float() for t in s)] for s in states
    ]
