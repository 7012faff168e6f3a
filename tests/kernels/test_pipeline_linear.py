"""Which tiles the kernel with roles of warps takes. It runs on a GPU alone: tests/gpu."""

import pytest
import torch

from hybridrt.base.errors import ConfigError
from hybridrt.kernels.dense import skinny_linear_triton
from hybridrt.kernels.dense.pipeline_tiles import (
    FEWEST,
    FOUR_BIT_STAGE,
    NUMBER_STAGE,
    ROW_BYTES,
    STAGE_BYTES,
    UNIT,
    PipelineTile,
    pipeline_tile,
    pipeline_tiles,
    programs_of,
    takes_rows,
)
from hybridrt.kernels.dense.skinny_linear_triton import TILES, Tile, TiledProduct
from hybridrt.kernels.quant import fp8_linear_triton
from hybridrt.kernels.quant.fp8_linear import GROUP, quantize_tokens
from hybridrt.kernels.quant.quant_linear import FOUR_BIT_TOKENS
from hybridrt.kernels.quant.quant_linear_triton import four_bit_tile
from hybridrt.runtime.precompile import compile_trace
from hybridrt.server import warm_up
from tests.support.quant_weights import empty_weight, quant_weight

PROGRAMS, BF16, META = 132, torch.bfloat16, torch.device("meta")
SHAPES = [(24576, 3072), (3072, 12288), (3072, 4608), (8728, 3072), (9216, 8192), (128, 128)]


