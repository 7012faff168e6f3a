"""Plain-torch `gdn_decode` behind the conv, with a state ring: outputs are read from a checkpoint and recent inputs.

The state in the pool is a checkpoint. Since then, the ring of a running row keeps per token the corrected value
u = beta (v - S k) (S: the state after this token's decay), the normalised key and the log decay g, so that the state
after n entries is

    exp(G_n) S_0 + sum_i exp(G_n - G_i) u_i k_i^T,    G_i = g_1 + ... + g_i

and is only written once the ring is full. Every term is computed from the entries as the ring stores them (its
dtype), so that a token's output does not depend on how tokens were grouped into steps.

Shapes: B rows, T new tokens, W ring columns, Hk key heads of dim K, Hv value heads of dim V. The T new entries go to
columns (start + length + t) mod W.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridrt.kernels.gated_delta_rule import l2_normalize
from hybridrt.kernels.records import DeltaInputs, StateRing, StateSlots
from hybridrt.kernels.slots import pad_mask, read_rows, write_columns
from hybridrt.kernels.state_ring import ring_entries


@dataclass(frozen=True)
class _History:
    """A row's first W ring entries in order of time, float32, zero where not visible.

    values `[B, Hv, W, V]`, keys `[B, Hk, W, K]`; logs of what is left at the end of each entry, entry_decay `[B, Hv,
    W]`, and of the checkpoint, decay `[B, Hv]`.
    """

    values: Tensor
    keys: Tensor
    entry_decay: Tensor
    decay: Tensor


def gdn_replay(inputs: DeltaInputs, state: StateSlots, ring: StateRing) -> Tensor:
    """Outputs of T new tokens per row (decode: T = 1, verification of a chain: T > 1); their entries join the ring.

    `state` holds the checkpoints; it is read alone. The cursors are not moved (`advance_ring` does that). Returns
    `[B, T, Hv, V]` in v's dtype.
    """
    (q, k, v, g, beta), (states, slots, _, _) = inputs, state
    values, keys, gates, rows, start, length = ring
    tokens, width = q.shape[1], values.shape[2]
    history = _read_history(ring)
    new_keys = l2_normalize(k).to(keys.dtype).float().transpose(1, 2)
    queries = (l2_normalize(q) * q.shape[-1] ** -0.5).transpose(1, 2)
    log_decay = g.float().cumsum(1).transpose(1, 2)
    checkpoint = read_rows(states, slots).float()
    base = _read_past(checkpoint, history, torch.cat((new_keys, queries), 2), torch.cat((log_decay, log_decay), 2))
    out, corrected = _new_tokens(base, new_keys, queries, v, log_decay, beta.float(), values.dtype)
    column = ((start + length).unsqueeze(1) + torch.arange(tokens, device=start.device)) % width
    for tensor, entries in ((values, corrected.transpose(1, 2)), (keys, new_keys.transpose(1, 2)), (gates, g)):
        write_columns(tensor, slots, column, entries, rows)
    return out.transpose(1, 2).masked_fill(pad_mask(slots, 4), 0).to(q.dtype)


def _read_history(ring: StateRing) -> _History:
    *stored, length = ring
    visible = torch.arange(ring.gates.shape[2], device=length.device) < length[:, None]
    # Columns that are not visible may hold anything, NaN included, so they are replaced and not multiplied by zero.
    entry_values, entry_keys, entry_gates = (
        torch.where(visible.view(*visible.shape, *[1] * (part.ndim - 2)), part, 0).transpose(1, 2)
        for part in ring_entries(*stored)
    )
    # From the end, not as a difference of sums from the start: strong decays long ago would round it away.
    since = entry_gates.flip(-1).cumsum(-1).flip(-1)
    return _History(entry_values, entry_keys, F.pad(since[..., 1:], (0, 1)), since[..., 0])


def _read_past(checkpoint: Tensor, history: _History, vectors: Tensor, log_decay: Tensor) -> Tensor:
    """S x for vectors x `[B, Hk, n, K]`, S the state before this step, decayed by log_decay `[B, Hv, n]` since:
    `[B, Hv, n, V]`."""
    heads_per_key = checkpoint.shape[1] // vectors.shape[1]
    products = (vectors @ history.keys.transpose(-1, -2)).repeat_interleave(heads_per_key, 1)
    weights = products * (log_decay.unsqueeze(-1) + history.entry_decay.unsqueeze(-2)).exp()
    vectors = vectors.repeat_interleave(heads_per_key, 1)
    from_checkpoint = (vectors @ checkpoint.transpose(-1, -2)) * (
        log_decay + history.decay.unsqueeze(-1)
    ).exp().unsqueeze(-1)
    return from_checkpoint + weights @ history.values


def _new_tokens(
    base: Tensor, keys: Tensor, queries: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, ring_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Outputs and corrected values, both `[B, Hv, T, V]`: each token corrects for the entries of those before it.

    base `[B, Hv, 2T, V]`: what the T keys, then the T queries read from the past; keys, queries `[B, Hk, T, K]`.
    """
    tokens = keys.shape[2]
    heads_per_key = v.shape[2] // keys.shape[1]
    pair_decay = (log_decay.unsqueeze(-1) - log_decay.unsqueeze(-2)).exp()
    by_key, by_query = (
        (x @ keys.transpose(-1, -2)).repeat_interleave(heads_per_key, 1) * pair_decay for x in (keys, queries)
    )
    corrected = torch.zeros_like(base[:, :, :tokens])
    for t in range(tokens):
        read = base[:, :, t] + (by_key[:, :, t : t + 1, :t] @ corrected[:, :, :t]).squeeze(2)
        corrected[:, :, t] = ((v[:, t].float() - read) * beta[:, t].unsqueeze(-1)).to(ring_dtype)
    return base[:, :, tokens:] + by_query.tril() @ corrected, corrected
