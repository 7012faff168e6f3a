"""Replicas that share experts: tokens go to the replica that holds their experts, and no more than that is sent."""

import queue
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hybridrt import LLM, SamplingParams
from hybridrt.base.engine_config import EngineConfig, SpeculativeConfig
from hybridrt.base.errors import ConfigError, EngineError
from hybridrt.channel.control import TIMEOUT_VARIABLE
from hybridrt.collectives.groups import Communicator, TPGroup
from hybridrt.engine.replicas import start
from hybridrt.engine.replicas.messages import ReplicaFailed
from hybridrt.engine.replicas.replicated_engine import ReplicatedEngine
from hybridrt.engine.replicas.start import Lost
from hybridrt.layers.expert_exchange import ExpertExchange
from hybridrt.layers.moe import experts_of
from hybridrt.runtime.load.fit import pool_budget
from hybridrt.runtime.load.load_target import load_target
from hybridrt.runtime.load.make_plan import make_plan
from hybridrt.runtime.replay.graph_runner import GraphRunner
from hybridrt.runtime.run.model_runner import ModelRunner
from hybridrt.runtime.step.plan import NO_INTEGERS
from hybridrt.speculative.method import make_drafter
from tests.models.test_models_parity import requests
from tests.runtime.test_expert_parallel import FAMILIES, SIX
from tests.runtime.test_tensor_parallel import outputs
from tests.support.checkpoints import CheckpointStore, Make, falcon, qwen, write
from tests.support.levels import sweep
from tests.support.mtp_oracle import HEADS, write_with_head
from tests.support.online import MODELS
from tests.support.samples import Sample
from tests.support.session import Session, greedy, spoil
from tests.support.tiny import write_tiny

CPU = torch.device("cpu")
TEXTS = [[5, 6, 7], [9] * 20, [11, 4, 3, 8], [30, 31], [8] * 31]


def in_threads(size: int, function: Callable[[Any], Any], items: list[Any] | None = None) -> list[Any]:
    """What `function` returns for each of the items, in a thread each."""
    results, failures = dict[int, Any](), list[BaseException]()

    def run(i: int) -> None:
        try:
            results[i] = function(i if items is None else items[i])
        except BaseException as e:
            failures.append(e)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures, failures
    return [results[i] for i in range(size)]


