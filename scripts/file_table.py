"""Writes docs/files.md: a line for each file, the first sentence of its docstring.

python scripts/file_table.py
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "files.md"
HEAD = """# Files

Every file of the code with the first sentence of its docstring, in the order of imports.
[structure.md](structure.md) explains the folders. `python scripts/file_table.py` writes this page.
"""
# Section title, and the folders whose own files it lists, in the order of imports.
SECTIONS = (
    ("What all other parts use", ("hybridrt", "hybridrt/base")),
    ("Messages between processes, and tensors between ranks", ("hybridrt/channel", "hybridrt/collectives")),
    ("Kinds of recurrent layers: configuration and state", ("hybridrt/kinds",)),
    ("Kernels: what all share", ("hybridrt/kernels/core",)),
    ("Kernels: rings and slots of states", ("hybridrt/kernels/state",)),
    ("Kernels: products, norms, experts", ("hybridrt/kernels/dense",)),
    ("Kernels: products of quantised weights", ("hybridrt/kernels/quant",)),
    ("Kernels: attention", ("hybridrt/kernels/attention",)),
    ("Kernels: sampling", ("hybridrt/kernels/sampling",)),
    ("Kernels: Mamba and linear attention", ("hybridrt/kernels/mamba",)),
    ("Kernels: delta rules", ("hybridrt/kernels/delta_rule",)),
    ("Kernels of installed libraries", ("hybridrt/kernels/libraries",)),
    ("Memory of the device, and its ledger", ("mem_cache", "mem_cache/pools")),
    ("The prefix cache's tree, on the host", ("mem_cache/prefix_tree",)),
    ("Backends of softmax attention, and the interface of all", ("hybridrt/attention",)),
    ("Layers", ("hybridrt/layers", "hybridrt/layers/quant")),
    ("Recurrent layers: mixers and their backends, and the composite", ("hybridrt/recurrent",)),
    ("Models", ("models",)),
    ("Models: config.json", ("models/config",)),
    ("Models: weights", ("models/loading",)),
    ("Models: towers of images", ("models/vision",)),
    ("Runtime: a step's plan, its packed copy and its batch", ("hybridrt/runtime/step",)),
    ("Runtime: sampling", ("hybridrt/runtime/sampling",)),
    ("Runtime: graphs and recordings of steps", ("hybridrt/runtime/replay",)),
    ("Runtime: from a model's name to memory", ("hybridrt/runtime/load",)),
    ("Runtime: the runner of steps", ("hybridrt/runtime/run",)),
    ("Runtime: kernels compiled ahead", ("hybridrt/runtime/precompile",)),
    ("Runtime: choices measured on a GPU", ("hybridrt/runtime/tune",)),
    ("Speculative decoding", ("hybridrt/speculative",)),
    ("Tensor-parallel ranks", ("hybridrt/parallel",)),
    ("The surface for other engines", ("hybridrt/embedding",)),
    ("Images: pictures of requests as spans", ("hybridrt/images",)),
    ("Chat: conversations, tool calls, reasoning", ("hybridrt/chat", "hybridrt/chat/tool_parsers")),
    ("Engine: text", ("hybridrt/engine/text",)),
    ("Engine: grammars", ("hybridrt/engine/grammar",)),
    ("Engine: requests", ("hybridrt/engine/request",)),
    ("Engine: the prefix cache and sessions", ("hybridrt/engine/cache",)),
    ("Engine: the schedule and the loop of steps", ("hybridrt/engine/core",)),
    ("Engine: replicas of one engine", ("hybridrt/engine/replicas",)),
    ("Engine: what users call", ("hybridrt/engine/api",)),
    ("State transfer", ("hybridrt/transfer",)),
    ("Benchmarks of the command line", ("hybridrt/bench",)),
    ("Checks of a checkpoint", ("hybridrt/verify",)),
    ("Server: bytes and errors", ("hybridrt/server/wire",)),
    ("Server: what all protocols share", ("hybridrt/server/core",)),
    ("Server: OpenAI's protocols", ("hybridrt/server/openai",)),
    ("Server: Anthropic's protocol", ("hybridrt/server/anthropic",)),
    ("Server: the application", ("hybridrt/server",)),
    ("Several replicas", ("hybridrt/fleet",)),
    ("Command line", ("hybridrt/cli",)),
    ("Benchmarks, examples and scripts", ("benchmarks", "examples", "scripts")),
    ("Plugins of other engines", ("integrations/sglang/hybridrt_sglang", "integrations/vllm/hybridrt_vllm")),
)


BEGINNING = re.compile(r'(?:#[^\n]*\n|\s)*r?"""(?s:.*?)"""')  # comments, then a docstring
DANGLING = re.compile(r"\b(a|an|and|by|for|from|in|of|or|that|the|to|with)[.:](?= |$)")
LONGEST = 200  # two lines


def first_sentence(docstring: str) -> str:
    """The first sentence of a docstring. ValueError if that is no whole sentence, or a long one."""
    paragraph = re.split(r"\n\s*\n|\n(?= )", docstring.strip())[0]
    text = re.sub(r"\s+", " ", paragraph)
    end = next((m.end() for m in re.finditer(r"[.?](?=$|\s+[A-Z`\"/])", text)), len(text) if text.endswith(":") else 0)
    sentence = text[:end]
    if not sentence or DANGLING.search(sentence):
        raise ValueError(f"no whole sentence: {text!r}")
    if len(sentence) > LONGEST:
        raise ValueError(f"a sentence of {len(sentence)} characters; it may have {LONGEST}: {sentence!r}")
    return sentence


def summary(file: Path) -> str:
    """A file's first sentence as a cell of a Markdown table, without links and its last full stop."""
    found = BEGINNING.match(file.read_text())  # to parse all files takes seconds
    docstring = ast.get_docstring(ast.parse(found[0])) or "" if found else ""
    try:
        sentence = first_sentence(docstring)
    except ValueError as e:
        raise ValueError(f"{file.relative_to(ROOT)}: {e}") from None
    return re.sub(r" \(https?://\S+\)", "", sentence).rstrip(".:").replace("|", "\\|")


def section(title: str, folders: tuple[str, ...]) -> str:
    """One section of the table, or nothing where none of its folders has a file."""
    files = [f for folder in folders for f in sorted((ROOT / folder).glob("*.py")) if f.read_text().strip()]
    rows = [f"| `{f.relative_to(ROOT)}` | {summary(f)} |" for f in files]
    return "\n".join([f"## {title}", "", "| file | what it is |", "|---|---|", *rows, ""]) if rows else ""


def document() -> str:
    """The whole page."""
    return "\n".join([HEAD, *filter(None, (section(*entry) for entry in SECTIONS))])


if __name__ == "__main__":
    DOCUMENT.write_text(document())
