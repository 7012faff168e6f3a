"""`hybridrt compile`: what it hands to the processes that compile, what it prints, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from hybridrt.base.device import KNOWN, GPUFacts
from hybridrt.cli.app import app
from hybridrt.runtime.precompile import compile_ahead
from hybridrt.runtime.precompile.compile_ahead import CompileReport
from tests.support.tiny import write_tiny


class Compiler:
    """In the place of CompileAhead: it notes what it was asked for."""

    asked: tuple[Any, ...] = ()
    gpu: GPUFacts | None = None
    report = CompileReport(3, {"a.kernel": 1.25, "b.kernel": 2.5})

    def __init__(self, *asked: Any) -> None:
        Compiler.asked = asked

    def start_compiling(self, gpu: GPUFacts) -> None:
        Compiler.gpu = gpu

    def wait(self) -> CompileReport:
        return self.report

    def close(self) -> None: ...


@pytest.fixture(autouse=True)
def _no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_ahead, "CompileAhead", Compiler)
    monkeypatch.setenv("TRITON_CACHE_DIR", "unset")  # so that it is set back: the command changes it


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "model", tokenizer=False)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["compile", *arguments])


def test_the_options_of_a_run_are_compiled_for(model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "new" / "cache"
    options = ("--gpu", "h100", "--workers", "3", "--cache-dir", str(cache), "--max-running-requests", "5")
    found = run(str(model), *options, "--speculative", "ngram")
    assert found.exit_code == 0, found.output
    config, workers, _ = Compiler.asked
    assert (config.model, config.device, config.max_running_requests) == (str(model), "cuda", 5)
    assert config.speculative.method == "ngram" and Compiler.gpu is KNOWN["h100"] and workers == 3
    text = " ".join(found.stdout.split())
    assert f"3 kernels for NVIDIA H100 80GB HBM3 are in {cache}" in text and cache.is_dir()
    assert text.index("b.kernel 2.5") < text.index("a.kernel 1.2")


def test_json(model: Path, tmp_path: Path) -> None:
    found = json.loads(run(str(model), "--gpu", "h200", "--cache-dir", str(tmp_path), "--json").stdout)
    assert found["kernels"] == 3 and found["gpu"] == "NVIDIA H200" and found["cache_dir"] == str(tmp_path)
    assert found["model"] == str(model) and found["seconds_by_kernel"] == Compiler.report.seconds


def test_a_cache_that_lacks_kernels_is_an_error(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Compiler, "report", CompileReport(problems=["a.kernel does not compile"], failures=["one died"])
    )
    found = run(str(model), "--gpu", "h200")
    assert found.exit_code == 1
    assert "error: the cache lacks kernels: one died; a.kernel does not compile" in " ".join(found.output.split())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--gpu", "b300"), "gpu is 'b300'; known are h100, h200"),
        (("--gpu", "h200", "--device", "cpu"), "leave --device out"),
        (("--gpu", "h200", "--workers", "0"), "workers is 0"),
        (("--gpu", "h200", "--cache-dir", "/proc/none"), "--cache-dir"),
        (("nowhere", "--gpu", "h200"), "nowhere is no directory"),
        (("--gpu", "h200", "--num-draft-tokens", "3"), "--speculative"),
    ],
)
def test_what_cannot_be_compiled_is_refused(arguments: tuple[str, ...], text: str) -> None:
    found = run(*arguments)
    assert found.exit_code == 2 and text in " ".join(found.output.split())


def test_without_a_gpu_one_has_to_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = run()
    assert found.exit_code == 2 and "--gpu h200" in found.output


def test_a_checkpoint_that_cannot_run_is_refused(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"architectures": ["Other"]}))
    found = run(str(model), "--gpu", "h200")
    assert found.exit_code == 2 and "Other" in found.output
