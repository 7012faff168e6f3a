"""How many files another family, kind, drafter or attention backend takes; and the list of new code is true."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from scripts.count_lines import code_lines, count_listed

ROOT = Path(__file__).parents[1]
# Kernels are given, and so is the way in which a family writes its tool calls. What inspects an installation, or offers
# names at large, is no part of the way.
FOLDERS = ("hybridrt", "models", "mem_cache")
GIVEN = ("hybridrt/kernels/", "hybridrt/chat/")


def words(file: Path) -> str:
    """The names and strings of a file, without its comments and docstrings."""
    tree = ast.parse(file.read_text())
    docs = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                docs.add(first.value)
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)) if node not in docs:
                found.append(text)
            case ast.Name(id=name) | ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.Attribute(attr=name):
                found.append(name)
            case ast.ImportFrom(module=str(module), names=names):
                found += [f"{module}.{alias.name}" for alias in names]
    return "\n".join(found)


@cache
def words_of_all() -> dict[str, str]:
    """By file."""
    return {
        str(file.relative_to(ROOT)): words(file)
        for folder in FOLDERS
        for file in sorted((ROOT / folder).rglob("*.py"))
        if not str(file.relative_to(ROOT)).startswith(GIVEN)
    }


def files_that_name(pattern: str) -> set[str]:
    return {file for file, text in words_of_all().items() if re.search(pattern, text, re.IGNORECASE)}


# Families that are another one with a difference.
BUILT_ON = {
    "nemotron_h": {"models/nemotron_puzzle.py"},
    "qwen3_next": {"models/qwen3_5.py"},
    "kimi_linear": {
        "models/bailing_hybrid.py", "models/bailing_moe_v2_5.py",
    },
    "bailing_hybrid": {"models/bailing_moe_v2_5.py"},
}  # fmt: skip
FAMILIES = [
    "jamba", "falcon_mamba", "nemotron_h", "qwen3_next", "falcon_h1", "qwen3_5", "granite_moe_hybrid", "bamba",
    "olmo_hybrid", "lfm2", "minimax", "kimi_linear", "bailing_hybrid", "bailing_moe_v2_5", "zamba2",
]  # fmt: skip
OWN_BLOCKS = ("zamba2",)  # of families that bring a block of their own


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_takes_two_files(family: str) -> None:
    """And at most 150 lines, or 200 where it brings a block of its own."""
    files = files_that_name(family.replace("_", "_?")) - BUILT_ON.get(family, set())
    assert files == {f"hybridrt/families/{family}.py", f"models/{family}.py"}
    assert sum(code_lines((ROOT / file).read_text()) for file in files) <= (200 if family in OWN_BLOCKS else 150)


# Kinds whose backend is another one's with a difference.
DERIVED = {"gdn": {"hybridrt/recurrent/kda.py"}, "mamba2": {"hybridrt/recurrent/lightning.py"}}


@pytest.mark.parametrize(
    "kind", ["gdn", "kda", "mamba2", "mamba1", "prefix_sum", "short_conv", "lightning", "simple_gla"]
)
def test_a_kind_takes_three_files(kind: str) -> None:
    """Only a kind's own three files name it. `users` may name it, too: families and models that use it, and
    conv_transfer, which has another runtime's names of two kinds."""
    users = (
        "hybridrt/families/",
        "models/",
        "models/hybrid_attention.py",
        "mem_cache/pools/state_slices.py",
    )
    files = {
        file
        for file in files_that_name(rf"\b{kind}\b|{kind.replace('_', '_?')}[a-z]*config")
        if not file.startswith(users)
    }
    files -= DERIVED.get(kind, set())
    assert files == {f"hybridrt/{part}/{kind}.py" for part in ("kinds", "attention", "layers")}


def test_a_drafter_on_the_host_takes_two_files() -> None:
    assert files_that_name(r"NgramMethod|speculative\.ngram") == {
        "hybridrt/speculative/ngram.py",
        "hybridrt/base/draft_methods.py",
    }


@pytest.mark.parametrize(("cls", "file"), [
    ("Hermes", "hermes"), ("Granite", "granite"), ("Jamba", "jamba"), ("KimiK2", "kimi_k2"), ("Lfm2", "lfm2"),
    ("Nemotron", "nemotron"), ("Qwen3Coder", "qwen3_coder"), ("Glm", "glm"), ("Olmo", "olmo"),
    ("MinimaxM1", "minimax_m1"), ("MinimaxText", "minimax_text"),
])  # fmt: skip
def test_a_parser_of_tool_calls_takes_two_short_files(cls: str, file: str) -> None:
    own = f"hybridrt/chat/tool_parsers/{file}.py"
    pattern = re.compile(rf"^{cls}$|{file}:{cls}", re.MULTILINE)
    files = {f for f in (ROOT / "hybridrt/chat").rglob("*.py") if pattern.search(words(f))}
    assert files == {ROOT / own, ROOT / "hybridrt/chat/registry.py"}
    strict = ("Qwen3Coder", "Glm")  # beside a parser they have rules of their own for strict arguments
    assert code_lines((ROOT / own).read_text()) < (150 if cls in strict else 60)


@pytest.mark.parametrize(("cls", "file"), [
    ("Fa3AttnBackend", "fa3"), ("FlashinferAttnBackend", "flashinfer"), ("TritonAttnBackend", "triton"),
    ("TorchNativeAttnBackend", "torch_native"),
])  # fmt: skip
def test_an_attention_backend_takes_two_files(cls: str, file: str) -> None:
    assert files_that_name(cls) == {f"hybridrt/attention/{file}.py", "hybridrt/recurrent/backends.py"}


def test_the_list_of_new_code_names_what_is_there_and_once() -> None:
    assert count_listed(ROOT, (ROOT / "scripts" / "new_since_repairs.txt").read_text()).total()


@pytest.mark.parametrize(
    "lines",
    [
        "hybridrt/gone.py",
        "hybridrt/base/errors.py:GoneError",
        "hybridrt/base/errors.py:shown.gone",
        "hybridrt/base/errors.py\nhybridrt/errors.py:shown",
        "models/jamba.py\nmodels",
    ],
)
def test_a_list_that_is_wrong_is_not_counted(lines: str) -> None:
    with pytest.raises(ValueError, match="take it out of the list"):
        count_listed(ROOT, lines)
