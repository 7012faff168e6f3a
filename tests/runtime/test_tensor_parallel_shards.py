"""What a rank holds, all ranks in one process: shards make up the whole, collectives agree, splits that cannot be are
refused."""

import threading
from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hybridrt import LLM
from hybridrt.base.engine_config import EngineConfig
from hybridrt.base.errors import ConfigError, DeviceError, RankError
from hybridrt.collectives.groups import Communicator, TPGroup
from hybridrt.kinds.registry import state_shape
from hybridrt.layers.weights import Piece
from hybridrt.models.base import CausalLM
from hybridrt.models.loading.loader import load_weights
from hybridrt.parallel import tensor_parallel
from hybridrt.runtime.load.build_model import empty_model
from hybridrt.runtime.load.fit import pool_budget
from hybridrt.runtime.load.load_target import load_target
from hybridrt.runtime.load.make_plan import make_plan
from hybridrt.runtime.run.model_runner import ModelRunner
from tests.models.test_models_parity import requests
from tests.support.checkpoints import SPLIT, CheckpointStore, Make, falcon, falcon_mamba, jamba, lfm2, nemotron, qwen
from tests.support.levels import sweep
from tests.support.ling25 import ling25
from tests.support.session import Session, spoil
from tests.support.tiny import write_tiny

CPU = torch.device("cpu")


def load(path: Path, tp: TPGroup) -> CausalLM:
    config = EngineConfig(str(path), device="cpu", dtype="float32", tp_size=tp.size)
    with torch.no_grad():
        model = empty_model(config, load_target(config, tp)[1], CPU)
        load_weights(model, path)
    return model


def all_pieces(model: CausalLM) -> list[Piece]:
    return [piece for target in model.checkpoint_map().values() for piece in target]


def segments(model: CausalLM, piece: Piece) -> list[Tensor]:
    """What of a piece is cut by itself: the sub-projections of a conv, else all of it."""
    if ".conv." not in piece.name:
        return [piece.dest]
    shapes = [state_shape(linear, model.tp.size) for linear in model.config.linear.values()]
    (shape,) = (shape for shape in shapes if shape.segments)
    widths = [width for _, width in shape.segments]
    return list(piece.dest.split(widths)) if len(piece.dest) == sum(widths) else [piece.dest]  # KDA: a piece is a part


