"""Rotary positions of queries and keys (Su et al. 2021), next to their norms, and before keys enter the cache.

The order is that of NeoX: dimension i pairs with i + rot / 2. Shapes: `paged_attention.py`.
"""

import torch
from torch import Tensor

from hybridrt.kernels.attention.kv_write import write_kv
from hybridrt.kernels.core.operation import By, operation
from hybridrt.kernels.core.records import KVPlaces, Rope
from hybridrt.kernels.dense.norm_activation import rms_norm


def rotations(rope: Rope, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, 1, rot / 2] at `positions` [T] or [3, T], equal in all layers of a
    table."""
    found = rope.cos_sin.index_select(0, positions.flatten())
    if positions.dim() == 2:
        half = torch.arange(rope.cos_sin.shape[1] // 2, device=found.device)
        axes = torch.zeros_like(half)
        for axis in (1, 2):
            axes[(half % 3 == axis) & (half < 3 * rope.sections[axis])] = axis
        by_axis = found.view(*positions.shape, -1)
        found = by_axis.gather(0, axes.repeat(2).expand(1, *by_axis.shape[1:]))[0]
    cos, sin = found.unsqueeze(1).chunk(2, dim=-1)
    return cos, sin


def rotate(q: Tensor, k: Tensor, rope: Rope, by: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """`qk_norm_rotary` in plain torch, by the tokens' cosines and sines."""
    cos, sin = by
    normed_q = q if rope.q_weight is None else rms_norm.reference(q, rope.q_weight, rope.eps)
    normed_k = k if rope.k_weight is None else rms_norm.reference(k, rope.k_weight, rope.eps)
    # One tensor halves the operations, which bound a decode step on a CPU.
    heads, half = torch.cat((normed_q, normed_k), dim=1).float(), cos.shape[2]
    first, second, _ = heads.split_with_sizes((half, half, heads.shape[2] - 2 * half), dim=-1)
    rotated = (first * cos).addcmul_(second, sin, value=-1)
    second.mul_(cos).addcmul_(first, sin)
    first.copy_(rotated)
    rotated_q, rotated_k = heads.to(q.dtype).split_with_sizes((q.shape[1], k.shape[1]), dim=1)
    return rotated_q, rotated_k


@operation(By("triton"))
def qk_norm_rotary(q: Tensor, k: Tensor, positions: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
    """Normalizes q and k per head if there are weights (Qwen3-Next), then rotates the first `rot`
    dims by position.

    q `[T, Hq, D]`, k `[T, Hkv, D]` (strided views are fine), positions `[T]` or `[3, T]` int32 or
    int64: `Rope.sections` says which axis turns a pair.
    Returns (q, k) in their dtypes: changed in place, or possibly views of one tensor.
    """
    return rotate(q, k, rope, rotations(rope, positions))


@operation(By("triton"))
def rotary_write_kv(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, rope: Rope, places: KVPlaces) -> Tensor:
    """`qk_norm_rotary`, then `write_kv` of the rotated k and of v `[T, Hkv, D]`. Returns the
    rotated q."""
    q, k = qk_norm_rotary.reference(q, k, positions, rope)
    write_kv.reference(k, v, *places)
    return q
