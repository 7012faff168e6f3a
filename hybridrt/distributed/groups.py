"""Tensor-parallel ranks: who holds which shard, and what the ranks say to each other."""

import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hybridrt.errors import ConfigError, RankError

CONNECTING = timedelta(minutes=5)
IDLE = timedelta(days=365)  # ranks wait for rank 0 as long as nobody has work for it
LEAVING_S = 5.0
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the same, renamed in torch 2.13
HEAD = 4096  # bytes of a message that travel at once; few steps need more


class Communicator:
    """Collectives of one group of processes: gloo for tensors in main memory, NCCL for those on a GPU.

    The group is its own: whatever else a process does with torch.distributed is not touched. All ranks construct it,
    and the last one releases the others. Every method raises RankError if a rank is gone.

    Args:
        store: what the processes find each other through.
        device: this rank's. A GPU adds NCCL and becomes the process's current device.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, device: torch.device) -> None:
        self.store, self.rank, self.size, self.device = store, rank, size, device
        self._group: dist.ProcessGroup | None = dist.ProcessGroup(dist.PrefixStore("hybridrt", store), rank, size)
        self._nccl: Any = None
        self._aborting: threading.Thread | None = None
        kinds = dist.ProcessGroup.BackendType
        gloo = dist.ProcessGroupGloo(dist.PrefixStore("hybridrt/cpu", store), rank, size, CONNECTING)
        gloo._set_default_timeout(IDLE)
        self._group._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
        if device.type == "cuda":
            torch.cuda.set_device(device)
            options = dist.ProcessGroupNCCL.Options()
            self._nccl = dist.ProcessGroupNCCL(dist.PrefixStore("hybridrt/cuda", store), rank, size, options)
            self._nccl._set_sequence_number_for_group()
            self._group._register_backend(torch.device("cuda"), kinds.NCCL, self._nccl)

    def all_reduce(self, x: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
        """Reduces over the ranks, in place. Every rank gets the same bits."""
        self._together(dist.all_reduce, x, op)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[...] of each rank to [size, ...]."""
        parts = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        self._together(_all_gather, parts, x.contiguous())
        return parts.view(self.size, *x.shape)

    def send(self, message: object) -> None:
        """From rank 0: every other rank `receive`s the message, which is pickled."""
        data = pickle.dumps(message)
        image = torch.frombuffer(bytearray(len(data).to_bytes(8, "little") + data).ljust(HEAD), dtype=torch.uint8)
        self._broadcast(image[:HEAD])
        if len(image) > HEAD:
            self._broadcast(image[HEAD:])

    def receive(self) -> Any:
        """What rank 0 sends next; waits for it."""
        head = torch.empty(HEAD, dtype=torch.uint8)
        self._broadcast(head)
        length = int.from_bytes(head[:8].numpy().tobytes(), "little")
        rest = torch.empty(max(8 + length - HEAD, 0), dtype=torch.uint8)
        if len(rest):
            self._broadcast(rest)
        return pickle.loads(torch.cat((head, rest))[8 : 8 + length].numpy().tobytes())

    def barrier(self) -> None:
        """Returns when every rank has come and what they launched is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.all_reduce(torch.zeros(1))

    def abort(self) -> None:
        """Kernels on this rank's GPU that wait for another rank give up; from any thread, and without waiting."""
        if self._nccl is not None and self._aborting is None:
            # NCCL returns once no graph exists that was captured with it, so somebody else waits for that.
            self._aborting = threading.Thread(target=self._nccl.abort, daemon=True)
            self._aborting.start()

    def close(self) -> None:
        """Leaves the group; nothing may be under way. Closing again does nothing."""
        self.abort()
        if self._aborting is not None:
            self._aborting.join(LEAVING_S)
        self._group = self._nccl = None

    def _broadcast(self, data: torch.Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._together(lambda group: group.broadcast([data], options).wait())

    def _together(self, collective: Callable[..., object], *args: object) -> None:
        if self._group is None:
            raise RankError("this tensor-parallel group is closed; build a new LLM")
        try:
            collective(*args, group=self._group)
        except RuntimeError as e:  # torch.distributed's own error is one
            raise RankError(f"a tensor-parallel rank was lost: {e}") from e


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
