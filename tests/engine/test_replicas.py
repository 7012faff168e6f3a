"""Several replicas of one engine: the tokens of one, a prefix's own replica, and what becomes of a lost one."""

import asyncio
import dataclasses
import gc
import os
import queue
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from safetensors.torch import load_file, save_file

from hybridrt import LLM, AsyncLLM, SamplingParams
from hybridrt.base.errors import (
    CheckpointError,
    ConfigError,
    DeviceError,
    EngineError,
    GrammarError,
    MessageError,
    NoTokenLeftError,
    QueueFullError,
    RankError,
)
from hybridrt.channel import control
from hybridrt.channel.control import TIMEOUT_VARIABLE
from hybridrt.engine.replicas import replicated_engine, start
from hybridrt.engine.replicas.messages import (
    Contents,
    FromReplica,
    ReplicaFailed,
    ReplicaReady,
    Stepped,
    WasReset,
    decode,
    encode,
)
from hybridrt.engine.replicas.start import Lost, Replicas
from hybridrt.engine.request.outputs import Delta, EngineCounters, RequestMetrics
from hybridrt.fleet.placement import Replica
from hybridrt.fleet.prefix_mirror import PrefixMirror, names_of
from hybridrt.mem_cache.prefix_tree.prefix_cache import CacheMiss
from tests.models.test_vision import OMNI, QWEN, seeing
from tests.models.test_vision_text import sample_prompts
from tests.support.checkpoints import CheckpointStore
from tests.support.replicas_in_threads import ThreadReplicas
from tests.support.session import greedy

TEXTS = [[5, 6, 7], [9] * 20, [11, 4, 3, 8], [30, 31]]


@contextmanager
def replicated(path: Path, monkeypatch: pytest.MonkeyPatch, count: int = 2, **options: Any) -> Iterator[LLM]:
    """An LLM over replicas that are threads."""
    given = {"device": "cpu", "max_model_len": 128, "max_running_requests": 4, "page_size": 4} | options
    monkeypatch.setattr(
        replicated_engine, "Replicas", lambda config: ThreadReplicas(lambda: LLM(str(path), **given), config)
    )
    with LLM(str(path), dp_size=count, **given) as llm:
        yield llm


def alone(path: Path, **options: Any) -> LLM:
    return LLM(str(path), device="cpu", max_model_len=128, max_running_requests=4, page_size=4, **options)


def steps(llm: LLM) -> list[int]:
    """Of each replica."""
    return [each.steps for each in llm.engine._counters]  # type: ignore[attr-defined]


