"""Page (Markdown) and diagram (SVG) of a comparison of two servers."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from hybridrt.bench.timing import Timing
from hybridrt.verify.page import cell

WIDTH, HEIGHT, MARGIN = 420, 240, 44
COLOURS = ("#1f77b4", "#d95f02")
POINTS = 200  # of a curve
_TIMES = ("time_to_first_token_ms", "inter_token_latency_ms", "end_to_end_latency_ms")
LISTED = 50
LETTERS = 200  # of a text


def page(found: Mapping[str, Any], urls: Sequence[str], picture: str | None) -> str:
    """`found`: Comparison.as_json. `picture`: the file next to the page."""
    scores = found["logprob_difference"]
    lines = [
        "# Two servers, the same requests", "", f"- A: {_cell(urls[0])}", f"- B: {_cell(urls[1])}",
        f"- requests: {found['requests']}",
        f"- equal answers: {found['equal']}, changed: {found['changed']}, of these at ties: {found['at_ties']}",
        f"- failed: {found['failed'][0]} of A, {found['failed'][1]} of B",
        f"- compared by: {', '.join(f'{name} {count}' for name, count in found['compared_by'].items()) or 'nothing'}",
        f"- log-probabilities of {scores['tokens']} tokens: largest difference {scores['largest']:.4g}, mean "
        f"{scores['mean']:.4g}",
        "", "| milliseconds | A mean | B mean | A p50 | B p50 | A p99 | B p99 |", "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name in _TIMES:
        cells = [f"{found[side][name][column]:.2f}" for column in ("mean", "p50", "p99") for side in "ab"]
        lines.append(f"| {name.removesuffix('_ms').replace('_', ' ')} | {' | '.join(cells)} |")
    if picture is not None:
        lines += ["", f"![Times of both servers]({picture})"]
    if found["changed_requests"]:
        lines += ["", "| request | token | A | B | A held its own likelier by |", "|---|---|---|---|---|"]
    for each in found["changed_requests"][:LISTED]:
        margin = "" if each["margin"] is None else f"{each['margin']:.3g}"
        lines.append(f"| {each['request']} | {each['place']} | {_cell(each['a'])} | {_cell(each['b'])} | {margin} |")
    for side in "ab":
        lines += [f"- {side.upper()} failed: {_cell(error)}" for error in found[side]["errors"]]
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    return cell(str(value)[:LETTERS])


def svg(timings: Sequence[Sequence[Timing]], names: Sequence[str]) -> str:
    """Shares of requests by their times: to the first token, and between tokens."""
    done = [[t for t in side if t.error is None and t.gains] for side in timings]
    panels = (
        ("first token", [[1000 * t.first for t in side] for side in done]),
        ("between tokens", [[1000 * gap for t in side for gap in t.between] for side in done]),
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * WIDTH}" height="{HEIGHT + 24}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{2 * WIDTH}" height="{HEIGHT + 24}" fill="#ffffff"/>',
    ]
    for i, (title, sides) in enumerate(panels):
        parts.append(f'<g transform="translate({i * WIDTH} 0)">{_panel(title, sides)}</g>')
    for i, name in enumerate(names):
        parts.append(f'<text x="{MARGIN + i * WIDTH}" y="{HEIGHT + 16}" fill="{COLOURS[i]}">{escape(name[:60])}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _panel(title: str, sides: Sequence[Sequence[float]]) -> str:
    end = max((value for side in sides for value in side), default=0.0) or 1.0
    width, height = WIDTH - MARGIN - 12, HEIGHT - 2 * MARGIN
    lines = [
        f'<text x="{MARGIN}" y="20">{title}, share of all up to a time in ms</text>',
        f'<rect x="{MARGIN}" y="{MARGIN}" width="{width}" height="{height}" fill="none" stroke="#999999"/>',
        f'<text x="{MARGIN}" y="{HEIGHT - MARGIN + 16}">0</text>',
        f'<text x="{WIDTH - 12}" y="{HEIGHT - MARGIN + 16}" text-anchor="end">{end:.4g}</text>',
    ]
    for side, colour in zip(sides, COLOURS):
        ordered = sorted(side)
        step = max(len(ordered) // POINTS, 1)
        points = [(ordered[i], (i + 1) / len(ordered)) for i in range(0, len(ordered), step)]
        places = " ".join(f"{MARGIN + x / end * width:.1f},{MARGIN + (1 - y) * height:.1f}" for x, y in points)
        lines.append(f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="2"/>')
    return "".join(lines)
