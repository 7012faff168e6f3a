"""Sums over ranks in pieces of rows, next to products: the same numbers as sums in line."""

import threading
from collections.abc import Callable
from math import inf
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hybridrt.base.errors import ConfigError
from hybridrt.collectives.groups import OVERLAP_VARIABLE, Communicator, PendingSum, TPGroup
from hybridrt.layers.linear import MLP, ColumnLinear, RowLinear, Segment
from hybridrt.layers.norm import RMSNorm
from hybridrt.layers.summands import Arriving, stacked, summed
from hybridrt.layers.weights import Build

CPU = torch.device("cpu")
HIDDEN = 16


def in_threads(size: int, function: Callable[[Communicator], Any]) -> list[Any]:
    """What `function` returns on each of `size` ranks."""
    store, results = dist.HashStore(), dict[int, Any]()

    def run(rank: int) -> None:
        comm = Communicator(store, rank, size, CPU)
        results[rank] = function(comm)
        comm.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[rank] for rank in range(size)]


def fill(module: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in module.parameters():
        param.data.copy_(torch.randn(param.shape, generator=generator) * 0.3)


@torch.inference_mode()
def block_of_rank(comm: Communicator, tokens: int, bias: bool) -> tuple[Tensor, int]:
    """Two MLPs, and a mixer between them, on this rank: their whole sum, and the number of sums that ran next to
    products."""
    build = Build(TPGroup(comm.rank, comm.size, comm), torch.float32, CPU)
    first, second = (MLP(f"mlp{i}", HIDDEN, 24, bias=bias, build=build) for i in range(2))
    into = ColumnLinear("in", HIDDEN, [Segment("x", 12)], build=build)
    out = RowLinear("out", [Segment("x", 8), Segment("y", 4)], HIDDEN, build=build)
    norms = [RMSNorm(f"norm{i}", HIDDEN, 1e-5, device=CPU) for i in range(4)]
    for i, module in enumerate((first, second, into, out)):
        fill(module, 10 * comm.rank + i)
    for i, norm in enumerate(norms):
        fill(norm, i)
    started, start = [], comm.start_sum
    comm.start_sum = lambda x: (started.append(len(x)), start(x))[1]  # type: ignore[method-assign]
    x: Any = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(5))
    batch: Any = None
    x, residual = first(norms[0], x, None, batch)
    y, residual = into.normed(norms[1], x, residual)
    x, residual = out.onto(residual, *y.split(out.sizes, -1))
    x, residual = second(norms[2], x, residual, batch)
    normed, total = norms[3](x, residual)
    return torch.stack((normed, total)), len(started)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("tokens", "bias"), [(9, False), (9, True), (2050, False), (2047, False), (2047, True)])
def test_pieces_add_up_to_the_same(tokens: int, bias: bool, ranks: int) -> None:
    """Products of more than a thousand tokens add the residual themselves."""

    def each(comm: Communicator) -> Any:
        comm.overlap_from = inf
        in_line, none = block_of_rank(comm, tokens, bias)
        comm.overlap_from = tokens
        pieces, started = block_of_rank(comm, tokens, bias)
        comm.overlap_from = tokens + 1
        assert none == block_of_rank(comm, tokens, bias)[1] == 0 and started == 6
        return in_line, pieces

    results = in_threads(ranks, each)
    for in_line, pieces in results:
        torch.testing.assert_close(pieces, in_line, rtol=1e-5, atol=1e-5)
        assert torch.equal(pieces, results[0][1]), "every rank has the same bits"


def test_pieces_next_to_each_other_are_joined_without_a_copy() -> None:
    x = torch.arange(24.0).view(6, 4)
    whole = stacked([x[1:3], x[3:4], x[4:6]])
    assert torch.equal(whole, x[1:6]) and whole.data_ptr() == x[1:].data_ptr()
    for parts in ([x[:2], x[3:6]], [x[:2, :2], x[2:4, :2]], [x[:2], x[2:].clone()], [x[2:], x[:2]]):
        assert torch.equal(stacked(parts), torch.cat(parts))


def test_a_sum_is_waited_for_once() -> None:
    waits: list[int] = []
    x = Arriving([PendingSum(torch.ones(2, 3), lambda: waits.append(1)), PendingSum(torch.zeros(1, 3))])
    assert summed(x).shape == (3, 3) and summed(x).sum() == 6 and waits == [1]


def test_rank_0_says_from_when_sums_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OVERLAP_VARIABLE, "300")
    assert in_threads(2, lambda comm: comm.overlap_from) == [300, 300]
    monkeypatch.setenv(OVERLAP_VARIABLE, "0")
    assert in_threads(2, lambda comm: comm.overlap_from) == [inf, inf]
    for text in ("-1", "many", "", "1e3"):
        monkeypatch.setenv(OVERLAP_VARIABLE, text)
        with pytest.raises(ConfigError, match=f"{OVERLAP_VARIABLE} is '{text}'"):
            Communicator(dist.HashStore(), 0, 1, CPU)
