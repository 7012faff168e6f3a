"""What workers are made of: regions of an arena, channels, handshakes, readers; and every transport alike."""

import random
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrt import EngineConfig, SpeculativeConfig
from hybridrt.base.errors import (
    HandshakeError,
    OutOfSlotsError,
    PoolError,
    ProviderNotInstalledError,
    RankError,
    TransferError,
)
from hybridrt.channel.channel import SocketChannel
from hybridrt.channel.codec import pack
from hybridrt.channel.listener import Listener
from hybridrt.collectives.groups import TPGroup
from hybridrt.mem_cache.pools.state_slices import RangeRead
from hybridrt.runtime.load.load_target import load_target
from hybridrt.transfer.handshake import VERSION, Handshake, check_handshake, handshake_of
from hybridrt.transfer.messages import Connected, Ended, Joined, Order
from hybridrt.transfer.nixl_transport import NixlTransport, _described
from hybridrt.transfer.ranks import Reader, RemoteReader, serve_reads
from hybridrt.transfer.reader import LocalReader
from hybridrt.transfer.reads import _joined, image_reads
from hybridrt.transfer.regions import RegionAllocator
from tests.support.in_process import InProcessTransport
from tests.support.tiny import write_tiny
from tests.support.transfer_pair import Images

Transport = InProcessTransport | NixlTransport


@settings(deadline=None)
@given(data=st.data())
def test_regions_never_overlap_and_none_is_lost(data: st.DataObject) -> None:
    regions, held = RegionAllocator(100), dict[int, int]()
    for _ in range(data.draw(st.integers(0, 30))):
        if held and data.draw(st.booleans()):
            start = data.draw(st.sampled_from(sorted(held)))
            regions.free(start)
            del held[start]
        else:
            size = data.draw(st.integers(1, 60))
            try:
                start = regions.alloc(size)
            except OutOfSlotsError:
                gaps = sorted([*held.items(), (100, 0)])
                ends = [0, *(s + n for s, n in gaps)]
                assert all(s - end < size for (s, _), end in zip(gaps, ends))
                continue
            assert all(start + size <= s or s + n <= start for s, n in held.items()) and 0 <= start <= 100 - size
            held[start] = size
        assert regions.num_used == sum(held.values())
    for start in held:
        regions.free(start)
    assert regions.alloc(100) == 0, "what was freed grows together"


def test_a_region_is_freed_once() -> None:
    regions = RegionAllocator(10)
    regions.alloc(4)
    regions.free(0)
    for offset in (0, 3):
        with pytest.raises(PoolError, match=f"starts at byte {offset}"):
            regions.free(offset)


KEY = b"a key of the tests, 32 bytes long"


def channels() -> tuple[SocketChannel, SocketChannel]:
    listener, found = Listener(("127.0.0.1", 0), KEY), list[SocketChannel]()
    thread = threading.Thread(target=lambda: found.append(SocketChannel.connect(("127.0.0.1", listener.port), KEY)))
    thread.start()
    while not (accepted := listener.accept()):
        pass
    thread.join()
    listener.close()
    return found[0], accepted[0]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model"), tokenizer=False)


def handshake(path: Path, **changes: Any) -> Handshake:
    config = EngineConfig(str(path), **{"device": "cpu", "load_format": "dummy", **changes})
    return handshake_of(config, load_target(config, TPGroup())[1], path)


def test_a_handshake_describes_what_a_worker_runs(model: Path) -> None:
    ours = handshake(model)
    assert ours.pop("model")
    assert ours == {
        "version": VERSION,
        "conv_dtype": "float32",
        "state_dtype": "float32",
        "conv_layout": "mamba2 (x 48, B 8, C 8) x 3, state [6, 8, 8] in layers 0,1",
        "kv_layout": "2 x 8, window None in layers 0,1",
        "chunk_size": 16,
        "draft_length": 0,
        "ring_width": "conv 4, state 16",
        "page_size": 16,
    }
    drafts = handshake(model, speculative=SpeculativeConfig(num_draft_tokens=5))
    assert (drafts["draft_length"], drafts["ring_width"]) == (5, "conv 16, state 32")


