"""The buffer of a SlabPlan, and the tensors of pages and state slots that are views of it."""

from collections.abc import Sequence
from math import prod

import torch

from hybridrt.mem_cache.pools.host_plan import aligned
from hybridrt.mem_cache.pools.slab_plan import SlabPlan


class SlabMemory:
    """One buffer for all pools that share slabs. Each pool asks for its tensors once, in order.

    Args:
        plan: slabs of the buffer.

    Attributes:
        plan: as given.
    """

    def __init__(self, plan: SlabPlan, device: torch.device | str) -> None:
        self.plan = plan
        # Kernels of other libraries multiply masked values by zero, and 0 * NaN is NaN.
        self._buffer = torch.zeros(plan.nbytes, dtype=torch.uint8, device=device)
        self._next_cell = [0] * len(plan.groups)  # place of a group's next tensor in a slab, in pages
        self._next_byte = 0  # place of the next state tensor in a slot

    def page_tensor(self, group: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of `shape` [A, pages, page_size, kv_heads, dim]. In a slab, the tensors of a group
        follow each other."""
        first, per_slab, cell = self._next_cell[group], self.plan.groups[group].per_slab, prod(shape[2:])
        self._next_cell[group] += shape[0] * per_slab
        strides = per_slab * cell, cell, prod(shape[3:]), shape[4], 1
        return self._buffer.view(dtype).as_strided(shape, strides, first * cell)

    def slot_tensor(self, layers: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor [layers, slots, *shape] of numbers next to each other in each slot. In a slot, the
        tensors follow each other, the layers of one before those of the next."""
        start, numbers = self._next_byte, prod(shape)
        self._next_byte += aligned(layers * numbers * dtype.itemsize)
        slot, strides = self.plan.slot_stride // dtype.itemsize, [prod(shape[i + 1 :]) for i in range(len(shape))]
        view = self._buffer.view(dtype)
        return view.as_strided(
            (layers, self.plan.num_slot_numbers, *shape), (numbers, slot, *strides), start // dtype.itemsize
        )

    def clear(self, slabs: Sequence[int]) -> None:
        """Zeroes slabs."""
        size = self.plan.slab_bytes
        for slab in slabs:
            self._buffer[slab * size : (slab + 1) * size].zero_()
