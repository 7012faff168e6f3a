"""Paged attention against a loop over tokens and heads that follows the definition of softmax attention."""

import pytest
import torch

from hybridrt.base.errors import ConfigError
from hybridrt.kernels.attention import paged_attention
from hybridrt.kernels.attention.paged_attention import attention_decode, attention_extend, write_kv
from hybridrt.kernels.core.records import AttentionPrompts, AttentionRows, PagedKV
from tests.support.levels import sweep

pytestmark = pytest.mark.usefixtures("provider", "few_multiprocessors")
PAGE, HEAD_DIM, MAX_CONTEXT = 4, 8, 24
SCALE = 0.3


class Cache:
    """Requests of the given lengths in scattered pages; every slot without a token of theirs is NaN, scratch too."""

    def __init__(self, lengths, kv_heads=2, dtype=torch.float32, max_context=MAX_CONTEXT):
        pages = 1 + max_context // PAGE * len(lengths) + 3
        self.k, self.v = (torch.full((pages, PAGE, kv_heads, HEAD_DIM), torch.nan, dtype=dtype) for _ in range(2))
        self.table = torch.zeros(len(lengths) + 3, max_context, dtype=torch.int32)
        self.rows = torch.randperm(len(lengths) + 2)[: len(lengths)].int() + 1
        self.keys, self.values = [], []
        free = iter((torch.randperm(pages - 1) + 1).tolist())
        for row, length in zip(self.rows.tolist(), lengths, strict=True):
            # The whole width is filled, as after a longer previous tenant.
            for start in range(0, max_context, PAGE):
                page = next(free) if start < length else pages - 1
                self.table[row, start : start + PAGE] = torch.arange(page * PAGE, page * PAGE + PAGE)
            k, v = torch.randn(2, length, kv_heads, HEAD_DIM).to(dtype)
            write_kv(k, v, self.k, self.v, self.table[row, :length])
            self.keys.append(k.double())
            self.values.append(v.double())


@pytest.fixture
def few_multiprocessors(monkeypatch):
    """More than the steps here have rows and heads. An H200's would leave most programs without work."""
    from hybridrt.kernels.attention import paged_attention_triton

    monkeypatch.setattr(paged_attention_triton, "multiprocessors", lambda device: 24)


def slow_attention(query, keys, values, visible, sinks=None):
    """query [Hq, D], keys and values [L, Hkv, D], visible: positions, sinks [Hq]. Returns [Hq, D]."""
    out = torch.zeros(query.shape, dtype=torch.float64)
    visible = list(visible)
    for head in range(query.shape[0]):
        kv_head = head // (query.shape[0] // keys.shape[1])
        scores = keys[visible, kv_head] @ query[head].double() * SCALE
        weights = (scores - scores.max()).exp()
        total = weights.sum() + (0 if sinks is None else (sinks[head].double() - scores.max()).exp())
        out[head] = weights / total @ values[visible, kv_head]
    return out


def decode(
    q, k, v, table, rows, seq_lens, *, op=attention_decode, sliding_window=None, out=None, sinks=None, **of_rows
):
    return op(q, PagedKV(k, v, table, SCALE, sliding_window, sinks), AttentionRows(rows, seq_lens, **of_rows), out)


def window(position, sliding_window):
    return range(max(0, position - sliding_window + 1) if sliding_window else 0, position + 1)


def close(got, want, dtype=torch.float32):
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), want, rtol=8 * eps, atol=8 * eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("sliding_window", [None, 1, 5])
@pytest.mark.parametrize(("query_heads", "kv_heads"), [(2, 2), (6, 2), (4, 1)])
@pytest.mark.parametrize("tokens", [1, 3])
def test_decode_of_ragged_rows(dtype, sliding_window, query_heads, kv_heads, tokens):
    torch.manual_seed(0)
    lengths = [9, 3, 20, 4]
    cache = Cache(lengths, kv_heads, dtype)
    merged = torch.randn(len(lengths) + 1, tokens, query_heads + 3, HEAD_DIM).to(dtype)
    q = merged[:, :, 1 : 1 + query_heads]
    rows, seq_lens = torch.cat((cache.rows, torch.zeros(1).int())), torch.tensor([*lengths, 0], dtype=torch.int32)
    out = decode(q, cache.k, cache.v, cache.table, rows, seq_lens, sliding_window=sliding_window, max_len=20)
    assert out.dtype == dtype and torch.equal(out[-1], torch.zeros_like(out[-1]))
    for b, length in enumerate(lengths):
        for t in range(tokens):
            visible = window(length - tokens + t, sliding_window)
            close(out[b, t], slow_attention(q[b, t], cache.keys[b], cache.values[b], visible), dtype)


