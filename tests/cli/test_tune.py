"""`hybridrt tune`: what it measures, prints and writes, and what it refuses. A timer takes the place of a GPU's."""

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from hybridrt.base import device as device_module
from hybridrt.base.device import KNOWN, shared_memory
from hybridrt.base.engine_config import EngineConfig
from hybridrt.base.errors import ConfigError, EngineError
from hybridrt.cli import tables
from hybridrt.cli import tune as command
from hybridrt.cli.app import app
from hybridrt.cli.tune import TuneRequest, tune_model
from hybridrt.kernels.core.launch_choice import LAUNCHES
from hybridrt.kernels.dense.skinny_linear_triton import TILES, TiledProduct
from hybridrt.runtime.load.tuned_choices import import_launches, load_tuned, read_tuned, tuned_path, write_tuned
from hybridrt.runtime.precompile import compile_ahead
from hybridrt.runtime.tune import model_shapes
from hybridrt.runtime.tune.trial import Call
from hybridrt.runtime.tune.tune import local_benches
from tests.support.tiny import write_tiny

CPU = torch.device("cpu")
SHAPE = TiledProduct(128, 64, 16, torch.float32)


class Timer:
    """Four columns at a time are fastest."""

    def prepare(self, calls: Sequence[Call]) -> Callable[[], float]:
        seconds = 1e-6 * TILES(SHAPE, CPU).stages
        return lambda: seconds


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "model", tokenizer=False)


@pytest.fixture(autouse=True)
def shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """A cache of its own, and shapes that need no other process."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    import_launches()
    found = [("skinny_linear", SHAPE)]
    monkeypatch.setattr(model_shapes, "model_shapes", lambda *_: found)
    tiles = [TILES.built_in(SHAPE, CPU), {"block_n": 64, "block_k": 32, "num_warps": 4, "stages": 2, "split": 1}]
    monkeypatch.setattr(TILES, "candidates", lambda *_: tiles)
    return found


def quiet(done: int, total: int, what: str) -> None: ...


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["tune", *arguments])


def asked(model: Path, **changes: Any) -> TuneRequest:
    return TuneRequest(EngineConfig(str(model), device="cpu"), 60.0, **changes)


def test_a_cpu_is_refused(model: Path, tmp_path: Path) -> None:
    found = run(str(model), "--device", "cpu")
    assert found.exit_code == 2
    text = " ".join(found.output.split())
    assert "measures kernels on a GPU, and the device is 'cpu'; run it on the machine that will serve" in text
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "1e9"])
def test_seconds_are_bounded(seconds: str, model: Path) -> None:
    found = run(str(model), "--seconds", seconds)
    assert found.exit_code == 2 and "must be more than 0 and at most 86400" in " ".join(found.output.split())


def test_the_file_is_where_a_run_looks(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_benches", lambda *_: nullcontext(local_benches(CPU, Timer())))
    monkeypatch.setattr(command, "_device", lambda *_: (CPU, KNOWN["h200"]))
    monkeypatch.setattr(tables, "PIPED_WIDTH", 300)
    found = run(str(model))
    assert found.exit_code == 0, found.output
    path = tuned_path(KNOWN["h200"])
    text = " ".join(found.output.split())
    assert "1 of 1 measured shapes have a faster choice; 0 of 1 candidates were refused" in text
    assert "stages 4 -> 2" in text and "within tolerance" in text
    loaded = load_tuned(KNOWN["h200"], CPU)
    assert loaded.path == path and loaded.choices["skinny_linear"][SHAPE]["stages"] == 2
    again = json.loads(run(str(model), "--json").stdout)
    assert again["known"] == 1 and again["measured"] == [] and again["path"] == str(path)
    fresh = json.loads(run(str(model), "--json", "--fresh").stdout)
    assert fresh["known"] == 0 and fresh["measured"][0]["us"] == pytest.approx(2.0)


def test_a_dry_run_writes_nothing(model: Path, tmp_path: Path) -> None:
    found = tune_model(asked(model, dry_run=True), quiet, Timer())
    assert found.shapes == [("skinny_linear", SHAPE)] and found.path is None and not found.tuning.measured
    assert not (tmp_path / "cache").exists()


def test_a_dry_run_needs_no_gpu(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts the candidates that fit the GPU that is named: of two tiles an L40S has room for one."""
    monkeypatch.setattr(device_module, "gpu_count", lambda: 0)
    rooms: list[int] = []
    tiles = TILES.candidates(SHAPE, CPU)

    def fitting(_: TiledProduct, device: torch.device) -> Any:
        rooms.append(shared_memory(device))
        return tiles if rooms[-1] > 100 << 10 else tiles[:1]

    monkeypatch.setattr(TILES, "candidates", fitting)
    before = shared_memory(CPU)
    for arguments, gpu, shapes in (((), "h200", 1), (("--gpu", "b200"), "b200", 1), (("--gpu", "l40s"), "l40s", 0)):
        found = json.loads(run(str(model), "--dry-run", "--json", *arguments).stdout)
        assert found["gpu"] == KNOWN[gpu].name and len(found["shapes"]) == shapes and found["path"] is None
        assert rooms[-1] == KNOWN[gpu].shared_memory and shared_memory(CPU) == before


