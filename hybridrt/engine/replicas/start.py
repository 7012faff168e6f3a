"""Starts the replicas of a data-parallel engine, and listens to them."""

import os
import queue
import shutil
import subprocess
import threading
import weakref
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

from hybridrt.base.child_process import ending_of, is_stopped, start_child
from hybridrt.base.device import gpu_count, resolve_device
from hybridrt.base.engine_config import EngineConfig
from hybridrt.base.errors import ConfigError, DeviceError, EngineError, HybridrtError, PeerGoneError
from hybridrt.channel.control import LOADING_S, Link, disown_in_child, rank_timeout
from hybridrt.collectives.groups import COLLECTIVE
from hybridrt.engine.replicas.messages import (
    FromReplica,
    ReplicaBeat,
    ReplicaFailed,
    ReplicaReady,
    Start,
    decode,
    encode,
    error_of,
)
from hybridrt.parallel.expert_ranks import ExpertPlace
from hybridrt.parallel.rank_start import accept_links, open_place
from hybridrt.parallel.torchrun import world

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_NAMING_S = 5.0
OTHERS_S = COLLECTIVE.total_seconds()  # from one that is ready to the next one: all read the same model


class Lost(Exception):
    """A replica has ended, and why."""


class ReplicaLink:
    """A replica's process.

    Args:
        inbox: gets (number, message) of every message but heartbeats, and (number, Lost) at the end.
    """

    def __init__(
        self, number: int, link: Link, process: "subprocess.Popen[bytes]",
        inbox: "queue.SimpleQueue[tuple[int, Any]]", timeout: float,
    ) -> None:  # fmt: skip
        self.number, self.process = number, process
        self._link, self._inbox, self._timeout, self._loading = link, inbox, timeout, True
        self._leaving = False
        disown_in_child(self)
        threading.Thread(target=self._receive, daemon=True).start()

    def send(self, message: bytes) -> None:
        """Sends an encoded ToReplica. Does nothing if the replica is gone: its `Lost` is in the inbox, or
        soon is, because a link that could not send is closed."""
        with suppress(PeerGoneError):
            self._link.send(message)

    def end(self) -> None:
        """The process ends at once, and its ranks with it. May be repeated."""
        self._leaving = True
        self.process.kill()
        self.process.wait()

    def disown(self) -> None:
        """In a forked child: the replica belongs to the parent."""
        self._leaving = True

    def _receive(self) -> None:
        """Runs in a thread."""
        try:
            while messages := self._link.listen_to(self._timeout, self._patience, lambda: is_stopped(self.process)):
                for message in (decode(data, FromReplica) for data in messages):
                    self._loading = self._loading and not isinstance(message, ReplicaReady)
                    if not isinstance(message, ReplicaBeat):
                        self._inbox.put((self.number, message))
            reason = "it has sent no heartbeat in time"
        except PeerGoneError as e:
            reason = self._ending() or str(e)
        self.process.kill()  # it may run without its link
        if not self._leaving:
            self._inbox.put((self.number, Lost(reason)))
        self._link.close()

    def _patience(self) -> float:
        return max(self._timeout, LOADING_S * self._loading)

    def _ending(self) -> str | None:
        try:
            status = self.process.wait(_NAMING_S)
        except subprocess.TimeoutExpired:
            return None
        return f"its process {ending_of(status)}"


class Replicas:
    """The processes of a data-parallel engine. Each has loaded the model.

    Attributes:
        ready: the ReplicaReady of each, by number.

    Raises:
        ConfigError, DeviceError: options that do not go together, or too few GPUs; nothing was started.
        HybridrtError: what a replica raised; the others have ended.
    """

    def __init__(self, config: EngineConfig) -> None:
        environments = _environments(config)
        self.inbox: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self.links: list[ReplicaLink] = []
        timeout = rank_timeout()
        place, listener = open_place()
        processes: list[subprocess.Popen[bytes]] = []
        self._finalizer = weakref.finalize(self, _end, self.links, processes, place.directory, os.getpid())
        try:
            with closing(listener):
                for number, environment in enumerate(environments, 1):
                    given = {"directory": place.directory, "number": number}
                    processes.append(
                        start_child("hybridrt.engine.replicas.replica", given, environment, stdin=subprocess.DEVNULL)
                    )
                links = accept_links(listener, len(processes) + 1, timeout, processes, "replica")
            for number, (link, process) in enumerate(zip(links, processes, strict=True)):
                self.links.append(ReplicaLink(number, link, process, self.inbox, timeout))
            assert place.directory is not None, "replicas are on this host"
            self.ready = self._load(replace(config, device=resolve_device(config.device).type), place.directory)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends all of them. May be repeated."""
        self._finalizer()

    def _load(self, config: EngineConfig, directory: str) -> Sequence[ReplicaReady]:
        """All load the model at the same time."""
        for link in self.links:
            experts = ExpertPlace(directory, link.number) if config.expert_parallel else None
            link.send(encode(Start(config, experts)))
        ready: dict[int, ReplicaReady] = {}
        while len(ready) < len(self.links):
            try:  # the first may take as long as it needs to read a model
                number, message = self.inbox.get(timeout=OTHERS_S if ready else None)
            except queue.Empty:
                missing = [link.number for link in self.links if link.number not in ready]
                raise EngineError(f"replicas {missing} are not ready {OTHERS_S:g} seconds after another one") from None
            if not isinstance(message, ReplicaReady):
                raise as_error(number, message)
            ready[number] = message
        return [ready[number] for number in range(len(self.links))]


def as_error(number: int, message: ReplicaFailed | Lost) -> HybridrtError:
    """The error of a replica that has ended."""
    if isinstance(message, Lost):
        return EngineError(f"replica {number} was lost: {message}; build a new LLM")
    return error_of(message.kind, f"replica {number}: {message.reason}")


def _end(
    links: Sequence[ReplicaLink], processes: Sequence["subprocess.Popen[bytes]"], directory: str | None, pid: int
) -> None:
    if os.getpid() != pid:
        return  # a forked child has copies
    for link in links:
        link.end()
    for process in processes:
        process.kill()
        process.wait()
    if directory is not None:
        shutil.rmtree(directory, ignore_errors=True)


def _environments(config: EngineConfig) -> list[dict[str, str]]:
    """The environment of each replica, with the GPUs that it sees."""
    device, count = resolve_device(config.device), config.dp_size
    if world() is not None:
        raise ConfigError(f"dp_size is {count} under torchrun; start one process: it starts its replicas itself")
    if device.type != "cuda":
        return [{} for _ in range(count)]
    if config.device.startswith("cuda:"):
        raise ConfigError(
            f'device is {config.device!r} and dp_size is {count}; with device="cuda" each replica takes GPUs of its own'
        )
    need = count * config.tp_size
    if (found := gpu_count()) < need:
        raise DeviceError(f"dp_size {count} and tp_size {config.tp_size} need {need} GPUs, but torch sees {found}")
    names = os.environ.get(_VISIBLE, ",".join(map(str, range(found)))).split(",")
    own = [names[i * config.tp_size : (i + 1) * config.tp_size] for i in range(count)]
    # Kernels of replicas that share experts write to the memory of the others' GPUs, so they see them, after their own.
    others = [[each for each in names[:need] if each not in mine] if config.expert_parallel else [] for mine in own]
    return [{_VISIBLE: ",".join(mine + more)} for mine, more in zip(own, others, strict=True)]
