"""The prefix cache's tier in main memory, on one rank: KV pages, states, and their copies."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple

import torch

from hybridrt.base.device import DeviceEvent, SideStream, page_lock, record_event, wait_in_stream
from hybridrt.base.errors import MemoryBudgetError
from hybridrt.mem_cache.pools.host_plan import STAGED_BYTES, HostPlan, aligned
from hybridrt.mem_cache.pools.pools import Pools
from hybridrt.runtime.load.host_memory import free_host_memory
from hybridrt.runtime.step.plan import HostCopy, HostState

OPTION = "host_cache_bytes"


class ImageRun(NamedTuple):
    """Images that are neighbours: their rows in the staging buffer, and those in main memory."""

    staged: slice
    host: slice


class HostCopies:
    """Page and state buffers in main memory, pinned for a GPU, and copies between them and the
    pools.

    A page's image has its keys and values in every layer; a state's image is what the state pool
    exports. Copies run in order, on a stream that starts after the steps launched before them. A
    later step waits for them only if `StepPlan.after_copies` names them.

    Raises:
        MemoryBudgetError: there is not so much free main memory.
    """

    def __init__(self, pools: Pools, plan: HostPlan, device: torch.device) -> None:
        check_host_memory(plan.nbytes, OPTION)
        self._kv, self._mamba, self._device = pools.kv, pools.req_to_token.mamba_pool, device
        self._shared = pools.shared
        self._pages = [pinned_rows(plan.num_pages + 1, nbytes, device, OPTION) for nbytes in plan.page_bytes]
        self._states = pinned_rows(plan.num_states + 1, plan.state_bytes, device, OPTION)
        self._at_once = [max(STAGED_BYTES // nbytes, 1) for nbytes in plan.page_bytes]
        sizes = [count * nbytes for count, nbytes in zip(self._at_once, plan.page_bytes)]
        self._staged_pages = torch.empty(max(sizes, default=0), dtype=torch.uint8, device=device)
        self._staged_state = torch.empty(plan.state_bytes, dtype=torch.uint8, device=device)
        self._side = SideStream(device)
        self._running: dict[int, DeviceEvent] = {}  # copies by ticket, those that may not have ended

    @torch.inference_mode()
    def launch(self, copies: Sequence[HostCopy]) -> None:
        """Queues copies, in order of their tickets."""
        if not copies:
            return
        with self._side.after_current():
            for copy in copies:
                self._copy(copy)
                self._running[copy.ticket] = record_event(self._device)

    def wait(self, ticket: int) -> None:
        """Makes the current stream wait for the copies up to `ticket`. The host does not wait."""
        last = max((number for number in self._running if number <= ticket), default=None)
        if last is not None and not self.copied(last):
            wait_in_stream(self._running[last], self._device)

    def copied(self, ticket: int) -> bool:
        """Whether a launched copy has ended."""
        event = self._running.get(ticket)
        if event is None or not event.query():
            return event is None
        for number in [number for number in self._running if number <= ticket]:
            del self._running[number]  # copies run in order
        return True

    def _copy(self, copy: HostCopy) -> None:
        if self._shared is not None:
            self._shared.clear(copy.cleared)
        for group, (pages, places) in enumerate(zip(copy.pages, copy.host_pages)):
            for start in range(0, len(pages), self._at_once[group]):
                part = slice(start, start + self._at_once[group])
                self._copy_pages(group, pages[part], places[part], copy.fetch)
        for state in copy.states:
            self._copy_state(state, copy.fetch)

    def _copy_pages(self, group: int, pages: Sequence[int], places: Sequence[int], fetch: bool) -> None:
        host, index = self._pages[group], self._indices(pages)
        staged = self._staged_pages[: len(pages) * host.shape[1]].view(len(pages), -1)
        runs = list(runs_of(places))
        if fetch:
            for run in runs:
                staged[run.staged].copy_(host[run.host], non_blocking=True)
        for tensor, image in self._page_images(group, staged):
            if fetch:
                tensor.index_copy_(1, index, image.transpose(0, 1))
            else:
                image.copy_(tensor[:, index].transpose(0, 1))
        if not fetch:
            for run in runs:
                host[run.host].copy_(staged[run.staged], non_blocking=True)

    def _page_images(self, group: int, staged: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Tensors of a page group in KVPool, and views [n, layers, page_size, heads, dim] of the
        staged pages."""
        start = 0
        for tensor, its_group in zip(self._kv.tensors, self._kv.tensor_groups):
            if its_group == group:
                shape = tensor.shape[0], *tensor.shape[2:]
                end = start + prod(shape) * tensor.element_size()
                yield tensor, staged[:, start:end].view(tensor.dtype).view(len(staged), *shape)
                start = end

    def _copy_state(self, state: HostState, fetch: bool) -> None:
        assert self._mamba is not None
        if fetch:
            self._staged_state.copy_(self._states[state.place], non_blocking=True)
            self._mamba.write_slot(state.slot, state.length, self._state_images())
            return
        for part, image in zip(self._mamba.read_slot(state.slot, state.length), self._state_images(), strict=True):
            image.copy_(part)
        self._states[state.place].copy_(self._staged_state, non_blocking=True)

    def _state_images(self) -> Iterator[torch.Tensor]:
        assert self._mamba is not None
        start = 0
        for part in self._mamba.slot_parts():
            nbytes = prod(part.shape) * part.dtype.itemsize
            yield self._staged_state[start : start + nbytes].view(part.dtype).view(part.shape)
            start += aligned(nbytes)

    def _indices(self, pages: Sequence[int]) -> torch.Tensor:
        """Pinned: other copies to the device wait for the stream."""
        index = torch.tensor(pages, dtype=torch.int64)
        return index if self._device.type == "cpu" else index.pin_memory().to(self._device, non_blocking=True)


def check_host_memory(nbytes: int, option: str) -> None:
    """MemoryBudgetError unless there is so much free main memory for `option`."""
    if nbytes > (free := free_host_memory()):
        raise MemoryBudgetError(
            f"{option} asks for {nbytes} bytes of main memory on this rank; {free} are free: lower it"
        )


def pinned_rows(entries: int, nbytes: int, device: torch.device, option: str) -> torch.Tensor:
    """[entries, nbytes] uint8, page-locked for a GPU. torch's pinned memory comes in powers of two.
    MemoryBudgetError names `option`."""
    buffer = torch.zeros((entries, nbytes), dtype=torch.uint8)  # page faults happen here
    if device.type == "cuda" and buffer.numel() and (status := page_lock(buffer)):
        raise MemoryBudgetError(
            f"{buffer.numel()} bytes of main memory cannot be page-locked (CUDA error {status}): lower {option}, or "
            "raise the limit on locked memory (ulimit -l)"
        )
    return buffer


def runs_of(places: Sequence[int]) -> Iterator[ImageRun]:
    """Groups `places` into runs of neighbours: each with its slice of the list, and of the buffer in main memory."""
    starts = [0, *(i for i, (a, b) in enumerate(pairwise(places), 1) if b != a + 1), len(places)]
    for start, end in pairwise(starts):
        yield ImageRun(slice(start, end), slice(places[start], places[start] + end - start))
