"""Embeddings of spans in main memory, on one rank: copies from and to the device."""

import numpy as np
import torch

from hybridrt.base.device import SideStream
from hybridrt.runtime.run.host_copies import check_host_memory, pinned_rows, runs_of

OPTION = "encoder_host_tokens"


class HostEmbeddings:
    """Rows [num_rows, hidden], page-locked for a GPU. Copies from the device run next to later steps.

    Raises:
        MemoryBudgetError: there is not so much free main memory.
    """

    def __init__(self, num_rows: int, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        check_host_memory(num_rows * hidden * dtype.itemsize, OPTION)
        self._rows = pinned_rows(num_rows, hidden * dtype.itemsize, device, OPTION).view(dtype)
        self._device, self._side = device, SideStream(device)

    def keep(self, embeddings: torch.Tensor, rows: np.ndarray) -> None:
        """[n, hidden] on the device to `rows` [n]. The host does not wait."""
        with self._side.after_current():
            for run in runs_of(rows.tolist()):
                self._rows[run.host].copy_(embeddings[run.staged], non_blocking=True)
        self._side.uses(embeddings)

    def fetch(self, rows: np.ndarray) -> torch.Tensor:
        """[n, hidden] on the device, after all that was kept. The host does not wait."""
        self._side.join()
        found = torch.empty((len(rows), self._rows.shape[1]), dtype=self._rows.dtype, device=self._device)
        for run in runs_of(rows.tolist()):
            found[run.staged].copy_(self._rows[run.host], non_blocking=True)
        return found
