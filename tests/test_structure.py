"""The shape of the code: which way imports point, how long files are, how deep a call goes, what docs list."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from hybridrt import LLM, SamplingParams
from hybridrt.kernels.core.operation import Operation
from hybridrt.runtime.replay.graph_runner import GraphRunner
from hybridrt.runtime.run.model_runner import ModelRunner
from scripts import file_table
from tests.support.checkpoints import Make, falcon, jamba, nemotron, qwen
from tests.support.newer_checkpoints import granite, kimi, minimax, olmo
from tests.support.tiny import write_tiny

ROOT = Path(__file__).parents[1]
PACKAGES = {"hybridrt": "hybridrt", "models": "hybridrt.models", "mem_cache": "hybridrt.mem_cache"}
# Arrows point from the right to the left. Within a name they are free: the package's own files may import each other.
ORDER = (
    "version", "errors", "files", "plugins", "distributed.channel", "distributed.control", "structured_outputs",
    "sampling_params",
    "speculative.registry", "config", "kinds", "families", "hf_config", "forward_batch", "kernels", "mem_cache",
    "attention", "distributed.groups", "distributed.conv_transfer", "layers", "models", "speculative.drafter",
    "runtime", "speculative", "chat", "engine", "transfer", "embedding", "server", "bench", "cli",
)  # fmt: skip
MAX_LINES, MAX_TEST_LINES = 400, 450
MAX_FUNCTION_LINES = 40
MAX_MODEL_LINES = 200
MAX_FRAMES, MAX_FILES = 11, 10
MAX_GRAPH_FRAMES = 5  # from the engine's step on
OPTIONAL = (
    "flashinfer", "mamba_ssm", "causal_conv1d", "sgl_kernel", "fla", "nixl", "llguidance", "matplotlib", "hypothesis",
    "pytest",
)  # fmt: skip


def sources() -> dict[str, Path]:
    """Every module of the package by its name."""
    found = {}
    for directory, package in PACKAGES.items():
        for file in sorted((ROOT / directory).rglob("*.py")):
            parts = [package, *file.relative_to(ROOT / directory).with_suffix("").parts]
            found[".".join(parts).removesuffix(".__init__")] = file
    return found


SOURCES = sources()


def rank(module: str) -> int:
    """Position in ORDER; hybridrt itself (lazy exports, the command) comes last, hybridrt.distributed (empty) first."""
    name = module.removeprefix("hybridrt").removeprefix(".")
    if name in ("", "__main__", "distributed"):
        return -1 if name == "distributed" else len(ORDER)
    return next(i for i, known in enumerate(ORDER) if name == known or name.startswith((f"{known}.", f"{known}_")))


def imports(file: Path) -> Iterator[str]:
    """Modules that a file imports anywhere: in functions and under TYPE_CHECKING too."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in SOURCES else str(node.module) for name in names)


def test_every_module_has_its_place_in_the_order() -> None:
    assert len(SOURCES) > 50
    for module in SOURCES:
        rank(module)


@pytest.mark.parametrize("module", SOURCES)
def test_imports_point_one_way(module: str) -> None:
    if module == "hybridrt":
        return  # the top: lazy exports and type hints
    for imported in imports(SOURCES[module]):
        assert imported.split(".")[0] not in ("models", "mem_cache", "tests", "benchmarks"), f"{module}: {imported}"
        if imported.split(".")[0] == "hybridrt":
            assert rank(imported) <= rank(module) or module.startswith("hybridrt.cli"), f"{module} imports {imported}"
            if rank(module) == ORDER.index("kernels"):
                known = rank(imported) == rank(module) or imported == "hybridrt.base.errors"
                assert known, f"{module} imports {imported}: kernels know nothing but errors and each other"


def test_the_walk_finds_every_kind_of_import(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from hybridrt.engine import llm\n"
        "def f():\n    import hybridrt.cli.app\n"
    )
    assert list(imports(file)) == ["typing", "hybridrt.engine.api.llm", "hybridrt.cli.app"]
    assert (
        rank("hybridrt.engine.api.llm")
        > rank("hybridrt.models.loading.loader")
        > rank("hybridrt.kernels.attention.rotary")
    )


def test_files_are_short() -> None:
    lengths = {file: len(file.read_text().splitlines()) for file in SOURCES.values()}
    assert {str(file): n for file, n in lengths.items() if n > MAX_LINES} == {}
    for folder in ("tests", "benchmarks", "examples"):
        tests = {file: len(file.read_text().splitlines()) for file in (ROOT / folder).rglob("*.py")}
        assert {str(file): n for file, n in tests.items() if n > MAX_TEST_LINES} == {}
    plumbing = ("__init__.py", "base.py", "loader.py", "registry.py")
    models = {f: n for f, n in lengths.items() if f.parent == ROOT / "models" and f.name not in plumbing}
    assert len(models) >= 3
    assert {str(file): n for file, n in models.items() if n >= MAX_MODEL_LINES} == {}


