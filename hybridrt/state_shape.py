"""The one function that says what a recurrent layer keeps per request. Pools, layers, sharding and transfer ask it."""

from dataclasses import dataclass
from math import prod

from hybridrt.config import GDNConfig, LinearConfig, Mamba1Config, Mamba2Config, PrefixSumConfig
from hybridrt.errors import ConfigError


@dataclass(frozen=True)
class StateShape:
    """State of one recurrent layer and one request on one tensor-parallel rank.

    Attributes:
        kind: "mamba1", "mamba2", "gdn" or "prefix_sum" (a sum of hidden states, in float32 always).
        segments: the sub-projections that the causal conv runs over, in order, with their widths: x (Mamba-1), x, B, C
            (Mamba-2) or q, k, v (GDN). A slice of the conv state must respect them.
        conv_kernel: K, taps of the conv.
        temporal: shape of the recurrent state: [I, N] (Mamba-1), [H, P, N] (Mamba-2), [Hv, V, K] (GDN).
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


def state_shape(config: LinearConfig, tp_size: int = 1) -> StateShape:
    """The state that one layer keeps for one request on one of `tp_size` ranks.

    Heads (channels of Mamba-1) are split; groups (key heads) are split where they divide, and replicated where there
    is only one.

    Raises:
        ConfigError: the heads, channels or groups cannot be split over `tp_size` ranks.
    """
    if isinstance(config, PrefixSumConfig):
        return StateShape("prefix_sum", (), 1, (config.hidden_size,), 1)  # hidden states are whole on every rank
    if isinstance(config, Mamba1Config):
        channels = _split("Mamba-1 channels", config.intermediate_size, tp_size)
        return StateShape("mamba1", (("x", channels),), config.conv_kernel, (channels, config.state_size), 1)
    if isinstance(config, Mamba2Config):
        heads = _split("Mamba-2 heads", config.num_heads, tp_size)
        groups = 1 if config.n_groups == 1 else _split("Mamba-2 groups", config.n_groups, tp_size)
        bc = groups * config.state_size
        segments = (("x", heads * config.head_dim), ("B", bc), ("C", bc))
        return StateShape("mamba2", segments, config.conv_kernel, (heads, config.head_dim, config.state_size), groups)
    assert isinstance(config, GDNConfig)
    v_heads = _split("GDN value heads", config.num_v_heads, tp_size)
    k_heads = _split("GDN key heads", config.num_k_heads, tp_size)
    qk, v = k_heads * config.head_k_dim, v_heads * config.head_v_dim
    temporal = (v_heads, config.head_v_dim, config.head_k_dim)
    return StateShape("gdn", (("q", qk), ("k", qk), ("v", v)), config.conv_kernel, temporal, k_heads)


def next_power_of_two(n: int) -> int:
    """Smallest power of two >= n (n >= 1)."""
    return 1 << (n - 1).bit_length()


def _split(what: str, count: int, ranks: int) -> int:
    if count % ranks:
        raise ConfigError(f"{count} {what} cannot be split over tp_size={ranks}; use a divisor of {count}")
    return count // ranks
