"""Files of tuned choices: when they are used, and what is refused."""

import json
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from hybridrt.base.device import KNOWN
from hybridrt.base.engine_config import EngineConfig
from hybridrt.base.errors import ConfigError
from hybridrt.collectives.groups import TPGroup
from hybridrt.kernels.core.launch_choice import use_tuned
from hybridrt.kernels.dense import skinny_linear_triton
from hybridrt.kernels.dense.skinny_linear_triton import TILES, Tile, TiledProduct
from hybridrt.runtime.load import tuned_choices
from hybridrt.runtime.load.tuned_choices import (
    Choice,
    Origin,
    TunedFile,
    digest_of,
    fields_of,
    import_launches,
    load_tuned,
    read_tuned,
    tuned_path,
    use_tuned_choices,
    write_tuned,
)
from hybridrt.runtime.precompile import compile_trace, compile_worker
from hybridrt.runtime.precompile.compile_mark import find_mark
from tests.support.tiny import write_tiny

CPU, GPU = torch.device("cpu"), KNOWN["h200"]
SHAPE = TiledProduct(4096, 1024, 16, torch.bfloat16)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def another(shape: TiledProduct = SHAPE) -> dict[str, int]:
    """A candidate that the built-in table does not name."""
    import_launches()
    built_in = TILES.built_in(shape, CPU)
    return next(dict(values) for values in TILES.candidates(shape, CPU) if values != built_in)


def a_file(**changes: Any) -> TunedFile:
    choice = Choice(TILES.name, fields_of(SHAPE), another(), 4.0, 5.0, True)
    file = TunedFile("2026-01-02T03:04:05Z", Origin.of_gpu(GPU), [choice])
    return msgspec.structs.replace(file, **changes)


def stored(**changes: Any) -> Path:
    path = tuned_path(GPU)
    assert path is not None
    write_tuned(path, a_file(**changes))
    return path


def test_a_launch_uses_what_was_measured_for_its_shape_alone() -> None:
    stored()
    built_in = TILES(SHAPE, CPU)
    loaded = load_tuned(GPU, CPU)
    assert loaded.objection is None and loaded.choices == {TILES.name: {SHAPE: another()}}
    use_tuned(CPU, loaded.choices)
    assert TILES(SHAPE, CPU) == Tile(**another()) != built_in
    other = SHAPE._replace(tokens=32)
    assert TILES(other, CPU) == Tile(**TILES.built_in(other, CPU))
    assert TILES(SHAPE, CPU) is TILES(SHAPE, CPU), "looked up once"


def test_a_trial_leaves_the_choice_as_it_was() -> None:
    values = another()
    before = TILES(SHAPE, CPU)
    with TILES.trying(SHAPE, CPU, values):
        assert TILES(SHAPE, CPU) == Tile(**values) != before
    assert TILES(SHAPE, CPU) is before
    fresh = SHAPE._replace(rows=64)
    with TILES.trying(fresh, CPU, another(fresh)):
        pass
    assert TILES(fresh, CPU) == Tile(**TILES.built_in(fresh, CPU))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"gpu": "NVIDIA A100"}, "it is of gpu NVIDIA A100, and here is NVIDIA H200"),
        ({"capability": (8, 0)}, "it is of capability 8.0, and here is 9.0"),
        ({"triton": "3.0.0"}, "it is of triton 3.0.0"),
        ({"hybridrt": "0.0.1"}, "it is of hybridrt 0.0.1"),
        ({"torch": "2.0"}, "it is of torch 2.0"),
        ({"shared_memory": 1000}, "it is of shared memory 1000"),
        ({"kernels": "00"}, "it was measured with other kernels"),
    ],
)
def test_a_file_of_another_gpu_or_version_is_not_used(change: dict[str, Any], text: str) -> None:
    stored(origin=msgspec.structs.replace(Origin.of_gpu(GPU), **change))
    loaded = load_tuned(GPU, CPU)
    assert loaded.choices == {} and loaded.objection is not None and text in loaded.objection


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"launch": "nothing"}, "there is no launch 'nothing'"),
        ({"values": {"block_n": 1024}}, "is no candidate"),
        ({"values": {"block_n": -1}}, "holds no tuned choices"),
        ({"shape": {"rows": 1}}, "is no shape of rows: int"),
        ({"shape": fields_of(SHAPE) | {"dtype": "load"}}, "is no shape of"),
        ({"shape": fields_of(SHAPE) | {"rows": True}}, "is no shape of"),
        ({"shape": fields_of(SHAPE) | {"rows": -4096}}, "negative or too large"),
    ],
)
def test_a_choice_that_its_launch_does_not_name_is_refused(change: dict[str, Any], text: str) -> None:
    choice = msgspec.structs.replace(a_file().choices[0], **change)
    stored(choices=[choice])
    with pytest.raises(ConfigError, match=text):
        load_tuned(GPU, CPU)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "holds no tuned choices"),
        (b"\x80\x04.", "holds no tuned choices"),
        (
            b'{"format": "hybridrt tuned choices 2"}',
            "of a newer version.*: use that version, or run hybridrt tune again",
        ),
        (b'{"format": "hybridrt tuned choices 1"}', "holds no tuned choices"),
        (b'{"format": "hybridrt tuned choices 1", "made": "", "more": 1}', "holds no tuned choices"),
        (b"[" * 100_000, "holds no tuned choices"),
        (b'{"choices": ' + b"[" * 100_000, "holds no tuned choices"),
    ],
)
def test_a_damaged_file_is_an_error(data: bytes, text: str, tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=text):
        read_tuned(path)


