"""Workers over an engine whose steps are launched ahead: what is still being read or written is not given away."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from hybridrt.base.errors import PeerGoneError, TransferError
from hybridrt.transfer.decode import DecodeWorker
from hybridrt.transfer.messages import Order
from hybridrt.transfer.prefill import PrefillWorker
from hybridrt.transfer.side import WorkerSide
from tests.support.engine_harness import Rig
from tests.support.in_process import QueueChannel, decode_hello, prefill_hello
from tests.support.mock_executor import mix
from tests.support.transfer_pair import Images


class Lagging:
    """A worker of either side over a mock engine whose steps are always launched ahead."""

    def __init__(self) -> None:
        self.rig = Rig(late=2, overlap=True, chunk=4)
        layout = Images((), (), (), 1)
        self.side = WorkerSide(self.rig.engine, {"version": 1}, layout, torch.zeros(100, dtype=torch.uint8))
        self.here, self.there = QueueChannel.pair()

    def launch(self) -> None:
        while not self.rig.executor.unread:
            self.rig.step()


class Immediate:
    """A reader that has read everything at once."""

    description = ""

    def __init__(self) -> None:
        self.orders: list[str] = []

    def connect(self, worker: str, descriptions: Sequence[str]) -> None: ...
    def disconnect(self, worker: str) -> None: ...
    def close(self) -> None: ...

    def fetch(self, order: Order) -> None:
        self.orders.append(order.key)

    def poll(self) -> dict[str, TransferError | None]:
        ended, self.orders = dict.fromkeys(self.orders), []
        return ended


def test_numbers_of_ranks_that_do_not_fit_are_refused() -> None:
    lagging = Lagging()
    worker = DecodeWorker(replace(lagging.side, layout=replace(lagging.side.layout, tp_size=2)), [Immediate()])
    here, there = QueueChannel.pair()
    there.send(prefill_hello(lagging.side.handshake, [""] * 3))
    with pytest.raises(TransferError, match="3 prefill ranks cannot feed 2"):
        worker.connect(here)
    with pytest.raises(PeerGoneError):
        there.receive()


def test_an_image_is_not_given_away_while_a_step_may_still_read_it() -> None:
    decode = Lagging()
    worker = DecodeWorker(decode.side, [Immediate()])
    decode.there.send(prefill_hello(decode.side.handshake, [""]))
    worker.connect(decode.here)
    decode.rig.executor.arena[0] = [[1, 2]], mix(mix(0, 1), 2)
    request_id = decode.rig.add([1, 2, 3], max_tokens=9)
    decode.rig.step()
    decode.there.send({"type": "ready", "key": f"{request_id}-1", "offset": 0})
    decode.launch()
    decode.rig.engine.abort(request_id)
    assert decode.rig.executor.unread and worker.regions.num_used
    worker.advance()
    assert not decode.rig.executor.unread and not worker.regions.num_used
    decode.rig.run()


def test_an_image_is_not_given_away_while_a_step_may_still_write_it() -> None:
    prefill = Lagging()
    worker = PrefillWorker(prefill.side, [])
    worker.attach(prefill.here)
    prefill.there.send(decode_hello(prefill.side.handshake))
    prefill.there.send({"type": "prefill", "key": "x", "tokens": [1, 2, 3, 4, 5, 6]})
    worker.step()
    assert prefill.rig.executor.unread and worker.regions.num_used
    prefill.there.send({"type": "done", "key": "x"})
    worker._receive(worker._peers[0])
    assert not prefill.rig.executor.unread and not worker.regions.num_used
    prefill.rig.run()