def is_made_of(whole: Tensor, parts: list[Tensor]) -> bool:
    """Whether parts side by side, each held by as many neighbours, are the whole, and what they pad it with is zero."""
    if parts[0].shape == whole.shape:
        return all(torch.equal(part, whole) for part in parts)
    dim = next(i for i, (a, b) in enumerate(zip(parts[0].shape, whole.shape)) if a != b)
    copies = len(parts) * parts[0].shape[dim] // whole.shape[dim]
    joined = torch.cat(parts[::copies], dim)
    missing = joined.shape[dim] - whole.shape[dim]
    padded = torch.cat((whole, torch.zeros_like(joined.narrow(dim, 0, missing))), dim)
    return torch.equal(joined, padded) and all(torch.equal(p, parts[i // copies * copies]) for i, p in enumerate(parts))


@pytest.mark.parametrize(("name", "size"), [
    *((name, 2) for name in SPLIT),
    *(pytest.param(name, 4, marks=pytest.mark.soak if i % 3 else pytest.mark.slow) for i, name in enumerate(SPLIT)),
])  # fmt: skip
def test_shards_make_up_the_whole(name: str, size: int, checkpoints: CheckpointStore) -> None:
    path = checkpoints[name].path
    models = [load(path, TPGroup()), *(load(path, TPGroup(rank, size)) for rank in range(size))]
    split = 0
    for pieces in zip(*map(all_pieces, models), strict=True):
        whole, *shards = (segments(model, piece) for model, piece in zip(models, pieces))
        assert all(is_made_of(part, list(shard)) for part, *shard in zip(whole, *shards, strict=True)), pieces[0].name
        split += pieces[1].dest.numel() < pieces[0].dest.numel()
    assert split > len(all_pieces(models[0])) / 2


def in_threads(size: int, function: Callable[[Communicator], Any]) -> list[Any]:
    """What `function` returns on each of `size` ranks, which are threads of this process."""
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


def test_collectives() -> None:
    def calls(comm: Communicator) -> Any:
        tp, x = TPGroup(comm.rank, comm.size, comm), torch.arange(6.0).view(3, 2) + 10 * comm.rank
        return tp.minimum(5 - comm.rank), tp.all_gather_last(x), tp.all_reduce(x)

    for least, gathered, total in in_threads(3, calls):
        assert least == 3
        rows = [[0, 1, 10, 11, 20, 21], [2, 3, 12, 13, 22, 23], [4, 5, 14, 15, 24, 25]]
        assert gathered.tolist() == rows
        assert total.tolist() == [[30, 33], [36, 39], [42, 45]]


def test_a_collective_after_close_is_an_error() -> None:
    connected = threading.Barrier(2)

    def leave(comm: Communicator) -> None:
        connected.wait(60)  # Gloo fails in a rank whose peer leaves before both have connected
        comm.close()
        comm.close()
        with pytest.raises(RankError, match="closed"):
            comm.all_reduce(torch.ones(1))

    in_threads(2, leave)


@pytest.mark.parametrize(
    "name",
    sweep(
        [
            "falcon-split", "nemotron-split_groups", "qwen-split", "jamba-split", "lfm2_moe-split", "zamba2-split",
            "minimax-split", "minimax_published-split", "ling25-split",
        ],
        8,
    ),
)  # fmt: skip
def test_ranks_draw_the_same_tokens(name: str, checkpoints: CheckpointStore) -> None:
    """The steps of a run in one process, on two ranks that do not exchange what they draw. Pages and states have
    memory of their own: in slabs, they have other numbers on one rank than on two."""
    session = Session(checkpoints[name].path, page_size=4, cache_slots=1)
    assert session.plan.slabs is None
    session.run(requests(1, 17, 30, steps=12), chunk=7, gap=3)

    for runner in replayed(session, 2):
        assert torch.equal(runner.last_tokens, session.runner.last_tokens)


@pytest.mark.parametrize(
    ("name", "size"),
    sweep(
        [
            ("jamba-split", 2), ("falcon-split", 4), ("zamba2-split", 2), ("nemotron-split_groups", 2),
            ("qwen-split", 2), ("minimax-split", 2), ("lfm2_moe-split", 2), ("ling25-split", 2),
        ],
        4,
    ),
)  # fmt: skip
def test_ranks_draw_the_same_tokens_with_sums_in_pieces(name: str, size: int, checkpoints: CheckpointStore) -> None:
    """Of steps with four tokens or more."""
    session = Session(checkpoints[name].path, page_size=4, cache_slots=1)
    session.run(requests(1, 17, 30, steps=6), chunk=9, gap=3)

    for runner in replayed(session, size, overlap_from=4):
        assert torch.equal(runner.last_tokens, session.runner.last_tokens)


def replayed(session: Session, size: int, overlap_from: float = inf, **changes: Any) -> list[ModelRunner]:
    """The steps of a session's last run on ranks that do not exchange what they draw. The session has `cache_slots`."""

    def run(comm: Communicator) -> ModelRunner:
        comm.overlap_from = overlap_from
        config, tp = replace(session.config, tp_size=size, **changes), TPGroup(comm.rank, comm.size, comm)
        target = load_target(config, tp)[1]
        plan = make_plan(config, target, budget_bytes=pool_budget(config, target), cache_slots=1)
        runner = ModelRunner(config, tp=tp, plan=plan)
        spoil(runner.pools)
        for plan in session.plans:
            runner.launch(plan)
        return runner

    return in_threads(size, run)


def test_the_poorest_rank_decides_for_all(checkpoints: CheckpointStore) -> None:
    config = EngineConfig(str(checkpoints["falcon-split"].path), device="cpu", tp_size=2)

    def pages(comm: Communicator) -> int:
        tp = TPGroup(comm.rank, comm.size, comm)
        return ModelRunner(config, tp=tp, budget_bytes=2**19 * (2 - comm.rank)).memory_plan.num_pages

    first, second = in_threads(2, pages)
    assert first == second > 0


REFUSED: dict[str, tuple[Make, int, str]] = {
    "attention heads": (falcon(), 8, "4 attention heads cannot be cut into 8"),
    "KV heads": (jamba(num_attention_heads=6, num_key_value_heads=3, hidden_size=48), 2, "3 KV heads cannot be cut"),
    "Mamba-1 channels": (falcon_mamba(), 3, "64 Mamba-1 channels cannot be split over tp_size=3"),
    "short conv": (lfm2(hidden_size=40), 3, "40 short conv channels cannot be split over tp_size=3"),
    "Mamba-2 heads": (nemotron(), 4, "6 Mamba-2 heads cannot be split over tp_size=4"),
    "Mamba-2 groups": (nemotron(n_groups=3), 2, "3 Mamba-2 groups cannot be split over tp_size=2"),
    "GDN key heads": (qwen(linear_num_key_heads=1), 2, "1 GDN key heads cannot be split over tp_size=2"),
    "experts": (nemotron("E", moe_intermediate_size=25), 2, "25 channels of an expert cannot be cut into 2"),
    "groups of a norm": (ling25(), 4, "2 groups of the norm cannot be cut into 4"),
    "MLP": (nemotron("-", intermediate_size=25), 2, "25 channels of 'up' cannot be cut into 2"),
}


@pytest.mark.parametrize(("make", "size", "text"), REFUSED.values(), ids=REFUSED)
def test_a_split_that_cannot_be_starts_nothing(
    make: Make, size: int, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_parallel, "start_ranks", lambda *args: pytest.fail("processes were started"))
    with pytest.raises(ConfigError, match=text):
        LLM(str(write_tiny(tmp_path, make)), device="cpu", load_format="dummy", tp_size=size)


@pytest.mark.parametrize(("started", "size"), [("2", 4), ("2", 1), ("1", 2)])
def test_as_many_processes_as_ranks(started: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", started)
    with pytest.raises(ConfigError, match=f"torchrun started {started} process.*tp_size is {size}"):
        LLM("embedded", device="cpu", tp_size=size)


def test_a_gpu_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(DeviceError, match="tp_size is 4, but torch sees 2 CUDA devices"):
        LLM("embedded", device="cuda", tp_size=4)
    with pytest.raises(ConfigError, match="each rank takes the GPU of its own number"):
        LLM("embedded", device="cuda:1", tp_size=2)
