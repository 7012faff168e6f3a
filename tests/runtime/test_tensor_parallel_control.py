"""What ranks tell each other: plain data of known types, over links that notice when the other end is gone."""

import ast
import os
import pickle
import queue
import random
import secrets
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist

from hybridrt.base.engine_config import EngineConfig, SpeculativeConfig
from hybridrt.base.errors import ConfigError, MessageError, PeerGoneError, RankError
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.base.spans import EncoderInput
from hybridrt.base.version import __version__
from hybridrt.channel import control
from hybridrt.channel.channel import TIMEOUT_S, SocketChannel
from hybridrt.channel.codec import pack
from hybridrt.channel.control import PART_BYTES, TIMEOUT_VARIABLE, Link, rank_timeout
from hybridrt.channel.listener import Listener
from hybridrt.collectives import groups
from hybridrt.collectives.groups import Communicator
from hybridrt.engine.replicas.start import Lost, ReplicaLink
from hybridrt.mem_cache.pools.state_moves import StateMove, When
from hybridrt.parallel import rank_start, tensor_parallel
from hybridrt.parallel.messages import KINDS, Hello, RankBeat, RankFailed, Task, _column, decode, encode
from hybridrt.parallel.ranks import Ranks
from hybridrt.parallel.tasks import (
    DraftTask,
    DropTask,
    MaskTask,
    PrefixCopy,
)
from hybridrt.parallel.tensor_parallel import TensorParallelExecutor
from hybridrt.parallel.torchrun import World
from hybridrt.runtime.load.draft_needs import DraftRow
from hybridrt.runtime.run.prefix_copy import PrefixPlaces
from hybridrt.runtime.step.plan import (
    Admission,
    DecodeRow,
    DecodeRows,
    EmbeddingFetch,
    EncoderTask,
    ExtendRow,
    HostCopy,
    HostState,
    PageCopy,
    PageWrite,
    SpanRows,
    StateCopy,
    StepPlan,
    int32s,
)
from hybridrt.runtime.step.sampling_table import make_rules
from hybridrt.transfer.ranks import JoinTransfer
from tests.models.test_models_parity import requests
from tests.support.checkpoints import CheckpointStore
from tests.support.page_sets import page_sets
from tests.support.session import Session

ROOT = Path(__file__).parents[2]
PARAMS = SamplingParams(top_k=3, stop=["a"], stop_token_ids=[7], seed=2**62, logprobs=1)


def plain(value: Any) -> Any:
    """With lists for all sequences: an empty tuple comes back as a list."""
    return msgspec.json.decode(msgspec.json.encode(value, enc_hook=np.ndarray.tolist))


