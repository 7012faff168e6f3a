"""Prints what the attention, Gated Delta Net, expert and sampling kernels use on sm_90 for bfloat16 activations of the
Falcon-H1-7B, Nemotron-H-8B and Qwen3-Next shapes, one JSON object a line."""

import json
from dataclasses import asdict

import torch
from torch import Tensor

from hybridrt.kernels.acceptance_triton import accept_chain_triton
from hybridrt.kernels.activation_triton import relu2_triton, sigmoid_mul_triton, silu_and_mul_triton
from hybridrt.kernels.chunk_plan import ChunkPlan
from hybridrt.kernels.gated_delta_rule_triton import chunk_gated_delta_rule_triton, gdn_gates_triton
from hybridrt.kernels.gdn_decode_triton import gdn_decode_triton
from hybridrt.kernels.moe_router_triton import router_sigmoid_grouped_triton, router_softmax_triton
from hybridrt.kernels.moe_triton import fused_experts_triton
from hybridrt.kernels.paged_attention_triton import attention_decode_triton, write_kv_triton
from hybridrt.kernels.prefill_attention_triton import attention_extend_triton
from hybridrt.kernels.rms_norm_triton import add_rms_norm_triton
from hybridrt.kernels.rotary_triton import rotary_write_kv_triton
from hybridrt.kernels.sampling import Penalties
from hybridrt.kernels.sampling_triton import filtered_logits_triton, greedy_triton, sample_triton
from hybridrt.kernels.state_ring import RingFolds
from hybridrt.kernels.state_ring_triton import fold_ring_triton
from tests.support.sm90 import compiled_only

KEY_HEADS, VALUE_HEADS, DIM = 16, 32, 128  # of Qwen3-Next's Gated Delta Net


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def int32(*shape: int) -> Tensor:
    return meta(*shape, dtype=torch.int32)


def float32(*shape: int) -> Tensor:
    return meta(*shape, dtype=torch.float32)


def attention(query_heads: int, kv_heads: int, dim: int, rot: int) -> None:
    cache, table = meta(5000, 16, kv_heads, dim), int32(300, 4096)
    # In a wide table the contexts of many rows are split as well, the longest of them.
    for batch, tokens, nodes, width in (
        (128, 1, 0, 4096), (128, 1, 0, 32784), (32, 5, 5, 4096), (32, 5, 0, 4096), (128, 5, 0, 4096),
    ):  # fmt: skip
        tree = meta(batch, nodes, nodes, dtype=torch.bool) if nodes else None
        attention_decode_triton(
            meta(batch, tokens, query_heads, dim),
            cache,
            cache,
            int32(300, width),
            int32(batch),
            int32(batch),
            scale=0.1,
            tree_mask=tree,
            num_drafts=int32(batch) if tokens > 1 else None,
        )
    q, k = meta(8192, query_heads, dim), meta(8192, kv_heads, dim)
    # Long chunks, whose keys are gathered, short ones, and one so short that tiles are halved.
    for rows, tokens, window in ((1, 8192, None), (1, 8192, 4096), (64, 128, None), (64, 128, 4096), (1, 128, None)):
        lens = [tokens] * rows
        attention_extend_triton(
            q[: rows * tokens], cache, cache, table, int32(rows), int32(rows + 1), int32(rows), scale=0.1,
            sliding_window=window, query_lens=lens, seq_lens_host=lens,
        )  # fmt: skip
    weight, slots = float32(dim), int32(8192)
    rotary_write_kv_triton(q, k, k, slots, float32(4096, rot), weight, weight, 1e-6, cache, cache, slots)
    write_kv_triton(k, k, cache, cache, slots)


def elementwise() -> None:
    for width in (3072, 4096):
        add_rms_norm_triton(meta(128, width), meta(128, width), float32(width), 1e-5)
    silu_and_mul_triton(meta(128, 2 * 12288))
    relu2_triton(meta(128, 21504))
    sigmoid_mul_triton(meta(128, 4096), meta(128, 4096))


