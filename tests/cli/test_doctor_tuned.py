"""What `hybridrt doctor` says of tuned choices and of GPUs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from typer.testing import CliRunner

from hybridrt.base.device import KNOWN, GPUFacts
from hybridrt.base.tried import COMPILED, trials_like
from hybridrt.cli import doctor
from hybridrt.cli.app import app
from hybridrt.cli.doctor import TunedReport, tried_on, tuned_files
from hybridrt.kernels.dense.skinny_linear_triton import TILES, TiledProduct
from hybridrt.runtime.load.tuned_choices import Choice, Origin, TunedFile, fields_of, tuned_path, write_tuned

GPU = KNOWN["h200"]
SHAPE = TiledProduct(4096, 1024, 16, torch.bfloat16)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def stored(gpu: GPUFacts = GPU, **origin: Any) -> Path:
    """A file of two shapes; for one of them another choice is faster."""
    built_in = dict(TILES.built_in(SHAPE, torch.device("cpu")))
    choices = [
        Choice(TILES.name, fields_of(SHAPE), built_in, 4.0, 5.0, True),
        Choice(TILES.name, fields_of(SHAPE._replace(rows=64)), built_in, 5.0, 5.0, True),
    ]
    path = tuned_path(gpu)
    assert path is not None
    made = msgspec.structs.replace(Origin.of_gpu(gpu), **origin)
    write_tuned(path, TunedFile("2026-01-02T03:04:05+00:00", made, choices))
    return path


def test_a_file_in_use() -> None:
    path = stored()
    counts = {"skinny_linear": (1, 2)}
    assert tuned_files([GPU]) == [TunedReport(str(path), GPU.name, "2026-01-02T03:04:05+00:00", counts, None)]


@pytest.mark.parametrize(
    ("gpus", "origin", "text"),
    [
        ([], {}, "no GPU here looks for it"),
        ([KNOWN["h100"]], {}, "no GPU here looks for it"),
        ([GPU], {"triton": "3.0.0"}, "it is of triton 3.0.0, and here is"),
        ([GPU], {"kernels": "00"}, "it was measured with other kernels"),
        ([GPU, replace(GPU, multiprocessors=100)], {}, "it is of multiprocessors 132, and here is 100"),
    ],
)
def test_why_a_file_is_not_used(gpus: list[GPUFacts], origin: dict[str, Any], text: str) -> None:
    stored(**origin)
    (found,) = tuned_files(gpus)
    assert found.objection is not None and text in found.objection


def test_a_damaged_file_and_one_that_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    path = stored()
    monkeypatch.setenv("HYBRIDRT_TUNED", "0")
    assert [each.objection for each in tuned_files([GPU])] == ["HYBRIDRT_TUNED is 0"]
    monkeypatch.setenv("HYBRIDRT_TUNED", str(path.with_name("other.json")))
    path.rename(path.with_name("other.json"))
    assert [each.objection for each in tuned_files([GPU])] == [None]
    path.write_text("{}")
    (other, damaged) = sorted(tuned_files([GPU]), key=lambda each: each.gpu, reverse=True)
    assert other.objection is None and damaged.objection is not None and "no tuned choices" in damaged.objection


def test_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    stored()
    monkeypatch.setattr(doctor, "_gpus", lambda: [GPU])
    text = " ".join(CliRunner().invoke(app, ["doctor"]).output.split())
    assert "Tuned choices" in text and "skinny_linear: 1 of 2" in text and "2026-01-02" in text


@pytest.mark.parametrize(
    ("gpu", "torch_version", "triton", "text"),
    [
        ("h200", "2.15.0+cu132", "3.9.0", "torch 2.15.0+cu132 with Triton 3.9.0 was tried on NVIDIA H200."),
        ("h100", "2.11.0+cu130", "3.6.0", "was tried on NVIDIA H100 80GB HBM3."),
        (
            "h100",
            "2.15.0+cu132",
            "3.9.0",
            "was tried on H200, which has the same compute capability, and not on",
        ),
        ("h200", "2.15.0+cu132", "3.8.0", "torch 2.15.0+cu132 with Triton 3.8.0 was not tried on a GPU like NVIDIA"),
        ("h200", "2.15.0+cu130", "3.9.0", "torch 2.15.0+cu130 with Triton 3.9.0 was not tried on a GPU like NVIDIA"),
        ("h200", "2.15.0+cu132", None, "with Triton (not installed) was not tried on a GPU like NVIDIA H200"),
        ("b200", "2.15.0+cu132", "3.9.0", "Nothing was run on a GPU like NVIDIA B200"),
    ],
)
def test_what_was_tried_on_a_gpu(gpu: str, torch_version: str, triton: str | None, text: str) -> None:
    (found,) = tried_on([KNOWN[gpu], KNOWN[gpu]], torch_version, triton)
    assert text in found.here
    assert found.trials and {trial.capability for trial in found.trials} == {KNOWN[gpu].capability}


def test_nothing_was_tried_on_other_gpus() -> None:
    (found,) = tried_on([replace(GPU, name="NVIDIA T4", capability=(7, 5))], "2.15.0+cu132", "3.9.0")
    assert found.trials == [] and "neither run on a GPU like NVIDIA T4 nor compiled" in found.here


def test_every_gpu_that_can_be_named_is_in_the_list() -> None:
    for gpu in KNOWN.values():
        words = set(gpu.name.replace("-", " ").split())
        assert any(set(trial.gpus) <= words for trial in trials_like(gpu.capability)), gpu.name
    assert {gpu.capability for gpu in KNOWN.values()} == {(9, 0), *COMPILED}


def test_the_table_of_what_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_gpus", lambda: [GPU, KNOWN["l40s"]])
    text = " ".join(CliRunner().invoke(app, ["doctor"]).output.split())
    assert "What was tried on a GPU like NVIDIA H200" in text and "2.11.0+cu130 3.6.0 all of tests/gpu ran" in text
    assert "Nothing was run on a GPU like NVIDIA L40S" in text and "RTX 5090" not in text
