"""Workers whose peers stop without a word, or answer slowly: what is dropped, when, and what continues."""

import random
import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridrt.base.errors import PeerGoneError
from hybridrt.transfer.side import WorkerSide
from tests.support.in_process import InProcessTransport
from tests.support.levels import sweep
from tests.support.tiny import write_tiny
from tests.support.transfer_pair import Decoder, Prefiller, alone, build, greedy, run

RNG = random.Random(11)
PROMPTS = [[RNG.randrange(3, 131) for _ in range(n)] for n in (5, 40)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("falcon"), tokenizer=False)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    return alone(model, PROMPTS, greedy())


@pytest.mark.parametrize(("compute_here", "steps"), sweep(product([True, False], [1, 2, 3, 5, 8]), 3))
def test_a_prefill_worker_that_stops_is_dropped(
    steps: int, compute_here: bool, model: Path, expected: list[list[int]]
) -> None:
    """Stopped, it closes nothing: without a time-out the request waits for ever."""
    hub: dict[str, torch.Tensor] = {}
    stopped = Prefiller(build(model), hub)
    decode = Decoder(build(model), hub, compute_here=compute_here, timeout=0.2)
    stopped.connect(decode)
    running = decode.engine.add_request([7], greedy(30))
    ids = [decode.engine.add_request(prompt, greedy()) for prompt in PROMPTS]
    for _ in range(steps):
        decode.step()
        stopped.step()
    run(decode)
    assert len(decode.tokens(running)) == 30
    for request_id, tokens in zip(ids, expected):
        output = decode.outputs[request_id, 0]
        if output.error is None:
            assert output.token_ids == tokens
        else:
            assert not compute_here and isinstance(output.error.__cause__, PeerGoneError)
    if decode.worker.counters().computed_here or decode.worker.counters().failed:
        assert decode.worker.counters().workers == 0
    decode.assert_empty()


class Endless:
    """A read that never ends, as of a process that has been stopped."""

    def done(self) -> bool:
        return False


class Late:
    """A read that is done at a time, and not before."""

    def __init__(self, read: Any, until: float) -> None:
        self._read, self._until = read, until

    def done(self) -> bool:
        return bool(self._read.done()) and time.monotonic() > self._until


@pytest.mark.parametrize("alive", [True, False])
def test_a_read_that_does_not_end_fails_and_its_memory_is_left_alone(
    alive: bool, model: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InProcessTransport, "read", lambda *_: Endless())
    hub: dict[str, torch.Tensor] = {}
    prefiller, decode = Prefiller(build(model), hub), Decoder(build(model), hub, timeout=0.2)
    prefiller.connect(decode)
    request_id = decode.engine.add_request(PROMPTS[1], greedy())
    while not any(attempt.reading for attempt in decode.worker._attempts.values()):
        decode.step()
        prefiller.step()
    while decode.engine.has_unfinished():
        decode.step()
        if alive:
            prefiller.step()
    assert decode.tokens(request_id) == expected[1]
    counters = decode.worker.counters()
    tries = 3 if alive else 1
    assert counters.bytes_used == tries * decode.side.layout.image_bytes(39) and counters.computed_here == 1
    decode.worker.close()
    assert decode.engine.prefill_source is None


def test_an_arena_full_of_reads_that_do_not_end_stops_no_request(
    model: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InProcessTransport, "read", lambda *_: Endless())
    hub: dict[str, torch.Tensor] = {}
    prefiller = Prefiller(build(model), hub)
    decode = Decoder(build(model, transfer_bytes=prefiller.side.layout.image_bytes(45)), hub, timeout=0.1)
    prefiller.connect(decode)
    for _ in range(2):
        request_id = decode.engine.add_request(PROMPTS[1], greedy())
        for _ in range(20_000):
            if decode.engine.has_unfinished():
                decode.step()
                prefiller.step()
        assert decode.tokens(request_id) == expected[1]


