"""How many tokens each rank's experts have computed, as the routers count them on the device."""

import torch
from torch import Tensor

from hybridrt.base.device import SideStream
from hybridrt.layers.moe import experts_of
from hybridrt.models.base import CausalLM


class ExpertLoads:
    """Every rank counts the tokens of all ranks of its replica, so one rank's counts say all."""

    def __init__(self, model: CausalLM) -> None:
        replicas = model.tp.replicas
        found = [each for each in experts_of(model) if replicas is None or each.exchange is not None]
        self._shares = [experts.share for experts in found if experts.share is not None]
        self._side = SideStream(model.device)
        self._ranks = model.tp.size * (1 if replicas is None else replicas.size)
        for load in self._loads():
            load.zero_()  # of steps that the start has run

    def read(self) -> list[list[int]]:
        """[layers][ranks] tokens of this replica that each rank's experts compute, counted once for each
        expert; [] without `expert_parallel`. Waits for no step."""
        with self._side.next_to_current():
            totals = [load.unflatten(0, (self._ranks, -1)).sum(-1) for load in self._loads()]
            return torch.stack(totals).tolist() if totals else []

    def _loads(self) -> list[Tensor]:
        return [share.load for share in self._shares if share.load is not None]
