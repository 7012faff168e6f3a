"""Calls of every operation at small sizes, with the arguments that may be left out: a branch that Triton cannot
compile, or a None that it does not expect, shows. One by one, as in `sm90_cases.py`."""

from collections.abc import Iterator

import torch

from hybridrt.kernels.core.chunk_plan import ChunkPlan
from hybridrt.kernels.sampling.sampling import Penalties
from hybridrt.kernels.state.row_tables import DecodeBuffers
from hybridrt.kernels.state.state_ring import RingFolds
from tests.support.quant_weights import FORMATS, empty_weight
from tests.support.sm90_cases import Args, after_conv, f32, flags, int32, meta

B, T, H, P, N, G, SLOTS, K, TOKENS = 3, 2, 4, 16, 16, 2, 9, 4, 40
ROWS, STARTS = int32(B), int32(B + 1)
SLOT_ARGS = {"read_state_slots": ROWS, "write_state_slots": ROWS}
PLAN = ChunkPlan(int32(4), int32(3), ROWS, ROWS, 1, 16, TOKENS, (16, 8, 16))
PROMPTS = SLOT_ARGS | {"has_initial_state": flags(B), "query_start_loc": STARTS, "plan": PLAN}
RING = {"values": meta(SLOTS, H, 16, P), "keys": meta(SLOTS, G, 16, N), "gates": f32(SLOTS, H, 16)}
CURSORS = {"start": ROWS, "length": ROWS, "rows": ROWS}


def mamba(*lead: int) -> Args:
    tokens = {"x": meta(*lead, H, P), "dt": meta(*lead, H), "B": meta(*lead, G, N), "C": meta(*lead, G, N)}
    return tokens | {"A": f32(H), "states": f32(SLOTS, H, P, N)}


def mamba1(*lead: int) -> Args:
    inner = H * P
    tokens = {name: meta(*lead, inner) for name in ("x", "dt", "z")} | {name: meta(*lead, N) for name in ("B", "C")}
    return tokens | {"A": f32(inner, N), "D": f32(inner), "dt_bias": f32(inner), "states": f32(SLOTS, inner, N)}


def delta(*lead: int) -> Args:
    tokens = {"q": meta(*lead, G, N), "k": meta(*lead, G, N), "v": meta(*lead, H, P)}
    return tokens | {"g": f32(*lead, H), "beta": f32(*lead, H), "states": f32(SLOTS, H, P, N)}


def by_channel(*lead: int) -> Args:
    """Kimi Delta Attention."""
    keys = meta(*lead, H, N)
    return delta(*lead) | {"q": keys, "k": keys, "g": meta(*lead, H, N)}


def conv(channels: int) -> Args:
    return {"weight": meta(channels, K), "conv": meta(SLOTS, channels, 8), "bias": None}


def paged(*lead: int) -> Args:
    cache = meta(20, 16, G, P)
    table = {"req_to_token": int32(SLOTS, 64), "rows": ROWS, "seq_lens": ROWS, "scale": 1.0}
    return {"q": meta(*lead, H, P), "k_cache": cache, "v_cache": cache} | table


