"""How tensor-parallel ranks start and find each other: processes started here, or torchrun's."""

import atexit
import logging
import os
import secrets
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from pathlib import Path

import torch
import torch.distributed as dist

from hybridrt.base.child_process import ending_of, is_stopped, start_child
from hybridrt.base.device import synchronize, use_gpu
from hybridrt.base.errors import PeerGoneError, RankError
from hybridrt.base.version import __version__
from hybridrt.channel.auth import check_key
from hybridrt.channel.channel import SocketChannel
from hybridrt.channel.codec import pack, unpack
from hybridrt.channel.control import Link, rank_timeout
from hybridrt.channel.listener import Listener
from hybridrt.collectives.groups import Communicator
from hybridrt.parallel.messages import FromRank, Hello, RankFailed
from hybridrt.parallel.ranks import LOOPBACK, Ranks
from hybridrt.parallel.torchrun import World, master_host
from hybridrt.runtime.load.start_kernels import StartAhead, name_of

logger = logging.getLogger(__name__)

KEY_VARIABLE = "HYBRIDRT_TP_KEY"
STARTING_S = 300.0
_POLL_S, _HELLO_S = 0.02, 10.0
_PLACE = "hybridrt/place"


@dataclass(frozen=True)
class RankPlace:
    """Where the ranks of a run find each other.

    Attributes:
        host, port: where rank 0 listens for links of ranks with `key`.
        store: through which gloo and NCCL find their peers.
        directory: a directory for a run on one host: readable by this user only, with the key and
            the store.
    """

    host: str
    port: int
    key: bytes
    store: dist.Store
    directory: str | None = None

    def communicator(
        self, rank: int, size: int, device: torch.device, check_ranks: Callable[[], None] | None = None
    ) -> Communicator:
        """Returns when all ranks have called it. `check_ranks`: of Communicator."""
        loopback = self.directory is not None
        return Communicator(self.store, rank, size, device, loopback=loopback, check_ranks=check_ranks)

    def join(self, rank: int) -> Link:
        """A rank's link to rank 0.

        Raises:
            PeerGoneError: rank 0 does not answer within STARTING_S, or has another key.
        """
        # Rank 0 may read a tokenizer and make its GPU's context before it looks who has come.
        link = Link(SocketChannel.connect((self.host, self.port), self.key, STARTING_S))
        link.send(pack(Hello(rank, __version__)))
        return link


def start_ranks(
    size: int, kind: str, ahead: StartAhead | None = None, meanwhile: Callable[[], object] | None = None
) -> Ranks:
    """Starts ranks 1 to `size` - 1 on this machine, as processes that end with this one.

    Args:
        kind: type of their devices, "cpu" or "cuda".
        ahead: that of ModelRunner; they find it by its name.
        meanwhile: called while they import torch, which takes seconds. What it raises ends them.

    Raises:
        ConfigError: the time-out in the environment is not a number of seconds, or `ahead` has no
            name.
        RankError: a rank ended or was stopped before it was connected.
    """
    timeout, found_as = rank_timeout(), name_of(ahead)
    place, listener = open_place()
    assert place.directory is not None
    with closing(listener), ExitStack() as undo:
        undo.callback(shutil.rmtree, place.directory, ignore_errors=True)
        processes: list[subprocess.Popen[bytes]] = []
        for rank in range(1, size):
            processes.append(process := _start(rank, size, place.directory, kind, found_as))
            undo.callback(process.wait)
            undo.callback(process.kill)
        if meanwhile is not None:
            meanwhile()
        ranks = _lead(place, listener, size, rank_device(kind, 0), timeout, processes)
        undo.pop_all()
        return ranks


def find_place(directory: str) -> RankPlace:
    """The place that rank 0 has made in a directory of this host.

    Raises:
        RankError: the directory is not this user's own, or others can read it.
    """
    found = os.lstat(directory)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise RankError(f"{directory} is not a directory that only this user can read; rank 0 has made another one")
    port, key = Path(directory, "key").read_text().split()
    return RankPlace(LOOPBACK, int(port), bytes.fromhex(key), dist.FileStore(f"{directory}/store"), directory)