def test_plans_survive_the_way(checkpoints: CheckpointStore) -> None:
    """Every field of every part, and a small message."""
    session = Session(checkpoints["falcon-split"].path, page_size=4)
    session.run(requests(1, 17, steps=4), chunk=7, gap=2)
    rows = DecodeRows.from_rows([DecodeRow(1, 2, 3, [4, 5], [0, 0])] * 64)
    full = replace(session.plans[0], decode=rows, imports=[StateCopy(1, 2, 8, 9, 1)], constrained=[0], eager=True)
    full.page_copies = [PageCopy(int32s([3, 4]), int32s([5, 6]))]
    full.host_copies = [HostCopy(5, True, [[6], []], [[7], []], [HostState(8, 9, 10)], [4])]
    full.after_copies, full.moves = 5, [StateMove(1, 2, 3, When.BEFORE_ROWS)]
    seen = SpanRows(int32s([1, 2]), int32s([30, 31])), np.arange(9, dtype=np.int32).reshape(3, 3)
    full.extend = [ExtendRow(1, 2, [3, 4, 5], 0, True, 0, 6, [(1, 7), (2, 8)], *seen)]
    patches = np.empty((0, 6), np.int32)  # they come before the step
    task = EncoderTask(3, EncoderInput(patches, (2, 2)), int32s([30]), int32s([4]))
    full.encode, full.fetch, full.after_encoder = [task], [EmbeddingFetch(int32s([5]), int32s([6]))], 3
    full.exports, full.cleared = full.imports * 2, [3]
    assert all(getattr(full, field.name) for field in fields(full))
    for plan in [StepPlan(), full, *session.plans]:
        found = decode(encode(plan))
        assert plain(found) == plain(plan) and type(found) is StepPlan
    assert type(decode(encode(full)).admissions[0].params) is SamplingParams
    assert len(encode(session.plans[-1])) < 250


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_patches_survive_the_way(dtype: type[np.generic]) -> None:
    data = np.random.default_rng(1).integers(0, 256, (20, 6)).astype(dtype)
    inputs = [EncoderInput(data[:4], (2, 2)), EncoderInput(data[4:], (4, 4))]
    plan = StepPlan(encode=[EncoderTask(i, given, int32s([i])) for i, given in enumerate(inputs)])
    found = decode(encode(plan))
    assert plain(found) == plain(plan) and found.encode[1].input.patches.dtype == dtype
    for wrong in ([6, "|O", b""], [0, "|u1", b"12"], [4, "<f4", b"12345"], [3, "|u1", "abc"]):
        with pytest.raises(ValueError):
            _column(np.ndarray, wrong)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(seed=2**62, prompt_logprobs=3),
        SamplingParams(repetition_penalty=1.1),
    ],
)
def test_an_admission_does_not_carry_the_prompt(params: SamplingParams) -> None:
    """Without penalties. With them it carries each token once."""
    prompt = [70_000 + i % 16 for i in range(32_768)]
    plan = StepPlan([Admission.from_prompt(1, 1, prompt, params, 2**63 - 1, output=[5] * 900 * params.uses_penalties)])
    assert len(encode(plan)) < 1000 + 4 * 916 * params.uses_penalties
    plan.extend = [ExtendRow(1, 0, prompt[:512], 0, False)]
    assert len(encode(plan)) < 1000 + 5 * 512 + 4 * 916 * params.uses_penalties


def test_rules_about_tokens_survive_the_way() -> None:
    params = SamplingParams(
        min_tokens=2,
        logit_bias={5: -1.5},
        allowed_token_ids=[5, 6],
        bad_words=["a"],
        prompt_logprobs=1,
        logprobs=0,
        logprob_token_ids=[5],
    )
    rules = make_rules(params, [3, 4], [[1, 2, 3]], 40)
    (found,) = decode(encode(StepPlan([Admission.from_prompt(1, 1, [5], params, 3, rules)]))).admissions
    assert found.rules == rules and replace(found.params, bad_words=["a"]) == params


@pytest.mark.parametrize(
    "message",
    [
        EngineConfig("m", tp_size=2, speculative=SpeculativeConfig("mtp", num_draft_tokens=3), max_model_len=7),
        DraftTask([DraftRow(1, 2, 3, 4, PARAMS)], 3, 2),
        MaskTask(b"\1\0\0\0\2\0\0\0", 2),
        DropTask(),
        PrefixCopy(PrefixPlaces(5, [[1, 2], [3]], [(4, 3)]), write=True),
        None,
    ],
    ids=lambda message: type(message).__name__,
)
def test_what_else_rank_0_says_survives_too(message: object) -> None:
    assert decode(encode(message)) == message


def test_a_task_of_the_transfer_survives() -> None:
    """Whatever its fields are: they are plain."""
    values: dict[str, Any] = {"str": "127.0.0.1", "int": 5, "bool": True, "bytes": b"k" * 32}
    given = {field.name: values[getattr(field.type, "__name__", str(field.type))] for field in fields(JoinTransfer)}
    task = JoinTransfer(**given)
    assert decode(encode(task)) == task


def test_integers_of_every_kind_are_sent_as_integers() -> None:
    computed: Any = np.int64(2)
    tokens: Any = [np.int32(3)]
    writes = [PageWrite(1, 0, page_sets(range(3), range(4, 7))), PageWrite(2, 0, page_sets([], []))]
    plan = StepPlan(page_writes=writes, extend=[ExtendRow(1, computed, tokens, 0, True)])
    found = decode(encode(plan))
    assert found.page_writes[0].pages.tolist() == [[0, 4], [1, 5], [2, 6]]
    assert found.page_writes[1].pages.shape == (0, 2) and found.extend[0].tokens == [3]