def test_decode_reads_the_table_s_width_without_a_bound():
    torch.manual_seed(0)
    cache = Cache([7, 24])
    q, seq_lens = torch.randn(2, 1, 4, HEAD_DIM), torch.tensor([7, 24])
    bounded = decode(q, cache.k, cache.v, cache.table, cache.rows, seq_lens, max_len=24)
    close(decode(q, cache.k, cache.v, cache.table, cache.rows, seq_lens), bounded.double())


@pytest.mark.parametrize(("tokens", "context"), [(1, MAX_CONTEXT), (3, MAX_CONTEXT), (2, 400)])
def test_decode_writes_its_result_to_out(tokens, context):
    """Next to other columns, which stay; with contexts that programs share and with such as one walks alone."""
    torch.manual_seed(0)
    cache = Cache([9, min(300, context)], max_context=context)
    q, seq_lens = torch.randn(2, tokens, 4, HEAD_DIM), torch.tensor([9, min(300, context)])
    wide = torch.full((2 * tokens, 4 * HEAD_DIM + 5), torch.nan)
    place = wide[:, 5:].view(2, tokens, 4, HEAD_DIM)
    arguments = (q, cache.k, cache.v, cache.table, cache.rows, seq_lens)
    left = decode(*arguments, out=place)
    assert left.data_ptr() == place.data_ptr() and wide[:, :5].isnan().all()
    assert torch.equal(place, decode(*arguments))


@pytest.mark.parametrize("sliding_window", [None, 5])
@pytest.mark.parametrize("tree", [False, True])
def test_keys_of_padding_drafts_are_not_read(tree, sliding_window):
    """Where they would stand, a row has another's keys or none: NaN here."""
    torch.manual_seed(0)
    cache, tokens, drafts = Cache([9, 4, 5]), 4, [0, 2, 3]
    q = torch.randn(3, tokens, 4, HEAD_DIM)
    seq_lens = torch.tensor([length + tokens - 1 - n for length, n in zip([9, 4, 5], drafts, strict=True)])
    mask = torch.ones(3, tokens, tokens, dtype=torch.bool).tril() if tree else None
    out = decode(
        q, cache.k, cache.v, cache.table, cache.rows, seq_lens.int(), sliding_window=sliding_window,
        mask=mask, num_drafts=torch.tensor(drafts, dtype=torch.int32),
    )  # fmt: skip
    assert out.isfinite().all()
    for b, (length, n) in enumerate(zip([9, 4, 5], drafts, strict=True)):
        for t in range(n + 1):
            visible = window(length - n - 1 + t, sliding_window)
            close(out[b, t], slow_attention(q[b, t], cache.keys[b], cache.values[b], visible))


def test_padding_is_not_written():
    cache = Cache([5])
    before = cache.k.clone(), cache.v.clone()
    k, v = torch.randn(2, 3, 2, HEAD_DIM)
    k[[0, 2]], v[[0, 2]] = torch.inf, torch.inf
    slot = int(cache.table[cache.rows[0], 2])
    write_kv(k, v, cache.k, cache.v, torch.tensor([0, slot, 0], dtype=torch.int32))
    for now, old, new in zip((cache.k, cache.v), before, (k, v), strict=True):
        assert torch.equal(now.view(-1, 2, HEAD_DIM)[slot], new[1])
        now.view(-1, 2, HEAD_DIM)[slot] = old.view(-1, 2, HEAD_DIM)[slot]
        assert torch.equal(now.nan_to_num(), old.nan_to_num()) and not now.isinf().any()


def test_places_that_one_distance_does_not_describe_are_refused():
    from hybridrt.kernels.attention.paged_attention_triton import attention_decode_triton

    cache, q, seq_lens = Cache([9, 7]), torch.randn(2, 2, 4, HEAD_DIM), torch.tensor([9, 7])
    arguments = (q, cache.k, cache.v, cache.table, cache.rows, seq_lens)
    for place in (torch.zeros(2, 3, 4, HEAD_DIM)[:, :2], torch.zeros(2, 2, 4, HEAD_DIM + 1)[..., 1:]):
        with pytest.raises(ConfigError, match="contiguous"):
            decode(*arguments, op=attention_decode_triton, out=place)
        assert not place.any()


