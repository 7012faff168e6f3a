"""Counts lines of code by package: no blank lines, no comments, no docstrings.

python scripts/count_lines.py [CHECKOUT] [--list FILE]

With --list it also counts, by headings, what the lines of FILE name: a folder, a file, or a class, function or constant
of a file ("engine/api/llm.py:LLM.chat"). scripts/new_since_repairs.txt names what has come since the lines of code were
counted last.
"""

import argparse
import ast
import io
import tokenize
from collections import Counter
from pathlib import Path
from typing import Any

FOLDERS = ("hybridrt", "models", "mem_cache")
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
SILENT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def numbers_of_code(source: str) -> set[int]:
    """Numbers of the lines of `source` that hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in SILENT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node):
            docstring = node.body[0]
            lines.difference_update(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    return lines


def code_lines(source: str) -> int:
    """Lines of `source` that hold code."""
    return len(numbers_of_code(source))


def count(checkout: Path) -> Counter[str]:
    """Lines of code by folder of a checkout."""
    counts: Counter[str] = Counter()
    for folder in FOLDERS:
        for file in sorted((checkout / folder).rglob("*.py")):
            counts[str(file.parent.relative_to(checkout))] += code_lines(file.read_text())
    return counts


def count_listed(checkout: Path, listing: str) -> Counter[str]:
    """Lines of code by heading of a list. A heading is a comment behind an empty line.

    Raises:
        ValueError: a line names what the checkout does not have, or what another line has counted.
    """
    counts: Counter[str] = Counter()
    counted: set[tuple[Path, int]] = set()
    heading, before = "", "first"
    for line in listing.splitlines():
        if line.startswith("#"):
            heading = line.removeprefix("# ") if not before else heading
        elif line:
            lines = _lines_at(checkout, *line.partition(":")[::2])
            if lines & counted:
                raise ValueError(f"{line} is counted twice: take it out of the list")
            counted |= lines
            counts[heading] += len(lines)
        before = line
    return counts


def _lines_at(checkout: Path, place: str, name: str) -> set[tuple[Path, int]]:
    """The files and numbers of the lines that a line of a list counts."""
    path = checkout / place
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path] if path.is_file() else []
    if not files:
        raise ValueError(f"{place} is not there: take it out of the list")
    if not name:
        return {(file, number) for file in files for number in numbers_of_code(file.read_text())}
    source = path.read_text()
    node: Any = ast.parse(source)
    for part in name.split("."):
        found = [each for each in ast.iter_child_nodes(node) if part in _names(each)]
        if not found:
            raise ValueError(f"{place} has no {name}: take it out of the list")
        node = found[-1]
    first = min(each.lineno for each in (node, *getattr(node, "decorator_list", ())))
    return {(path, number) for number in numbers_of_code(source) & set(range(first, node.end_lineno + 1))}


def _names(node: Any) -> list[str]:
    """What a class, a function or an assignment to one name defines."""
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [target.id for target in targets if isinstance(target, ast.Name)]
    return [node.name] if isinstance(node, DOCUMENTED) and not isinstance(node, ast.Module) else []


def show(counts: Counter[str]) -> None:
    """Prints a table of them."""
    for what, lines in sorted(counts.items()):
        print(f"{lines:6} {what}")
    print(f"{counts.total():6} in all")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", nargs="?", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--list", type=Path, metavar="FILE")
    given = parser.parse_args()
    counts = count(given.checkout)
    show(counts)
    if given.list is not None:
        listed = count_listed(given.checkout, given.list.read_text())
        print()
        show(listed)
        print(f"{counts.total() - listed.total():6} without these")
