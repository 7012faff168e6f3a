"""Channels between processes: who gets one, what passes through it, and what the rest of a process notices."""

import errno
import hmac
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridrt.base.errors import AuthenticationError, ConfigError, MessageError, PeerGoneError
from hybridrt.channel import channel as channel_module
from hybridrt.channel import listener as channel_listener
from hybridrt.channel.auth import ANSWER_BYTES, NONCE_BYTES, TAG_BYTES, check_key
from hybridrt.channel.channel import SocketChannel
from hybridrt.channel.codec import Message, pack, unpack
from hybridrt.channel.listener import Listener
from tests.support.in_process import QueueChannel

KEY = b"a key of the tests, long enough"


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener(("127.0.0.1", 0), KEY)
    yield listener
    listener.close()


def join(listener: Listener, key: bytes = KEY) -> tuple[SocketChannel, SocketChannel]:
    """Both ends of a new channel. Raises what connecting raised."""
    found: list[Any] = []

    def connect() -> None:
        try:
            found.append(SocketChannel.connect(("127.0.0.1", listener.port), key, timeout=20))
        except PeerGoneError as e:
            found.append(e)

    thread, accepted = threading.Thread(target=connect), list[SocketChannel]()
    thread.start()
    while thread.is_alive() or (not accepted and not isinstance(found[0], Exception)):
        accepted += listener.accept()
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0], accepted[0]


def sockets() -> tuple[SocketChannel, SocketChannel]:
    listener = Listener(("127.0.0.1", 0), KEY)
    pair = join(listener)
    listener.close()
    return pair


def heard(channel: SocketChannel) -> list[Any]:
    """What comes within a moment."""
    channel.wait(5.0)
    return channel.receive()


@pytest.mark.parametrize("make", [QueueChannel.pair, sockets])
def test_channels_carry_messages_in_order_until_one_end_leaves(make: Any) -> None:
    here, there = make()
    assert there.receive() == []
    sent = [bytes([i]) * i * 40_000 for i in range(4)]
    for message in sent:
        here.send(message)
    got: list[Any] = []
    while len(got) < len(sent):
        here.receive()
        got += there.receive()
    assert got == sent
    there.send(b"bye")
    there.close()
    there.close()
    with pytest.raises(PeerGoneError):
        while True:
            got += here.receive()
    assert got[-1] == b"bye", "what came before the end is read"
    with pytest.raises(PeerGoneError):
        while True:  # the first one after the end may still leave
            here.send(b"")
    with pytest.raises(PeerGoneError):
        there.receive()
    here.close()


def test_a_channel_waits_no_longer_than_its_timeout(listener: Listener) -> None:
    here, there = join(listener)
    with pytest.raises(PeerGoneError, match=r"nothing for 0\.01 seconds"):
        here.expect(0.01)
    here.wait(0.001)
    there.send(b"")
    assert here.expect(20) == b""
    with pytest.raises(PeerGoneError, match="no process answers"):
        SocketChannel.connect(("127.0.0.1", 1), KEY)  # no process listens at so low a port
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(PeerGoneError, match="does not answer"):
        SocketChannel.connect(silent.getsockname(), KEY, timeout=0.05)


def test_another_key_is_refused_on_both_sides(listener: Listener) -> None:
    with pytest.raises(AuthenticationError, match="refuses our key"):
        join(listener, key=b"another key, long enough too")
    assert listener.refused == 1
    join(listener)


@pytest.mark.parametrize("key", [b"", b"short", b"x" * 15])
def test_a_key_that_can_be_guessed_is_refused(key: bytes) -> None:
    with pytest.raises(ConfigError, match=f"it has {len(key)} bytes; it needs 16"):
        check_key("it", key)
    check_key("it", b"x" * 16)


