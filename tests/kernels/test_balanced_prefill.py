"""Prompt attention with cut tiles: wherever they are cut, it is the attention of whole ones."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridrt.kernels.attention import balanced_prefill_triton as balanced
from hybridrt.kernels.attention import prefill_attention_triton as prefill
from hybridrt.kernels.attention.paged_attention import attention_extend
from hybridrt.kernels.core.records import AttentionPrompts, PagedKV

HEADS, KV_HEADS, DIM, PAGE = 6, 2, 16, 4


@pytest.fixture
def shares(provider, monkeypatch):
    """Small tiles over copied keys, always cut."""
    monkeypatch.setattr(prefill, "GATHER_FROM", 0)
    monkeypatch.setattr(prefill, "ample", lambda q: True)
    monkeypatch.setattr(prefill, "BLOCK_N", 16)
    for name, value in (("BLOCK_M", 16), ("BLOCK_N", 16), ("PER_MULTIPROCESSOR", 1), ("DIMS", (DIM,))):
        monkeypatch.setattr(balanced, name, value)
    monkeypatch.setattr(balanced, "pays", lambda *_: True)


def attend(programs, query_lens, contexts, *, sinks=False, seed=0):
    """Of this many programs, and by plain torch."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).half()

    lens = [n + context for n, context in zip(query_lens, contexts)]
    pages = [-(-n // PAGE) for n in lens]
    order = (torch.randperm(sum(pages), generator=generator) + 1).split(pages)
    table = torch.zeros(len(lens) + 1, max(pages) * PAGE, dtype=torch.int32)
    for row, mine in enumerate(order, 1):
        table[row, : len(mine) * PAGE] = (mine[:, None] * PAGE + torch.arange(PAGE)).flatten()
    keys, values = draw(sum(pages) + 1, PAGE, KV_HEADS, DIM), draw(sum(pages) + 1, PAGE, KV_HEADS, DIM)
    q = draw(sum(query_lens), HEADS, DIM)
    kv = PagedKV(keys, values, table, 0.3, None, torch.randn(HEADS, generator=generator) if sinks else None)
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    rows = torch.arange(1, len(lens) + 1, dtype=torch.int32)
    batch = AttentionPrompts(rows, starts, torch.tensor(lens, dtype=torch.int32), list(query_lens), lens)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(balanced, "multiprocessors", lambda device: programs)
        got = attention_extend(q, kv, batch, torch.full_like(q, float("nan")))
    kv = kv._replace(k_cache=keys.float(), v_cache=values.float())
    return got, attention_extend.reference(q.float(), kv, batch)


@given(
    programs=st.integers(1, 40),
    rows=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 70)), min_size=1, max_size=4),
    sinks=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_number_of_programs(shares, programs, rows, sinks, seed):
    query_lens, contexts = zip(*rows)
    if not any(query_lens):
        return
    got, want = attend(programs, query_lens, contexts, sinks=sinks, seed=seed)
    assert (got.float() - want).abs().max() < 4e-3


@pytest.mark.parametrize(
    ("query_lens", "contexts", "cut"),
    [
        ([3072], [28672], True),  # 288 tiles, and 264 programs at a time
        ([2816], [28672], False),  # fills them
        ([2048], [28672], True),
        ([3072], [0], False),  # the first queries see few keys
        ([8192], [24576], False),  # 768 tiles
        ([1500, 20], [30000, 0], True),
        ([16] * 130, [30000] * 130, False),
    ],
)
def test_tiles_are_cut_where_that_pays(query_lens, contexts, cut, monkeypatch):
    monkeypatch.setattr(balanced, "multiprocessors", lambda device: 132)
    q, cache = torch.empty(1, 12, 128), torch.empty(1, 16, 2, 128)
    lens = [n + context for n, context in zip(query_lens, contexts)]
    batch = AttentionPrompts(torch.empty(0), torch.empty(0), torch.empty(0), query_lens, lens)
    assert balanced.pays(q, PagedKV(cache, cache, torch.empty(0), 1.0), batch) is cut
    assert not balanced.pays(q, PagedKV(cache, cache, torch.empty(0), 1.0, 4096), batch)
    wide = torch.empty(1, 16, 2, 256)
    assert not balanced.pays(torch.empty(1, 12, 256), PagedKV(wide, wide, torch.empty(0), 1.0), batch)
