"""What the runtime must know of one kind of recurrent layer, and the state that such a layer keeps."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from hybridrt.base.config import LinearConfig
from hybridrt.base.errors import ConfigError


@dataclass(frozen=True)
class StateShape:
    """State of one recurrent layer and one request on one tensor-parallel rank.

    Attributes:
        kind: name of the LinearKind.
        segments: the sub-projections that the causal conv runs over, in order, with their widths: x (Mamba-1), x, B, C
            (Mamba-2) or q, k, v (GDN). A slice of the conv state must respect them. Empty for a layer without a conv.
        conv_kernel: K, taps of the conv; 1 for a layer without a conv.
        temporal: shape of the recurrent state: [I, N] (Mamba-1), [H, P, N] (Mamba-2), [Hv, V, K] (GDN); [0] for a layer
            that keeps a conv window alone.
        groups: G groups of B and C, or Hk key heads, on this rank: rows of a state ring's keys. 1 for Mamba-1, whose
            channels share B and C.
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
        """Wc: columns of the conv ring for steps of `tokens` tokens: the next power of two >= K - 1 + tokens."""
        return next_power_of_two(self.conv_kernel - 1 + tokens)

    @property
    def temporal_numel(self) -> int:
        return prod(self.temporal)


@dataclass(frozen=True, kw_only=True)
class LinearKind:
    """One kind of recurrent layer: all that pools, memory plan, backends, transfer and `inspect` ask.

    Attributes:
        title: name for people. letter: the layer's symbol in `hybridrt inspect`.
        config: class of its configuration, whose `kind` is the kind's name; mixer and backend have the same `kind`.
        shape: (configuration, ranks) to the state on one rank. ConfigError where ranks cannot share the layer.
        backend, mixer: "module:class" of its backend (a MambaAttnBackendBase) and of its layer. A mixer has `kind`,
            `layer_id`, `config`, `width` (the channels of what its backend returns) and `targets(key)` (where the
            checkpoint's tensors go); with a conv also `conv_weight` and `conv_bias`.
        conv_parts: segments of the conv by name; True for those that are cut by group, so that ranks hold copies where
            they are more than the groups. The others are as wide as the state: prod(temporal[:-1]).
        temporal_dims: names of the recurrent state's dimensions; none for a kind that keeps a conv window alone.
        cut_state: ranks share the recurrent state along its first dimension; False where each keeps all of it.
        state_dtype: of the recurrent state; None for `EngineConfig.mamba_ssm_dtype`.
        ring_shapes: (state, W) to the shapes of `ring_values`, `ring_keys` and `ring_gates` of a row, the last in
            float32 and the others in the activations' dtype; None where state mode "replay" does not exist. `fold_ring`
            folds them: S = decay * S + value * key^T, one gate a head, or one for each channel of a key. Another
            recurrence needs its own fold. A kind that keeps a conv window alone has no such tensors. If ring gates are
            not logs of decays, the backend overrides `ring_decay`.
        replay_pays: whether a run without `state_mode` takes "replay" on a GPU, where it exists.
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


def gated_ring(shape: StateShape, width: int) -> dict[str, tuple[int, ...]]:
    """The ring of a state [H, P, N] that takes value x key of each token, decayed by one gate a head."""
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
    """A rank's share of `count`; ConfigError if it does not come out even."""
    if count % ranks:
        raise ConfigError(f"{count} {what} cannot be split over tp_size={ranks}; use a divisor of {count}")
    return count // ranks


def check_divides(what: str, count: int, whole: str, total: int) -> None:
    """ConfigError unless `count` divides `total`."""
    if total % count:
        raise ConfigError(f"{count} {what} cannot share {total} {whole} equally; use a divisor of {total}")