@pytest.mark.parametrize("sliding_window", [None, 2])
def test_a_tree_s_nodes_see_the_prefix_and_their_ancestors(sliding_window):
    torch.manual_seed(0)
    parents = [-1, 0, 0, 2, 3, -1]  # the last one is a second root
    ancestors = []
    for t, parent in enumerate(parents):
        ancestors.append([*(ancestors[parent] if parent >= 0 else []), t])
    lengths = [6, 13]
    cache = Cache(lengths)
    mask = torch.zeros(2, 6, 6, dtype=torch.bool)
    for t, seen in enumerate(ancestors):
        mask[:, t, seen] = True
    q = torch.randn(2, 6, 4, HEAD_DIM)
    out = decode(
        q,
        cache.k,
        cache.v,
        cache.table,
        cache.rows,
        torch.tensor(lengths),
        mask=mask,
        sliding_window=sliding_window,
    )
    for b, length in enumerate(lengths):
        prefix = length - 6
        for t, seen in enumerate(ancestors):
            path = [*range(prefix), *(prefix + node for node in seen)]
            visible = path[-sliding_window:] if sliding_window else path
            close(out[b, t], slow_attention(q[b, t], cache.keys[b], cache.values[b], visible))


def test_a_chain_is_the_tree_whose_mask_is_triangular():
    torch.manual_seed(0)
    cache = Cache([6, 11])
    q, seq_lens = torch.randn(2, 3, 4, HEAD_DIM), torch.tensor([6, 11])
    arguments = (q, cache.k, cache.v, cache.table, cache.rows, seq_lens)
    mask = torch.ones(2, 3, 3, dtype=torch.bool).tril()
    for sliding_window in (None, 4):
        chain = decode(*arguments, sliding_window=sliding_window)
        tree = decode(*arguments, sliding_window=sliding_window, mask=mask)
        assert torch.equal(chain, tree)


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles so small that short contexts take many of them, and a group of query heads more than one."""
    from hybridrt.kernels.attention import paged_attention_triton, prefill_attention_triton

    for module in (paged_attention_triton, prefill_attention_triton):
        for name in ("BLOCK_N", "BLOCK_M"):
            monkeypatch.setattr(module, name, 16)


def sinks_of(heads):
    """Scores below, among and above those of keys: each head's largest one comes from another place."""
    return torch.linspace(-3.0, 6.0, heads)


@pytest.mark.parametrize("sliding_window", [None, 5])
@pytest.mark.parametrize("tokens", [1, 3])
def test_decode_with_sinks(sliding_window, tokens):
    torch.manual_seed(0)
    lengths, sinks = [9, 3, 20], sinks_of(6)
    cache, q = Cache(lengths), torch.randn(len(lengths) + 1, tokens, 6, HEAD_DIM)
    rows, seq_lens = torch.cat((cache.rows, torch.zeros(1).int())), torch.tensor([*lengths, 0])
    out = decode(q, cache.k, cache.v, cache.table, rows, seq_lens, sliding_window=sliding_window, sinks=sinks)
    assert torch.equal(out[-1], torch.zeros_like(out[-1]))
    for b, length in enumerate(lengths):
        for t in range(tokens):
            visible = window(length - tokens + t, sliding_window)
            close(out[b, t], slow_attention(q[b, t], cache.keys[b], cache.values[b], visible, sinks))


@pytest.mark.parametrize("sliding_window", [None, 20])
@pytest.mark.parametrize(("multiprocessors", "long"), [(12, 32), (100, 4096), (12, 128)])
def test_sinks_of_contexts_split_among_programs(monkeypatch, small_tiles, sliding_window, multiprocessors, long):
    """Whoever joins the parts, a sink counts once."""
    from hybridrt.kernels.attention import paged_attention_triton

    monkeypatch.setattr(paged_attention_triton, "UNCUT_CONTEXT", long)
    monkeypatch.setattr(paged_attention_triton, "PART", 16)
    monkeypatch.setattr(paged_attention_triton, "multiprocessors", lambda device: multiprocessors)
    torch.manual_seed(0)
    lengths, sinks = [70, 6, 33], sinks_of(8)
    cache, q = Cache(lengths, max_context=96), torch.randn(len(lengths), 1, 8, HEAD_DIM)
    arguments = (q, cache.k, cache.v, cache.table, cache.rows, torch.tensor(lengths))
    out = decode(*arguments, sliding_window=sliding_window, sinks=sinks)
    for b, length in enumerate(lengths):
        visible = window(length - 1, sliding_window)
        close(out[b, 0], slow_attention(q[b, 0], cache.keys[b], cache.values[b], visible, sinks))