def answering(reply: Any) -> tuple[socket.socket, threading.Thread]:
    """A false listener, which answers a challenge as `reply` says."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = server.accept()
        with connection:
            challenge = b"hybridrt channel 1" + bytes(NONCE_BYTES)
            connection.sendall(challenge)
            connection.sendall(reply(challenge, connection.recv(ANSWER_BYTES, socket.MSG_WAITALL)))
            connection.recv(1)

    thread = threading.Thread(target=serve)
    thread.start()
    return server, thread


@pytest.mark.parametrize("reply", [lambda c, a: a[NONCE_BYTES:], lambda c, a: bytes(32), lambda c, a: os.urandom(32)])
def test_a_listener_that_sends_our_own_proof_back_is_refused(reply: Any) -> None:
    server, thread = answering(reply)
    with pytest.raises(AuthenticationError, match="does not hold our key"):
        SocketChannel.connect(server.getsockname(), KEY)
    thread.join()
    server.close()


def test_a_proof_is_of_no_use_on_another_connection(listener: Listener) -> None:
    """Someone who has seen a connection repeats it."""
    address = "127.0.0.1", listener.port
    with socket.create_connection(address) as first, socket.create_connection(address) as second:
        while len(listener._strangers) < 2:
            listener.accept()
        challenge, _ = first.recv(100), second.recv(100)
        nonce = os.urandom(NONCE_BYTES)
        proof = hmac.digest(KEY, b"connects\0" + challenge + nonce, "sha256")
        for stranger in (second, first):
            stranger.sendall(nonce + proof)
        accepted: list[SocketChannel] = []
        while not (accepted and listener.refused):
            accepted += listener.accept()
    assert (len(accepted), listener.refused) == (1, 1)


@pytest.mark.parametrize("change", ["length", "tag", "data", "repeat"])
def test_what_was_changed_on_the_way_ends_the_channel(change: str, listener: Listener) -> None:
    here, there = join(listener)
    here.send(b"1")
    assert heard(there) == [b"1"]
    data = b"2"
    frame = bytearray(len(data).to_bytes(4, "big") + here._tagger.tag(data) + data)
    if change == "length":
        frame[0] = 255
    elif change == "repeat":
        frame = frame * 2
    else:
        frame[4 + TAG_BYTES if change == "data" else 4] ^= 1
    here._socket.sendall(frame)
    if change == "repeat":
        assert heard(there) == [b"2"]
    with pytest.raises(MessageError, match="it may have" if change == "length" else "tag"):
        heard(there)
    with pytest.raises(MessageError):
        there.send(b"")


class Sum(Message):
    name: str
    parts: list[int]


class Bare(Message):
    """Without fields."""


PART = {"type": "sum", "name": "x"}
NO_MESSAGES: list[Any] = [
    {}, None, [], 5, "sum", ["sum"], {"type": None}, {"type": "other"}, {"type": "sum"}, PART, {1: 2},
    PART | {"parts": "text"}, PART | {"parts": [1.0]}, PART | {"parts": [True]}, PART | {"parts": [[1]]},
    PART | {"parts": [1 << 64 - 1]} | {"name": b"x"}, PART | {"parts": [], "more": 1}, {"type": "bare", "name": "x"},
    PART | {"parts": [msgspec.msgpack.Ext(5, b"")]},
]  # fmt: skip


def test_a_message_comes_back_as_it_was() -> None:
    for message in (Sum("é", [1, -1, 1 << 62]), Bare()):
        assert unpack(pack(message), Sum | Bare) == message
    assert unpack(pack(Bare()), Bare) == Bare()
    with pytest.raises(MessageError):
        unpack(pack(Bare()), Sum)


@pytest.mark.parametrize("value", NO_MESSAGES)
def test_what_is_not_of_the_types_is_refused(value: Any) -> None:
    with pytest.raises(MessageError):
        unpack(msgspec.msgpack.encode(value), Sum | Bare)


@pytest.mark.parametrize(
    "data", [
        b"", b"\xc0", b"\x90", b"{}", b"null", b"\x81", b"\xc1", b"\x91" * 100_000, b"\x80\x80",
        b"\x81\xa4type\xa4bare\x00",
        b"\x83\xa4type\xa3sum\xa4name\xa1\xff\xa5parts\x90", b"\x82\xa4type\xa4bare\xa1z" + b"\x91" * 100_000,
        b"\x83\xa4type\xa3sum\xa4name\xa1x\xa5parts" + b"\x91" * 100_000,
    ]
)  # fmt: skip
def test_bytes_that_are_no_message_are_refused(data: bytes) -> None:
    with pytest.raises(MessageError):
        unpack(data, Sum | Bare)


def test_what_was_sent_does_not_fill_the_text_of_an_error() -> None:
    with pytest.raises(MessageError) as caught:
        unpack(msgspec.msgpack.encode({"type": "bare", "z" * 10_000: 1}), Bare)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("message", [Sum("\udc80", []), Sum("x", [1 << 70])])
def test_what_msgpack_cannot_hold_is_refused(message: Message) -> None:
    with pytest.raises(MessageError):
        pack(message)


def test_what_is_too_long_is_refused_before_it_is_queued(listener: Listener) -> None:
    here, there = join(listener)
    with pytest.raises(MessageError, match="it may have"):
        here.send(bytes(channel_module.MAX_MESSAGE_BYTES + 1))
    here.send(b"1")
    assert heard(there) == [b"1"]


def test_a_peer_that_does_not_read_stalls_no_other(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    here, _there = join(listener)
    monkeypatch.setattr(channel_module, "MAX_QUEUED_BYTES", 1 << 22)
    with pytest.raises(PeerGoneError, match="does not read"):
        while True:
            here.send(bytes(1 << 20))
    here, _there = join(listener)
    here._timeout = 0.0
    with pytest.raises(PeerGoneError, match="does not read"):
        while True:
            here.send(bytes(1 << 20))


def test_a_peer_that_never_stops_sending_is_read_a_bit_at_a_time(listener: Listener) -> None:
    here, there = join(listener)
    sending = threading.Thread(target=lambda: [here.send(bytes(1 << 18)) for _ in range(32)])
    sending.start()
    got = 0
    while got < 32:
        messages = there.receive()
        assert len(messages) <= 5
        got += len(messages)
        if not sending.is_alive():
            here.receive()
    sending.join()


def test_strangers_that_say_nothing_are_closed_the_oldest_first(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_listener, "MAX_STRANGERS", 4)
    strangers = [socket.create_connection(("127.0.0.1", listener.port)) for _ in range(12)]
    while listener.refused < 8:
        listener.accept()
    assert len(listener._strangers) == 4
    for stranger in strangers[:8]:
        stranger.settimeout(20)
        assert stranger.recv(100) and not stranger.recv(100), "a challenge, and the end"
    here, _ = join(listener)
    here.close()
    monkeypatch.setattr(channel_listener.time, "monotonic", lambda now=time.monotonic: now() + 100)
    listener.accept()
    assert not listener._strangers
    for stranger in strangers:
        stranger.close()


def test_a_stranger_fills_no_memory(listener: Listener) -> None:
    with socket.create_connection(("127.0.0.1", listener.port)) as stranger:
        stranger.setblocking(False)
        while not listener.refused:
            with suppress(OSError):
                stranger.send(bytes(1 << 16))
            assert all(len(s.answer) <= ANSWER_BYTES for s in listener._strangers)
            listener.accept()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ECONNABORTED])
def test_running_out_of_file_descriptors_costs_one_stranger(number: int, listener: Listener) -> None:
    with socket.create_connection(("127.0.0.1", listener.port)):
        while not listener._strangers:
            listener.accept()
        real = listener._socket

        class Full:
            def accept(self) -> Any:
                raise OSError(number, "no")

        listener._socket = Full()  # type: ignore[assignment]
        for _ in range(3):
            assert listener.accept() == []
        assert not listener._strangers and listener.refused == 1
        listener._socket = real
    here, there = join(listener)
    here.send(b"")
    assert there.expect(20) == b""


def test_a_descriptor_above_a_thousand_is_waited_for(listener: Listener) -> None:
    """select() would refuse it."""
    here, there = join(listener)
    number = os.dup2(there.fileno(), 1500)
    there._socket.close()
    there._socket = socket.socket(fileno=number)
    there._socket.setblocking(False)
    here.send(b"1")
    assert there.expect(20) == b"1"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.lists(st.binary(max_size=80), max_size=4), leave=st.booleans())
def test_whatever_strangers_send_the_listener_keeps_running(data: list[bytes], leave: bool, listener: Listener) -> None:
    stranger = socket.create_connection(("127.0.0.1", listener.port))
    for piece in data:
        stranger.sendall(piece)
        assert listener.accept() == []
        if listener.refused and not listener._strangers:
            break
    if leave:
        stranger.close()
    assert listener.accept() == []
    stranger.close()
    while listener._strangers:
        assert listener.accept() == []
