"""Tiles of the kernel in `pipeline_linear_triton`, apart from it: they need nothing that is experimental in Triton."""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from hybridrt.base.device import capability
from hybridrt.kernels.core.launch import cdiv

GROUP = 128  # columns of a stage, if the weight has codes
UNIT = 64  # rows of the weight that a warpgroup multiplies
ROW_BYTES = 128  # bytes of a row in a stage: a group of columns
ALIGNMENT = 16  # bytes: of addresses and of the distances of rows, for the tensor memory accelerator
# Nanoseconds on an H200 (benchmarks/log/products.md). GROUP_TIME: a program of (warpgroups, tokens) multiplies a
# group of columns. WAVE_TIME: a wave of programs begins and ends. PART_TIME: sums of a part are added, for each
# of its warpgroups and tokens. These numbers predict 83 measured times of e4m3 weights at 64 to 256 tokens with a
# median error of 4%. Where memory is the limit, programs take up to a quarter longer, whatever the tile. At 32 tokens
# it always is: there the numbers are chosen so that the least time is that of the fastest tile, or of one within 4%, of
# e4m3 and of 16-bit weights. Tiles of one warpgroup are left out: sums of two runs were not always equal.
GROUP_TIME = {(3, 64): 520, (3, 128): 890, (2, 64): 325, (2, 128): 580, (3, 32): 400, (2, 32): 190}
WAVE_TIME, PART_TIME = 4200, 3
# The same for int4 weights: they predict the fastest of 112 measured tiles at 8 to 128 tokens, or one within 4%. For
# e2m1 they were not measured.
FOUR_BITS_TIME = {
    (3, 64): 660, (2, 64): 440, (2, 128): 720, (3, 32): 480, (2, 32): 310, (3, 16): 430, (2, 16): 285, (3, 8): 400,
    (2, 8): 265,
}  # fmt: skip
FEWEST = 32  # tokens of a program, but for 4 bits: up to so many are all in one
# Of shared memory, and of stages. Programs of two warpgroups that share rows are up to 5% faster with four stages.
STAGE_BYTES, SHARED_STAGES = 208_000, 4
FEWEST_GROUPS, MOST_PARTS = 3, 8  # of a program, if programs share rows


class Stage(NamedTuple):
    """A group of columns in shared memory.

    Attributes:
        row: bytes of a row of the weight.
        token: bytes of a token's inputs, and of its scale.
        most: stages of a program.
        times: as GROUP_TIME. Its keys are the tiles that there are.
    """

    row: int
    token: int
    most: int
    times: Mapping[tuple[int, int], int]


NUMBER_STAGE = Stage(ROW_BYTES, ROW_BYTES + 4, 6, GROUP_TIME)  # 64 of 16 bits, or 128 codes of e4m3
FOUR_BIT_STAGE = Stage(64, 256, 4, FOUR_BITS_TIME)  # 128 codes, and 16-bit inputs


class PipelineTile(NamedTuple):
    """A program's share of a product.

    Attributes:
        warpgroups: that multiply, 2 or 3, 64 rows of the weight each.
        tokens: of a program.
        stages: groups of columns in shared memory.
        split: programs that share rows, each a part of the columns.
    """

    warpgroups: int
    tokens: int
    stages: int
    split: int


def pipeline_tiles(
    tokens: int, rows: int, groups: int, programs: int, stage: Stage = NUMBER_STAGE
) -> Iterator[PipelineTile]:
    """Tiles worth a measurement. groups: stages of a row of the weight. programs: that run at a time."""
    few = [block for _, block in stage.times if tokens <= block <= FEWEST]
    for warpgroups, block in stage.times:
        if block != min(few) if few else block <= FEWEST:
            continue
        blocks = cdiv(rows, UNIT * warpgroups) * cdiv(tokens, block)
        fitting = STAGE_BYTES // (stage.row * UNIT * warpgroups + stage.token * block)
        most = max(1, min(MOST_PARTS, groups // FEWEST_GROUPS, programs // blocks))  # parts wait for no second wave
        for split in range(1, most + 1):
            stages = SHARED_STAGES if warpgroups == 2 and split > 1 else stage.most
            yield PipelineTile(warpgroups, block, min(fitting, stages), split)


@cache
def pipeline_tile(tokens: int, rows: int, groups: int, programs: int, *, four_bits: bool = False) -> PipelineTile:
    """The one of `pipeline_tiles` that takes the least time by measured parts."""
    stage = FOUR_BIT_STAGE if four_bits else NUMBER_STAGE

    def time(tile: PipelineTile) -> int:
        waves = cdiv(programs_of(tile, tokens, rows), programs)
        adding = PART_TIME * tile.split * tile.warpgroups * tile.tokens if tile.split > 1 else 0
        return waves * (WAVE_TIME + cdiv(groups, tile.split) * stage.times[tile.warpgroups, tile.tokens]) + adding

    return min(pipeline_tiles(tokens, rows, groups, programs, stage), key=time)


def programs_of(tile: PipelineTile, tokens: int, rows: int) -> int:
    """Of the launch of a product of `tokens` with a weight of `rows`."""
    return cdiv(rows, UNIT * tile.warpgroups) * cdiv(tokens, tile.tokens) * tile.split


def has_pipeline(device: torch.device) -> bool:
    """Whether the kernel runs: compute capability 9.0 alone has its instructions. On "meta" it is compiled for that."""
    return device.type == "meta" or capability(device) == (9, 0)


def takes_rows(*tensors: Tensor) -> bool:
    """Whether the tensor memory accelerator reads these matrices."""
    return all(
        x.stride(1) == 1 and not x.stride(0) * x.itemsize % ALIGNMENT and not x.data_ptr() % ALIGNMENT for x in tensors
    )