class Runs:
    """Unpickling it runs code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (1,)


def task(name: Any, body: Any = b"") -> bytes:
    return msgspec.msgpack.encode({"type": "task", "name": name, "body": body})


def refused() -> Iterator[bytes]:
    bodies = msgspec.msgpack.decode(encode(StepPlan(decode=DecodeRows.from_rows([DecodeRow(1, 2, 3)]))))["body"]
    raw: list[Any] = [{}, {"type": None}, {"type": []}, {"type": "task"}, {"type": "step"}, [], None]
    yield from (msgspec.msgpack.encode(value) for value in raw)
    yield from (task("os"), task(None), task("step"), task("step", "text"), b"", pickle.dumps(Runs()))
    yield task("step", pickle.dumps(Runs()))
    yield from (task("step", bodies[:-1]), task("step", bodies + b"\0"), task("step", b"\x91" * 100_000))
    plans: list[Any] = [[], {"decode": [["1", 2, 3]]}, {"decode": [[1, 2]]}, {"decode": [], "extend": 5}]
    one, two = bytes(4), bytes(8)
    plans += [
        {"decode": columns} for columns in ([1], [one], [b"123"], [one, one, one, one, one], [two, one, one, one])
    ]
    plans += [{"decode": [one, b"\xff" * 4, one, one]}, {"decode": [one, one, one, b"\1\0\0\0", one, two]}]
    plans.append({"admissions": [[1, 1, 1, {"top_p": 7}, 0, 0]]})
    shapes: list[Any] = [[0, two], [3, two], [-1, two], ["2", two], [2, 2], [2, two, one], [2, b"\xff" * 8]]
    plans += [{"page_writes": [[1, 0, pages]]} for pages in shapes]
    yield from (task("step", msgspec.msgpack.encode(plan)) for plan in plans)
    for config in ({}, {"model": 5}, {"model": "m", "tp_size": 0}, {"model": "m", "speculative": {"method": "os"}}):
        yield task("serve", msgspec.msgpack.encode(config))


def test_malformed_messages_are_refused_and_run_nothing() -> None:
    for message in refused():
        with pytest.raises(MessageError):
            decode(message)


def test_spoilt_bytes_are_refused_or_still_a_plan() -> None:
    plan = StepPlan(
        [Admission.from_prompt(1, 1, [5] * 40, PARAMS, 3)],
        [PageWrite(1, 0, page_sets([7]))],
        DecodeRows.from_rows([DecodeRow(2, 3, 4, [5], [0])]),
    )
    body, rng = msgspec.msgpack.decode(encode(plan))["body"], random.Random(0)
    for _ in range(2000):
        spoilt = bytearray(body)
        for _ in range(rng.randint(1, 4)):
            spoilt[rng.randrange(len(spoilt))] = rng.randrange(256)
        try:
            assert type(decode(task("step", bytes(spoilt)))) is StepPlan
        except MessageError:
            continue


def test_what_ranks_do_not_exchange_is_not_sent() -> None:
    for value in (Runs(), "text", print):
        with pytest.raises(MessageError, match="exchange no"):
            encode(value)


def test_nothing_is_pickled_between_processes() -> None:
    """Neither by us nor by the object collectives of torch.distributed."""
    for file in (file for top in ("hybridrt", "models", "mem_cache") for file in (ROOT / top).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [getattr(node, name, None) for name in ("attr", "id", "module")]
            names += [alias.name for alias in getattr(node, "names", []) if isinstance(alias, ast.alias)]
            for name in filter(None, names):
                assert name.split(".")[0] not in ("pickle", "cloudpickle", "marshal", "shelve"), f"{file}: {name}"
                assert not name.endswith(("_object_list", "all_gather_object", "gather_object")), f"{file}: {name}"


def test_every_kind_of_message_is_a_type() -> None:
    for place in KINDS.values():
        module, _, name = place.partition(":")
        assert isinstance(getattr(__import__(module, fromlist=[name]), name), type)


@pytest.fixture
def links() -> Iterator[tuple[Link, Link]]:
    """Both ends of one, rank 0's first."""
    key, found = secrets.token_bytes(32), list[SocketChannel]()
    listener = Listener(("127.0.0.1", 0), key)
    thread = threading.Thread(target=lambda: found.append(SocketChannel.connect(("127.0.0.1", listener.port), key)))
    thread.start()
    while not (accepted := listener.accept()):
        time.sleep(0.001)
    thread.join()
    ends = Link(accepted[0]), Link(found[0])
    yield ends
    listener.close()
    for link in ends:
        link.close()


