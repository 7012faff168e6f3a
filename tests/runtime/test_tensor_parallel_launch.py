"""One launch of two ranks in a directory that holds modules: what ranks import, where they listen, a forked child."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hybridrt import LLM
from hybridrt.base.errors import RankError
from hybridrt.parallel.rank_start import find_place
from tests.support.checkpoints import CheckpointStore
from tests.support.session import greedy

LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
MODULES = ("torch", "hybridrt", "msgspec", "flashinfer", "mamba_ssm", "nixl")


@pytest.fixture(scope="module")
def launch(checkpoints: CheckpointStore, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the process reports, which is itself started without the current directory on its path."""
    directory = tmp_path_factory.mktemp("checkpoint")
    for name in MODULES:
        (directory / f"{name}.py").write_text(f"open({str(directory / 'imported')!r}, 'a').write({name!r})")
    script = Path(__file__).parents[1] / "support" / "tensor_parallel_launch.py"
    run = subprocess.run(
        [sys.executable, "-P", str(script), str(checkpoints["falcon-split"].path)],
        cwd=directory, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    imported = directory / "imported"
    found = {"imported": imported.read_text() if imported.exists() else "", "stderr": run.stderr}
    return {**json.loads(run.stdout.splitlines()[-1]), **found}


@pytest.mark.slow
def test_ranks_import_nothing_from_the_current_directory(launch: dict[str, Any]) -> None:
    assert launch["imported"] == ""


@pytest.mark.slow
def test_ranks_on_one_host_listen_on_loopback_alone(launch: dict[str, Any]) -> None:
    assert launch["addresses"] and set(launch["addresses"]) <= LOOPBACK


@pytest.mark.slow
def test_a_forked_child_of_rank_0_ends_and_leaves_the_ranks_alone(
    launch: dict[str, Any], checkpoints: CheckpointStore
) -> None:
    assert launch["child"] == 3, launch["stderr"]
    assert "belongs to process" in launch["stderr"]
    with LLM(str(checkpoints["falcon-split"].path), device="cpu", max_model_len=128) as llm:
        alone = llm.generate([[5, 6, 7]], greedy(4))[0].token_ids
    assert launch["before"] == launch["after"] == alone


@pytest.mark.slow
def test_the_place_where_ranks_meet_goes_with_them(launch: dict[str, Any]) -> None:
    assert launch["directory"] is not None and not Path(launch["directory"]).exists()


def test_a_meeting_place_that_others_can_read_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(RankError, match="only this user"):
        find_place(str(tmp_path))
