"""Where a process listens, as the kernel says."""

import os
from contextlib import suppress
from pathlib import Path

LOOPBACK = "0100007F"  # 127.0.0.1, as /proc/net/tcp prints it


def listening(pid: int) -> set[str]:
    """Local addresses at which a process accepts TCP connections, as the kernel prints them."""
    held = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            held.add(os.readlink(entry).removeprefix("socket:[").removesuffix("]"))
    tables = [Path(f"/proc/{pid}/net/{name}").read_text() for name in ("tcp", "tcp6")]
    lines = [line.split() for table in tables for line in table.splitlines()[1:]]
    return {line[1].split(":")[0] for line in lines if line[3] == "0A" and line[9] in held}
