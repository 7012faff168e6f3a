"""Sums over ranks: through peers' memory and through NCCL, alone and with the norm after it. Needs two GPUs or more.

    python -m benchmarks.bench_collectives --ranks 2

Each time is that of one sum among many in a graph, in microseconds. Before it is timed, each size is
compared with the sum in float32, with ranks that come at random times.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybridrt.collectives.groups import Communicator
from hybridrt.kernels.dense.norm_activation import add_rms_norm

SIZES = [1, 8, 32, 64, 128, 256, 320]  # rows
REPEATS = 64  # sums of a graph


def check(comm: Communicator, rows: int, width: int, rounds: int) -> None:
    """Compares sums of random numbers with their sum in float32, in steps and in a graph, and those with a norm
    with the two operations one after the other."""
    generator = torch.Generator("cuda").manual_seed(rows)
    stage, residual = (torch.empty(rows, width, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    weight, graph = torch.rand(width, device="cuda", generator=generator), torch.cuda.CUDAGraph()
    for i in range(rounds):
        *parts, before = torch.randn(comm.size + 1, rows, width, device="cuda", generator=generator).bfloat16()
        expected = parts[0].float()
        for part in parts[1:]:
            expected = expected + part.float()
        stage.copy_(parts[comm.rank])
        torch.cuda._sleep(int(torch.randint(0, 200_000, ()).item()))
        if i == 1:
            with torch.cuda.graph(graph):
                comm.all_reduce(stage)
        graph.replay() if i else comm.all_reduce(stage)
        assert torch.equal(stage, expected.bfloat16()), (rows, i)
        mine = parts[comm.rank].contiguous()
        assert torch.equal(comm.gather_rows(mine), torch.cat(list(parts))), (rows, i)
        if rows % comm.size == 0:
            own = slice(rows // comm.size * comm.rank, rows // comm.size * (comm.rank + 1))
            assert torch.equal(comm.scatter_sum(mine), expected.bfloat16()[own]), (rows, i)
        if comm.sums_with_norm(stage):
            normed, total = add_rms_norm(stage, before.clone(), weight, 1e-5)
            stage.copy_(parts[comm.rank])
            residual.copy_(before)
            found = comm.sum_add_rms_norm(stage, residual, weight, 1e-5)[0]
            assert torch.equal(residual, total), (rows, i)
            torch.testing.assert_close(found, normed, rtol=2**-7, atol=1e-6)


def timed(comm: Communicator, run: Callable[[], Any], replays: int = 30) -> float:
    """Microseconds of a run, one of many in a graph."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            run()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    graph.replay()
    comm.barrier()
    events[0].record()
    for _ in range(replays):
        graph.replay()
    events[1].record()
    torch.cuda.synchronize()
    return events[0].elapsed_time(events[1]) / (replays * REPEATS) * 1e3


def times(comm: Communicator, rows: int, width: int) -> list[float]:
    """Microseconds through peers' memory and through NCCL: of a sum, of one with a norm, and of rows to all and sums of
    parts back."""
    x, residual = (torch.zeros(rows, width, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    weight, peers = torch.ones(width, device="cuda"), comm._peers
    fused = comm.sums_with_norm(x)

    def both() -> None:
        add_rms_norm(comm.all_reduce(x), residual, weight, 1e-5)

    with_norm = partial(comm.sum_add_rms_norm, x, residual, weight, 1e-5) if fused else both
    ours = [timed(comm, partial(comm.all_reduce, x)), timed(comm, with_norm)]
    together = torch.zeros(comm.size * rows, width, dtype=torch.bfloat16, device="cuda")

    def exchange() -> None:
        comm.gather_rows(x)
        comm.scatter_sum(together)

    ours.append(timed(comm, exchange))
    comm._peers = None
    nccl = [timed(comm, partial(comm.all_reduce, x)), timed(comm, both), timed(comm, exchange)]
    comm._peers = peers
    return [each for pair in zip(ours, nccl, strict=True) for each in pair]


def rank_main(args: argparse.Namespace) -> None:
    device = torch.device("cuda", args.rank)
    store = dist.FileStore(args.store, args.ranks)
    store.set_timeout(timedelta(minutes=2))
    comm = Communicator(store, args.rank, args.ranks, device)
    comm.connect()
    peers, rows = comm._peers, []
    assert peers is not None, "the GPUs cannot reach each other's memory"
    for size in SIZES:
        if peers.serves(torch.empty(size, args.width, dtype=torch.bfloat16, device="cuda")):
            check(comm, size, args.width, args.rounds)
            rows.append((size, times(comm, size, args.width)))
    if args.rank == 0:
        print(f"{torch.cuda.get_device_name()}, {args.ranks} ranks, torch {torch.__version__}; us of a sum in a graph")
        print("  rows          peers     NCCL   with norm: peers  NCCL and norm   experts' exchange: peers  NCCL")
        for size, found in rows:
            print(f"{size:4} x {args.width} " + " ".join(f"{each:10.2f}" for each in found))
    comm.barrier()
    torch.cuda.synchronize()
    comm.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=3072, help="numbers of a row")
    parser.add_argument("--rounds", type=int, default=20, help="comparisons of each size")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        return rank_main(args)
    with tempfile.TemporaryDirectory() as directory:
        common = ["--ranks", str(args.ranks), "--width", str(args.width), "--rounds", str(args.rounds)]
        command = [sys.executable, "-m", "benchmarks.bench_collectives", *common, "--store", directory + "/store"]
        root = Path(__file__).parents[1]
        ranks = [subprocess.Popen([*command, "--rank", str(rank)], cwd=root) for rank in range(args.ranks)]
        try:
            codes = [rank.wait(timeout=300) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    if any(codes):
        raise SystemExit(f"ranks ended with {codes}")


if __name__ == "__main__":
    main()
