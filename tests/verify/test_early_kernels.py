"""Kernels of a quick run's engines are compiled from its beginning on."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hybridrt.base.engine_config import EngineConfig
from hybridrt.verify import early_kernels, outputs
from hybridrt.verify.early_kernels import EarlyKernels
from hybridrt.verify.run import verify
from hybridrt.verify.subject import Subject
from tests.support.checkpoints import CheckpointStore
from tests.verify.test_outputs import in_bfloat16

CUDA = torch.device("cuda", 0)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []

    class Noted:
        """In the place of KernelsAhead."""

        def __init__(self, config: EngineConfig, tp: Any, workers: int) -> None:
            self.dtype = config.dtype
            found.append(("made", self.dtype, workers))

        def start_compiling(self, device: torch.device, path: Path) -> None:
            found.append(("compiles", self.dtype, device, path))

        def __enter__(self) -> "Noted":
            return self

        def __exit__(self, error: object, *_: object) -> None:
            assert error is None
            found.append(("waited", self.dtype))

        def close(self) -> None:
            found.append(("closed", self.dtype))

    monkeypatch.setattr(early_kernels, "KernelsAhead", Noted)
    monkeypatch.setattr(early_kernels, "default_workers", lambda: 9)
    return found


def test_engines_share_the_processes_and_wait_for_their_own(calls: list[tuple[Any, ...]], tmp_path: Path) -> None:
    early, configs = EarlyKernels(), [EngineConfig(str(tmp_path), dtype=dtype) for dtype in ("bfloat16", "float32")]
    early.start(configs)
    device = calls[1][2]
    assert calls == [
        ("made", "bfloat16", 4), ("compiles", "bfloat16", device, tmp_path),
        ("made", "float32", 4), ("compiles", "float32", device, tmp_path),
    ]  # fmt: skip
    calls.clear()
    early.wait(EngineConfig(str(tmp_path), dtype="float16"))
    early.wait(configs[0])
    early.wait(configs[0])
    early.close()
    assert calls == [("waited", "bfloat16"), ("closed", "float32")]


@pytest.mark.parametrize("fits", [True, False])
def test_they_are_those_of_the_engines_that_follow(
    checkpoints: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fits: bool
) -> None:
    path, started, waited = in_bfloat16(checkpoints["qwen-plain"].path, tmp_path / "model"), [], []
    monkeypatch.setattr(EarlyKernels, "start", lambda _, configs: started.extend(configs))
    monkeypatch.setattr(EarlyKernels, "wait", lambda _, config: waited.append(config))
    subject = Subject(str(path), "cpu", "bfloat16", quick=True)
    subject.fits_float32 = fits
    verify(subject)
    assert not started and len(waited) == 2  # nothing is compiled on a CPU
    with monkeypatch.context() as patch:
        patch.setattr(Subject, "torch_device", CUDA)
        patch.setattr(Subject, "torch_dtype", torch.bfloat16)
        outputs.compile_early(subject)
        assert started == waited
        outputs.compile_early(Subject(str(path), "cpu", "bfloat16"))
        assert len(started) == 2  # a whole run starts other engines


def test_what_still_compiles_ends_with_the_run(
    calls: list[tuple[Any, ...]], checkpoints: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = Subject(str(checkpoints["qwen-plain"].path), "cpu", quick=True)
    subject.early.start([EngineConfig(str(subject.path), dtype="float16")])
    monkeypatch.setattr("hybridrt.verify.run.CHECKS", {})
    verify(subject)
    assert calls[-1] == ("closed", "float16")
