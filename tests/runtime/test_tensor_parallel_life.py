"""How tensor-parallel processes start, fail and end: nothing hangs, nothing stays, and a lost rank is named."""

import gc
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybridrt import LLM
from hybridrt.base.engine_config import EngineConfig
from hybridrt.base.errors import CheckpointError, ConfigError, EngineError, PeerGoneError, RankError
from hybridrt.base.interrupts import Interrupts
from hybridrt.channel.control import TIMEOUT_S, TIMEOUT_VARIABLE
from hybridrt.engine.core import load_engine
from hybridrt.parallel import follower, rank_start, tensor_parallel
from hybridrt.parallel.rank_start import KEY_VARIABLE, start_ranks
from hybridrt.parallel.ranks import ENDED_WITH_ANOTHER, Ranks
from tests.support.checkpoints import CheckpointStore
from tests.support.session import greedy

PROMPTS = [[5, 6, 7], [9] * 20]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Ranks]:
    """The ranks that LLMs start."""
    found: list[Ranks] = []

    def start(*asked: Any) -> Ranks:
        found.append(start_ranks(*asked))
        return found[-1]

    monkeypatch.setattr(tensor_parallel, "start_ranks", start)
    return found


def statuses(ranks: Ranks) -> list[int | None]:
    return [process.poll() for process in ranks._processes]


def make(path: Path, size: int = 2) -> LLM:
    return LLM(str(path), device="cpu", tp_size=size, max_model_len=128, max_running_requests=2)


def tokens(llm: LLM) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(PROMPTS, greedy(8))]


@pytest.mark.slow
def test_an_interrupt_leaves_the_ranks_in_step(started: list[Ranks], checkpoints: CheckpointStore) -> None:
    with make(checkpoints["falcon-split"].path) as llm:
        want = tokens(llm)
        executor: Any = llm.engine.executor
        launch = executor.runner.launch

        def interrupted(plan: Any) -> Any:
            os.kill(os.getpid(), signal.SIGINT)
            return launch(plan)

        executor.runner.launch = interrupted
        with pytest.raises(KeyboardInterrupt):
            tokens(llm)
        executor.runner.launch = launch
        assert tokens(llm) == want
    assert statuses(started[0]) == [0]


@pytest.mark.slow
def test_a_killed_rank_is_named_and_ends_the_others(started: list[Ranks], checkpoints: CheckpointStore) -> None:
    llm = make(checkpoints["falcon-split"].path, size=4)
    stream = llm.stream(PROMPTS[0], greedy(100))
    next(stream)
    started[0]._processes[1].kill()
    with pytest.raises(EngineError, match="tensor-parallel rank 2 was lost: its process was killed by SIGKILL"):
        list(stream)
    with pytest.raises(EngineError, match="tensor-parallel rank 2 was lost"):
        tokens(llm)
    llm.close()
    assert all(status in (ENDED_WITH_ANOTHER, -signal.SIGKILL) for status in statuses(started[0]))