def test_another_gpu_is_for_dry_runs_alone(model: Path) -> None:
    found = run(str(model), "--gpu", "h200")
    assert found.exit_code == 2 and "add --dry-run" in " ".join(found.output.split())
    unknown = run(str(model), "--dry-run", "--gpu", "z80")
    assert unknown.exit_code == 2 and "known are h100, h200" in " ".join(unknown.output.split())


def test_the_output_may_be_elsewhere_but_is_no_directory(model: Path, tmp_path: Path) -> None:
    found = tune_model(asked(model, output=str(tmp_path / "new" / "file.json")), quiet, Timer())
    assert found.path == tmp_path / "new" / "file.json" and len(read_tuned(found.path).choices) == 1
    with pytest.raises(ConfigError, match="is a directory; name a file"):
        tune_model(asked(model, output=str(tmp_path)), quiet, Timer())


def test_a_file_of_other_versions_is_replaced_and_a_damaged_one_is_not(model: Path, tmp_path: Path) -> None:
    import msgspec

    path = tmp_path / "file.json"
    first = tune_model(asked(model, output=str(path)), quiet, Timer())
    file = read_tuned(path)
    write_tuned(path, msgspec.structs.replace(file, origin=msgspec.structs.replace(file.origin, triton="3.0.0")))
    found = tune_model(asked(model, output=str(path)), quiet, Timer())
    assert found.tuning.known == 0 and read_tuned(path).origin == file.origin and first.gpu == found.gpu
    path.write_text("nothing")
    with pytest.raises(ConfigError, match="holds no tuned choices"):
        tune_model(asked(model, output=str(path)), quiet, Timer())
    assert path.read_text() == "nothing"


def test_files_that_are_off_have_no_place(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDRT_TUNED", "0")
    with pytest.raises(ConfigError, match="HYBRIDRT_TUNED=0 turns tuned choices off"):
        tune_model(asked(model), quiet, Timer())


@pytest.mark.slow
def test_shapes_of_a_model_are_found_without_weights_and_without_a_gpu(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of decode steps of all sizes and of prompts; the largest bucket of tokens is that of the chunk."""
    monkeypatch.undo()
    config = EngineConfig(str(model), device="cuda", dtype="bfloat16", max_model_len=256, max_running_requests=4)
    found = model_shapes.model_shapes(config, KNOWN["h200"])
    names = [name for name, _ in found]
    assert names == sorted(names, key=list(LAUNCHES).index)
    rows = {shape.rows for name, shape in found if name == "attention_decode"}
    assert {1, 2, 4} <= rows
    assert {shape.tokens for name, shape in found if name == "product of few tokens"} >= {1, 16}
    assert max(shape.tokens for name, shape in found if name == "product of a library") > 64


@pytest.mark.slow
def test_a_process_that_fails_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    config = EngineConfig(str(tmp_path), device="cuda")
    with pytest.raises(EngineError, match="the model's shapes were not found: the model: "):
        model_shapes.model_shapes(config, KNOWN["h200"])
    monkeypatch.setitem(compile_ahead.ENVIRONMENT, "PATH", "/nowhere")
    with pytest.raises(EngineError, match=r"took more than 0\.01 seconds"):
        model_shapes.model_shapes(config, KNOWN["h200"], 0.01)
