"""Latent attention against a loop over tokens and heads that follows its definition: keys and values of each head are
made from the latent vectors, and a query meets them one by one."""

from functools import partial

import pytest
import torch

from hybridrt.kernels.attention.latent_attention import from_latent, into_latent, latent_extend, write_latent
from hybridrt.kernels.attention.paged_attention import attention_decode
from hybridrt.kernels.core.records import AttentionPrompts, AttentionRows, LatentWeights, PagedKV
from tests.support.levels import sweep

pytestmark = pytest.mark.usefixtures("provider")
PAGE, HEADS, NOPE, ROPE, RANK, VALUE, WIDTH = 4, 3, 6, 4, 10, 5, 96
SCALE = (NOPE + ROPE) ** -0.5


class Latents:
    """Requests of the given lengths in scattered pages; every slot without a token of theirs is NaN, scratch too."""

    def __init__(self, lengths, dtype=torch.float32):
        torch.manual_seed(0)
        up_k, up_v = torch.randn(HEADS, NOPE, RANK) / RANK**0.5, torch.randn(HEADS, RANK, VALUE) / RANK**0.5
        self.weights = LatentWeights(up_k.to(dtype), up_v.to(dtype), torch.rand(RANK) + 0.5, 1e-6)
        pages = 1 + WIDTH // PAGE * len(lengths) + 3
        self.cache = torch.full((pages, PAGE, 1, RANK + ROPE), torch.nan, dtype=dtype)
        self.table = torch.zeros(len(lengths) + 3, WIDTH, dtype=torch.int32)
        self.rows, self.vectors = torch.randperm(len(lengths) + 2)[: len(lengths)].int() + 1, []
        free = iter((torch.randperm(pages - 1) + 1).tolist())
        for row, length in zip(self.rows.tolist(), lengths, strict=True):
            for start in range(0, WIDTH, PAGE):
                page = next(free) if start < length else pages - 1
                self.table[row, start : start + PAGE] = torch.arange(page * PAGE, page * PAGE + PAGE)
            self.vectors.append(torch.randn(length, RANK + ROPE).to(dtype))
            self.cache.view(-1, RANK + ROPE)[self.table[row, :length].long()] = self.vectors[-1]

    @property
    def kv(self):
        return PagedKV(self.cache, self.cache[..., :RANK], self.table, SCALE)

    def attend(self, query, request, visible):
        """query [H, NOPE + ROPE], visible: positions. Returns [H, VALUE]."""
        up_k, up_v, vectors = self.weights.up_k.double(), self.weights.up_v.double(), self.vectors[request].double()
        out = torch.zeros(HEADS, VALUE, dtype=torch.float64)
        for head in range(HEADS):
            keys = [torch.cat((up_k[head] @ vectors[i, :RANK], vectors[i, RANK:])) for i in visible]
            weights = (torch.stack([key @ query[head].double() for key in keys]) * SCALE).softmax(0)
            out[head] = sum(w * (vectors[i, :RANK] @ up_v[head]) for w, i in zip(weights, visible, strict=True))
        return out

    def decode(self, q, rows, seq_lens, **of_rows):
        sums = attention_decode(into_latent(q, self.weights), self.kv, AttentionRows(rows, seq_lens, **of_rows))
        return from_latent(sums, self.weights)

    def extend(self, q, query_lens, seq_lens):
        starts, lens = torch.tensor([0, *query_lens]).cumsum(0).int(), torch.tensor(seq_lens, dtype=torch.int32)
        return latent_extend(q, self.kv, self.weights, AttentionPrompts(self.rows, starts, lens, query_lens, seq_lens))


def close(got, want, dtype=torch.float32):
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), want, rtol=16 * eps, atol=16 * eps)


@pytest.fixture
def small_tiles(monkeypatch):
    from hybridrt.kernels.attention import paged_attention_triton, prefill_attention_triton

    for module in (paged_attention_triton, prefill_attention_triton):
        for name in ("BLOCK_N", "BLOCK_M"):
            monkeypatch.setattr(module, name, 16)