@pytest.mark.parametrize("sliding_window", [None, 20])
@pytest.mark.parametrize(
    ("multiprocessors", "long"), sweep([(12, 32), (200, 4096), (1, 4096), (12, 128), (100, 4096)], 5)
)
def test_decode_of_contexts_split_among_programs(monkeypatch, small_tiles, sliding_window, multiprocessors, long):
    """A device that is full or not, contexts that are long for it or not; parts joined by more programs than it has
    multiprocessors or fewer, which load them after their sums or next to them."""
    from hybridrt.kernels.attention import paged_attention_triton

    monkeypatch.setattr(paged_attention_triton, "UNCUT_CONTEXT", long)
    monkeypatch.setattr(paged_attention_triton, "PART", 16)
    monkeypatch.setattr(paged_attention_triton, "PARTS_AT_ONCE", 2)  # of up to six
    monkeypatch.setattr(paged_attention_triton, "multiprocessors", lambda device: multiprocessors)
    torch.manual_seed(0)
    lengths, tokens = [6, 70, 33], 5
    cache = Cache(lengths, max_context=96)
    q = torch.randn(len(lengths) + 1, tokens, 8, HEAD_DIM)
    rows, seq_lens = torch.cat((cache.rows, torch.zeros(1).int())), torch.tensor([*lengths, 0])
    mask = torch.ones(len(q), tokens, tokens, dtype=torch.bool).tril()
    mask[:, 3, 1:3] = False  # node 3 is another child of the root
    arguments = (q, cache.k, cache.v, cache.table, rows, seq_lens)
    out = decode(*arguments, sliding_window=sliding_window, mask=mask)
    assert torch.equal(out[-1], torch.zeros_like(out[-1]))
    again = decode(*arguments, sliding_window=sliding_window, mask=mask)
    assert torch.equal(again, out), "the order in which programs arrive changes nothing, and they count from zero"
    for b, length in enumerate(lengths):
        for t in range(tokens):
            path = [*range(length - tokens), *(length - tokens + node for node in range(tokens) if mask[b, t, node])]
            visible = path[-sliding_window:] if sliding_window else path
            close(out[b, t], slow_attention(q[b, t], cache.keys[b], cache.values[b], visible))


@pytest.mark.parametrize("sinks", [None, "sinks"])
@pytest.mark.parametrize("sliding_window", [None, 20])
@pytest.mark.parametrize(
    ("multiprocessors", "long", "most", "room"), [(50, 96, 8, 16), (50, 96, 4, 8), (11, 95, 2, 4), (11, 96, 8, 0)]
)
def test_decode_of_rows_whose_last_program_joins(
    monkeypatch, small_tiles, sliding_window, sinks, multiprocessors, long, most, room
):
    """It joins all rows that are cut, one of two, or none: a launch of its own joins the others. In the last case none
    is cut."""
    from hybridrt.kernels.attention import paged_attention_triton as module

    monkeypatch.setattr(module, "UNCUT_CONTEXT", long)
    monkeypatch.setattr(module, "PART", 64)
    monkeypatch.setattr(module, "JOINED_PARTS", most)
    monkeypatch.setattr(module, "JOINED_WITH", {(16, False): (1, 10, 2 if multiprocessors == 50 else 1)})
    monkeypatch.setattr(module, "multiprocessors", lambda device: multiprocessors)
    tile = module._tile(4, HEAD_DIM, torch.float32, False)
    walk = module._walk(4, 2, 96, tile, torch.device("cpu"))
    assert (walk["ROOM"], walk["JOIN"]) == (room, most)
    torch.manual_seed(0)
    lengths, sinks = [70, 6, 60], sinks and sinks_of(8)
    cache, q = Cache(lengths, max_context=96), torch.randn(len(lengths) + 1, 1, 8, HEAD_DIM)
    rows, seq_lens = torch.cat((cache.rows, torch.zeros(1).int())), torch.tensor([*lengths, 0])
    arguments = (q, cache.k, cache.v, cache.table, rows, seq_lens)
    out = decode(*arguments, sliding_window=sliding_window, sinks=sinks)
    assert torch.equal(decode(*arguments, sliding_window=sliding_window, sinks=sinks), out)
    assert torch.equal(out[-1], torch.zeros_like(out[-1]))
    for b, length in enumerate(lengths):
        visible = window(length - 1, sliding_window)
        close(out[b, 0], slow_attention(q[b, 0], cache.keys[b], cache.values[b], visible, sinks))


