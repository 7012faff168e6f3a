"""Decode of Mamba-2 from a checkpoint of the state and a ring of recent inputs (after ReplaySSM).

The pool holds the state after some committed token, the checkpoint. The inputs of the `length` tokens since then
stand in a ring of W columns per running request, the oldest in column `start`:

    values [R+1, H, W, P]   x after the conv, model dtype
    keys   [R+1, G, W, N]   B after the conv, model dtype
    gates  [R+1, H, W]      dt after softplus and clamp, float32

With s_j the sum of A dt over the ring up to entry j, token t's output reads checkpoint and ring alone:

    y_t = exp(s_t) S C_t + sum_{j <= t} exp(s_t - s_j) dt_j (B_j . C_t) x_j

The state is written only when a step of T tokens might leave too little room for the widest step that can follow
(length + T + widest > W): the committed entries are folded into the checkpoint then. Between steps length + widest <= W.
"""

import torch
from torch import Tensor

from hybridrt.errors import ConfigError
from hybridrt.kernels.mamba2_common import skip_and_gate, time_step
from hybridrt.kernels.providers import register, select
from hybridrt.kernels.slots import pad_mask, read_rows, write_rows

_HERE = "hybridrt.kernels.state_replay"
for _op in ("mamba2_replay", "mamba2_fold", "advance_ring"):
    register(_op, "torch", f"{_HERE}:{_op}_reference")
    register(_op, "triton", f"{_HERE}_triton:{_op}_triton", priority=10)


def mamba2_replay(
    states: Tensor,
    values: Tensor,
    keys: Tensor,
    gates: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None,
    dt_bias: Tensor | None,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    z: Tensor | None,
    slots: Tensor,
    rows: Tensor,
    start: Tensor,
    length: Tensor,
    widest: int | None = None,
) -> Tensor:
    """Outputs of T new tokens of each row; their inputs enter the ring at (start + length + t) mod W.

    Args:
        states: [S+1, H, P, N] checkpoints; values, keys, gates: the ring of this layer.
        x, z: [B, T, H, P]; dt: [B, T, H] raw; B, C: [B, T, G, N]; A, D, dt_bias: [H].
        slots, rows: [B] int32, rows of `states` and of the ring. Slot -1 is padding: zeros, nothing touched.
        start, length: [B] int32, the cursors at the head of the step. `advance_ring` moves them at its end.
        widest: tokens of the widest step that may follow; None for this step's. Pass the same to `advance_ring`.

    Returns:
        [B, T, H, P] in x's dtype.

    Raises:
        ConfigError: W < 2 * widest, or the step is wider than the widest.
    """
    widest = check_ring_width(gates.shape[2], x.shape[1], widest)
    out: Tensor = select("mamba2_replay", x.device.type)(
        states, values, keys, gates, x, dt, A, B, C, D=D, dt_bias=dt_bias, dt_limit=dt_limit, z=z,
        slots=slots, rows=rows, start=start, length=length, widest=widest,
    )  # fmt: skip
    return out


def mamba2_fold(
    states: Tensor,
    values: Tensor,
    keys: Tensor,
    gates: Tensor,
    A: Tensor,
    *,
    read_slots: Tensor,
    write_slots: Tensor,
    rows: Tensor,
    start: Tensor,
    length: Tensor,
) -> None:
    """Writes the state after `length` [B] ring entries, counted from the checkpoint in read_slots, to write_slots.

    The ring and the cursors stay as they are. Padding rows (slots -1) touch nothing.
    """
    select("mamba2_fold", states.device.type)(
        states, values, keys, gates, A,
        read_slots=read_slots, write_slots=write_slots, rows=rows, start=start, length=length,
    )  # fmt: skip


def advance_ring(
    start: Tensor,
    length: Tensor,
    rows: Tensor,
    accepted: Tensor,
    num_tokens: int,
    width: int,
    widest: int | None = None,
) -> None:
    """Commits `accepted` [B] of the step's `num_tokens` inputs: moves the cursors [R+1] of `rows` in place.

    Call it once a step, after the last layer, with the `widest` of the step. Rows with nothing accepted (padding) stay
    as they are.
    """
    widest = check_ring_width(width, num_tokens, widest)
    select("advance_ring", start.device.type)(start, length, rows, accepted, num_tokens, width, widest)


def must_fold(length: Tensor, num_tokens: int, width: int, widest: int) -> Tensor:
    """[B] bool: a step of `num_tokens` folds the row's `length` committed entries into the checkpoint first."""
    return length + num_tokens + widest > width


def check_ring_width(width: int, num_tokens: int, widest: int | None) -> int:
    """`widest`, or `num_tokens` where it is None.

    Raises:
        ConfigError: a ring of `width` columns cannot serve steps of at most so many tokens, or this one is wider.
    """
    widest = num_tokens if widest is None else widest
    if width < 2 * widest:
        raise ConfigError(f"a state ring of {width} columns cannot serve steps of {widest} tokens; "
                          f"it needs at least {2 * widest}")  # fmt: skip
    if num_tokens > widest:
        raise ConfigError(f"a step of {num_tokens} tokens, and the widest has {widest}: pass widest={num_tokens}")
    return widest