@pytest.mark.parametrize(("dtype", "tokens"), [(torch.float32, 3), (torch.float16, 1)])
def test_decode_of_ragged_rows(dtype, tokens):
    lengths = [9, 3, 20]
    latents = Latents(lengths, dtype)
    q = torch.randn(4, tokens, HEADS + 1, NOPE + ROPE).to(dtype)[:, :, 1:]
    rows, seq_lens = torch.cat((latents.rows, torch.zeros(1).int())), torch.tensor([*lengths, 0], dtype=torch.int32)
    out = latents.decode(q, rows, seq_lens)
    assert out.dtype == dtype and torch.equal(out[-1], torch.zeros_like(out[-1]))
    for b, length in enumerate(lengths):
        for t in range(tokens):
            close(out[b, t], latents.attend(q[b, t], b, range(length - tokens + t + 1)), dtype)


@pytest.fixture
def latent_walk(monkeypatch):
    """Programs walk contexts as those of wide vectors do, on a device of so many multiprocessors."""
    from hybridrt.kernels.attention import paged_attention_triton as module

    def walk_on(multiprocessors):
        def walk(rows, head_blocks, max_context, tile, device, coded):
            return module._walk_latent(rows, head_blocks, max_context, tile["BLOCK_N"], device, coded)

        monkeypatch.setattr(module, "_walk", walk)
        monkeypatch.setattr(module, "multiprocessors", lambda device: multiprocessors)
        monkeypatch.setattr(module, "UNCUT_CONTEXT", 32)
        monkeypatch.setattr(module, "PART", 16)

    return walk_on


@pytest.mark.parametrize("multiprocessors", sweep([8, 1, 30], 2))
def test_trees_over_contexts_split_among_programs(latent_walk, small_tiles, multiprocessors):
    """Parts that a launch of its own joins, or a row's last program. Padding drafts are not read, and a repeated call
    gives the same bits."""
    latent_walk(multiprocessors)
    lengths, tokens, drafts = [70, 8], 7, [6, 4]
    latents, q = Latents(lengths), torch.randn(2, tokens, HEADS, NOPE + ROPE)
    mask = torch.ones(2, tokens, tokens, dtype=torch.bool).tril()
    mask[:, 3, 1:3] = False  # node 3 is another child of the root
    seq_lens = torch.tensor([length + tokens - 1 - n for length, n in zip(lengths, drafts, strict=True)])
    args = {"mask": mask, "num_drafts": torch.tensor(drafts, dtype=torch.int32)}
    out = latents.decode(q, latents.rows, seq_lens.int(), **args)
    assert out.isfinite().all() and torch.equal(latents.decode(q, latents.rows, seq_lens.int(), **args), out)
    for b, (length, n) in enumerate(zip(lengths, drafts, strict=True)):
        for t in range(n + 1):
            first = length - n - 1
            path = [*range(first), *(first + node for node in range(t + 1) if mask[b, t, node])]
            close(out[b, t], latents.attend(q[b, t], b, path))


