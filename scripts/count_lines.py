"""Counts lines of code by package: no blank lines, no comments, no docstrings.

python scripts/count_lines.py [CHECKOUT] [--list FILE]

With --list it also counts, by headings, what the lines of FILE name: a folder, a file, or a name in a file
("engine/llm.py:LLM.chat"). scripts/new_since_repairs.txt names what has come since the lines of code were counted last.
"""

import argparse
import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

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
        ValueError: a line names what the checkout does not have.
    """
    counts: Counter[str] = Counter()
    heading, before = "", "first"
    for line in listing.splitlines():
        if line.startswith("#"):
            heading = line.removeprefix("# ") if not before else heading
        elif line:
            counts[heading] += _lines_at(checkout, *line.partition(":")[::2])
        before = line
    return counts


def _lines_at(checkout: Path, place: str, name: str) -> int:
    path = checkout / place
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path] if path.is_file() else []
    if not files:
        raise ValueError(f"{place} is not there: take it out of the list")
    if not name:
        return sum(code_lines(file.read_text()) for file in files)
    source = path.read_text()
    node: ast.AST = ast.parse(source)
    for part in name.split("."):
        found = [each for each in ast.iter_child_nodes(node) if getattr(each, "name", None) == part]
        if not found:
            raise ValueError(f"{place} has no {name}: take it out of the list")
        node = found[-1]
    assert isinstance(node, DOCUMENTED) and not isinstance(node, ast.Module)
    first = min(each.lineno for each in (node, *node.decorator_list))
    return len(numbers_of_code(source) & set(range(first, (node.end_lineno or first) + 1)))


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
