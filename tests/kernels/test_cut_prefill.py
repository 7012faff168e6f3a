"""Prompt attention whose last tiles are cut: whatever is cut, and wherever keys are read, it is that of plain torch."""

import pytest
import torch
from hypothesis import strategies as st

from hybridrt.kernels.attention import cut_prefill_triton as cut
from hybridrt.kernels.attention import graph_copies
from hybridrt.kernels.attention import prefill_attention_triton as prefill
from hybridrt.kernels.attention.cut_prefill_triton import Cut
from tests.support.levels import draw, examples
from tests.support.prompt_chunks import Chunks, Heads

BLOCK, AT_ONCE = 16, 264
HEADS = Heads(6, 2, 16, 4, torch.float16)
WAYS = ("pages", "copied", "graph over pages", "graph over copies")


@pytest.fixture
def small(monkeypatch):
    """Small tiles, of which one is cut as soon as a part would have a block of keys."""
    monkeypatch.setattr(prefill, "ample", lambda q: True)
    for module in (prefill, cut, graph_copies):
        monkeypatch.setattr(module, "BLOCK_N", BLOCK)
    for module in (prefill, graph_copies):
        monkeypatch.setattr(module, "DIM", HEADS.dim)
    for name, value in (("BLOCK_M", 16), ("LEAST_BLOCKS", 1), ("PART_BLOCKS", 1)):
        monkeypatch.setattr(cut, name, value)


def attend(chunks, way, padding=5):
    """Results of real tokens. Those of padding must be finite, and copies end with the last row."""
    if "graph" not in way:
        return prefill.attention_extend_triton(
            chunks.q, chunks.kv, chunks.batch(), torch.full_like(chunks.q, torch.nan)
        )
    used = 2 * HEADS.keys * HEADS.dim * BLOCK * sum(-(-n // BLOCK) for n in (*chunks.lens, padding))
    copies = torch.full((used + 7,), torch.nan, dtype=HEADS.dtype) if "copies" in way else None
    q, batch = chunks.in_graph(len(chunks.lens) + 2, len(chunks.q) + padding, copies)
    found = prefill.attention_extend_triton(q, chunks.kv, batch, torch.full_like(q, torch.nan))
    assert found.isfinite().all()
    assert copies is None or (copies[:used].isfinite().all() and copies[used:].isnan().all())
    return found[: len(chunks.q)]


@pytest.mark.parametrize("way", WAYS)
@examples(5, 40)
def test_any_number_of_programs(small, monkeypatch, way, examples):
    monkeypatch.setattr(prefill, "COPY_FROM", 0 if way == "copied" else 10**9)
    monkeypatch.setattr(prefill, "GRAPH_COPY_FROM", 0)
    monkeypatch.setattr(prefill, "ROUNDS", 10**9)

    def check(programs, rows, sinks, seed):
        monkeypatch.setattr(cut, "multiprocessors", lambda device: programs)
        if any(n for n, _ in rows):
            chunks = Chunks(HEADS, *zip(*rows), sinks=sinks, seed=seed)
            assert (attend(chunks, way).float() - chunks.wanted()).abs().max() < 4e-3

    rows = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 70)), min_size=1, max_size=4)
    draw(examples, check, st.integers(1, 40), rows, st.booleans(), st.integers(0, 99))


def test_what_is_cut():
    """Of chunks of 1,024 to 3,072 tokens of Falcon-H1-7B, which has six heads of queries for each of two of keys."""
    tiles = {tokens: 2 * tokens * 6 // 64 for tokens in (512, 1024, 1408, 1536, 2048, 3072)}
    found = {tokens: Cut.of(n, 0, AT_ONCE)[:3] for tokens, n in tiles.items()}
    assert found == {
        512: (0, 96, 5), 1024: (192, 0, 1), 1408: (264, 0, 1), 1536: (264, 24, 11), 2048: (264, 120, 2),
        3072: (528, 48, 5),
    }  # fmt: skip


@pytest.mark.parametrize("tiles", [1, 24, 96, 192, 263, 265, 400])
def test_cut_tiles_end_earlier(tiles):
    """Parts fill fewer rounds than whole tiles, and have a few blocks of keys each."""
    whole, rest, parts, least = Cut.of(tiles, 0, AT_ONCE)
    assert whole % AT_ONCE == 0 or parts == 1
    assert whole + rest == tiles and 1 <= parts <= cut.MOST_PARTS
    if parts > 1:
        assert -(-rest * parts // AT_ONCE) < parts and least >= cut.LEAST_BLOCKS * parts


def test_rows_of_a_graph_may_have_more_tiles():
    assert Cut.of(96, 16, AT_ONCE) == Cut.of(96, 0, AT_ONCE)._replace(rest=112)
    assert Cut.of(264, 16, AT_ONCE) == (264, 16, 1, 0)
