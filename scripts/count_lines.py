"""Counts lines of code by package: no blank lines, no comments, no docstrings.

python scripts/count_lines.py [CHECKOUT]
"""

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

FOLDERS = ("hybridrt", "models", "mem_cache")
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
SILENT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(source: str) -> int:
    """Lines of `source` that hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in SILENT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node):
            docstring = node.body[0]
            lines.difference_update(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    return len(lines)


def count(checkout: Path) -> Counter[str]:
    """Lines of code by folder of a checkout."""
    counts: Counter[str] = Counter()
    for folder in FOLDERS:
        for file in sorted((checkout / folder).rglob("*.py")):
            counts[str(file.parent.relative_to(checkout))] += code_lines(file.read_text())
    return counts


if __name__ == "__main__":
    counts = count(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1])
    for folder, lines in sorted(counts.items()):
        print(f"{lines:6} {folder}")
    print(f"{counts.total():6} in all")
