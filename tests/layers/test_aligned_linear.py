"""Projections whose rows are padded, so that each begins at a multiple of 16 bytes."""

from typing import Any

import pytest
import torch

from hybridrt.base.quantization import Scheme
from hybridrt.collectives.groups import PendingSum, TPGroup
from hybridrt.layers.linear import ALIGNED, ColumnLinear, Segment, parameter_count
from hybridrt.layers.norm import RMSNorm
from hybridrt.layers.summands import Arriving
from hybridrt.layers.weights import Build

CPU = torch.device("cpu")
BUILD = Build(TPGroup(1, 2), torch.float32, CPU)


def made(heads: int, bias: bool, aligned: bool = True, build: Build = BUILD) -> ColumnLinear:
    """Rank 1 of 2: 16 rows of x, and a row for each head."""
    segments = [Segment("x", 32, bias=bias), Segment("dt", 2 * heads, bias=bias)]
    module = ColumnLinear("in", 8, segments, build=build, aligned=aligned)
    generator = torch.Generator().manual_seed(3)
    tensors = {"x": torch.randn(32, 8, generator=generator), "dt": torch.randn(2 * heads, 8, generator=generator)}
    for name, tensor in tensors.items():
        for key, target in module.targets(name, [name]).items():
            for piece in target:
                piece.fill(key, tensor if key.endswith("weight") else tensor[:, 0])
    return module


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("heads", "padding"), [(3, 5), (1, 7), (8, 0)])
@torch.inference_mode()
def test_outputs_are_those_without_padding(heads: int, padding: int, bias: bool) -> None:
    """Of tokens, of normed ones, and of a sum that comes in pieces."""
    module, plain = made(heads, bias), made(heads, bias, aligned=False)
    assert (module.padding, plain.padding, sum(module.sizes)) == (padding, 0, 16 + heads)
    assert parameter_count(module) == parameter_count(plain) == sum(p.numel() for p in plain.parameters())
    assert not module.method.parameters()["weight"][16 + heads :].any()
    norm, x = RMSNorm("norm", 8, 1e-5, device=CPU), torch.randn(6, 8)
    norm.weight.data.fill_(0.5)
    for tokens in (1, 6):
        y = module(x[:tokens])
        torch.testing.assert_close(y, plain(x[:tokens]))
        assert y.shape == (tokens, 16 + heads) and y.stride(0) % ALIGNED == 0
    residual = torch.randn(6, 8)
    wanted, total = plain.normed(norm, x.clone(), residual.clone())
    pieces: Any = Arriving([PendingSum(x[:2].clone()), PendingSum(x[2:].clone())])
    for given in (x.clone(), pieces):
        y, added = module.normed(norm, given, residual.clone())
        torch.testing.assert_close((y, added), (wanted, total))
        assert y.stride(0) % ALIGNED == 0


def test_quantised_rows_are_not_padded() -> None:
    """Their methods have layouts of their own."""
    build = Build(TPGroup(1, 2), torch.float32, CPU, scheme=lambda part: Scheme("int8", "compressed", (1, 0)))
    segments = [Segment("x", 32), Segment("dt", 6)]
    assert ColumnLinear("in", 8, segments, build=build, aligned=True).padding == 0