@pytest.mark.slow
def test_a_stopped_rank_is_named_and_an_interrupt_is_taken(
    started: list[Ranks], checkpoints: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within ten seconds. Rank 0 used to wait for it for a year, deaf to SIGINT."""
    assert TIMEOUT_S == 10 and TIMEOUT_VARIABLE not in os.environ
    monkeypatch.setenv(TIMEOUT_VARIABLE, "4")
    llm = make(checkpoints["falcon-split"].path)
    tokens(llm)
    started[0]._processes[0].send_signal(signal.SIGSTOP)
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        tokens(llm)
    with pytest.raises(EngineError, match="rank 1 was lost: it has sent no heartbeat for 4 seconds"):
        tokens(llm)
    llm.close()
    assert statuses(started[0]) == [-signal.SIGKILL]


def test_a_failed_rank_reports_its_reason() -> None:
    ranks = start_ranks(2, "cpu")
    ranks.start_service(EngineConfig("/no/checkpoint", device="cpu", tp_size=2))
    with pytest.raises(RankError, match=r"rank 1 was lost: .*/no/checkpoint.*build a new LLM"), ranks.together():
        ranks.comm.barrier()
    with pytest.raises(RankError, match="rank 1"):
        ranks.check_alive()
    ranks.close()
    assert statuses(ranks)[0] in (1, -signal.SIGKILL)  # rank 0 does not wait for its end


def test_a_rank_starts_its_gpu_before_it_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    """It sends no heartbeats meanwhile, and rank 0 waits for them from then on."""
    order = list[str]()

    class Place:
        directory = None

        def join(self, rank: int) -> Any:
            order.append("joined")
            raise PeerGoneError("rank 0 is gone")

    monkeypatch.setattr(follower, "start_gpu", lambda device: order.append(f"started {device}"))
    place: Any = Place()
    with pytest.raises(PeerGoneError):
        follower.serve(place, 1, 2, torch.device("cuda", 1), None)
    assert order == ["started cuda:1", "joined"]


def test_a_gpu_that_does_not_start_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """As soon as there is a connection to rank 0."""
    reported = list[Exception]()

    class Told:
        def __init__(self, link: Any, directory: Any) -> None:
            assert link == "the link"

        def report(self, error: Exception) -> None:
            reported.append(error)

    def fail(device: torch.device) -> None:
        raise ConfigError(f"{device} is busy")

    monkeypatch.setattr(follower, "Leader", Told)
    monkeypatch.setattr(follower, "start_gpu", fail)
    place: Any = SimpleNamespace(directory=None, join=lambda rank: "the link")
    assert follower.serve(place, 1, 2, torch.device("cuda", 1), None) == 1
    assert [str(error) for error in reported] == ["cuda:1 is busy"]


@pytest.mark.slow
def test_what_fails_everywhere_is_raised_as_it_is(
    started: list[Ranks], checkpoints: CheckpointStore, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(checkpoints["falcon-split"].path, tmp_path / "model"))
    weights = load_file(path / "model.safetensors")
    del weights["model.final_layernorm.weight"]
    save_file(weights, path / "model.safetensors")
    with pytest.raises(CheckpointError, match="final_layernorm"):
        make(path)
    assert None not in statuses(started[0])


@pytest.mark.slow
def test_a_forgotten_llm_lets_its_ranks_go(started: list[Ranks], checkpoints: CheckpointStore) -> None:
    llm = make(checkpoints["falcon-split"].path)
    del llm
    gc.collect()
    assert statuses(started[0]) == [0]


FOLLOWERS = """
import sys, time
from hybridrt.base.engine_config import EngineConfig
from hybridrt.parallel.rank_start import start_ranks

ranks = start_ranks(3, "cpu")
ranks.start_service(EngineConfig(sys.argv[1], device="cpu", tp_size=3, load_format="dummy"))
print(*(process.pid for process in ranks._processes), flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_ranks_end_with_rank_0(checkpoints: CheckpointStore) -> None:
    """Even those that build a model, or wait in a collective."""
    command = [sys.executable, "-c", FOLLOWERS, str(checkpoints["falcon-split"].path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as rank_0:
        assert rank_0.stdout is not None
        pids = list(map(int, rank_0.stdout.readline().split()))
        assert len(pids) == 2
        rank_0.kill()
    deadline = time.monotonic() + 30
    while any(map(runs, pids)):
        assert time.monotonic() < deadline, "a rank outlived rank 0"
        time.sleep(0.05)


def runs(pid: int) -> bool:
    """Whether a process runs: a zombie that no process has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def torchrun(*command: str, text: str = "") -> "subprocess.CompletedProcess[str]":
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run([*launcher, *command], input=text, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_torchrun_reads_and_prints_once(checkpoints: CheckpointStore) -> None:
    path = checkpoints["falcon-split"].path
    with LLM(str(path), device="cpu", max_model_len=128) as llm:
        want = llm.generate(PROMPTS[0], greedy(8))[0].token_ids
    options = ["--model", str(path), "--device", "cpu", "--max-tokens", "8", "--token-ids", "--temperature", "0"]
    run = torchrun("-m", "hybridrt", "generate", *options, "--ignore-eos", text="5 6 7")
    assert (run.returncode, run.stdout.split()) == (0, [str(token) for token in want]), run.stderr


SCRIPT = """
import sys
from hybridrt import LLM, SamplingParams
for length in (64, 128):
    llm = LLM(sys.argv[1], device="cpu", tp_size=2, max_model_len=length)
    print(llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))[0].token_ids)
    if length == 64:
        llm.close()
print("the end")
"""


@pytest.mark.soak
def test_scripts_run_unchanged_under_torchrun(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    """One model after the other, of which the last is not closed. The slow level has a command under torchrun, above,
    and the same script without it, below."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    run = torchrun(str(script), str(checkpoints["falcon-split"].path))
    assert run.returncode == 0, run.stderr
    first, second, last = run.stdout.splitlines()
    assert first == second and len(first.split(",")) == 4 and last == "the end"


@pytest.mark.slow
def test_ranks_of_several_hosts_meet_with_a_key(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    """Two hosts of one rank each, which here share an address."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    shared = {
        "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), KEY_VARIABLE: secrets.token_hex(16),
    }  # fmt: skip
    command = [sys.executable, str(script), str(checkpoints["falcon-split"].path)]
    processes = [
        subprocess.Popen(command, env={**os.environ, **shared, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    (lead, _), (other, _) = (process.communicate(timeout=120) for process in processes)
    assert [process.returncode for process in processes] == [0, 0]
    assert lead.splitlines()[-1] == "the end" and other == ""


def test_an_interrupt_that_ends_the_process_still_ends_it() -> None:
    """Where SIGINT has its default action, it was taken and forgotten."""
    child = os.fork()
    if not child:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        with Interrupts():
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGINT


def test_the_tokenizer_is_read_while_the_ranks_start(
    checkpoints: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers takes seconds to import, and so does torch in each rank. An error ends them."""
    processes, begin = list[Any](), rank_start.start_child
    monkeypatch.setattr(rank_start, "start_child", lambda *a, **o: processes.append(begin(*a, **o)) or processes[-1])

    def read(config: EngineConfig) -> None:
        assert [process.poll() for process in processes] == [None]
        raise CheckpointError("this tokenizer cannot be read")

    monkeypatch.setattr(load_engine, "read_tokenizer", read)
    with pytest.raises(CheckpointError, match="this tokenizer cannot be read"):
        make(checkpoints["falcon-split"].path)
    assert [process.poll() for process in processes] == [-signal.SIGKILL]
