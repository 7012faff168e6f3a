"""Main memory that this process may use, within the limits of its control groups."""

import ctypes
from collections.abc import Iterator
from pathlib import Path

import psutil

CGROUPS, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


# Each version of control groups: limit, use, and its name of the page cache.
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


def free_host_memory() -> int:
    """Bytes of main memory that are free without swapping."""
    return min([psutil.virtual_memory().available, *(max(limit - used, 0) for limit, used in _limits())])


def total_host_memory() -> int:
    """Bytes of main memory that this process could have if nothing else used any."""
    return min([psutil.virtual_memory().total, *(limit for limit, _ in _limits())])


def return_freed_memory() -> None:
    """Gives the system back what was freed: glibc keeps what loading has used in between, a sixth of
    the weights. Other C libraries have no such call."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _limits() -> Iterator[tuple[int, int]]:
    """(limit, bytes in use) of each group with a limit. Page cache counts as free: reading weights
    fills it."""
    for folder, (limit_file, used_file, cache) in _groups():
        limit, used = _number(folder / limit_file), _number(folder / used_file)
        if limit is not None and used is not None:
            yield limit, used - _page_cache(folder / "memory.stat", cache)


def _groups() -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """The process's group and its visible parents: a container's path may start higher."""
    try:
        lines = MEMBERSHIP.read_text().splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, files = (CGROUPS / "memory", V1) if controllers else (CGROUPS, V2)
        group = root / path.strip("/")
        yield from ((folder, files) for folder in (group, *group.parents) if folder.is_relative_to(root))


def _number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _page_cache(stat: Path, name: str) -> int:
    try:
        fields = dict(line.split() for line in stat.read_text().splitlines())
    except OSError:
        return 0
    return int(fields.get(name, 0))
