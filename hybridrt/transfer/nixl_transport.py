"""Reads arenas of other workers through NIXL (https://github.com/ai-dynamo/nixl) and UCX.

UCX uses RDMA where there is hardware for it, else TCP or shared memory. Arenas are in GPU memory,
or in host memory without a GPU.
"""

import logging
import uuid
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import torch

from hybridrt.base.errors import ConfigError, ProviderNotInstalledError, TransferError
from hybridrt.mem_cache.pools.state_slices import RangeRead

# Metadata of an agent; address, device and kind of memory of its arena.
_Description = tuple[bytes, int, int, Literal["DRAM", "VRAM"]]


class NixlTransport:
    """A rank's NIXL agent and its registered arena. Reads are one-sided: the other side need not
    help.

    Args:
        serve: others read the arena. A thread of NIXL then keeps a core busy, for networks whose
            hardware cannot read memory by itself.
        devices: network devices of UCX, as in UCX_NET_DEVICES ("lo", "mlx5_0:1,eth0"); "": UCX's
            choice, all of them unless this variable says otherwise.

    Raises:
        ProviderNotInstalledError: NIXL is not installed or cannot be loaded here; says why.
        ConfigError: UCX cannot use these devices.
    """

    def __init__(self, buffer: torch.Tensor, serve: bool, devices: str = "") -> None:
        api = _load()
        name = f"hybridrt-{uuid.uuid4().hex[:12]}"
        self._agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=serve, backends=[]))
        try:
            self._agent.create_backend("UCX", {"engine_config": f"NET_DEVICES={devices}"} if devices else {})
        except Exception as e:  # NIXL's own errors share no base class
            raise ConfigError(f"NIXL cannot start UCX on {devices or 'its devices'}: {type(e).__name__}: {e}") from e
        self._memory = "VRAM" if buffer.is_cuda else "DRAM"
        self._device = buffer.device.index or 0
        self._buffer = buffer  # its memory must outlive its registration
        self._base = buffer.data_ptr()
        region = (self._base, buffer.numel(), self._device, "")
        self._registered = self._agent.register_memory([region], self._memory)
        self._peers: dict[str, tuple[int, int, str]] = {}

    def describe(self) -> str:
        """What a peer needs to read our arena, as text for a message."""
        description = self._agent.get_agent_metadata(), self._base, self._device, self._memory
        return msgspec.json.encode(description).decode()

    def connect(self, description: str) -> str:
        """Makes a peer's arena readable and returns the peer's name. Raises TransferError."""
        metadata, base, device, memory = _described(description)
        try:
            name = self._agent.add_remote_agent(metadata)
        except Exception as e:  # NIXL's own errors share no base class
            raise TransferError(f"NIXL cannot reach the other worker: {type(e).__name__}: {e}") from e
        peer: str = name.decode() if isinstance(name, bytes) else name
        self._peers[peer] = (base, device, memory)
        return peer

    def disconnect(self, peer: str) -> None:
        """Forgets a peer, dead or alive."""
        if self._peers.pop(peer, None) is not None:
            self._agent.remove_remote_agent(peer)

    def read(self, peer: str, reads: Sequence[RangeRead]) -> "NixlRead":
        """Starts reads. `source` counts from the start of the peer's arena, `destination` from
        ours.

        Raises:
            TransferError: the peer is not connected or gone.
        """
        if peer not in self._peers:
            raise TransferError(f"{peer!r} is not connected")
        base, device, memory = self._peers[peer]
        ours = [(self._base + read.destination, read.nbytes, self._device) for read in reads]
        theirs = [(base + read.source, read.nbytes, device) for read in reads]
        agent = self._agent
        try:
            local, remote = agent.get_xfer_descs(ours, self._memory), agent.get_xfer_descs(theirs, memory)
            handle = agent.initialize_xfer("READ", local, remote, peer, b"")
        except Exception as e:
            raise TransferError(f"NIXL refuses the reads: {type(e).__name__}: {e}") from e
        return NixlRead(agent, handle)

    def close(self) -> None:
        for peer in list(self._peers):
            self.disconnect(peer)
        self._agent.deregister_memory(self._registered)


class NixlRead:
    """Started reads into our arena. They cannot be stopped: they may write there until `done`
    returns True or raises."""

    def __init__(self, agent: Any, handle: Any) -> None:
        self._agent, self._handle = agent, handle
        self._error: Exception | None = None
        self._state = self._call(agent.transfer)

    def done(self) -> bool:
        """True once every byte has come. The arena is ours again then, and after an error.

        Raises:
            TransferError: the peer is gone, or the network failed.
        """
        if self._state == "PROC":
            self._state = self._call(self._agent.check_xfer_state)
        if self._state == "PROC":
            return False
        self._release()
        if self._state != "DONE":
            raise TransferError(f"the reads broke off: {self._error or 'NIXL state ' + self._state}") from self._error
        return True

    def _call(self, question: Any) -> str:
        try:
            return question(self._handle)
        except Exception as e:  # NIXL's own errors share no base class
            self._error = e
            return "ERR"

    def _release(self) -> None:
        if self._handle is not None:
            self._agent.release_xfer_handle(self._handle)
            self._handle = None


def _described(description: str) -> _Description:
    """Raises TransferError if `describe` cannot have made it."""
    try:
        return msgspec.json.decode(description, type=_Description)
    except (ValueError, RecursionError) as e:  # msgspec's own errors are ValueErrors
        raise TransferError(f"the other worker does not describe its memory: {e}") from e


def _load() -> Any:
    try:
        from nixl import _api
    except ImportError as e:
        raise ProviderNotInstalledError(
            f"state transfer through NIXL needs the package nixl: pip install '.[transfer]' ({e})"
        ) from e
    # Its notices would go to standard output.
    logging.getLogger("nixl").setLevel(logging.WARNING)
    return _api