def test_host_functions_are_short() -> None:
    """Without signature and docstring. Triton kernels may be longer."""
    lengths = {
        f"{file.relative_to(ROOT)}:{node.lineno} {node.name}": body_lines(node)
        for file in SOURCES.values()
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and not any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    }
    assert len(lengths) > 1000
    assert {name: n for name, n in lengths.items() if n > MAX_FUNCTION_LINES} == {}


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its signature and its docstring."""
    statements = function.body[1:] if ast.get_docstring(function) else function.body
    return (function.end_lineno or 0) - statements[0].lineno + 1 if statements else 0


def test_nothing_is_found_by_its_address() -> None:
    """An `id` is that of another object once the first one is gone."""
    found = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in SOURCES.values()
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "id"
    ]
    assert found == []


def test_bare_imports_of_models_are_a_lint_error(tmp_path: Path) -> None:
    ruff = pytest.importorskip("ruff", reason="ruff comes with the dev extra")
    file = tmp_path / "x.py"
    file.write_text("import models\nfrom mem_cache import kv_pool\n\nprint(models, kv_pool)\n")
    command = [ruff.find_ruff_bin(), "check", "--config", str(ROOT / "pyproject.toml"), "--select", "TID", str(file)]
    found = subprocess.run(command, capture_output=True, text=True).stdout
    assert found.count("TID251") == 2, found


class DepthProbe:
    """Watches calls, and keeps for every operation the deepest stack of ours from LLM.generate to its call."""

    def __init__(self) -> None:
        self.stacks: dict[str, list[str]] = {}

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if event != "call" or frame.f_code is not Operation.__call__.__code__ or _within_a_kernel(frame.f_back):
            return
        stack = list(_ours(frame))
        kernel = frame.f_locals["self"].name
        if any("llm.py:generate" in entry for entry in stack) and len(stack) > len(self.stacks.get(kernel, ())):
            self.stacks[kernel] = stack


def _within_a_kernel(frame: FrameType | None) -> bool:
    return frame is not None and Path(frame.f_code.co_filename).parent == ROOT / "hybridrt" / "kernels"


def _ours(frame: FrameType) -> Iterator[str]:
    """The frames of this package, innermost first."""
    here: FrameType | None = frame
    while here is not None:
        file = here.f_code.co_filename
        if any(file.startswith(f"{ROOT / folder}{os.sep}") for folder in PACKAGES):
            yield f"{file}:{here.f_code.co_name}"
        here = here.f_back


@pytest.mark.parametrize(
    "make",
    [falcon(), nemotron("M*-ME"), qwen(), jamba(), granite(), olmo(), minimax(), kimi()],
    ids=["falcon", "nemotron", "qwen", "jamba", "granite", "olmo", "minimax", "kimi"],
)
def test_from_generate_to_a_kernel_is_a_short_way(make: Make, tmp_path: Path) -> None:
    model = write_tiny(tmp_path, make, tokenizer=False)
    llm = LLM(str(model), load_format="dummy", device="cpu", max_running_requests=2, max_model_len=64)
    probe = DepthProbe()
    sys.setprofile(probe)
    try:
        llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2, temperature=0.0))
    finally:
        sys.setprofile(None)
    assert len(probe.stacks) >= 5, "the probe saw the kernels"
    for stack in probe.stacks.values():
        path = "\n".join(reversed(stack))
        assert len(stack) <= MAX_FRAMES, path
        files = [file for file, _ in groupby(entry.rsplit(":", 1)[0] for entry in stack)]
        assert len(files) <= MAX_FILES, path
        assert len(files) == len(set(files)), f"a file is entered again:\n{path}"


def test_from_a_step_to_its_graph_is_a_shorter_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, stacks = write_tiny(tmp_path, tokenizer=False), list[list[str]]()

    def recorder(step: Callable[[], None], warm: bool = False) -> Callable[[], None]:
        return lambda: stacks.append([entry.rsplit(":", 1)[1] for entry in _ours(sys._getframe())]) or step()

    llm = LLM(str(model), load_format="dummy", device="cpu", max_running_requests=2, max_model_len=64)
    runner = llm.engine.executor
    assert isinstance(runner, ModelRunner)
    graphs = GraphRunner(
        model=runner.model, backend=runner.backend, req_to_token_pool=runner.pools.req_to_token,
        last_tokens=runner.last_tokens, max_bs=2, recorder=recorder,
    )  # fmt: skip
    graphs.capture()
    runner.graphs[1] = graphs
    monkeypatch.setattr(runner, "_cpu_decode", None)
    llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4, temperature=0.0))
    assert stacks and max(stack.index("run_step") + 1 for stack in stacks) <= MAX_GRAPH_FRAMES, stacks


def test_file_table_is_up_to_date() -> None:
    text = file_table.DOCUMENT.read_text()
    assert file_table.document(text) == text, "run python scripts/file_table.py"
    listed = set(re.findall(r"^\| `([\w./]+\.py)` \|", text, re.MULTILINE))
    assert {str(f.relative_to(ROOT)) for f in SOURCES.values() if f.read_text().strip()} <= listed
    assert all(file_table.first_line(ROOT / name) for name in listed)
