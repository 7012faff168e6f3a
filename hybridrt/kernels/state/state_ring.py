"""The state ring: a checkpoint of the recurrent state and the inputs since (after ReplaySSM).

The pool has the state after some committed token, the checkpoint. A running request has a ring of W
columns with the inputs of the `length` tokens since, the oldest in column `start`:

                             Mamba-2                              Gated Delta Net
    values [R+1, H, W, P]    x after the conv                     u = beta (v - S k), S decayed
    keys   [R+1, G, W, N]    B after the conv                     the normalised k
    gates  [R+1, H, W]       dt after softplus and clamp          log of the decay

In Kimi Delta Attention gates are [R+1, H, W, N], one for each channel of a key. A step enters its T
tokens at columns start + length + t. At its end `advance_ring` commits the accepted ones. Rows without
room for another step (start + length + widest > W) are folded by `fold_ring`, in all layers at once,
and begin again at column 0:

    S <- exp(a_1 + ... + a_n) S + sum_i w_i exp(a_{i+1} + ... + a_n) value_i key_i^T

with a_i = A dt_i and w_i = dt_i in Mamba-2, a_i = log of the decay and w_i = 1 in the Gated Delta
Net (in Kimi Delta Attention a row [N], for the columns of S).

Rows are admitted with starts in [0, W - widest], so that they fold in different steps.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridrt.base.errors import ConfigError
from hybridrt.kernels.core.chunk_plan import finite_rates
from hybridrt.kernels.core.operation import By, operation
from hybridrt.kernels.core.records import FusedStep, StateCodes, StateSlots
from hybridrt.kernels.core.slots import PADDING_SLOT, write_rows
from hybridrt.kernels.state.causal_conv1d import check_update
from hybridrt.kernels.state.state_codes import copy_states, read_states, store_states


@dataclass(frozen=True)
class RingFolds:
    """Which rings are folded, the first `count` of B entries: int32, [B] each, count [1].

    Attributes:
        state_slots, rows: the state slot and the ring of each.
        start, length: its oldest entry's column, and how many entries become part of the state.
        write_state_slots: where the new states go; None: to state_slots. Nothing is written for slot -1.
        state_lengths: tokens in each new state, where states have codes.
    """

    state_slots: Tensor
    rows: Tensor
    start: Tensor
    length: Tensor
    count: Tensor
    write_state_slots: Tensor | None = None
    state_lengths: Tensor | None = None


def check_state_ring(*_: Any, width: int, widest: int, **__: Any) -> None:
    """Raises ConfigError unless a ring of `width` columns takes a step of `widest` tokens."""
    if width < widest:
        raise ConfigError(f"a state ring of {width} columns cannot take a step of {widest} tokens: build the pool with "
                          f"tokens_per_step={widest}")  # fmt: skip


def check_step(inputs: Tensor, step: FusedStep) -> None:
    """Raises ConfigError unless the conv was applied before or ends in SiLU, and its rings and the state ring, if there
    is one, take `inputs` [B, T, C]."""
    if not step.conv_weights.applied_before:
        if (activation := step.conv_weights.activation) != "silu":
            raise ConfigError(f"a fused step's conv ends in SiLU, not in {activation!r}")
        check_update(inputs, step.conv_weights, step.conv_state, step.conv_windows)
    if step.ring is not None:
        check_state_ring(width=step.ring.gates.shape[2], widest=inputs.shape[1])


@operation(By("triton"), check=check_state_ring)
def advance_ring(
    start: Tensor, length: Tensor, rows: Tensor, accepted: Tensor, state_slots: Tensor, *, width: int, widest: int,
    state_lengths: Tensor | None = None,
) -> RingFolds:  # fmt: skip
    """Commits `accepted` [B] new entries of `rows`: moves the cursors `start`, `length` [R+1] in
    place.

    Call it once a step, after the last layer, and pass the result to `fold_ring` for each layer:
    the cursors of those rows are those of empty rings already. Rows with nothing accepted stay.

    Args:
        state_slots: [B] int32, of the rows.
        width: W; widest: tokens of the widest step that may follow.
        state_lengths: [S+1] int32 tokens in the state of each slot, where states have codes. Moved, too.
    """
    row = rows.long()
    oldest, entries = start[row], length[row] + accepted
    full = (accepted > 0) & (oldest + entries + widest > width)
    start[row] = torch.where(full, 0, oldest)
    length[row] = torch.where(full, 0, entries)
    order = torch.argsort(full, descending=True, stable=True)
    count, ends = full.sum(dtype=torch.int32).view(1), None
    if state_lengths is not None:
        slots = state_slots.clamp(min=0).long()
        ends = state_lengths[slots] + entries
        state_lengths[slots] = torch.where(full, ends, state_lengths[slots])
        ends = ends[order]
    return RingFolds(state_slots[order], rows[order], oldest[order], entries[order], count, state_lengths=ends)


@operation(By("triton"))
def fold_ring(
    states: Tensor, values: Tensor, keys: Tensor, gates: Tensor, A: Tensor | None, folds: RingFolds,
    codes: StateCodes | None = None,
) -> None:  # fmt: skip
    """Writes the state after the entries that `folds` names, in L layers. Rings and cursors stay as they are.

    Codes of a row without entries are copied. Rounding them again would change them: the largest code
    of a block may be less than the largest of the dtype, and then its scale falls.

    Args:
        states: [L, S+1, H, P, N]; values: [L, R+1, H, W, P]; keys: [L, R+1, G, W, N]; gates: [L, R+1, H, W],
            or [L, R+1, H, W, N] where channels of keys decay apart, and G is H.
        A: [L, H] float32 of Mamba-2 layers; None where the gates are logs of decays.
        codes: of the states, with L layers in front of `element_keys` and `state_scales`.
    """
    if states.device.type == "cpu" and not int(folds.count):
        return  # a GPU would have to be awaited
    targets = folds.state_slots if folds.write_state_slots is None else folds.write_state_slots
    meant = torch.arange(len(folds.state_slots), device=states.device) < folds.count
    read, write = (torch.where(meant, slots, PADDING_SLOT) for slots in (folds.state_slots, targets))
    for layer in range(states.shape[0]):
        of_rows = folds.rows, folds.start, folds.length
        entries = ring_entries(values[layer], keys[layer], gates[layer], *of_rows)
        layer_codes = None if codes is None else codes.of_layer(layer)
        slots = StateSlots(states[layer], read, write, codes=layer_codes)
        state = _folded(read_states(slots), *entries, None if A is None else A[layer])
        if layer_codes is None:
            write_rows(states[layer], write, state)
        else:
            assert folds.state_lengths is not None
            empty = folds.length == 0
            copied, rounded = write.where(empty, PADDING_SLOT), write.where(~empty, PADDING_SLOT)
            copy_states(slots._replace(write_state_slots=copied), folds.state_lengths)
            store_states.reference(slots._replace(write_state_slots=rounded), state, folds.state_lengths)


def ring_entries(
    values: Tensor, keys: Tensor, gates: Tensor, rows: Tensor, start: Tensor, count: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The rings of `rows` in float32, oldest entry first, zeros after the first `count` [B]
    entries: [B, W, H, P], [B, W, G, N], [B, W, H] or [B, W, H, N].
    """
    entry = torch.arange(gates.shape[2], device=start.device)
    column = (start[:, None] + entry) % gates.shape[2]
    inside = entry < count[:, None]
    # Columns past the end may hold NaN: replaced, not multiplied by zero.
    v, k, g = (
        torch.where(inside.view(*inside.shape, *[1] * (ring.ndim - 2)), ring[rows[:, None], :, column].float(), 0.0)
        for ring in (values, keys, gates)
    )
    return v, k, g


def _folded(state: Tensor, v: Tensor, k: Tensor, g: Tensor, A: Tensor | None) -> Tensor:
    """The states [B, H, P, N] after their rings, float32."""
    # Sums from the end: a difference of sums from the start would round away.
    since = (g if A is None else g * finite_rates(A)).flip(1).cumsum(1).flip(1)
    weight, total = torch.cat((since[:, 1:], torch.zeros_like(since[:, :1])), 1).exp(), since[:, 0].exp()
    if g.ndim == k.ndim:
        k, total = k * weight, total.unsqueeze(-2)
    else:
        v, total = v * (weight if A is None else weight * g)[..., None], total[..., None, None]
    history = v.view(*k.shape[:3], -1).permute(0, 2, 3, 1) @ k.transpose(1, 2)
    return torch.addcmul(history.view(state.shape), state, total)
