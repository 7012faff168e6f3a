"""Calls of the operations at the shapes of real models, on the meta device, whose kernels are compiled for sm_90.

A case is an operation and its arguments one by one (`tests/support/flat.py`). Activations are bfloat16.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hybridrt.kernels.core.chunk_plan import ChunkPlan
from hybridrt.kernels.core.records import SavedStates
from hybridrt.kernels.dense.pipeline_tiles import has_pipeline
from hybridrt.kernels.quant.fp8_linear import FEW_TOKENS
from hybridrt.kernels.sampling.sampling import Penalties
from hybridrt.kernels.state.state_ring import RingFolds
from tests.support.quant_weights import FORMATS, empty_weight

Args = dict[str, Any]
Cases = Iterator[tuple[str, Args]]


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def int32(*shape: int) -> Tensor:
    return meta(*shape, dtype=torch.int32)


def f32(*shape: int) -> Tensor:
    return meta(*shape, dtype=torch.float32)


def flags(*shape: int) -> Tensor:
    return meta(*shape, dtype=torch.bool)


def slots(rows: int) -> Args:
    same = int32(rows)
    return {"read_state_slots": same, "write_state_slots": same}


def stored(rows: int, tokens: int, *state: int, dtype: torch.dtype = torch.float32) -> Args:
    return {"stored": meta(129, tokens, *state, dtype=dtype), "rows": int32(rows)}


def ring(rows: int, width: int, values: tuple[int, int], keys: tuple[int, int]) -> Args:
    """A state ring; values and keys: heads and their width."""
    (heads, dim), (groups, state_dim) = values, keys
    pools = {"values": meta(129, heads, width, dim), "keys": meta(129, groups, width, state_dim)}
    return pools | {"gates": f32(129, heads, width)} | {name: int32(rows) for name in ("rows", "start", "length")}


def channel_ring(rows: int, width: int, heads: int) -> Args:
    """A state ring of Kimi Delta Attention."""
    return ring(rows, width, (heads, DIM), (heads, DIM)) | {"gates": f32(129, heads, width, DIM)}


def fold(states: Tensor, rings: Args, A: Tensor | None) -> tuple[str, Args]:
    """Of one layer."""
    rows = len(rings["rows"])
    pool = {"states": states[None]} | {name: rings[name][None] for name in ("values", "keys", "gates")}
    folds = RingFolds(int32(rows), rings["rows"], rings["start"], rings["length"], int32(1), int32(rows))
    return "fold_ring", pool | {"A": None if A is None else A[None], "folds": folds}


def prompts(rows: int, length: int, chunk_size: int) -> Args:
    chunks, tokens = rows * length // chunk_size, rows * length
    per_row, lengths = length // chunk_size, (length,) * rows
    plan = ChunkPlan(int32(chunks + 1), int32(chunks), int32(rows), int32(rows), per_row, chunk_size, tokens, lengths)
    return slots(rows) | {"query_start_loc": int32(rows + 1), "has_initial_state": flags(rows), "plan": plan}


MAMBA2_SHAPES = ((24, 128, 256, 1), (128, 64, 128, 8))  # Falcon-H1-7B and Nemotron-H-8B: H, P, N, G


def mamba2() -> Cases:
    for shape in MAMBA2_SHAPES:
        for state in (torch.bfloat16, torch.float32):
            for batch, tokens, width in ((128, 1, 16), (32, 5, 32)):
                yield from mamba2_step(shape, state, batch, tokens, width)
        yield from mamba2_prefill(shape, 8192, 256)
        *_, (scan, args), _ = mamba2_prefill(shape, 512, 256)
        yield scan, args | {"saves": SavedStates(int32(2), int32(1, 2), int32(1, 2))}
        yield "causal_conv1d_update", mamba2_conv(shape, 32, 5) | {"predecessors": int32(32, 5)}
    yield from lightning()
    yield from lightning_prefill(64)
    yield from lightning_prefill(8)  # on one of eight ranks


def lightning(heads: int = 64, dim: int = 128) -> Cases:
    """MiniMax-Text-01: Mamba-2's operations with a group for each head, and without a conv."""
    per_head = {"A": f32(heads), "D": None, "dt_bias": None, "dt_limit": (1.0, 1.0), "z": None}
    states = {"states": meta(300, heads, dim, dim, dtype=torch.float32)}
    no_conv = {"weight": meta(3 * heads * dim, 0), "bias": None, "conv": meta(300, 0, 8)}
    for batch, tokens, width in ((128, 1, 16), (32, 5, 32)):
        xBC = meta(batch, tokens, 4 * heads * dim)[..., : 3 * heads * dim]
        step = states | slots(batch) | {"dt": f32(heads).expand(batch, tokens, -1), "start_positions": int32(batch)}
        rings = ring(batch, width, (heads, dim), (heads, dim))
        yield "mamba2_decode", per_head | no_conv | step | rings | {"xBC": xBC}
        yield fold(states["states"], rings, per_head["A"])


