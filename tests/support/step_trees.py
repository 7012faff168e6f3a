"""Steps of draft trees by a fused operation, against its layer's loops along each path; and windows without a tree.

A layer has `slots` of two requests, pools `conv` [slots, C, width] and `states`, `merged` projections
[2, tokens, ...] from position 0, `step`, `expected` and `conv_tail`.
"""

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from hybridrt.base.errors import ConfigError
from tests.support.mamba2_oracle import int32, poisoned, same_bytes

ROWS, BEFORE, PATHS = (6, 2), 2, ([0], [0, 1], [0, 2], [0, 2, 3])


def storage(layer: Any, tokens: int, taps: int) -> dict[str, Tensor]:
    """Where a step stores states and conv inputs, poisoned, and its rows."""
    return {
        "stored": poisoned(8, tokens, *layer.states.shape[1:]),
        "windows": poisoned(8, tokens, layer.conv.shape[1], taps - 1),
        "rows": int32(*ROWS),
    }


def check_draft_tree(layer: Any, taps: int, near: Callable[[Tensor, Tensor], None]) -> None:
    """A tree of four nodes after two tokens. Pools are read alone; each node equals the end of its path."""
    for t in range(BEFORE):
        layer.step([t, t], 1)
    before, place = (layer.conv.clone(), layer.states.clone()), storage(layer, len(PATHS), taps)
    parents = int32(-1, 0, 0, 2).expand(2, len(PATHS)).contiguous()
    out = layer.step([BEFORE, BEFORE], len(PATHS), predecessors=parents, **place)
    assert same_bytes(before[0], layer.conv) and same_bytes(before[1], layer.states)
    merged = layer.merged
    for node, path in enumerate(PATHS):
        layer.merged = merged[:, [*range(BEFORE), *(BEFORE + each for each in path)]]
        for b, row in enumerate(ROWS):
            expected, states = layer.expected(b)
            near(out[b, node], expected[-1])
            near(place["stored"][row, node], states[-1])
            assert same_bytes(place["windows"][row, node], layer.conv_tail(b, BEFORE + len(path)))


def check_windows_of_a_chain(layer: Any, taps: int) -> None:
    """They are refused before anything is written."""
    before = layer.conv.clone()
    with pytest.raises(ConfigError, match="predecessors alone"):
        layer.step([0, 0], 2, **storage(layer, 2, taps))
    assert same_bytes(layer.conv, before)
