"""Two processes on one machine, over NIXL: same tokens, whenever the prefill worker dies."""

import json
import os
import random
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridrt.base.errors import ConfigError, HandshakeError, ProviderNotInstalledError, TransferError
from hybridrt.channel.channel import SocketChannel
from hybridrt.transfer.keys import VARIABLE
from hybridrt.transfer.nixl_transport import NixlTransport
from hybridrt.transfer.workers import decode_worker
from tests.support.checkpoints import CheckpointStore, falcon
from tests.support.listening import LOOPBACK, listening
from tests.support.ties import check_greedy
from tests.support.tiny import write_tiny
from tests.support.transfer_pair import SMALL, alone, assert_no_leak, build, greedy

RNG = random.Random(5)
PROMPTS = [[RNG.randrange(3, 131) for _ in range(n)] for n in (3, 30, 60)]
ROOT = Path(__file__).parents[2]
KEY = "a key of the tests, long enough"
BIG = {**SMALL, "transfer_bytes": 1 << 24}


@pytest.fixture(scope="module", autouse=True)
def _nixl() -> None:
    try:
        NixlTransport(torch.zeros(1, dtype=torch.uint8), serve=False)
    except ProviderNotInstalledError as e:
        pytest.skip(str(e))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """States of a quarter of a megabyte, so that reading one takes a while."""
    make = falcon(mamba_d_ssm=512, mamba_n_heads=8, mamba_d_head=64, mamba_d_state=64)
    return write_tiny(tmp_path_factory.mktemp("model"), make, tokenizer=False)


class Nursery:
    """Starts prefill workers, each in a process that is forked off one which has the model already."""

    def __init__(self, model: Path, **options: Any) -> None:
        command = [sys.executable, "-m", "tests.support.transfer_process", str(model), json.dumps({**BIG, **options})]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            text=True,
            bufsize=1,
            env={**os.environ, VARIABLE: KEY},
        )

    def start(self, event: str = "never", seconds: float = 0.0) -> tuple[int, int]:
        """Process id and port of a new worker, which dies so many seconds after an event."""
        assert self.process.stdin and self.process.stdout
        print(event, seconds, file=self.process.stdin)
        pid, port = self.process.stdout.readline().split()
        return int(pid), int(port)

    def close(self) -> None:
        self.process.communicate()


@pytest.fixture(scope="module")
def nursery(model: Path) -> Iterator[Nursery]:
    nursery = Nursery(model)
    yield nursery
    nursery.close()


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    return alone(model, PROMPTS, greedy(), **BIG)


def test_same_tokens_as_one_process(model: Path, nursery: Nursery, expected: list[list[int]]) -> None:
    pid, port = nursery.start()
    with build(model, **BIG) as llm:
        worker = decode_worker(llm, [("127.0.0.1", port)], key=KEY, compute_here=False)
        assert [output.token_ids for output in llm.generate(PROMPTS, greedy())] == expected
        assert worker.counters().fetched == 3 and worker.counters().bytes_fetched > 3 << 18
        worker.close()
        assert worker.counters().bytes_used == 0
        assert_no_leak(llm.engine)
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("name, prefill, decode", [("falcon-split", 2, 1), ("qwen-split", 1, 2)])
def test_other_numbers_of_ranks(name: str, prefill: int, decode: int, checkpoints: CheckpointStore) -> None:
    path, options = checkpoints[name].path, {**BIG, "load_format": "auto"}
    there = Nursery(path, **options, tp_size=prefill)
    try:
        with build(path, **options, tp_size=decode) as llm:
            _, port = there.start("here")
            worker = decode_worker(llm, [("127.0.0.1", port)], key=KEY, compute_here=False)
            outputs = llm.generate(PROMPTS, greedy())
            assert worker.counters().fetched == 3
            worker.close()
            assert worker.counters().bytes_used == 0
            assert_no_leak(llm.engine)
    finally:
        there.close()
    for prompt, output in zip(PROMPTS, outputs):
        check_greedy(output.token_ids, checkpoints[name].logits(prompt, output.token_ids), name)


def test_another_model_is_refused_before_any_byte_moves(model: Path, nursery: Nursery) -> None:
    pid, port = nursery.start()
    with build(model, **{**BIG, "seed": 1}) as llm, pytest.raises(HandshakeError, match="model is"):
        decode_worker(llm, [("127.0.0.1", port)], key=KEY)
    os.kill(pid, signal.SIGKILL)