def test_a_file_that_is_too_long_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned_choices, "MAX_BYTES", 100)
    with pytest.raises(ConfigError, match="more than 100 bytes"):
        read_tuned(stored())


def test_the_variable_names_another_file_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored()
    monkeypatch.setenv("HYBRIDRT_TUNED", "0")
    assert load_tuned(GPU, CPU).path is None
    monkeypatch.setenv("HYBRIDRT_TUNED", str(tmp_path / "missing.json"))
    with pytest.raises(ConfigError, match=r"missing\.json cannot be read"):
        load_tuned(GPU, CPU)
    write_tuned(tmp_path / "missing.json", a_file())
    assert load_tuned(GPU, CPU).choices


def test_an_unfinished_file_replaces_none(monkeypatch: pytest.MonkeyPatch) -> None:
    path = stored()
    before = path.read_bytes()

    def fails(self: Path, target: Path) -> Path:
        raise OSError("the disk is full")

    monkeypatch.setattr(Path, "replace", fails)
    with pytest.raises(ConfigError, match="the disk is full"):
        stored(made="later")
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]


class Rank(TPGroup):
    """One of two ranks, whose other one has this digest."""

    other = 0

    def minimum(self, value: int) -> int:
        # of -value for the maximum
        return min(value, self.other if value >= 0 else -self.other)


def test_ranks_with_different_choices_do_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    stored()
    monkeypatch.setattr(tuned_choices.GPUFacts, "of_device", lambda _: GPU)
    monkeypatch.setattr(skinny_linear_triton, "shared_memory", lambda _: GPU.shared_memory)
    monkeypatch.setattr(skinny_linear_triton, "has_pipeline", lambda _: False)
    cuda, rank = torch.device("cuda", 0), Rank(size=2)
    with pytest.raises(ConfigError, match=r"different tuned choices.*HYBRIDRT_TUNED=0"):
        use_tuned_choices(cuda, rank)
    object.__setattr__(rank, "other", digest_of({TILES.name: {SHAPE: another()}}))
    use_tuned_choices(cuda, rank)
    assert TILES(SHAPE, cuda) == Tile(**another())


def test_a_process_keeps_the_choices_of_its_first_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of the first engine hold them."""
    monkeypatch.setattr(tuned_choices.GPUFacts, "of_device", lambda _: GPU)
    monkeypatch.setattr(skinny_linear_triton, "has_pipeline", lambda _: False)
    cuda = torch.device("cuda", 0)
    use_tuned_choices(cuda, TPGroup())
    stored()
    use_tuned_choices(cuda, TPGroup())
    assert TILES(SHAPE, cuda) == Tile(**TILES.built_in(SHAPE, CPU))


def test_a_file_that_is_not_used_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    stored(origin=msgspec.structs.replace(Origin.of_gpu(GPU), triton="3.0.0"))
    monkeypatch.setattr(tuned_choices.GPUFacts, "of_device", lambda _: GPU)
    use_tuned_choices(torch.device("cuda", 0), TPGroup())
    assert "is not used: it is of triton 3.0.0" in caplog.text


def test_the_file_of_a_gpu_has_its_name(tmp_path: Path) -> None:
    odd = replace(GPU, name="NVIDIA ../../RTX 4090")
    assert tuned_path(odd) == tmp_path / "hybridrt" / "tuned" / "nvidia-rtx-4090.json"


def test_other_choices_are_other_kernels_to_compile(tmp_path: Path) -> None:
    """A mark of a cache without them would hide that they are missing."""
    config = EngineConfig(str(write_tiny(tmp_path / "model", tokenizer=False)), device="cuda")
    plain = find_mark(config, GPU)
    stored()
    assert find_mark(config, GPU) != plain and find_mark(config, KNOWN["h100"]) != find_mark(config, GPU)
    with_one = find_mark(config, GPU)
    stored(choices=[])
    assert find_mark(config, GPU) not in (plain, with_one)


def test_kernels_are_traced_with_the_tuned_choices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored()
    monkeypatch.setattr(compile_trace, "_runners", lambda config: 1 / 0)
    monkeypatch.setattr(skinny_linear_triton, "shared_memory", lambda _: GPU.shared_memory)
    with pytest.raises(ZeroDivisionError):
        compile_trace.trace(EngineConfig(str(tmp_path), device="cuda"), GPU, lambda kernel: None)
    assert TILES(SHAPE, torch.device("cuda", 0)) == Tile(**another())


@pytest.mark.parametrize(("shared", "problem"), [(99 << 10, None), ((99 << 10) + 1, "it needs 101377 bytes of shared")])
def test_a_kernel_that_does_not_fit_the_gpu_is_a_problem(
    shared: int, problem: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would compile, and fail at its launch."""
    answers = BytesIO()
    worker: Any = object.__new__(compile_worker._Worker)
    worker._gpu, worker._answers = KNOWN["l40s"], answers
    monkeypatch.setattr(compile_worker, "_compile", lambda *_: shared)
    worker.compile("a.module", "a_kernel", "{}")
    found = json.loads(answers.getvalue())["problem"]
    assert found == problem if problem is None else problem in found