def test_every_field_is_compared(model: Path) -> None:
    ours = handshake(model)
    check_handshake(ours, dict(ours))
    for field, value in ours.items():
        theirs = ours | {field: value + 1 if isinstance(value, int) else value + "x"}
        with pytest.raises(HandshakeError) as caught:
            check_handshake(ours, theirs)
        assert (caught.value.field, caught.value.ours, caught.value.theirs) == (field, value, theirs[field])
        assert repr(value) in str(caught.value) and repr(theirs[field]) in str(caught.value)


def test_another_version_is_refused(model: Path) -> None:
    ours = handshake(model)
    newer = {**ours, "version": VERSION + 1, "more": 1}
    without = {name: value for name, value in ours.items() if name != "page_size"}
    cases = {"version": newer, "more": {**ours, "more": 1}, "page_size": without, "model": {**ours, "model": ""}}
    for field, theirs in cases.items():
        with pytest.raises(HandshakeError) as caught:
            check_handshake(ours, theirs)
        assert caught.value.field == field
    with pytest.raises(HandshakeError, match="None there"):
        check_handshake(ours, {})
    with pytest.raises(HandshakeError, match="more 0 is None here"):
        check_handshake(ours, ours | {f"more {i}": i for i in range(9, -1, -1)})


def nixl(buffer: torch.Tensor, serve: bool) -> NixlTransport:
    try:
        return NixlTransport(buffer, serve)
    except ProviderNotInstalledError as e:
        pytest.skip(str(e))


