"""States of the recurrent layers, their conv rings and state rings, and every move of them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from hybridrt.base.errors import PoolError
from hybridrt.kernels.core.records import IntermediateStates, RowTables, StateCodes
from hybridrt.kernels.core.slots import SCRATCH, check_range, write_columns
from hybridrt.kernels.state.causal_conv1d import conv_window
from hybridrt.kernels.state.row_tables import clear_slots, enter_rows
from hybridrt.kernels.state.state_commit import commit_conv_window, commit_intermediate
from hybridrt.kernels.state.state_ring import RingFolds, advance_ring, fold_ring
from hybridrt.kinds.base import StateShape
from hybridrt.kinds.registry import state_dtype
from hybridrt.mem_cache.pools.mamba_pool_spec import MambaPoolSpec, ring_width
from hybridrt.mem_cache.pools.slab_memory import SlabMemory
from hybridrt.mem_cache.pools.state_moves import StateMove, When
from hybridrt.mem_cache.pools.stored_states import states_of_codes

Upload = Callable[[tuple[np.ndarray, ...]], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class LayerCache:
    """One layer's views into the pool, or those of a stack of layers, with a dimension more in front. Fields
    are None in state modes that do not use them.

    Attributes:
        conv: [S + 1, conv_dim, Wc] ring of raw conv inputs; a token's column is its position mod
            Wc.
        temporal: [S + 1, *temporal] recurrent state, as `stored_state` says; a checkpoint in replay
            mode.
        states: a view of `temporal` [S + 1, *temporal] for kernels, if it is stored in another shape
            (states in 8 bits). None: kernels read `temporal`.
        codes: of states that are rounded stochastically.
        intermediate_ssm: [R + 1, T, *temporal] state after each verified token.
        intermediate_conv_window: [R + 1, T, conv_dim, K - 1] conv inputs up to each verified token,
            for drafts that fork.
        ring_values, ring_keys, ring_gates: [R + 1, heads, W, P], [R + 1, groups, W, N], [R + 1,
            heads, W] or [R + 1, heads, W, N].
    """

    conv: torch.Tensor
    temporal: torch.Tensor
    intermediate_ssm: torch.Tensor | None = None
    intermediate_conv_window: torch.Tensor | None = None
    ring_values: torch.Tensor | None = None
    ring_keys: torch.Tensor | None = None
    ring_gates: torch.Tensor | None = None
    states: torch.Tensor | None = None
    codes: StateCodes | None = None

    def of_layer(self, layer: int) -> "LayerCache":
        """One of a stack's layers."""
        parts: dict[str, Any] = {name: t[layer] for name, t in vars(self).items() if isinstance(t, torch.Tensor)}
        return LayerCache(**parts, codes=self.codes and self.codes.of_layer(layer))

    @property
    def state(self) -> torch.Tensor:
        """[S + 1, *temporal] states as kernels read them."""
        return self.temporal if self.states is None else self.states

    @property
    def ring(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`ring_values`, `ring_keys` and `ring_gates`, in a state mode that has them."""
        assert self.ring_values is not None and self.ring_keys is not None and self.ring_gates is not None
        return self.ring_values, self.ring_keys, self.ring_gates


def _as_words(tensor: torch.Tensor) -> torch.Tensor:
    """[L, S+1, n], of int64 where that fits: an element costs the same to fill."""
    flat = tensor.flatten(2)
    return flat.view(torch.int64) if flat.numel() and flat.shape[2] * flat.element_size() % 8 == 0 else flat


def _zeros(
    layers: int, entries: int, dims: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    return torch.zeros((layers, entries + 1, *dims), dtype=dtype, device=device)


class SlotPart(NamedTuple):
    """One tensor of `MambaPool.read_slot`."""

    layer_id: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class MambaPool:
    """Preallocated state of all recurrent layers: S slots and R running rows. Slot 0 and row 0 are
    scratch. It serves all kinds of layer; the name is that of other serving runtimes.

    Only methods of this class, and the kernels of a layer for the slots and rings of their step,
    write slots, rings or cursors. The state of a row is its slot and, in replay mode, the entries
    of its ring. Methods queue device work and wait for nothing. Rows and slots are [n] integer
    tensors on the pool's device.

    Args:
        num_slots: slots 1 to num_slots; with `memory`, its plan says which of them exist.
        memory: the memory that slots share with KV pages; None: slots have their own, and those of a
            tensor are next to each other. Kernels do not rely on this.

    Attributes:
        req_to_state_slot: [R + 1] int32, the slot of each row.
        ring_start, ring_length: [R + 1] int32 ring cursors of each row, shared by all layers.
        tables: these three tensors.
        stacks: layers of equal shape; their tensors have a leading dimension for the layer.
    """

    def __init__(
        self, spec: MambaPoolSpec, *, num_slots: int, num_rows: int, device: torch.device | str,
        memory: SlabMemory | None = None,
    ) -> None:  # fmt: skip
        self.spec = spec
        self.num_slots = num_slots if memory is None else memory.plan.num_slot_numbers - 1
        self.num_rows = num_rows
        self.width, self._phases_apart = ring_width(spec.tokens_per_step), spec.phases_apart
        self.tables = RowTables(*torch.zeros((3, num_rows + 1), dtype=torch.int32, device=device))
        self.req_to_state_slot = self.tables.req_to_state_slot
        self.ring_start, self.ring_length = self.tables.ring_start, self.tables.ring_length
        self.state_lengths = torch.zeros(self.num_slots + 1, dtype=torch.int32, device=device) if spec.rounds else None
        self.stacks: list[tuple[Sequence[int], LayerCache]] = []
        self._caches: dict[int, LayerCache] = {}
        self.layer_cache: Callable[[int], LayerCache] = self._caches.__getitem__
        self._shapes: dict[int, StateShape] = {}
        self._layer_decays: dict[int, Callable[[], torch.Tensor | None]] = {}
        self._decays: list[torch.Tensor | None] | None = None
        for shape, layer_ids in spec.groups.items():
            tensors = {
                name: _zeros(len(layer_ids), num_slots, dims, dtype, device)
                if memory is None
                else memory.slot_tensor(len(layer_ids), dims, dtype)
                for name, (dims, dtype) in spec.slot_shapes(shape).items()
            } | {
                name: _zeros(len(layer_ids), num_rows, dims, dtype, device)
                for name, (dims, dtype) in spec.row_shapes(shape).items()
            }
            stack = self._with_codes(LayerCache(**tensors), shape, layer_ids)  # type: ignore[arg-type]
            self.stacks.append((layer_ids, stack))
            self._shapes |= dict.fromkeys(layer_ids, shape)
            for i, layer_id in enumerate(layer_ids):
                self._caches[layer_id] = stack.of_layer(i)
        self._enter_rows = enter_rows.for_device(self.req_to_state_slot.device)
        self._clear_slots = clear_slots.for_device(self.req_to_state_slot.device)
        self._cleared = [_as_words(tensor) for _, cache in self.stacks for tensor in (cache.conv, cache.temporal)]
        if self.state_lengths is not None:
            self._cleared.append(self.state_lengths[None, :, None])

    def _with_codes(self, stack: LayerCache, shape: StateShape, layer_ids: Sequence[int]) -> LayerCache:
        if self.state_lengths is None or not shape.temporal_numel:
            return stack
        dtype, first_head = state_dtype(shape, self.spec.state_dtype), self.spec.rank * shape.temporal[0]
        states, codes = states_of_codes(stack.temporal, shape, dtype, layer_ids, first_head, self.state_lengths)
        return replace(stack, states=states, codes=codes)

    @property
    def layer_ids(self) -> list[int]:
        return sorted(self._caches)

    def conv_window(self, layer_id: int, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The K - 1 raw conv inputs before `positions`, oldest first: [n, conv_dim, K - 1]."""
        return conv_window(self._caches[layer_id].conv, slots, positions, self._shapes[layer_id].conv_kernel)

    # -- moving state between slots and rings

    def admit_rows(self, rows: torch.Tensor, state_slots: torch.Tensor, phases: torch.Tensor | None = None) -> None:
        """Gives `rows` their slots, zeroed so that no request reads another's state, and empty
        rings. [n] integers each; row 0 with slot 0 is padding.

        Args:
            phases: [n] non-negative integers, modulo `MambaPoolSpec.phases_apart`. Rows of
                different phases fold in different steps. None: 0.
        """
        check_range("rows", rows, self.num_rows + 1)
        check_range("state_slots", state_slots, self.num_slots + 1)
        for tensor in self._cleared:
            self._clear_slots(tensor, state_slots)
        self._enter_rows(rows, state_slots, phases, self._phases_apart, self.tables)

    def move(self, moves: Sequence[StateMove], upload: Upload) -> None:
        """Carries out the moves of a plan, donations first. A row that donates its slot owns none until
        it is admitted again; a repeated donation changes nothing. Then snapshots: as `snapshot`, but
        their source slots are known on the host, so that copies allocate no memory.

        Args:
            upload: copies [n] int32 arrays to the pool's device, each to an aligned address.
        """
        if donors := [move.row for move in moves if move.when is When.FIRST]:
            (rows,) = upload((np.array(donors, np.int32),))
            self.fold(rows)
            self.req_to_state_slot.index_fill_(0, rows.long(), SCRATCH)
        copies, replay = [move for move in moves if move.when is When.BEFORE_ROWS], self.spec.mode == "replay"
        for _, cache in self.stacks:
            for tensor in (cache.conv,) if replay else (cache.conv, cache.temporal):
                for move in copies:
                    tensor[:, move.target].copy_(tensor[:, move.source])
        if copies and replay:
            numbers = [move.row for move in copies], [move.target for move in copies]
            rows, targets = upload(tuple(np.array(column, np.int32) for column in numbers))
            self._fold(self._rings(rows, targets))

    def snapshot(self, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Copies the state of `rows` to `slots`. The rows keep their state, ring entries included.

        A slot stores conv inputs by position in a ring of few columns, so the copy is valid only
        for the row's next position.
        """
        own, target = self.req_to_state_slot[rows].long(), slots.long()
        replay = self.spec.mode == "replay"
        for _, cache in self.stacks:
            for tensor in (cache.conv,) if replay else (cache.conv, cache.temporal):
                tensor.index_copy_(1, target, tensor[:, own])
        if replay:
            self._fold(self._rings(rows, slots.int()))

    def restore(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Copies the state in `slots` into the slots that `rows` own and empties their rings."""
        own, source = self.req_to_state_slot[rows].long(), slots.long()
        for _, cache in self.stacks:
            for tensor in (cache.conv, cache.temporal):
                tensor.index_copy_(1, own, tensor[:, source])
        if self.state_lengths is not None:
            self.state_lengths.index_copy_(0, own, self.state_lengths.index_select(0, source))
        self._empty_rings(rows)

    def export(self, row: int, length: int) -> Iterator[torch.Tensor]:
        """The state of a row after its `length` tokens, as `read_slot` gives it. Folds the row's
        ring first.
        """
        self.fold(torch.full_like(self.req_to_state_slot[:1], row))
        return self._read_slots(self.req_to_state_slot[row : row + 1], length)

    def import_(self, row: int, length: int, parts: Iterator[torch.Tensor]) -> None:
        """Writes the result of `export` into the slot of a row that has just been admitted."""
        self._write_slots(self.req_to_state_slot[row : row + 1], length, parts)

    def read_slot(self, slot: int, length: int) -> Iterator[torch.Tensor]:
        """State after `length` tokens in a slot of no row: for each layer [1, conv_dim, K - 1] conv
        inputs, then [1, *temporal].
        """
        return self._read_slots(torch.full_like(self.req_to_state_slot[:1], slot), length)

    def write_slot(self, slot: int, length: int, parts: Iterator[torch.Tensor]) -> None:
        """Writes the result of `read_slot` into a slot of no row."""
        self._write_slots(torch.full_like(self.req_to_state_slot[:1], slot), length, parts)

    def slot_parts(self) -> Iterator[SlotPart]:
        """What `read_slot` yields, in its order."""
        for layer_id in self.layer_ids:
            cache, shape = self._caches[layer_id], self._shapes[layer_id]
            yield SlotPart(layer_id, (1, shape.conv_dim, shape.conv_kernel - 1), cache.conv.dtype)
            yield SlotPart(layer_id, (1, *cache.temporal.shape[1:]), cache.temporal.dtype)

    def _read_slots(self, slots: torch.Tensor, length: int) -> Iterator[torch.Tensor]:
        for layer_id in self.layer_ids:
            yield self.conv_window(layer_id, slots, torch.full_like(slots, length))
            yield self._caches[layer_id].temporal.index_select(0, slots)

    def _write_slots(self, slots: torch.Tensor, length: int, parts: Iterator[torch.Tensor]) -> None:
        for layer_id in self.layer_ids:
            cache, inputs = self._caches[layer_id], self._shapes[layer_id].conv_kernel - 1
            columns = torch.arange(length - inputs, length, device=slots.device) % cache.conv.shape[2]
            write_columns(cache.conv, slots, columns[None], next(parts).transpose(1, 2))
            cache.temporal.index_copy_(0, slots.long(), next(parts))
        if self.state_lengths is not None:
            self.state_lengths.index_fill_(0, slots.long(), length)

    # -- tokens become state

    def commit(
        self,
        rows: torch.Tensor,
        state_slots: torch.Tensor,
        accepted: torch.Tensor,
        start_positions: torch.Tensor,
        path: torch.Tensor | None = None,
    ) -> None:
        """Makes the accepted tokens of a decode or verify step part of the state of `rows`.

        Args:
            rows, state_slots, accepted: [n] int32; slot -1 or 0 accepted marks a padding row.
            start_positions: [n] int32 position of each row's first token in the step.
            path: [n, T] places of the accepted tokens in their row, in order. None: the first ones.
        """
        if self.spec.mode == "replay":
            folds = advance_ring(
                self.ring_start, self.ring_length, rows, accepted, state_slots, width=self.width,
                widest=self.spec.tokens_per_step, state_lengths=self.state_lengths,
            )  # fmt: skip
            self._fold(folds)
            return
        last, ends = accepted, None  # the last accepted token's place + 1, 0 for padding
        if path is not None:
            ends = start_positions + accepted - 1
            place = path.gather(1, (accepted - 1).clamp(min=0).unsqueeze(1).long()).squeeze(1).int()
            last = (place + 1).masked_fill(accepted == 0, 0)
        for _, cache in self.stacks:
            assert cache.intermediate_ssm is not None, "one token a row is final in a pool without rings"
            if cache.temporal.numel():
                stored = IntermediateStates(cache.intermediate_ssm, rows)
                commit_intermediate(cache.temporal, stored, state_slots, last)
            # Without a path the conv inputs are in the ring already.
            if ends is not None and cache.conv.numel():
                assert cache.intermediate_conv_window is not None
                windows = IntermediateStates(cache.intermediate_conv_window, rows)
                commit_conv_window(cache.conv, windows, state_slots, last, ends)

    def fold(self, rows: torch.Tensor) -> None:
        """Makes the ring entries of `rows` part of the state in their slots, and empties the rings."""
        if self.spec.mode == "replay":
            self._fold(self._rings(rows))
            self._empty_rings(rows)

    def set_decays(self, decays: Mapping[int, Callable[[], torch.Tensor | None]]) -> None:
        """Functions by layer id that return [heads] float32 factors: gate * factor is the log of a
        decay. A function returns None if gates are logs already. They are called at the first fold,
        because weights may be loaded after the pool is built.
        """
        self._layer_decays |= decays
        self._decays = None

    def stack_decays(self) -> list[torch.Tensor | None]:
        """The decays of each stack, [L, heads]. Made once, and never while a graph is captured."""
        if self._decays is None:
            missing = [i for i in self._caches if i not in self._layer_decays]
            if missing:
                raise PoolError(f"the rings of layers {missing} cannot be folded: no backend has been built for them")
            stacks = [[self._layer_decays[i]() for i in layer_ids] for layer_ids, _ in self.stacks]
            self._decays = [None if None in decays else torch.stack(decays) for decays in stacks]  # type: ignore[arg-type]
        return self._decays

    def _rings(self, rows: torch.Tensor, write_slots: torch.Tensor | None = None) -> RingFolds:
        count = torch.full_like(self.ring_start[:1], len(rows))
        slots, start, entries = self.req_to_state_slot[rows], self.ring_start[rows], self.ring_length[rows]
        lengths = None if self.state_lengths is None else self.state_lengths[slots] + entries
        return RingFolds(slots, rows.int(), start, entries, count, write_slots, lengths)

    def _fold(self, folds: RingFolds) -> None:
        for (_, cache), decay in zip(self.stacks, self.stack_decays(), strict=True):
            if cache.temporal.numel():
                fold_ring(cache.state, *cache.ring, decay, folds, cache.codes)

    def _empty_rings(self, rows: torch.Tensor) -> None:
        self.ring_start.index_fill_(0, rows.long(), 0)
        self.ring_length.index_fill_(0, rows.long(), 0)