def test_the_prefill_worker_is_killed_at_random_moments(
    model: Path, nursery: Nursery, expected: list[list[int]]
) -> None:
    rng, llm = random.Random(7), build(model, **BIG)
    worker = decode_worker(llm, [], key=KEY)
    running = llm.engine.add_request([9], greedy(90))
    done: dict[str, list[int]] = defaultdict(list)
    for number in range(20):
        event, most = ("job", 0.06) if number % 2 else ("ready", 0.004)
        pid, port = nursery.start(event, rng.uniform(0, most))
        worker.connect(SocketChannel.connect(("127.0.0.1", port), KEY.encode()))
        before = worker.counters()
        ids = [llm.engine.add_request(prompt, greedy()) for prompt in PROMPTS]
        while not all(len(done[i]) == len(e) for i, e in zip(ids, expected, strict=True)):
            for output in llm.engine.step():
                assert output.error is None
                done[output.request_id] += output.token_ids
        assert [done[i] for i in ids] == expected
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # if it was too slow to die by itself
        while worker.counters().workers:
            worker.advance()
        after = worker.counters()
        assert after.bytes_used == after.under_way == 0
        assert after.fetched + after.computed_here - before.fetched - before.computed_here == len(PROMPTS)
    while llm.engine.has_unfinished():
        for output in llm.engine.step():
            done[output.request_id] += output.token_ids
    assert len(done[running]) == 90, "it decoded all the while"
    assert_no_leak(llm.engine)
    worker.close()


@pytest.mark.parametrize("phase", ["asked", "reading"])
def test_a_stopped_prefill_worker_is_dropped(
    phase: str, model: Path, nursery: Nursery, expected: list[list[int]]
) -> None:
    pid, port = nursery.start()
    with build(model, **BIG) as llm:
        worker = decode_worker(llm, [("127.0.0.1", port)], key=KEY, timeout=1.0)
        if phase == "asked":
            os.kill(pid, signal.SIGSTOP)
        else:
            fetch = worker._fetch

            def stop_and_fetch(*args: Any) -> None:
                os.kill(pid, signal.SIGSTOP)
                fetch(*args)

            worker._fetch = stop_and_fetch  # type: ignore[method-assign]
        assert [output.token_ids for output in llm.generate(PROMPTS, greedy())] == expected
        counters = worker.counters()
        assert counters.computed_here + counters.fetched == 3
        assert (counters.workers, counters.computed_here) == (0, 3) or phase == "reading"
        worker.close()
        assert_no_leak(llm.engine)
    os.kill(pid, signal.SIGKILL)


def test_workers_listen_on_the_loopback_address_alone(model: Path, nursery: Nursery) -> None:
    pid, port = nursery.start()
    with build(model, **BIG) as llm:
        worker = decode_worker(llm, [("127.0.0.1", port)], key=KEY)
        llm.generate(PROMPTS, greedy(1))
        assert worker.counters().fetched == 3
        assert listening(pid) == {LOOPBACK} and listening(os.getpid()) <= {LOOPBACK}
        worker.close()
    os.kill(pid, signal.SIGKILL)
    everywhere = NixlTransport(torch.zeros(1, dtype=torch.uint8), serve=False, devices="all")
    assert LOOPBACK in listening(os.getpid())
    everywhere.close()
    with pytest.raises(ConfigError, match="no-such-device"):
        NixlTransport(torch.zeros(1, dtype=torch.uint8), serve=False, devices="no-such-device")


@pytest.mark.parametrize(
    "description",
    [
        "",
        "[]",
        "{}",
        "null",
        "[" * 5000,
        '["", 1, 2, "DISK"]',
        '["", "1", 2, "DRAM"]',
        '["%", 1, 2, "DRAM"]',
        '["AAAA", 1, 2, "DRAM"]',
    ],
)
def test_a_description_that_is_none_is_a_transfer_error(description: str) -> None:
    transport = NixlTransport(torch.zeros(1, dtype=torch.uint8), serve=False, devices="lo")
    with pytest.raises(TransferError):
        transport.connect(description)
    transport.close()
