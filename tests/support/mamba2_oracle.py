"""Slow loops over tokens, written from the formulas, that the Mamba-2 operations are held against; and their inputs."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def changed_rows(before: Tensor, after: Tensor) -> set[int]:
    """Rows of a pool whose bytes are not what they were."""
    return {i for i in range(len(before)) if not same_bytes(before[i], after[i])}


def with_gaps(pool: Tensor) -> Tensor:
    """A copy of a pool whose entries are apart in memory, as in a pool that shares memory."""
    size = pool[0].numel()
    return poisoned(len(pool), size + 24, dtype=pool.dtype)[:, :size].unflatten(1, pool.shape[1:]).copy_(pool)


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A pool full of NaN, except for row 0, the scratch row."""
    pool = torch.full(shape, math.nan, dtype=dtype)
    pool[0] = torch.randn(shape[1:]).to(dtype)
    return pool


def conv_loop(history: Tensor, weight: Tensor, bias: Tensor | None, silu: bool = True) -> Tensor:
    """Outputs [L, C] of a request whose raw inputs [L, C] start at position 0, in float64."""
    taps, out = weight.shape[1], torch.empty(history.shape, dtype=torch.float64)
    for p in range(len(history)):
        total = torch.zeros(history.shape[1], dtype=torch.float64)
        for k in range(taps):
            source = p - (taps - 1) + k
            if source >= 0:
                total += weight[:, k].double() * history[source].double()
        total += 0.0 if bias is None else bias.double()
        out[p] = F.silu(total) if silu else total
    return out


@dataclass
class ScanInputs:
    """Inputs of one Mamba-1 or Mamba-2 layer; x, dt, B, C, z are column slices of one merged tensor [..., columns]."""

    x: Tensor
    dt: Tensor
    B: Tensor
    C: Tensor
    z: Tensor
    A: Tensor
    D: Tensor
    dt_bias: Tensor

    def __getitem__(self, index: Any) -> "ScanInputs":
        tokens = {name: getattr(self, name)[index] for name in ("x", "dt", "B", "C", "z")}
        return replace(self, **tokens)

    def terms(self) -> dict[str, Any]:
        """The arguments of an operation, by name."""
        return dict(vars(self))


def scan_inputs(
    *leading: int, heads: int = 4, dim: int = 3, state: int = 5, groups: int = 2, dtype: torch.dtype = torch.float32
) -> ScanInputs:
    """Random inputs whose states decay slowly (half-lives up to thousands of tokens): fast decay hides stale states."""
    widths = [heads * dim, heads, groups * state, groups * state, heads * dim]
    merged = (torch.randn(*leading, sum(widths)) * 0.5).to(dtype)
    x, dt, B, C, z = merged.split(widths, dim=-1)
    A = -torch.linspace(0.002, 0.3, heads)
    x, z = (part.unflatten(-1, (heads, dim)) for part in (x, z))
    B, C = (part.unflatten(-1, (groups, state)) for part in (B, C))
    return ScanInputs(x, dt, B, C, z, A, torch.randn(heads), torch.linspace(-3.0, 0.5, heads))


def scan_loop(
    inputs: ScanInputs,
    state: Tensor,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    D: bool = True,
    z: bool = True,
) -> tuple[Tensor, Tensor]:
    """Outputs [L, H, P] and the states [L, H, P, N] after each of L tokens, in float64."""
    i, outs, states, state = inputs, [], [], state.double()
    heads, groups = i.x.shape[1], i.B.shape[1]
    group = torch.arange(heads) // (heads // groups)
    for t in range(len(i.x)):
        step = F.softplus(i.dt[t].double() + i.dt_bias.double()).clamp(*dt_limit)
        x, key, query = i.x[t].double(), i.B[t].double()[group], i.C[t].double()[group]
        state = (i.A.double() * step).exp()[:, None, None] * state + (step[:, None] * x)[:, :, None] * key[:, None, :]
        y = (state * query[:, None, :]).sum(-1)
        y = y + i.D.double()[:, None] * x if D else y
        outs.append(y * F.silu(i.z[t].double()) if z else y)
        states.append(state)
    return torch.stack(outs), torch.stack(states)


def close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Largest error over the largest expected value."""
    error = (actual.double() - expected.double()).abs().max() / expected.double().abs().max().clamp(min=1e-9)
    assert error <= tolerance, f"relative error {error:.2e} > {tolerance:.0e}"