@pytest.mark.parametrize(
    ("shape", "tiles"),
    [
        ((24576, 3072), {32: (3, 32, 6, 1), 64: (3, 64, 6, 1), 96: (3, 128, 5, 1), 128: (3, 128, 5, 1)}),
        ((3072, 12288), {32: (2, 32, 4, 5), 64: (2, 64, 4, 5), 128: (3, 64, 6, 4)}),
        ((3072, 4608), {32: (2, 32, 4, 4), 64: (2, 64, 4, 4), 96: (2, 64, 4, 2), 128: (2, 64, 4, 2)}),
        ((8728, 3072), {32: (2, 32, 6, 1), 64: (3, 64, 6, 2), 128: (3, 64, 6, 1)}),
    ],
)
def test_tiles_of_codes_are_those_that_were_fastest(shape: tuple[int, int], tiles: dict[int, tuple[int, ...]]) -> None:
    rows, width = shape
    assert {count: pipeline_tile(count, rows, width // ROW_BYTES, PROGRAMS) for count in tiles} == tiles


@pytest.mark.parametrize(
    ("shape", "tiles"),
    [
        ((24576, 3072), {8: (3, 8, 4, 1), 16: (3, 16, 4, 1), 32: (3, 32, 4, 1), 64: (3, 64, 4, 1), 128: (3, 64, 4, 1)}),
        ((3072, 12288), {8: (3, 8, 4, 8), 16: (2, 16, 4, 5), 32: (2, 32, 4, 5), 64: (2, 64, 4, 5), 128: (3, 64, 4, 4)}),
        ((3072, 4608), {8: (2, 8, 4, 5), 16: (2, 16, 4, 5), 32: (2, 32, 4, 5), 64: (2, 64, 4, 5), 128: (3, 64, 4, 4)}),
        ((8728, 3072), {8: (3, 8, 4, 2), 16: (3, 16, 4, 2), 32: (3, 32, 4, 2), 64: (3, 64, 4, 2), 128: (3, 64, 4, 1)}),
    ],
)
def test_tiles_of_int4_are_those_that_were_fastest(shape: tuple[int, int], tiles: dict[int, tuple[int, ...]]) -> None:
    """Or one within 4% of it. Fewer tokens than a tile has take as long as all of them."""
    rows, width = shape
    assert {count: pipeline_tile(count, rows, width // GROUP, PROGRAMS, four_bits=True) for count in tiles} == tiles
    assert pipeline_tile(2, rows, width // GROUP, PROGRAMS, four_bits=True) == tiles[8]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_warm_up_runs_all_tiles_of_four_bits(shape: tuple[int, int]) -> None:
    weight = empty_weight("int4", *shape)
    wanted = {four_bit_tile(tokens, weight, PROGRAMS) for tokens in range(2, FOUR_BIT_TOKENS + 1)}
    for lengths in (warm_up._LENGTHS, compile_trace.PROMPTS):
        few = [length for length in lengths if 1 < length <= FOUR_BIT_TOKENS]
        assert {four_bit_tile(tokens, weight, PROGRAMS) for tokens in few} == wanted


@pytest.mark.parametrize(
    ("rows", "width", "tokens", "tile"),
    [
        (24576, 3072, 32, PipelineTile(3, 32, 6, 1)),
        (24576, 3072, 16, None),
        (24576, 3072, 64, None),
        (3072, 12288, 32, PipelineTile(2, 32, 4, 5)),
        (3072, 4608, 32, PipelineTile(2, 32, 4, 5)),
        (12288, 3072, 32, PipelineTile(2, 32, 6, 1)),
        (4376, 3072, 32, PipelineTile(2, 32, 4, 3)),
        (8728, 3072, 32, None),  # 69 programs of 132
        (130048, 3072, 32, None),  # more than a wave
    ],
)
def test_17_to_32_tokens_go_there_if_one_wave_fills_the_device(
    rows: int, width: int, tokens: int, tile: PipelineTile | None
) -> None:
    found = TILES(TiledProduct(rows, width, tokens, BF16), META)
    assert found == tile if tile is not None else isinstance(found, Tile)


@pytest.mark.parametrize(("width", "dtype"), [(3076, BF16), (3072, torch.float32)])
def test_rows_that_it_cannot_read_and_float32_stay_with_the_other_kernel(width: int, dtype: torch.dtype) -> None:
    shape = TiledProduct(24576, width, 32, dtype)
    assert isinstance(TILES(shape, META), Tile)
    assert not any("warpgroups" in values for values in TILES.candidates(shape, META))


def test_the_tuner_may_choose_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skinny_linear_triton, "shared_memory", lambda _: 232448)
    shape = TiledProduct(8728, 3072, 16, BF16)
    values = [values for values in TILES.candidates(shape, META) if "warpgroups" in values]
    assert values and isinstance(TILES(shape, META), Tile)
    for each in values:
        with TILES.trying(shape, META, each):
            assert TILES(shape, META) == PipelineTile(**each)


def test_few_tokens_of_codes_go_there_in_one_wave_alone() -> None:
    def goes(tokens: int, rows: int) -> bool:
        return fp8_linear_triton._pipeline_tile(tokens, empty_weight("fp8 blocks", rows, 3072), META) is not None

    wave = 3 * UNIT * PROGRAMS
    assert [goes(tokens, wave) for tokens in (2, 32, 33)] == [True, True, True]
    assert [goes(tokens, wave + 1) for tokens in (2, 32, 33)] == [False, False, True]
    assert fp8_linear_triton._pipeline_tile(32, empty_weight("fp8 rows", 3072, 3072), META) is None


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [2, 32, 33, 64, 65, 128])
def test_tiles_fit(shape: tuple[int, int], count: int) -> None:
    """Stages fit in shared memory and hold a warpgroup's sums of 32 tokens, every part has a group of columns, and
    programs that share rows run at a time."""
    rows, width = shape
    groups_of = [(width // ROW_BYTES, NUMBER_STAGE), (2 * width // ROW_BYTES, NUMBER_STAGE)]
    for groups, stage in [*groups_of, (width // GROUP, FOUR_BIT_STAGE)]:
        tiles = list(pipeline_tiles(count, rows, groups, PROGRAMS, stage))
        assert pipeline_tile(count, rows, groups, PROGRAMS, four_bits=stage is FOUR_BIT_STAGE) in tiles
        for tile in tiles:
            size = stage.row * UNIT * tile.warpgroups + stage.token * tile.tokens
            assert tile.stages * size <= STAGE_BYTES <= 227 * 1024 - 1024
            assert tile.stages * stage.row * UNIT >= 4 * UNIT * min(tile.tokens, FEWEST)
            assert tile.split <= groups
            assert tile.split == 1 or programs_of(tile, count, rows) <= PROGRAMS


def test_what_the_tensor_memory_accelerator_cannot_read_goes_elsewhere() -> None:
    x = torch.zeros(4, 72, dtype=BF16)
    assert takes_rows(x, x[:, :64], x[:, 8:]) and takes_rows(x.float())
    for odd in (x[:, 1:], x.t(), torch.zeros(4, 68, dtype=BF16)):
        assert not takes_rows(x, odd)


def test_more_than_64_tokens_of_codes_need_it() -> None:
    codes, _ = quantize_tokens.reference(torch.randn(65, 256).bfloat16(), GROUP)
    with pytest.raises(ConfigError, match=r"65 tokens, .* capability 9\.0: call fp8_linear\.reference"):
        fp8_linear_triton.fp8_linear_triton(codes, quant_weight("fp8 blocks", 64, 256), dtype=torch.float32)