@pytest.fixture(params=["in process", "nixl"])
def transports(request: pytest.FixtureRequest) -> Iterator[tuple[Transport, Transport, torch.Tensor, torch.Tensor]]:
    """Two of a kind, and their arenas: random bytes and zeros."""
    theirs = torch.randint(1, 256, (1 << 16,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    ours, hub = torch.zeros(1 << 16, dtype=torch.uint8), dict[str, torch.Tensor]()
    pair: tuple[Transport, Transport]
    if request.param == "nixl":
        pair = nixl(ours, serve=False), nixl(theirs, serve=True)
    else:
        pair = InProcessTransport(hub, "ours", ours, piece=100), InProcessTransport(hub, "theirs", theirs)
    yield (*pair, ours, theirs)
    for transport in pair:
        with suppress(TransferError):
            transport.close()


def test_transports_read_what_is_asked_for_and_nothing_else(transports: Any) -> None:
    here, there, ours, theirs = transports
    peer = here.connect(there.describe())
    rng = random.Random(1)
    for _ in range(5):
        ours.zero_()
        expected, reads = ours.clone(), []
        for destination in range(0, 1 << 16, 1 << 13):
            nbytes, source = rng.randrange(1, 1 << 13), rng.randrange(1 << 15)
            reads.append(RangeRead(source, destination, nbytes))
            expected[destination : destination + nbytes] = theirs[source : source + nbytes]
        read = here.read(peer, reads)
        while not read.done():
            pass
        assert torch.equal(ours, expected)


def test_transports_refuse_strangers(transports: Any) -> None:
    here, there, *_ = transports
    with pytest.raises(TransferError, match="not connected"):
        here.read("nobody", [RangeRead(0, 0, 1)])
    peer = here.connect(there.describe())
    here.disconnect(peer)
    here.disconnect(peer)
    with pytest.raises(TransferError, match="not connected"):
        here.read(peer, [RangeRead(0, 0, 1)])
    again = here.connect(there.describe())
    read = here.read(again, [RangeRead(5, 7, 9)])
    while not read.done():
        pass


def test_transports_notice_that_the_other_side_has_gone(transports: Any) -> None:
    here, there, *_ = transports
    if isinstance(here, NixlTransport):
        pytest.skip("an agent is gone when its process is: tests/transfer/test_nixl.py")
    read = here.read(here.connect(there.describe()), [RangeRead(0, 0, 1000)])
    assert not read.done()
    there.close()
    with pytest.raises(TransferError, match="gone"):
        read.done()
    with pytest.raises(TransferError, match="no arena"):
        here.connect("theirs")


def test_reads_of_nothing() -> None:
    assert image_reads([], 0, 1, 2) == []


LAYOUT = Images((), (), (), 1)


@pytest.fixture(params=["here", "another rank"])
def reading(request: pytest.FixtureRequest) -> Iterator[tuple[Reader, Transport, torch.Tensor, torch.Tensor]]:
    """A reader, its arena, and a peer with its own."""
    theirs, ours = torch.arange(200, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    hub: dict[str, torch.Tensor] = {}
    peer = InProcessTransport(hub, "theirs", theirs)
    reader: Reader = LocalReader(InProcessTransport(hub, "ours", ours, piece=7), LAYOUT)
    if request.param == "here":
        yield reader, peer, ours, theirs
        return
    channel, far_end = channels()
    far_end.send(pack(Joined(3, reader.description)))
    thread = threading.Thread(target=serve_reads, args=(far_end, reader))
    thread.start()
    remote = RemoteReader(channel)
    assert (remote.rank, remote.description) == (3, "ours")
    yield remote, peer, ours, theirs
    remote.close()
    thread.join()
    assert "ours" not in hub, "the rank closes its transport when rank 0 leaves"
    with pytest.raises(RankError):
        remote.poll()


def ending(reader: Reader, count: int) -> dict[str, TransferError | None]:
    ended: dict[str, TransferError | None] = {}
    while len(ended) < count:
        ended |= reader.poll()
    return ended


def test_a_worker_is_not_forgotten_while_it_is_read() -> None:
    hub = {"theirs": torch.ones(100, dtype=torch.uint8)}
    transport = InProcessTransport(hub, "ours", torch.zeros(100, dtype=torch.uint8), piece=7)
    reader = LocalReader(transport, LAYOUT)
    reader.connect("w", ["theirs"])
    reader.fetch(Order("a", "w", 100, 0, 0))
    reader.disconnect("w")
    while not reader.poll():
        assert transport._peers == {"theirs"}
    assert not reader.poll() and not transport._peers


def test_only_neighbours_become_one_read() -> None:
    reads = [RangeRead(0, 5, 3), RangeRead(3, 8, 4), RangeRead(8, 13, 2), RangeRead(10, 16, 1)]
    assert _joined(reads) == [RangeRead(0, 5, 7), RangeRead(8, 13, 2), RangeRead(10, 16, 1)]


def test_readers_fetch_and_say_how_it_ended(reading: Any) -> None:
    reader, peer, ours, theirs = reading
    with pytest.raises(TransferError, match="no arena"):
        reader.connect("nobody", ["nobody"])
    reader.connect("w", [peer.describe()])
    reader.fetch(Order("a", "w", 40, 100, 5))
    reader.fetch(Order("b", "w", 30, 10, 60))
    assert ending(reader, 2) == {"a": None, "b": None}
    assert torch.equal(ours[5:45], theirs[100:140]) and torch.equal(ours[60:90], theirs[10:40])
    assert not ours[:5].any() and not ours[45:60].any() and not ours[90:].any()
    reader.fetch(Order("c", "w", 90, 0, 0))
    peer.close()
    reader.disconnect("w")
    (error,) = ending(reader, 1).values()
    assert isinstance(error, TransferError) and "gone" in str(error)


@pytest.mark.parametrize(
    "description",
    ["", "[]", "null", "[" * 5000, '["", 1, 2, "DISK"]', '["%", 1, 2, "DRAM"]', '["", true, 2, "DRAM"]'],
)
def test_what_describes_no_memory_is_refused(description: str) -> None:
    assert _described('["YWL/", 5, 0, "VRAM"]') == (b"ab\xff", 5, 0, "VRAM")
    with pytest.raises(TransferError, match="does not describe its memory"):
        _described(description)


def test_reads_that_end_before_the_answer_to_a_connection_are_kept() -> None:
    channel, far_end = channels()
    for message in (Joined(3, "ours"), Ended("a", None), Connected("broken"), Ended("b", "gone")):
        far_end.send(pack(message))
    remote = RemoteReader(channel)
    with pytest.raises(TransferError, match="rank 3: broken"):
        remote.connect("w", ["theirs"])
    ended = ending(remote, 2)
    assert ended["a"] is None and str(ended["b"]) == "rank 3: gone"
    far_end.close()
    with pytest.raises(RankError):
        remote.connect("w", ["theirs"])
    remote.close()
