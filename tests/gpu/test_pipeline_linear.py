"""The product kernel with roles of warps, by all its tiles: near the float32 reference, always alike, and nothing is
written that is not an output."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hybridrt.base.device import multiprocessors
from hybridrt.kernels.dense.pipeline_linear_triton import WeightCodes, pipeline_linear
from hybridrt.kernels.dense.pipeline_tiles import (
    FOUR_BIT_STAGE,
    GROUP,
    ROW_BYTES,
    PipelineTile,
    has_pipeline,
    pipeline_tiles,
)
from hybridrt.kernels.dense.skinny_linear import ACTIVATIONS, Activation, skinny_linear
from hybridrt.kernels.dense.skinny_linear_triton import TILES, TiledProduct, padded_tokens
from hybridrt.kernels.quant.quant_linear import by_pipeline
from hybridrt.kernels.quant.quant_weight import dequantize
from tests.gpu.rig import DEVICE, GPU
from tests.support.quant_weights import FOUR_BITS, four_bit_weight

HAS_IT = torch.cuda.is_available() and has_pipeline(torch.device(DEVICE))
pytestmark = [*GPU, pytest.mark.skipif(not HAS_IT, reason="needs compute capability 9.0")]
TOLERANCE = 4e-3  # one rounding to bfloat16 is 1.7e-3 in the mean; a gate multiplies two numbers
# (rows, columns, activation, columns of the tail): of Falcon-H1-7B on one GPU and two, and sizes that fill no tile.
PRODUCTS: tuple[tuple[int, int, Activation | None, int], ...] = (
    (24576, 3072, "silu_and_mul", 0), (3072, 6144, None, 0), (3072, 4608, None, 3072), (4376, 3072, None, 0),
    (1000, 424, "relu2", 0), (1000, 424, "silu_and_mul", 40), (72, 136, None, 8),
)  # fmt: skip


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=DEVICE).to(dtype)


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation | None, tail: int, tile: PipelineTile,
    codes: WeightCodes | None = None,
) -> Tensor:  # fmt: skip
    """Of inputs with rows that begin apart, into a tensor of NaN with as much of it after the last row."""
    rows, tokens, head = len(weight), len(x), x.shape[1] - tail
    width = rows // 2 if activation == "silu_and_mul" else rows
    buffer = torch.full((2 * tokens, width), float("nan"), dtype=x.dtype, device=DEVICE)
    parts = [F.pad(part, (0, 8)).contiguous()[:, : part.shape[1]] for part in x.split([head, tail], 1)]
    pipeline_linear(
        parts[0], weight, bias, buffer[:tokens], tile, tail=parts[1] if tail else None, codes=codes,
        activation=activation,
    )  # fmt: skip
    assert bool(buffer[tokens:].isnan().all())
    return buffer[:tokens]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [2, 17, 32, 33, 64, 128, 150])
def test_all_tiles_are_near_the_reference(tokens: int, dtype: torch.dtype, record_property: Any) -> None:
    found = {}
    for rows, width, activation, tail in PRODUCTS:
        if tail and (width - tail) * dtype.itemsize % ROW_BYTES:
            continue
        x, weight = numbers(tokens, width, dtype=dtype), numbers(rows, width, dtype=dtype, seed=1) / width**0.5
        for bias in (None, numbers(rows, dtype=dtype, seed=2)):
            wanted = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
            wanted = wanted if activation is None else ACTIVATIONS[activation].reference(wanted)
            for tile in pipeline_tiles(
                tokens, rows, -(-width * dtype.itemsize // ROW_BYTES), multiprocessors(x.device)
            ):
                got = [product(x, weight, bias, activation, tail, tile) for _ in range(2)]
                assert torch.equal(*got), tile
                found[rows, width, tile] = float((got[0].float() - wanted).norm() / wanted.norm())
    record_property("largest error", f"{max(found.values()):.1e} of {len(found)}")
    assert max(found.values()) < TOLERANCE, max(found, key=lambda case: found[case])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FOUR_BITS)
@pytest.mark.parametrize("tokens", [2, 16, 32, 33, 128, 150])
def test_all_tiles_of_four_bits_are_near_the_reference(
    tokens: int, form: str, dtype: torch.dtype, record_property: Any
) -> None:
    found = {}
    for rows, width, activation, tail in PRODUCTS:
        if tail and (width - tail) % GROUP:
            continue
        x, weight = numbers(tokens, width, dtype=dtype), four_bit_weight(form, rows, width, DEVICE)
        if not by_pipeline(weight, dtype):
            assert weight.code == "e2m1" and (dtype == torch.float16 or width % 32)
            continue
        bias = numbers(rows, dtype=dtype, seed=2) if width == 3072 else None
        wanted = F.linear(x.float(), dequantize(weight), None if bias is None else bias.float())
        wanted = wanted if activation is None else ACTIVATIONS[activation].reference(wanted)
        codes = WeightCodes(
            "int4" if weight.code == "int4" else "e2m1", weight.scale, weight.block, weight.zero, weight.factor
        )
        for tile in pipeline_tiles(tokens, rows, -(-width // GROUP), multiprocessors(x.device), FOUR_BIT_STAGE):
            got = [product(x, weight.data, bias, activation, tail, tile, codes) for _ in range(2)]
            assert torch.equal(*got), tile
            found[rows, width, tile] = float((got[0].float() - wanted).norm() / wanted.norm())
    record_property("largest error", f"{max(found.values(), default=0.0):.1e} of {len(found)}")
    assert max(found.values(), default=0.0) < TOLERANCE, max(found, key=lambda case: found[case])


@pytest.mark.parametrize("tokens", [17, 32])
@pytest.mark.parametrize(("head", "stride"), [(1536, 4608), (1536, 4612), (1544, 4608)])
def test_inputs_that_it_cannot_read_go_to_the_other_kernel(tokens: int, head: int, stride: int) -> None:
    """Rows that begin at no multiple of 16 bytes, and a tail that begins within a stage."""
    weight, whole = numbers(3072, 4608, seed=1) / 68, numbers(tokens, stride)
    assert isinstance(TILES(TiledProduct(3072, 4608, padded_tokens(tokens), whole.dtype), whole.device), PipelineTile)
    x, tail = whole[:, :head], whole[:, head:4608]
    got = [skinny_linear(x, weight, tail=tail)[0] for _ in range(2)]
    wanted = F.linear(whole[:, :4608].float(), weight.float())
    assert torch.equal(*got) and float((got[0].float() - wanted).norm() / wanted.norm()) < TOLERANCE


def test_it_runs_between_others_with_the_same_weight() -> None:
    """Programs that share rows count their arrivals at the same place, by tiles of other sizes."""
    weight = numbers(3072, 4608, seed=1) / 68
    alone = {tokens: skinny_linear(numbers(tokens, 4608), weight.clone())[0] for tokens in (8, 20, 32, 60)}
    for tokens in (32, 8, 60, 20, 8, 32, 60, 20):
        assert torch.equal(skinny_linear(numbers(tokens, 4608), weight)[0], alone[tokens])
