"""A picture of a prefix cache as plain data: what an engine writes, and what `hybridrt inspect --cache` reads."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hybridrt.config_json import FieldType, integer, list_of
from hybridrt.engine.cache_coordinator import CacheCoordinator
from hybridrt.errors import CacheDumpError, shown
from hybridrt.files import read_bytes
from hybridrt.mem_cache.radix_cache import RadixCache
from hybridrt.mem_cache.radix_node import Node

FORMAT = "hybridrt prefix cache 1"
MAX_NODES = 1_000_000
MAX_BYTES = 1 << 30
_COUNT = integer(0, 2**53)
_COUNTS = (
    "page_size", "pages", "pages_total", "states", "states_total", "asked", "hit", "without_state", "without_kv",
    "retokenised", "fetched", "host_pages", "host_pages_total", "host_states", "host_states_total",
)  # fmt: skip


@dataclass(frozen=True)
class DumpedNode:
    """An edge of the tree and what its end keeps.

    Attributes:
        parent: place of the node above in CacheDump.nodes, before this one's; -1 below a root.
        start, end: tokens of the path before the edge, and with it.
        pages: whole KV pages of the edge. state, tail: whether it has a state, and a partly used page for that.
        readers: requests that read the path up to here.
        used: when it was last used; greater is later.
        salt: which of the cache's salts, by number; 0 for prompts without one, as far as there are any.
        text: of the edge, where a tokenizer was given.
    """

    parent: int
    start: int
    end: int
    pages: int
    state: bool
    tail: bool
    readers: int
    used: int
    salt: int
    text: str | None = None


@dataclass(frozen=True)
class CacheDump:
    """A prefix cache at one moment.

    Attributes:
        pages, states: what it holds, of `pages_total` KV pages and `states_total` state slots of the engine.
        host_pages, host_states: what its tier in main memory holds, and how many it could hold.
        asked, hit, without_state, without_kv, retokenised, fetched: hybridrt.mem_cache.prefix_cache.CacheCounts, in
            tokens.
        nodes: parents first.
    """

    page_size: int
    pages: int
    pages_total: int
    states: int
    states_total: int
    asked: int
    hit: int
    without_state: int
    without_kv: int
    retokenised: int
    fetched: int
    host_pages: int
    host_pages_total: int
    host_states: int
    host_states_total: int
    nodes: tuple[DumpedNode, ...]


def cache_dump(pools: CacheCoordinator, decode: Callable[[Sequence[int]], str] | None = None) -> CacheDump:
    """What a prefix cache holds now; also of which texts, if `decode` makes text of tokens."""
    return CacheDump(
        page_size=pools.prefixes.tree.page_size,
        pages=pools.pages.num_cached, pages_total=pools.pages.total,
        states=pools.slots.num_cached, states_total=pools.slots.total,
        **pools.prefixes.totals(), nodes=_dumped_nodes(pools.prefixes.tree, decode),
    )  # fmt: skip


def _dumped_nodes(tree: RadixCache, decode: Callable[[Sequence[int]], str] | None = None) -> tuple[DumpedNode, ...]:
    """The nodes of a tree; their texts if `decode` makes text of tokens."""
    salts, places, found = dict[str, int](), dict[int, int](), list[DumpedNode]()
    for node in tree.nodes():
        assert node.parent is not None
        if node.parent.parent is None:
            salt = salts.setdefault(node.parent.salt, len(salts))
        else:
            salt = found[places[id(node.parent)]].salt
        places[id(node)] = len(found)
        found.append(_dumped(node, places.get(id(node.parent), -1), salt, decode))
    return tuple(found)


def _dumped(node: Node, parent: int, salt: int, decode: Callable[[Sequence[int]], str] | None) -> DumpedNode:
    text = None if decode is None else decode(node.tokens.tolist())
    return DumpedNode(
        parent, node.start, node.end, len(node.pages), node.state is not None, node.tail is not None, node.readers,
        node.used, salt, text,
    )  # fmt: skip


def write_dump(path: str | Path, dump: CacheDump) -> None:
    """Writes a file for `read_dump`. OSError as from any file."""
    Path(path).write_text(json.dumps({"format": FORMAT, **asdict(dump)}) + "\n", encoding="utf-8")


def read_dump(path: str | Path) -> CacheDump:
    """Reads and checks a file of `write_dump`.

    Raises:
        CacheDumpError: it cannot be read, or is no such file; the text names what is wrong.
    """
    try:
        data = read_bytes(path, MAX_BYTES)
    except (OSError, ValueError) as e:
        raise CacheDumpError(f"the dump {path} cannot be read: {e}") from e
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise CacheDumpError(f"the dump {path} is not JSON: {e}") from e
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise CacheDumpError(f'the dump {path} is no file of LLM.dump_cache: its "format" is not "{FORMAT}"')
    nodes = _field(fields, "nodes", list_of(FieldType("an object", lambda value: isinstance(value, dict))))
    if len(nodes) > MAX_NODES:
        raise CacheDumpError(f"the dump has {len(nodes)} nodes; at most {MAX_NODES} are read")
    counts = {name: _field(fields, name, _COUNT) for name in _COUNTS}
    return CacheDump(**counts, nodes=_checked_nodes(nodes))


def _checked_nodes(nodes: Sequence[Mapping[str, Any]]) -> tuple[DumpedNode, ...]:
    found = list[DumpedNode]()
    flag = FieldType("true or false", lambda value: isinstance(value, bool))
    text = FieldType("a string or null", lambda value: value is None or isinstance(value, str))
    for i, fields in enumerate(nodes):
        parent = _field(fields, "parent", integer(-1, i - 1), i)
        above = found[parent] if parent >= 0 else None
        start = above.end if above else 0
        counts = (_field(fields, name, _COUNT, i) for name in ("pages", "readers", "used"))
        pages, readers, used = counts
        found.append(DumpedNode(
            parent, _field(fields, "start", integer(start, start), i),
            _field(fields, "end", integer(start + 1, 2**53), i), pages, _field(fields, "state", flag, i),
            _field(fields, "tail", flag, i), readers, used,
            _field(fields, "salt", integer(above.salt, above.salt) if above else _COUNT, i),
            _field(fields, "text", text, i),
        ))  # fmt: skip
    return tuple(found)


def _field(fields: Mapping[str, Any], name: str, kind: FieldType, node: int | None = None) -> Any:
    where = "the dump" if node is None else f"node {node} of the dump"
    if name not in fields:
        raise CacheDumpError(f"{where} has no {name!r}")
    if not kind.holds(fields[name]):
        raise CacheDumpError(f"{name!r} of {where} is {shown(fields[name])}; it must be {kind.text}")
    return fields[name]