def test_messages_longer_than_the_channels_arrive_whole(
    links: tuple[Link, Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of 40 MB, such as log-probabilities of a long prompt; heartbeats of another thread come between messages."""
    sent = [b"", b"a", random.Random(0).randbytes(40_000_000), b"b" * (2 * PART_BYTES)]
    beats = threading.Thread(target=lambda: [links[1].send(b"beat") for _ in range(50)])
    sender = threading.Thread(target=lambda: [links[1].send(message) for message in sent])
    beats.start()
    sender.start()
    got: list[bytes] = []
    while len(got) < len(sent) + 50:
        more = links[0].listen(10.0)
        assert more
        got += more
    sender.join()
    assert [message for message in got if message != b"beat"] == sent
    monkeypatch.setattr(control, "MAX_LINK_BYTES", 2 * PART_BYTES)
    with pytest.raises(MessageError, match="may have"):
        links[1].send(bytes(2 * PART_BYTES + 1))
    for _ in range(4):
        links[1]._channel.send(b"\1")
    with pytest.raises(MessageError, match="more than"):
        links[0].listen(10.0)


def test_a_large_message_arrives_while_the_sender_does_something_else(links: tuple[Link, Link]) -> None:
    """More than the network holds: `send` returns once the rest is on its way."""
    message, got = b"x" * 12_000_000, list[Any]()
    thread = threading.Thread(target=lambda: got.extend(links[1].listen(30)))
    thread.start()
    links[0].send(message)
    thread.join()
    assert got == [message]


def in_thread(call: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """A thread that runs it, and what it returned or raised."""
    found = list[object]()

    def run() -> None:
        try:
            found.append(call())
        except PeerGoneError as e:
            found.append(e)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, found


def test_both_ends_send_more_than_the_network_holds(links: tuple[Link, Link]) -> None:
    """At the same time, and no thread listens until its own message is sent."""
    sent = [random.Random(i).randbytes(32_000_000) for i in range(2)]

    def exchange(end: int) -> list[bytes]:
        links[end].send(sent[end])
        return links[end].listen(30.0)

    exchanges = [in_thread(partial(exchange, end)) for end in range(2)]
    for thread, _ in exchanges:
        thread.join()
    assert [found for _, found in exchanges] == [[[sent[1]]], [[sent[0]]]]


def test_what_a_sender_has_read_is_listened_to_at_once(links: tuple[Link, Link]) -> None:
    sender, _ = in_thread(lambda: links[0].send(bytes(32_000_000)))
    links[1].send(b"a")
    while not links[0]._channel.has_messages:
        assert sender.is_alive(), "it reads while it waits"
        time.sleep(0.001)
    links[1].listen(30.0)
    sender.join()
    listener, found = in_thread(lambda: links[0].listen(600))
    listener.join(20)
    assert found == [[b"a"]]


def test_a_sender_leaves_reading_to_the_thread_that_listens(
    links: tuple[Link, Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which would not wake up for what is read already."""
    reads, is_drained = list[bool](), links[0]._channel.is_drained

    def spy(*, read: bool) -> bool:
        reads.append(read)
        return is_drained(read=read)

    monkeypatch.setattr(links[0]._channel, "is_drained", spy)
    links[0].send(b"")
    listener, _ = in_thread(lambda: links[0].listen(600))
    while not links[0]._listening:
        time.sleep(0.001)
    links[0].send(b"")
    links[1].send(b"a")
    listener.join()
    links[0].send(b"")
    assert reads == [True, False, True]


def test_a_link_that_could_not_send_is_closed(links: tuple[Link, Link], monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the message is sent: the next one would be joined to it. A thread that listens wakes up at once."""
    monkeypatch.setattr(control, "TIMEOUT_S", 0.1)
    listener, found = in_thread(lambda: links[0].listen(600))
    with pytest.raises(PeerGoneError, match=r"has not read its messages for 0\.1 seconds"):
        links[0].send(bytes(32_000_000))
    listener.join(20)
    assert "has not read its messages" in str(found)
    with pytest.raises(PeerGoneError, match="has not read its messages"):
        links[0].send(b"next")
    with pytest.raises(PeerGoneError):
        while True:
            assert not links[1].listen(10.0), "no whole message"


def test_a_replica_that_cannot_be_sent_to_is_lost_and_ended(
    links: tuple[Link, Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process may run on without its link."""
    killed = list[bool]()

    def wait(timeout: float) -> int:
        raise subprocess.TimeoutExpired("replica", timeout)

    process: Any = SimpleNamespace(kill=lambda: killed.append(True), wait=wait)
    inbox = queue.SimpleQueue[tuple[int, Any]]()
    monkeypatch.setattr(control, "TIMEOUT_S", 0.1)
    replica = ReplicaLink(3, links[0], process, inbox, 600)
    replica.send(bytes(32_000_000))
    number, lost = inbox.get(timeout=20)
    assert number == 3 and isinstance(lost, Lost) and "has not read its messages" in str(lost)
    assert killed
    replica.send(b"next")


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (pack(RankBeat()), "a message is not what may come now"),
        (pack(Hello(2, __version__)), "it says that it is number 2, which is none"),
        (pack(Hello(0, __version__)), "it says that it is number 0, which is none"),
        (None, "it has not said its number within 0 seconds"),
    ],
)
def test_the_log_says_who_was_refused(
    message: bytes | None, text: str, links: tuple[Link, Link], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(rank_start, "_HELLO_S", 0.0)
    found, until = dict[int, Link](), 0.0
    if message is not None:
        links[1].send(message)
        until = time.monotonic() + 30
    while not rank_start._is_settled(links[0], until, found, 2, "rank"):
        time.sleep(0.001)
    assert text in caplog.text and not found
    with pytest.raises(PeerGoneError):
        links[1].listen(10.0)


def test_a_number_is_taken_once(links: tuple[Link, Link], caplog: pytest.LogCaptureFixture) -> None:
    found: dict[int, Link] = {1: links[1]}
    links[1].send(pack(Hello(1, __version__)))
    while not rank_start._is_settled(links[0], time.monotonic() + 30, found, 2, "rank"):
        time.sleep(0.001)
    assert "it says that it is number 1, which has come" in caplog.text and found == {1: links[1]}


@pytest.mark.parametrize("fails", ["_lead", "find_place"])
def test_a_start_that_fails_leaves_no_directory(fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of torchrun's rank 0, which has the key in it."""

    def fail(*_: object) -> None:
        assert [*tmp_path.iterdir()]
        raise RankError("not all ranks came")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(rank_start, "_torchrun_store", dist.HashStore)
    monkeypatch.setattr(rank_start, "master_host", lambda: "127.0.0.1")
    monkeypatch.setattr(rank_start, fails, fail)
    with pytest.raises(RankError, match="not all ranks came"):
        rank_start.torchrun_ranks.__wrapped__(World(0, 2, 0, 2), "cpu")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("started", [True, False])
def test_ranks_whose_service_does_not_start_are_let_go(started: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were started for it. Others may serve another LLM."""
    closed = list[bool]()

    def fail(*_: object) -> None:
        raise ConfigError("these ranks serve another LLM")

    ranks: Any = SimpleNamespace(comm=None, start_service=fail, close=lambda: closed.append(True))
    monkeypatch.setattr(tensor_parallel, "check_split", lambda config: "cpu")
    monkeypatch.setattr(tensor_parallel, "start_ranks", lambda *_: ranks)
    with pytest.raises(ConfigError, match="serve another LLM"):
        TensorParallelExecutor(EngineConfig("embedded", tp_size=2), ranks=None if started else ranks)
    assert closed == [True] * started


def leader(link: Link, timeout: float = 30) -> Ranks:
    return Ranks([link], timeout=timeout)


def wait_for_loss(ranks: Ranks) -> str:
    assert ranks._named.wait(30)
    with pytest.raises(RankError) as caught:
        ranks.check_alive()
    return str(caught.value)


def test_a_silent_rank_is_lost(links: tuple[Link, Link]) -> None:
    assert "rank 1 was lost: it has sent no heartbeat for 0.1 seconds" in wait_for_loss(leader(links[0], 0.1))


def test_a_silent_rank_has_more_time_while_a_model_is_loaded(
    links: tuple[Link, Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hybridrt.parallel.ranks.LOADING_S", 0.5)
    ranks = leader(links[0])
    ranks.loading, ranks._timeout = True, 0.1
    links[1].send(pack(RankBeat()))
    assert "rank 1 was lost: it has sent no heartbeat for 0.5 seconds" in wait_for_loss(ranks)


def test_a_rank_whose_connection_ends_is_lost(links: tuple[Link, Link]) -> None:
    ranks = leader(links[0])
    links[1].close()
    assert "rank 1 was lost: the other process has closed the connection" in wait_for_loss(ranks)


def test_a_communicator_that_is_made_while_a_rank_is_lost_is_aborted(links: tuple[Link, Link]) -> None:
    """As soon as it is there: whoever found the lost rank had none to abort."""
    ranks, aborted, made = leader(links[0]), threading.Event(), threading.Event()

    class Late:
        connect, abort = None, aborted.set

    def make(check_ranks: Any) -> Any:
        links[1].close()
        assert made.wait(30)
        return Late

    with pytest.raises(RankError, match="tensor-parallel rank 1 was lost"):
        ranks.meet(make)
    assert not aborted.is_set()
    made.set()
    assert aborted.wait(30)


@pytest.mark.parametrize("others", [(), ("hybridrt/here/1",)])
def test_a_communicator_waits_for_no_lost_rank(others: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """In the rendezvous, or once its groups are there; it then aborts them."""
    store, made = dist.HashStore(), list[Any]()
    monkeypatch.setattr(groups.dist, "ProcessGroupGloo", lambda *_: made.append("gloo"))
    monkeypatch.setattr(Communicator, "abort", lambda self: made.append("aborted"))
    for key in others:
        store.set(key, "1")

    def lost() -> None:
        if len(others) == len(made):
            raise RankError("rank 1 was lost")

    with pytest.raises(RankError, match="rank 1 was lost"):
        Communicator(store, 0, 2, torch.device("cpu"), check_ranks=lost)
    assert made == ["gloo"] * len(others) + ["aborted"]


def test_a_group_closes_while_another_thread_aborts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL is aborted once, and both wait for that thread only when it runs."""
    aborts, starts, may_start, start = list[str](), threading.Event(), threading.Event(), threading.Thread.start
    comm = Communicator(dist.HashStore(), 0, 1, torch.device("cpu"))
    comm._groups["cuda"] = SimpleNamespace(abort=lambda: aborts.append("NCCL"))
    watcher, errors = threading.Thread(target=comm.abort), list[BaseException]()

    def start_late(thread: threading.Thread) -> None:
        if threading.current_thread() is watcher:
            starts.set()
            may_start.wait(10)
        start(thread)

    def close() -> None:
        try:
            comm.close()
        except BaseException as e:
            errors.append(e)

    monkeypatch.setattr(threading.Thread, "start", start_late)
    closer = threading.Thread(target=close)
    watcher.start()
    assert starts.wait(10)
    closer.start()
    closer.join(0.05)
    may_start.set()
    for thread in (watcher, closer):
        thread.join(10)
    assert (aborts, errors) == (["NCCL"], [])


def test_two_threads_close_a_group_once() -> None:
    """Memory of other ranks is unmapped once."""
    calls, comm = list[str](), Communicator(dist.HashStore(), 0, 1, torch.device("cpu"))

    def close() -> None:
        calls.append("closed")
        time.sleep(0.05)

    comm._peers = SimpleNamespace(abort=lambda: None, close=close)  # type: ignore[assignment]
    closers = [threading.Thread(target=comm.close) for _ in range(2)]
    for closer in closers:
        closer.start()
    for closer in closers:
        closer.join(10)
    assert calls == ["closed"] and comm._peers is None


def test_a_communicator_waits_as_long_as_its_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host engine may give its store an hour."""
    monkeypatch.setattr(groups, "MEETING_S", 0.0)
    store, looked = dist.HashStore(), list[int]()

    def come() -> None:
        looked.append(1)
        if len(looked) == 3:
            raise RankError("rank 1 was lost")

    with pytest.raises(RankError, match="rank 1 was lost"):
        Communicator(store, 0, 2, torch.device("cpu"), check_ranks=come)
    store.set_timeout(timedelta(0))
    with pytest.raises(RankError, match=r"have not all come within 0 seconds \(hybridrt/here/1\)"):
        Communicator(store, 0, 2, torch.device("cpu"))


def test_a_rank_waits_for_a_rank_0_that_reads_its_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is slow to convert takes longer than a message may."""
    place, listener = rank_start.open_place()
    listener.close()
    waits = list[float]()

    def connect(address: object, key: bytes, seconds: float = TIMEOUT_S) -> SocketChannel:
        waits.append(seconds)
        raise PeerGoneError("rank 0 is gone")

    monkeypatch.setattr(SocketChannel, "connect", connect)
    with pytest.raises(PeerGoneError, match="rank 0 is gone"):
        place.join(1)
    assert waits == [rank_start.STARTING_S]


def test_a_rank_that_says_nothing_keeps_no_other_one_waiting() -> None:
    """One that was stopped as soon as it was connected. Rank 0 waited for its first message, for ten seconds."""
    place, listener = rank_start.open_place()
    silent, found = list[Any](), list[Any]()
    thread = threading.Thread(target=lambda: found.extend(rank_start.accept_links(listener, 2, 30, ())), daemon=True)
    thread.start()
    silent.append(SocketChannel.connect((place.host, place.port), place.key))
    time.sleep(0.1)
    silent.append(place.join(1))
    thread.join(rank_start._HELLO_S / 2)
    listener.close()
    assert len(found) == 1


class Listening:
    """A listener to which one rank has connected, sent its first message, and failed."""

    def __init__(self, links: tuple[Link, Link]) -> None:
        for message in (Hello(1, __version__), RankBeat(), RankFailed("DeviceError: cuda:1 is busy")):
            links[1].send(pack(message))
        self.channels = [links[0]._channel]

    def accept(self) -> list[SocketChannel]:
        found, self.channels = self.channels, []
        return found


def test_a_rank_that_fails_as_soon_as_it_is_connected_is_heard(links: tuple[Link, Link]) -> None:
    """A GPU that does not start fails before there is a connection, so the reason comes with the first message."""
    listener: Any = Listening(links)
    ranks = Ranks(rank_start.accept_links(listener, 2, 30, ()))
    assert "rank 1 was lost: DeviceError: cuda:1 is busy" in wait_for_loss(ranks)


def test_a_rank_that_has_ended_before_another_came_is_heard(links: tuple[Link, Link]) -> None:
    """And no connection stays open."""
    listener: Any = Listening(links)
    ended: Any = SimpleNamespace(returncode=1, poll=lambda: None if listener.channels else 1)
    with pytest.raises(RankError, match="rank 1 did not start: DeviceError: cuda:1 is busy"):
        rank_start.accept_links(listener, 3, 30, [ended])
    assert links[0]._channel.fileno() == -1


def test_a_failed_rank_reports_its_reason(links: tuple[Link, Link]) -> None:
    ranks = leader(links[0])
    for message in (RankBeat(), RankFailed("OSError: no")):
        links[1].send(pack(message))
    assert "rank 1 was lost: OSError: no" in wait_for_loss(ranks)


@pytest.mark.parametrize("data", [b"", b"{}", pack(Task("step"))])
def test_a_rank_that_sends_something_else_is_lost(data: bytes, links: tuple[Link, Link]) -> None:
    ranks = leader(links[0])
    links[1].send(data)
    assert "rank 1 was lost: a message is not what may come now" in wait_for_loss(ranks)


def test_a_forked_child_leaves_the_parents_link_alone(links: tuple[Link, Link]) -> None:
    """Neither its end nor anything that it does there reaches the other rank."""
    child = os.fork()
    if not child:
        try:
            links[0].send(b"end")
        except PeerGoneError:
            links[0].close()
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    links[0].send(b"step")
    assert links[1].listen(30) == [b"step"]


@pytest.mark.parametrize("text", ["", "soon", "nan", "inf", "-1", "0", "1e9"])
def test_a_time_out_that_is_none_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TIMEOUT_VARIABLE, text)
    with pytest.raises(ConfigError, match=TIMEOUT_VARIABLE):
        rank_timeout()


@pytest.mark.parametrize("key", [None, "", "short"])
def test_ranks_on_several_hosts_need_a_key(key: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(rank_start.KEY_VARIABLE, raising=False)
    if key is not None:
        monkeypatch.setenv(rank_start.KEY_VARIABLE, key)
    with pytest.raises(ConfigError, match=rank_start.KEY_VARIABLE):
        rank_start.torchrun_ranks(World(0, 4, 0, 2), "cpu")
    with pytest.raises(ConfigError, match=rank_start.KEY_VARIABLE):
        rank_start.torchrun_place(World(1, 4, 1, 2))
