"""A prefix cache as plain data: written by an engine, read by `hybridrt inspect --cache`."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from hybridrt.base.errors import CacheDumpError
from hybridrt.base.files import read_bytes, replacing
from hybridrt.base.formats import Format, json_format
from hybridrt.engine.cache.cache_coordinator import CacheCoordinator
from hybridrt.engine.request.spans import without_keys
from hybridrt.mem_cache.prefix_tree.cache_key import DEFAULT_KEY
from hybridrt.mem_cache.prefix_tree.radix_cache import RadixCache
from hybridrt.mem_cache.prefix_tree.radix_node import Node

FORMAT = Format("hybridrt prefix cache", 1, "write it again with LLM.dump_cache")
MAX_NODES = 1_000_000
MAX_BYTES = 1 << 30
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


@dataclass(frozen=True)
class DumpedNode:
    """An edge of the tree and the entries at its end.

    Attributes:
        parent: place of the node above in CacheDump.nodes, before this one's; -1 below a root.
        start, end: tokens of the path before the edge, and with it.
        pages: whole KV pages of the edge. state, tail: whether it has a state, and a partly used
            page for that.
        readers: requests that read the path up to here.
        used: when it was last used; greater is later.
        salt: which of the cache's keys, by number; 0 for that of prompts without a salt.
        text: of the edge, if a tokenizer was given.
    """

    parent: int
    start: Count
    end: Count
    pages: Count
    state: bool
    tail: bool
    readers: Count
    used: Count
    salt: Count
    text: str | None = None


@dataclass(frozen=True)
class CacheDump:
    """A prefix cache at one moment. Counts are those of CacheCounts.

    Attributes:
        pages, states: entries, of `pages_total` KV pages and `states_total` state slots of the
            engine.
        host_pages, host_states: entries in main memory, and their limits.
        nodes: parents first.
    """

    page_size: Count
    pages: Count
    pages_total: Count
    states: Count
    states_total: Count
    asked: Count
    hit: Count
    without_state: Count
    without_kv: Count
    retokenised: Count
    fetched: Count
    host_pages: Count
    host_pages_total: Count
    host_states: Count
    host_states_total: Count
    nodes: Annotated[tuple[DumpedNode, ...], msgspec.Meta(max_length=MAX_NODES)]
    dropped: Count = 0
    format: str = str(FORMAT)


def cache_dump(pools: CacheCoordinator, decode: Callable[[Sequence[int]], str] | None = None) -> CacheDump:
    """The present contents, with texts if `decode` makes text of tokens."""
    counts: dict[str, Any] = pools.prefixes.totals()
    return CacheDump(
        page_size=pools.prefixes.tree.page_size,
        pages=pools.pages.num_cached, pages_total=pools.pages.total,
        states=pools.slots.num_cached, states_total=pools.slots.total,
        **counts, nodes=_dumped_nodes(pools.prefixes.tree, decode),
    )  # fmt: skip


def _dumped_nodes(tree: RadixCache, decode: Callable[[Sequence[int]], str] | None = None) -> tuple[DumpedNode, ...]:
    keys, places, found = {DEFAULT_KEY: 0}, dict[Node, int](), list[DumpedNode]()
    for node in tree.nodes():
        assert node.parent is not None
        if node.parent.parent is None:
            salt = keys.setdefault(node.parent.key, len(keys))
        else:
            salt = found[places[node.parent]].salt
        places[node] = len(found)
        found.append(_dumped(node, places.get(node.parent, -1), salt, decode))
    return tuple(found)


def _dumped(node: Node, parent: int, salt: int, decode: Callable[[Sequence[int]], str] | None) -> DumpedNode:
    text = None if decode is None else decode(without_keys(node.tokens).tolist())
    return DumpedNode(
        parent, node.start, node.end, len(node.pages), node.state is not None, node.tail is not None, node.readers,
        node.used, salt, text,
    )  # fmt: skip


def write_dump(path: str | Path, dump: CacheDump) -> None:
    """Writes a file for `read_dump`. OSError, which names the file, if it cannot be written: an older one stays."""
    place, text = Path(os.path.realpath(path)), json.dumps(asdict(dump)) + "\n"
    try:
        if place.exists() and not place.is_file():  # a device or a pipe
            place.write_text(text, encoding="utf-8")
            return
        with replacing(place) as partial:
            partial.touch(place.stat().st_mode & 0o777 if place.exists() else 0o666)
            partial.write_text(text, encoding="utf-8")
    except OSError as e:
        raise OSError(e.errno, e.strerror, str(path)) from e


def read_dump(path: str | Path) -> CacheDump:
    """Reads and checks a file of `write_dump`.

    Raises:
        CacheDumpError: it cannot be read, or is no such file; the text names the fault.
    """
    try:
        data = read_bytes(path, MAX_BYTES)
    except (OSError, ValueError) as e:
        raise CacheDumpError(f"the dump {path} cannot be read: {e}") from e
    try:
        if refusal := FORMAT.refusal(json_format(data)):
            raise CacheDumpError(f"the dump {path} is none that this version reads: {refusal}")
        dump = msgspec.json.decode(data, type=CacheDump)
    except CacheDumpError:
        raise
    except (msgspec.MsgspecError, ValueError, RecursionError) as e:
        raise CacheDumpError(f"the dump {path} is no file of LLM.dump_cache: {e}") from e
    _check_tree(dump.nodes)
    return dump


def _check_tree(nodes: Sequence[DumpedNode]) -> None:
    for i, node in enumerate(nodes):
        if not -1 <= node.parent < i:
            raise CacheDumpError(f"node {i} of the dump is below node {node.parent}; parents come first")
        above = nodes[node.parent] if node.parent >= 0 else None
        start, salt = (above.end, above.salt) if above else (0, node.salt)
        if node.start != start or node.end <= start or node.salt != salt:
            raise CacheDumpError(
                f"node {i} of the dump holds tokens {node.start} to {node.end} of salt {node.salt}; it must begin at "
                f"{start}, end after that, and have salt {salt}"
            )
