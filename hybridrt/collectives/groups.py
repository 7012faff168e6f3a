"""Tensor-parallel ranks: which rank holds which shard, and their collectives."""

import ctypes
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hybridrt.base.device import is_capturing, synchronize, use_gpu
from hybridrt.base.errors import ConfigError, RankError
from hybridrt.channel.control import disown_in_child

if TYPE_CHECKING:
    from hybridrt.collectives.peer_memory import PeerMemory

OVERLAP_VARIABLE = "HYBRIDRT_OVERLAP_FROM"
OVERLAP_FROM = 0  # in line; from 2,048 tokens on, two H200 gain 1% (benchmarks/log/decode.md)
COLLECTIVE = timedelta(minutes=10)  # how long a rank waits for the others
CHECK = timedelta(milliseconds=200)  # time between checks of the other ranks
LEAVING_S = 5.0
MEETING_S = 300.0  # how long a rank waits at least until all have come: a store may wait longer
_POLL_S = 0.005
_OVERLAP = "hybridrt/overlap/tokens"


@dataclass
class PendingSum:
    """A sum over the ranks that runs next to what this rank computes until it needs the result.

    Attributes:
        x: becomes the sum.
        finish: makes later work of the current stream wait for it; None: it is there.
    """

    x: torch.Tensor
    finish: Callable[[], None] | None = None

    def result(self) -> torch.Tensor:
        finish, self.finish = self.finish, None
        if finish is not None:
            finish()
        return self.x


