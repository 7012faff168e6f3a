"""Workers whose peers lie, or send anything at all: what it costs the others, and that nothing is lost for good."""

import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridrt.base.errors import AuthenticationError, ConfigError, MessageError, PeerGoneError, TransferError
from hybridrt.channel.codec import pack, unpack
from hybridrt.transfer import messages, prefill, workers
from hybridrt.transfer.keys import VARIABLE, find_key
from hybridrt.transfer.reader import LocalReader
from tests.support.in_process import InProcessTransport, QueueChannel, Raw, decode_hello, prefill_hello
from tests.support.listening import LOOPBACK, listening
from tests.support.tiny import write_tiny
from tests.support.transfer_pair import Decoder, Prefiller, alone, build, greedy, run

RNG = random.Random(11)
PROMPTS = [[RNG.randrange(3, 131) for _ in range(n)] for n in (5, 40)]
KEY = "a key of the tests, long enough"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("falcon"))


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    return alone(model, PROMPTS, greedy())


@pytest.fixture(scope="module")
def prefiller(model: Path) -> Prefiller:
    return Prefiller(build(model), {})


def intruder(prefiller: Prefiller, agreed: bool = True) -> QueueChannel:
    """A connection with the key."""
    ours, theirs = QueueChannel.pair()
    prefiller.worker.attach(ours)
    theirs.receive()
    if agreed:
        theirs.send(decode_hello(prefiller.side.handshake))
    return theirs


def settle(prefiller: Prefiller) -> None:
    while prefiller.worker.step():
        pass


def is_closed(channel: QueueChannel) -> bool:
    try:
        while True:
            if not channel.receive():
                return False
    except PeerGoneError:
        return True


BAD: list[Raw] = [
    {}, {"type": None}, {"type": ["prefill"]}, {"type": "hello"}, {"type": "unknown"}, {"type": "ready", "key": "x"},
    {"type": "prefill"}, {"type": "prefill", "key": 1, "tokens": [1]}, {"type": "prefill", "key": "x"},
    {"type": "prefill", "key": "x", "tokens": "some text"}, {"type": "prefill", "key": "x", "tokens": None},
    {"type": "prefill", "key": "x", "tokens": [1, "a"]}, {"type": "prefill", "key": "x", "tokens": [1.0]},
    {"type": "prefill", "key": "x", "tokens": [True]}, {"type": "prefill", "key": "x", "tokens": b"abc"},
    {"type": "prefill", "key": "x", "tokens": {"1": 2}}, {"type": "prefill", "key": "x", "tokens": [[1]]},
    {"type": "prefill", "key": "x" * 2000, "tokens": [1]}, {"type": "prefill", "key": "x", "tokens": [1], "more": 1},
    {"type": "done"}, {"type": "done", "key": None}, {"type": "ping", "key": "x"},
]  # fmt: skip


@pytest.mark.parametrize("agreed", [True, False])
@pytest.mark.parametrize("message", BAD)
def test_a_malformed_message_ends_its_own_connection_alone(agreed: bool, message: Raw, prefiller: Prefiller) -> None:
    other, bad = intruder(prefiller), intruder(prefiller, agreed)
    other.send({"type": "prefill", "key": "x", "tokens": PROMPTS[0]})
    prefiller.step()
    bad.send(message)
    settle(prefiller)
    assert is_closed(bad)
    assert [answer["type"] for answer in other.heard()] == ["ready"]
    other.close()
    settle(prefiller)
    prefiller.assert_empty()


@pytest.mark.parametrize("data", [b"", b"{}", b"null", b"\xc0", b"\xc1", b"\x91" * 5000, b"GET / HTTP/1.1"])
def test_bytes_that_are_no_message_end_their_own_connection_alone(data: bytes, prefiller: Prefiller) -> None:
    bad = intruder(prefiller)
    bad.send(data)
    settle(prefiller)
    assert is_closed(bad)
    prefiller.assert_empty()