def lightning_prefill(heads: int, dim: int = 128) -> Cases:
    """Without and with a state that stays behind."""
    x, B, C = meta(8192, 3, heads, dim).unbind(1)
    inputs = {"x": x, "B": B, "C": C, "dt": f32(heads).expand(8192, -1), "A": f32(heads), "dt_limit": (1.0, 1.0)}
    inputs |= {"states": meta(300, heads, dim, dim, dtype=torch.float32)} | prompts(1, 8192, 128)
    yield "mamba2_chunk_scan", inputs
    yield "mamba2_chunk_scan", inputs | {"saves": SavedStates(int32(64), int32(1, 2), int32(1, 2))}


def mamba2_tokens(shape: tuple[int, int, int, int], *lead: int) -> Args:
    """x, dt, B, C and z, and the conv's inputs x | B | C, as slices of one projection; and the heads' numbers."""
    heads, dim, state_dim, groups = shape
    keys = groups * state_dim
    z, xBC, dt = meta(*lead, 2 * heads * dim + 2 * keys + heads).split([heads * dim, heads * dim + 2 * keys, heads], -1)
    x, B, C = xBC.split([heads * dim, keys, keys], -1)
    per_head = {"A": f32(heads), "D": f32(heads), "dt_bias": f32(heads), "dt_limit": (0.0, float("inf"))}
    B, C = (t.unflatten(-1, (groups, state_dim)) for t in (B, C))
    x, z = (t.unflatten(-1, (heads, dim)) for t in (x, z))
    return {"x": x, "dt": dt, "B": B, "C": C, "z": z, "xBC": xBC} | per_head


def conv(channels: int, rows: int) -> Args:
    weights = {"weight": meta(channels, 4), "bias": meta(channels), "conv": meta(300, channels, 8)}
    return weights | slots(rows) | {"start_positions": int32(rows)}


def mamba2_conv(shape: tuple[int, int, int, int], batch: int, tokens: int) -> Args:
    """Of a draft tree, but for its parents."""
    xBC = mamba2_tokens(shape, batch, tokens)["xBC"]
    channels = xBC.shape[-1]
    return {"x": xBC} | conv(channels, batch) | stored(batch, tokens, channels, 3, dtype=torch.bfloat16)


def mamba2_step(shape: tuple[int, int, int, int], state: torch.dtype, batch: int, tokens: int, width: int) -> Cases:
    """Classic decode for one token, verify with intermediate states for more, conv included; then replay."""
    heads, dim, state_dim, groups = shape
    inputs = mamba2_tokens(shape, batch, tokens)
    xBC = inputs.pop("xBC")
    states = meta(300, heads, dim, state_dim, dtype=state)
    yield "causal_conv1d_update", {"x": xBC} | conv(xBC.shape[-1], batch)
    kept = stored(batch, tokens, heads, dim, state_dim, dtype=state) if tokens > 1 else {}
    yield "selective_state_update", inputs | {"states": states} | slots(batch) | kept
    rings = ring(batch, width, (heads, dim), (groups, state_dim))
    whole = {name: part for name, part in inputs.items() if name not in ("x", "B", "C")}
    yield "mamba2_decode", whole | {"xBC": xBC, "states": states} | conv(xBC.shape[-1], batch) | rings
    yield fold(states, rings, inputs["A"])
    cursors = {name: rings[name] for name in ("start", "length", "rows")}
    rows = {"accepted": int32(batch), "state_slots": int32(batch)}
    yield "advance_ring", cursors | rows | {"width": width, "widest": tokens}


