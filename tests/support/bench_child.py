"""A process that runs candidates of the tiled product, some of which end it, hang or fail."""

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hybridrt.kernels.dense.skinny_linear_triton import TILES, TiledProduct
from hybridrt.runtime.tune import tune
from hybridrt.runtime.tune.bench_process import serve
from hybridrt.runtime.tune.trial import Call, Trial

CPU = torch.device("cpu")
SHAPE = TiledProduct(128, 64, 16, torch.float32)
RIGHT, ENDS, HANGS, FAULTS, FULL, RACES, BUG = range(1, 8)  # by the split of K


def tile(split: int) -> dict[str, int]:
    return {"block_n": 64, "block_k": 32, "num_warps": 4, "stages": 2, "split": split}


def chosen() -> int:
    return TILES(SHAPE, CPU).split


def outputs() -> Sequence[torch.Tensor]:
    print("this is no answer", flush=True)
    match chosen():
        case n if n == ENDS:
            os._exit(1)
        case n if n == HANGS:
            time.sleep(600)
        case n if n == FAULTS:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nand more")
        case n if n == FULL:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried")
        case n if n == BUG:
            raise KeyError("a mistake of ours")
    return [torch.ones(3)]


class Timer:
    """RACES ends the process when it is timed."""

    def prepare(self, calls: Sequence[Call]) -> Callable[[], float]:
        split = chosen()
        return lambda: os._exit(1) if split == RACES else 1.0 / split


def make(shape: Any, device: torch.device) -> Trial:
    if shape.rows == 7:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried")
    if shape.rows == 9:
        os._exit(1)
    return Trial([], outputs, lambda: [torch.ones(3)])


def main(device: str) -> None:
    tune.TRIALS["skinny_linear"] = make
    TILES.built_in = lambda *_: tile(RIGHT)  # type: ignore[method-assign]
    serve(torch.device(device), Timer())
