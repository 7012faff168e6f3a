"""State of the recurrent layers: conv rings, recurrent state, and what speculation needs to roll back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from hybridrt.errors import ConfigError
from hybridrt.kernels.causal_conv1d import conv_window
from hybridrt.kinds.base import StateShape
from hybridrt.kinds.registry import check_replay, linear_kind, state_dtype

STATE_MODES = ("classic", "replay", "intermediate")


@dataclass(frozen=True)
class LayerCache:
    """One layer's views into the pool. The last six are None where the pool's state mode has no use for them.

    Attributes:
        conv: [S + 1, conv_dim, Wc] ring of raw conv inputs; a token's column is its position mod Wc.
        temporal: [S + 1, *temporal] recurrent state; a checkpoint in replay mode.
        intermediate_ssm: [R + 1, V, *temporal] state after each verified token.
        intermediate_conv_window: [R + 1, V, conv_dim, K - 1] conv inputs up to each node of a draft tree.
        ring_values, ring_keys, ring_gates: [R + 1, heads, W, P], [R + 1, groups, W, N], [R + 1, heads, W].
    """

    conv: torch.Tensor
    temporal: torch.Tensor
    intermediate_ssm: torch.Tensor | None = None
    intermediate_conv_window: torch.Tensor | None = None
    ring_values: torch.Tensor | None = None
    ring_keys: torch.Tensor | None = None
    ring_gates: torch.Tensor | None = None

    @property
    def ring_inputs(self) -> dict[str, torch.Tensor]:
        """The ring as decode operations take it; empty where the pool keeps none."""
        return {} if self.ring_values is None else dict(zip(("values", "keys", "gates"), self.ring))

    @property
    def ring(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """values, keys and gates of a pool in replay mode."""
        assert self.ring_values is not None and self.ring_keys is not None and self.ring_gates is not None
        return self.ring_values, self.ring_keys, self.ring_gates


def ring_width(tokens_per_step: int) -> int:
    """W, columns of a state ring: 16 for plain decode, 32 up to 8 verified tokens, and never less than 2 T."""
    return 16 if tokens_per_step == 1 else 32 if tokens_per_step <= 8 else 64


@dataclass(frozen=True)
class MambaPoolSpec:
    """Sizes of a MambaPool, enough to build it and to charge it to a memory plan.

    Args:
        groups: layers of equal state shape; all share slot ids, so a model may mix kinds of recurrent layer.
        tokens_per_step: T, most tokens that one decode or verify step runs per request.
        mode: "classic" (state written every step), "replay" (checkpoint + ring) or "intermediate" (a state per
            verified token).
        tree: verify steps may be trees, whose conv columns do not roll back by position.
    """

    groups: Mapping[StateShape, Sequence[int]]
    conv_dtype: torch.dtype
    state_dtype: torch.dtype
    tokens_per_step: int = 1
    mode: str = "classic"
    tree: bool = False

    def __post_init__(self) -> None:
        if self.mode not in STATE_MODES:
            raise ConfigError(f"state mode is {self.mode!r}; it must be one of {', '.join(STATE_MODES)}")
        if self.tree and self.mode == "replay":
            raise ConfigError('draft trees need state mode "intermediate"; "replay" verifies chains')
        if self.mode == "replay":
            check_replay(shape.kind for shape in self.groups)

    def slot_shapes(self, shape: StateShape) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Tensors that a layer keeps per state slot."""
        conv = (shape.conv_dim, shape.conv_width(self.tokens_per_step))
        return {"conv": (conv, self.conv_dtype), "temporal": (shape.temporal, state_dtype(shape, self.state_dtype))}

    def row_shapes(self, shape: StateShape) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Tensors that a layer keeps per running request: they exist only while it decodes."""
        tokens = self.tokens_per_step
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        if self.mode == "intermediate":
            shapes["intermediate_ssm"] = ((tokens, *shape.temporal), state_dtype(shape, self.state_dtype))
        if self.tree:
            window = (tokens, shape.conv_dim, shape.conv_kernel - 1)
            shapes["intermediate_conv_window"] = (window, self.conv_dtype)
        if self.mode == "replay":
            ring_shapes = linear_kind(shape.kind).ring_shapes
            assert ring_shapes is not None, "checked when the spec was made"
            for name, dims in ring_shapes(shape, ring_width(tokens)).items():
                shapes[name] = dims, torch.float32 if name == "ring_gates" else self.conv_dtype
        return shapes

    def layer_bytes(self, shape: StateShape) -> int:
        """Bytes that one layer keeps for one running request."""
        return _nbytes(self.slot_shapes(shape)) + _nbytes(self.row_shapes(shape))

    def slot_bytes(self) -> int:
        """Bytes of one state slot over all layers."""
        return sum(_nbytes(self.slot_shapes(s)) * len(ids) for s, ids in self.groups.items())

    def row_bytes(self) -> int:
        """Bytes that one running request needs beside its slot, over all layers, ring cursors included."""
        layers = sum(_nbytes(self.row_shapes(s)) * len(ids) for s, ids in self.groups.items())
        return layers + 8 if self.groups else 0


def _as_words(tensor: torch.Tensor) -> torch.Tensor:
    """[L, S+1, ...] as [L, S+1, n], of int64 where that fits: torch fills numbers one by one, wide ones as fast as
    narrow ones."""
    flat = tensor.flatten(2)
    return flat.view(torch.int64) if flat.numel() and flat.shape[2] * flat.element_size() % 8 == 0 else flat


def _nbytes(shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> int:
    return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in shapes.values())


class MambaPool:
    """Preallocated state of all recurrent layers: S slots, R running rows; slot 0 and row 0 are scratch."""

    def __init__(self, spec: MambaPoolSpec, *, num_slots: int, num_rows: int, device: torch.device | str) -> None:
        self.spec = spec
        self.num_slots = num_slots
        self.num_rows = num_rows
        self.width = ring_width(spec.tokens_per_step)
        # One cursor pair a row, shared by all layers: every layer sees the same tokens.
        self.ring_start = torch.zeros(num_rows + 1, dtype=torch.int32, device=device)
        self.ring_length = torch.zeros(num_rows + 1, dtype=torch.int32, device=device)
        self._slot_tensors: list[torch.Tensor] = []
        self.stacks: list[tuple[Sequence[int], LayerCache]] = []  # layers of equal shape, a leading dimension for them
        self._caches: dict[int, LayerCache] = {}
        self._shapes: dict[int, StateShape] = {}
        for shape, layer_ids in spec.groups.items():
            self._add_group(shape, layer_ids, device)

    def _add_group(self, shape: StateShape, layer_ids: Sequence[int], device: torch.device | str) -> None:
        def allocate(
            entries: int, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
        ) -> dict[str, torch.Tensor]:
            return {
                name: torch.zeros((len(layer_ids), entries, *dims), dtype=dtype, device=device)
                for name, (dims, dtype) in shapes.items()
            }

        slots = allocate(self.num_slots + 1, self.spec.slot_shapes(shape))
        rows = allocate(self.num_rows + 1, self.spec.row_shapes(shape))
        self._slot_tensors += slots.values()
        self.stacks.append((layer_ids, LayerCache(**slots, **rows)))
        for i, layer_id in enumerate(layer_ids):
            self._caches[layer_id] = LayerCache(**{name: t[i] for name, t in (slots | rows).items()})
            self._shapes[layer_id] = shape

    @property
    def layer_ids(self) -> list[int]:
        return sorted(self._caches)

    def layer_cache(self, layer_id: int) -> LayerCache:
        return self._caches[layer_id]

    def clear(self, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Zeroes the state of `slots` and empties the rings of `rows` ([n] int64 each): what a new tenant gets."""
        for tensor in self._slot_tensors:
            _as_words(tensor).index_fill_(1, slots, 0)
        self.ring_start.index_fill_(0, rows, 0)
        self.ring_length.index_fill_(0, rows, 0)

    def copy(self, source: torch.Tensor, destination: torch.Tensor) -> None:
        """Copies the state of slots `source` to slots `destination` ([n] int64 each) in every layer."""
        for tensor in self._slot_tensors:
            tensor.index_copy_(1, destination, tensor.index_select(1, source))

    def conv_window(self, layer_id: int, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The K - 1 raw conv inputs before `positions`, oldest first: [n, conv_dim, K - 1]. For transfer and tests."""
        return conv_window(self._caches[layer_id].conv, slots, positions, self._shapes[layer_id].conv_kernel)
