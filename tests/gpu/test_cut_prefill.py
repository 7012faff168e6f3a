"""Attention of graphs of prompts whose tiles are cut: after contexts of any length it is that of plain torch."""

import pytest
import torch
from torch import Tensor

from hybridrt.kernels.attention import cut_prefill_triton as cut
from hybridrt.kernels.attention.graph_copies import DIM, MOST_ROWS
from hybridrt.kernels.attention.prefill_attention_triton import attention_extend_triton
from tests.gpu.rig import DEVICE, GPU
from tests.support.prompt_chunks import Chunks, Heads

pytestmark = GPU
HEADS = Heads(12, 2, DIM, 16, torch.bfloat16, DEVICE)
ROWS = 9
STEPS = (((1,), (0,)), ((900,), (0,)), ((1000,), (9000,)), ((1000, 24), (12000, 3)), ((100, 1, 700), (50, 9000, 4000)))


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(("tokens", "copied"), [(256, False), (1024, False), (1024, True), (1536, True)])
def test_replays(tokens: int, copied: bool) -> None:
    """`copied`: over copies of keys, else over pages."""
    steps = [Chunks(HEADS, *step, seed=i) for i, step in enumerate(STEPS) if sum(step[0]) <= tokens]
    steps += [Chunks(HEADS, (tokens,), (14000,), seed=9)]
    room = 2 * HEADS.keys * DIM * (16_000 + MOST_ROWS * cut.BLOCK_N)
    copies = torch.full((room,), torch.nan, dtype=HEADS.dtype, device=DEVICE) if copied else None
    pages, width = max(len(each.kv.k_cache) for each in steps), max(each.table.shape[1] for each in steps)
    caches = torch.zeros(2, pages, *steps[0].kv.k_cache.shape[1:], dtype=HEADS.dtype, device=DEVICE)
    table = torch.zeros(MOST_ROWS, width, dtype=torch.int32, device=DEVICE)
    q, batch = steps[0].in_graph(ROWS, tokens, copies)
    kv, out = steps[0].kv._replace(k_cache=caches[0], v_cache=caches[1], req_to_token=table), torch.empty_like(q)
    attention_extend_triton(q, kv, batch, out)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention_extend_triton(q, kv, batch, out)
    for each in steps:
        for into, values in zip(caches, (each.kv.k_cache, each.kv.v_cache)):
            into[: len(values)] = values
        table[: len(each.table), : each.table.shape[1]] = each.table.to(DEVICE)
        queries, step = each.in_graph(ROWS, tokens, copies)
        for into, values in zip((q, *batch[:3]), (queries, *step[:3])):
            into.copy_(values)
        out.fill_(torch.nan)
        graph.replay()
        assert out.isfinite().all()
        assert error(out[: len(each.q)], each.wanted()) < 1e-2
        assert copies is None or copies[: 2 * HEADS.keys * DIM].isfinite().all()


@pytest.mark.parametrize(("tokens", "context"), [(700, 14_000), (1536, 14_000), (2048, 14_000), (3072, 4000)])
def test_eager_chunks(tokens: int, context: int) -> None:
    chunks = Chunks(HEADS, (tokens,), (context,))
    assert error(attention_extend_triton(chunks.q, chunks.kv, chunks.batch()), chunks.wanted()) < 1e-2