def recurrent() -> Iterator[tuple[str, Args, Args]]:
    """(operation, arguments, optional arguments), of recurrent layers."""
    per_head, stored = {"D": f32(H), "dt_bias": f32(H)}, {"rows": ROWS, "stored": f32(SLOTS, T, H, P, N)}
    none, channels, parents = dict.fromkeys(("D", "dt_bias", "z")), H * P + 2 * G * N, {"predecessors": int32(B, T)}
    step = {"start_positions": ROWS} | SLOT_ARGS
    tokenwise = {"x": meta(B, T, channels)} | conv(channels) | step
    windows = {"stored": meta(SLOTS, T, channels, K - 1), "rows": ROWS}
    yield "causal_conv1d_update", tokenwise | {"activation": None}, {"bias": meta(channels)} | windows | parents
    ragged = conv(channels) | step | {"x": meta(TOKENS, channels), "query_start_loc": STARTS}
    yield "causal_conv1d_varlen", ragged | {"activation": None}, {"bias": meta(channels), "activation": "silu"}
    products = {"x": meta(B, T, 3 * channels), "weight": meta(channels, 3), "conv": meta(SLOTS, channels, 4)}
    yield "short_conv_update", products | step | {"bias": None}, {"bias": meta(channels)}
    whole = {"xBC": meta(B, T, channels), "dt": meta(B, T, H), "A": f32(H), "states": f32(SLOTS, H, P, N)}
    everything = {"bias": meta(channels), "z": meta(B, T, H, P)} | per_head
    yield "mamba2_decode", whole | conv(channels) | step | none, everything | stored
    yield "mamba2_decode", whole | conv(channels) | step | none | RING | CURSORS, everything
    untapped = whole | {"weight": meta(channels, 0), "bias": None, "conv": meta(SLOTS, 0, 8)} | step | none
    yield "mamba2_decode", untapped | RING | CURSORS, {"xBC": meta(B, 1, channels), "dt": meta(B, 1, H)}
    yield (
        "selective_state_update",
        mamba(B, T) | SLOT_ARGS | none,
        per_head | {"z": meta(B, T, H, P)} | stored | parents,
    )
    scan = {"z": meta(TOKENS, H, P)} | per_head
    yield "mamba2_chunk_scan", mamba(TOKENS) | PROMPTS | none, scan
    yield "mamba2_chunk_scan", mamba(16 * TOKENS) | PROMPTS | none, {}  # many tokens take other kernels
    yield "mamba2_chunk_scan", mamba(TOKENS) | PROMPTS | none | {"dt_limit": (1.0, 1.0)}, {}  # so do fixed decays
    inner = {"rows": ROWS, "stored": f32(SLOTS, T, H * P, N)}
    norms = {"B_weight": f32(N), "C_weight": f32(N), "eps": 1e-5}
    yield "mamba1_update", mamba1(B, T) | SLOT_ARGS, norms | inner | parents
    yield "selective_scan", mamba1(TOKENS) | PROMPTS, {}
    gates = {"a": meta(B, T, H), "b": meta(B, T, H), "A_log": f32(H), "dt_bias": f32(H)}
    qkv = {"qkv": meta(B, T, 2 * G * N + H * P), "states": f32(SLOTS, H, P, N)} | conv(2 * G * N + H * P) | step | gates
    nodes = {"windows": meta(SLOTS, T, 2 * G * N + H * P, K - 1)} | parents
    yield "gdn_decode", qkv, {"bias": meta(2 * G * N + H * P)} | stored | nodes
    yield "gdn_decode", qkv | {"qkv": qkv["qkv"][:, :1]}, {"bias": meta(2 * G * N + H * P)}
    yield "gdn_decode", qkv | RING | CURSORS, {"bias": meta(2 * G * N + H * P)}
    yield "gdn_decode", qkv | RING | CURSORS | after_conv(qkv["qkv"]), {}
    one = {name: qkv[name][:, :1] for name in ("qkv", "a", "b")}  # few rows of one token take one launch
    yield "gdn_decode", qkv | RING | CURSORS | one, {"bias": meta(2 * G * N + H * P)}
    per_head = {"A_log": f32(H), "dt_bias": f32(H)}
    yield "recurrent_gated_delta_rule", delta(B, T) | SLOT_ARGS, stored | parents | per_head
    yield "chunk_gated_delta_rule", delta(TOKENS) | PROMPTS, per_head
    raw = {"A_log": f32(H), "dt_bias": f32(H, N), "lower_bound": -5.0}
    yield "recurrent_gated_delta_rule", by_channel(B, T) | SLOT_ARGS, stored | parents | raw
    yield "chunk_gated_delta_rule", by_channel(TOKENS) | PROMPTS, raw
    tokens, wide = {"a": meta(B, T, H, N), "b": meta(B, T, H)}, 2 * H * N + H * P
    kda = {"qkv": meta(B, T, wide), "states": f32(SLOTS, H, P, N)} | conv(wide) | step | tokens | raw
    yield "gdn_decode", kda, {"bias": meta(wide)} | stored
    yield "gdn_decode", kda | {name: kda[name][:, :1] for name in ("qkv", "a", "b")}, {"bias": meta(wide)}
    channels = {"values": RING["values"], "keys": meta(SLOTS, H, 16, N), "gates": f32(SLOTS, H, 16, N)}
    yield "gdn_decode", kda | channels | CURSORS, {"bias": meta(wide)}
    sums = {"states": f32(SLOTS, H)} | SLOT_ARGS
    yield "prefix_sum_varlen", sums | {"x": meta(TOKENS, H), "query_start_loc": STARTS}, {}
    stored_sums = {"stored": f32(SLOTS, T, H), "rows": ROWS}
    yield "prefix_sum_update", sums | {"x": meta(B, T, H)} | dict.fromkeys((*stored_sums, "predecessors")), stored_sums
    cursors = {"start": int32(SLOTS), "length": int32(SLOTS), "rows": ROWS, "accepted": ROWS, "state_slots": ROWS}
    yield "advance_ring", cursors | {"width": 16, "widest": 1}, {"state_lengths": int32(SLOTS)}
    coded = {"states": meta(SLOTS, H, P, N), "state_lengths": int32(SLOTS), "element_keys": int32(H)} | SLOT_ARGS
    scales = {"state_scales": meta(SLOTS, H, P, 1, dtype=torch.int16)}
    yield "load_states", coded | {"has_initial_state": flags(B)}, scales
    yield "store_states", coded | {"new": f32(B, H, P, N), "lengths": ROWS}, scales
    layers = {name: part[None] for name, part in ({"states": f32(SLOTS, H, P, N)} | RING).items()}
    folds = {"folds": RingFolds(ROWS, ROWS, ROWS, ROWS, int32(1), ROWS)}
    yield "fold_ring", layers | folds | {"A": None}, {"A": f32(1, H)}
    yield "fold_ring", layers | folds | {name: part[None] for name, part in channels.items()} | {"A": None}, {}
    commit = {"state_slots": ROWS, "rows": ROWS, "last": ROWS}
    pools = {"states": f32(2, SLOTS, H, P, N), "stored": f32(2, SLOTS, T, H, P, N)}
    yield "commit_intermediate", commit | pools, {}
    windows = {"conv": meta(2, SLOTS, 2 * G * N, 8), "stored": meta(2, SLOTS, T, 2 * G * N, K - 1), "positions": ROWS}
    yield "commit_conv_window", commit | windows, {}


