"""The end of a step with a state ring, for one layer: what the backends do for all of them."""

import torch
from torch import Tensor

from hybridrt.kernels.state.state_ring import RingFolds, advance_ring, fold_ring


def _layer(pool: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(part[None] for part in pool)


def commit(
    pool: tuple[Tensor, ...], A: Tensor | None, cursors: tuple[Tensor, Tensor], rows: Tensor, slots: Tensor,
    accepted: Tensor, widest: int,
) -> RingFolds:  # fmt: skip
    """`pool`: states, values, keys, gates of the layer."""
    folds = advance_ring(*cursors, rows, accepted, slots, width=pool[3].shape[2], widest=widest)
    fold_ring(*_layer(pool), None if A is None else A[None], folds)
    return folds


def materialize(
    pool: tuple[Tensor, ...], A: Tensor | None, cursors: tuple[Tensor, Tensor], rows: Tensor, slots: Tensor,
    write_slots: Tensor,
) -> None:  # fmt: skip
    """The state after all entries of the rows, written to `write_slots`."""
    start, length = (cursor[rows] for cursor in cursors)
    folds = RingFolds(slots, rows, start, length, torch.tensor([len(rows)], dtype=torch.int32), write_slots)
    fold_ring(*_layer(pool), None if A is None else A[None], folds)
