"""A model over several processes of the host engine, each with a part of it."""

import torch
from torch import distributed

from hybridrt.base.config_json import check_fields, integer
from hybridrt.base.device import resolve_device
from hybridrt.base.errors import ConfigError, shown
from hybridrt.collectives.groups import Communicator, TPGroup


def join_ranks(
    store: distributed.Store, rank: int, size: int, *, device: str = "auto", loopback: bool = False
) -> TPGroup:
    """This process's place among `size`, for `load`. Returns when all have called it. The group is apart
    from torch.distributed's own.

    Args:
        store: through which the processes find each other, such as a TCPStore or a PrefixStore of one.
        device: this process's own, such as "cuda:1"; `EngineConfig.device` has to be the same.
        loopback: all processes run on this host: their connections then listen on no network, and sums
            of few numbers go through the memory of the other GPUs.

    Raises:
        ConfigError: an argument has the wrong kind or size.
        DeviceError: there is no such device.
        RankError: another process was lost, or did not come within the store's time-out, five minutes at least.
    """
    if not isinstance(store, distributed.Store):
        raise ConfigError(f"store is {shown(store)}; it must be a torch.distributed.Store")
    check_fields({"size": size}, {"size": integer(1, 2**16)})
    check_fields({"rank": rank}, {"rank": integer(0, size - 1)})
    found = resolve_device(device)
    if found.type == "cuda" and found.index is None:
        found = torch.device("cuda", 0)
    comm = Communicator(distributed.PrefixStore("hybridrt/embedding", store), rank, size, found, loopback=loopback)
    comm.connect()
    return TPGroup(rank, size, comm)
