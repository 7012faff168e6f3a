"""README.md and docs/: blocks of Python run as they are written, commands have the options that are written there.

docs/chat.md, docs/embedding.md and the requests of docs/serving.md have tests next to what they describe.
"""

import ast
import importlib
import re
import shlex
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from examples.composite_by_hand import ByHand
from hybridrt.attention.paged import TorchNativeAttnBackend
from hybridrt.base.forward_batch import ForwardMode
from hybridrt.cli.app import app
from hybridrt.embedding import EngineConfig, load
from hybridrt.mem_cache.pools.state_slices import MambaSpec, derive_mamba_conv_split
from hybridrt.recurrent.backend import HybridLinearAttnBackend
from hybridrt.recurrent.mamba2 import Mamba2AttnBackend
from tests.test_structure import ORDER, SOURCES, nodes

ROOT = Path(__file__).parents[1]
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Which blocks of Python are programs.
WHOLE = {
    "README.md": slice(1, 2),
    "prefix-cache.md": slice(2),
    "hybrid-layer.md": slice(1),
    "maths.md": slice(1),
}


def blocks(file: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", file.read_text(), re.DOTALL)


PROGRAMS = [
    pytest.param(block, id=f"{file.name}-{i}")
    for file in FILES
    for i, block in enumerate(blocks(file, "python")[WHOLE.get(file.name, slice(0))])
]


@pytest.mark.parametrize("block", PROGRAMS)
def test_programs_run(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    exec(compile(block, "document", "exec"), names)
    assert capsys.readouterr().out or "# 12, 16" in block
    if "cached_tokens" in block:
        assert names["again"].metrics.cached_tokens >= 48
    if "# 12, 16" in block:
        assert names["y"].flatten().tolist() == [12, 16]


@torch.inference_mode()
def test_the_composite_of_the_readme_runs() -> None:
    """Its other names are those of examples/composite_by_hand.py. The step has a decode row."""
    hand = ByHand(load(EngineConfig("embedded", device="cpu", state_mode="classic")), num_rows=1)
    batch = hand.prompt_batch([[5]])
    batch = replace(batch, forward_mode=ForwardMode.DECODE, num_decode_rows=1)
    names: dict[str, Any] = {
        "TorchNativeAttnBackend": TorchNativeAttnBackend, "Mamba2AttnBackend": Mamba2AttnBackend,
        "HybridLinearAttnBackend": HybridLinearAttnBackend, "kv_pool": hand.kv_pool, "table": hand.table,
        "mixers": hand.layers, "attention_ids": hand.attention_ids, "model": hand.model, "batch": batch,
    }  # fmt: skip
    made, _, step = blocks(ROOT / "README.md", "python")[0].partition("\n\n")
    exec(compile(made, "README.md", "exec"), names)
    batch.attn_backend = names["backend"]
    exec(compile(step, "README.md", "exec"), names)
    assert names["hidden"].shape == (1, hand.model.config.hidden_size)


def test_the_figures_of_the_readme_are_those_of_the_tables() -> None:
    rows = (ROOT / "docs" / "performance.md").read_text().splitlines()
    pairs = re.findall(r"\*\*([\d.]+ ms) instead\s+of ([\d.]+ ms)\*\*", (ROOT / "README.md").read_text())
    assert len(pairs) == 2
    for pair in pairs:
        assert any(set(pair) <= set(re.split(r" *\| *", row)) for row in rows), pair


def test_the_picture_of_the_rooms_has_them_all() -> None:
    picture = (ROOT / "docs" / "architecture.svg").read_text()
    for room in {known.partition(".")[0] for known in ORDER}:
        assert re.search(rf">[^<]*\b{room}\b", picture), room


def test_the_tour_names_what_its_files_have() -> None:
    """Twelve files, each with the classes and functions that the paragraph tells the reader to look at."""
    parts = re.split(r"^## ", (ROOT / "docs" / "tour.md").read_text(), flags=re.MULTILINE)[1:]
    assert len(parts) == 12
    for part in parts:
        title, _, text = part.partition("\n")
        (path,) = re.findall(r"\(\.\./([\w/.]+)\)", title)
        looked = re.findall(r"`([\w.]+)`", text.partition("Look at")[2])
        assert looked, title
        source = (ROOT / path).read_text()
        for name in looked:
            assert re.search(rf"\b(?:def|class) {name.rpartition('.')[2]}\b", source), f"{path}: {name}"


def test_offsets_are_those_of_the_document() -> None:
    (block,) = (block for block in blocks(ROOT / "docs" / "transfer.md", "python") if "derive_mamba" in block)
    names = {"torch": torch, "MambaSpec": MambaSpec, "derive_mamba_conv_split": derive_mamba_conv_split}
    exec(compile(block, "document", "exec"), names)
    lines = [line.split("  # ") for line in block.splitlines() if "  # " in line]
    assert len(lines) == 2
    for expression, result in lines:
        assert eval(expression, names) == eval(result)


def commands() -> Iterator[list[str]]:
    """The words of every `hybridrt ...` of a block for a shell."""
    for file in FILES:
        for block in blocks(file, "(?:bash|sh)"):
            for line in block.replace("\\\n", " ").splitlines():
                if called := re.search(r"(?:^|&& )hybridrt (.*)", line):
                    yield shlex.split(called[1], comments=True)


def test_commands_have_the_options_that_documents_give_them() -> None:
    found = list(commands())
    assert len(found) > 8
    for words in found:
        command: Any = typer.main.get_command(app)
        while words and hasattr(command, "commands"):
            if words[0].startswith("-"):
                break
            command = command.commands[words.pop(0)]
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        used = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert used <= known | {"--help"}, (command.name, used - known)


def anchors(text: str) -> set[str]:
    """The places in a document that a link can name, as GitHub makes them of headings."""
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in titles}


EXPERIMENTS = ROOT / "experiments"  # no part of a source distribution
LINKED = [
    *FILES,
    *sorted((ROOT / "benchmarks" / "log").glob("*.md")),
    *(ROOT / f"{name}.md" for name in ("CODE_OF_CONDUCT", "CONTRIBUTING", "MAINTAINERS", "SECURITY")),
    ROOT / "tests" / "README.md",
    *EXPERIMENTS.glob("*.md"),
]


@pytest.mark.parametrize("file", LINKED, ids=lambda f: f.name)
def test_links_within_the_repository_lead_somewhere(file: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", file.read_text()):
        if not target.startswith(("http", "mailto")):
            name, _, place = target.partition("#")
            other = file.parent / name if name else file
            if name.startswith(EXPERIMENTS.name) and not EXPERIMENTS.is_dir():
                continue
            assert other.exists(), target
            assert not place or place in anchors(other.read_text()), target


@pytest.mark.parametrize("file", [*LINKED, ROOT / "CHANGELOG.md"], ids=lambda f: f.name)
def test_both_sides_of_a_merge_were_joined(file: Path) -> None:
    assert not re.search(r"^(<{7}|>{7}) ", file.read_text(), re.MULTILINE)


def resolve(path: str) -> None:
    """Imports "package.module.Name.attribute"; an annotation of a class counts as its attribute."""
    words = path.split(".")
    for i in range(len(words), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(words[:i]))
        except ModuleNotFoundError:
            continue
        for word in words[i:]:
            fields = getattr(found, "__annotations__", {})
            assert hasattr(found, word) or word in fields, f"{path}: {found} has no {word}"
            found = getattr(found, word, None)
        return
    raise AssertionError(f"{path} cannot be imported")


NAMED = [ROOT / "docs" / name for name in ("names.md", "glossary.md", "extending.md", "maths.md")]


@pytest.mark.parametrize("file", NAMED, ids=lambda f: f.name)
def test_names_that_documents_give_exist(file: Path) -> None:
    text = re.sub(r"```.*?```", "", file.read_text(), flags=re.DOTALL)
    groups = {
        "families",
        "kinds",
        "attention_backends",
        "linear_methods",
        "drafters",
        "tool_parsers",
        "reasoning_parsers",
    }
    names = set(re.findall(r"`(hybridrt(?:\.\w+)+)`", text)) - {f"hybridrt.{group}" for group in groups}
    assert len(names) > 4
    for name in names:
        resolve(name)
    for path in re.findall(r"`((?:hybridrt|mem_cache|models|tests|examples|benchmarks)/[\w/.]+)`", text):
        assert (ROOT / path).exists(), path


def members() -> dict[str, set[str]]:
    """By the name of each class: what it and its bases of the package define. Classes with other bases, of which
    less is known, are left out."""
    own, bases = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    for file in SOURCES.values():
        for node in nodes(file):
            if not isinstance(node, ast.ClassDef):
                continue
            bases[node.name] |= {ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases}
            for part in ast.walk(node):
                match part:
                    case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                        own[node.name].add(name)
                    case ast.Attribute(value=ast.Name(id="self"), attr=name):
                        own[node.name].add(name)
            for field in node.body:
                if isinstance(field, ast.Assign | ast.AnnAssign):
                    own[node.name] |= {part.id for part in ast.walk(field) if isinstance(part, ast.Name)}
    plain = {"NamedTuple", "Protocol", "Generic", "ABC", "object"}

    def found(name: str) -> set[str] | None:
        inherited = [found(base) for base in bases[name] - plain - {name}]
        if name not in own or any(part is None for part in inherited):
            return None
        return own[name].union(*[part for part in inherited if part is not None])

    return {name: known for name in list(own) if (known := found(name)) is not None}


def test_members_that_texts_name_exist() -> None:
    """`Class.member` in documents, docstrings and comments."""
    known, named = members(), 0
    for file in (*FILES, *SOURCES.values()):
        text = file.read_text()
        said = re.findall(r'"""(?s:.*?)"""|#[^\n]*', text) if file.suffix == ".py" else re.findall(r"`[^`\n]+`", text)
        for name, member in re.findall(r"\b([A-Z]\w+)\.([a-z_]\w*)\b", "\n".join(said)):
            if name in known and member not in ("md", "py"):
                named += 1
                assert member in known[name], f"{file.relative_to(ROOT)} names {name}.{member}, which does not exist"
    assert named > 200


def test_the_glossary_explains_each_word_once() -> None:
    rows = re.findall(r"^\| (?!word)([^|]+) \| ([^|]+) \|", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    words = [word for names, _ in rows for word in names.split(", ")]
    assert len(words) == len(set(words)) > 90
