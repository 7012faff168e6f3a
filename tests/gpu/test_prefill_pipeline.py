"""The kernel of long prompts with roles of warps: near the float32 reference, always alike, and deaf to what is around
its inputs."""

import pytest
import torch
from torch import Tensor

from hybridrt.kernels.attention import latent_attention_triton as latent
from hybridrt.kernels.attention import prefill_attention_triton as prefill
from hybridrt.kernels.attention.latent_attention import latent_extend
from hybridrt.kernels.attention.paged_attention import attention_extend
from hybridrt.kernels.core.records import AttentionPrompts, LatentWeights, PagedKV
from tests.gpu.rig import DEVICE, GPU

pytestmark = [*GPU, pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs instructions of sm_90"
)]  # fmt: skip
PAGE = 16
# New tokens, and lengths with those before: tiles that end within a block, rows without tokens, later chunks.
PROMPTS = [
    ([300, 1, 130, 133], [300, 1, 130, 133]), ([3000, 1, 0, 700, 65], [3000, 200, 50, 1500, 2065]), ([128], [128]),
    ([129, 64], [256, 65]),
]  # fmt: skip


Lens = tuple[list[int], list[int]]


def paged(lens: Lens, caches: int, kv_heads: int, dim: int) -> tuple[list[Tensor], Tensor, AttentionPrompts]:
    """Caches in float32 of pages in random order, the table of their slots, and prompts. Other pages, and the rest of
    a prompt's last one, hold NaN."""
    query_lens, seq_lens = lens
    counts = [-(-n // PAGE) for n in seq_lens]
    pages = torch.randperm(sum(counts) + 8, device=DEVICE)
    found = list(torch.randn(caches, len(pages), PAGE, kv_heads, dim, device=DEVICE))
    table = torch.zeros(len(seq_lens) + 1, max(counts) * PAGE, dtype=torch.int32, device=DEVICE)
    unused = torch.ones(len(pages) * PAGE, dtype=torch.bool, device=DEVICE)
    for b, own in enumerate(pages[: sum(counts)].split(counts)):
        slots = (own[:, None] * PAGE + torch.arange(PAGE, device=DEVICE)).flatten()
        table[b + 1, : len(slots)] = slots.int()
        unused[slots[: seq_lens[b]]] = False
    for cache in found:
        cache.flatten(0, 1)[unused] = torch.nan
    start = torch.tensor([0, *torch.tensor(query_lens).cumsum(0)])
    rows, starts, ends = (
        torch.as_tensor(x, dtype=torch.int32, device=DEVICE) for x in (range(1, len(seq_lens) + 1), start, seq_lens)
    )
    return found, table, AttentionPrompts(rows, starts, ends, *lens)


def queries(tokens: int, heads: int, dim: int, dtype: torch.dtype) -> Tensor:
    """[tokens, heads, dim], a view of a wider tensor whose other numbers are NaN."""
    wide = torch.randn(tokens, heads * dim + 280, device=DEVICE).to(dtype)
    wide[:, heads * dim :] = torch.nan
    return wide[:, : heads * dim].unflatten(1, (heads, dim))


def case(
    dim: int, heads: int, kv_heads: int, lens: Lens, dtype: torch.dtype, coded: bool, sinks: bool
) -> tuple[Tensor, PagedKV, AttentionPrompts]:
    torch.manual_seed(0)
    caches, table, batch = paged(lens, 2, kv_heads, dim)
    k, v = (cache.to(torch.float8_e4m3fn if coded else dtype) for cache in caches)
    scales, sink_scores = (0.7, 1.3) if coded else (1.0, 1.0), torch.randn(heads, device=DEVICE)
    sink_scores[1] = -torch.inf  # no sink
    kv = PagedKV(k, v, table, dim**-0.5, None, sink_scores if sinks else None, *scales)
    return queries(sum(lens[0]), heads, dim, dtype), kv, batch


@pytest.mark.parametrize("lens", PROMPTS)
@pytest.mark.parametrize(
    ("dtype", "coded", "sinks"),
    [(torch.bfloat16, False, False), (torch.float16, False, True), (torch.bfloat16, True, False)],
)
@pytest.mark.parametrize(("dim", "heads", "kv_heads"), [(128, 12, 2), (128, 5, 1), (256, 16, 2)])
def test_prompts_near_the_reference(
    dim: int, heads: int, kv_heads: int, dtype: torch.dtype, coded: bool, sinks: bool,
    lens: Lens, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(prefill, "COPY_FROM", 1)
    monkeypatch.setattr(prefill, "_may_cut", lambda *_: False)
    q, kv, batch = case(dim, heads, kv_heads, lens, dtype, coded, sinks)
    assert prefill.takes_pipeline(q, kv, batch)
    exact = kv if coded else kv._replace(k_cache=kv.k_cache.float(), v_cache=kv.v_cache.float())
    wanted = attention_extend.reference(q.float(), exact, batch)
    room = [torch.full((len(q) + 3, heads * dim + 8), torch.nan, dtype=dtype, device=DEVICE) for _ in range(2)]
    for wide in room:
        attention_extend(q, kv, batch, wide[: len(q), : heads * dim].unflatten(1, (heads, dim)))
        assert bool(wide[:, heads * dim :].isnan().all()) and bool(wide[len(q) :].isnan().all())
    got = room[0][: len(q), : heads * dim]
    error = (got.float() - wanted.flatten(1)).norm() / wanted.norm()
    assert error < 4e-3, float(error)
    assert torch.equal(got, room[1][: len(q), : heads * dim])


@pytest.mark.parametrize("lens", PROMPTS)
@pytest.mark.parametrize(("dtype", "coded"), [(torch.bfloat16, False), (torch.float16, False), (torch.bfloat16, True)])
@pytest.mark.parametrize("at_once", [5, 2])
def test_latent_prompts_near_the_reference(
    dtype: torch.dtype, coded: bool, lens: Lens, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads of 128 + 64 that are computed from vectors of 512 + 64, `at_once` of the five at a time."""
    monkeypatch.setattr(latent, "multiprocessors", lambda _: 1)
    monkeypatch.setattr(latent, "decompressed_pays", lambda *_: True)
    monkeypatch.setattr(latent, "_heads_at_once", lambda *_: at_once)
    torch.manual_seed(0)
    (vectors,), table, batch = paged(lens, 1, 1, 576)
    cache = vectors.to(torch.float8_e4m3fn if coded else dtype)
    scale = 0.7 if coded else 1.0
    kv = PagedKV(cache, cache[..., :512], table, 192**-0.5, None, None, scale, scale)
    up_k, up_v = torch.randn(5, 128, 512, device=DEVICE) / 22, torch.randn(5, 512, 128, device=DEVICE) / 22
    weights = LatentWeights(up_k.to(dtype), up_v.to(dtype), torch.ones(512, device=DEVICE), 1e-6)
    q = queries(sum(lens[0]), 5, 192, dtype)
    assert latent._takes_pipeline(q, kv, weights, batch)
    exact = kv if coded else kv._replace(k_cache=cache.float(), v_cache=cache.float()[..., :512])
    wanted = latent_extend.reference(
        q.float(), exact, weights._replace(up_k=weights.up_k.float(), up_v=weights.up_v.float()), batch
    )
    got = latent_extend(q, kv, weights, batch)
    error = (got.float() - wanted).norm() / wanted.norm()
    assert error < 6e-3, float(error)
    assert torch.equal(got, latent_extend(q, kv, weights, batch))
