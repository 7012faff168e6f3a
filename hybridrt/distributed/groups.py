"""Tensor-parallel ranks: who holds which shard, and the two collectives that layers use."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hybridrt.errors import ConfigError


@dataclass(frozen=True)
class TPGroup:
    """One rank's view of its tensor-parallel group; size 1 is the plain case, in which collectives do nothing."""

    rank: int = 0
    size: int = 1
    process_group: Any = None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(x, group=self.process_group)
        return x

    def all_gather_last(self, x: torch.Tensor) -> torch.Tensor:
        """[..., n] of each rank to [..., size * n], in rank order."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.process_group)
        return torch.cat(parts, dim=-1)

    def shard(self, x: torch.Tensor, dim: int, shards: int | None = None) -> torch.Tensor:
        """This rank's slice of a whole tensor along `dim`. With fewer `shards` than ranks, neighbours share one."""
        shards = self.size if shards is None else shards
        if shards == 1:
            return x
        if x.shape[dim] % shards or self.size % shards:
            raise ConfigError(f"{x.shape[dim]} rows cannot be cut into {shards} shards over {self.size} ranks")
        width = x.shape[dim] // shards
        return x.narrow(dim, self.rank * shards // self.size * width, width)
