"""Makes prefill and decode workers of an LLM."""

import ipaddress
import os
import secrets
from collections.abc import Iterable, Sequence

from hybridrt.base.errors import ConfigError
from hybridrt.channel.channel import TIMEOUT_S, SocketChannel
from hybridrt.channel.keys import Key
from hybridrt.channel.listener import Listener
from hybridrt.engine.api.llm import LLM
from hybridrt.transfer.decode import DecodeWorker
from hybridrt.transfer.keys import VARIABLE, find_key
from hybridrt.transfer.prefill import SILENT_S, PrefillWorker
from hybridrt.transfer.prefill import TIMEOUT_S as FETCH_S
from hybridrt.transfer.ranks import open_ranks
from hybridrt.transfer.side import WorkerSide


def prefill_worker(
    llm: LLM,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    key: Key | None = None,
    timeout: float = FETCH_S,
    silent_timeout: float = SILENT_S,
    devices: str | None = None,
) -> PrefillWorker:
    """A prefill worker that listens at `host`:`port` (0: a free one, `worker.port`). `serve` runs
    it.

    Args:
        key: text, or a Path of its file; None: HYBRIDRT_TRANSFER_KEY or, without it, a new key,
            `worker.key`.
        timeout: seconds that an image waits to be fetched, and that a decode worker may take to
            read a message. A slower one loses its connection.
        silent_timeout: seconds after which a decode worker that does not even answer loses it, while
            an image waits for it. Longer than its longest step.
        devices: network devices of UCX, as in UCX_NET_DEVICES. None: this variable, else the
            loopback device if `host` is a loopback address, else UCX's choice.

    Raises:
        ConfigError: the LLM was built without transfer_bytes, the key is too short, or nothing can
            listen there.
        ProviderNotInstalledError: NIXL is not installed or cannot be loaded; says why.
    """
    side, found = WorkerSide.from_llm(llm), find_key(key) or secrets.token_hex(32)
    _seconds(silent_timeout, "silent_timeout")
    listener = Listener((host, port), found.encode(), _seconds(timeout))
    try:
        ranks = open_ranks(side, True, _devices(devices, [host]))
    except BaseException:
        listener.close()
        raise
    return PrefillWorker(side, ranks, listener, key=found, timeout=timeout, silent_timeout=silent_timeout)


def decode_worker(
    llm: LLM,
    prefill: Sequence[tuple[str, int]],
    *,
    key: Key | None = None,
    compute_here: bool = True,
    timeout: float = TIMEOUT_S,
    devices: str | None = None,
) -> DecodeWorker:
    """Prefill workers at these addresses compute the prompts of `llm`. Its callers notice nothing.

    Args:
        key: of the prefill workers, as text or a Path of its file; None: HYBRIDRT_TRANSFER_KEY.
        compute_here: prompts that no prefill worker can compute are computed by `llm`; else they
            fail. Those with images never travel: `llm` computes them.
        timeout: seconds after which a silent prefill worker is dropped. Longer than its longest
            step.
        devices: as for `prefill_worker`; the addresses take the place of `host`.

    Raises:
        AuthenticationError: a worker has another key.
        HandshakeError: a worker runs something else; says what.
        TransferError: a worker does not answer (PeerGoneError), or its number of ranks does not
            fit.
        ConfigError: no key is given, `llm` has a decode worker already, or as for `prefill_worker`.
        ProviderNotInstalledError: as for `prefill_worker`.

    After an error `llm` is as it was.
    """
    side, found = WorkerSide.from_llm(llm), find_key(key)
    if found is None:
        raise ConfigError(f"no transfer key: pass key=, the prefill worker's `key`, or set {VARIABLE}")
    if llm.engine.prefill_source is not None:
        raise ConfigError("this LLM has a decode worker already; close that one first")
    _seconds(timeout)
    readers = open_ranks(side, False, _devices(devices, [host for host, _ in prefill]))
    worker = DecodeWorker(side, readers, compute_here=compute_here, timeout=timeout)
    try:
        for address in prefill:
            worker.connect(SocketChannel.connect(address, found.encode(), timeout))
    except BaseException:
        worker.close()
        raise
    return worker


def _seconds(timeout: float, name: str = "timeout") -> float:
    if not 0 < timeout < 1e6:
        raise ConfigError(f"{name} is {timeout}; it is a number of seconds above 0")
    return timeout


def _devices(devices: str | None, hosts: Iterable[str]) -> str:
    if devices is not None or "UCX_NET_DEVICES" in os.environ:
        return devices or ""
    return "lo" if all(map(_is_loopback, hosts)) else ""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
