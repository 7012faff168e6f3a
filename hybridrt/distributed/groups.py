"""Tensor-parallel ranks: which rank holds which shard, and the collectives in which ranks exchange tensors."""

import ctypes
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hybridrt.distributed.control import disown_in_child
from hybridrt.errors import ConfigError, RankError

COLLECTIVE = timedelta(minutes=10)  # how long a rank waits in a collective for the others
CHECK = timedelta(milliseconds=200)  # how often it looks meanwhile whether they still run
LEAVING_S = 5.0
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the same, renamed in torch 2.13


class Communicator:
    """Collectives of one group of processes: gloo for tensors in main memory, NCCL for those on a GPU.

    The group is its own: whatever else a process does with torch.distributed is not touched. All ranks construct it,
    and the last one releases the others. Every method raises RankError if a rank is gone.

    Args:
        store: what the processes find each other through.
        device: this rank's. A GPU adds NCCL and becomes the process's current device.
        loopback: all ranks run on this host: no connection of theirs listens on a network.

    Attributes:
        check: called now and then while this rank waits for the others in main memory; raises if one is gone.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, device: torch.device, *, loopback: bool = True) -> None:
        self.rank, self.size, self.device = rank, size, device
        self.check: Callable[[], None] = lambda: None
        self._group: dist.ProcessGroup | None = dist.ProcessGroup(dist.PrefixStore("hybridrt", store), rank, size)
        self._nccl: Any = None
        self._aborting: threading.Thread | None = None
        self._loopback = loopback
        disown_in_child(self)
        with _interface(loopback):
            gloo = dist.ProcessGroupGloo(dist.PrefixStore("hybridrt/cpu", store), rank, size, COLLECTIVE)
            self._group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
            if device.type == "cuda":
                self._add_nccl(store)

    def _add_nccl(self, store: dist.Store) -> None:
        torch.cuda.set_device(self.device)
        options = dist.ProcessGroupNCCL.Options()
        self._nccl = dist.ProcessGroupNCCL(dist.PrefixStore("hybridrt/cuda", store), self.rank, self.size, options)
        self._nccl._set_sequence_number_for_group()
        assert self._group is not None
        self._group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, self._nccl)

    def connect(self) -> None:
        """Opens the connections among GPUs, which NCCL does with the first collective. All ranks call it."""
        with _interface(self._loopback):
            self.all_reduce(torch.zeros(1, device=self.device))
            self.barrier()

    def all_reduce(self, x: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
        """Reduces over the ranks, in place. Every rank gets the same bits."""
        self._together(dist.all_reduce, x, x, op)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[...] of each rank to [size, ...]."""
        parts = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        self._together(_all_gather, x, parts, x.contiguous())
        return parts.view(self.size, *x.shape)

    def barrier(self) -> None:
        """Returns when every rank has come and what they launched is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.all_reduce(torch.zeros(1))

    def abort(self) -> None:
        """Kernels on this rank's GPU that wait for another rank give up; from any thread, and without waiting."""
        if self._nccl is not None and self._aborting is None:
            # NCCL returns once no graph exists that was captured with it, so the exit hook waits for that.
            self._aborting = threading.Thread(target=self._nccl.abort, daemon=True)
            self._aborting.start()

    def close(self) -> None:
        """Leaves the group; nothing may be under way. Closing again does nothing."""
        self.abort()
        if self._aborting is not None:
            self._aborting.join(LEAVING_S)
        self._group = self._nccl = None

    def forsake(self) -> None:
        """Never destroys the group: its destructor waits for threads, which may wait for a rank that does not answer,
        or which a forked child does not have."""
        for held in filter(None, (self._group, self._nccl)):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(held))
        self._group = self._nccl = None

    def disown(self) -> None:
        """In a forked child."""
        self.forsake()

    def _together(self, collective: Callable[..., Any], x: torch.Tensor, *args: object) -> None:
        """Runs a collective on tensors that lie where `x` does."""
        if self._group is None:
            raise RankError("this tensor-parallel group is closed; build a new LLM")
        try:
            if x.is_cuda:
                collective(*args, group=self._group)
            else:
                self._wait(collective(*args, group=self._group, async_op=True))
        except RuntimeError as e:  # torch.distributed's own error is one
            raise e if isinstance(e, RankError) else RankError(f"a tensor-parallel rank was lost: {e}") from e

    def _wait(self, work: dist.Work) -> None:
        """Waits for a collective in main memory, and meanwhile looks after the other ranks."""
        while True:
            try:
                work.wait(CHECK)
                return
            except RuntimeError:
                if work.is_completed():  # it has failed, or ended just now
                    work.wait()
                    return
            self.check()


@contextmanager
def _interface(loopback: bool) -> Iterator[None]:
    """What gloo and NCCL are told about interfaces, where all ranks run on this host. Both read the environment."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if loopback else ()
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, _loopback_interface()))
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _loopback_interface() -> str:
    """Its name: "lo" on Linux, "lo0" on other systems."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")


@dataclass(frozen=True)
class TPGroup:
    """One rank's place in its tensor-parallel group; size 1 is the plain case, in which collectives do nothing.

    Attributes:
        comm: None says what a rank holds, and no more.
    """

    rank: int = 0
    size: int = 1
    comm: Communicator | None = None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place."""
        return x if self.size == 1 else self._comm().all_reduce(x)

    def all_gather_last(self, x: torch.Tensor) -> torch.Tensor:
        """[..., n] of each rank to [..., size * n], in rank order."""
        return x if self.size == 1 else self._comm().all_gather(x).movedim(0, -2).flatten(-2)

    def minimum(self, value: int) -> int:
        """The smallest of the ranks' integers."""
        return value if self.size == 1 else int(self._comm().all_reduce(torch.tensor(value), dist.ReduceOp.MIN))

    def divide(self, what: str, count: int, shards: int | None = None) -> int:
        """How many of `count` things a rank holds when they are cut into `shards` (None: one for each rank).

        Raises:
            ConfigError: they cannot be cut so.
        """
        shards = self.size if shards is None else shards
        if count % shards or self.size % shards:
            raise ConfigError(
                f"{count} {what} cannot be cut into {shards} equal shards for tp_size={self.size}; lower tp_size to a "
                f"divisor of {count}"
            )
        return count // shards

    def shard(self, x: torch.Tensor, dim: int, shards: int | None = None) -> torch.Tensor:
        """This rank's slice of a whole tensor along `dim`. With fewer `shards` than ranks, neighbours share one."""
        shards = self.size if shards is None else shards
        width = self.divide("rows", x.shape[dim], shards)
        return x.narrow(dim, self.rank * shards // self.size * width, width)

    def _comm(self) -> Communicator:
        assert self.comm is not None, "a TPGroup without a Communicator computes nothing"
        return self.comm
