"""Pictures of docs/ against the tables next to them: the same numbers, drawn anew, and no bar below its floor."""

import json
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import plot_results
from benchmarks.common import RESULTS
from benchmarks.plot_results import CLASSIC, DOCS, FA3, OURS, Group

SHOWN = plot_results.SHOWN
PICTURES = ("decode", "prefill", "chunks", "prefix")


def table_rows(document: str) -> dict[str, list[list[float]]]:
    """The rows of all tables by their first cell; of each further cell the numbers in front of any bracket."""
    found: dict[str, list[list[float]]] = {}
    for line in (DOCS / document).read_text().splitlines():
        if line.startswith("|"):
            first, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            found.setdefault(first, [numbers(cell.partition("(")[0]) for cell in cells])
    return found


def numbers(text: str) -> list[float]:
    return [float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*(?:\.\d+)?", text)]


def row(start: str) -> list[list[float]]:
    """The row whose first cell is that, or begins so."""
    rows = table_rows("performance.md")
    found = [start] if start in rows else [first for first in rows if first.startswith(start)]
    assert len(found) == 1, (start, found)
    return rows[found[0]]


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_drawn_from_the_numbers_that_are_there(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["plot_results", "--out", str(tmp_path)])
    plot_results.main()
    assert (tmp_path / f"{name}.svg").read_text() == (DOCS / f"{name}.svg").read_text(), (
        "run python -m benchmarks.plot_results"
    )


def test_every_picture_has_data() -> None:
    """Each is redrawn by a test; the architecture has no numbers."""
    assert {path.stem for path in DOCS.glob("*.svg")} == {*PICTURES, "hybrid-recall", "architecture"}


def groups(title: str) -> dict[str, Group]:
    (panel,) = (p for p in plot_results.decode_panels(SHOWN) if p.title.startswith(title))
    return {group.label.removeprefix("batch "): group for group in panel.groups}


def test_decode_steps_are_those_of_the_tables() -> None:
    falcon = groups("Falcon-H1-7B")
    for batch, group in falcon.items():
        ours, floor, classic, _, peers = row(f"decode, batch {batch}")
        assert [group.values[OURS]] == ours and [group.floor] == floor[:1]
        assert [group.values[CLASSIC]] == classic if classic else CLASSIC not in group.values
        assert [min(v for name, v in group.values.items() if name.split()[0] in ("vLLM", "SGLang"))] == peers
    for title, start in (
        ("Nemotron-H-8B", "the same, float32 state"), ("Falcon-H1-0.5B", "Falcon-H1-0.5B"),
        ("Qwen3-Next", "Qwen3-Next, 12 layers, bfloat16 state"),
    ):  # fmt: skip
        lines = (DOCS / "performance.md").read_text().splitlines()
        at = next(i for i, line in enumerate(lines) if line.startswith(f"| {start}"))
        ours, floors = (
            [numbers(c.partition("(")[0]) for c in lines[i].strip("|").split("|")[1:]] for i in (at, at + 1)
        )
        shown = groups(title)
        assert [shown[batch].values[OURS] for batch in shown] == [cell[0] for cell in ours if cell]
        assert [shown[batch].floor for batch in shown] == [cell[0] if cell else None for cell in floors[: len(shown)]]


def test_prefills_are_those_of_the_table() -> None:
    (panel,) = plot_results.prefill_panels(SHOWN)
    for group in panel.groups:
        rates, *_, peers = row(f"prefill {group.label.replace(' x ', chr(0xD7))},")
        assert [group.values[OURS], group.values[FA3]] == rates
        assert [max(v for name, v in group.values.items() if name not in (OURS, FA3))] == peers


def test_sizes_of_chunks_are_those_of_the_table() -> None:
    between, first, saturated = plot_results.chunk_panels(SHOWN)
    starts = {
        "4096": "4096 tokens a step",
        "target 15 ms": "4096 with a target of 15",
        "target 20 ms": "4096 with a target of 20",
    }
    for i, group in enumerate(saturated.groups):
        requests, _, latencies = row(starts.get(group.label, group.label))
        assert [group.values[OURS]] == requests
        assert [first.groups[i].values[OURS], between.groups[i].values[OURS]] == latencies


def test_what_the_cache_saves_is_that_of_the_table() -> None:
    first, throughput = plot_results.prefix_panels(SHOWN)
    for group, start in zip(first.groups, ("first token at 60%", "Qwen3-Next, 12 layers, first token"), strict=True):
        assert [[v] for v in group.values.values()] == row(start)[:3]
    for group, start in zip(throughput.groups, ("Falcon-H1-7B, all at once", "all at once"), strict=True):
        assert [[v] for v in group.values.values()] == row(start)[:2]


def test_no_bar_is_below_its_floor() -> None:
    """By the picture itself: the floor's line crosses bars from the left, or ends where they end."""
    marks = 0
    bars: list[tuple[float, float]] = []  # top and right end
    for element in ElementTree.parse(DOCS / "decode.svg").getroot():
        if element.tag.endswith("rect") and element.get("height") == str(plot_results.BAR - 1):
            bars.append((float(element.get("y", "")), plot_results.LEFT + float(element.get("width", ""))))
        found = re.fullmatch(r"M([\d.]+) ([\d.]+)v(\d+)", element.get("d") or "")
        if found and int(found[3]) > 10:
            x, top, height = float(found[1]), float(found[2]), int(found[3])
            crossed = [right for y, right in bars if top <= y < top + height]
            assert crossed and min(crossed) >= x - 0.1, (x, crossed)
            marks += 1
    assert marks == 11


def test_a_bar_below_its_floor_cannot_be_drawn() -> None:
    with pytest.raises(ValueError, match=r"below its floor, 5\.05"):
        Group("batch 32", {OURS: 5.0, "vLLM 0.24.0": 6.0}, 5.05)


def test_recall_is_that_of_its_table_and_its_picture(tmp_path: Path) -> None:
    recall = json.loads((RESULTS / "recall.json").read_text())
    rows = table_rows("hybrid-layer.md")
    distances = [str(int(cell[0])) for cell in rows["distance of the fact, in tokens"]]
    for label, mode in (("window and history", "enabled"), ("window alone", "disabled")):
        measured = [recall[mode]["recall"][distance] for distance in distances]
        assert [cell[0] for cell in rows[label]] == pytest.approx(measured, abs=0.0051)
    pytest.importorskip("matplotlib")
    from benchmarks import recall_study

    drawn = tmp_path / "recall.svg"
    recall_study.plot({m: recall[m] for m in recall_study.NAMES}, recall["arguments"]["length"], 1 / 8, drawn)
    curves = (
        re.findall(r'<path d="(M [^"]*)" clip-path', path.read_text()) for path in (drawn, DOCS / "hybrid-recall.svg")
    )
    ours, theirs = (sorted(tuple(round(n) for n in numbers(curve)) for curve in found) for found in curves)
    assert ours == theirs and len(ours) >= 2
