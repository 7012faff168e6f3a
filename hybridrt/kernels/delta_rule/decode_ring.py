"""Plain-torch `gdn_decode` after the conv, in replay mode: reads the checkpoint and the ring.

The state in the pool is a checkpoint. For each token since, the ring holds the corrected value u =
beta (v - S k) (S: the state after this token's decay), the normalised key and the log decay g. The
state after n entries is

    exp(G_n) S_0 + sum_i exp(G_n - G_i) u_i k_i^T,    G_i = g_1 + ... + g_i

Terms are computed from the entries in the ring's dtype, so a token's output does not depend on how
tokens were grouped into steps.

In Kimi Delta Attention each channel of a key has such a sum, and the ring holds K log decays a
token. A decay is split at the end of the ring: the logs of both factors are negative, so nothing
overflows.

Shapes: B rows, T new tokens, W ring columns, Hk key heads of dim K, Hv value heads of dim V, D
channels with decays of their own: 1, or K in Kimi Delta Attention.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridrt.kernels.core.chunk_plan import decay_sums, exp_of
from hybridrt.kernels.core.records import DeltaInputs, StateRing, StateSlots
from hybridrt.kernels.core.slots import pad_mask, write_columns
from hybridrt.kernels.delta_rule.delta_rule import decayed_products, l2_normalize
from hybridrt.kernels.state.state_codes import read_states
from hybridrt.kernels.state.state_ring import ring_entries


@dataclass(frozen=True)
class _History:
    """A row's first W ring entries by time, float32, zero where not visible.

    Attributes:
        values: `[B, Hv, W, V]`.
        keys: `[B, Hv, W, K]`, decayed to the end of the ring.
        log_decay: `[B, Hv, 1, D]`, of the checkpoint until the end of the ring.
    """

    values: Tensor
    keys: Tensor
    log_decay: Tensor


def gdn_replay(inputs: DeltaInputs, state: StateSlots, ring: StateRing) -> Tensor:
    """Outputs `[B, T, Hv, V]` of T new tokens per row, in v's dtype; their entries join the ring at
    columns (start + length + t) mod W.

    The checkpoints in `state` are only read, and the cursors stay (`advance_ring` moves them).
    """
    q, g, slots, values, keys = inputs.q, inputs.g, state.read_state_slots, ring.values, ring.keys
    tokens, width = q.shape[1], values.shape[2]
    history = _read_history(ring)
    new_keys = l2_normalize(inputs.k).to(keys.dtype).float().transpose(1, 2)
    queries = (l2_normalize(q) * q.shape[-1] ** -0.5).transpose(1, 2)
    sums = decay_sums(g if g.ndim == inputs.v.ndim else g.unsqueeze(-1), 1).transpose(1, 2)
    checkpoint = read_states(state)
    base = _read_past(checkpoint, history, torch.cat((new_keys, queries), 2), torch.cat((sums, sums), 2))
    out, corrected = _new_tokens(base, new_keys, queries, inputs.v, sums, inputs.beta.float(), values.dtype)
    column = ((ring.start + ring.length).unsqueeze(1) + torch.arange(tokens, device=ring.start.device)) % width
    for tensor, entries in ((values, corrected.transpose(1, 2)), (keys, new_keys.transpose(1, 2)), (ring.gates, g)):
        write_columns(tensor, slots, column, entries, ring.rows)
    return out.transpose(1, 2).masked_fill(pad_mask(slots, 4), 0).to(inputs.v.dtype)


def _read_history(ring: StateRing) -> _History:
    values, keys, gates = (part.transpose(1, 2) for part in ring_entries(*ring))
    gates = gates if gates.ndim == keys.ndim else gates.unsqueeze(-1)
    # Sums from the end: a difference of sums from the start would round away.
    since = gates.flip(2).cumsum(2).flip(2)
    keys = keys.repeat_interleave(values.shape[1] // keys.shape[1], 1)
    return _History(values, keys * F.pad(since[:, :, 1:], (0, 0, 0, 1)).exp(), since[:, :, :1])


def _read_past(checkpoint: Tensor, history: _History, vectors: Tensor, sums: Tensor) -> Tensor:
    """S x for vectors x `[B, Hk, n, K]`, S decayed by `sums` `[B, Hv, n, D]`: `[B, Hv, n, V]`."""
    vectors = vectors.repeat_interleave(checkpoint.shape[1] // vectors.shape[1], 1) * exp_of(sums)
    from_checkpoint = (vectors * history.log_decay.exp()) @ checkpoint.transpose(-1, -2)
    return from_checkpoint + (vectors @ history.keys.transpose(-1, -2)) @ history.values


def _new_tokens(
    base: Tensor, keys: Tensor, queries: Tensor, v: Tensor, sums: Tensor, beta: Tensor, ring_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Returns outputs and corrected values `[B, Hv, T, V]`. base `[B, Hv, 2T, V]`: products of
    keys, then queries, with the past.
    """
    tokens = keys.shape[2]
    by_key, by_query = (decayed_products(x, keys, sums) for x in (keys, queries))
    corrected = torch.zeros_like(base[:, :, :tokens])
    for t in range(tokens):
        read = base[:, :, t] + (by_key[:, :, t : t + 1, :t] @ corrected[:, :, :t]).squeeze(2)
        corrected[:, :, t] = ((v[:, t].float() - read) * beta[:, t].unsqueeze(-1)).to(ring_dtype)
    return base[:, :, tokens:] + by_query @ corrected, corrected
