"""The ranks of other replicas that share experts with this one."""

import torch
import torch.distributed as dist

from hybridrt.base.engine_config import EngineConfig
from hybridrt.channel.codec import Message
from hybridrt.collectives.groups import Communicator, TPGroup
from hybridrt.parallel.rank_start import find_place


class ExpertPlace(Message):
    """Where replicas that share the experts of a model find each other.

    Attributes:
        directory: where the front's ranks meet (RankPlace.directory).
        replica: number of this one, from 0.
    """

    directory: str
    replica: int

    def connect(self, config: EngineConfig, rank: int, device: torch.device) -> TPGroup:
        """Tensor-parallel rank `rank` of this replica among those of all replicas, which call this
        too."""
        store = dist.PrefixStore(f"hybridrt/experts/{rank}", find_place(self.directory).store)
        comm = Communicator(store, self.replica, config.dp_size, device)
        comm.connect()
        return TPGroup(self.replica, config.dp_size, comm)


def expert_split(config: EngineConfig) -> TPGroup:
    """The split of a model, as `load_target` takes it: which part is on the first rank."""
    shared = config.expert_parallel and config.dp_size > 1
    return TPGroup(size=config.tp_size, replicas=TPGroup(size=config.dp_size) if shared else None)