def test_a_prompt_of_text_reaches_no_neighbours_image(prefiller: Prefiller) -> None:
    """Its letters would be fewer than its tokens."""
    first, second = intruder(prefiller), intruder(prefiller)
    first.send({"type": "prefill", "key": "x", "tokens": "a b"})
    second.send({"type": "prefill", "key": "x", "tokens": PROMPTS[1]})
    settle(prefiller)
    (ready,) = second.heard()
    image = prefiller.side.arena[ready["offset"] :][: prefiller.side.layout.image_bytes(40)].clone()
    first = intruder(prefiller)
    for key, tokens in {
        "a": [prefiller.side.engine.intake.limits.vocab_size],
        "b": [-1],
        "c": [],
        "d": [5] * 200,
        "e": [1 << 40],
    }.items():
        first.send({"type": "prefill", "key": key, "tokens": tokens})
    settle(prefiller)
    assert [answer["type"] for answer in first.heard()] == ["failed"] * 5
    assert torch.equal(prefiller.side.arena[ready["offset"] :][: len(image)], image)
    for channel in (first, second):
        channel.close()
    settle(prefiller)
    prefiller.assert_empty()


@pytest.mark.parametrize("steps", [0, 1, 50])
def test_a_key_that_is_in_use_ends_its_connection_and_leaks_nothing(steps: int, prefiller: Prefiller) -> None:
    for _ in range(3):
        channel = intruder(prefiller)
        channel.send({"type": "prefill", "key": "x", "tokens": PROMPTS[1]})
        for _ in range(steps):
            prefiller.step()
        channel.send({"type": "prefill", "key": "x", "tokens": PROMPTS[1]})
        settle(prefiller)
        assert is_closed(channel)
        prefiller.assert_empty()


def test_a_connection_may_have_so_many_prompts_under_way(prefiller: Prefiller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "MAX_JOBS", 3)
    channel = intruder(prefiller)
    for i in range(4):
        channel.send({"type": "prefill", "key": str(i), "tokens": PROMPTS[0]})
    settle(prefiller)
    assert is_closed(channel)
    prefiller.assert_empty()


def test_so_many_decode_workers_are_served(prefiller: Prefiller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "MAX_PEERS", 2)
    channels = [intruder(prefiller, False) for _ in range(2)]
    ours, theirs = QueueChannel.pair()
    prefiller.worker.attach(ours)
    assert is_closed(theirs)
    for channel in channels:
        channel.close()
    settle(prefiller)


def test_an_image_that_is_not_fetched_in_time_is_dropped_after_its_connection(model: Path) -> None:
    slow = Prefiller(build(model), {})
    slow.worker._timeout, slow.worker._linger = 0.05, 0.05
    channel = intruder(slow)
    channel.send({"type": "prefill", "key": "x", "tokens": PROMPTS[1]})
    while not slow.worker.counters().dropped:
        slow.step()
    assert is_closed(channel) and slow.worker.counters().bytes_used, "it may be being read"
    while slow.worker.counters().bytes_used:
        slow.step()
    slow.assert_empty()
    silent = intruder(slow, agreed=False)
    while slow.worker.counters().peers:
        slow.step()
    assert is_closed(silent)


NUMBERS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats()
PLAIN = NUMBERS | st.text(max_size=5) | st.binary(max_size=5)
VALUES = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from(["x", "y", "request-0-1", "request-1-2"]) | st.text(max_size=3)
TOKENS = st.lists(st.integers(-2, 140), max_size=80)


