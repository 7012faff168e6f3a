"""Attention backends of installed libraries in bfloat16, step by step compared with plain torch in float32."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hybridrt.base.errors import HybridrtError
from hybridrt.base.forward_batch import ForwardBatch, ForwardMode, SpecInfo
from hybridrt.base.model_config import AttentionSpec
from hybridrt.kernels.attention.kv_codes import encode
from hybridrt.mem_cache.pools.kv_pool import KVPool, KVScales
from hybridrt.mem_cache.pools.req_to_token_pool import HybridReqToTokenPool
from hybridrt.recurrent.backends import load_attention_backend
from tests.gpu.rig import DEVICE, PRODUCTION

pytestmark = PRODUCTION
ROWS, CONTEXT, PAGE = 6, 2048, 16
HEADS = {"falcon-h1-7b": (12, 2, 128), "nemotron-h-8b": (32, 8, 128), "qwen3-next-12l": (16, 2, 256)}
TOLERANCE = 1e-2


def pools(spec: AttentionSpec) -> dict[str, Any]:
    """Shuffled pages for all rows, and keys and values everywhere."""
    torch.manual_seed(0)
    count = ROWS * CONTEXT // PAGE
    scales = {3: KVScales(0.02, 0.03), 5: KVScales(0.01, 0.04)}
    kv = KVPool({spec: [3, 5]}, num_pages=count, page_size=PAGE, device=DEVICE, scales=scales)
    table = HybridReqToTokenPool(num_rows=ROWS, max_context=CONTEXT, page_size=PAGE, mamba_pool=None, device=DEVICE)
    for cache in kv.tensors:
        values = torch.randn(cache.shape, device=DEVICE).bfloat16()
        cache.copy_(values if cache.is_floating_point() else encode(values, 0.02).view(torch.uint8))
    pages = (torch.randperm(count) + 1).view(ROWS, -1).to(DEVICE)
    rows = torch.arange(1, ROWS + 1, device=DEVICE).repeat_interleave(pages.shape[1])
    table.write_pages(rows, torch.arange(pages.shape[1], device=DEVICE).repeat(ROWS), pages.flatten())
    return {"kv_pool": kv, "req_to_token_pool": table}


def step(lens: dict[int, tuple[int, int]], decode: int, backend: Any, tokens: int = 1) -> ForwardBatch:
    """Rows by (computed, new) tokens, of which the first `decode` are decode rows of `tokens` each."""
    rows, new = list(lens), [n for _, n in lens.values()]
    ends = [c + n for c, n in lens.values()]
    starts = [sum(new[:i]) for i in range(len(new) + 1)]

    def int32(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    table = backend.req_to_token_pool
    positions = int32([p for c, n in lens.values() for p in range(c, c + n)])
    of_row = int32([row for row, n in zip(rows, new) for _ in range(n)])
    plain = ForwardMode.TARGET_VERIFY if tokens > 1 else ForwardMode.DECODE
    mode = ForwardMode.EXTEND if not decode else plain if decode == len(rows) else ForwardMode.MIXED
    return ForwardBatch(
        mode, positions, positions, int32(rows), int32(ends), int32(starts), table.token_slots(of_row, positions),
        len(rows), decode, backend, seq_lens_cpu=ends, query_lens_cpu=new,
        spec_info=SpecInfo(tokens) if tokens > 1 else None,
    )  # fmt: skip


def made(name: str, model: str, codes: torch.dtype | None = None) -> tuple[Any, Any, list[Any]]:
    """The backend, its oracle, and two layers; skipped with the reason where it cannot run. `codes`: in both KV
    caches."""
    heads, kv_heads, head_dim = HEADS[model]
    spec, whole = (
        AttentionSpec(
            heads, kv_heads, head_dim, head_dim, None, head_dim**-0.5, codes or dtype,
            query_dtype=None if codes is None else dtype,
        )
        for dtype in (torch.bfloat16, torch.float32)
    )  # fmt: skip
    try:
        backend = load_attention_backend(name, torch.device(DEVICE))(**pools(spec))
    except HybridrtError as e:
        pytest.skip(str(e))
    oracle = load_attention_backend("torch", torch.device(DEVICE))(**pools(whole))
    return backend, oracle, [SimpleNamespace(layer_id=i, spec=spec) for i in (3, 5)]


def inputs(layer: Any, tokens: int) -> list[Tensor]:
    spec = layer.spec
    widths = [spec.num_heads * spec.head_dim, *[spec.num_kv_heads * spec.head_dim] * 2]
    return list(torch.randn(tokens, sum(widths), device=DEVICE).bfloat16().split(widths, -1))


def assert_near(got: Tensor, wanted: Tensor) -> None:
    error = (got.float() - wanted).norm() / wanted.norm()
    assert error < TOLERANCE, f"relative error {error:.1e}"


@pytest.mark.parametrize(
    ("name", "codes"),
    [("fa3", None), ("flashinfer", None), ("fa3", torch.float8_e4m3fn), ("triton", torch.float8_e4m3fn)],
)
@pytest.mark.parametrize("model", HEADS)
def test_eager_steps(name: str, codes: torch.dtype | None, model: str) -> None:
    """Prompts, later chunks, single tokens, decode rows next to them, verify rows."""
    backend, oracle, layers = made(name, model, codes)
    for lens, decode, tokens in (
        ({1: (0, 700), 4: (0, 1), 2: (0, 64)}, 0, 1),
        ({1: (700, 300), 3: (0, 17)}, 0, 1),
        ({4: (1, 1), 1: (1000, 1), 2: (64, 1)}, 3, 1),
        ({4: (2, 1), 1: (1001, 1), 5: (0, 90), 3: (17, 1)}, 2, 1),
        ({4: (3, 4), 1: (1002, 4)}, 2, 4),
    ):
        sides = [(each, step(lens, decode, each, tokens)) for each in (backend, oracle)]
        for each, batch in sides:
            each.prepare(batch)
        for layer in layers:
            q, k, v = inputs(layer, sum(n for _, n in lens.values()))
            parts = ((q, k, v), (q.float(), k.float(), v.float()))
            results = [each.forward(*given, layer, batch) for (each, batch), given in zip(sides, parts)]
            assert_near(*results)


@pytest.mark.parametrize(("name", "codes"), [("fa3", None), ("flashinfer", None), ("triton", torch.float8_e4m3fn)])
@pytest.mark.parametrize("tokens", [1, 4])
def test_graphs(name: str, codes: torch.dtype | None, tokens: int) -> None:
    """One graph, replayed at many lengths, with padding rows; the newest page is written by the graph itself."""
    backend, oracle, layers = made(name, "falcon-h1-7b", codes)
    bs, real, table = 8, 5, backend.req_to_token_pool.req_to_token
    rows, lens, late = (torch.zeros(bs, dtype=torch.int32, device=DEVICE) for _ in range(3))
    lens.fill_(tokens)
    q = torch.zeros(bs * tokens, layers[0].spec.num_heads * 128, dtype=torch.bfloat16, device=DEVICE)
    spec, saved, outs = SpecInfo(tokens) if tokens > 1 else None, table.clone(), [torch.empty_like(q) for _ in layers]
    mode = ForwardMode.TARGET_VERIFY if spec else ForwardMode.DECODE
    view = backend.init_cuda_graph_state(bs, bs * tokens)
    starts = torch.arange(bs + 1, dtype=torch.int32, device=DEVICE) * tokens
    batch = ForwardBatch(mode, late, late, rows, lens, starts, late, 0, bs, backend, spec_info=spec)
    backend.prepare(batch, graph=view)

    def pass_over_layers() -> None:
        table.copy_(saved)
        for layer, out in zip(layers, outs):
            out.copy_(backend.forward(q, None, None, layer, batch, save_kv_cache=False))

    pass_over_layers()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pass_over_layers()
    for start in (3, 15, 16, 900, 40):
        ends = [start + 131 * i + tokens for i in range(real)]
        table.zero_()
        rows[:real] = torch.arange(1, real + 1, device=DEVICE)
        lens[:real] = torch.tensor(ends, device=DEVICE)
        q.copy_(torch.randn_like(q))
        batch.num_real, batch.seq_lens_cpu = real, ends
        backend.prepare(batch, graph=view)
        graph.replay()
        plain = step({i + 1: (end - tokens, tokens) for i, end in enumerate(ends)}, real, oracle, tokens)
        oracle.prepare(plain)
        for layer, out in zip(layers, outs):
            wanted = oracle.forward(q[: real * tokens].float(), None, None, layer, plain, save_kv_cache=False)
            assert_near(out[: real * tokens], wanted)
            assert out.isfinite().all()
