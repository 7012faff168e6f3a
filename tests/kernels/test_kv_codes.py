"""Keys and values as e4m3 codes, against the definition of the format and attention over what the codes stand for."""

import pytest
import torch

from hybridrt.kernels.attention.kv_codes import encode, numbers
from hybridrt.kernels.attention.latent_attention import from_latent, into_latent, latent_extend, write_latent
from hybridrt.kernels.attention.paged_attention import (
    attention_decode,
    attention_extend,
    qk_norm_rotary,
    rotary_write_kv,
    write_kv,
)
from hybridrt.kernels.core.records import (
    AttentionPrompts,
    AttentionRows,
    KVPlaces,
    LatentWeights,
    PagedKV,
    Rope,
)

pytestmark = pytest.mark.usefixtures("provider")
E4M3, PAGE, WIDTH = torch.float8_e4m3fn, 4, 48
K_SCALE, V_SCALE, SCALE = 0.25, 0.017, 0.3


def every_code():
    """[256] the number of each code, by the format: sign, 4 bits of exponent with bias 7, 3 of mantissa."""
    code = torch.arange(256)
    exponent, mantissa = (code >> 3) & 15, (code & 7).double()
    size = torch.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * torch.exp2(exponent.double() - 7))
    size[(code & 127) == 127] = torch.nan
    return torch.where(code > 127, -size, size)


def nearest(x):
    """The code nearest to each number of x, ties to the even one."""
    values = every_code()[:127].float()
    codes = torch.arange(127)
    middles = (values[1:].double() + values[:-1].double()) / 2
    found = torch.bucketize(x.abs().double().clamp(max=448), middles)
    tie = (x.abs().double() == middles[found.clamp(max=125)]) & (found % 2 == 1)
    return codes[(found + tie).clamp(max=126)] | torch.where(torch.signbit(x), 128, 0)


def hard_numbers():
    """Every code's number, every middle of two, their neighbours in float32, and numbers that saturate."""
    values = every_code()[:127].float()
    middles = (values[1:] + values[:-1]) / 2
    exact = torch.cat((values, middles, torch.tensor([449.0, 464.0, 480.0, 1e9, 1e37, 1e-30])))
    near = torch.cat(
        (exact, torch.nextafter(exact, torch.tensor(torch.inf)), torch.nextafter(exact, torch.tensor(0.0)))
    )
    return torch.cat((near, -near))


def test_codes_are_nearest_and_saturate():
    x = hard_numbers()
    x = x[x.isfinite()]
    x = torch.cat((x, torch.zeros(-len(x) % 8))).view(-1, 1, 8)
    slots = torch.arange(PAGE, PAGE + len(x), dtype=torch.int32)
    caches = torch.zeros(2, len(x) // PAGE + 2, PAGE, 1, 8).to(E4M3)
    write_kv(x * 0.25, x * 4.0, *caches, slots, 0.25, 4.0)
    for cache in caches:
        got = cache.view(torch.uint8).view(-1, 8)[PAGE : PAGE + len(x)]
        assert torch.equal(got.long(), nearest(x).view(-1, 8))


def test_no_number_becomes_a_finite_code_if_it_is_none():
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0]).view(1, 1, 4)
    caches = torch.zeros(2, 3, PAGE, 1, 4).to(E4M3)
    write_kv(x, -x, *caches, torch.tensor([5], dtype=torch.int32), 2.0, 0.5)
    for cache in caches:
        assert cache.float().view(-1, 4)[5].isnan().tolist() == [True, True, True, False]
        assert int(cache.float().isnan().sum()) == 3


def test_entries_are_the_numbers_of_their_codes():
    codes = torch.arange(256, dtype=torch.uint8).view(4, 64)
    wanted = every_code().view(4, 64)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for cells in (codes, codes[:, 32:]):
            got = numbers(cells.view(E4M3), dtype)
            assert got.dtype == dtype
            torch.testing.assert_close(got.double(), wanted[:, 64 - cells.shape[1] :], rtol=0, atol=0, equal_nan=True)


