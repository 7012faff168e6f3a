"""A kind of recurrent layer, and the shape of its state."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from hybridrt.base.errors import ConfigError
from hybridrt.base.model_config import LinearConfig


@dataclass(frozen=True)
class StateShape:
    """State of one recurrent layer and one request on one tensor-parallel rank: one tensor, and the
    inputs of one conv. Either may be missing.

    Attributes:
        kind: name of the LinearKind.
        segments: (name, width) of the causal conv's sub-projections in order, which slices of the
            conv state must respect: x (Mamba-1), x, B, C (Mamba-2) or q, k, v (GDN). Empty without
            a conv.
        conv_kernel: K, taps of the conv; 1 without a conv.
        temporal: shape of the recurrent state: [I, N] (Mamba-1), [H, P, N] (Mamba-2), [Hv, V, K]
            (GDN); [0] if the layer keeps only a conv window.
        groups: groups G of B and C, or key heads Hk, on this rank: rows of a state ring's keys. 1
            for Mamba-1.
    """

    kind: str
    segments: tuple[tuple[str, int], ...]
    conv_kernel: int
    temporal: tuple[int, ...]
    groups: int

    @property
    def conv_dim(self) -> int:
        return sum(width for _, width in self.segments)

    def conv_width(self, tokens: int) -> int:
        """Wc: columns of the conv ring for steps of `tokens` tokens, a power of two >= K - 1 +
        tokens."""
        return next_power_of_two(self.conv_kernel - 1 + tokens)

    @property
    def temporal_numel(self) -> int:
        return prod(self.temporal)


@dataclass(frozen=True, kw_only=True)
class LinearKind:
    """One kind of recurrent layer, for pools, memory plan, backends, transfer and `inspect`.

    Attributes:
        title: name for people. letter: the layer's symbol in `hybridrt inspect`; kinds may share
            one.
        config: class of its configuration. Its `kind` is the kind's name, also of mixer and
            backend.
        shape: (configuration, ranks) to the state on one rank. ConfigError if ranks cannot share
            the layer.
        backend, mixer: "module:class" of its backend (a MambaAttnBackendBase) and layer. A mixer
            has `kind`, `layer_id`, `config`, `width` (channels of its backend's result) and
            `targets(key)` (targets of checkpoint tensors); with a conv also `conv_weight` and
            `conv_bias`.
        conv_parts: whether each conv part is split by group. With more ranks than groups, ranks hold
            copies. A part that is not has prod(temporal[:-1]) channels and is split as the state.
        temporal_dims: names of the recurrent state's dimensions; empty if only a conv window is
            kept.
        cut_state: whether ranks shard the recurrent state's first dimension, or each keeps all of
            it.
        state_dtype: dtype of the recurrent state; None for `EngineConfig.mamba_ssm_dtype`.
        ring_shapes: (state, W) to the shapes of a row's `ring_values`, `ring_keys` (activations'
            dtype) and `ring_gates` (float32); empty if only a conv window is kept, None without
            state mode "replay". `fold_ring` folds S = decay * S + value * key^T, with one gate a
            head or a key channel; another recurrence needs its own fold. If gates are not logs of
            decays, the backend overrides `ring_decay`.
        replay_pays: whether "replay" is the default state mode on a GPU.
        codes: whether the state, [H, P, N], may be stored in 8 bits, or rounded stochastically. Then
            `decode` passes `StateSlots.codes` on, and `extend` calls `ExtendSegment.round_states`
            after its scan.
    """

    title: str
    letter: str
    config: type[LinearConfig]
    shape: Callable[[Any, int], StateShape]
    backend: str
    mixer: str
    conv_parts: Mapping[str, bool]
    temporal_dims: tuple[str, ...]
    cut_state: bool = True
    state_dtype: torch.dtype | None = None
    ring_shapes: Callable[[StateShape, int], dict[str, tuple[int, ...]]] | None = None
    replay_pays: bool = True
    codes: bool = False


def gated_ring(shape: StateShape, width: int) -> dict[str, tuple[int, ...]]:
    """The ring of a state [H, P, N] with one gate a head."""
    heads, values, keys = shape.temporal
    return {
        "ring_values": (heads, width, values),
        "ring_keys": (shape.groups, width, keys),
        "ring_gates": (heads, width),
    }


def next_power_of_two(n: int) -> int:
    """Smallest power of two >= n (n >= 1)."""
    return 1 << (n - 1).bit_length()


def split_over(what: str, count: int, ranks: int) -> int:
    """A rank's share of `count`; ConfigError if ranks do not divide it."""
    if count % ranks:
        raise ConfigError(f"{count} {what} cannot be split over tp_size={ranks}; use a divisor of {count}")
    return count // ranks


def check_divides(what: str, count: int, whole: str, total: int) -> None:
    """ConfigError unless `count` divides `total`."""
    if total % count:
        raise ConfigError(f"{count} {what} cannot share {total} {whole} equally; use a divisor of {total}")
