"""Sizes of the pool of recurrent states: shapes of its tensors, and bytes of slots and rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from hybridrt.base.errors import ConfigError
from hybridrt.kinds.base import StateShape
from hybridrt.kinds.registry import check_replay, linear_kind, state_dtype
from hybridrt.mem_cache.pools.host_plan import aligned
from hybridrt.mem_cache.pools.stored_states import check_codes, stored_state

STATE_MODES = ("classic", "replay", "intermediate")
Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]  # tensors by name: dimensions and dtype


def ring_width(tokens_per_step: int) -> int:
    """W, columns of a state ring: 16 for plain decode, 32 for steps of up to 8 tokens a row, 64 for
    wider steps (at most 16 tokens: `SpeculativeConfig`).
    """
    return 16 if tokens_per_step == 1 else 32 if tokens_per_step <= 8 else 64


@dataclass(frozen=True)
class MambaPoolSpec:
    """Sizes of a MambaPool: enough to build it and to compute its bytes.

    Args:
        groups: layers of equal state shape. All share slot ids, so a model may mix kinds of
            recurrent layer.
        tokens_per_step: T, most tokens that one decode or verify step runs per request.
        mode: "classic" (state written every step), "replay" (checkpoint + ring) or "intermediate"
            (a state per verified token).
        forks: drafts may fork. Two of them may have one position, so conv inputs do not roll back by
            position.
        stochastic: states are rounded stochastically where they are stored; always with 8 bits.
        rank: of this process among tensor-parallel ranks, which decides the heads that it has.
    """

    groups: Mapping[StateShape, Sequence[int]]
    conv_dtype: torch.dtype
    state_dtype: torch.dtype
    tokens_per_step: int = 1
    mode: str = "classic"
    forks: bool = False
    stochastic: bool = False
    rank: int = 0

    def __post_init__(self) -> None:
        if self.mode not in STATE_MODES:
            raise ConfigError(f"state mode is {self.mode!r}; it must be one of {', '.join(STATE_MODES)}")
        if self.forks and self.mode == "replay":
            raise ConfigError('drafts that fork need state mode "intermediate": "replay" keeps no state after each')
        if self.mode == "replay":
            check_replay(shape.kind for shape in self.groups)
        check_codes([shape.kind for shape in self.groups], self.state_dtype, self.rounds, self.mode)

    @property
    def rounds(self) -> bool:
        """Whether states are rounded stochastically."""
        return self.stochastic or self.state_dtype.itemsize == 1

    @property
    def phases_apart(self) -> int:
        """Number of columns at which a ring may start, and so of steps over which folds are
        distributed.
        """
        return ring_width(self.tokens_per_step) - self.tokens_per_step + 1

    def slot_shapes(self, shape: StateShape) -> Shapes:
        """The shapes and dtypes of one slot of a layer, by fields of LayerCache."""
        conv = (shape.conv_dim, shape.conv_width(self.tokens_per_step))
        return {"conv": (conv, self.conv_dtype), "temporal": stored_state(shape, self.state_dtype)}

    def row_shapes(self, shape: StateShape) -> Shapes:
        """Tensors of a layer for each running request, only while it decodes."""
        tokens = self.tokens_per_step
        shapes: Shapes = {}
        if self.mode == "intermediate":
            shapes["intermediate_ssm"] = ((tokens, *shape.temporal), state_dtype(shape, self.state_dtype))
        if self.forks:
            window = (tokens, shape.conv_dim, shape.conv_kernel - 1)
            shapes["intermediate_conv_window"] = (window, self.conv_dtype)
        if self.mode == "replay":
            ring_shapes = linear_kind(shape.kind).ring_shapes
            assert ring_shapes is not None, "checked when the spec was made"
            for name, dims in ring_shapes(shape, ring_width(tokens)).items():
                shapes[name] = dims, torch.float32 if name == "ring_gates" else self.conv_dtype
        return shapes

    def layer_bytes(self, shape: StateShape) -> int:
        """Bytes of one slot and of one running row, in one layer."""
        return _nbytes(self.slot_shapes(shape)) + _nbytes(self.row_shapes(shape))

    def slot_bytes(self) -> int:
        """Bytes of one slot, in all layers."""
        return sum(_nbytes(self.slot_shapes(s)) * len(ids) for s, ids in self.groups.items())

    def packed_slot_bytes(self) -> int:
        """Bytes of a slot whose tensors are next to each other (`SlabMemory.slot_tensor`)."""
        return sum(
            aligned(len(ids) * _nbytes({name: each}))
            for shape, ids in self.groups.items()
            for name, each in self.slot_shapes(shape).items()
        )

    def image_bytes(self) -> int:
        """Bytes of one slot's state in an image, each tensor aligned."""
        return sum(
            len(ids) * (aligned(shape.conv_dim * (shape.conv_kernel - 1) * self.conv_dtype.itemsize)
                        + aligned(_nbytes({"temporal": stored_state(shape, self.state_dtype)})))
            for shape, ids in self.groups.items()
        )  # fmt: skip

    def row_bytes(self) -> int:
        """Bytes of one running request in addition to its slot, over all layers, ring cursors
        included.
        """
        layers = sum(_nbytes(self.row_shapes(s)) * len(ids) for s, ids in self.groups.items())
        return layers + 8 if self.groups else 0


def _nbytes(shapes: Shapes) -> int:
    return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in shapes.values())
