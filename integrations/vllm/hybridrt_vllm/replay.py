"""Replay decode over vLLM's blocks, of tensors alone.

vLLM gives a running request one block for its states. Next to the conv's state and the recurrent state a block gets a
ring: corrected values, keys and gates of the last tokens. A step reads the state and the ring, and writes the ring; a
full ring is folded into the state. How many entries a ring has is kept per block, outside of vLLM's memory.

B rows, N blocks, Hk key heads of dim K, Hv value heads of dim V, W columns. Block 0 is vLLM's padding.
"""

from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridrt.errors import ConfigError
from hybridrt.kernels.core.records import FusedStep, GateWeights, StateRing, StateSlots
from hybridrt.kernels.core.slots import PADDING_SLOT
from hybridrt.kernels.delta_rule.decode import gdn_decode
from hybridrt.kernels.state.state_ring import RingFolds, advance_ring, fold_ring

NULL_BLOCK = 0  # vLLM's NULL_BLOCK_ID

Shapes = tuple[tuple[int, ...], ...]


def ring_shapes(state: tuple[int, ...], key_heads: int, columns: int) -> Shapes:
    """Of values, gates and keys, for a state [Hv, V, K] and the key heads of one rank."""
    value_heads, value_dim, key_dim = state
    return (value_heads, columns, value_dim), (value_heads, columns), (key_heads, columns, key_dim)


def ring_dtypes(model_dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """Of values, gates and keys."""
    return model_dtype, torch.float32, model_dtype


def split_pages(pages: Tensor, first: int, shapes: Shapes, dtypes: tuple[torch.dtype, ...]) -> tuple[Tensor, ...]:
    """Views of consecutive states in pages [N, bytes] int8, from byte `first` on.

    Raises ConfigError if a page has too few bytes.
    """
    views, end = [], first
    for shape, dtype in zip(shapes, dtypes):
        begin, end = end, end + prod(shape) * dtype.itemsize
        if end > pages.shape[1]:
            raise ConfigError(f"a block has {pages.shape[1]} bytes, and its states and ring need {end}: another plugin "
                              "may have registered the same model")  # fmt: skip
        views.append(pages[:, begin:end].view(dtype).view(-1, *shape))
    return tuple(views)


class ReplayBlocks:
    """The states and rings of one layer.

    Args:
        states: [N, Hv, V, K].
        ring: values [N, Hv, W, V], gates [N, Hv, W], keys [N, Hk, W, K].
        max_rows: rows of the widest step.
    """

    def __init__(self, states: Tensor, ring: tuple[Tensor, ...], max_rows: int) -> None:
        self.states, (self.values, self.gates, self.keys) = states, ring
        self._lengths, self._starts = torch.zeros(2, len(states), dtype=torch.int32, device=states.device)
        # Made once: a kernel reads it before it waits for the kernels that were launched just before.
        self._oldest = torch.zeros(max_rows, dtype=torch.int32, device=states.device)

    def rows(self, blocks: Tensor) -> "ReplayRows":
        """Rows of a decode step. Call it before the conv: `decode` reads what it makes without waiting for
        the last kernel.

        blocks: [B] int32; NULL_BLOCK is padding.

        Raises ConfigError for more rows than `max_rows`.
        """
        if len(blocks) > len(self._oldest):
            raise ConfigError(f"a step has {len(blocks)} rows, and there is room for {len(self._oldest)}: raise "
                              "--max-num-seqs")  # fmt: skip
        return ReplayRows(blocks, F.threshold(blocks, NULL_BLOCK, PADDING_SLOT), self._lengths[blocks])

    def decode(self, qkv: Tensor, a: Tensor, b: Tensor, weights: GateWeights, rows: "ReplayRows") -> Tensor:
        """One token of each row: [B, Hv, V] in qkv's dtype, zeros for padding.

        qkv: [B, C] after conv and SiLU; a, b: [B, Hv].
        """
        blocks, slots, oldest = rows.blocks, rows.slots, self._oldest[: len(rows.blocks)]
        ring = StateRing(self.values, self.keys, self.gates, blocks, oldest, rows.lengths)
        inputs = qkv.unsqueeze(1)
        step = FusedStep.after_conv(inputs, StateSlots(self.states, slots, slots), ring)
        out = gdn_decode(inputs, a.unsqueeze(1), b.unsqueeze(1), weights=weights, step=step)
        width = self.gates.shape[2]
        real = blocks.clamp(max=1)  # block 0 commits nothing
        self._fold(advance_ring(self._starts, self._lengths, blocks, real, slots, width=width, widest=1))
        return out.squeeze(1)

    def write_states(self, decoding: Tensor, prefilling: Tensor) -> None:
        """Before a step that vLLM computes: the rings of `decoding` blocks are folded, those of `prefilling` blocks,
        which may be left from earlier requests, are emptied.
        """
        rows = self.rows(decoding)
        count = torch.full((1,), len(decoding), dtype=torch.int32, device=decoding.device)
        self._fold(RingFolds(rows.slots, decoding, torch.zeros_like(decoding), rows.lengths, count))
        self._lengths[decoding] = 0
        self._lengths[prefilling] = 0

    def _fold(self, folds: RingFolds) -> None:
        """One layer of `fold_ring`, which takes several."""
        fold_ring(self.states[None], self.values[None], self.keys[None], self.gates[None], None, folds)


class ReplayRows:
    """Rows of a step: vLLM's blocks, slots (PADDING_SLOT for block 0) and the entries of their rings, [B] int32."""

    def __init__(self, blocks: Tensor, slots: Tensor, lengths: Tensor) -> None:
        self.blocks, self.slots, self.lengths = blocks, slots, lengths
