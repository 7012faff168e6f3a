"""A picture of kernels over time: one lane a stream, one colour a kernel. `profile_step --picture` draws it."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

WIDTH, LANE, LEGEND_LINE, MARGIN = 1200, 34, 16, 40
COLOURS = ("#2563eb", "#f59e0b", "#10b981", "#ef4444", "#8b5cf6", "#14b8a6", "#f472b6", "#84cc16", "#0ea5e9", "#a16207")
OTHER = "#9ca3af"


@dataclass(frozen=True)
class Span:
    """One kernel's run: microseconds from the start of the picture, and which stream it ran on."""

    name: str
    stream: int
    start: float
    end: float


def draw(spans: Sequence[Span], path: str | Path) -> None:
    """Writes an SVG of `spans`; the kernels that take most time have colours of their own, the rest are grey."""
    total: dict[str, float] = {}
    for span in spans:
        total[span.name] = total.get(span.name, 0.0) + span.end - span.start
    heaviest = sorted(total, key=lambda name: -total[name])[: len(COLOURS)]
    colour = dict(zip(heaviest, COLOURS))
    streams = sorted({span.stream for span in spans})
    begin, end = min(span.start for span in spans), max(span.end for span in spans)
    scale = (WIDTH - 2 * MARGIN) / max(end - begin, 1e-9)
    legend_top = 24 + LANE * len(streams) + 30
    height = legend_top + LEGEND_LINE * (len(heaviest) + 1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        f'font-size="11"><rect width="{WIDTH}" height="{height}" fill="white"/>'
    ]
    for span in spans:
        x, y = MARGIN + (span.start - begin) * scale, 24 + LANE * streams.index(span.stream)
        parts.append(
            f'<rect x="{x:.2f}" y="{y}" width="{max((span.end - span.start) * scale, 0.15):.2f}" height="{LANE - 6}" '
            f'fill="{colour.get(span.name, OTHER)}" fill-opacity="0.8"/>'
        )
    parts.append(f'<text x="{MARGIN}" y="16">{len(spans)} launches in {(end - begin) / 1e3:.2f} ms</text>')
    for i in range(11):
        x, ms = MARGIN + (WIDTH - 2 * MARGIN) * i / 10, (end - begin) * i / 1e4
        parts.append(f'<text x="{x:.0f}" y="{legend_top - 14}" text-anchor="middle">{ms:.2f}</text>')
    rest = sum(total.values()) - sum(total[name] for name in heaviest)
    for i, (name, share) in enumerate([*((n, total[n]) for n in heaviest), ("all others", rest)]):
        y = legend_top + LEGEND_LINE * i
        parts.append(f'<rect x="{MARGIN}" y="{y}" width="12" height="10" fill="{colour.get(name, OTHER)}"/>')
        parts.append(f'<text x="{MARGIN + 18}" y="{y + 9}">{escape(name[:100])}: {share:.0f} µs</text>')
    Path(path).write_text("\n".join([*parts, "</svg>"]), encoding="utf-8")
