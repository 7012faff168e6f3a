"""Writes hybridrt/assets/option_rows.json: the options of vLLM and SGLang of docs/migrate.md, for errors.

python scripts/option_rows.py
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from hybridrt.cli.foreign_options import ROWS

DOCUMENT = Path(__file__).parents[1] / "docs" / "migrate.md"
TITLES = ("vllm serve", "sglang.launch_server")


def table(title: str) -> Iterator[list[str]]:
    """The cells of each row of the table under a heading."""
    text = DOCUMENT.read_text().split(f"## {title}\n")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    for line in lines[2:]:
        yield [cell.strip() for cell in line.strip("|").split("|")]


def names(cell: str) -> list[str]:
    """What a cell has as code."""
    return re.findall(r"`([^`]+)`", cell)


def document() -> str:
    """The file: [options of theirs, ours, remark] on each line."""
    rows = [[names(theirs), names(ours) or [ours], _plain(remark)] for t in TITLES for theirs, ours, remark in table(t)]
    return "[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n"


def _plain(remark: str) -> str:
    return re.sub(r"\[[^]]*\]\(([^)#]*)[^)]*\)", r"docs/\1", remark).replace("`", "")


if __name__ == "__main__":
    ROWS.write_text(document())