@pytest.mark.parametrize(
    ("rows", "context", "room"),
    [(1, 2**20, 128), (1, 32, 0), (13, 2**20, 128), (14, 2**20, 56), (32, 2**20, 66), (32, 2048, 66), (33, 2**20, 128),
     (64, 2048, 128), (66, 2**20, 128), (512, 2048, 0), (512, 4096, 128)],
)  # fmt: skip
def test_room_for_parts(monkeypatch, rows, context, room):
    """Short rows that fill the device are not cut. A row's last program joins a few parts with a medium number of rows,
    and any number where rows fill the device."""
    from hybridrt.kernels.attention import paged_attention_triton

    monkeypatch.setattr(paged_attention_triton, "multiprocessors", lambda device: 132)
    tile = paged_attention_triton._tile(4, 128, torch.bfloat16, False)
    walk = paged_attention_triton._walk(rows, 2, context, tile, torch.device("cpu"))
    assert (walk["ROOM"], walk["JOIN"]) == (room, 256 if rows >= 66 else 8 if 14 <= rows <= 32 else 0)


def test_tiles_over_codes(monkeypatch):
    """Keys, warps: a step of few programs has long tiles, one of many has few registers for each."""
    from hybridrt.kernels.attention import paged_attention_triton

    monkeypatch.setattr(paged_attention_triton, "multiprocessors", lambda device: 132)
    tile = paged_attention_triton._tile(6, 128, torch.bfloat16, True)
    walks = [paged_attention_triton._walk(rows, 2, 2048, tile, torch.device("cpu"), True) for rows in (1, 32, 128, 256)]
    assert [(walk["BLOCK_N"], walk["num_warps"]) for walk in walks] == [(64, 4), (128, 4), (128, 4), (64, 2)]


@pytest.fixture
def copying(monkeypatch):
    """Chunks of any length copy their keys and values together first, where the dtype allows it."""
    from hybridrt.kernels.attention import prefill_attention_triton

    monkeypatch.setattr(prefill_attention_triton, "COPY_FROM", 0)


def extend(q, cache, query_lens, seq_lens, sliding_window=None, out=None, sinks=None):
    starts, lens = torch.tensor([0, *query_lens]).cumsum(0).int(), torch.tensor(seq_lens, dtype=torch.int32)
    kv = PagedKV(cache.k, cache.v, cache.table, SCALE, sliding_window, sinks)
    return attention_extend(q, kv, AttentionPrompts(cache.rows, starts, lens, query_lens, seq_lens), out)


def check_extended(out, q, cache, query_lens, seq_lens, sliding_window=None, sinks=None):
    token = 0
    for b, (seq_len, query_len) in enumerate(zip(seq_lens, query_lens, strict=True)):
        for i in range(query_len):
            visible = window(seq_len - query_len + i, sliding_window)
            close(out[token], slow_attention(q[token], cache.keys[b], cache.values[b], visible, sinks), q.dtype)
            token += 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("sliding_window", [None, 20])
def test_extend_over_many_tiles(small_tiles, copying, sliding_window, dtype):
    torch.manual_seed(0)
    seq_lens, query_lens = [71, 37, 20], [9, 37, 2]  # a tile whose first query is the last but one of a block of keys
    cache, q = Cache(seq_lens, dtype=dtype, max_context=96), torch.randn(sum(query_lens), 6, HEAD_DIM).to(dtype)
    out = extend(q, cache, query_lens, seq_lens, sliding_window)
    check_extended(out, q, cache, query_lens, seq_lens, sliding_window)


