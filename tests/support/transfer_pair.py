"""A prefill worker and a decode worker in one process, over transports that see one another."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hybridrt import LLM, SamplingParams
from hybridrt.engine.core.engine import Engine
from hybridrt.mem_cache.pools.state_slices import Section
from hybridrt.runtime.run.state_arena import ImageLayout
from hybridrt.transfer.decode import DecodeWorker
from hybridrt.transfer.prefill import PrefillWorker
from hybridrt.transfer.reader import LocalReader
from hybridrt.transfer.side import WorkerSide
from tests.support.cache_ledger import check_cache
from tests.support.in_process import InProcessTransport, QueueChannel
from tests.support.samples import Samples

SMALL: dict[str, Any] = dict(
    load_format="dummy", device="cpu", max_model_len=96, max_running_requests=3, page_size=4, transfer_bytes=1 << 17,
    chunked_prefill_size=16,
)  # fmt: skip


class Images(ImageLayout):
    """One section of as many bytes as tokens."""

    def sections(self, length: int, start: int = 0) -> list[Section]:
        return [Section(length - start)]


def greedy(count: int = 6, **params: Any) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, **params)


class Prefiller:
    """A prefill worker, its memory in the hub."""

    def __init__(self, llm: LLM, hub: dict[str, torch.Tensor], name: str = "prefill") -> None:
        self.side = WorkerSide.from_llm(llm)
        self.transport = InProcessTransport(hub, name, self.side.arena)
        self.worker = PrefillWorker(self.side, [LocalReader(self.transport, self.side.layout)], linger=0.0)
        self.alive = True

    def connect(self, decode: "Decoder") -> str:
        ours, theirs = QueueChannel.pair()
        self.worker.attach(ours)
        self.channel = ours
        return decode.worker.connect(theirs)

    def step(self) -> None:
        if self.alive:
            self.worker.step()

    def die(self) -> None:
        """As a process does: no word, memory gone, connection reset."""
        self.alive = False
        self.transport.close()
        self.channel.close()

    def assert_empty(self) -> None:
        counters = self.worker.counters()
        assert counters.jobs == counters.bytes_used == 0, counters
        assert_no_leak(self.side.engine)


class Decoder:
    """A decode worker, and the outputs of its engine by request and sample."""

    def __init__(self, llm: LLM, hub: dict[str, torch.Tensor], **options: Any) -> None:
        self.side = WorkerSide.from_llm(llm)
        self.engine = llm.engine
        transport = InProcessTransport(hub, "decode", self.side.arena, piece=1500)
        self.worker = DecodeWorker(self.side, [LocalReader(transport, self.side.layout)], **options)
        self.outputs = Samples()

    def step(self) -> None:
        for delta in self.engine.step():
            sample = self.outputs.get((delta.request_id, delta.index))
            if sample is not None and sample.finish_reason is not None:
                del self.outputs[delta.request_id, delta.index]  # its id has come again
            self.outputs.add([delta])

    def tokens(self, request_id: str) -> list[int]:
        return self.outputs[request_id, 0].token_ids

    def assert_empty(self) -> None:
        counters = self.worker.counters()
        assert counters.under_way == counters.bytes_used == 0, counters
        assert_no_leak(self.side.engine)


def assert_no_leak(engine: Engine) -> None:
    engine.drain()
    pools = engine._coordinator
    check_cache(pools)
    assert not any(pool.num_used or pool.num_locked for pool in (pools.rows, pools.slots, pools.pages))


def run(decode: Decoder, *prefill: Prefiller, most: int = 5000) -> None:
    """Steps all until the decode side has nothing left to do, and the others no jobs."""
    for _ in range(most):
        decode.step()
        for worker in prefill:
            worker.step()
        busy = [w for w in prefill if w.alive and w.worker.counters().jobs]
        if not (decode.engine.has_unfinished() or decode.worker.counters().under_way or busy):
            return
    raise AssertionError(f"not done: {decode.worker.counters()}, {[w.worker.counters() for w in prefill]}")


def build(path: Path, **changes: Any) -> LLM:
    return LLM(str(path), **{**SMALL, **changes})


def alone(path: Path, prompts: Sequence[Sequence[int]], params: SamplingParams, **changes: Any) -> list[list[int]]:
    """Tokens of one process that does everything itself."""
    with build(path, **changes) as llm:
        return [output.token_ids for output in llm.generate([list(p) for p in prompts], params)]