class Communicator:
    """Collectives of one group of processes: gloo in main memory, NCCL on GPUs.

    It is no process group of torch.distributed: a process may have others. All ranks construct it;
    the constructor returns when the last one has. It and every method raise RankError if a rank is lost.
    A constructor that raises has aborted what it made.

    Args:
        store: through which the processes find each other. Its time-out is how long a rank waits for the others,
            MEETING_S at least.
        device: this rank's. A GPU adds NCCL and becomes the process's current device.
        loopback: all ranks run on this host, and no connection listens on a network.
        check_ranks: called several times a second while this rank waits in main memory; raises if another
            rank is lost. None: nothing is checked.

    Attributes:
        overlap_from: rank 0's HYBRIDRT_OVERLAP_FROM, for all ranks; infinite for 0.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, device: torch.device, *, loopback: bool = True,
        check_ranks: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self.rank, self.size, self.device = rank, size, device
        self._check_ranks = check_ranks or (lambda: None)
        self._groups: dict[str, Any] = {}  # process groups by the type of their tensors' device
        self._aborting: threading.Thread | None = None  # started
        self._leaving = threading.Lock()  # who aborts or closes
        self._peers: PeerMemory | None = None
        self._loopback = loopback
        disown_in_child(self)
        if rank == 0:
            store.set(_OVERLAP, str(_overlap_from()))
        self.overlap_from = int(self._get(store, _OVERLAP)) or inf
        try:
            with _loopback_if(loopback):
                self._make_groups(store)
            self._check_ranks()
        except BaseException:
            self.abort()
            raise

    def _make_groups(self, store: dist.Store) -> None:
        # Gloo waits for the others for minutes without a look at them, so it begins when all are there.
        for rank in range(self.size):
            if rank == self.rank:
                store.set(f"hybridrt/here/{rank}", "1")
            self._get(store, f"hybridrt/here/{rank}")
        cpu = dist.PrefixStore("hybridrt/cpu", store)
        self._groups["cpu"] = dist.ProcessGroupGloo(cpu, self.rank, self.size, COLLECTIVE)
        if self.device.type == "cuda":
            use_gpu(self.device)
            cuda = dist.PrefixStore("hybridrt/cuda", store)
            # A sum next to a product would else wait for the product's last blocks.
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            self._groups["cuda"] = dist.ProcessGroupNCCL(cuda, self.rank, self.size, options)
            if self._loopback:
                from hybridrt.collectives import peer_memory  # needs Triton

                peers = dist.PrefixStore("hybridrt/peers", store)
                self._peers = peer_memory.PeerMemory.connect(
                    peers, self.rank, self.size, self.device, partial(self._get, peers)
                )

    def _get(self, store: dist.Store, key: str) -> bytes:
        """What another rank has set or will set. RankError if one is lost, or does not set it."""
        until = time.monotonic() + (seconds := max(MEETING_S, store.timeout.total_seconds()))  # type: ignore[attr-defined]
        with _lost_ranks():
            while not store.check([key]):  # `wait` could not be broken off
                self._check_ranks()
                if time.monotonic() > until:
                    raise RankError(f"the other ranks have not all come within {seconds:g} seconds ({key})")
                time.sleep(_POLL_S)
            return bytes(store.get(key))

    def connect(self) -> None:
        """Opens the connections among GPUs. All ranks call it.

        NCCL opens its own in its first collective, which waits for a lost rank for ever: `abort` ends only
        those that come later.
        """
        with _loopback_if(self._loopback):
            x = torch.zeros(1, dtype=torch.float32, device=self.device)
            self._sum(x, dist.ReduceOp.SUM)
            self.all_reduce(x)  # through the memory of peers
            self.barrier()

    def all_reduce(self, x: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
        """Reduces over the ranks, in place. Every rank gets the same bits."""
        if self._peers is not None and x.is_cuda and op == dist.ReduceOp.SUM and self._peers.serves(x):
            return self._peers.all_reduce(x)
        self._sum(x, op)
        return x

    def start_sum(self, x: torch.Tensor) -> PendingSum:
        """Sum over the ranks, in place, next to what this rank computes until it asks for the result."""
        options = dist.AllreduceOptions()
        options.asyncOp = True
        work = self._start(x, lambda group: group.allreduce([x], options))
        return PendingSum(x, lambda: self._finish(x, work))

    def sums_with_norm(self, x: torch.Tensor) -> bool:
        """Whether `sum_add_rms_norm` serves x [T, D]."""
        return self._peers is not None and x.is_cuda and self._peers.serves_norm(x)

    def sum_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`add_rms_norm` (hybridrt.kernels.dense.norm_activation) of the sum of x over the ranks, which
        `sums_with_norm`. residual has x's dtype."""
        if self._peers is None:
            raise RankError("this tensor-parallel group is closed; build a new LLM")
        return self._peers.sum_add_rms_norm(x, residual, weight, eps)

    def all_gather_last(self, x: torch.Tensor) -> torch.Tensor:
        """[..., n] of each rank to [..., size * n], in rank order."""
        found = x.new_empty((*x.shape[:-1], self.size * x.shape[-1]))
        parts = list(found.split(x.shape[-1], dim=-1))
        self._run(x, lambda group: group.allgather([parts], [x.contiguous()]))
        return found

    def all_to_all(self, x: torch.Tensor, sends: Sequence[int] = (), gets: Sequence[int] = ()) -> torch.Tensor:
        """Rows of x, `sends[r]` of them to rank r, in order; returns `gets[r]` rows from each rank r. (): as many
        to each."""
        found, options = x.new_empty((sum(gets) if gets else len(x), *x.shape[1:])), dist.AllToAllOptions()
        options.asyncOp = not x.is_cuda
        self._run(x, lambda group: group.alltoall_base(found, x.contiguous(), list(gets), list(sends), options))
        return found

    def gather_rows(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, D] of all ranks, in their order: [size * T, D]. All have as many rows."""
        if self._peers is not None and x.is_cuda and self._peers.serves_exchange(x):
            return self._peers.gather(x)
        return self.all_to_all(x.repeat(self.size, 1))

    def scatter_sum(self, y: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks of this rank's rows of y [size * T, D], in their order: [T, D]."""
        own = y[: len(y) // self.size]
        if self._peers is not None and y.is_cuda and y.is_contiguous() and self._peers.serves(own):
            return self._peers.scatter_sum(y)
        first, *others = self.all_to_all(y).chunk(self.size)
        total = first.float()
        for each in others:
            total += each
        return total.to(y.dtype)

    def barrier(self) -> None:
        """Returns when every rank has come and its launched work is done."""
        synchronize(self.device)
        self.all_reduce(torch.zeros(1, dtype=torch.float32))

    def abort(self) -> None:
        """Stops this rank's kernels that wait for another rank. Does not wait; any thread may call
        it."""
        with self._leaving:
            if self._peers is not None:
                self._peers.abort()
            nccl = self._groups.get("cuda")
            if nccl is not None and self._aborting is None:
                # NCCL returns once no graph exists that was captured with it.
                aborting = threading.Thread(target=nccl.abort, daemon=True)
                aborting.start()
                self._aborting = aborting

    def close(self) -> None:
        """Leaves the group, while no collective runs. May be repeated."""
        self.abort()
        if self._aborting is not None:
            self._aborting.join(LEAVING_S)
        with self._leaving:
            peers, self._groups, self._peers = self._peers, {}, None
        if peers is not None:
            # In a thread, because a device that hangs would keep this one for ever.
            leaving = threading.Thread(target=peers.close, daemon=True)
            leaving.start()
            leaving.join(LEAVING_S)

    def disown(self) -> None:
        """Never destroys the group: its destructor waits for threads, which may wait for a rank
        that does not answer, or do not exist in a forked child."""
        for group in self._groups.values():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        self._groups = {}

    def _sum(self, x: torch.Tensor, op: dist.ReduceOp.RedOpType) -> None:
        """`all_reduce` through gloo or NCCL."""
        options = dist.AllreduceOptions()
        options.reduceOp, options.asyncOp = dist.ReduceOp(op), not x.is_cuda  # NCCL runs in the current stream
        self._run(x, lambda group: group.allreduce([x], options))

    def _run(self, x: torch.Tensor, collective: Callable[[Any], dist.Work | None]) -> None:
        work = self._start(x, collective)
        if work is not None:  # NCCL in the current stream returns none
            self._finish(x, work)

    def _start(self, x: torch.Tensor, collective: Callable[[Any], Any]) -> Any:
        group = self._groups.get(x.device.type)
        if group is None:
            raise RankError("this tensor-parallel group is closed; build a new LLM")
        with _lost_ranks():
            return collective(group)

    def _finish(self, x: torch.Tensor, work: dist.Work) -> None:
        with _lost_ranks():
            work.wait() if x.is_cuda else self._wait(work)

    def _wait(self, work: dist.Work) -> None:
        """Checks meanwhile that the other ranks run."""
        while True:
            try:
                work.wait(CHECK)
                return
            except RuntimeError:
                if work.is_completed():  # it has failed, or ended just now
                    work.wait()
                    return
            self._check_ranks()


@contextmanager
def _lost_ranks() -> Iterator[None]:
    """Errors of torch.distributed as RankError."""
    try:
        yield
    except RuntimeError as e:
        raise e if isinstance(e, RankError) else RankError(f"a tensor-parallel rank was lost: {e}") from e


def _overlap_from() -> int:
    """The number of tokens in the environment, which rank 0 tells the other ranks, so that all sum the same
    pieces. ConfigError if it is no number."""
    text = os.environ.get(OVERLAP_VARIABLE, str(OVERLAP_FROM))
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise ConfigError(f"{OVERLAP_VARIABLE} is {text!r}; it must be a number of tokens such as 2048, or 0")
    return int(text)


class _Loopback:
    """While at least one thread is inside, the environment tells gloo and NCCL to use the loopback
    interface. The environment belongs to the process.
    """

    _names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")

    def __init__(self) -> None:
        self._lock, self._inside = threading.Lock(), 0
        self._found = dict[str, str | None]()

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._found = {name: os.environ.get(name) for name in self._names}
                names = (name for _, name in socket.if_nameindex() if name.startswith("lo"))  # macOS has "lo0"
                os.environ.update(dict.fromkeys(self._names, next(names, "lo")))
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            for name, value in () if self._inside else self._found.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value


_LOOPBACK = _Loopback()


def _loopback_if(loopback: bool) -> AbstractContextManager[None]:
    return _LOOPBACK if loopback else nullcontext()


@dataclass(frozen=True)
class TPGroup:
    """One rank's place in its tensor-parallel group; with size 1, collectives do nothing.

    Attributes:
        comm: None: the group only says what a rank holds.
        replicas: this rank among the same ranks of all replicas of the model, which share experts; None: it has
            all experts of its shard.
    """

    rank: int = 0
    size: int = 1
    comm: Communicator | None = None
    replicas: "TPGroup | None" = None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place."""
        return x if self.size == 1 else self._comm().all_reduce(x)

    def overlaps(self, x: torch.Tensor) -> bool:
        """Whether a block cuts its sum of x's rows into pieces that run next to products. Not in a
        graph, which is captured in parts: a sum would run from one into the next."""
        if self.comm is None or len(x) < self.comm.overlap_from:
            return False
        return not (x.is_cuda and is_capturing())

    def start_sum(self, x: torch.Tensor) -> PendingSum:
        """As of `Communicator`."""
        return self._comm().start_sum(x)

    def sums_with_norm(self, x: torch.Tensor) -> bool:
        """Whether `sum_add_rms_norm` serves x [T, D]: few rows, on GPUs that reach each other's memory."""
        return self.comm is not None and self.comm.sums_with_norm(x)

    def sum_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As of `Communicator`."""
        return self._comm().sum_add_rms_norm(x, residual, weight, eps)

    def all_gather_last(self, x: torch.Tensor) -> torch.Tensor:
        """[..., n] of each rank to [..., size * n], in rank order."""
        return x if self.size == 1 else self._comm().all_gather_last(x)

    def all_to_all(self, x: torch.Tensor, sends: Sequence[int] = (), gets: Sequence[int] = ()) -> torch.Tensor:
        """As of `Communicator`."""
        return self._comm().all_to_all(x, sends, gets)

    def gather_rows(self, x: torch.Tensor) -> torch.Tensor:
        """As of `Communicator`."""
        return self._comm().gather_rows(x)

    def scatter_sum(self, y: torch.Tensor) -> torch.Tensor:
        """As of `Communicator`."""
        return self._comm().scatter_sum(y)

    def maximum(self, value: int) -> int:
        return -self.minimum(-value)

    def minimum(self, value: int) -> int:
        return (
            value
            if self.size == 1
            else int(self._comm().all_reduce(torch.tensor(value, dtype=torch.int64), dist.ReduceOp.MIN))
        )

    def divide(self, what: str, count: int, shards: int | None = None) -> int:
        """How many of `count` things a rank holds, cut into `shards` (None: one for each rank).

        Raises:
            ConfigError: they cannot be cut so.
        """
        shards = self.size if shards is None else shards
        if self.size % shards:
            raise ConfigError(
                f"{count} {what} in {shards} shards cannot be held alike by tp_size={self.size} ranks; make tp_size a "
                f"divisor of {count} or a multiple of {shards}"
            )
        if count % shards:
            raise ConfigError(
                f"{count} {what} cannot be cut into {shards} equal shards for tp_size={self.size}; lower tp_size to a "
                f"divisor of {count}"
            )
        return count // shards

    def shard(self, x: torch.Tensor, dim: int, shards: int | None = None) -> torch.Tensor:
        """This rank's slice of `x` along `dim`. With fewer `shards` than ranks, neighbours share
        one."""
        shards = self.size if shards is None else shards
        width = self.divide("rows", x.shape[dim], shards)
        return x.narrow(dim, self.rank * shards // self.size * width, width)

    def _comm(self) -> Communicator:
        assert self.comm is not None, "a TPGroup without a Communicator computes nothing"
        return self.comm