def mamba2_prefill(shape: tuple[int, int, int, int], length: int, chunk_size: int) -> Cases:
    heads, dim, state_dim, groups = shape
    inputs, plan = mamba2_tokens(shape, length), prompts(1, length, chunk_size)
    xBC = inputs.pop("xBC")
    yield "causal_conv1d_varlen", {"x": xBC, "query_start_loc": int32(2)} | conv(xBC.shape[-1], 1)
    yield "mamba2_chunk_scan", inputs | {"states": meta(300, heads, dim, state_dim)} | plan
    gate = inputs["z"].flatten(1)
    norm = {"weight": f32(gate.shape[1]), "eps": 1e-5, "group_size": gate.shape[1] // groups, "norm_before_gate": False}
    yield "gated_rms_norm", {"x": gate, "gate": gate} | norm


def mamba1() -> Cases:
    """Falcon-Mamba-7B: 8192 channels of 16 states."""
    for dtype in (torch.bfloat16, torch.float32):
        for batch, tokens, tree in ((128, 1, False), (32, 5, False), (32, 5, True)):
            kept = stored(batch, tokens, 8192, 16, dtype=dtype) if tokens > 1 else {}
            kept |= {"predecessors": int32(batch, tokens)} if tree else {}
            norms = {"B_weight": f32(16), "C_weight": f32(16), "eps": 1e-6}
            yield "mamba1_update", mamba1_tokens(dtype, batch, tokens) | slots(batch) | kept | norms
        yield "selective_scan", mamba1_tokens(dtype, 8192) | prompts(1, 8192, 64)


def mamba1_tokens(dtype: torch.dtype, *lead: int) -> Args:
    """Activations as the projections leave them: halves of one, and slices of another; and states."""
    x, z = meta(*lead, 2 * 8192).chunk(2, -1)
    _, B, C = meta(*lead, 256 + 2 * 16).split((256, 16, 16), -1)
    channels = {"A": f32(8192, 16), "D": f32(8192), "dt_bias": f32(8192), "states": meta(300, 8192, 16, dtype=dtype)}
    return {"x": x, "dt": meta(*lead, 8192), "B": B, "C": C, "z": z} | channels


KEY_HEADS, VALUE_HEADS, DIM = 16, 32, 128  # of Qwen3-Next's Gated Delta Net


def delta_net() -> Cases:
    float32 = torch.float32
    for batch, tokens, mode in ((128, 1, "classic"), (128, 1, "replay"), (32, 5, "intermediate"), (32, 5, "replay")):
        yield from delta_net_step(batch, tokens, mode, float32)
    for batch in (1, 128):
        yield from delta_net_step(batch, 1, "classic", torch.bfloat16)
    for state in (float32, torch.bfloat16):  # in one launch
        yield from delta_net_step(1, 1, "replay", state)
    for state in (float32, torch.bfloat16):  # of engines with a conv of their own
        (_, args), _ = delta_net_step(128, 1, "replay", state)
        yield "gdn_decode", args | after_conv(args["qkv"])
    for rows, length in ((1, 8192), (16, 2048)):
        gate, heads = meta(rows * length, VALUE_HEADS), f32(VALUE_HEADS)
        q, v = meta(rows * length, KEY_HEADS, DIM), meta(rows * length, VALUE_HEADS, DIM)
        inputs = {"q": q, "k": q, "v": v, "g": gate, "beta": gate, "states": f32(300, VALUE_HEADS, DIM, DIM)}
        inputs |= {"A_log": heads, "dt_bias": heads}
        yield "chunk_gated_delta_rule", inputs | prompts(rows, length, 64)


def after_conv(qkv: torch.Tensor) -> Args:
    """The arguments of `FusedStep.after_conv`."""
    channels = qkv.shape[2]
    return {"weight": meta(channels, 0), "bias": None, "activation": None, "conv": meta(1, channels, 1)}


def delta_net_step(batch: int, tokens: int, mode: str, state: torch.dtype) -> Cases:
    values, channels = VALUE_HEADS * DIM, 2 * KEY_HEADS * DIM + VALUE_HEADS * DIM
    qkv, _, b, a = meta(batch, tokens, channels + values + 2 * VALUE_HEADS).split(
        [channels, values, VALUE_HEADS, VALUE_HEADS], -1
    )
    states = meta(300, VALUE_HEADS, DIM, DIM, dtype=state)
    args = {"qkv": qkv, "a": a, "b": b, "A_log": f32(VALUE_HEADS), "dt_bias": f32(VALUE_HEADS), "states": states}
    args |= conv(channels, batch) | {"bias": None}
    rings = ring(batch, 16 if tokens == 1 else 32, (VALUE_HEADS, DIM), (KEY_HEADS, DIM))
    kept = stored(batch, tokens, VALUE_HEADS, DIM, DIM)
    yield "gdn_decode", args | {"classic": {}, "intermediate": kept, "replay": rings}[mode]
    if mode == "replay":
        yield fold(states, rings, None)


def kimi_delta() -> Cases:
    """Heads of Kimi-Linear and Ling-3: 32 of 128 channels."""
    heads, width = 32, 32 * DIM
    weights = {"A_log": f32(heads), "dt_bias": f32(heads, DIM)}
    for batch, tokens, state, more in (
        (128, 1, torch.float32, {}),
        (128, 1, torch.bfloat16, {}),
        (32, 5, torch.float32, stored(32, 5, heads, DIM, DIM)),
        (32, 5, torch.float32, {}),
    ):
        qkv, a, b = meta(batch, tokens, 4 * width + heads).split([3 * width, width, heads], -1)
        args = {"qkv": qkv, "a": a.unflatten(-1, (heads, DIM)), "b": b} | weights | conv(3 * width, batch)
        states = {"bias": None, "states": meta(300, heads, DIM, DIM, dtype=state)}
        yield "gdn_decode", args | states | more
        if tokens == 1 or not more:
            rings = channel_ring(batch, 16 if tokens == 1 else 32, heads)
            yield "gdn_decode", args | states | rings
            yield fold(states["states"], rings, None)
    for rows, length in ((1, 8192), (16, 2048)):
        q, k, v, a = meta(rows * length, 4, heads, DIM).unbind(1)
        inputs = {
            "q": q,
            "k": k,
            "v": v,
            "g": a,
            "beta": meta(rows * length, heads),
            "states": f32(300, heads, DIM, DIM),
        }
        yield "chunk_gated_delta_rule", inputs | weights | prompts(rows, length, 64)


def attention() -> Cases:
    """Heads of Falcon-H1-7B and of Qwen3-Next: query heads, key/value heads, their width, how much of it is rotated."""
    for query_heads, kv_heads, dim, rot in ((12, 2, 128, 128), (16, 2, 256, 64)):
        cache = {"k_cache": meta(5000, 16, kv_heads, dim), "v_cache": meta(5000, 16, kv_heads, dim), "scale": 0.1}
        # In a wide table the contexts of many rows are split as well, the longest of them.
        for batch, tokens, nodes, width in (
            (128, 1, 0, 4096), (128, 1, 0, 32784), (32, 5, 5, 4096), (32, 5, 0, 4096), (128, 5, 0, 4096),
        ):  # fmt: skip
            q, rows = meta(batch, tokens, query_heads, dim), {"rows": int32(batch), "seq_lens": int32(batch)}
            tree = {"mask": flags(batch, nodes, nodes) if nodes else None}
            tree["num_drafts"] = int32(batch) if tokens > 1 else None
            yield "attention_decode", cache | rows | tree | {"q": q, "req_to_token": int32(300, width)}
        q, k = meta(8192, query_heads, dim), meta(8192, kv_heads, dim)
        # Long chunks (their keys are copied), short ones, and one so short that tiles are halved.
        for count, tokens, window in (
            (1, 8192, None), (1, 8192, 4096), (64, 128, None), (64, 128, 4096), (1, 128, None),
        ):  # fmt: skip
            lens = {"query_lens": [tokens] * count, "seq_lens_host": [tokens] * count, "sliding_window": window}
            rows = {"rows": int32(count), "query_start_loc": int32(count + 1), "seq_lens": int32(count)}
            yield "attention_extend", cache | rows | lens | {"q": q[: count * tokens], "req_to_token": int32(300, 4096)}
        # Cut tiles over copied keys, and in graphs over pages and over copies.
        for tokens, graph, copies in ((2048, False, None), (512, True, None), (1536, True, meta(1 << 27))):
            lens = {"query_lens": [tokens], "seq_lens_host": [] if graph else [4096], "copies": copies}
            rows = {"rows": int32(1), "query_start_loc": int32(2), "seq_lens": int32(1)}
            yield "attention_extend", cache | rows | lens | {"q": q[:tokens], "req_to_token": int32(300, 4096)}
        places = {"k_cache": cache["k_cache"], "v_cache": cache["v_cache"], "out_cache_loc": int32(8192)}
        rope = {"cos_sin": f32(4096, rot), "q_weight": f32(dim), "k_weight": f32(dim), "eps": 1e-6}
        yield "rotary_write_kv", {"q": q, "k": k, "v": k, "positions": int32(8192)} | rope | places
        sections = {"sections": (rot // 6 + 1, rot // 6 + 1, rot // 6)}
        yield "rotary_write_kv", {"q": q, "k": k, "v": k, "positions": int32(3, 8192)} | rope | sections | places
        yield "write_kv", {"k": k, "v": k} | places


def latent_attention() -> Cases:
    """Heads of Kimi-Linear on one rank and on four: 512 numbers of a vector, 64 apart; heads of 128 and 128."""
    for heads in (32, 8):
        weights = {"up_k": meta(heads, 128, 512), "up_v": meta(heads, 512, 128), "norm": f32(512), "norm_eps": 1e-6}
        vectors = meta(5000, 16, 1, 576)
        cache = {"k_cache": vectors, "v_cache": vectors[..., :512], "scale": 0.1, "req_to_token": int32(300, 4096)}
        for batch, tokens, nodes in ((1, 1, 0), (128, 1, 0), (32, 5, 0), (32, 5, 5)):
            rows = {"rows": int32(batch), "seq_lens": int32(batch), "num_drafts": int32(batch) if tokens > 1 else None}
            tree = {"mask": flags(batch, nodes, nodes) if nodes else None}
            yield "attention_decode", cache | rows | tree | {"q": meta(batch, tokens, heads, 576)}
        for count, tokens, before, window in (
            (1, 8192, 0, None), (4, 128, 0, None), (4, 128, 2000, None), (1, 8, 2000, None), (1, 8192, 0, 4096),
        ):  # fmt: skip  # all decompressed
            lens = {"query_lens": [tokens] * count, "seq_lens_host": [before + tokens] * count}
            lens |= {"sliding_window": window}
            rows = {"rows": int32(count), "query_start_loc": int32(count + 1), "seq_lens": int32(count)}
            yield "latent_extend", cache | weights | rows | lens | {"q": meta(count * tokens, heads, 192)}
        places = {"cache": vectors, "out_cache_loc": int32(128), "positions": int32(128), "cos_sin": f32(4096, 64)}
        q, k = meta(128, heads * 192 + 576).split([heads * 192, 576], -1)
        yield "write_latent", weights | places | {"q": q.unflatten(-1, (heads, 192)), "k": k}
        yield "into_latent", weights | {"q": q[:1].unflatten(-1, (heads, 192))}
        yield "from_latent", weights | {"x": meta(1, heads, 512)}


def absorbed_prompts() -> Cases:
    """Heads of Kimi-Linear in a graph of prompts, whose lengths the host does not know."""
    weights = {"up_k": meta(32, 128, 512), "up_v": meta(32, 512, 128), "norm": f32(512), "norm_eps": 1e-6}
    vectors = meta(5000, 16, 1, 576)
    cache = {"k_cache": vectors, "v_cache": vectors[..., :512], "scale": 0.1, "req_to_token": int32(300, 4096)}
    rows = {
        "rows": int32(8),
        "query_start_loc": int32(9),
        "seq_lens": int32(8),
        "query_lens": [512],
        "seq_lens_host": [],
    }
    yield "latent_extend", cache | weights | rows | {"q": meta(512, 32, 192)}


def elementwise() -> Cases:
    for width in (3072, 4096):
        yield "add_rms_norm", {"x": meta(128, width), "residual": meta(128, width), "weight": f32(width), "eps": 1e-5}
    yield "silu_and_mul", {"x": meta(128, 2 * 12288)}
    yield "relu2", {"x": meta(128, 21504)}
    yield "sigmoid_mul", {"x": meta(128, 4096), "gate": meta(128, 4096)}
    yield "sigmoid_mul", {"x": meta(128, 2048), "gate": meta(128, 3088)[:, 3072:]}  # a gate for each head
    norm = {"weight": f32(4096), "eps": 1e-6, "group_size": 128, "norm_before_gate": True}
    for tokens in (128, 8192):
        yield "gated_rms_norm", {"x": meta(tokens, 4096), "gate": meta(tokens, 12352)[:, 8192:12288]} | norm


def sampling() -> Cases:
    batch, vocabulary = 128, 151936
    rows, keys, ids = f32(batch), meta(batch, dtype=torch.int64), int32(batch)
    logits, words = meta(batch, vocabulary), int32(batch, vocabulary // 32)
    filters = {"temperature": rows, "top_k": ids, "top_p": rows, "min_p": rows}
    yield "greedy", {"logits": logits, "bitmask": words}
    drawn, drafts = meta(batch, 5, dtype=torch.int64), int32(batch, 4)
    chain = {"drawn": drawn, "drafts": drafts, "num_drafts": ids, "rows": ids, "last_tokens": int32(300)}
    yield "accept_chain", chain
    yield "filtered_logits", {"logits": logits} | filters
    lines = {"rows": ids, "indices": ids, "known": ids, "path": int32(batch, 4)}
    table = {"counts": int32(300), "columns": int32(5, 300, 2048), "prefixes": int32(300, 2048)}
    table |= {"allowed": int32(300, vocabulary // 32), "history": int32(300, 64)}
    yield "apply_token_rules", {"logits": logits} | table | lines
    penalties = Penalties(rows, rows, rows, int32(batch, vocabulary), flags(batch, vocabulary))
    drawn_by = {"seeds": keys, "indices": keys, "penalties": penalties, "bitmask": words}
    yield "sample", {"logits": logits} | filters | drawn_by


def experts() -> Cases:
    """512 routed experts of Qwen3-Next and one that all tokens pass; the routers of Nemotron and Kimi-Linear."""
    count, width, inner, top_k = 512, 2048, 512, 10
    weights = {"w_up": meta(count + 1, 2 * inner, width), "w_down": meta(count + 1, width, inner)}
    for tokens in (1, 128, 1024):
        logits = meta(tokens, count + 8)
        shared = {"shared_gate": logits[:, count], "shared": 1}
        yield "router_softmax", {"logits": logits[:, :count], "top_k": top_k, "renormalize": True} | shared
        picks = {"weights": f32(tokens, top_k + 1), "ids": int32(tokens, top_k + 1)}
        yield "fused_experts", {"x": meta(tokens, width), "activation": "silu"} | weights | picks
    for count, width in ((32, 2048), (256, 2304)):
        yield "router_product", {"x": meta(128, width), "weight": f32(count, width)}
    groups = {"top_k": 6, "n_group": 8, "topk_group": 4, "renormalize": True, "scaling": 2.5}
    yield "router_sigmoid_grouped", {"logits": f32(128, 128), "correction_bias": f32(128)} | groups
    kimi = {"top_k": 8, "n_group": 1, "topk_group": 1, "renormalize": True, "scaling": 2.446, "shared": 1}
    yield "router_sigmoid_grouped", {"logits": f32(1, 256), "correction_bias": f32(256), "rows": int32(1)} | kimi


def skinny_linear() -> Cases:
    """The linear layers of Falcon-H1-7B with few tokens."""
    for tokens in (1, 8, 32, 64):
        x, norm = meta(tokens, 3072), {"norm_weight": f32(3072), "eps": 1e-5}
        yield "skinny_linear", {"x": x, "weight": meta(8728, 3072), "residual": x} | norm
        yield "skinny_linear", {"x": meta(tokens, 1536), "weight": meta(3072, 4608), "tail": meta(tokens, 3072)}
        activated = {"residual": x, "activation": "silu_and_mul"}
        yield "skinny_linear", {"x": x, "weight": meta(24576, 3072)} | norm | activated
        yield "skinny_linear", {"x": meta(tokens, 12288), "weight": meta(3072, 12288)}


def quant(names: Iterable[str] = ("fp8 blocks", "int8 zeros", "int4 zeros", "nvfp4")) -> Cases:
    """Linear layers of Falcon-H1-7B with few tokens, in one format of each code."""
    for name in names:
        for tokens in (1, 2, 16, 32, 128) if name.startswith("int4") else (1, 16, 128):
            x, norm = meta(tokens, 3072), {"norm_weight": f32(3072), "eps": 1e-5}
            activated = {"residual": x, "activation": "silu_and_mul"}
            yield "quant_linear", {"x": x, "weight": empty_weight(name, 24576, 3072)} | norm | activated
        if name in ("int4 zeros", "nvfp4"):  # more steps, and blocks of rows, than the kernel is compiled for
            for rows, width in ((8192, 28672), (130048, 3072)):
                yield "quant_linear", {"x": meta(1, width), "weight": empty_weight(name, rows, width)}
        yield "decode_weight", {"weight": empty_weight(name, 24576, 3072), "dtype": torch.bfloat16}
        tail = {"x": meta(64, 1536), "tail": meta(64, 3072)}
        yield "quant_linear", tail | {"weight": empty_weight(name, 3072, 4608)}
        count, width, inner = 128, 2048, 512  # experts of Qwen3-Next, fewer of them
        experts = {"up": empty_weight(name, 2 * inner, width, count), "down": empty_weight(name, width, inner, count)}
        for tokens in (1, 32, 1024):
            picks = {"weights": f32(tokens, 10), "ids": int32(tokens, 10)}
            yield "quant_experts", {"x": meta(tokens, width), "activation": "silu"} | experts | picks


def fp8() -> Cases:
    """Quantised inputs of the same layers."""
    for name, groups in (("fp8 blocks", True), ("fp8 rows", False)):
        for tokens in (1, 32, 64, 128) if groups else (1, 32, 64):
            norm = {"norm_weight": f32(3072), "eps": 1e-5, "residual": meta(tokens, 3072)}
            yield "quantize_tokens", {"x": meta(tokens, 3072), "group": 128 if groups else 3072} | norm
            yield "quantize_tokens", {"x": meta(tokens, 12288), "group": 128 if groups else 12288}
            gated = {"x": meta(tokens, 24576), "group": 128 if groups else 12288, "before": "silu_and_mul"}
            yield "quantize_tokens", gated
            sizes: list[tuple[int, int, str | None]] = [(24576, 3072, "silu_and_mul"), (3072, 12288, None)]
            if tokens == 1:  # inputs that are loaded in pieces, and more blocks of rows than a kernel is compiled for
                sizes += [(8192, 28672, None), (130048, 3072, None)]
            for rows, width, activation in sizes:
                codes = meta(-(-tokens // 16) * 16, width, dtype=torch.float8_e4m3fn)
                x = {"codes": codes, "scale": f32(width // 128 if groups else 1, len(codes)), "tokens": tokens}
                x["group"] = 128 if groups else width
                weight = {"weight": empty_weight(name, rows, width), "activation": activation}
                if tokens > FEW_TOKENS and not has_pipeline(codes.device):
                    continue  # cuBLAS's, on a GPU that has no kernel with roles of warps
                if tokens > 1:
                    yield "fp8_linear", x | weight | {"dtype": torch.bfloat16}
                else:
                    yield "fp8_token_linear", weight | {"x": meta(1, width)} | (norm if width == 3072 else {})


def everything_else() -> Cases:
    for cases in (attention, elementwise, sampling, delta_net, kimi_delta, experts):
        yield from cases()


TABLES: dict[str, Callable[[], Cases]] = {
    "mamba2": mamba2, "mamba1": mamba1, "skinny_linear": skinny_linear, "quant": quant, "fp8": fp8,
    "quant, all formats": partial(quant, FORMATS),
    "others": everything_else, "latent": latent_attention, "absorbed": absorbed_prompts,
}  # fmt: skip