def rank_device(kind: str, local_rank: int) -> torch.device:
    """A rank's device, of `kind` "cpu" or "cuda"."""
    return torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind)


def start_gpu(device: torch.device) -> None:
    """Starts CUDA for a rank, before rank 0 waits for its heartbeats: the driver takes seconds, and keeps
    Python's lock."""
    if device.type == "cuda":
        use_gpu(device)
        synchronize(device)  # makes the context


def torchrun_place(world: World) -> RankPlace:
    """The place that rank 0 of torchrun's processes has made.

    Raises:
        ConfigError: HYBRIDRT_TP_KEY is not set for ranks on several hosts, or torchrun's
            environment is incomplete.
        RankError: the place is not this user's, or rank 0 does not come.
    """
    key = _torchrun_key(world)
    store = _torchrun_store()
    try:
        where = store.get(_PLACE).decode()
    except RuntimeError as e:  # torch.distributed's error
        raise RankError(f"tensor-parallel rank 0 did not come: {e}") from e
    return find_place(where) if key is None else RankPlace(master_host(), int(where), key, store)


@cache
def torchrun_ranks(world: World, kind: str) -> Ranks:
    """Rank 0's view of torchrun's processes, once per process; they leave when it ends.

    Raises:
        ConfigError: the errors of `torchrun_place`.
        RankError: not all ranks came.
    """
    key, timeout = _torchrun_key(world), rank_timeout()
    store = _torchrun_store()
    with ExitStack() as undo:
        if key is None:
            place, listener = open_place()
            undo.callback(shutil.rmtree, str(place.directory), ignore_errors=True)
        else:
            listener = Listener((master_host(), 0), key)
            place = RankPlace(master_host(), listener.port, key, store)
        with closing(listener):
            store.set(_PLACE, place.directory or str(place.port))
            ranks = _lead(place, listener, world.size, rank_device(kind, world.local_rank), timeout)
        undo.pop_all()
    atexit.register(ranks.close)
    return ranks


def _lead(
    place: RankPlace, listener: Listener, size: int, device: torch.device, timeout: float,
    processes: Sequence["subprocess.Popen[bytes]"] = (),
) -> Ranks:  # fmt: skip
    """Waits until all have connected."""
    start_gpu(device)  # while the others start
    links = accept_links(listener, size, timeout, processes)
    ranks = Ranks(links, processes, place.directory, timeout)
    ranks.meet(partial(place.communicator, 0, size, device))
    return ranks


def _torchrun_key(world: World) -> bytes | None:
    """Returns None if all ranks run on one host."""
    if world.local_size == world.size:
        return None
    key = os.fsencode(os.environ.get(KEY_VARIABLE, ""))
    check_key(f"{KEY_VARIABLE}, which ranks on several hosts share,", key)
    return key


def _torchrun_store() -> dist.Store:
    """RankError if it cannot be reached, ConfigError without its address."""
    where = f"{master_host()}:{os.environ.get('MASTER_PORT')}"
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=STARTING_S)))
    except (RuntimeError, ValueError) as e:  # a port in use, an unknown host
        raise RankError(f"torchrun's store at MASTER_ADDR:MASTER_PORT = {where} cannot be used: {e}") from e
    return store


def open_place() -> tuple[RankPlace, Listener]:
    """Makes a directory that only this user can read."""
    directory = tempfile.mkdtemp(prefix="hybridrt-")
    with ExitStack() as undo:
        undo.callback(shutil.rmtree, directory, ignore_errors=True)
        key = secrets.token_bytes(32)
        listener = Listener((LOOPBACK, 0), key)
        undo.callback(listener.close)
        Path(directory, "key").write_text(f"{listener.port} {key.hex()}")
        place = find_place(directory)
        undo.pop_all()
    return place, listener