class Pair:
    """The same keys and values as codes and as plain numbers: what the codes stand for. Cells of no token are NaN."""

    def __init__(self, lengths, dims, dtype, kv_heads=2):
        torch.manual_seed(0)
        pages = 1 + WIDTH // PAGE * len(lengths)
        self.codes = tuple(torch.full((pages, PAGE, kv_heads, dim), torch.nan).to(E4M3) for dim in dims)
        order = iter((torch.randperm(pages - 1) + 1).tolist())
        self.table = torch.zeros(len(lengths) + 2, WIDTH, dtype=torch.int32)
        self.rows = torch.randperm(len(lengths) + 1)[: len(lengths)].int() + 1
        for row, length in zip(self.rows.tolist(), lengths, strict=True):
            for start in range(0, WIDTH, PAGE):
                self.table[row, start : start + PAGE] = next(order) * PAGE + torch.arange(PAGE)
            for cache, scale in zip(self.codes, (K_SCALE, V_SCALE)):
                cells = cache.view(torch.uint8).view(-1, *cache.shape[2:])
                new = encode(torch.randn(length, *cache.shape[2:]) * 20 * scale, scale)
                cells[self.table[row, :length].long()] = new.view(torch.uint8)
        self.plain = tuple((c.float() * s).to(dtype) for c, s in zip(self.codes, (K_SCALE, V_SCALE)))