def fuzzed(kinds: list[str]) -> st.SearchStrategy[Raw]:
    """Messages that are right, nearly right, or anything."""
    right = st.one_of(
        st.fixed_dictionaries(
            {"type": st.just("prefill"), "key": KEYS, "tokens": TOKENS},
            optional={
                "start": st.integers(-1, 90),
                **dict.fromkeys(("salt", "weights", "adapter"), st.text(max_size=3)),
            },
        ),
        st.fixed_dictionaries({"type": st.just("ready"), "key": KEYS, "offset": st.integers(0, 1 << 20)}),
        st.fixed_dictionaries({"type": st.sampled_from(kinds), "key": KEYS}),
        st.sampled_from([{"type": "ping"}, {"type": "pong"}]),
    )
    names = st.sampled_from(["type", "key", "tokens", "offset", "error", "handshake", "ranks"])
    changed = st.builds(lambda message, name, value: {**message, name: value}, right, names, VALUES)
    return right | changed | st.dictionaries(names | st.text(max_size=4), VALUES, max_size=4)


SETTINGS = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@SETTINGS
@given(sent=st.lists(fuzzed(["done", "prefill", "hello"]) | st.binary(max_size=30), max_size=8), agreed=st.booleans())
def test_whatever_a_connection_sends_the_prefill_worker_serves_the_others(
    sent: list[Raw | bytes], agreed: bool, prefiller: Prefiller
) -> None:
    other, bad = intruder(prefiller), intruder(prefiller, agreed)
    other.send({"type": "prefill", "key": "x", "tokens": PROMPTS[0]})
    for message in sent:
        if bad._alive[0]:
            bad.send(message)
        prefiller.step()
    settle(prefiller)
    assert [answer["type"] for answer in other.heard()] == ["ready"]
    for channel in (bad, other):
        channel.close()
    settle(prefiller)
    prefiller.assert_empty()


@pytest.fixture(scope="module")
def decode_llm(model: Path) -> Iterator[Any]:
    with build(model) as llm:
        yield llm


@SETTINGS
@given(sent=st.lists(fuzzed(["ready", "failed", "hello"]) | st.binary(max_size=30), min_size=1, max_size=6))
def test_whatever_a_prefill_worker_sends_the_prompt_is_computed(
    sent: list[Raw | bytes], decode_llm: Any, expected: list[list[int]]
) -> None:
    decode = Decoder(decode_llm, {"theirs": torch.zeros(1 << 17, dtype=torch.uint8)}, timeout=60.0)
    ours, theirs = QueueChannel.pair()
    theirs.send(prefill_hello(decode.side.handshake, ["theirs"]))
    decode.worker.connect(ours)
    request_id = decode.engine.add_request(PROMPTS[1], greedy())
    decode.step()
    (key,) = decode.worker._attempts
    for message in sent:
        right = isinstance(message, dict) and message == {"type": "ready", "key": key, "offset": message.get("offset")}
        if theirs._alive[0] and not right:
            theirs.send(message)
        decode.step()
    theirs.close()
    run(decode)
    assert decode.tokens(request_id) == expected[1]
    decode.assert_empty()
    decode.worker.close()


def test_a_hello_of_another_kind_is_refused(decode_llm: Any) -> None:
    decode = Decoder(decode_llm, {"theirs": torch.zeros(9, dtype=torch.uint8)})
    hello = decode_hello(decode.side.handshake)
    bad = [prefill_hello(decode.side.handshake, ranks) for ranks in ([1], [], ["theirs"] * 1025)]
    spoilt = [hello | {"type": "prefillhello", "ranks": ["theirs"], "handshake": h} for h in (None, {"version": True})]
    for message in (*BAD, hello, *bad, *spoilt):
        ours, theirs = QueueChannel.pair()
        theirs.send(message)
        with pytest.raises(MessageError):
            decode.worker.connect(ours)
        assert is_closed(theirs)
    assert decode.worker.counters().workers == 0
    ours, theirs = QueueChannel.pair()
    theirs.send(prefill_hello(decode.side.handshake, ["nobody"]))
    with pytest.raises(TransferError, match="no arena"):
        decode.worker.connect(ours)
    decode.step()
    decode.worker.close()


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """`prefill_worker` and `decode_worker` without NIXL."""
    hub: dict[str, torch.Tensor] = {}

    def open_ranks(side: Any, serve: bool, devices: str) -> list[LocalReader]:
        return [LocalReader(InProcessTransport(hub, f"arena {len(hub)} {devices}", side.arena), side.layout)]

    monkeypatch.setattr(workers, "open_ranks", open_ranks)
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    return hub