def others() -> Iterator[tuple[str, Args, Args]]:
    """(operation, arguments, optional arguments) of everything else."""
    window, vocabulary, keys = {"sliding_window": 5}, 40000, meta(B, dtype=torch.int64)
    yield "attention_decode", paged(B, T), window | {"mask": flags(B, T, T)}
    sinks = {"sinks": f32(H)}
    yield "attention_decode", paged(B, T), sinks
    lens = {"query_start_loc": STARTS, "query_lens": [20, 10, 10], "seq_lens_host": [20, 30, 40]}
    yield "attention_extend", paged(TOKENS) | lens, window
    yield "attention_extend", paged(TOKENS) | lens, sinks
    long = {"query_lens": [8192] * B, "seq_lens_host": [9000] * B}  # keys and values are copied together first
    yield "attention_extend", paged(8192 * B) | lens | long, window
    wide = {"q": meta(512, 16, 128), "k_cache": meta(20, 16, 4, 128), "v_cache": meta(20, 16, 4, 128)}  # tiles are cut
    one = {"rows": int32(1), "seq_lens": int32(1), "query_start_loc": int32(2), "query_lens": [512]}
    yield "attention_extend", paged(TOKENS) | wide | one | {"seq_lens_host": []}, {"sinks": f32(16)}
    long = {"q": meta(8192, 16, 128), "query_lens": [8192], "seq_lens_host": [9000]}  # a kernel with roles of warps
    yield "attention_extend", paged(TOKENS) | wide | one | long, {"sinks": f32(16)}
    vectors = meta(20, 16, 1, P + 16)
    latent = {"up_k": meta(H, P, P), "up_v": meta(H, P, P), "norm": f32(P), "norm_eps": 1e-6}
    shared = {"q": meta(TOKENS, H, P + 16), "k_cache": vectors, "v_cache": vectors[..., :P]} | latent
    yield "latent_extend", paged(TOKENS) | shared | lens, window
    yield "latent_extend", paged(TOKENS) | shared | lens | {"seq_lens_host": [9000] * B}, window
    stored = {"cache": vectors, "out_cache_loc": int32(TOKENS), "positions": int32(TOKENS), "k": meta(TOKENS, P + 16)}
    yield "write_latent", {"q": shared["q"], "cos_sin": None} | stored | latent, {"cos_sin": f32(64, 16)}
    yield "into_latent", {"q": shared["q"][:2]} | latent, {}
    yield "from_latent", {"x": meta(2, H, P)} | latent, {}
    caches = {"k_cache": meta(20, 16, G, P), "v_cache": meta(20, 16, G, P), "out_cache_loc": int32(TOKENS)}
    heads = {"q": meta(TOKENS, H, P), "k": meta(TOKENS, G, P)}
    yield "write_kv", {"k": heads["k"], "v": heads["k"]} | caches, {}
    turned = heads | {"positions": int32(TOKENS), "cos_sin": f32(64, P), "eps": 1e-6}
    norms = {"q_weight": f32(P), "k_weight": f32(P)}
    yield "qk_norm_rotary", turned | dict.fromkeys(norms), norms
    yield "rotary_write_kv", turned | {"v": heads["k"]} | caches | dict.fromkeys(norms), norms
    x, weight = meta(TOKENS, 64), f32(64)
    yield "rms_norm", {"x": x, "weight": weight, "eps": 1e-5}, {}
    yield "add_rms_norm", {"x": x, "residual": meta(TOKENS, 64), "weight": weight, "eps": 1e-5}, {}
    grouped = {"gate": x, "group_size": 32, "norm_before_gate": True}
    yield "gated_rms_norm", {"x": x, "weight": weight, "eps": 1e-5} | grouped, {"norm_before_gate": False}
    yield "gated_rms_norm", {"x": x, "weight": weight, "eps": 1e-5} | grouped | {"activation": "sigmoid"}, {}
    yield from ((op, {"x": x}, {}) for op in ("silu_and_mul", "relu2"))
    yield "clamped_silu_and_mul", {"x": x, "limit": 4.0}, {}
    yield "sigmoid_mul", {"x": x, "gate": x}, {}
    for tokens in (1, 3):
        linear = {"x": meta(tokens, 64), "weight": meta(32, 64), "bias": None}
        normed = {"norm_weight": f32(64), "residual": meta(tokens, 64), "activation": "silu_and_mul"}
        yield "skinny_linear", linear, {"bias": meta(32)} | normed
        yield "skinny_linear", linear | {"tail": meta(tokens, 16), "x": meta(tokens, 48)}, {"activation": "relu2"}
    yield "skinny_linear", {"x": meta(1, 64), "weight": meta(32, 32), "parts": 2}, {}
    for name in FORMATS:
        experts = {"up": empty_weight(name, 64, 64, 8), "down": empty_weight(name, 64, 32, 8), "activation": "silu"}
        biases = {"b_up": meta(8, 64), "b_down": meta(8, 64)}
        for tokens in (1, 3):
            linear = {"x": meta(tokens, 64), "weight": empty_weight(name, 32, 64), "bias": None}
            normed = {"norm_weight": f32(64), "residual": meta(tokens, 64), "activation": "silu_and_mul"}
            yield "quant_linear", linear, {"bias": meta(32)} | normed
        yield "decode_weight", {"weight": empty_weight(name, 33, 96), "dtype": torch.bfloat16}, {}
        picks = {"ids": int32(2, 2), "weights": f32(2, 2), "x": meta(2, 64)}
        yield "quant_experts", picks | experts, biases | {"limit": 4.0, "alpha": 1.7}
    for name in ("int4 zeros", "nvfp4", "mxfp4"):  # wide enough to be decoded in registers
        for tokens in (1, 3):
            linear = {"x": meta(tokens, 256), "weight": empty_weight(name, 64, 256), "bias": None}
            normed = {"norm_weight": f32(256), "residual": meta(tokens, 256), "activation": "silu_and_mul"}
            yield "quant_linear", linear, {"bias": meta(64)} | normed
    for name in ("fp8 blocks", "int4 zeros", "nvfp4"):
        shapes = {"up": (256, 256), "down": (256, 128)}
        experts = {side: empty_weight(name, *shape, 64) for side, shape in shapes.items()}
        biases = {"b_up": meta(64, 256), "b_down": meta(64, 256)}
        for tokens in (2, 32):  # pairs that are apart, and blocks
            picks = {"ids": int32(tokens, 2), "weights": f32(tokens, 2), "x": meta(tokens, 256), "activation": "silu"}
            yield "quant_experts", picks | experts, biases | {"limit": 4.0, "alpha": 1.7}
    for name, group in (("fp8 blocks", 128), ("fp8 rows", 256)):
        tokens = {"x": meta(3, 256), "group": group}
        yield "quantize_tokens", tokens, {"norm_weight": f32(256), "residual": meta(3, 256)}
        yield "quantize_tokens", {"x": meta(3, 512), "group": group, "before": "silu_and_mul"}, {}
        yield "quantize_tokens", tokens | {"before": "relu2"}, {}
        linear = {"x": meta(1, 256), "weight": empty_weight(name, 64, 256)}
        normed = {"norm_weight": f32(256), "residual": meta(1, 256), "activation": "silu_and_mul"}
        yield "fp8_token_linear", linear, {"bias": meta(64)} | normed
        yield "fp8_token_linear", linear | {"tail": meta(1, 96), "x": meta(1, 160)}, {"activation": "relu2"}
        for few, rows in ((3, 16), (80, 80)) if group == 128 else ((3, 16),):  # a kernel each
            codes = {"codes": meta(rows, 256, dtype=torch.float8_e4m3fn), "scale": f32(256 // group, rows)}
            product = codes | {"tokens": few, "group": group, "weight": empty_weight(name, 64, 256)}
            yield "fp8_linear", product | {"dtype": torch.bfloat16}, {"bias": meta(64), "activation": "silu_and_mul"}
    shared = {"shared_gate": meta(B), "shared": 1, "rows": ROWS}
    yield "router_softmax", {"logits": meta(B, 8), "top_k": 2, "renormalize": True}, shared
    held = {"first": 4, "held": 4, "load": meta(8, dtype=torch.int64)}
    yield "router_softmax", {"logits": meta(B, 8), "top_k": 2, "renormalize": True} | held, {}
    scores = {"logits": f32(B, 8), "correction_bias": f32(8), "top_k": 2, "n_group": 2, "topk_group": 1}
    yield "router_sigmoid_grouped", scores | {"renormalize": True, "scaling": 2.5}, {"rows": ROWS, "shared": 1}
    yield "router_sigmoid_grouped", scores | {"renormalize": True, "scaling": 2.5} | held, {}
    yield "router_product", {"x": meta(TOKENS, 64), "weight": f32(8, 64)}, {"x": meta(2, 512), "weight": f32(8, 512)}
    for tokens in (2, 400):
        picks = {"ids": int32(tokens, 2), "weights": f32(tokens, 2), "x": meta(tokens, 64)}
        gated = {"w_up": meta(8, 64, 64), "w_down": meta(8, 64, 32), "activation": "silu"}
        yield "fused_experts", picks | gated, {"w_up": meta(8, 32, 64), "activation": "relu2"}
        yield "fused_experts", picks | gated | {"limit": 4.0}, {}
        biased = {"limit": 4.0, "alpha": 1.7, "b_up": meta(8, 64), "b_down": meta(8, 64)}
        yield "fused_experts", picks | gated, biased
    filters = {"top_k": ROWS, "top_p": f32(B), "min_p": f32(B), "bitmask": int32(B, vocabulary // 32 + 1)}
    counted = Penalties(f32(B), f32(B), f32(B), int32(B, vocabulary), flags(B, vocabulary))
    logits = {"logits": meta(B, vocabulary), "temperature": f32(B)}
    yield "filtered_logits", logits, filters | {"penalties": counted}
    yield "sample", logits | {"seeds": keys, "indices": keys}, filters | {"penalties": counted}
    table = {"counts": int32(SLOTS), "columns": int32(5, SLOTS, 64), "prefixes": int32(SLOTS, 64)}
    table |= {"allowed": int32(SLOTS, vocabulary // 32 + 1), "history": int32(SLOTS, 64)}
    lines = {"rows": ROWS, "indices": ROWS, "known": ROWS, "path": int32(B, 0)}
    yield "apply_token_rules", {"logits": logits["logits"]} | table | lines, {"path": int32(B, T)}
    chain = {"drawn": meta(B, T, dtype=torch.int64), "drafts": int32(B, T - 1), "num_drafts": ROWS, "rows": ROWS}
    yield "accept_chain", chain | {"last_tokens": int32(SLOTS)}, {}
    yield "greedy", {"logits": logits["logits"]}, {"bitmask": filters["bitmask"]}
    outputs = {name: int32(B) for name in ("input_ids", "positions", "out_cache_loc")}
    table = {"rows": ROWS, "seq_lens": ROWS, "new_pages": int32(B, 1), "last_tokens": int32(SLOTS), "page_size": 16}
    plain = outputs | table | {"tables": int32(SLOTS, 1, 64), "drafts": None, "num_drafts": None}
    drafted = {name: int32(B * T) for name in outputs} | {"drafts": int32(B, T - 1), "num_drafts": ROWS}
    yield "decode_inputs", plain, drafted
    windows = {"out_cache_loc": int32(2, B), "new_pages": int32(B, 2), "tables": int32(SLOTS, 2, 64)}
    yield "decode_inputs", plain | windows, {}
    yield "decode_inputs", plain | {"mrope_positions": int32(B), "mrope_deltas": int32(SLOTS)}, {}
    buffers = DecodeBuffers(*int32(5, B))
    rows = {"req_pool_indices": ROWS, "seq_lens": ROWS, "num_real": 2, "tokens_per_row": 1}
    pools = {"req_to_state_slot": int32(SLOTS), "ring_start": int32(SLOTS), "ring_length": int32(SLOTS)}
    yield "fill_decode_metadata", {"out": buffers} | rows | pools, {}
    yield "enter_rows", {"rows": ROWS, "state_slots": ROWS, "phases": None, "apart": 16} | pools, {"phases": ROWS}
    pages = {"rows": ROWS, "page_indices": ROWS, "pages": int32(B, 2), "page_size": 16}
    yield "enter_pages", pages | {"tables": int32(SLOTS, 2, 64)}, {}
    yield "clear_slots", {"states": meta(2, SLOTS, 5 * N), "state_slots": ROWS}, {}
    yield "enter_tokens", {"rows": ROWS, "tokens": meta(B, dtype=torch.int64), "last_tokens": int32(SLOTS)}, {}