@pytest.mark.parametrize("multiprocessors", [1, 30])
def test_table_entries_behind_a_row_are_not_read(provider, latent_walk, monkeypatch, small_tiles, multiprocessors):
    """The last row ends where the table does: slots that are loaded ahead would come from another tensor's memory."""
    latent_walk(multiprocessors)
    latents, places = Latents([20]), list[int]()
    if provider != "torch":
        from triton.runtime.interpreter import interpreter_builder as builder

        def noted(load, ptrs, mask, *options):
            places.extend((ptrs.data[mask.data].astype(int) - latents.table.data_ptr()).ravel() // 4)
            return load(ptrs, mask, *options)

        monkeypatch.setattr(builder, "create_masked_load", partial(noted, builder.create_masked_load))
    latents.decode(torch.randn(1, 1, HEADS, NOPE + ROPE), latents.rows, torch.tensor([20], dtype=torch.int32))
    start = int(latents.rows[0]) * WIDTH
    read = {place - start for place in places if 0 <= place - start < WIDTH}
    assert read == (set() if provider == "torch" else set(range(20)))


def test_shares_of_wide_vectors(monkeypatch):
    """A multiprocessor has room for one program: rows that fill the device are whole, if no context is so long that it
    would keep the others waiting. The last program joins parts only there."""
    from hybridrt.kernels.attention import paged_attention_triton as module

    cpu, found = torch.device("cpu"), {}
    monkeypatch.setattr(module, "multiprocessors", lambda device: 132)
    for rows in (1, 44, 45, 66, 67, 140):
        for context in (2048, 2**17):
            walk = module._walk(rows, 1, context, module._tile(32, 512, torch.bfloat16, False), cpu)
            found[rows, context] = walk["ROOM"], walk["FEW"], walk["JOIN"] > 0
    assert [found[rows, 2048] for rows in (1, 44, 45, 66, 67, 140)] == [
        (64, 1, False), (64, 1, False), (64, 2, False), (64, 2, False), (0, 1, True), (0, 1, True),
    ]  # fmt: skip
    assert [found[rows, 2**17] for rows in (1, 44, 66, 140)] == [
        (64, 1, False), (64, 1, False), (64, 2, False), (64, 1, True),
    ]  # fmt: skip


@pytest.mark.parametrize(("way", "dtype"), [
    ("absorbed", torch.float32), ("decompressed", torch.float16),
    pytest.param("absorbed", torch.float16, marks=pytest.mark.slow),
    pytest.param("by turns", torch.float16, marks=pytest.mark.slow),
])  # fmt: skip
def test_extend_of_ragged_chunks_with_and_without_prefix(monkeypatch, small_tiles, way, dtype):
    """Both ways to attend, all heads at once or one after the other."""
    from hybridrt.kernels.attention import latent_attention_triton

    monkeypatch.setattr(latent_attention_triton, "decompressed_pays", lambda *_: way != "absorbed")
    if way == "by turns":
        monkeypatch.setattr(latent_attention_triton, "MAX_DECOMPRESSED", 1)
    seq_lens, query_lens = [71, 37, 5, 8], [9, 37, 2, 0]
    latents, total = Latents(seq_lens, dtype), sum(query_lens)
    q = torch.randn(total + 2, HEADS, NOPE + ROPE + 3).to(dtype)[..., : NOPE + ROPE]
    out = latents.extend(q, query_lens, seq_lens)
    assert out.dtype == dtype and torch.equal(out[total:], torch.zeros_like(out[total:]))
    token = 0
    for b, (seq_len, query_len) in enumerate(zip(seq_lens, query_lens, strict=True)):
        for i in range(query_len):
            close(out[token], latents.attend(q[token], b, range(seq_len - query_len + i + 1)), dtype)
            token += 1


def test_too_many_vectors_are_not_copied(provider, monkeypatch):
    from hybridrt.kernels.attention import latent_attention_triton, prefill_attention_triton

    decompress, latents, seen = latent_attention_triton._decompressed, Latents([9], torch.float16), []
    monkeypatch.setattr(latent_attention_triton, "_decompressed", lambda *args: seen.append(args) or decompress(*args))
    q = torch.randn(9, HEADS, NOPE + ROPE).half()
    for most in (9 * (RANK + ROPE) * 2, 9 * (RANK + ROPE) * 2 - 1):
        monkeypatch.setattr(prefill_attention_triton, "MOST_COPIED", most)
        close(latents.extend(q, [9], [9])[-1], latents.attend(q[-1], 0, range(9)), torch.float16)
    assert len(seen) == (provider != "torch")


@pytest.mark.parametrize("rotated", [0, 2, ROPE])
def test_vectors_are_normed_rotated_and_stored(rotated):
    """Padding is dropped; what is not rotated passes through."""
    latents = Latents([5])
    slots, positions = latents.table[latents.rows[0], :3].clone(), torch.tensor([7, 0, 3])
    slots[1] = 0  # padding
    angles = torch.arange(10.0)[:, None] * torch.tensor([1.0, 0.3])[: rotated // 2]
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1) if rotated else None
    q, k, before = torch.randn(3, HEADS, NOPE + ROPE), torch.randn(3, RANK + ROPE + 2)[:, 1:-1], latents.cache.clone()

    def turn(x, position):
        half, y = rotated // 2, x.clone()
        for i in range(half):
            cos, sin = angles[position, i].cos(), angles[position, i].sin()
            y[..., i], y[..., half + i] = (
                x[..., i] * cos - x[..., half + i] * sin,
                x[..., half + i] * cos + x[..., i] * sin,
            )
        return y

    wanted_q, wanted = q.clone(), latents.cache.view(-1, RANK + ROPE).clone()
    for t, position in enumerate(positions.tolist()):
        wanted_q[t, :, NOPE:] = turn(q[t, :, NOPE:], position)
        latent = k[t, :RANK] / (k[t, :RANK].square().mean() + 1e-6).sqrt() * latents.weights.norm
        if slots[t]:
            wanted[slots[t]] = torch.cat((latent, turn(k[t, RANK:], position)))
    got = write_latent(q, k, latents.weights, positions, cos_sin, latents.cache, slots)
    torch.testing.assert_close(got, wanted_q)
    torch.testing.assert_close(latents.cache.view(-1, RANK + ROPE), wanted, equal_nan=True)
    assert torch.equal(latents.cache[0].nan_to_num(), before[0].nan_to_num())


# Prompts, new tokens of each and tokens before them; microseconds on an H200, absorbed and with keys and values made.
TIMES = [
    (1, 1024, 0, 226, 61), (1, 512, 0, 80, 33), (1, 128, 0, 24, 18), (1, 512, 8192, 1299, 310),
    (1, 128, 8192, 474, 312), (1, 16, 8192, 448, 335), (8, 64, 2048, 351, 373), (8, 16, 8192, 546, 2405),
    (8, 128, 0, 94, 45),
]  # fmt: skip


def kimi():
    """A query and weights of Kimi-Linear: 32 heads of 128 and 128, vectors of 512 numbers and 64."""
    weights = LatentWeights(torch.empty(32, 128, 512), torch.empty(32, 512, 128), torch.empty(512), 1e-6)
    return torch.empty(1, 32, 192, dtype=torch.bfloat16), weights


def test_keys_and_values_are_made_where_that_was_faster():
    from hybridrt.kernels.attention.latent_attention_triton import decompressed_pays

    for prompts, tokens, before, absorbed, made in TIMES:
        pays = decompressed_pays(*kimi(), [tokens] * prompts, [before + tokens] * prompts)
        assert pays == (made < absorbed), (prompts, tokens, before)


def test_a_token_behind_a_very_long_prefix_is_absorbed():
    """Keys and values of a few heads fit into memory at a time, so that few programs would walk them."""
    from hybridrt.kernels.attention.latent_attention_triton import decompressed_pays

    assert not decompressed_pays(*kimi(), [1], [100_001])


def test_tiles_over_keys_and_values_that_were_made():
    """Long prompts share what a program loads among 256 queries, few queries have small tiles."""
    from hybridrt.kernels.attention import latent_attention_triton, prefill_attention_triton

    q, _ = kimi()
    for query_lens, rows, warps in (
        ([8192], 256, 8), ([2048] * 4, 256, 8), ([2048], 128, 8), ([512], 128, 8), ([256], 64, 4), ([64] * 64, 64, 4),
        ([8192, 100], 128, 8), ([16], 16, 4),
    ):  # fmt: skip
        tile = latent_attention_triton._tile_of(q, 128, 128, query_lens)
        assert (tile["BLOCK_M"], tile["num_warps"]) == (rows, warps), query_lens
    wide = prefill_attention_triton.tile_of(q, 256, 32, [8192], copied=True)
    assert latent_attention_triton._tile_of(q, 128, 256, [8192]) == wide


@pytest.mark.parametrize(
    ("nope", "rope", "value"), [(128, 64, 128), (128, 128, 128), (96, 80, 96), (128, 128, 64), (128, 65, 16)]
)
def test_a_tile_over_keys_and_values_fits_shared_memory(nope, rope, value):
    """Queries and all stages of keys, values and rotated parts, as the compiler lays them out."""
    from hybridrt.base.device import KNOWN
    from hybridrt.kernels.attention import latent_attention_triton
    from hybridrt.kernels.core.launch import dot_width

    q = torch.empty(1, 32, nope + rope, dtype=torch.bfloat16)
    for query_lens in ([8192], [2048] * 4, [2048], [512], [8192, 100]):
        tile = latent_attention_triton._tile_of(q, nope, value, query_lens)
        key = dot_width(nope) + dot_width(rope)
        numbers = tile["BLOCK_M"] * key + tile["num_stages"] * tile["BLOCK_N"] * (key + dot_width(value))
        assert 2 * numbers < KNOWN["h200"].shared_memory, (query_lens, tile)
