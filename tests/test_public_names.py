"""What a newcomer finds: names in dir(), types that fit what runs, `python -m hybridrt`, bars in a notebook."""

import dataclasses
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import hybridrt
from hybridrt.base import errors
from hybridrt.engine.api import llm

ROOT = Path(__file__).parents[1]


def test_dir_lists_every_public_name_and_each_can_be_had() -> None:
    code = "import hybridrt, sys; print(*dir(hybridrt)); assert 'torch' not in sys.modules"
    listed = set(subprocess.check_output([sys.executable, "-c", code], text=True, cwd=ROOT).split())
    assert {"LLM", "Engine", "Prompt", "RequestOutput", "RequestMetrics", "Delta", "FinishReason"} <= listed
    assert set(hybridrt.__all__) <= listed
    for name in hybridrt.__all__:
        found = getattr(hybridrt, name)
        home = hybridrt._HOME.get(name, "hybridrt.base.errors")
        assert found is getattr(importlib.import_module(home), name)
    with pytest.raises(AttributeError, match="no_such_name"):
        hybridrt.no_such_name  # noqa: B018


@pytest.mark.parametrize("package", ["attention", "layers", "mem_cache"])
def test_names_that_people_import_are_found_in_their_packages(package: str) -> None:
    module = importlib.import_module(f"hybridrt.{package}")
    assert {"HybridLinearAttnBackend", "HybridSSMAdapter", "MambaPool"} & module.NAMES.keys()
    for name in module.NAMES:
        assert getattr(module, name).__module__.startswith("hybridrt.")
    with pytest.raises(AttributeError, match="no_such_name"):
        module.no_such_name  # noqa: B018
    code = f"import hybridrt.{package}, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_every_error_is_exported() -> None:
    raised = {name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)}
    assert raised <= set(hybridrt.__all__)


@pytest.mark.parametrize("name", [*hybridrt._HOME, *hybridrt._ERRORS])
def test_public_classes_and_their_members_say_what_they_are(name: str) -> None:
    """A dataclass without a docstring shows its signature: that is none."""
    cls = getattr(hybridrt, name)
    if not inspect.isclass(cls):
        return  # aliases of types
    described = {"class": cls.__dict__.get("__doc__") or ""}
    for member, value in vars(cls).items():
        if not member.startswith("_") and (inspect.isroutine(value) or isinstance(value, property)):
            described[member] = inspect.unwrap(getattr(value, "__func__", value)).__doc__ or ""
    assert not described["class"].startswith(f"{name}(")
    assert [member for member, text in described.items() if not text] == []


@pytest.mark.parametrize("name", ["SamplingParams", "StructuredOutputs", "EngineConfig", "SpeculativeConfig"])
def test_what_callers_set_is_explained_field_by_field(name: str) -> None:
    cls = getattr(hybridrt, name)
    text = inspect.getdoc(cls) or ""
    explained = {
        field for line in re.findall(r"^    (\w+(?:, \w+)*):", text, re.MULTILINE) for field in line.split(", ")
    }
    assert {field.name for field in dataclasses.fields(cls)} <= explained


def test_python_m_hybridrt_is_the_command() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "hybridrt", "--version"], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert (result.returncode, result.stdout) == (0, f"hybridrt {hybridrt.__version__}\n"), result.stderr


@pytest.mark.parametrize(("terminal", "notebook"), [(False, False), (True, False), (False, True)])
def test_bars_show_on_terminals_and_in_notebooks(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, notebook: bool
) -> None:
    from tqdm.auto import tqdm
    from tqdm.notebook import tqdm_notebook

    assert llm.tqdm is tqdm
    monkeypatch.setattr(llm, "tqdm", type("Bar", (tqdm_notebook if notebook else tqdm,), {}))
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda: terminal, write=len, flush=lambda: None))
    assert llm._shows_bars() == (terminal or notebook)


@pytest.mark.soak
def test_types_fit_what_runs(tmp_path: Path) -> None:
    """mypy takes typed_prompts.py, and refuses the lines that it says are wrong (as unused ignores otherwise). It
    is not slow because `.ci/run` checks this file together with the package."""
    pytest.importorskip("mypy")
    options = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(tmp_path), "--follow-imports=silent"]
    command = [sys.executable, "-m", "mypy", *options, str(ROOT / "tests" / "support" / "typed_prompts.py")]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