def sampling() -> None:
    batch, vocabulary = 128, 151936
    rows, keys = float32(batch), meta(batch, dtype=torch.int64)
    logits, words = meta(batch, vocabulary), int32(batch, vocabulary // 32)
    counts, prompt = int32(batch, vocabulary), meta(batch, vocabulary, dtype=torch.bool)
    filters = {"temperature": rows, "top_k": int32(batch), "top_p": rows, "min_p": rows}
    greedy_triton(logits, words)
    accept_chain_triton(meta(batch, 5, dtype=torch.int64), int32(batch, 4), int32(batch), int32(batch), int32(300))
    filtered_logits_triton(logits, **filters)
    penalties = Penalties(rows, rows, rows, counts, prompt)
    sample_triton(logits, **filters, seeds=keys, indices=keys, penalties=penalties, bitmask=words)


def delta_net_step(batch: int, tokens: int, mode: str, state_dtype: torch.dtype = torch.float32) -> None:
    channels = 2 * KEY_HEADS * DIM + VALUE_HEADS * DIM
    qkv, _, b, a = meta(batch, tokens, channels + VALUE_HEADS * (DIM + 2)).split(
        [channels, VALUE_HEADS * DIM, VALUE_HEADS, VALUE_HEADS], -1
    )
    rows = int32(batch)
    states = meta(300, VALUE_HEADS, DIM, DIM, dtype=state_dtype)
    width = 16 if tokens == 1 else 32
    ring = {
        "values": meta(129, VALUE_HEADS, width, DIM),
        "keys": meta(129, KEY_HEADS, width, DIM),
        "gates": float32(129, VALUE_HEADS, width),
    }
    changed = {
        "classic": {},
        "intermediate": {"intermediate_states": float32(129, tokens, VALUE_HEADS, DIM, DIM), "rows": rows},
        "replay": {**ring, "start": rows, "length": rows, "rows": rows},
    }
    gdn_decode_triton(
        qkv, a, b, weight=meta(channels, 4), bias=None, A_log=float32(VALUE_HEADS), dt_bias=float32(VALUE_HEADS),
        conv=meta(300, channels, 8), states=states, read_slots=rows, write_slots=rows, start_positions=rows,
        **changed[mode],
    )  # fmt: skip
    if mode == "replay":
        pool = (part[None] for part in (states, *ring.values()))
        fold_ring_triton(*pool, None, RingFolds(rows, rows, rows, rows, int32(1)), write_slots=rows)


def delta_net_prefill(rows: int, length: int) -> None:
    tokens, chunks = rows * length, rows * length // 64
    lengths = (length,) * rows
    plan = ChunkPlan(int32(chunks + 1), int32(chunks), int32(rows), int32(rows), length // 64, 64, tokens, lengths)
    gates = meta(tokens, VALUE_HEADS)
    g, beta = gdn_gates_triton(gates, gates, float32(VALUE_HEADS), float32(VALUE_HEADS))
    chunk_gated_delta_rule_triton(
        meta(tokens, KEY_HEADS, DIM), meta(tokens, KEY_HEADS, DIM), meta(tokens, VALUE_HEADS, DIM), g, beta,
        states=float32(300, VALUE_HEADS, DIM, DIM), read_slots=int32(rows), write_slots=int32(rows),
        has_initial_state=meta(rows, dtype=torch.bool), query_start_loc=int32(rows + 1), plan=plan,
    )  # fmt: skip


def experts() -> None:
    count, width, inner, top_k = 512, 2048, 512, 10
    up, down = meta(count + 1, 2 * inner, width), meta(count + 1, width, inner)
    for tokens in (1, 128, 1024):
        logits = meta(tokens, count + 8)
        weights, ids = router_softmax_triton(logits[:, :count], top_k, True, logits[:, count], 1)
        fused_experts_triton(meta(tokens, width), up, down, weights, ids, activation="silu", gated=True)
    router_sigmoid_grouped_triton(float32(128, 128), float32(128), 6, 8, 4, True, 2.5)


def main() -> None:
    with compiled_only() as used:
        attention(12, 2, 128, 128)
        attention(16, 2, 256, 64)
        elementwise()
        sampling()
        for batch, tokens, mode in (
            (128, 1, "classic"),
            (128, 1, "replay"),
            (32, 5, "intermediate"),
            (32, 5, "replay"),
        ):
            delta_net_step(batch, tokens, mode)
        for batch in (1, 128):
            delta_net_step(batch, 1, "classic", torch.bfloat16)
        delta_net_prefill(1, 8192)
        delta_net_prefill(16, 2048)
        experts()
    for usage in used:
        print(json.dumps(asdict(usage)), flush=True)


if __name__ == "__main__":
    main()