def close(got, want, dtype):
    """16-bit products round weights and outputs; the oracle's are float32."""
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(
        got.float(), want.float(), rtol=16 * eps, atol=16 * eps * float(want.float().abs().max())
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("sliding_window", [None, 7])
@pytest.mark.parametrize("tokens", [1, 3])
def test_decode_equals_attention_over_dequantised_numbers(dtype, sliding_window, tokens):
    lengths = [9, 37, 22]
    pair, sinks = Pair(lengths, (16, 16), dtype), torch.randn(4) if tokens == 3 else None
    q = torch.randn(4, tokens, 4, 16).to(dtype) / 5
    batch = AttentionRows(torch.cat((pair.rows, torch.zeros(1).int())), torch.tensor([*lengths, 0], dtype=torch.int32))
    got = attention_decode(q, PagedKV(*pair.codes, pair.table, SCALE, sliding_window, sinks, K_SCALE, V_SCALE), batch)
    plain = [t.float() for t in pair.plain]
    want = attention_decode.reference(q.float(), PagedKV(*plain, pair.table, SCALE, sliding_window, sinks), batch)
    close(got[:3], want[:3], dtype)
    assert not got[3].any() and got.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("sliding_window", [None, 7])
@pytest.mark.parametrize("copied", [False, True])
def test_prompts_equal_attention_over_dequantised_numbers(dtype, sliding_window, copied, provider, monkeypatch):
    if copied:
        if provider == "torch" or dtype == torch.float32:
            pytest.skip("kernels copy keys of 16-bit prompts")
        from hybridrt.kernels.attention import prefill_attention_triton as prefill

        monkeypatch.setattr(prefill, "COPY_FROM", 1)
        monkeypatch.setattr(prefill, "ample", lambda q: True)
    lengths, query_lens = [9, 37, 22], [9, 5, 17]
    pair, sinks = Pair(lengths, (16, 16), dtype), torch.randn(4) if sliding_window else None
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    batch = AttentionPrompts(pair.rows, starts, torch.tensor(lengths, dtype=torch.int32), query_lens, lengths)
    q = torch.randn(sum(query_lens), 4, 16).to(dtype) / 5
    got = attention_extend(q, PagedKV(*pair.codes, pair.table, SCALE, sliding_window, sinks, K_SCALE, V_SCALE), batch)
    plain = [t.float() for t in pair.plain]
    want = attention_extend.reference(q.float(), PagedKV(*plain, pair.table, SCALE, sliding_window, sinks), batch)
    close(got, want, dtype)


HEADS, NOPE, ROPE, RANK, VALUE = 3, 6, 4, 12, 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_latent_attention_equals_that_over_dequantised_vectors(dtype):
    lengths, query_lens = [9, 37], [2, 11]
    pair = Pair(lengths, (RANK + ROPE,), dtype, kv_heads=1)
    up_k, up_v = torch.randn(HEADS, NOPE, RANK) / RANK**0.5, torch.randn(HEADS, RANK, VALUE) / RANK**0.5
    weights = LatentWeights(up_k.to(dtype), up_v.to(dtype), torch.rand(RANK) + 0.5, 1e-6)
    (codes,), (plain,) = pair.codes, pair.plain
    coded = PagedKV(codes, codes[..., :RANK], pair.table, SCALE, None, None, K_SCALE, K_SCALE)
    whole = PagedKV(plain.float(), plain.float()[..., :RANK], pair.table, SCALE)
    as_float = weights._replace(up_k=weights.up_k.float(), up_v=weights.up_v.float())
    lens = torch.tensor(lengths, dtype=torch.int32)
    rows = AttentionRows(pair.rows, lens)
    q = torch.randn(2, 1, HEADS, NOPE + ROPE).to(dtype) / 5
    got = from_latent(attention_decode(into_latent(q, weights), coded, rows), weights)
    sums = attention_decode.reference(into_latent.reference(q.float(), as_float), whole, rows)
    close(got, from_latent.reference(sums, as_float), dtype)
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    batch = AttentionPrompts(pair.rows, starts, lens, query_lens, lengths)
    q = torch.randn(sum(query_lens), HEADS, NOPE + ROPE).to(dtype) / 5
    close(latent_extend(q, coded, weights, batch), latent_extend.reference(q.float(), whole, as_float, batch), dtype)


def test_rotated_keys_enter_as_codes():
    torch.manual_seed(0)
    q, k, v = torch.randn(4, 3, 12), torch.randn(4, 2, 12), torch.randn(4, 2, 12)
    positions, slots = torch.tensor([5, 0, 2, 9]), torch.tensor([17, 0, 8, 21], dtype=torch.int32)
    rope = Rope(torch.rand(10, 8), torch.randn(12), torch.randn(12), 1e-6)
    want_q, want_k = qk_norm_rotary.reference(q, k, positions, rope)
    k_cache, v_cache = torch.zeros(2, 3, 8, 2, 12).to(E4M3)
    got = rotary_write_kv(q.clone(), k, v, positions, rope, KVPlaces(k_cache, v_cache, slots, K_SCALE, V_SCALE))
    torch.testing.assert_close(got, want_q)
    for cache, new, scale in ((k_cache, want_k, K_SCALE), (v_cache, v, V_SCALE)):
        cells = cache.float().view(-1, 2, 12)
        # Kernels round sums in another order: a code may be the next one.
        torch.testing.assert_close(
            cells[slots.long()][[0, 2, 3]], encode(new, scale).float()[[0, 2, 3]], rtol=0.13, atol=0
        )
        assert int(cells.any(-1).sum()) == 6


@pytest.mark.parametrize("rotated", [False, True])
def test_latent_vectors_enter_as_codes(rotated):
    torch.manual_seed(0)
    weights = LatentWeights(torch.randn(HEADS, NOPE, RANK), torch.randn(HEADS, RANK, VALUE), torch.rand(RANK), 1e-6)
    q, k = torch.randn(3, HEADS, NOPE + ROPE), torch.randn(3, RANK + ROPE)
    positions, slots = torch.tensor([5, 0, 2]), torch.tensor([9, 0, 5], dtype=torch.int32)
    cos_sin = torch.rand(10, ROPE) if rotated else None
    cache, plain = torch.zeros(3, PAGE, 1, RANK + ROPE).to(E4M3), torch.zeros(3, PAGE, 1, RANK + ROPE)
    write_latent.reference(q.clone(), k.clone(), weights, positions, cos_sin, plain, slots)
    write_latent(q.clone(), k.clone(), weights, positions, cos_sin, cache, slots, V_SCALE)
    torch.testing.assert_close(cache.float(), encode(plain, V_SCALE).float(), rtol=0.13, atol=0)
