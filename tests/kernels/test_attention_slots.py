"""Slots so far apart that slot times stride no longer fits 32 bits: such an address would hit another request."""

import mmap
from math import prod

import pytest
import torch

from hybridrt.kernels.attention.latent_attention import into_latent, latent_extend, write_latent
from hybridrt.kernels.attention.paged_attention import attention_decode, attention_extend, write_kv
from hybridrt.kernels.core.chunk_plan import plan_chunks
from hybridrt.kernels.core.records import (
    AttentionPrompts,
    AttentionRows,
    DeltaInputs,
    LatentWeights,
    PagedKV,
    Prompts,
    StateRing,
    StateSlots,
)
from hybridrt.kernels.delta_rule.decode_ring import gdn_replay
from hybridrt.kernels.delta_rule.delta_rule import chunk_gated_delta_rule, recurrent_gated_delta_rule
from hybridrt.kernels.state.state_ring import RingFolds, fold_ring
from tests.support.gdn_loops import random_tokens, relative_error, slow_delta_rule
from tests.support.mamba2_oracle import int32

pytestmark = pytest.mark.usefixtures("provider")
STRIDE, FAR = 32 * 128 * 128, 4099
STATE = (4, 5, 6)


def untouched_memory(elements):
    """float16 zeros that take no memory until they are written."""
    return torch.frombuffer(mmap.mmap(-1, 2 * elements), dtype=torch.float16)


def far_states(initial):
    """float16 [4100, *STATE], slots 2^19 elements apart as those of 32 heads of 128 x 128 are; one of them set."""
    inner = [prod(STATE[i + 1 :]) for i in range(len(STATE))]
    states = untouched_memory(STRIDE * (FAR + 1)).as_strided((FAR + 1, *STATE), (STRIDE, *inner))
    states[FAR] = initial
    return states


def test_recurrent_steps():
    torch.manual_seed(0)
    tokens, initial = random_tokens(1, 2), torch.randn(STATE).half()
    states = far_states(initial)
    state = StateSlots(states, int32(FAR), int32(FAR))
    out = recurrent_gated_delta_rule(DeltaInputs(*tokens.tensors), state)
    expected, after = slow_delta_rule(initial, tokens[0])
    assert relative_error(out[0], expected) < 2e-3 and relative_error(states[FAR], after[-1]) < 2e-3


def test_replay_and_fold():
    torch.manual_seed(1)
    tokens, initial = random_tokens(1, 2), torch.randn(STATE).half()
    states, row = far_states(initial), int32(2)
    ring = torch.zeros(3, 4, 8, 5), torch.zeros(3, 2, 8, 6), torch.zeros(3, 4, 8)
    state = StateSlots(states, int32(FAR), int32(FAR))
    out = gdn_replay(DeltaInputs(*tokens.tensors), state, StateRing(*ring, row, int32(0), int32(0)))
    folds = RingFolds(int32(FAR), row, int32(0), int32(2), int32(1), int32(FAR - 1))
    fold_ring(*(part[None] for part in (states, *ring)), None, folds)
    expected, after = slow_delta_rule(initial, tokens[0])
    assert relative_error(out[0], expected) < 2e-6 and relative_error(states[FAR - 1], after[-1]) < 1e-3
    assert torch.equal(states[FAR], initial)


def test_chunked_prefill():
    torch.manual_seed(2)
    tokens, initial = random_tokens(5), torch.randn(STATE).half()
    states = far_states(initial)
    prompts = Prompts(int32(0, 5), torch.tensor([True]), plan_chunks([3], [5], 4))
    state = StateSlots(states, int32(FAR), int32(FAR))
    out = chunk_gated_delta_rule(DeltaInputs(*tokens.tensors), state, prompts)
    expected, after = slow_delta_rule(initial, tokens)
    assert relative_error(out, expected) < 2e-6 and relative_error(states[FAR], after[-1]) < 1e-3


def test_attention():
    torch.manual_seed(3)
    page, heads, dim, length = 16, 2, 128, 5
    pages = 2**31 // (page * heads * dim) + 2
    far = tuple(untouched_memory(pages * page * heads * dim).view(pages, page, heads, dim) for _ in range(2))
    near = tuple(torch.zeros(2, page, heads, dim, dtype=torch.float16) for _ in range(2))
    k, v = torch.randn(2, length, heads, dim).half()
    q, lengths, found = torch.randn(length, 4, dim).half(), int32(length), []
    for cache, last in ((far, pages - 1), (near, 1)):
        table = torch.arange(last * page, (last + 1) * page, dtype=torch.int32).repeat(2, 1)
        write_kv(k, v, *cache, table[1, :length])
        assert torch.equal(cache[0][last, :length], k) and torch.equal(cache[1][last, :length], v)
        kv = PagedKV(*cache, table, 0.1)
        decoded = attention_decode(q[None, -1:], kv, AttentionRows(int32(1), lengths))
        extended = attention_extend(q, kv, AttentionPrompts(int32(1), int32(0, length), lengths, [length], [length]))
        found.append((decoded, extended))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b) and a.abs().sum() > 0


def test_latent_attention():
    torch.manual_seed(4)
    page, rank, rope, heads, length = 16, 512, 64, 2, 5
    pages = 2**31 // (page * (rank + rope)) + 2
    weights = LatentWeights(
        torch.randn(heads, 16, rank).half(), torch.randn(heads, rank, 8).half(), torch.ones(rank), 1e-6
    )
    q, k = torch.randn(length, heads, 16 + rope).half() / 8, torch.randn(length, rank + rope).half()
    lengths, found = int32(length), []
    far = untouched_memory(pages * page * (rank + rope)).view(pages, page, 1, -1)
    for cache, last in ((far, pages - 1), (torch.zeros(2, page, 1, rank + rope, dtype=torch.float16), 1)):
        table = torch.arange(last * page, (last + 1) * page, dtype=torch.int32).repeat(2, 1)
        write_latent(q, k, weights, torch.arange(length), None, cache, table[1, :length])
        assert torch.equal(cache[last, :length, 0, rank:], k[:, rank:])
        kv, prompts = PagedKV(cache, cache[..., :rank], table, 0.1), AttentionPrompts(
            int32(1), int32(0, length), lengths, [length], [length])  # fmt: skip
        absorbed = into_latent(q, weights)
        decoded = attention_decode(absorbed[None, -1:], kv, AttentionRows(int32(1), lengths))
        found.append((decoded, attention_extend(absorbed, kv, prompts), latent_extend(q, kv, weights, prompts)))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b) and a.abs().sum() > 0
