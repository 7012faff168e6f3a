"""The tree of a prefix cache as text and as SVG."""

from collections.abc import Iterator
from html import escape

from hybridrt.engine.cache.cache_dump import CacheDump, DumpedNode

_ROW, _INDENT, _WIDTH, _BAR = 18, 14, 960, 360
_TEXT = 48  # characters shown of an edge
_LEVELS = 20  # levels of indentation, which deeper nodes share
_LETTER = 7  # width of one, rounded up


def summary(dump: CacheDump) -> str:
    """What the cache holds and has served: two lines, three with a tier in main memory."""
    share = f"{dump.hit / dump.asked:.1%}" if dump.asked else "none"
    lost = f"{dump.without_state} without a state, {dump.without_kv} without KV, {dump.retokenised} by "
    tier = (
        f"\nin main memory {dump.host_pages} of {dump.host_pages_total} KV pages, {dump.host_states} of "
        f"{dump.host_states_total} states; {dump.fetched} tokens fetched"
    )
    return (
        f"{len(dump.nodes)} nodes, {dump.pages} of {dump.pages_total} KV pages, {dump.states} of {dump.states_total} "
        f"states\n{dump.asked} tokens asked, {dump.hit} hit ({share}); lost: {lost}retokenised history"
        f"{tier if dump.host_pages_total or dump.host_states_total else ''}"
    )


def as_text(dump: CacheDump) -> str:
    """The summary, and a line for each node."""
    lines = [summary(dump), ""]
    for node, depth, last in _walk(dump):
        trunk = "".join("   " if end else "│  " for end in last[:-1])
        deep = f"level {depth}: " if depth > _LEVELS else ""
        lines.append(f"{trunk}{'└─ ' if last[-1] else '├─ '}{deep}{label(node, depth)}")
    return "\n".join(lines)


def as_svg(dump: CacheDump) -> str:
    """One row a node: a bar from its first token to its last, dark where KV is held, and a dot for
    a state."""
    end = max((node.end for node in dump.nodes), default=1)
    nodes = [(node, depth) for node, depth, _ in _walk(dump)]
    rows = [_svg_row(i, node, depth, end, dump.page_size) for i, (node, depth) in enumerate(nodes)]
    height = (len(rows) + 3) * _ROW
    width = max([_WIDTH, *(_label_x(depth) + _LETTER * len(label(node, depth)) for node, depth in nodes)])
    title = "".join(
        f'<text x="8" y="{(i + 1) * _ROW - 4}">{escape(line)}</text>'
        for i, line in enumerate(summary(dump).split("\n"))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="monospace" font-size="11"><rect width="100%" height="100%" fill="#ffffff"/>{title}'
        f"{''.join(rows)}</svg>\n"
    )


def label(node: DumpedNode, depth: int) -> str:
    parts = [f"{node.start}..{node.end}", f"{node.pages} pages"]
    parts += ["state"] * node.state + ["tail"] * node.tail
    parts += [f"{node.readers} readers"] * bool(node.readers) + [f"salt {node.salt}"] * (not depth and bool(node.salt))
    return ", ".join(parts) + (f"  {shortened(node.text)}" if node.text is not None else "")


def shortened(text: str) -> str:
    whole = ascii(text[: _TEXT + 1])
    return whole if len(text) <= _TEXT else ascii(text[:_TEXT]) + "..."


def _walk(dump: CacheDump) -> Iterator[tuple[DumpedNode, int, tuple[bool, ...]]]:
    """Walks in preorder: (node, depth, whether each node on its path is the last child)."""
    children: dict[int, list[int]] = {}
    for i, node in enumerate(dump.nodes):
        children.setdefault(node.parent, []).append(i)
    roots = children.get(-1, [])
    open_nodes: list[tuple[int, int, tuple[bool, ...]]] = [(i, 0, (i == roots[-1],)) for i in reversed(roots)]
    while open_nodes:
        i, depth, last = open_nodes.pop()
        yield dump.nodes[i], depth, last
        below = children.get(i, [])
        open_nodes += [(j, depth + 1, (*last[:_LEVELS], j == below[-1])) for j in reversed(below)]


def _svg_row(row: int, node: DumpedNode, depth: int, end: int, page_size: int) -> str:
    y = (row + 3) * _ROW
    scale = _BAR / end
    left, right = 8 + node.start * scale, 8 + node.end * scale
    held = min(left + node.pages * page_size * scale, right)
    dot = f'<circle cx="{right:.1f}" cy="{y - 4}" r="4" fill="#c0392b"/>' if node.state else ""
    return (
        f'<rect x="{left:.1f}" y="{y - 8}" width="{right - left:.1f}" height="8" fill="#d6dce5"/>'
        f'<rect x="{left:.1f}" y="{y - 8}" width="{held - left:.1f}" height="8" fill="#2e5c8a"/>{dot}'
        f'<text x="{_label_x(depth)}" y="{y}">{escape(label(node, depth))}</text>'
    )


def _label_x(depth: int) -> int:
    return _BAR + 24 + min(depth, _LEVELS) * _INDENT
