"""A rank that is killed, stopped or slow at each step of a start, of a run and of the end."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from hybridrt import LLM
from hybridrt.base.child_process import start_child
from hybridrt.base.errors import EngineError, RankError
from hybridrt.channel.control import TIMEOUT_VARIABLE
from hybridrt.parallel import rank_start, ranks
from tests.support.checkpoints import CheckpointStore
from tests.support.session import greedy
from tests.support.ties import check_greedy

FAULTY = """
import json, os, sys, time
from hybridrt.base.plugins import load_object
from hybridrt.parallel import follower

step, fault, given = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
place, _, method = step.rpartition(".")
owner = load_object(place)
whole = getattr(owner, method)

def faulty(*args, **options):
    setattr(owner, method, whole)
    time.sleep(3) if fault == "slow" else os.kill(os.getpid(), int(fault))
    return whole(*args, **options)

setattr(owner, method, faulty)
follower.main(**given)
"""
RUNNER = "hybridrt.runtime.run.model_runner:ModelRunner"
STEPS = {
    "connecting": "hybridrt.parallel.rank_start:RankPlace.join",
    "meeting": "hybridrt.parallel.rank_start:RankPlace.communicator",
    "making groups": "hybridrt.collectives.groups:Communicator._make_groups",
    "joining gloo": "hybridrt.collectives.groups:dist.ProcessGroupGloo",
    "the first sum": "hybridrt.collectives.groups:Communicator.connect",
    "loading": f"{RUNNER}.__init__",
    "a step": f"{RUNNER}.launch",
    "a task": f"{RUNNER}.read_prefix",
    "leaving": f"{RUNNER}.drop_graphs",
}
PROMPTS = [[5, 6, 7], [9] * 20]
KILLED, STOPPED = int(signal.SIGKILL), int(signal.SIGSTOP)
Spoil = Callable[[str, object], list["subprocess.Popen[bytes]"]]


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Spoil:
    """Rank 1 has a fault, once, as it comes to a step. Returns where the ranks' processes will be."""

    def spoiled(step: str, fault: object) -> list["subprocess.Popen[bytes]"]:
        started = list[subprocess.Popen[bytes]]()

        def child(module: str, given: Any, environment: Any, **options: Any) -> Any:
            if given["rank"] == 1:
                command = [sys.executable, "-c", FAULTY, STEPS[step], str(fault), json.dumps(given)]
                started.append(subprocess.Popen(command, env=os.environ | environment, **options))
            else:
                started.append(start_child(module, given, environment, **options))
            return started[-1]

        monkeypatch.setattr(rank_start, "start_child", child)
        if fault != KILLED:
            monkeypatch.setenv(TIMEOUT_VARIABLE, "2")
        if fault == STOPPED:
            monkeypatch.setattr(ranks, "LEAVING_S", 2.0)
        return started

    return spoiled


def run(path: Path, file: Path, size: int = 2) -> list[list[int]]:
    """A start, steps, a task, and the end: the tokens."""
    options: Any = {
        "device": "cpu",
        "dtype": "float32",
        "tp_size": size,
        "max_model_len": 128,
        "max_running_requests": 2,
    }
    with LLM(str(path), **options) as llm:
        found = [output.token_ids for output in llm.generate(PROMPTS, greedy(8))]
        llm.save_session(file, PROMPTS[1])
    return found


def levels(cases: Sequence[Any], slow: Sequence[Any], default: Any = None) -> list[Any]:
    """`cases` are soak tests, except those that are in another level."""
    marks: Any = {each: pytest.mark.slow for each in slow} | {default: ()}
    return [pytest.param(*each, marks=marks.get(each, pytest.mark.soak)) for each in cases]


BETWEEN = (*STEPS,)[1:-1]
LATE = "was lost: it has sent no heartbeat for 2 seconds"
START = [(step, fault) for step in (*STEPS,)[:6] for fault in (KILLED, STOPPED)]
LOST = [(step, fault) for step in STEPS if step != "leaving" for fault in (KILLED, STOPPED)]
# One step each of the start, of loading and of work. The rank of four is lost within the start, too.
SLOW = [("loading", KILLED), ("a task", KILLED), ("connecting", STOPPED), ("a step", STOPPED)]


@pytest.mark.parametrize(("step", "fault"), levels(LOST, SLOW, ("meeting", KILLED)))
def test_a_lost_rank_is_named(
    step: str, fault: int, spoil: Spoil, checkpoints: CheckpointStore, tmp_path: Path
) -> None:
    """Within the time-out, one that was stopped also while a model is loaded, or before it is connected. While ranks
    met, rank 0 used to wait for minutes."""
    lost = LATE if step in BETWEEN else "did not start: its process was stopped 2 seconds ago"
    if fault == KILLED:  # rank 0 may see its end before its connection
        lost = "(was lost: its process|did not start: it) was killed by SIGKILL"
    processes = spoil(step, fault)
    with pytest.raises((RankError, EngineError), match=f"tensor-parallel rank 1 {lost}"):
        run(checkpoints["falcon-split"].path, tmp_path / "saved")
    assert [process.poll() for process in processes] == [-signal.SIGKILL]


@pytest.mark.parametrize(("step", "fault"), levels(START, [("joining gloo", KILLED)]))
def test_a_rank_of_four_that_is_lost_in_a_start(
    step: str, fault: int, spoil: Spoil, checkpoints: CheckpointStore, tmp_path: Path
) -> None:
    """The others, which wait for it, end."""
    processes = spoil(step, fault)
    with pytest.raises(RankError, match=r"tensor-parallel rank 1 (was lost|did not start)"):
        run(checkpoints["falcon-split"].path, tmp_path / "saved", size=4)
    assert {process.poll() for process in processes} <= {-signal.SIGKILL, ranks.ENDED_WITH_ANOTHER}
    assert len(processes) == 3


@pytest.mark.parametrize("fault", levels([(KILLED,), (STOPPED,)], [(STOPPED,)]))
def test_the_end_waits_for_no_lost_rank(fault: int, spoil: Spoil, checkpoints: CheckpointStore, tmp_path: Path) -> None:
    """What was asked is done, so nothing is raised."""
    processes = spoil("leaving", fault)
    assert run(checkpoints["falcon-split"].path, tmp_path / "saved")
    assert [process.poll() for process in processes] == [-signal.SIGKILL]


@pytest.mark.parametrize("step", levels([(step,) for step in STEPS], [("a step",)]))
def test_a_slow_rank_is_waited_for(step: str, spoil: Spoil, checkpoints: CheckpointStore, tmp_path: Path) -> None:
    """For longer than the time-out: it sends heartbeats."""
    processes, checkpoint = spoil(step, "slow"), checkpoints["falcon-split"]
    for prompt, tokens in zip(PROMPTS, run(checkpoint.path, tmp_path / "saved"), strict=True):
        check_greedy(tokens, checkpoint.logits(prompt, tokens), step)
    assert [process.poll() for process in processes] == [0]