def test_a_worker_that_is_slow_but_alive_is_kept(model: Path, expected: list[list[int]]) -> None:
    """As long as it answers, a prompt may take longer than the time-out."""
    hub: dict[str, torch.Tensor] = {}
    prefiller, decode = Prefiller(build(model), hub), Decoder(build(model), hub, compute_here=False, timeout=0.2)
    prefiller.connect(decode)
    request_id = decode.engine.add_request(PROMPTS[1], greedy())
    prefiller.side.engine.step = list  # type: ignore[method-assign,assignment]
    until = time.monotonic() + 0.6
    while time.monotonic() < until:
        decode.step()
        prefiller.step()
    del prefiller.side.engine.step
    time.sleep(0.3)  # nor does it count how long its caller leaves the decode worker alone
    prefiller.step()
    run(decode, prefiller)
    assert decode.tokens(request_id) == expected[1] and decode.worker.counters().retried == 0


def test_a_decode_worker_that_stops_gives_its_room_to_others(model: Path, expected: list[list[int]]) -> None:
    """Stopped, it fetches nothing and closes nothing; the prefill worker has room for one image."""
    hub: dict[str, torch.Tensor] = {}
    room = WorkerSide.from_llm(build(model)).layout.image_bytes(45)
    prefiller = Prefiller(build(model, transfer_bytes=room), hub)
    prefiller.worker._silent_timeout = 0.2
    stopped, decode = Decoder(build(model), hub), Decoder(build(model), hub, compute_here=False)
    prefiller.connect(stopped)
    prefiller.connect(decode)
    stopped.engine.add_request(PROMPTS[1], greedy())
    stopped.step()
    while not prefiller.worker.counters().computed:
        prefiller.step()
    request_id = decode.engine.add_request(PROMPTS[1], greedy())
    run(decode, prefiller, most=100_000)
    assert decode.tokens(request_id) == expected[1] and decode.worker.counters().fetched == 1
    assert (prefiller.worker.counters().peers, prefiller.worker.counters().dropped) == (1, 1)


def test_a_decode_worker_that_reads_for_long_is_kept(
    model: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as it answers, a read may take longer than a worker may be silent."""
    read, until = InProcessTransport.read, time.monotonic() + 0.6
    monkeypatch.setattr(InProcessTransport, "read", lambda *args: Late(read(*args), until))
    hub: dict[str, torch.Tensor] = {}
    prefiller, decode = Prefiller(build(model), hub), Decoder(build(model), hub, compute_here=False)
    prefiller.worker._silent_timeout = 0.2
    prefiller.connect(decode)
    request_id = decode.engine.add_request(PROMPTS[1], greedy())
    run(decode, prefiller, most=100_000)
    assert time.monotonic() > until and decode.tokens(request_id) == expected[1]
    assert decode.worker.counters().retried == prefiller.worker.counters().dropped == 0


def test_questions_of_a_worker_that_has_gone(model: Path) -> None:
    """The answer to the first one finds the channel closed."""
    hub: dict[str, torch.Tensor] = {}
    prefiller, decode = Prefiller(build(model), hub), Decoder(build(model), hub)
    prefiller.connect(decode)
    decode.engine.add_request([7], greedy())
    for _ in range(2):
        prefiller.channel.send({"type": "ping"})
    prefiller.channel.close()
    run(decode)
    assert decode.worker.counters().workers == 0


def test_a_read_counts_only_if_the_channel_is_open_after_all_its_messages(
    model: Path, expected: list[list[int]]
) -> None:
    """A decode worker that was stopped goes on: its read ends, of memory that others have meanwhile."""
    hub: dict[str, torch.Tensor] = {}
    prefiller, decode = Prefiller(build(model), hub), Decoder(build(model), hub)
    prefiller.connect(decode)
    request_id = decode.engine.add_request(PROMPTS[1], greedy())
    while not any(attempt.reading for attempt in decode.worker._attempts.values()):
        decode.step()
        prefiller.step()
    prefiller.side.arena.fill_(1)
    (fetch,) = decode.worker._readers[0]._fetches.values()  # type: ignore[attr-defined]
    for read in fetch.reads:
        while len(read._reads) > 1:
            read.done()
    prefiller.channel.send({"type": "pong"})
    prefiller.channel.close()
    run(decode)
    assert decode.tokens(request_id) == expected[1] and decode.worker.counters().fetched == 0