def _start(rank: int, size: int, directory: str, kind: str, ahead: str | None) -> "subprocess.Popen[bytes]":
    # Threads split sums, and all ranks must draw the same tokens.
    environment = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    given = {"directory": directory, "rank": rank, "size": size, "kind": kind, "ahead": ahead}
    return start_child("hybridrt.parallel.rank_process", given, environment, stdin=subprocess.DEVNULL)


def accept_links(
    listener: Listener, size: int, timeout: float, processes: Sequence["subprocess.Popen[bytes]"],
    name: str = "tensor-parallel rank",
) -> list[Link]:  # fmt: skip
    """The links of processes 1 to `size` - 1, called `name` in errors, in their order.

    Args:
        timeout: seconds after which a process counts as lost that a signal has stopped.
        processes: those that were started here; none, or all of them.

    Raises:
        RankError: one has ended, was stopped, did not come, or has another version of the package.
    """
    links, unnamed, ran_at = dict[int, Link](), dict[Link, float](), dict[int, float]()
    deadline = time.monotonic() + STARTING_S
    try:
        while len(links) < size - 1:
            unnamed |= {Link(channel): time.monotonic() + _HELLO_S for channel in listener.accept()}
            for link, until in list(unnamed.items()):
                if _is_settled(link, until, links, size, name):
                    del unnamed[link]
            for rank, process in enumerate(processes, 1):
                if process.poll() is not None:
                    why = _told(links.get(rank)) or f"it {ending_of(process.returncode)}; see its output"
                    raise RankError(f"{name} {rank} did not start: {why}")
                if not is_stopped(process):
                    ran_at[rank] = time.monotonic()
                elif time.monotonic() - ran_at.setdefault(rank, time.monotonic()) > timeout:
                    raise RankError(f"{name} {rank} did not start: its process was stopped {timeout:g} seconds ago")
            if time.monotonic() > deadline:
                missing = sorted(set(range(1, size)) - links.keys())
                raise RankError(f"{name}s {missing} did not come within {STARTING_S:g} seconds")
            time.sleep(_POLL_S)
        return [links.pop(rank) for rank in range(1, size)]
    finally:
        for link in (*links.values(), *unnamed):
            link.close()


def _told(link: Link | None) -> str | None:
    """Why a rank that has ended has failed; None if it has not said it."""
    with suppress(PeerGoneError):
        for message in [] if link is None else link.listen(0.0):
            if isinstance(told := unpack(message, FromRank), RankFailed):
                return told.reason
    return None


def _is_settled(link: Link, until: float, links: dict[int, Link], size: int, name: str) -> bool:
    """Whether the link was taken into `links`, or refused: it is closed then, and the log says why. RankError if the
    other end has another version."""
    try:
        if (rank := _presented(link, until)) is None:
            return False
        if rank not in range(1, size) or rank in links:
            raise PeerGoneError(f"it says that it is number {rank}, which {'has come' if rank in links else 'is none'}")
        links[rank] = link
    except PeerGoneError as e:
        logger.warning("a process that has the key of a %s was refused: %s", name, e)
        link.close()
    return True


def _presented(link: Link, until: float) -> int | None:
    """The rank of its first message; None while none has come.

    Raises:
        PeerGoneError: there is none at the time `until`, or another message.
        RankError: it has another version.
    """
    found = link.listen(0.0)
    if not found:
        if time.monotonic() < until:
            return None
        raise PeerGoneError(f"it has not said its number within {_HELLO_S:g} seconds")
    hello = unpack(found[0], Hello)
    link.put_back(found[1:])  # heartbeats, or why the rank has failed
    if hello.version != __version__:
        link.close()
        raise RankError(f"rank {hello.rank} has version {hello.version or 'unknown'} of hybridrt, and rank 0 has "
                        f"{__version__}: install one version for all ranks")  # fmt: skip
    return hello.rank
