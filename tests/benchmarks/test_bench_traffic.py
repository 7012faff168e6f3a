"""Checkouts that serve the same loads at the same time."""

import ast
import os
import sys
from pathlib import Path

import pytest

from benchmarks import bench_traffic

CORES = len(os.sched_getaffinity(0))
STUB = """#!{python}
import os, sys
if "nowhere" in " ".join(sys.argv):
    sys.exit(3)
print(os.environ["CUDA_VISIBLE_DEVICES"], sorted(os.sched_getaffinity(0)), *sys.argv[1:])
"""


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of Python: it says how it was called."""
    path = tmp_path / "python"
    path.write_text(STUB.format(python=sys.executable))
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))


def run(monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_traffic", "model", *options])
    bench_traffic.main()


@pytest.mark.skipif(CORES < 2, reason="one core")
def test_each_has_a_gpu_and_cores_of_its_own(
    stub: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = os.sched_getaffinity(0)
    run(monkeypatch, "--tree", "/one,/two", "--targets", "auto", "--loads", "10/s", "--seeds", "1,2", "--name", "pair")
    first, second = [line.split(" -m ") for line in capsys.readouterr().out.splitlines() if " -m " in line]
    gpus, cores = zip(*(part[0].split(" ", 1) for part in (first, second)), strict=True)
    one, two = map(set, map(ast.literal_eval, cores))
    assert gpus == ("0", "1") and len(one) == len(two) == CORES // 2 and not one & two
    options = "--targets auto --loads 10/s --seeds 1,2 --engine {}"
    assert first[1] == f"benchmarks.bench_traffic model {options} --tree /one --name pair-0"
    assert second[1] == f"benchmarks.bench_traffic model {options} --tree /two --name pair-1"
    assert os.sched_getaffinity(0) == before


@pytest.mark.skipif(CORES < 2, reason="one core")
def test_one_that_fails_is_an_error(stub: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="its messages are above"):
        run(monkeypatch, "--tree", "/one,/nowhere")


def test_there_must_be_cores(stub: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match=f"need as many cores, there are {CORES}"):
        run(monkeypatch, "--tree", ",".join(["/one"] * (CORES + 1)))