@pytest.mark.parametrize(("dtype", "sliding_window"), [(torch.float32, None), (torch.float32, 20), (torch.float16, 20)])
def test_extend_with_sinks(small_tiles, copying, monkeypatch, sliding_window, dtype):
    """Over pages, and over copied keys of the 16-bit dtype; the plain torch takes some tokens at a time. A head has
    no sink: its score is -inf."""
    monkeypatch.setattr(paged_attention, "SCORES", 6 * 71 * 4)
    torch.manual_seed(0)
    seq_lens, query_lens, sinks = [71, 37, 20], [9, 37, 2], sinks_of(6)
    sinks[2] = float("-inf")
    cache, q = Cache(seq_lens, dtype=dtype, max_context=96), torch.randn(sum(query_lens), 6, HEAD_DIM).to(dtype)
    out = extend(q, cache, query_lens, seq_lens, sliding_window, sinks=sinks)
    check_extended(out, q, cache, query_lens, seq_lens, sliding_window, sinks)


@pytest.mark.parametrize("sliding_window", [None, 3])
def test_copied_keys_of_many_rows(copying, sliding_window):
    """More rows than are added up at a time, some without a new token."""
    torch.manual_seed(0)
    query_lens = [1 + i % 2 for i in range(66)] + [0, 2]
    seq_lens = [n + i % 7 for i, n in enumerate(query_lens)]
    cache, q = Cache(seq_lens, 1, torch.float16), torch.randn(sum(query_lens), 2, HEAD_DIM).half()
    out = extend(q, cache, query_lens, seq_lens, sliding_window)
    check_extended(out, q, cache, query_lens, seq_lens, sliding_window)


@pytest.mark.parametrize("sliding_window", [None, 20])
def test_copied_keys_give_the_bits_of_pages(small_tiles, monkeypatch, sliding_window):
    """Who else is in the batch decides which way a chunk goes, and may not change its tokens."""
    from hybridrt.kernels.attention import prefill_attention_triton

    torch.manual_seed(0)
    seq_lens, query_lens = [70, 37], [30, 37]
    cache, q = Cache(seq_lens, dtype=torch.float16, max_context=96), torch.randn(67, 6, HEAD_DIM).half()
    pages = extend(q, cache, query_lens, seq_lens, sliding_window)
    monkeypatch.setattr(prefill_attention_triton, "COPY_FROM", 0)
    assert torch.equal(extend(q, cache, query_lens, seq_lens, sliding_window), pages)


