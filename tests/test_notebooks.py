"""The notebooks are valid, stored without outputs, linked, and run as they are, without Jupyter."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
BOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
CPU_SECONDS = 240  # two minutes on two cores
WALL_SECONDS = 900  # other tests may have the cores
# Runs the code cells of a notebook in one namespace, as Jupyter does. A line before each names it.
RUNNER = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[2]),) * 2)
names = {"__name__": "__main__"}
for cell in json.load(open(sys.argv[1], encoding="utf-8"))["cells"]:
    if cell["cell_type"] == "code":
        print("cell", cell["id"], flush=True)
        exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
"""
each_book = pytest.mark.parametrize("book", BOOKS, ids=lambda book: book.stem)


def cells_of(book: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(book.read_text("utf-8"))["cells"]
    return found


def test_there_are_two() -> None:
    assert [book.stem for book in BOOKS] == ["quick_start", "recurrent_state"]


@each_book
def test_it_is_of_format_4_5(book: Path) -> None:
    """Rules of nbformat's schema 4.5, and a text before the first code."""
    content = json.loads(book.read_text("utf-8"))
    assert set(content) == {"cells", "metadata", "nbformat", "nbformat_minor"}
    assert (content["nbformat"], content["nbformat_minor"]) == (4, 5)
    assert content["metadata"]["kernelspec"] == {"display_name": "Python 3", "language": "python", "name": "python3"}
    names = [cell["id"] for cell in content["cells"]]
    assert len(names) == len(set(names)) and all(re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name) for name in names)
    assert content["cells"][0]["cell_type"] == "markdown" and "".join(content["cells"][0]["source"]).startswith("# ")
    for cell in content["cells"]:
        keys = {"cell_type", "id", "metadata", "source"}
        keys |= {"execution_count", "outputs"} if cell["cell_type"] == "code" else set()
        assert set(cell) == keys and cell["cell_type"] in ("code", "markdown") and cell["metadata"] == {}
        assert cell["source"] and all(line.endswith("\n") for line in cell["source"][:-1])
        assert not cell["source"][-1].endswith("\n")


@each_book
def test_it_has_no_outputs(book: Path) -> None:
    """They would be of another version."""
    code = [cell for cell in cells_of(book) if cell["cell_type"] == "code"]
    assert code and all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


@each_book
def test_readers_find_it(book: Path) -> None:
    for page in ("README.md", "docs/tour.md"):
        assert f"notebooks/{book.name}" in (ROOT / page).read_text(), page
    named = re.findall(r"`((?:docs|examples)/[\w./-]+)`", book.read_text("utf-8"))
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.slow
@each_book
def test_it_runs(book: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", RUNNER, str(book), str(CPU_SECONDS)]
    settings = os.environ | {"MPLBACKEND": "agg", "PYTHONPATH": str(ROOT)}
    settings.pop("TRITON_INTERPRET", None)
    result = subprocess.run(command, cwd=tmp_path, env=settings, capture_output=True, text=True, timeout=WALL_SECONDS)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    names = [cell["id"] for cell in cells_of(book) if cell["cell_type"] == "code"]
    assert re.findall(r"^cell (\S+)$", result.stdout, re.MULTILINE) == names
