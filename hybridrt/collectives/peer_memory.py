"""Sums of few numbers over the GPUs of one host in one launch: ranks write each other's memory."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Self

import torch
import torch.distributed as dist
import triton.language as tl

from hybridrt.base.device import gpu_of, reaches, synchronize
from hybridrt.base.errors import RankError
from hybridrt.channel.codec import pack, unpack
from hybridrt.collectives.cuda_ipc import SharedBox, close_shared, open_shared, share
from hybridrt.collectives.peer_sum_triton import gather_kernel, scatter_sum_kernel, sum_add_norm_kernel, sum_kernel
from hybridrt.kernels.core.launch import next_power_of_2
from hybridrt.kernels.core.pdl_triton import pdl

logger = logging.getLogger(__name__)

BLOCK = 512  # words of a program
PROGRAMS = 1024  # all are resident at once: none waits for one that cannot start
MOST_BYTES = 4 * BLOCK * PROGRAMS
MOST_ROWS, ROW_WORDS = 256, 4096  # of sums with a norm; a program has a row
_NONE = "-"
SPINS = 1024  # looks at a box (a microsecond each) per look at main memory
DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


class PeerMemory:
    """The boxes of all ranks, as one rank sees them. All ranks make the same calls in the same order,
    each in one stream.

    Args:
        box: [words] int64 zeros of this rank.
        addresses: of each rank's box, on this rank's device or reachable from it.
        shared: the boxes of the other ranks, to close.
    """

    def __init__(
        self, box: torch.Tensor, addresses: Sequence[int], rank: int, shared: Mapping[int, SharedBox] | None = None
    ) -> None:
        self._box, self._rank, self._size, self._shared = box, rank, len(addresses), shared or {}
        self._pdl = pdl(box.device) if box.is_cuda else {"PDL": False}
        self._most = MOST_BYTES // max(1, self._size - 1)  # every rank sends to all others
        self._addresses = torch.tensor(addresses, dtype=torch.int64, device=box.device)
        self._epochs = torch.zeros(PROGRAMS + MOST_ROWS, dtype=torch.int32, device=box.device)
        self._stop = torch.zeros(1, dtype=torch.int32, pin_memory=box.is_cuda)

    @staticmethod
    def box_words(size: int) -> int:
        """Words of a rank's box among `size` ranks."""
        return 2 * size * (BLOCK * PROGRAMS + MOST_ROWS * ROW_WORDS)

    @classmethod
    def connect(
        cls, store: dist.Store, rank: int, size: int, device: torch.device, get: Callable[[str], bytes]
    ) -> Self | None:
        """Makes this rank's box and opens those of the others, which all call this. None if a GPU cannot
        reach the memory of another one: NCCL is used then, which can go through main memory.

        Args:
            get: of what the others set in `store`. RankError if a rank is lost.
        """
        box = torch.zeros(cls.box_words(size), dtype=torch.int64, device=device)
        synchronize(device)
        addresses, shared = [box.data_ptr()] * size, dict[int, SharedBox]()
        try:
            store.set(f"box/{rank}", pack(share(box)).hex())
        except RankError:
            store.set(f"box/{rank}", _NONE)
        found = [get(f"box/{peer}").decode() for peer in range(size)]
        reached = _NONE not in found
        for peer in {*range(size)} - {rank} if reached else ():
            other = unpack(bytes.fromhex(found[peer]), SharedBox)
            address = _open(other, peer, device) if reached else None
            reached = address is not None
            if address is not None:
                addresses[peer], shared[peer] = address, other
        peers = cls(box, addresses, rank, {addresses[peer]: other for peer, other in shared.items()})
        # All ranks decide alike: each reads whether all others reach all boxes.
        store.set(f"reach/{rank}", "1" if reached else _NONE)
        try:
            if all(get(f"reach/{peer}") == b"1" for peer in range(size)):
                return peers
        except BaseException:
            peers.close()
            raise
        peers.close()
        logger.warning("%s and the GPUs of the other ranks do not all reach each other's memory: sums use NCCL", device)
        return None

    def serves(self, x: torch.Tensor) -> bool:
        """Whether a sum of these numbers is faster here than through NCCL."""
        nbytes = x.numel() * x.element_size()
        return x.dtype in DTYPES and nbytes % 4 == 0 and 0 < nbytes <= self._most and x.is_contiguous()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place, in the current stream. Every rank gets the same bits."""
        words = x.view(-1).view(torch.int32)
        sum_kernel[-(-len(words) // BLOCK),](
            words, self._addresses, self._epochs, self._stop, len(words), RANK=self._rank, SIZE=self._size,
            ROOM=BLOCK * PROGRAMS, DTYPE=DTYPES[x.dtype], BLOCK=BLOCK, SPINS=SPINS, num_warps=4, **self._pdl,
        )  # fmt: skip
        return x

    def serves_exchange(self, x: torch.Tensor) -> bool:
        """Whether `gather` takes x [T, bytes], and `scatter_sum` size times as much."""
        return x.nbytes % 4 == 0 and 0 < x.nbytes <= self._most and x.is_contiguous()

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, D] of all ranks, in their order: [size * T, D]."""
        out, words = x.new_empty(self._size * len(x), *x.shape[1:]), x.view(-1).view(torch.int32)
        gather_kernel[-(-len(words) // BLOCK),](
            words, out.view(-1).view(torch.int32), self._addresses, self._epochs, self._stop, len(words),
            RANK=self._rank, SIZE=self._size, ROOM=BLOCK * PROGRAMS, BLOCK=BLOCK, SPINS=SPINS, num_warps=4, **self._pdl,
        )  # fmt: skip
        return out

    def scatter_sum(self, y: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks of this rank's rows of y [size * T, D]: [T, D]."""
        out, words = y.new_empty(len(y) // self._size, *y.shape[1:]), y.view(-1).view(torch.int32)
        each = len(words) // self._size
        scatter_sum_kernel[-(-each // BLOCK),](
            words, out.view(-1).view(torch.int32), self._addresses, self._epochs, self._stop, each, RANK=self._rank,
            SIZE=self._size, ROOM=BLOCK * PROGRAMS, DTYPE=DTYPES[y.dtype], BLOCK=BLOCK, SPINS=SPINS, num_warps=4,
            **self._pdl,
        )  # fmt: skip
        return out

    def serves_norm(self, x: torch.Tensor) -> bool:
        """Whether `sum_add_rms_norm` takes x [T, D]."""
        rows, width = x.shape
        fits = 0 < rows <= MOST_ROWS and width % 2 == 0 and width <= 2 * ROW_WORDS
        return fits and x.dtype in (torch.bfloat16, torch.float16) and x.is_contiguous()

    def sum_add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`add_rms_norm` of the sum of x over the ranks, in one launch and with the same bits. Overwrites
        residual, which has x's dtype."""
        rows, width = x.shape
        out, block = torch.empty_like(x), next_power_of_2(width // 2)
        sum_add_norm_kernel[rows,](
            x.view(torch.int32), residual.view(torch.int32), weight, out.view(torch.int32), self._addresses,
            self._epochs[PROGRAMS:], self._stop, residual.stride(0) // 2, eps, RANK=self._rank, SIZE=self._size,
            FIRST=2 * self._size * BLOCK * PROGRAMS, ROOM=MOST_ROWS * ROW_WORDS, ROW=ROW_WORDS, WIDTH=width // 2,
            DTYPE=DTYPES[x.dtype], BLOCK=block, SPINS=SPINS, num_warps=min(max(block // 256, 1), 16), **self._pdl,
        )  # fmt: skip
        return out, residual

    def abort(self) -> None:
        """Ends kernels that wait for another rank. What they and later ones write is garbage."""
        self._stop.fill_(1)

    def close(self) -> None:
        """Waits for this rank's kernels, and unmaps the boxes of the other ranks."""
        synchronize(self._box.device)
        for address, box in self._shared.items():
            close_shared(address, box)
        self._shared = {}


def _open(box: SharedBox, rank: int, device: torch.device) -> int | None:
    """The address of another rank's box for this device. None, and the log says why, if it cannot be mapped: the other
    ranks wait for an answer."""
    number = gpu_of(box.gpu)
    if number is None or not reaches(device, number):
        return None
    try:
        return open_shared(box)
    except RankError as e:
        logger.warning("%s cannot map the memory of rank %d: %s", device, rank, e)
        return None
