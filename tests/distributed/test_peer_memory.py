"""Sums through memory that the other ranks write: what a rank sends, what it makes of what it got."""

import pytest
import torch
import torch.distributed as dist

from hybridrt.base.errors import RankError
from hybridrt.channel.codec import pack
from hybridrt.collectives import peer_memory
from hybridrt.collectives.cuda_ipc import SharedBox
from hybridrt.collectives.peer_memory import BLOCK, PROGRAMS, ROW_WORDS, PeerMemory


def words_of(x: torch.Tensor, round_: int) -> torch.Tensor:
    """What a rank sends of `x` in a round: 4 bytes of data, then the number of the round."""
    data = x.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    return (round_ << 32) | data


def in_box(box: torch.Tensor, size: int, sender: int, round_: int, count: int) -> torch.Tensor:
    """[count], the words of a sender in a round."""
    return box[: 2 * size * BLOCK * PROGRAMS].view(2, size, -1)[round_ % 2, sender, :count]


def rows_in_box(box: torch.Tensor, size: int, sender: int, round_: int, shape: torch.Size) -> torch.Tensor:
    """[rows, words], the same of sums with a norm."""
    rows = box[2 * size * BLOCK * PROGRAMS :].view(2, size, -1, ROW_WORDS)
    return rows[round_ % 2, sender, : shape[0], : shape[1] // 2]


def peers_of(boxes: list[torch.Tensor]) -> list[PeerMemory]:
    """All ranks, in one process."""
    return [PeerMemory(box, [each.data_ptr() for each in boxes], rank) for rank, box in enumerate(boxes)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("size", "count"), [(2, 2 * BLOCK + 6), (3, 2)])
def test_each_rank_adds_in_the_order_of_ranks(size: int, count: int, dtype: torch.dtype) -> None:
    """Three rounds: the third uses the half of the first."""
    boxes = [torch.zeros(PeerMemory.box_words(size), dtype=torch.int64) for _ in range(size)]
    ranks = peers_of(boxes)
    for round_ in (1, 2, 3):
        # Integers, because the interpreter cuts bits off instead of rounding; float32 shows the order.
        parts = [(torch.randn(1, count) * (1 if dtype == torch.float32 else 30)).to(dtype) for _ in range(size)]
        parts = parts if dtype == torch.float32 else [part.round() for part in parts]
        expected = parts[0].float()
        for part in parts[1:]:
            expected = expected + part.float()
        sent = [words_of(part.view(-1), round_) for part in parts]
        for rank, peers in enumerate(ranks):
            for sender in {*range(size)} - {rank}:  # as if they had come already
                in_box(boxes[rank], size, sender, round_, len(sent[sender])).copy_(sent[sender])
            found = peers.all_reduce(parts[rank].clone())
            assert torch.equal(found, expected.to(dtype))
            for other in {*range(size)} - {rank}:
                got = in_box(boxes[other], size, rank, round_, len(sent[rank]) + 1)
                assert torch.equal(got[:-1], sent[rank]) and not got[-1]


@pytest.mark.parametrize(("size", "count"), [(2, 4 * BLOCK + 8), (3, 4)])
def test_rows_go_to_all_and_sums_of_parts_to_one(size: int, count: int) -> None:
    """Each rank gets `count` words of all, then sums its own part of all. Both use the same boxes and rounds."""
    boxes = [torch.zeros(PeerMemory.box_words(size), dtype=torch.int64) for _ in range(size)]
    ranks = peers_of(boxes)
    for round_ in (1, 3, 5):
        rows = [torch.randint(0, 255, (2, 2 * count), dtype=torch.uint8) for _ in range(size)]
        parts = [torch.randn(size, count) for _ in range(size)]
        for rank, peers in enumerate(ranks):
            for sender in {*range(size)} - {rank}:
                in_box(boxes[rank], size, sender, round_, count).copy_(words_of(rows[sender].view(-1), round_))
            assert torch.equal(peers.gather(rows[rank]), torch.cat(rows))
            expected, own = torch.zeros(1, count), slice(rank, rank + 1)
            for sender in range(size):
                expected += parts[sender][own]
                if sender != rank:
                    sent = words_of(parts[sender][own].reshape(-1), round_ + 1)
                    in_box(boxes[rank], size, sender, round_ + 1, count).copy_(sent)
            assert torch.equal(peers.scatter_sum(parts[rank]), expected)
        for rank, box in enumerate(boxes):
            for sender in {*range(size)} - {rank}:
                got = in_box(box, size, sender, round_ + 1, count)
                assert torch.equal(got, words_of(parts[sender][rank], round_ + 1))


def test_a_sum_with_a_norm_is_a_sum_then_a_norm() -> None:
    boxes = [torch.zeros(PeerMemory.box_words(2), dtype=torch.int64) for _ in range(2)]
    peers, weight = peers_of(boxes)[1], torch.rand(22)
    for round_ in (1, 2, 3):
        parts = [torch.randn(3, 22).mul(30).round().bfloat16() for _ in range(2)]
        residual = torch.randn(3, 30).mul(30).round().bfloat16()[:, :22]
        rows_in_box(boxes[1], 2, 0, round_, parts[0].shape).copy_(words_of(parts[0].view(-1), round_).view(3, 11))
        total = residual + (parts[0] + parts[1])
        expected = torch.rms_norm(total.float(), (22,), weight, 1e-5)
        found, summed = peers.sum_add_rms_norm(parts[1], residual, weight, 1e-5)
        assert summed is residual and torch.equal(residual, total)
        torch.testing.assert_close(found.float(), expected, rtol=2**-7, atol=0)


def test_it_waits_for_what_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A word of another round is no answer; after `abort` nothing waits."""
    boxes = [torch.zeros(PeerMemory.box_words(2), dtype=torch.int64) for _ in range(2)]
    monkeypatch.setattr("hybridrt.collectives.peer_memory.SPINS", 2)
    peers, x = peers_of(boxes)[0], torch.ones(1, 8, dtype=torch.bfloat16)
    in_box(boxes[0], 2, 1, 1, 4).copy_(words_of(x.view(-1), 3))
    peers.abort()
    peers.all_reduce(x)  # returns only because of `abort`


def test_what_is_left_to_nccl() -> None:
    boxes = [torch.zeros(PeerMemory.box_words(2), dtype=torch.int64) for _ in range(2)]
    peers = peers_of(boxes)[0]
    assert peers.serves(torch.zeros(2**20, dtype=torch.bfloat16))
    for x in (
        torch.zeros(2**20 + 2, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.bfloat16), torch.zeros(0),
        torch.zeros(4, dtype=torch.int32), torch.zeros(8, 8).t(),
    ):  # fmt: skip
        assert not peers.serves(x), x.shape


@pytest.mark.parametrize("refused", [True, False])
def test_all_ranks_use_nccl_if_one_cannot_map_a_box(refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It tells the others, which would wait for its answer. What it has mapped is given back."""
    store, opened, closed = dist.HashStore(), list[int](), list[int]()

    def open_shared(box: SharedBox) -> int:
        if refused and len(opened) == 1:
            raise RankError("cuIpcOpenMemHandle_v2 failed")
        opened.append(box.offset)
        return 4096 * len(opened)

    monkeypatch.setattr(peer_memory, "synchronize", lambda device: None)
    monkeypatch.setattr(peer_memory, "share", lambda box: SharedBox("gpu", b"", 0))
    monkeypatch.setattr(peer_memory, "gpu_of", lambda name: 0)
    monkeypatch.setattr(peer_memory, "reaches", lambda device, number: True)
    monkeypatch.setattr(peer_memory, "open_shared", open_shared)
    monkeypatch.setattr(peer_memory, "close_shared", lambda address, box: closed.append(address))
    for rank in (1, 2):
        store.set(f"box/{rank}", pack(SharedBox("gpu", b"", rank)).hex())
        store.set(f"reach/{rank}", "1")
    peers = PeerMemory.connect(store, 0, 3, torch.device("cpu"), store.get)
    assert (peers is None) == refused
    assert bytes(store.get("reach/0")) == (b"-" if refused else b"1")
    assert opened == ([1] if refused else [1, 2]) and closed == ([4096] if refused else [])
