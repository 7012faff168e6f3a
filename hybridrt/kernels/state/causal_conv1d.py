"""Depthwise causal convolution over a ring of raw inputs: prefill, decode and verify.

    y[p] = act(bias + sum_k weight[:, k] * x[p - (K-1) + k])

The input of position p is in column p mod Wc of conv[slot]; Wc is a power of two, at least K - 1 + T.
A roll-back needs a position alone: columns of rejected tokens are overwritten before they are read.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridrt.base.errors import ConfigError
from hybridrt.kernels.core.operation import By, operation
from hybridrt.kernels.core.records import ConvState, ConvWeights, IntermediateStates, SavedStates
from hybridrt.kernels.core.slots import NO_SLOT, PADDING_SLOT, pad_mask, real_tokens, write_columns, write_rows


def _check_varlen(x: Tensor, weights: ConvWeights, state: ConvState, *_: Any, **__: Any) -> None:
    check_conv_ring(state.conv, weights.weight.shape[1], 1)


@operation(By("triton"), By("sgl_kernel", priority=5), check=_check_varlen)
def causal_conv1d_varlen(
    x: Tensor, weights: ConvWeights, state: ConvState, query_start_loc: Tensor, saves: SavedStates | None = None
) -> Tensor:
    """Convolves the tokens of several requests, packed along one axis.

    Args:
        x: [T, C] raw inputs; row b holds x[query_start_loc[b]:query_start_loc[b+1]].
        state: inputs before the chunk count as zero before position 0. Afterwards the rings that are written hold the
            K - 1 raw inputs that end each row.
        query_start_loc: [B+1] int32. Tokens past its last entry get zeros.
        saves: rings of further slots get the K - 1 inputs that end within a row.

    Returns:
        [T, C] in x's dtype.

    Raises:
        ConfigError: the ring is too narrow for K taps, or Wc is not a power of two.
    """
    weight = weights.weight
    num_tokens, taps = x.shape[0], weight.shape[1]
    if num_tokens == 0:
        return torch.empty_like(x)
    first, end = query_start_loc[:-1, None], query_start_loc[1:, None]
    window = _window(state.conv, state.read_state_slots, state.start_positions, taps)
    offsets = torch.arange(taps - 1, device=x.device)

    # Rows shorter than K - 1 write missing outputs to one spare row at the end.
    out = torch.empty(num_tokens + 1, x.shape[1], dtype=torch.float32, device=x.device)
    _shifted_sum(x.float(), weight, weights.bias, out[:-1])
    head = first + offsets
    head_x = torch.cat([window, x[head.clamp(max=num_tokens - 1)]], dim=1)
    out[torch.where(head < end, head, num_tokens)] = _first_sum(head_x, weight, weights.bias)

    if saves is not None:
        save_windows(x, taps, state, query_start_loc, saves)
    _write_window(x, window, state, first, end - first)
    dead = ~real_tokens(state.read_state_slots, query_start_loc, num_tokens)
    out = out[:-1] if weights.activation is None else F.silu(out[:-1], inplace=True)
    return out.masked_fill_(dead[:, None], 0.0).to(x.dtype)


def check_update(
    x: Tensor, weights: ConvWeights, state: ConvState, intermediate: IntermediateStates | None = None
) -> None:
    """Raises what `causal_conv1d_update` raises."""
    if intermediate is not None and intermediate.predecessors is None:
        raise ConfigError(
            "windows are stored with predecessors alone: pass these, or no intermediate (a ring is rolled back)"
        )
    check_conv_ring(state.conv, weights.weight.shape[1], x.shape[1] if intermediate is None else 1)


def save_windows(x: Tensor, taps: int, state: ConvState, query_start_loc: Tensor, saves: SavedStates) -> None:
    """Fills the rings of `saves`, as `causal_conv1d_varlen` does before it changes those that are
    read.
    """
    window = _window(state.conv, state.read_state_slots, state.start_positions, taps)
    slots = torch.where(saves.row_slots > NO_SLOT, saves.row_slots, PADDING_SLOT)
    for of_rows, length in zip(slots.unbind(1), saves.row_lengths.split(1, dim=1)):
        _write_window(x, window, state._replace(write_state_slots=of_rows), query_start_loc[:-1, None], length)


def _write_window(x: Tensor, window: Tensor, state: ConvState, first: Tensor, length: Tensor) -> None:
    """Writes each row's K - 1 inputs before position `length` [B, 1] to the rings. Its inputs are `window`
    [B, K - 1, C], then x from `first` [B, 1] on.
    """
    before = window.shape[1]
    last = length - before + torch.arange(before, device=x.device)
    carried = window.gather(1, (last + before).clamp(0, before - 1).long()[:, :, None].expand(window.shape))
    tail = torch.where((last >= 0)[:, :, None], x[(first + last).clamp(0, len(x) - 1)], carried)
    columns = state.start_positions[:, None] + last & state.conv.shape[2] - 1
    write_columns(state.conv, state.write_state_slots, columns, tail)


@operation(By("triton"), By("sgl_kernel", priority=5), check=check_update)
def causal_conv1d_update(
    x: Tensor, weights: ConvWeights, state: ConvState, intermediate: IntermediateStates | None = None
) -> Tensor:
    """Convolves T new tokens of each row: decode (T = 1) or verify (T > 1).

    Tokens that follow each other write their raw inputs to the ring. With `intermediate` the taps
    follow its `predecessors`, and the window of each token is stored there, not in the ring.

    Args:
        x: [B, T, C] raw inputs. Token t is at position start_positions + t; with predecessors, at
            start_positions + the length of its path from the first token.

    Returns:
        [B, T, C] in x's dtype.

    Raises:
        ConfigError: the ring is too narrow for K taps and T tokens, or Wc is not a power of two.
    """
    weight, bias, conv, read_slots = weights.weight, weights.bias, state.conv, state.read_state_slots
    num_tokens, taps = x.shape[1], weight.shape[1]
    history = torch.cat([_window(conv, read_slots, state.start_positions, taps), x], dim=1)
    if intermediate is None:
        positions = state.start_positions[:, None] + torch.arange(1 - taps, num_tokens, device=x.device)
        write_columns(conv, state.write_state_slots, positions & conv.shape[2] - 1, history)
        out = _step_sum(history, weight, bias, num_tokens)
    else:
        assert intermediate.predecessors is not None, "a ring is rolled back by position"
        inputs = _along_predecessors(history, intermediate.predecessors, taps)
        out = torch.einsum("btkc,ck->btc", inputs.float(), weight.float())
        out = out if bias is None else out + bias
        rows = torch.where(read_slots < 0, PADDING_SLOT, intermediate.rows)
        write_rows(intermediate.stored, rows, inputs[:, :, 1:].transpose(2, 3))
    out = out if weights.activation is None else F.silu(out, inplace=True)
    return out.masked_fill_(pad_mask(read_slots, 3), 0.0).to(x.dtype)


def conv_window(conv: Tensor, slots: Tensor, positions: Tensor, kernel: int) -> Tensor:
    """The K - 1 raw inputs before `positions` [B], oldest first: [B, C, K-1], conv's dtype, zero
    before position 0."""
    return _window(conv, slots, positions, kernel).transpose(1, 2).contiguous()


def _window(conv: Tensor, slots: Tensor, positions: Tensor, taps: int) -> Tensor:
    before = positions[:, None] + torch.arange(1 - taps, 0, device=conv.device)
    window = conv[slots.clamp(min=0)[:, None], :, before & conv.shape[2] - 1]
    return window.masked_fill_((before < 0)[:, :, None], 0.0)


def check_conv_ring(conv: Tensor, kernel: int, tokens: int) -> None:
    """Raises ConfigError unless the ring of `conv` [S+1, C, Wc] serves `kernel` taps and steps of
    `tokens` tokens."""
    width = conv.shape[2]
    if width < kernel - 1 + tokens or width & (width - 1):
        raise ConfigError(
            f"conv ring of {width} columns cannot serve {kernel} taps and steps of {tokens} tokens; "
            f"it must be a power of two >= {kernel - 1 + tokens}"
        )


def _shifted_sum(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """The conv of x [T, C] as one row from position 0, newest inputs first."""
    taps = weight.float().t().contiguous()
    torch.mul(x, taps[-1], out=out)
    for shift in range(1, len(taps)):
        out[shift:].addcmul_(x[:-shift], taps[-1 - shift])
    if bias is not None:
        out += bias


def _first_sum(history: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Outputs [B, T, C] of a history [B, K-1+T, C], summed as in `_shifted_sum`: the first tokens of a chunk
    get the same bits however a prompt is cut."""
    history, taps = history.float(), weight.float().t()
    newest = len(taps) - 1
    tokens = history.shape[1] - newest
    out = history[:, newest:] * taps[newest]
    for k in reversed(range(newest)):
        out.addcmul_(history[:, k : k + tokens], taps[k])
    return out if bias is None else out.add_(bias)


def _step_sum(history: Tensor, weight: Tensor, bias: Tensor | None, tokens: int) -> Tensor:
    """Outputs [B, T, C] of a history [B, K-1+T, C]. Several tokens get the bits of as many steps of one token,
    for which one reduction takes less time."""
    history, taps = history.float(), weight.float().t()
    if tokens == 1:
        out = (history * taps).sum(1, keepdim=True)
    else:
        out = history[:, :tokens] * taps[0]
        for k in range(1, len(taps)):
            out = out + history[:, k : k + tokens] * taps[k]
    return out if bias is None else out + bias


def _along_predecessors(history: Tensor, predecessors: Tensor, taps: int) -> Tensor:
    """Inputs [B, T, K, C] of each token, oldest first, from history = [window, tokens]."""
    token = torch.arange(predecessors.shape[1], device=predecessors.device).expand(predecessors.shape)
    path = [token]
    for _ in range(taps - 1):
        # Token -1 is the committed one before the first, -2 the one before.
        token = torch.where(token >= 0, predecessors.gather(1, token.clamp(min=0)), token - 1)
        path.insert(0, token)
    index = torch.stack(path, dim=2) + taps - 1
    batch = torch.arange(len(history), device=history.device)[:, None, None]
    return history[batch, index]