def test_tiles_of_copied_keys(monkeypatch):
    """Up to three large tiles for each multiprocessor become smaller ones; those of heads of 64 and 256 do not."""
    from hybridrt.kernels.attention import prefill_attention_triton as prefill

    monkeypatch.setattr(prefill, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(prefill, "ample", lambda q: True)
    for heads, kv_heads, dim, query_lens, rows in (
        (12, 2, 128, [3072], 64), (12, 2, 128, [4224], 64), (12, 2, 128, [4225], 128), (12, 2, 128, [8192], 128),
        (12, 2, 128, [1400, 1500], 64), (24, 4, 64, [1536], 128), (8, 2, 256, [2048], 128),
        (32, 8, 128, [1568], 64), (32, 8, 128, [4096], 128),
    ):  # fmt: skip
        q = torch.empty(1, heads, dim, dtype=torch.bfloat16)
        tile = prefill.tile_of(q, dim, kv_heads, query_lens, copied=True)
        assert (tile["BLOCK_M"], tile["BLOCK_N"]) == (rows, 64), (heads, query_lens)
        assert tile["num_warps"] == 4 or dim > 128


@pytest.mark.parametrize("spare", [0, -1])
def test_a_copy_of_keys_that_is_too_large_is_not_made(provider, copying, monkeypatch, spare):
    """Keys and values of two heads, 130 tokens in tiles of 64, 16 numbers of 2 bytes each."""
    from hybridrt.kernels.attention import prefill_attention_triton

    torch.manual_seed(0)
    copies, copy = [], prefill_attention_triton.copy_keys
    monkeypatch.setattr(prefill_attention_triton, "MOST_COPIED", 2 * 2 * 192 * 16 * 2 + spare)
    monkeypatch.setattr(prefill_attention_triton, "copy_keys", lambda *args: copies.append(args) or copy(*args))
    cache, q = Cache([130], dtype=torch.float16, max_context=144), torch.randn(3, 4, HEAD_DIM).half()
    check_extended(extend(q, cache, [3], [130]), q, cache, [3], [130])
    assert len(copies) == (provider != "torch" and spare == 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("sliding_window", [None, 5, 100])
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_extend_of_ragged_chunks_with_and_without_prefix(dtype, sliding_window, kv_heads):
    torch.manual_seed(0)
    seq_lens, query_lens = [9, 17, 5, 8, 4], [9, 6, 1, 0, 4]
    cache, total = Cache(seq_lens, kv_heads, dtype), sum(query_lens)
    q = torch.randn(total + 2, 4, HEAD_DIM + 3).to(dtype)[..., :HEAD_DIM]
    out = extend(q, cache, query_lens, seq_lens, sliding_window)
    assert out.dtype == dtype and torch.equal(out[total:], torch.zeros_like(out[total:]))
    check_extended(out, q, cache, query_lens, seq_lens, sliding_window)
    wide = torch.full((total + 2, 3 + 4 * HEAD_DIM + 1), torch.nan, dtype=dtype)
    place = wide[:, 3:-1].unflatten(1, (4, HEAD_DIM))
    assert extend(q, cache, query_lens, seq_lens, sliding_window, place).data_ptr() == place.data_ptr()
    assert torch.equal(place, out) and int(wide.isnan().sum()) == 4 * (total + 2)


def forget(cache, kept):
    """What lies before position kept[b] of row b is lost: its table entries lead nowhere, its pages to NaN."""
    for row, first in zip(cache.rows.tolist(), kept, strict=True):
        for k_or_v in (cache.k, cache.v):
            k_or_v.view(-1, *k_or_v.shape[2:])[cache.table[row, :first].long()] = torch.nan
        cache.table[row, :first] = -(2**30)


@pytest.mark.parametrize("tree", [False, True])
def test_decode_reads_nothing_before_the_window(small_tiles, tree):
    torch.manual_seed(0)
    lengths, tokens, sliding_window = [70, 6, 33], 3, 20
    q = torch.randn(len(lengths), tokens, 4, HEAD_DIM)
    mask = torch.ones(3, tokens, tokens, dtype=torch.bool).tril() if tree else None
    cache, seq_lens = Cache(lengths, max_context=96), torch.tensor(lengths)

    def attend():
        arguments = (q, cache.k, cache.v, cache.table, cache.rows, seq_lens)
        return decode(*arguments, sliding_window=sliding_window, mask=mask)

    whole = attend()
    forget(cache, [max(n - tokens - sliding_window + 1, 0) for n in lengths])
    assert torch.equal(attend(), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_extend_reads_nothing_before_the_window(small_tiles, copying, dtype):
    torch.manual_seed(0)
    seq_lens, query_lens, sliding_window = [60, 33, 7], [40, 1, 7], 11
    q, cache = torch.randn(sum(query_lens), 4, HEAD_DIM).to(dtype), Cache(seq_lens, dtype=dtype, max_context=96)
    whole = extend(q, cache, query_lens, seq_lens, sliding_window)
    forget(cache, [max(n - new - sliding_window + 1, 0) for n, new in zip(seq_lens, query_lens, strict=True)])
    assert torch.equal(extend(q, cache, query_lens, seq_lens, sliding_window), whole)


def test_chunks_equal_the_whole():
    torch.manual_seed(0)
    cache = Cache([19])
    q = torch.randn(19, 4, HEAD_DIM)

    whole = extend(q, cache, [19], [19])
    chunks = [extend(q[a:b], cache, [b - a], [b]) for a, b in ((0, 1), (1, 12), (12, 19))]
    torch.testing.assert_close(torch.cat(chunks), whole)
    last = decode(q[None, -1:], cache.k, cache.v, cache.table, cache.rows, torch.tensor([19]), max_len=19)
    torch.testing.assert_close(last[0, 0], whole[-1])


def test_write_kv_touches_its_slots_alone():
    k_cache, v_cache = (torch.full((5, PAGE, 2, HEAD_DIM), torch.nan) for _ in range(2))
    merged = torch.randn(3, 6, HEAD_DIM)
    slots = torch.tensor([6, 19, 4], dtype=torch.int32)
    write_kv(merged[:, :2], merged[:, 4:], k_cache, v_cache, slots)
    assert torch.equal(k_cache.view(-1, 2, HEAD_DIM)[slots], merged[:, :2])
    assert torch.equal(v_cache.view(-1, 2, HEAD_DIM)[slots], merged[:, 4:])
    assert int(k_cache.isnan().sum()) == int(v_cache.isnan().sum()) == (20 - 3) * 2 * HEAD_DIM
