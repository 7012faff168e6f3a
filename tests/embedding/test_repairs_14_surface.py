"""hybridrt.embedding: what it refuses to load, and that examples need nothing else."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hybridrt
import hybridrt.embedding
from hybridrt.base import errors
from hybridrt.base.errors import ConfigError, HybridrtError
from hybridrt.embedding import EngineConfig, LoadedModel, Scratch, build, load, plan_memory

# composite_by_hand.py shows what load() does: it builds the parts of another level, which may change.
EXAMPLES = sorted(p for p in (Path(__file__).parents[2] / "examples").glob("*.py") if p.stem != "composite_by_hand")
STABLE: dict[str, set[str]] = {
    "hybridrt": set(hybridrt.__all__),
    "hybridrt.embedding": set(hybridrt.embedding.__all__),
    "hybridrt.base.errors": set(errors.__all__),
}


@pytest.mark.parametrize("size", [2, 8])
def test_a_split_model_is_refused_with_what_to_do(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hybridrt.embedding.loading.load_target", lambda *_: pytest.fail("something was read"))
    with pytest.raises(
        ConfigError, match=rf"tp_size is {size}.*pass tp_size=1, or use hybridrt.LLM\(model, tp_size={size}\)"
    ):
        load(EngineConfig("embedded", tp_size=size))


def test_the_document_says_so() -> None:
    text = " ".join((EXAMPLES[0].parents[1] / "docs" / "embedding.md").read_text().split())
    assert "`EngineConfig(tp_size=2)` is a `ConfigError`: pass `tp_size=1`, or use `LLM(model, tp_size=2)`" in text


def unstable(source: str) -> Iterator[str]:
    """Imports of hybridrt outside the stable surface, and private names of other objects that a program uses."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "hybridrt")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in (
            "hybridrt",
            "models",
            "mem_cache",
        ):
            names = STABLE.get(str(node.module), set())
            yield from (f"{node.module}.{alias.name}" for alias in node.names if alias.name not in names)
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and ast.unparse(node.value) != "self":
            yield node.attr


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_examples_use_the_stable_surface_alone(example: Path) -> None:
    source = example.read_text()
    assert "from hybridrt.embedding import" in source
    assert list(unstable(source)) == []


def test_the_walk_finds_what_is_not_stable() -> None:
    source = (
        "import hybridrt.engine\nfrom hybridrt.engine.text.tokenizer import load_tokenizer\n"
        "from hybridrt.embedding import load, nothing\nfrom hybridrt import LLM\nx = loaded._batches\n"
    )
    expected = [
        "hybridrt.engine",
        "hybridrt.engine.text.tokenizer.load_tokenizer",
        "hybridrt.embedding.nothing",
        "_batches",
    ]
    assert sorted(unstable(source)) == sorted(expected)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load(EngineConfig("embedded", device="cpu", max_running_requests=2, max_model_len=64))


def test_a_loaded_model_has_its_tokenizer(loaded: LoadedModel) -> None:
    tokenizer = loaded.tokenizer()
    assert tokenizer is not None and tokenizer.decode(tokenizer.encode("def f(x):")) == "def f(x):"


def test_wrong_kinds_are_refused(loaded: LoadedModel) -> None:
    plan: Any = plan_memory(loaded, budget_bytes=2**25)
    calls: list[Any] = [
        lambda: load("embedded"), lambda: load(None), lambda: plan_memory("x", budget_bytes=2**25),
        lambda: plan_memory(loaded, budget_bytes="x"), lambda: plan_memory(loaded, budget_bytes=2.5),
        lambda: plan_memory(loaded, budget_bytes=2**25, cache_slots="x"), lambda: build("x", plan),
        lambda: build(loaded, "x"), lambda: build(loaded, plan, "x"), lambda: Scratch(row="x"),
        lambda: build(loaded, plan).capture(max_rows="x"), lambda: build(loaded, plan).capture(sizes=["x"]),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(HybridrtError):
            call()