def mamba2_replay_reference(
    states: Tensor,
    values: Tensor,
    keys: Tensor,
    gates: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None,
    dt_bias: Tensor | None,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    z: Tensor | None,
    slots: Tensor,
    rows: Tensor,
    start: Tensor,
    length: Tensor,
    widest: int | None = None,
) -> Tensor:
    """Plain-torch `mamba2_replay`."""
    num_tokens, width = x.shape[1], gates.shape[2]
    new = torch.arange(num_tokens, device=x.device)
    column = (start[:, None] + length[:, None] + new) % width
    for ring, entries in ((values, x), (keys, B), (gates, time_step(dt, dt_bias, dt_limit))):
        _write_entries(ring, slots, rows, column, entries)

    v, k, g = _entries(values, keys, gates, rows, start)
    folded = torch.where(must_fold(length, num_tokens, width, widest or num_tokens), length, 0)[:, None]
    state = _fold(read_rows(states, slots).float(), v, k, g, A, folded)
    write_rows(states, slots, state)

    end = length[:, None] + new
    y = _read(state, v, k, g, A, C.float(), folded, end)
    return skip_and_gate(y, x, D, z).masked_fill_(pad_mask(slots, 4), 0.0).to(x.dtype)


def mamba2_fold_reference(
    states: Tensor,
    values: Tensor,
    keys: Tensor,
    gates: Tensor,
    A: Tensor,
    *,
    read_slots: Tensor,
    write_slots: Tensor,
    rows: Tensor,
    start: Tensor,
    length: Tensor,
) -> None:
    """Plain-torch `mamba2_fold`."""
    state = read_rows(states, read_slots).float()
    write_rows(states, write_slots, _fold(state, *_entries(values, keys, gates, rows, start), A, length[:, None]))


def advance_ring_reference(
    start: Tensor, length: Tensor, rows: Tensor, accepted: Tensor, num_tokens: int, width: int, widest: int
) -> None:
    """Plain-torch `advance_ring`."""
    row = rows.long()
    old_start, old_length = start[row], length[row]
    folded = torch.where(must_fold(old_length, num_tokens, width, widest), old_length, 0)
    live = accepted > 0
    start[row] = torch.where(live, (old_start + folded) % width, old_start)
    length[row] = torch.where(live, old_length - folded + accepted, old_length).to(length.dtype)


def _write_entries(ring: Tensor, slots: Tensor, rows: Tensor, column: Tensor, entries: Tensor) -> None:
    """ring[rows[b], :, column[b, t]] = entries [B, T, heads, ...]; padding rows touch nothing."""
    old = ring[rows[:, None], :, column]
    ring[rows[:, None], :, column] = torch.where(pad_mask(slots, entries.ndim), old, entries.to(ring.dtype))


def _entries(values: Tensor, keys: Tensor, gates: Tensor, rows: Tensor, start: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The rings of `rows` in float32, oldest entry first: [B, W, H, P], [B, W, G, N], [B, W, H]."""
    width = gates.shape[2]
    column = (start[:, None] + torch.arange(width, device=start.device)) % width
    v, k, g = (ring[rows[:, None], :, column].float() for ring in (values, keys, gates))
    return v, k, g


def _fold(state: Tensor, v: Tensor, k: Tensor, g: Tensor, A: Tensor, count: Tensor) -> Tensor:
    """The state [B, H, P, N] after the first `count` [B, 1] entries; where count is 0 it comes back unchanged."""
    inside = (torch.arange(g.shape[1], device=g.device) < count)[:, :, None]
    g = g.masked_fill(~inside, 0.0)
    cum = (g * A).cumsum(1)
    weight = (cum[:, -1:] - cum).exp_() * g
    inputs = torch.where(inside[..., None], v * weight[..., None], 0.0)
    grouped = inputs.view(*k.shape[:3], -1).permute(0, 2, 3, 1) @ k.masked_fill(~inside[..., None], 0.0).transpose(1, 2)
    return torch.addcmul(grouped.view(state.shape), state, cum[:, -1].exp()[..., None, None])


def _read(state: Tensor, v: Tensor, k: Tensor, g: Tensor, A: Tensor, C: Tensor, first: Tensor, end: Tensor) -> Tensor:
    """Outputs [B, T, H, P] for queries C [B, T, G, N] that see the state and the entries first [B, 1] .. end [B, T]."""
    entry = torch.arange(g.shape[1], device=g.device)
    known = (entry >= first) & (entry <= end[:, -1:])
    g, v, k = (torch.where(known.view(*known.shape, *[1] * (part.ndim - 2)), part, 0.0) for part in (g, v, k))
    cum = (g * A).cumsum(1)
    at_end = cum.gather(1, end.long()[:, :, None].expand(-1, -1, g.shape[2]))
    unseen = (entry > end[:, :, None])[..., None]
    weight = (at_end[:, :, None] - cum[:, None]).masked_fill_(unseen, -torch.inf).exp_() * g[:, None]

    scores = torch.einsum("btgn,bwgn->btwg", C, k)[..., None]
    weight = (weight.unflatten(3, (k.shape[2], -1)) * scores).flatten(3)
    from_state = torch.einsum("bgmn,btgn->btgm", state.view(len(C), C.shape[2], -1, C.shape[3]), C)
    y = torch.einsum("btwh,bwhp->bthp", weight, v)
    return y.addcmul_(from_state.reshape(y.shape), at_end.exp()[..., None])