@pytest.mark.parametrize("size", [2, 4])
def test_tokens_travel_to_their_experts_and_back(size: int) -> None:
    """One replica has no tokens, and some choices no expert. A token and its choice are sent once to each replica that
    has its experts, and one sum comes back."""
    count, held, width, top_k = 8, 8 // size, 24, 3
    tokens = [0, 5, 17, 2][:size]
    store, factors = dist.HashStore(), torch.randn(count, width, generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(2)
    inputs = [torch.randn(t, width, generator=generator) for t in tokens]
    ids = [torch.rand(t, count, generator=generator).topk(top_k).indices.to(torch.int32) for t in tokens]
    for each in ids[1:]:
        each[0, 0] = -1
        each[-1] = -1
    weights = [torch.rand(t, top_k, generator=generator) for t in tokens]

    def compute(x: Tensor, weights: Tensor, ids: Tensor, of: Tensor) -> Tensor:
        chosen = torch.where((ids >= 0)[..., None], of[ids.clamp(min=0).long()], 0.0)
        return x * (weights[..., None] * chosen).sum(1)

    def run(replica: int) -> tuple[Tensor, int, int]:
        comm, sent = Communicator(store, replica, size, CPU), list[int]()
        whole = comm.all_to_all

        def counted(x: Tensor, sends: Any = (), gets: Any = ()) -> Tensor:
            if len(sends):
                sent.append((len(x) - sends[replica]) * x[0].nbytes if len(x) else 0)
            return whole(x, sends, gets)

        comm.all_to_all = counted  # type: ignore[method-assign]
        exchange = ExpertExchange(TPGroup(replica, size, comm), held)
        own = factors[replica * held : (replica + 1) * held]
        found = exchange(inputs[replica], weights[replica], ids[replica], lambda x, w, i: compute(x, w, i, own))
        comm.close()
        return found, exchange.sent_rows, sum(sent)

    results = in_threads(size, run)
    for replica, (found, _, _) in enumerate(results):
        wanted = compute(inputs[replica], weights[replica], ids[replica], factors)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    routed = 0  # pairs of a token and another replica that has its experts
    for replica, chosen in enumerate(ids):
        owners = chosen.div(held, rounding_mode="floor")
        routed += sum(int((owners == r).any(1).sum()) for r in range(size) if r != replica)
    assert sum(rows for _, rows, _ in results) == 2 * routed
    assert sum(sent for _, _, sent in results) == 2 * routed * width * 4 + routed * 2 * top_k * 4
    assert sum(sent for _, _, sent in results) <= 1.2 * 2 * routed * width * 4


def replayed(sessions: list[Session], tp_size: int = 1, *, graphs: bool = False) -> list[list[ModelRunner]]:
    """The last runs of sessions on replicas that share experts, `tp_size` ranks each; a replica that has ended joins
    the steps of the others. The runners of each replica."""
    store, count = dist.HashStore(), len(sessions)

    def run(place: tuple[int, int]) -> ModelRunner:
        replica, rank = place
        session = sessions[replica]
        config = replace(session.config, dp_size=count, tp_size=tp_size, expert_parallel=True)
        column = Communicator(dist.PrefixStore(f"column{rank}", store), replica, count, CPU)
        comm = Communicator(dist.PrefixStore(f"row{replica}", store), rank, tp_size, CPU) if tp_size > 1 else None
        tp = TPGroup(rank, tp_size, comm, TPGroup(replica, count, column))
        target = load_target(config, tp)[1]
        plan = make_plan(config, target, budget_bytes=pool_budget(config, target), cache_slots=1)
        runner = ModelRunner(config, tp=tp, plan=plan)
        if graphs:
            runner.capture()
        spoil(runner.pools)
        for step in session.plans:
            runner.launch(step)
        while runner.join():
            pass
        return runner

    places = [(replica, rank) for replica in range(count) for rank in range(tp_size)]
    found = in_threads(len(places), run, places)
    return [found[i * tp_size : (i + 1) * tp_size] for i in range(count)]


def sessions_of(path: Path, second: int = 3, **options: Any) -> list[Session]:
    """Two of different lengths. `second`: tokens of the other one."""
    sessions = [Session(path, page_size=4, cache_slots=1, **options) for _ in range(2)]
    sessions[0].run(requests(1, 17, 30, steps=8), chunk=7, gap=3)
    sessions[1].run(requests(9, steps=second), chunk=7, gap=3)
    return sessions


CASES = [("qwen-split", 2), *((name, 1) for name in FAMILIES), *((name, 2) for name in FAMILIES if name not in SIX)]


@pytest.mark.parametrize(("name", "tp_size"), sweep(CASES, 16, thin=7))
def test_replicas_draw_the_tokens_of_one(name: str, tp_size: int, checkpoints: CheckpointStore) -> None:
    """The experts of both compute the tokens of each, and are counted by rank."""
    sessions = sessions_of(checkpoints[name].path)
    replicas = replayed(sessions, tp_size)
    for session, runners in zip(sessions, replicas, strict=True):
        for runner in runners:
            assert torch.equal(runner.last_tokens, session.runner.last_tokens)
            held = experts_of(runner.model)[0]
            assert held.held == held.num_experts // (2 * tp_size)
    first = replicas[0][0].expert_loads.read()
    assert all(len(layer) == 2 * tp_size and all(layer) for layer in first)
    assert replicas[0][0].lock_step is not None and replicas[1][0].lock_step is not None
    assert replicas[0][0].lock_step.rounds == replicas[1][0].lock_step.rounds


@pytest.mark.parametrize(
    ("name", "tp_size"), sweep([("nemotron-split", 1), ("qwen-split", 2), ("gpt_oss-split", 1), ("ling25-split", 1)], 4)
)
def test_all_replicas_replay_the_graph_of_the_largest_step(
    name: str, tp_size: int, checkpoints: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If none has a prompt; one without a step replays it without rows."""
    sessions, seen, replay = sessions_of(checkpoints[name].path, second=20), list[tuple[int, int]](), GraphRunner.replay

    def noted(self: GraphRunner, decode: Any, new_pages: Any = NO_INTEGERS, least: int = 0) -> Tensor:
        seen.append((len(decode), least))
        return replay(self, decode, new_pages, least)

    monkeypatch.setattr(GraphRunner, "replay", noted)
    for session, runners in zip(sessions, replayed(sessions, tp_size, graphs=True), strict=True):
        for runner in runners:
            assert torch.equal(runner.last_tokens[1:], session.runner.last_tokens[1:])  # row 0 is padding
    assert all(least >= rows for rows, least in seen)
    assert {rows for rows, _ in seen} >= {0, 1, 2} and any(least > rows > 0 for rows, least in seen)


@pytest.mark.slow
def test_codes_of_replicas(tmp_path: Path) -> None:
    model, cls = MODELS["qwen"][0]()
    model.num_experts = 4
    write(lambda: (model, cls), tmp_path)
    sessions = sessions_of(tmp_path, quantization="fp8")
    for session, (runner,) in zip(sessions, replayed(sessions), strict=True):
        assert torch.equal(runner.last_tokens, session.runner.last_tokens)


@pytest.mark.parametrize("name", sweep(["qwen", "nemotron-latent_groups", "ling"], 3))
def test_each_replica_has_the_experts_of_its_prediction_head(name: str, tmp_path: Path) -> None:
    """It drafts between the steps in which replicas meet. Its drafts are those of one engine: as many stay, of as
    many."""
    write_with_head(HEADS[name], tmp_path)
    config = EngineConfig(
        str(tmp_path), device="cpu", dtype="float32", max_model_len=128, max_running_requests=4,
        speculative=SpeculativeConfig("mtp", num_draft_tokens=3),
    )  # fmt: skip
    params, store = [greedy(16, seed=0), SamplingParams(max_tokens=9, seed=1)], dist.HashStore()

    def run(replica: int) -> list[Sample]:
        group = TPGroup(replica, 2, Communicator(store, replica, 2, CPU))
        shared = replace(config, dp_size=2, expert_parallel=True)
        runner = ModelRunner(shared, tp=TPGroup(replicas=group))
        assert runner.model.mtp is not None
        of_head, of_model = experts_of(runner.model.mtp), experts_of(runner.model.stack)
        assert of_head and all(each.held == each.num_experts for each in of_head)
        assert all(2 * each.held == each.num_experts for each in of_model)
        found = outputs(runner, params[: 1 + replica], make_drafter(runner))
        while runner.join():
            pass
        assert len(runner.expert_loads.read()) == len(of_model)
        return found

    runner = ModelRunner(config)
    alone = outputs(runner, params, make_drafter(runner))
    for together in in_threads(2, run):
        for ours, theirs in zip(together, alone):
            assert ours.token_ids == theirs.token_ids
            assert (ours.metrics.proposed, ours.metrics.accepted) == (theirs.metrics.proposed, theirs.metrics.accepted)


@pytest.mark.parametrize(
    ("make", "options", "text"),
    [
        (falcon(), {}, "FalconH1ForCausalLM has no experts"),
        (
            qwen(num_experts=6),
            {"tp_size": 2},
            "6 experts cannot be cut into 4 equal shards for tp_size=2 and dp_size=2",
        ),
    ],
)
def test_what_cannot_be_shared_starts_nothing(
    make: Make, options: dict[str, Any], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "start_child", lambda *args, **options: pytest.fail("processes were started"))
    with pytest.raises(ConfigError, match=text):
        LLM(
            str(write_tiny(tmp_path, make)), device="cpu", load_format="dummy", dp_size=2, expert_parallel=True,
            **options,
        )  # fmt: skip


def test_the_lost_replica_is_named_not_those_that_fail_with_it() -> None:
    """Their failures may be heard first. A replica that fails by itself makes all fail, and ends after that."""
    engine: Any = object.__new__(ReplicatedEngine)
    engine._replicas, engine._counters = SimpleNamespace(inbox=queue.SimpleQueue()), [None] * 3
    failed, lost = ReplicaFailed("RankError", "another was lost"), Lost("it was killed")
    for each in ((0, Lost("it ended")), (2, failed), (2, Lost("it ended")), (1, lost)):
        engine._replicas.inbox.put(each)
    assert engine._cause(0, failed) == (1, lost)
    for each in ((0, Lost("it ended")), (2, failed), (1, failed)):
        engine._replicas.inbox.put(each)
    assert engine._cause(0, failed) == (0, failed)


# Replicas as processes


def sharing(path: Path, **options: Any) -> LLM:
    return LLM(
        str(path), device="cpu", max_model_len=128, max_running_requests=4, page_size=4, dp_size=2,
        expert_parallel=True, **options,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"tp_size": 2}, pytest.param({}, marks=pytest.mark.soak)])
def test_processes_give_the_tokens_of_one(options: dict[str, Any], checkpoints: CheckpointStore) -> None:
    path = checkpoints["qwen-split"].path
    with LLM(str(path), device="cpu", max_model_len=128, max_running_requests=4, page_size=4) as llm:
        wanted = [output.token_ids for output in llm.generate(TEXTS, greedy(8))]
    with sharing(path, **options) as llm:
        assert [output.token_ids for output in llm.generate(TEXTS, greedy(8))] == wanted
        assert [llm.generate(text, greedy(8))[0].token_ids for text in TEXTS] == wanted, "the other replica joins"
        counted = llm.expert_tokens()
        assert counted and all(len(layer) == 2 * options.get("tp_size", 1) and sum(layer) for layer in counted)


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGSTOP, pytest.param(signal.SIGKILL, marks=pytest.mark.soak)])
def test_a_lost_replica_ends_all_and_is_named(
    sent: signal.Signals, checkpoints: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other replica has its experts."""
    monkeypatch.setenv(TIMEOUT_VARIABLE, "3")
    with sharing(checkpoints["qwen-split"].path) as llm:
        engine: Any = llm.engine
        for name in ("a", "b"):
            engine.add_request([5, 6], greedy(100), name)
        first = int(engine._running["a"].placed.replica.name)
        engine.step()
        engine._replicas.links[first].process.send_signal(sent)
        errors: dict[str, str] = {}
        while engine.has_unfinished():
            errors |= {delta.request_id: str(delta.error) for delta in engine.step()}
        reason = "its process was killed by SIGKILL" if sent is signal.SIGKILL else "it has sent no heartbeat in time"
        assert f"replica {first} was lost: {reason}" in errors["a"]
        assert errors["b"] != "None"
        with pytest.raises(EngineError, match="every replica was lost"):
            llm.generate([5], greedy(2))
