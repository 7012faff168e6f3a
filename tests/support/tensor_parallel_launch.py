"""A process of its own for the tests of a launch: it starts two ranks and says what it saw."""

import fcntl
import json
import os
import socket
import struct
import sys
import threading
import time
from pathlib import Path

LISTENS = "0A"
SIOCGIFADDR = 0x8915


def family() -> list[int]:
    """This process and its children."""
    found = [os.getpid()]
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rsplit(")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == os.getpid():
            found.append(int(status.parent.name))
    return found


def sockets(pid: int) -> set[str]:
    """Inodes of a process's sockets."""
    found = set()
    for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
        try:
            name = os.readlink(descriptor)
        except OSError:
            continue
        if name.startswith("socket:["):
            found.add(name[8:-1])
    return found


def listening() -> set[str]:
    """Local addresses, as the kernel prints them, at which the family listens."""
    ours = set().union(*map(sockets, family()))
    lines = [line for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    rows = [line.split() for line in lines]
    return {row[1].split(":")[0] for row in rows if row[3] == LISTENS and row[9] in ours}


def networks() -> list[str]:
    """Interfaces with an address that other hosts could reach."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # it has no address
                continue
            found.append(name)
    return [name for name in found if not name.startswith("lo")]


def main() -> None:
    if outside := networks():  # else gloo takes what the host's name stands for, which may be loopback anyway
        os.environ["GLOO_SOCKET_IFNAME"] = outside[0]
    addresses: set[str] = set()
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            addresses.update(listening())
            time.sleep(0.1)  # what listens stays; a look at all processes costs milliseconds

    threading.Thread(target=watch, daemon=True).start()
    from hybridrt import LLM, SamplingParams
    from hybridrt.base.errors import HybridrtError

    greedy = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    os.environ["PYTHONPATH"] = os.pathsep  # to a new interpreter empty entries are the current directory
    llm = LLM(sys.argv[1], device="cpu", tp_size=2, max_model_len=128)

    def tokens() -> list[int]:
        return llm.generate([[5, 6, 7]], greedy)[0].token_ids

    before = tokens()
    child = os.fork()
    if not child:
        try:
            tokens()
        except HybridrtError as e:
            print(e, file=sys.stderr)
            sys.exit(3)
        sys.exit(0)
    deadline, ended = time.monotonic() + 20, (0, 0)
    while ended == (0, 0) and time.monotonic() < deadline:
        ended = os.waitpid(child, os.WNOHANG)
        time.sleep(0.02)
    if ended == (0, 0):
        os.kill(child, 9)
    done.set()
    report = {
        "child": os.waitstatus_to_exitcode(ended[1]) if ended[0] else None,
        "before": before, "after": tokens(), "addresses": sorted(addresses),
        "directory": llm.engine.executor.ranks._directory,  # type: ignore[attr-defined]
    }  # fmt: skip
    llm.close()
    print(json.dumps(report))


main()