def test_tokens_of_one_engine(checkpoints: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn ones too, without seeds: which replica takes a request changes nothing."""
    path = checkpoints["falcon-split"].path
    drawn = SamplingParams(max_tokens=6, n=2, logprobs=2, ignore_eos=True)
    asked: list[Any] = [
        (TEXTS, greedy(8)),
        (TEXTS, drawn),
        (TEXTS[:2], SamplingParams(max_tokens=3, prompt_logprobs=1)),
    ]
    with alone(path) as llm:
        wanted = [llm.generate(*each) for each in asked]
    with replicated(path, monkeypatch) as llm:
        got = [llm.generate(*each) for each in asked]
        counters, plan = llm.engine.counters(), llm.engine._replicas.llms[0].plan  # type: ignore[attr-defined]
        assert min(steps(llm)) > 0 and counters.finished == 4 + 8 + 2
        assert counters.free_rows == llm.plan.num_rows == 2 * plan.num_rows
        assert (llm.plan.num_pages, llm.plan.num_slots) == (2 * plan.num_pages, 2 * plan.num_slots)
        assert not llm.engine.has_unfinished() and llm.engine.view() is None
    for ours, theirs in zip(got, wanted, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert [o.token_ids for o in one.outputs] == [o.token_ids for o in other.outputs]
            assert [o.finish_reason for o in one.outputs] == [o.finish_reason for o in other.outputs]
            assert [len(o.logprobs or ()) for o in one.outputs] == [len(o.logprobs or ()) for o in other.outputs]
            assert len(one.prompt_logprobs or ()) == len(other.prompt_logprobs or ())


def test_a_conversation_stays_where_its_states_are(
    checkpoints: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with replicated(checkpoints["falcon-split"].path, monkeypatch) as llm:
        talks = [[i, i + 1, *range(3, 20)] for i in range(4)]
        for turn in range(3):
            outputs = llm.generate(talks, greedy(5))
            for talk, output in zip(talks, outputs, strict=True):
                assert output.metrics.cached_tokens >= (len(talk) - 2 if turn else 0)
                talk += [*output.token_ids[:-1], 7]
        assert min(steps(llm)) > 0
        assert llm.reset_prefix_cache()
        llm.engine.run_step()
        outputs = llm.generate(talks, greedy(1))
        assert [output.metrics.cached_tokens for output in outputs] == [0] * 4


@pytest.mark.parametrize("name", [QWEN, pytest.param(OMNI, marks=pytest.mark.slow)])
def test_images_have_the_tokens_of_one_engine(
    name: str, checkpoints: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conversation goes on where its image's states are."""
    path = seeing(checkpoints[name].path, tmp_path / "model")
    prompts = sample_prompts(path)[0]

    def talk(llm: LLM) -> tuple[list[list[int]], list[int]]:
        """Tokens of two turns, and how many of the second turn's were cached."""
        given: list[Any] = [{"prompt_token_ids": tokens, "spans": found} for tokens, found in prompts]
        first = llm.generate(given, greedy(4))
        for each, output in zip(given, first, strict=True):
            each["prompt_token_ids"] = [*each["prompt_token_ids"], *output.token_ids[:-1], 7]
        second = llm.generate(given, greedy(4))
        return [o.token_ids for o in [*first, *second]], [o.metrics.cached_tokens for o in second]

    with alone(path) as llm:
        wanted = talk(llm)
        assert min(wanted[1]) > 0
    with replicated(path, monkeypatch) as llm:
        assert talk(llm) == wanted
        assert min(steps(llm)) > 0 and llm.engine.counters().encoded_spans == 5


def test_an_aborted_request_ends_at_its_replica(checkpoints: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with replicated(checkpoints["falcon-split"].path, monkeypatch) as llm:
        engine = llm.engine
        engine.add_request([5, 6], greedy(100), "a")
        found: list[Delta] = []
        while not found:
            found = engine.step()
        assert engine.abort("a") and not engine.abort("b")
        found = engine.drain()
        assert (found[-1].finish_reason, found[-1].error) == ("abort", None) and not engine.has_unfinished()
        stream = llm.stream([5, 6], greedy(100))
        next(stream)
        del stream
        gc.collect()
        engine.drain()
        assert not engine.has_unfinished() and engine.counters().aborted == 2


def test_a_lost_replica_ends_its_requests_alone(checkpoints: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with replicated(checkpoints["falcon-split"].path, monkeypatch) as llm:
        engine: Any = llm.engine
        inbox = engine._replicas.inbox
        for name in ("a", "b"):
            engine.add_request([5, 6], greedy(40), name)
        first, second = (int(request.placed.replica.name) for request in engine._running.values())
        assert first != second
        engine._waits[second] = 0.0
        engine._waits[first] = 5.0
        steps_before = engine.counters().steps
        inbox.put((second, Lost("its process was killed by SIGKILL")))
        ended: dict[str, Delta] = {}
        while engine.has_unfinished():
            ended |= {delta.request_id: delta for delta in engine.step() if delta.finish_reason}
        assert ended["a"].finish_reason == "length"
        engine._waits[first] = 5.0
        assert engine.wait_seconds() == 5.0, "a lost replica takes no request"
        counters = engine.counters()
        assert counters.steps >= steps_before and counters.failed == 1
        assert counters.free_rows == engine._counters[first].free_rows, "its pools are gone"
        assert f"replica {second} was lost: its process was killed by SIGKILL" in str(ended["b"].error)
        assert len(llm.generate([[7, 8], [9]], greedy(3))) == 2
        inbox.put((first, ReplicaFailed("RankError", "rank 1 was lost")))
        with pytest.raises(EngineError, match="every replica was lost") as caught:
            llm.generate([5], greedy(3))
        assert isinstance(caught.value.__cause__, RankError), "no later request can succeed: a loop ends"


def test_a_lost_replica_ends_those_that_share_its_experts(
    checkpoints: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no others: kernels would wait for its experts for ever."""
    with replicated(checkpoints["falcon-split"].path, monkeypatch) as llm:
        engine: Any = llm.engine
        ended = list[int]()
        for link in engine._replicas.links:
            link.end = partial(ended.append, link.number)
        engine._shares_experts = True
        engine._lose(1, RankError("it is gone"))
        assert ended == [0, 1] and not engine._placement.replicas
    with replicated(checkpoints["falcon-split"].path, monkeypatch) as llm:
        engine = llm.engine
        for link in engine._replicas.links:
            link.end = partial(pytest.fail, "it shares nothing")
        engine._lose(1, RankError("it is gone"))
        assert [*engine._placement.replicas] == ["0"]


@pytest.mark.parametrize("wait", ["reset_prefix_cache", "cache_events", "finish_launched"])
def test_a_replica_that_does_not_answer_is_lost(
    wait: str, checkpoints: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sends heartbeats, so nothing else ends the wait. The other one's answer is there at once."""
    monkeypatch.setattr(replicated_engine, "ANSWER_S", 0.0)
    with replicated(checkpoints["falcon-split"].path, monkeypatch) as llm:
        engine: Any = llm.engine
        (hangs, answers), ended = engine._replicas.links, list[int]()
        hangs.end, hangs.send = partial(ended.append, 0), lambda data: None
        answers.end = partial(pytest.fail, "it answers")
        answers.send = lambda data: [
            engine._replicas.inbox.put((1, each)) for each in (WasReset(done=True), Contents([]))
        ]
        engine._placement.remove("1")
        engine.add_request([5, 6], greedy(9), "a")
        engine._placement.add(Replica("1", None))
        match wait:
            case "reset_prefix_cache":
                assert engine.reset_prefix_cache()
            case "cache_events":
                engine.cache_events(9)
            case _:
                engine.abort("a")
                engine.finish_launched()
        assert ended == [0] and [*engine._placement.replicas] == ["1"]
        (delta,) = engine.step()
        assert "replica 0 was lost: it has not answered for 0 seconds" in str(delta.error)


def test_no_cache_is_emptied_once_every_replica_is_lost(
    checkpoints: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with replicated(checkpoints["falcon-split"].path, monkeypatch) as llm:
        for number in range(2):
            llm.engine._handle(number, Lost("it ended"))  # type: ignore[attr-defined]
        with pytest.raises(EngineError, match="every replica was lost; build a new LLM"):
            llm.reset_prefix_cache()


def test_a_replica_that_is_not_ready_after_the_others_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "OTHERS_S", 0.0)
    replicas = object.__new__(Replicas)
    replicas.inbox = queue.SimpleQueue()
    replicas.links = [SimpleNamespace(number=i, send=lambda data: None) for i in range(3)]  # type: ignore[misc]
    replicas.inbox.put((1, ReplicaReady(None, None)))  # type: ignore[arg-type]
    with pytest.raises(EngineError, match=r"replicas \[0, 2\] are not ready 0 seconds after another one"):
        replicas._load(start.EngineConfig("embedded", device="cpu", dp_size=3), "")


def test_what_a_replica_refuses_ends_that_request(
    checkpoints: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with replicated(checkpoints["falcon-split"].path, monkeypatch, count=2) as llm:
        prepared = llm.engine.prepare([5, 6], greedy(3))
        monkeypatch.setattr("hybridrt.engine.replicas.replica.array", lambda data: _Beyond())
        with pytest.raises(EngineError, match="token id 100000 is outside the vocabulary"):
            llm.generate([prepared], greedy(3))  # type: ignore[list-item]


@pytest.mark.parametrize(("kind", "seen"), [(GrammarError, GrammarError), (NoTokenLeftError, NoTokenLeftError),
                                           (QueueFullError, EngineError)])  # fmt: skip
def test_an_error_of_a_replica_keeps_its_class(
    kind: type[Exception], seen: type[Exception], checkpoints: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers answer 400 to some and 500 to others. A request ends with an EngineError of some class."""

    def submit(*_: object, **__: object) -> None:
        raise kind("a limit")

    with replicated(checkpoints["falcon-split"].path, monkeypatch) as llm:
        for each in llm.engine._replicas.llms:  # type: ignore[attr-defined]
            monkeypatch.setattr(each.engine, "submit", submit)
        with pytest.raises(EngineError, match="a limit") as caught:
            llm.generate([5, 6], greedy(3))
        assert type(caught.value) is seen


class _Beyond:
    def tolist(self) -> list[int]:
        return [100_000]


def test_events_of_all_replicas_are_one_stream(checkpoints: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """An early reader and a late one know of each replica what the engine itself knows."""
    with replicated(checkpoints["falcon-split"].path, monkeypatch) as llm:
        early = llm.cache_events()
        llm.generate(TEXTS, greedy(3))
        late = llm.cache_events()
        llm.generate([text[::-1] for text in TEXTS], greedy(3))
        layout = llm.engine.cache_layout()
        assert layout is not None and layout.ranks == 2
        for events in (early, late):
            mirror = PrefixMirror(layout)
            found = events.read()
            mirror.update(found)
            assert not events.missed and {event.rank for event in found} == {0, 1}
            for text in ([*text, 1, 2] for text in TEXTS):
                own = [each.mirror.match(names_of(text)) for each in llm.engine._placement.replicas.values()]
                assert mirror.match(names_of(text)) == max(own)
            assert len(mirror) == sum(len(each.mirror) for each in llm.engine._placement.replicas.values()) > 0
        llm.engine._lose(0, RankError("it is gone"))
        for events in (early, late):
            assert [(event.what, event.rank) for event in events.read()] == [("cleared", 0)] * 2


def test_a_request_that_cannot_be_sent_is_not_kept(
    checkpoints: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with replicated(checkpoints["falcon-split"].path, monkeypatch) as llm:
        prepared = llm.engine.prepare([5, 6], greedy(3))
        with pytest.raises(MessageError, match="cannot be sent"):
            llm.engine.submit(dataclasses.replace(prepared, boundaries=(2**70,)))
        monkeypatch.setattr(control, "MAX_LINK_BYTES", 100_000)
        with pytest.raises(MessageError, match="it may have 100000"):
            llm.engine.submit(dataclasses.replace(prepared, boundaries=tuple(range(60_000))))
        assert not llm.engine.has_unfinished()
        placement = llm.engine._placement  # type: ignore[attr-defined]
        assert [(each.requests, each.tokens) for each in placement.replicas.values()] == [(0, 0)] * 2
        assert len(llm.generate([[7, 8]], greedy(3))) == 1


def test_what_belongs_to_one_engine_is_refused(checkpoints: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with replicated(checkpoints["falcon-split"].path, monkeypatch) as llm:
        for call in (lambda: llm.save_session("x", [5]), lambda: llm.load_session("x"), lambda: llm.dump_cache("x")):
            with pytest.raises(EngineError, match="belongs to one engine, and dp_size is above 1"):
                call()  # type: ignore[operator]
        with pytest.raises(AttributeError, match="belongs to one engine"):
            _ = llm.engine.executor


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"transfer_bytes": 1 << 20}, "transfer_bytes belongs to one engine"),
        ({"request_log": "log"}, "request_log belongs to one engine"),
        ({"dp_size": 65}, "dp_size"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        LLM("embedded", **{"device": "cpu", "dp_size": 2, **options})


def test_each_replica_has_gpus_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def config(**options: Any) -> Any:
        return start.EngineConfig("embedded", **{"device": "cuda", "dp_size": 2, "tp_size": 2, **options})

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [each["CUDA_VISIBLE_DEVICES"] for each in start._environments(config())] == ["0,1", "2,3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,5,GPU-3,1")
    assert [each["CUDA_VISIBLE_DEVICES"] for each in start._environments(config())] == ["7,5", "GPU-3,1"]
    shared = [each["CUDA_VISIBLE_DEVICES"] for each in start._environments(config(expert_parallel=True))]
    assert shared == ["7,5,GPU-3,1", "GPU-3,1,7,5"], "kernels write to the others' memory"
    with pytest.raises(DeviceError, match="dp_size 3 and tp_size 2 need 6 GPUs, but torch sees 4"):
        start._environments(config(dp_size=3))
    with pytest.raises(ConfigError, match="each replica takes GPUs of its own"):
        start._environments(config(device="cuda:1"))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="under torchrun"):
        start._environments(config())


def test_deltas_arrive_as_they_were_sent() -> None:
    metrics = RequestMetrics(3, 1.5, cached_tokens=2, cache_miss=CacheMiss("no_state", 1, 2), output_tokens=1)
    sent = Delta("a", 1, [5], "é", [{5: -0.5}], "stop", metrics, EngineError("no"), [None, {7: -1.0}], 9, None, b"\0")
    message = decode(encode(Stepped([sent], EngineCounters(steps=3), 0.5, [])), FromReplica)
    (got,) = message.deltas
    assert str(got.error) == "no" and isinstance(got.error, EngineError)
    got.error = sent.error
    assert got == sent and message.counters.steps == 3


@pytest.mark.parametrize(
    ("sent", "kind"),
    [
        (["GrammarError", "no"], GrammarError),
        (["NoTokenLeftError", "no"], NoTokenLeftError),
        (["CheckpointError", "no"], EngineError),  # a request does not end so
        (["HandshakeError", "no"], EngineError),  # is made of more than a text
        (["annotations", "no"], EngineError),
        (["OSError", "no"], EngineError),
    ],
)
def test_requests_end_with_known_errors_alone(sent: list[str], kind: type) -> None:
    delta = Delta("a", 0, [], "", None, "abort", None, EngineError("no"))
    data = encode(Stepped([delta], EngineCounters(), 0.0, []))
    other = data.replace(msgspec.msgpack.encode(["EngineError", "no"]), msgspec.msgpack.encode(sent))
    (got,) = decode(other, FromReplica).deltas
    assert type(got.error) is kind and str(got.error) == "no"
    with pytest.raises(MessageError):
        decode(data.replace(msgspec.msgpack.encode(["EngineError", "no"]), msgspec.msgpack.encode("no")), FromReplica)


def test_a_replica_that_fails_says_with_which_error() -> None:
    for kind in (ConfigError, CheckpointError, RankError, DeviceError):
        assert type(start.as_error(1, ReplicaFailed(kind.__name__, "no"))) is kind
    for name in ("HandshakeError", "Any", "OSError", "RequestError"):
        assert type(start.as_error(1, ReplicaFailed(name, "no"))) is EngineError
    assert str(start.as_error(1, ReplicaFailed("RankError", "no"))) == "replica 1: no"


# Replicas as processes


def start_replicas(path: Path, **options: Any) -> LLM:
    return LLM(str(path), device="cpu", max_model_len=128, max_running_requests=4, page_size=4, dp_size=2, **options)


def processes(llm: LLM) -> list[Any]:
    return [link.process for link in llm.engine._replicas.links]  # type: ignore[attr-defined]


@pytest.mark.soak
@pytest.mark.parametrize("options", [{}, {"tp_size": 2}, {"tp_size": 2, "expert_parallel": True}])
def test_processes_give_the_tokens_of_one(options: dict[str, Any], checkpoints: CheckpointStore) -> None:
    """In the slow level `AsyncLLM` has the first case, below, and tests/runtime/test_shared_experts.py the last."""
    path = checkpoints["qwen-split"].path
    with alone(path) as llm:
        wanted = [output.token_ids for output in llm.generate(TEXTS, greedy(8))]
    with start_replicas(path, **options) as llm:
        assert [output.token_ids for output in llm.generate(TEXTS, greedy(8))] == wanted
        assert min(steps(llm)) > 0
        held = processes(llm)
    assert [process.poll() for process in held] == [-signal.SIGKILL] * 2


@pytest.mark.slow
def test_a_killed_and_a_stopped_replica_are_named(
    checkpoints: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TIMEOUT_VARIABLE, "4")
    llm = start_replicas(checkpoints["falcon-split"].path)
    engine: Any = llm.engine
    for process in processes(llm):
        process.send_signal(signal.SIGSTOP)
    for name in ("a", "b"):
        engine.add_request([5, 6], greedy(40), name)
    first, second = (int(request.placed.replica.name) for request in engine._running.values())
    processes(llm)[first].kill()
    errors: dict[str, str] = {}
    while engine.has_unfinished():
        errors |= {delta.request_id: str(delta.error) for delta in engine.step()}
    assert f"replica {first} was lost: its process was killed by SIGKILL" in errors["a"]
    assert f"replica {second} was lost: it has sent no heartbeat in time" in errors["b"]
    held = processes(llm)
    llm.close()
    assert [process.poll() for process in held] == [-signal.SIGKILL] * 2


@pytest.mark.slow
def test_what_fails_at_the_start_is_raised_as_it_is(checkpoints: CheckpointStore, tmp_path: Path) -> None:
    checkpoint = checkpoints["falcon-split"].path
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.final_layernorm.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"replica .: .*final_layernorm"):
        start_replicas(tmp_path)


@pytest.mark.slow
def test_a_forgotten_llm_ends_its_replicas_and_a_forked_child_does_not(checkpoints: CheckpointStore) -> None:
    llm = start_replicas(checkpoints["falcon-split"].path)
    held = processes(llm)
    child = os.fork()
    if not child:
        llm.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert len(llm.generate([5, 6], greedy(3))[0].token_ids) == 3
    del llm
    gc.collect()
    assert [process.poll() for process in held] == [-signal.SIGKILL] * 2


@pytest.mark.slow
def test_an_async_llm_over_replicas(checkpoints: CheckpointStore) -> None:
    asyncio.run(_serve_and_lose(checkpoints["falcon-split"].path))


async def _serve_and_lose(path: Path) -> None:
    with start_replicas(path) as llm:
        wanted = [output.token_ids for output in llm.generate(TEXTS, greedy(8))]
        async with AsyncLLM(llm) as served:
            streams = [served.submit(await served.prepare(text, greedy(8))) for text in TEXTS]
            got = [[token async for delta in stream for token in delta.token_ids] for stream in streams]
            assert got == wanted
            stream = served.submit(await served.prepare([5], greedy(100)), "long")
            await anext(stream)
            assert served.abort("long")
            assert [delta.finish_reason async for delta in stream][-1] == "abort"
            for process in processes(llm):
                process.kill()
            with pytest.raises(EngineError, match="lost"):
                await served.complete([5], greedy(100))
            deadline = time.monotonic() + 20
            while served.failure is None and time.monotonic() < deadline:
                with pytest.raises(EngineError):
                    await served.complete([5], greedy(100))
            assert "every" in str(served.failure)


def test_replicas_that_end_while_others_start_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "start_child", lambda *args, **options: _Ended())
    with pytest.raises(RankError, match="replica 1 did not start: it ended with status 3"):
        Replicas(start.EngineConfig("embedded", device="cpu", dp_size=2))


class _Ended:
    returncode = 3

    def poll(self) -> int:
        return 3

    def kill(self) -> None: ...

    def wait(self) -> int:
        return 3
