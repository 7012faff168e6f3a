"""Draws docs/decode.svg and docs/prefill.svg: hybridrt next to the peers and the bytes floor.

With `serving-chunks.json` docs/chunks.svg too: what the size of chunks means for latency. With
`prefix-chat.json` docs/prefix.svg: what the prefix cache saves. The numbers are those of
benchmarks/results/shown, which are those of the tables in docs/performance.md.

python -m benchmarks.plot_results
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

from benchmarks.common import RESULTS

DOCS = Path(__file__).parents[1] / "docs"
SHOWN = RESULTS / "shown"
OURS, FLOOR = "hybridrt", "bytes floor"
CLASSIC, FA3 = "hybridrt, classic", "with FA3"
COLOURS = {OURS: "#2563eb", CLASSIC: "#93c5fd", FA3: "#1e3a8a", "vLLM 0.24.0": "#9ca3af", "SGLang 0.5.15": "#d1d5db"}
COLOURS |= {"with the cache": "#2563eb", "without": "#9ca3af", "new tokens alone": "#93c5fd"}
# Milliseconds of a decode step, by batch, and prompt tokens a second: the same GPU, weights and shapes.
PEER_DECODE = {
    "falcon-h1-7b": {
        "vLLM 0.24.0": {1: 6.09, 32: 10.02, 128: 20.25, 256: 36.05},
        "SGLang 0.5.15": {1: 7.34, 32: 12.49, 128: 25.02, 256: 44.76},
    },
    "nemotron-h-8b": {"vLLM 0.24.0": {1: 4.69, 32: 6.71, 128: 13.01}},
    "falcon-h1-0.5b": {"SGLang 0.5.15": {1: 3.37}},
}
PEER_PREFILL = {
    "falcon-h1-7b": {
        "vLLM 0.24.0": {"1x8192": 35800, "16x2048": 37536, "1x32768": 29533},
        "SGLang 0.5.15": {"1x8192": 22905, "16x2048": 23470, "1x32768": 19612},
    }
}
TITLES = {
    "falcon-h1-7b": "Falcon-H1-7B, bfloat16 state", "nemotron-h-8b": "Nemotron-H-8B, float32 state",
    "falcon-h1-0.5b": "Falcon-H1-0.5B, bfloat16 state", "qwen3-next-12l": "Qwen3-Next, 12 layers, bfloat16 state",
}  # fmt: skip
WIDTH, LEFT, BAR, GAP, LEGEND = 640, 84, 11, 8, 112


@dataclass(frozen=True)
class Group:
    """Bars side by side: values by series, and where the floor is. ValueError if a bar is below its floor: then one of
    the two is wrong, or it is no floor."""

    label: str
    values: dict[str, float]
    floor: float | None = None

    def __post_init__(self) -> None:
        if self.floor is not None and min(self.values.values()) < self.floor:
            raise ValueError(f"{self.label}: {self.values} has a value below its floor, {self.floor}")


@dataclass(frozen=True)
class Panel:
    """Groups on one scale."""

    title: str
    groups: list[Group]


def rows_of(results: Path, name: str) -> dict[str, dict[str, float]]:
    """What a result file says, by its `what`; nothing where there is no such file."""
    path = results / f"{name}.json"
    return {row["what"]: row for row in json.loads(path.read_text())["rows"]} if path.exists() else {}


def decode_panels(results: Path) -> Iterator[Panel]:
    for model, title in TITLES.items():
        ours, classic = (rows_of(results, name) for name in (model, f"{model}-classic"))
        groups = []
        for what, row in ours.items():
            if not what.startswith("decode batch "):
                continue
            batch = int(what.split()[-1])
            values = {OURS: row["ms"]} | ({CLASSIC: classic[what]["ms"]} if what in classic else {})
            values |= {peer: ms[batch] for peer, ms in PEER_DECODE.get(model, {}).items() if batch in ms}
            groups.append(Group(f"batch {batch}", values, row.get("floor_ms")))
        if groups:
            yield Panel(title, groups)


def prefill_panels(results: Path) -> Iterator[Panel]:
    for model, title in TITLES.items():
        rates = {series: rows_of(results, f"{model}{end}") for series, end in ((OURS, ""), (FA3, "-fa3"))}
        shapes = [what.split()[-1] for what in rates[OURS] if what.startswith("prefill ")]
        groups = []
        for shape in shapes:
            values = {
                name: rows[f"prefill {shape}"]["tok/s"] for name, rows in rates.items() if f"prefill {shape}" in rows
            }
            values |= {peer: found[shape] for peer, found in PEER_PREFILL.get(model, {}).items() if shape in found}
            groups.append(Group(shape.replace("x", " x "), values))
        if groups:
            yield Panel(title.split(",")[0], groups)


def chunk_panels(results: Path, load: str = "80%") -> list[Panel]:
    """Latency at a load, and saturated throughput, by size of chunks or target of the time between tokens."""
    path, panels = results / "serving-chunks.json", []
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    for title, at, what in (
        ("Between tokens, p99, ms", load, "between tokens p99 ms"),
        ("First token, p99, ms", load, "first token p99 ms"),
        ("Requests a second, saturated", "saturated", "requests/s"),
    ):  # fmt: skip
        found = [(row["chunk"], row["target_itl_ms"], row[what]) for row in rows if row["load"] == at]
        groups = [Group(f"{chunk}" if ms is None else f"target {ms:g} ms", {OURS: v}) for chunk, ms, v in found]
        panels += [Panel(title, groups)] if groups else []
    return panels


def prefix_panels(results: Path) -> list[Panel]:
    """Conversations with the prefix cache and without: the first token, and throughput, by model."""
    path, panels = results / "prefix-chat.json", []
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    for title, what in (("First token, p50, ms", "first token p50 ms"), ("All at once, tokens a second", "tok/s")):
        values = {model: {r["run"]: r[what] for r in rows if r["model"] == model and what in r} for model in TITLES}
        groups = [Group(model.removesuffix("-12l"), of_model) for model, of_model in values.items() if of_model]
        panels += [Panel(title, groups)] if groups else []
    return panels


def text(x: float, y: float, content: str, anchor: str = "start", weight: str = "normal") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" font-weight="{weight}">{escape(content)}</text>'


def draw(title: str, unit: str, panels: list[Panel], digits: int) -> str:
    """Horizontal bars, every panel on its own scale; the floor is a line across the bars of its group."""
    parts, y = [text(8, 20, title, weight="bold")], 34.0
    used = [name for name in COLOURS if any(name in g.values for p in panels for g in p.groups)]
    for i, name in enumerate(used):
        parts.append(f'<rect x="{LEFT + i * LEGEND}" y="{y}" width="10" height="10" fill="{COLOURS[name]}"/>')
        parts.append(text(LEFT + i * LEGEND + 14, y + 9, name))
    if any(g.floor for p in panels for g in p.groups):
        x = LEFT + len(used) * LEGEND
        parts += [f'<path d="M{x} {y}v10" stroke="#dc2626" stroke-width="2"/>', text(x + 6, y + 9, FLOOR)]
    y += 26
    for panel in panels:
        parts.append(text(8, y + 8, panel.title, weight="bold"))
        y += 16
        scale = (WIDTH - LEFT - 60) / max(value for g in panel.groups for value in g.values.values())
        for group in panel.groups:
            height = BAR * len(group.values)
            parts.append(text(LEFT - 8, y + height / 2 + 4, group.label, "end"))
            for i, (name, value) in enumerate(group.values.items()):
                top, width = y + i * BAR, value * scale
                parts.append(
                    f'<rect x="{LEFT}" y="{top:.0f}" width="{width:.1f}" height="{BAR - 1}" fill="{COLOURS[name]}"/>'
                )
                parts.append(text(LEFT + width + 4, top + 9, f"{value:,.{digits}f}{unit}"))
            if group.floor:
                x = LEFT + group.floor * scale
                parts.append(f'<path d="M{x:.1f} {y - 2:.0f}v{height + 3}" stroke="#dc2626" stroke-width="2"/>')
            y += height + GAP
        y += 6
    style = 'font-family="sans-serif" font-size="10" fill="#1f2937"'
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y:.0f}" {style}>\n'
        f'<rect width="{WIDTH}" height="{y:.0f}" fill="#fff"/>\n{body}\n</svg>\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=SHOWN, help="directory of JSON files")
    parser.add_argument("--out", type=Path, default=DOCS, help="directory of the pictures")
    args = parser.parse_args()
    decode, prefill = list(decode_panels(args.results)), list(prefill_panels(args.results))
    context = "A decode step around 1024 tokens of context, one H200"
    (args.out / "decode.svg").write_text(draw(context, " ms", decode, 2))
    (args.out / "prefill.svg").write_text(draw("Prompt tokens a second, one H200", "", prefill, 0))
    if chunks := chunk_panels(args.results):
        (args.out / "chunks.svg").write_text(
            draw("Prompt tokens of a step, arrivals at 80% of saturation", "", chunks, 1)
        )
    if prefixes := prefix_panels(args.results):
        title = "Chats of 8 turns at 60% of the uncached rate, and all at once, one H200"
        (args.out / "prefix.svg").write_text(draw(title, "", prefixes, 1))


if __name__ == "__main__":
    main()
