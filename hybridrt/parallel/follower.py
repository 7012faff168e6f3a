"""A tensor-parallel rank above 0: builds rank 0's model and runs every step that rank 0 runs."""

import os
import queue
import shutil
import sys
import threading
import traceback
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from hybridrt.base.engine_config import EngineConfig
from hybridrt.base.errors import HybridrtError, MessageError, PeerGoneError, RankError
from hybridrt.base.plugins import load_object
from hybridrt.base.turns import undisturbed
from hybridrt.channel.codec import pack
from hybridrt.channel.control import BEATS, Link, rank_timeout
from hybridrt.collectives.groups import Communicator, TPGroup
from hybridrt.parallel.expert_ranks import ExpertPlace
from hybridrt.parallel.messages import RankBeat, RankFailed, decode
from hybridrt.parallel.rank_start import RankPlace, find_place, rank_device, start_gpu
from hybridrt.parallel.ranks import ENDED_WITH_ANOTHER
from hybridrt.parallel.tasks import DropTask, MaskTask
from hybridrt.runtime.load.start_kernels import StartAhead
from hybridrt.runtime.run.launched_step import LaunchedStep
from hybridrt.runtime.run.model_runner import ModelRunner
from hybridrt.runtime.step.plan import StepPlan


class Leader:
    """Rank 0, as the other ranks see it. This process ends when rank 0 is gone.

    Args:
        directory: where the ranks found each other; removed here if rank 0 could not.

    Attributes:
        leaving: rank 0 may end before this process does.
    """

    def __init__(self, link: Link, directory: str | None = None) -> None:
        self._link, self._directory, self._interval = link, directory, rank_timeout() / BEATS
        self._inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.leaving = False
        threading.Thread(target=self._receive_tasks, daemon=True).start()

    def receive(self) -> Any:
        """Waits for rank 0's next message. MessageError if it is unknown."""
        return decode(self._inbox.get())

    def report(self, error: Exception) -> None:
        with suppress(PeerGoneError):
            self._link.send(pack(RankFailed(f"{type(error).__name__}: {error}"[:10_000])))

    def _receive_tasks(self) -> None:
        try:
            self._link.listen_and_beat(pack(RankBeat()), self._interval, self._inbox.put)
        except PeerGoneError:
            if self.leaving:
                return
            if self._directory is not None:
                shutil.rmtree(self._directory, ignore_errors=True)
            os._exit(ENDED_WITH_ANOTHER)


def serve(place: RankPlace, rank: int, size: int, device: torch.device, ahead: StartAhead | None) -> int:
    """Joins the other ranks and serves rank 0 until it ends the service. Returns the exit status.

    A rank that fails reports why, unless the cause is the loss of another rank.
    """
    failure: Exception | None = None
    try:
        start_gpu(device)
    except Exception as e:  # rank 0 hears of it as soon as there is a connection
        failure = e
    leader = Leader(place.join(rank), place.directory)
    try:
        if failure is not None:
            raise failure
        comm = place.communicator(rank, size, device)
        with undisturbed():  # a script follows under torchrun
            comm.connect()
            _serve(leader, comm, ahead)
            comm.close()
        return 0
    except RankError:
        return ENDED_WITH_ANOTHER
    except Exception as e:
        if not isinstance(e, HybridrtError):
            traceback.print_exc()
        leader.report(e)
        return 1


def _serve(leader: Leader, comm: Communicator, ahead: StartAhead | None) -> None:
    """Gets, for each model, its configuration, steps and tasks, and None. None ends the service. Before a
    configuration comes where replicas meet, if they share experts."""
    experts: ExpertPlace | None = None
    while (config := leader.receive()) is not None:
        if isinstance(config, ExpertPlace):
            experts = config
            continue
        if not isinstance(config, EngineConfig):
            raise MessageError(f"rank 0 sent {type(config).__name__} where a configuration belongs")
        config = replace(config, device=str(comm.device))
        replicas = None if experts is None else experts.connect(config, comm.rank, comm.device)
        experts = None
        tp = TPGroup(comm.rank, comm.size, comm, replicas)
        runner = ModelRunner(config, tp=tp, ahead=ahead)
        _run_tasks(leader, runner)
        runner.drop_graphs()
        del runner
        comm.barrier()
    leader.leaving = True


def _run_tasks(leader: Leader, runner: ModelRunner) -> None:
    """Runs the tasks of rank 0 until it sends None. Masks belong to the last launched step."""
    step = LaunchedStep()
    while (message := leader.receive()) is not None:
        if isinstance(message, StepPlan):
            step = runner.launch(message)
        elif isinstance(message, MaskTask):
            step.sample(message.masks())
        elif isinstance(message, DropTask):
            step.drop()
        else:
            message(runner)


def main(directory: str, rank: int, size: int, kind: str, ahead: str | None) -> None:
    """The process that `hybridrt.parallel.rank_start.start_ranks` starts, by `rank_process.py`."""
    try:
        found = None if ahead is None else load_object(ahead)
        status = serve(find_place(directory), rank, size, rank_device(kind, rank), found)
    except (PeerGoneError, FileNotFoundError):  # rank 0 ended while this process started
        status = ENDED_WITH_ANOTHER
    sys.stdout.flush()
    os._exit(status)
