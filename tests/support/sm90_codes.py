"""Calls over states in 8 bits, and over states that are rounded stochastically, at the shapes of real models. As
`sm90_cases.py`, which lists them."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hybridrt.kernels.core.records import StateCodes
from hybridrt.kernels.state.state_codes import head_bytes, split_heads_of_codes

Args = dict[str, Any]
Cases = Iterator[tuple[str, Args]]
EIGHT_BITS = (torch.int8, torch.float8_e4m3fn)


def coded_cases(
    steps: Callable[[Tensor, int, int], tuple[str, Args]], fold: Callable[..., tuple[str, Args]], state: Tensor
) -> Cases:
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
        yield from stored(states, codes, args, fold)
    yield from stored(state.bfloat16(), pool(state, torch.bfloat16)[1], args, fold)


def stored(states: Tensor, codes: StateCodes, args: Args, fold: Callable[..., tuple[str, Args]]) -> Cases:
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
