"""Triton kernel of `gated_rms_norm`: a program computes one group of one or several tokens."""

import triton.language as tl
from torch import Tensor

from hybridrt.base.device import multiprocessors
from hybridrt.kernels.core.jit_kernel_triton import jit_kernel
from hybridrt.kernels.core.launch import cdiv, next_power_of_2
from hybridrt.kernels.core.pdl_triton import begin, pdl
from hybridrt.kernels.dense.gated_norm import GateActivation
from hybridrt.kernels.state.conv_and_gates_triton import silu

MOST_TOKENS = 8  # tokens of a program, which is compiled for their number


@jit_kernel(do_not_specialize=["tokens"])
def _gated_norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr, gate_ptr, weight_ptr, out_ptr, x_st: tl.constexpr, gate_st: tl.constexpr, eps, tokens,
    D: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, NORM_FIRST: tl.constexpr,
    SIGMOID: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Each token is a tile: its sum has the same order for every TOKENS."""
    first = tl.program_id(0) // (D // GROUP) * TOKENS
    i = tl.arange(0, BLOCK)
    mask = i < GROUP
    d = tl.program_id(0) % (D // GROUP) * GROUP + i
    weight = tl.load(weight_ptr + d, mask=mask, other=0.0)
    begin(PDL)
    # Loads before stores: the compiler does not move loads over stores.
    hs, gates = (), ()  # type: tuple[Tensor, ...], tuple[Tensor, ...]
    for t in tl.static_range(TOKENS):
        token = tl.minimum(first + t, tokens - 1).to(tl.int64)  # tokens past the last repeat it
        hs += (tl.load(x_ptr + token * x_st + d, mask=mask, other=0.0),)
        gates += (tl.load(gate_ptr + token * gate_st + d, mask=mask, other=0.0),)
    for t in tl.static_range(TOKENS):
        h, gate = hs[t].to(tl.float32), gates[t].to(tl.float32)
        gate = tl.sigmoid(gate) if SIGMOID else silu(gate)
        if not NORM_FIRST:
            h *= gate
        h *= tl.rsqrt(tl.sum(h * h, axis=0) / GROUP + eps) * weight
        if NORM_FIRST:
            h *= gate
        token = tl.minimum(first + t, tokens - 1).to(tl.int64)
        tl.store(out_ptr + token * D + d, h.to(out_ptr.dtype.element_ty), mask=mask)


def gated_rms_norm_triton(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, group_size: int, norm_before_gate: bool,
    activation: GateActivation = "silu",
) -> Tensor:  # fmt: skip
    tokens, channels = x.shape
    out = x.new_empty((tokens, channels))
    block, groups = next_power_of_2(group_size), channels // group_size
    together = _tokens_of_a_program(tokens * groups // multiprocessors(x.device), block)
    _gated_norm_kernel[(cdiv(tokens, together) * groups,)](
        x, gate, weight, out, x.stride(0), gate.stride(0), eps, tokens,
        D=channels, GROUP=group_size, BLOCK=block, TOKENS=together, NORM_FIRST=norm_before_gate,
        SIGMOID=activation == "sigmoid", num_warps=min(8, max(1, block // 512)), **pdl(x.device),
    )  # fmt: skip
    return out


def _tokens_of_a_program(rows: int, block: int) -> int:
    """Measured on an H200: few rows are bound by latency, many by loads in flight. `rows`: groups
    for each multiprocessor. `block`: size of a group.
    """
    if rows < 4:
        return 1
    return min(max(1, (512 if rows < 128 else 1024) // block), MOST_TOKENS)
