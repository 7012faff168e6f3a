"""Nothing of a request is kept once it has ended, however it ended: memory, waits, reads of its prompt."""

import gc
import threading
from typing import Any

import numpy as np
import pytest

from hybridrt.base.sampling_params import SamplingParams
from hybridrt.engine.api.engine_loop import EngineLoop
from hybridrt.engine.core.traffic_policy import TrafficPolicy
from hybridrt.engine.replicas.messages import Stepped, Submit
from hybridrt.engine.replicas.replica import ReplicaLoop
from hybridrt.engine.request.sample_request import Request
from tests.engine.test_threads import WAIT
from tests.support.engine_harness import Rig
from tests.support.samples import Samples

SHORT: dict[str, Any] = {"max_tokens": 2, "ignore_eos": True}


class Reader:
    """Collects what requests get, and sees each end."""

    def __init__(self) -> None:
        self.samples, self.ended = Samples(), threading.Semaphore(0)

    def __call__(self, message: Any) -> None:
        self.samples.add(message.deltas)
        message.handed_out.set()
        for delta in message.deltas:
            if delta.finish_reason is not None:
                self.ended.release()


def test_the_queue_holds_no_request_that_has_left_it() -> None:
    """It would hold prompts and images of up to 64 of them, as long as another one waits."""
    rig, ended = Rig(rows=2, policy=TrafficPolicy(None)), 0
    for _ in range(6):
        rig.add([9] * 20, **SHORT)
    while ended < 40:  # another one comes for each that ends, so that some wait at any time
        for delta in rig.engine.step():
            if delta.finish_reason is not None:
                ended += 1
                rig.add([9] * 20, **SHORT)
    gc.collect()
    engines = {id(request) for request in rig.engine._samples.all()}
    alive = [each for each in gc.get_objects() if isinstance(each, Request) and each.prompt == [9] * 20]
    assert {id(request) for request in alive} == engines


def test_the_abort_of_a_request_ends_its_fetch_from_main_memory() -> None:
    """An engine without requests takes no step in which it would."""
    rig = Rig(rows=2, slots=6, pages=100, max_model_len=300, cache=True, host=(400, 12), copy_delay=50)
    text, others = [9 + i % 7 for i in range(150)], [8 + i % 11 for i in range(280)]
    rig.finish(text, **SHORT)
    for first in range(3):
        rig.finish([8 + first, *others], **SHORT)  # evict it from the device
    name = rig.add([*text, *[9] * 5], **SHORT)
    for _ in range(3):
        rig.engine.step()
    assert rig.pools.fetches is not None and rig.pools.fetches._fetches
    rig.engine.abort(name)
    rig.engine.drain()
    now = rig.engine.counters()
    assert not rig.pools.fetches._fetches and now.free_pages + now.cached_pages == now.total_pages


def test_a_request_that_ends_twice_ends_once() -> None:
    """Its `submit` raises, and the engine's recovery ends it again; later requests are answered."""
    rig, reader = Rig(cache=True, policy=TrafficPolicy(None)), Reader()
    tree, loop = rig.pools.prefixes.tree, EngineLoop(rig.engine, reader, 100)
    expect = tree.expect

    def no_memory(*_: Any) -> None:
        tree.expect = expect  # type: ignore[method-assign]
        raise MemoryError("no memory")

    tree.expect = no_memory  # type: ignore[method-assign, assignment]
    for name in ("a", "b", "c"):  # the recovery may end b
        loop.submit({name: rig.engine.prepare([9] * 20, SamplingParams(**SHORT))})
        assert reader.ended.acquire(timeout=WAIT)
    assert loop.error is None and not loop.unfinished and loop.close() and not reader.ended.acquire(blocking=False)
    assert [reader.samples[name, 0].finish_reason for name in ("a", "c")] == ["abort", "length"]


def test_prefill_workers_are_heard_while_no_request_runs() -> None:
    """What they send to a request that was aborted holds memory on both sides."""

    class Source:
        heard = threading.Semaphore(0)

        def advance(self) -> None:
            self.heard.release()

    rig = Rig()
    loop = EngineLoop(rig.engine, Reader(), 100)
    rig.engine.prefill_source = Source()  # type: ignore[assignment]
    loop.abort("none")  # the thread may have begun to wait before there was a source
    for _ in range(3):
        assert Source.heard.acquire(timeout=WAIT)
    assert loop.close()


@pytest.mark.parametrize("cache", [False, True])
def test_a_replica_says_when_nothing_waits_any_more(cache: bool) -> None:
    """Requests without streams decode without a word, and the front refuses others by the time that they would wait."""
    rig = Rig(rows=8, pages=900, page_size=4, max_model_len=400, chunk=64, cache=cache, policy=TrafficPolicy(None))

    class Front:
        """Gives requests, then sees in each step what the replica has and what it has told."""

        told = 0.0

        def __init__(self) -> None:
            self.seen = list[tuple[float, float]]()
            long = np.arange(200, dtype="<i4") % 15 + 8
            params = SamplingParams(max_tokens=150, ignore_eos=True, seed=1)
            self.left = [Submit(f"r{i}", long.tobytes(), (), params, (), False, "") for i in range(6)]
            warm_up = SamplingParams(max_tokens=1)
            self.left.append(Submit("first", np.full(4, 9, "<i4").tobytes(), (), warm_up, (), False, ""))

        def receive(self, wait_s: float | None) -> Submit | None:
            if self.left:
                return self.left.pop()
            self.seen.append((rig.engine.wait_seconds(), self.told))
            if wait_s != 0.0:
                raise StopIteration
            return None

        def send(self, message: object) -> None:
            if isinstance(message, Stepped):
                self.told = message.wait_seconds

    front = Front()
    with pytest.raises(StopIteration):
        ReplicaLoop(front, rig.engine).run()  # type: ignore[arg-type]
    assert len(front.seen) > 100 and max(told for _, told in front.seen) > 0
    assert not [told for own, told in front.seen if told and not own]
