"""Writes the file table of docs/structure.md: a line a file, the first line of its docstring.

python scripts/file_table.py
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "structure.md"
BEGIN, END = "<!-- files -->", "<!-- end of files -->"
# Section title, and the folders whose files it lists. A folder without "/**" lists its own files alone.
SECTIONS = (
    ("What all other parts use", ("hybridrt",)),
    ("Kinds of recurrent layers", ("hybridrt/kinds",)),
    ("Families of models: how their config.json is read", ("hybridrt/families",)),
    ("Kernels: one operation a file, its Triton kernel beside it", ("hybridrt/kernels",)),
    ("Kernels of installed libraries", ("hybridrt/kernels/libraries",)),
    ("Memory", ("mem_cache",)),
    ("Backends", ("hybridrt/attention",)),
    ("Tensor parallel ranks", ("hybridrt/distributed",)),
    ("Layers", ("hybridrt/layers",)),
    ("Models", ("models",)),
    ("Runtime: steps on a device", ("hybridrt/runtime",)),
    ("Speculative decoding", ("hybridrt/speculative",)),
    ("Chat: conversations, tool calls, reasoning", ("hybridrt/chat", "hybridrt/chat/tool_parsers")),
    ("Engine: requests on the host", ("hybridrt/engine",)),
    ("State transfer", ("hybridrt/transfer",)),
    ("The surface for other engines", ("hybridrt/embedding",)),
    ("Server: the HTTP API", ("hybridrt/server",)),
    ("Benchmarks of the command line", ("hybridrt/bench",)),
    ("Command line", ("hybridrt/cli",)),
    ("Benchmarks, examples and scripts", ("benchmarks", "examples", "scripts")),
)


def first_line(file: Path) -> str:
    """The docstring's first line, without a link or a full stop at its end, as a cell of a Markdown table."""
    line = (ast.get_docstring(ast.parse(file.read_text())) or "").split("\n")[0]
    return re.sub(r" \(https?://\S+\)", "", line).rstrip(".").replace("|", "\\|")


def section(title: str, folders: tuple[str, ...]) -> str:
    """One section of the table, or nothing where none of its folders has a file."""
    files = [f for folder in folders for f in sorted((ROOT / folder).glob("*.py")) if f.read_text().strip()]
    rows = [f"| `{f.relative_to(ROOT)}` | {first_line(f)} |" for f in files]
    return "\n".join([f"### {title}", "", "| file | what it is |", "|---|---|", *rows, ""]) if rows else ""


def document(text: str) -> str:
    """`text` with its table made anew."""
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    table = "\n".join(filter(None, (section(*entry) for entry in SECTIONS)))
    return f"{before}{BEGIN}\n\n{table}\n{END}{after}"


if __name__ == "__main__":
    DOCUMENT.write_text(document(DOCUMENT.read_text()))
