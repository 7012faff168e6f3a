"""A tensor-parallel rank above 0: it builds the model that rank 0 builds and runs every step that rank 0 runs."""

import os
import sys
import threading
import traceback
from contextlib import suppress
from dataclasses import replace

import torch.distributed as dist

from hybridrt.distributed.groups import CONNECTING, Communicator, TPGroup
from hybridrt.errors import HybridrtError, RankError
from hybridrt.runtime.model_runner import ModelRunner
from hybridrt.runtime.ranks import LOST, failure_key, presence_key, rank_device
from hybridrt.runtime.step import StepPlan


def follow(comm: Communicator) -> int:
    """Serves rank 0 until it lets go; returns the exit status of this process.

    A failure ends the rank, which first says in the store why; one that is the loss of another rank is not worth it.
    """
    try:
        _serve(comm)
        return 0
    except RankError:
        return LOST
    except Exception as e:
        if not isinstance(e, HybridrtError):
            traceback.print_exc()
        with suppress(RuntimeError):  # rank 0 holds the store and may be gone
            comm.store.set(failure_key(comm.rank), f"{type(e).__name__}: {e}")
        return 1


def _serve(comm: Communicator) -> None:
    """A model's configuration, then its steps and tasks, then None; one model after the other; then None."""
    while (config := comm.receive()) is not None:
        runner = ModelRunner(replace(config, device=str(comm.device)), tp=TPGroup(comm.rank, comm.size, comm))
        while (message := comm.receive()) is not None:
            runner.launch(message) if isinstance(message, StepPlan) else message(runner)
        runner.graphs.clear()
        del runner
        comm.barrier()


def main() -> None:
    """The process that `hybridrt.runtime.ranks.start_ranks` starts."""
    threading.Thread(target=_end_with_rank_0, daemon=True).start()
    store, rank, size = next(dist.rendezvous("env://", timeout=CONNECTING))
    store.set(presence_key(rank), "")
    status = follow(Communicator(store, rank, size, rank_device(sys.argv[1])))
    sys.stdout.flush()
    os._exit(status)


def _end_with_rank_0() -> None:
    """Rank 0 holds the other end of standard input: its death is the end of this file, whatever this process does."""
    sys.stdin.buffer.read()
    os._exit(LOST)


if __name__ == "__main__":
    main()
