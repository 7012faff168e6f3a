"""Calls over states in 8 bits, and over states that are rounded stochastically, at the shapes of real models. As
`sm90_cases.py`, which lists them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hybridrt.kernels.core.records import StateCodes
from hybridrt.kernels.state.state_codes import head_bytes, split_heads_of_codes
from tests.support.sm90_cases import (
    DIM,
    MAMBA2_SHAPES,
    Args,
    Cases,
    channel_ring,
    conv,
    delta_net_step,
    f32,
    fold,
    mamba2_step,
    meta,
)

EIGHT_BITS = (torch.int8, torch.float8_e4m3fn)


def coded_states() -> Cases:
    """Recurrent layers of Falcon-H1-7B, Nemotron-H-8B, Qwen3-Next and Kimi-Linear, with states in 8 bits."""
    for shape in MAMBA2_SHAPES:
        heads, dim, state_dim, _ = shape

        def mamba2_rows(states: Tensor, batch: int, tokens: int, shape: Any = shape) -> tuple[str, Args]:
            *_, (op, args), _, _ = mamba2_step(shape, torch.bfloat16, batch, tokens, 16 if tokens == 1 else 32)
            return op, args | {"states": states}

        yield from coded_cases(mamba2_rows, f32(300, heads, dim, state_dim))

    def delta_net_rows(states: Tensor, batch: int, tokens: int) -> tuple[str, Args]:
        (op, args), _ = delta_net_step(batch, tokens, "replay", torch.bfloat16)
        return op, args | {"states": states}

    def kimi_rows(states: Tensor, batch: int, tokens: int) -> tuple[str, Args]:
        width = 32 * DIM
        qkv, a, b = meta(batch, tokens, 4 * width + 32).split([3 * width, width, 32], -1)
        args = {"qkv": qkv, "a": a.unflatten(-1, (32, DIM)), "b": b, "A_log": f32(32), "dt_bias": f32(32, DIM)}
        args |= conv(3 * width, batch) | {"bias": None, "states": states}
        return "gdn_decode", args | channel_ring(batch, 16 if tokens == 1 else 32, 32)

    for rows in (delta_net_rows, kimi_rows):
        yield from coded_cases(rows, f32(300, 32, DIM, DIM))


def coded_cases(steps: Callable[[Tensor, int, int], tuple[str, Args]], state: Tensor) -> Cases:
    """Decode of many rows and of one, and verification; then a fold, and what a prompt loads and stores.

    Args:
        steps: (states, rows, tokens) to the operation and its arguments but for the codes.
        state: [S+1, H, P, N], of which the sizes count.
    """
    for dtype in EIGHT_BITS:
        states, codes = pool(state, dtype)
        for rows, tokens in ((128, 1), (1, 1), (32, 5)):
            op, args = steps(states, rows, tokens)
            yield op, args | codes._asdict()
        yield from stored(states, codes, args)
    yield from stored(state.bfloat16(), pool(state, torch.bfloat16)[1], args)


def stored(states: Tensor, codes: StateCodes, args: Args) -> Cases:
    op, folded = fold(states, args, args.get("A"))
    scales = None if codes.state_scales is None else codes.state_scales[None]
    layers = StateCodes(codes.state_lengths, codes.element_keys[None], scales)
    yield op, folded | {"folds": replace(folded["folds"], state_lengths=args["rows"]), "codes": layers}
    slots = args["rows"]
    both = {"states": states, "read_state_slots": slots, "write_state_slots": slots} | codes._asdict()
    yield "load_states", both | {"has_initial_state": torch.empty(len(slots), dtype=torch.bool, device="meta")}
    new = torch.empty((len(slots), *states.shape[1:]), dtype=torch.float32, device="meta")
    yield "store_states", both | {"new": new, "lengths": slots}


def pool(state: Tensor, dtype: torch.dtype) -> tuple[Tensor, StateCodes]:
    slots, heads, rows, columns = state.shape
    numbers = torch.empty(max(slots, heads), dtype=torch.int32, device="meta")
    codes = StateCodes(numbers[:slots], numbers[:heads])
    if dtype not in EIGHT_BITS:
        return state.to(dtype), codes
    raw = torch.empty(slots, heads, head_bytes(rows, columns), dtype=torch.uint8, device="meta")
    states, scales = split_heads_of_codes(raw, rows, columns, dtype)
    return states, codes._replace(state_scales=scales)
