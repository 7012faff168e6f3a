"""Soaks of random schedules over ranks and over replicas that share experts, all of them threads."""

import queue
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybridrt.base.engine_config import EngineConfig
from hybridrt.collectives.groups import Communicator, TPGroup
from hybridrt.parallel.ranks import Ranks
from hybridrt.parallel.tensor_parallel import TensorParallelExecutor
from hybridrt.runtime.run.launched_step import LaunchedStep
from hybridrt.runtime.run.model_runner import ModelRunner
from hybridrt.runtime.step.plan import StepPlan
from tests.support.checkpoints import CheckpointStore
from tests.support.soak import CHECKED, Soak
from tests.support.ties import check_greedy

CPU = torch.device("cpu")


class Led(ModelRunner):
    """Rank 0, which sends its plans to the others."""

    others: list["queue.SimpleQueue[StepPlan | None]"]

    def launch(self, plan: StepPlan) -> LaunchedStep:
        for other in getattr(self, "others", ()):
            other.put(plan)
        return super().launch(plan)


class RankSoak(Soak):
    """Over `config.tp_size` ranks. Sums of four tokens or more run next to products."""

    def load(self, config: EngineConfig, budget_bytes: int) -> ModelRunner:
        store, queues = dist.HashStore(), [queue.SimpleQueue[StepPlan | None]() for _ in range(config.tp_size)]
        self.queues, self.others = queues[1:], dict[int, ModelRunner]()

        def group(rank: int) -> TPGroup:
            comm = Communicator(store, rank, config.tp_size, CPU)
            comm.overlap_from = 4
            return TPGroup(rank, config.tp_size, comm)

        def follow(rank: int) -> None:
            runner = self.others[rank] = ModelRunner(config, tp=group(rank), budget_bytes=budget_bytes)
            while (plan := queues[rank].get()) is not None:
                runner.launch(plan)

        self.threads = [threading.Thread(target=follow, args=(rank,), daemon=True) for rank in range(1, config.tp_size)]
        for thread in self.threads:
            thread.start()
        runner = Led(config, tp=group(0), budget_bytes=budget_bytes)
        runner.others = self.queues
        return runner

    def leave(self) -> None:
        """All ranks have drawn the same tokens."""
        for other, thread in zip(self.queues, self.threads, strict=True):
            other.put(None)
            thread.join(60)
        for runner in self.others.values():
            assert torch.equal(runner.last_tokens, self.runner.last_tokens)


class ProcessSoak(Soak):
    """Over `ranks`, which are processes."""

    def __init__(self, path: Path, seed: int, ranks: Ranks, **changes: Any) -> None:
        self.ranks = ranks
        super().__init__(path, seed, tp_size=ranks.comm.size, **changes)

    def load(self, config: EngineConfig, budget_bytes: int) -> ModelRunner:
        self.split = TensorParallelExecutor(config, ranks=self.ranks)
        return self.split.runner

    def leave(self) -> None:
        assert self.split is not None
        self.split.close()


class ReplicaSoak(Soak):
    """One of two replicas that share experts."""

    def __init__(self, path: Path, seed: int, replicas: TPGroup, **changes: Any) -> None:
        self.replicas = replicas
        super().__init__(path, seed, **changes)
        self._step, self._done = self.engine.step, False
        self.engine.step = self._step_of_all  # type: ignore[method-assign]

    def load(self, config: EngineConfig, budget_bytes: int) -> ModelRunner:
        return ModelRunner(config, tp=TPGroup(replicas=self.replicas), budget_bytes=budget_bytes)

    def leave(self) -> None:
        """Joins the steps of the other one until it has ended, too."""
        self._done = True
        while not self._meet(joins=True):
            pass

    def _step_of_all(self) -> Any:
        assert self.runner.lock_step is not None
        rounds = self.runner.lock_step.rounds
        deltas = self._step()
        self._meet(joins=self.runner.lock_step.rounds == rounds)
        return deltas

    def _meet(self, joins: bool) -> bool:
        if joins:
            self.runner.join()
        return bool(self.replicas.minimum(int(self._done)))


def soak_processes(name: str, steps: int, ranks: Ranks, checkpoints: CheckpointStore, **options: Any) -> dict[str, int]:
    soak = ProcessSoak(checkpoints[name].path, 3, ranks, **options)
    soak.run(steps)
    soak.leave()
    return _checked(soak, name, checkpoints)


def soak_ranks(name: str, steps: int, checkpoints: CheckpointStore, **options: Any) -> dict[str, int]:
    soak = RankSoak(checkpoints[name].path, 3, device="cpu", **options)
    soak.run(steps)
    soak.leave()
    return _checked(soak, name, checkpoints)


def soak_replicas(name: str, steps: int, checkpoints: CheckpointStore, **options: Any) -> list[dict[str, int]]:
    """The second replica has a quarter of the steps."""
    store, found, errors, path = dist.HashStore(), dict[int, Soak](), list[BaseException](), checkpoints[name].path

    def run(replica: int) -> None:
        try:
            group = TPGroup(replica, 2, Communicator(store, replica, 2, CPU))
            shared = {"device": "cpu", "dp_size": 2, "expert_parallel": True, **options}
            soak = ReplicaSoak(path, 5 + replica, group, **shared)
            soak.run(steps // (1 + 3 * replica))
            soak.leave()
            found[replica] = soak
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=run, args=(replica,), daemon=True) for replica in range(2)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) and not errors:
        threads[0].join(0.1)
        threads[1].join(0.1)
    if errors:
        raise errors[0]
    return [_checked(soak, name, checkpoints) for soak in found.values()]


def _checked(soak: Soak, name: str, checkpoints: CheckpointStore) -> dict[str, int]:
    for prompt, out in soak.random.sample(soak.greedy, min(CHECKED, len(soak.greedy))):
        check_greedy(out.token_ids, checkpoints[name].logits(prompt, out.token_ids), name)
    counters = soak.engine.counters()
    return {each: getattr(counters, each) for each in ("steps", "finished", "aborted", "retractions", "accepted")}
