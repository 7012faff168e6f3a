"""Tables, byte counts and parameter counts on a terminal."""

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.filesize import pick_unit_and_suffix
from rich.markup import escape
from rich.table import Table

PIPED_WIDTH = 120
READABLE = 16  # characters of a column with wrapped text


def console() -> Console:
    """Standard output, as wide as the terminal, else PIPED_WIDTH."""
    return Console(width=None if sys.stdout.isatty() else PIPED_WIDTH, highlight=False, soft_wrap=False)


def print_table(
    out: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()
) -> None:
    """Prints a table. On a console too narrow for the longest words, prints each row as a list.

    Args:
        columns: their names; columns in `right` hold numbers.
    """
    built = Table(title=title, title_justify="left", title_style="bold", header_style="dim", box=None, pad_edge=False)
    for column in columns:
        built.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        built.add_row(*map(escape, row))
    if _least_width(columns, rows) <= out.width:
        out.print(built)
        return
    out.print(title, style="bold", markup=False)
    width = max(map(len, columns))
    for row in rows:
        entry = Table(show_header=False, box=None, pad_edge=False)
        entry.add_column(style="dim", min_width=width)
        entry.add_column(overflow="fold")
        for column, cell in zip(columns, row):
            if cell:
                entry.add_row(column, escape(cell))
        out.print(entry, "")


def _least_width(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    width = 2 * (len(columns) - 1)
    for cells in zip(columns, *rows):
        longest_word = max((len(word) for cell in cells for word in cell.split()), default=0)
        width += max(longest_word, min(max(map(len, cells)), READABLE))
    return width


def bytes_text(count: int) -> str:
    """1536 as "1.5 KiB"; 0 as "-"."""
    unit, name = pick_unit_and_suffix(count, ["B", "KiB", "MiB", "GiB", "TiB"], 1024)
    return f"{count / unit:.{0 if unit == 1 or count >= 100 * unit else 1}f} {name}" if count else "-"


def count_text(count: int) -> str:
    """5730000 as "5.73 M", in the short scale: K, M, B, T."""
    rounded = float(f"{count:.3g}")
    unit, name = pick_unit_and_suffix(int(rounded), ["", " K", " M", " B", " T"], 1000)
    return f"{rounded / unit:g}{name}"


def ranges_text(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 4] as "0-2, 4"; ascending."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