def test_a_decode_worker_that_cannot_connect_leaves_nothing_behind(
    one_process: dict[str, torch.Tensor], decode_llm: Any, expected: list[list[int]]
) -> None:
    listener = workers.Listener(("127.0.0.1", 0), KEY.encode())
    with pytest.raises(PeerGoneError):
        workers.decode_worker(decode_llm, [("127.0.0.1", listener.port)], key=KEY, timeout=0.05)
    listener.close()
    with pytest.raises(PeerGoneError, match="no process answers"):
        workers.decode_worker(decode_llm, [("127.0.0.1", listener.port)], key=KEY)
    assert decode_llm.engine.prefill_source is None and not one_process
    assert [output.token_ids for output in decode_llm.generate(PROMPTS, greedy())] == expected
    worker = workers.decode_worker(decode_llm, [], key=KEY)
    with pytest.raises(ConfigError, match="has a decode worker already"):
        workers.decode_worker(decode_llm, [], key=KEY)
    assert decode_llm.engine.prefill_source is worker and list(one_process) == ["arena 0 lo"]
    worker.close()
    worker.close()
    assert not one_process


def test_keys_come_from_an_argument_a_file_or_the_environment(
    one_process: dict[str, torch.Tensor], decode_llm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=VARIABLE):
        workers.decode_worker(decode_llm, [])
    made = [workers.prefill_worker(decode_llm) for _ in range(2)]
    assert made[0].key != made[1].key and len(str(made[0].key)) == 64
    for worker in made:
        worker.close()
    (tmp_path / "key").write_text(KEY + "\n")
    assert find_key(tmp_path / "key") == find_key(KEY) == KEY
    monkeypatch.setenv(VARIABLE, KEY)
    assert find_key(None) == KEY
    for wrong in ("short", tmp_path / "none", b"bytes"):
        with pytest.raises(ConfigError, match="key"):
            find_key(wrong)  # type: ignore[arg-type]


def test_a_prefill_worker_refuses_another_key_and_a_taken_port(
    one_process: dict[str, torch.Tensor], decode_llm: Any
) -> None:
    worker = workers.prefill_worker(decode_llm, key=KEY)
    assert listening(os.getpid()) == {LOOPBACK}
    with pytest.raises(ConfigError, match="cannot listen"):
        workers.prefill_worker(decode_llm, port=worker.port)
    with pytest.raises(ConfigError, match="timeout"):
        workers.prefill_worker(decode_llm, timeout=0)
    caught: list[Exception] = []

    def connect() -> None:
        try:
            workers.SocketChannel.connect(("127.0.0.1", worker.port), b"another key, long enough")
        except AuthenticationError as e:
            caught.append(e)

    thread = threading.Thread(target=connect)
    thread.start()
    while thread.is_alive():
        worker.step()
    assert caught and worker.counters().refused == 1 and worker.counters().peers == 0
    worker.close()


def test_ucx_stays_on_the_loopback_device_where_the_workers_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    assert workers._devices(None, ["127.0.0.1", "::1", "localhost"]) == "lo"
    assert workers._devices(None, ["127.0.0.1", "10.0.0.1"]) == workers._devices(None, ["0.0.0.0"]) == ""
    assert workers._devices("eth0", ["127.0.0.1"]) == "eth0"
    monkeypatch.setenv("UCX_NET_DEVICES", "all")
    assert workers._devices(None, ["127.0.0.1"]) == ""


def test_every_message_that_workers_send_passes_its_schema() -> None:
    for text in ("e" * 9999, "\udc80"):
        failed = messages.Failed("x", messages.shortened(text))
        assert unpack(pack(failed), messages.ToDecode) == failed
