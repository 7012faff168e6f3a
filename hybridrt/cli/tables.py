"""How tables and byte counts look on a terminal."""

import sys
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

PIPED_WIDTH = 120
UNITS = ("KiB", "MiB", "GiB", "TiB")


def console() -> Console:
    """Standard output: as wide as the terminal, wide enough for whole rows where it is none."""
    return Console(width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False, soft_wrap=False)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] = ()) -> Table:
    """Columns named in `right` hold numbers."""
    built = Table(title=title, title_justify="left", title_style="bold", header_style="dim", box=None, pad_edge=False)
    for column in columns:
        built.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        built.add_row(*map(escape, row))
    return built


def bytes_text(count: int) -> str:
    """1536 as "1.5 KiB"; 0 as "-"."""
    if not count:
        return "-"
    power = min((count.bit_length() - 1) // 10, len(UNITS))
    if not power:
        return f"{count} B"
    size = count / 1024**power
    return f"{size:.{0 if size >= 100 else 1}f} {UNITS[power - 1]}"


def ranges_text(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 4] as "0-2, 4"; ascending."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
