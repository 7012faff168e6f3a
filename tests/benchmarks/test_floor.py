"""The bytes that a decode step moves at least, counted by hand."""

import pytest
import torch

from hybridrt.base.model_config import AttentionSpec
from hybridrt.bench.floor import kv_bytes, state_bytes
from hybridrt.kinds.base import StateShape
from hybridrt.mem_cache.pools.mamba_pool_spec import MambaPoolSpec

MAMBA2 = StateShape("mamba2", (("x", 8), ("B", 4), ("C", 4)), 4, (2, 4, 4), 1)
SHORT_CONV = StateShape("short_conv", (("x", 8),), 3, (0,), 1)
CONV, STATE = 16 * 4 * 2, 2 * 4 * 4 * 4  # three columns are read and one is written; 32 numbers of float32
ENTRY = 2 * 4 * 2 + 4 * 2 + 2 * 4  # values and keys in bfloat16, gates in float32


@pytest.mark.parametrize(
    ("shape", "mode", "expected"),
    [
        (MAMBA2, "classic", CONV + 2 * STATE),
        # 7.5 entries of the ring are read in the mean, one is written, and a fold every 16 tokens reads all of them
        (MAMBA2, "replay", CONV + STATE + 2 * STATE / 16 + 9.5 * ENTRY),
        (SHORT_CONV, "classic", 8 * 3 * 2),
    ],
)
def test_state_bytes(shape: StateShape, mode: str, expected: float) -> None:
    spec = MambaPoolSpec({shape: [0, 3]}, torch.bfloat16, torch.float32, mode=mode)
    assert state_bytes(spec) == 2 * expected


def test_kv_bytes_of_windows() -> None:
    """A layer with a window reads no more than its window, keys and values of two heads of 8 numbers each."""
    layers = [AttentionSpec(2, 2, 8, 8, window, 1.0, torch.bfloat16) for window in (None, 100, 100)]
    token = 2 * 2 * 8 * 2
    assert kv_bytes(layers, 60) == 3 * 60 * token and kv_bytes(layers, 1000) == (1000 + 2 * 100) * token
