"""A model whose attention layers differ: head dims, numbers of heads, windows, scales, rotary or none."""

from collections.abc import Iterator
from dataclasses import replace
from operator import mul
from pathlib import Path

import pytest
import torch

from hybridrt import LLM
from hybridrt.base.engine_config import SpeculativeConfig
from hybridrt.base.errors import BackendError
from hybridrt.cli.inspect import describe_model
from hybridrt.engine.cache import host_fetches
from hybridrt.runtime.run.state_arena import StateArena
from hybridrt.runtime.step.plan import StateCopy
from hybridrt.transfer.handshake import handshake_of
from tests.support import outside_mixed
from tests.support.outside_mixed import LAYERS, Reference, write_checkpoint
from tests.support.session import Session, greedy

PROMPTS = [[7, 3, 50, 11, 2, 9, 9, 40, 21, 5, 33, 18, 27], [4], [60, 1] * 16, [13, 14, 15, 16, 17]]
COUNT = 24


@pytest.fixture(autouse=True)
def family() -> Iterator[None]:
    with outside_mixed.installed():
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]], Reference]:
    """The checkpoint, what follows each prompt, and the model in plain torch."""
    path = tmp_path_factory.mktemp("mixed")
    reference = write_checkpoint(path)
    return path, [reference.greedy(prompt, COUNT) for prompt in PROMPTS], reference


@pytest.mark.parametrize(("chunk", "gap", "options"), [
    (8192, 0, {}), (5, 2, {}), (16, 0, {"page_size": 4}),
    (7, 1, {"speculative": SpeculativeConfig("ngram", num_draft_tokens=3)}),
    (8192, 1, {"speculative": SpeculativeConfig("ngram", num_draft_tokens=4, topk=2)}),
])  # fmt: skip
def test_tokens_are_the_reference_s(model: tuple, chunk: int, gap: int, options: dict) -> None:
    """Whole and chunked prompts, mixed steps, chains and trees of drafts."""
    path, expected, reference = model
    session = Session(path, **options)
    samples = session.run([(prompt, COUNT) for prompt in PROMPTS], chunk=chunk, gap=gap)
    assert [sample.tokens for sample in samples] == expected
    assert session.num_mixed() or not gap
    for sample in samples:
        logits = reference.logits(sample.prompt + sample.tokens)[len(sample.prompt) - 1 : -1]
        torch.testing.assert_close(sample.logits, logits, rtol=1e-4, atol=1e-4)


def test_tokens_survive_preemption(model: tuple) -> None:
    """Four groups share what is too little for all requests, two of them without a window."""
    path, expected, _ = model
    config = {"page_size": 4, "max_model_len": 60, "max_running_requests": 4, "chunked_prefill_size": 8}
    plan = Session(path, **config).plan
    pages = [group.demand.least(60) + 2 for group in plan.groups]
    budget = plan.costs.fixed + 5 * plan.costs.row + sum(map(mul, pages, plan.costs.pages))
    session = Session(path, budget_bytes=budget, **config)
    assert session.plan.slabs is not None and session.plan.max_model_len == 60
    samples = session.run([(prompt, COUNT) for prompt in PROMPTS], chunk=6)
    assert [sample.tokens for sample in samples] == expected
    assert sum(sample.retractions for sample in samples)


def test_layers_of_one_window_and_size_share_a_group_and_the_plan_charges_all(model: tuple) -> None:
    session = Session(model[0])
    pool = session.runner.pools.kv
    assert pool.windows == tuple(group.window for group in session.plan.groups) == (None, None, 5, 9)
    assert [pool.group_of(i) for i in range(len(LAYERS))] == [2, 0, 1, 2, 3]
    assert pool.tensor_groups == [2, 2, 0, 0, 1, 1, 3, 3]
    assert [tensor.shape[0] for tensor in pool.tensors] == [2, 2, 1, 1, 1, 1, 1, 1]
    for i, own in enumerate(LAYERS):
        spec, shape = pool.specs[i], pool.layer(i)[0].shape
        assert (spec.num_heads, spec.sliding_window) == (own.num_heads, own.sliding_window)
        assert shape[2:] == (own.num_kv_heads, own.head_dim)
    slabs = session.plan.slabs
    assert slabs is not None and ("KV cache, shared", slabs.nbytes) in {
        (row[0], row[2]) for row in session.plan.table()
    }
    assert {tensor.untyped_storage().data_ptr() for tensor in pool.tensors} == {pool.tensors[0].data_ptr()}
    assert pool.tensors[0].untyped_storage().nbytes() == slabs.nbytes
    report = describe_model(session.config)
    assert [layer.kv_bytes_per_token for layer in report.layers] == [8 * o.num_kv_heads * o.head_dim for o in LAYERS]
    assert report.layers[4].mixer == "attention (4 heads, 4 KV heads, head_dim 12, window 9)"


def test_windows_alone_need_no_other_group(model: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outside_mixed, "LAYERS", tuple(own for own in LAYERS if own.sliding_window))
    plan = Session(model[0], load_format="dummy").plan
    assert [group.window for group in plan.groups] == [5, 9] and plan.max_model_len == 160


def test_a_window_group_holds_its_windows_alone(model: tuple) -> None:
    """Requests of any length run in the few pages of a window."""
    session = Session(model[0], page_size=4)
    engine = session.engine(chunk=8)
    engine.add_request([7] * 100, greedy(60), "0")
    held = list[tuple[int, ...]]()
    while engine.has_unfinished():
        engine.step()
        held.append(tuple(group.num_used for group in session.coordinator.pages.groups))
    most = [max(counts) for counts in zip(*held)]
    bounds = [demand.prefilling(160) for demand in session.coordinator.pages.demands]
    assert bounds == [40, 40, 6, 7] and most == bounds


def test_values_narrower_than_keys_are_refused_when_built(model: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outside_mixed, "LAYERS", (*LAYERS[:-1], replace(LAYERS[-1], v_head_dim=4)))
    with pytest.raises(BackendError, match="v_head_dim 4"):
        Session(model[0], load_format="dummy")


def test_states_leave_and_arrive(model: tuple) -> None:
    """Keys and values of all groups, each with its own shape and pages; with windows, those that are still seen."""
    sessions = [Session(model[0], page_size=4, transfer_bytes=10**5) for _ in range(2)]
    sides = [session.runner for session in sessions]
    arenas = [StateArena(side.target, side.pools, 10**5) for side in sides]
    for session in sessions:
        session.engine()
    sessions[1].coordinator.pages.alloc([1, 5, 2, 3])  # so that the two sides have other pages
    lent = [session.coordinator.pages.alloc([3] * 4) for session in sessions]
    pages = [[[page.index for page in group] for group in own] for own in lent]
    for side, own in zip(sides, pages, strict=True):
        side.pools.req_to_token.write_pages(torch.tensor([1, 1, 1]), torch.arange(3), torch.tensor(own).T)
        for tensor in side.pools.kv.tensors:
            tensor.normal_()
    copy = StateCopy(1, 10, 0)
    arenas[0].export_state(copy)
    arenas[1].buffer.copy_(arenas[0].buffer)
    arenas[1].import_state(copy)
    for i, layer in enumerate(LAYERS):
        group, seen = sides[0].pools.kv.group_of(i), (layer.sliding_window or 11) - 1
        for tensors in zip(*(side.pools.kv.layer(i) for side in sides), strict=True):
            there, here = (t[own[group]].flatten(0, 1)[:10] for t, own in zip(tensors, pages, strict=True))
            assert torch.equal(there[-seen:], here[-seen:]) and not (there[:-seen] == here[:-seen]).any()
    config = sides[0].config
    assert handshake_of(config, sides[0].target, model[0])["kv_layout"] == (
        "2 x 8, window 5 in layers 0,3; 2 x 8, window None in layers 1; 1 x 12, window None in layers 2; "
        "4 x 12, window 9 in layers 4"
    )


def test_prefixes_come_back_from_main_memory(model: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four groups share the device's memory, and the model has no states."""
    monkeypatch.setattr(host_fetches, "LEAST_TOKENS", 2)
    path, expected, _ = model
    settings = {"device": "cpu", "dtype": "float32", "page_size": 4, "max_model_len": 80, "max_running_requests": 2}
    with LLM(str(path), host_cache_bytes=1 << 20, **settings) as llm:
        assert llm.plan.slabs is not None
        for fetched in (False, True):
            outs = llm.generate(PROMPTS, greedy(COUNT))
            assert [out.token_ids for out in outs] == expected
            assert bool(llm.engine.counters().cache_fetched) == fetched
            llm.engine.prefixes.evict([group.total for group in llm.engine._coordinator.pages.groups], 0)


def test_a_session_has_the_pages_of_all_groups(model: tuple, tmp_path: Path) -> None:
    path, expected, reference = model
    settings = {"device": "cpu", "dtype": "float32", "page_size": 4, "max_model_len": 80, "max_running_requests": 2}
    text = [*PROMPTS[2], *expected[2]]
    with LLM(str(path), **settings) as llm:
        llm.generate([PROMPTS[1], PROMPTS[2]], greedy(COUNT))  # the other process has its pages elsewhere
        llm.save_session(tmp_path / "turn", text)
    with LLM(str(path), **settings) as llm:
        llm.load_session(tmp_path / "turn")
        out = llm.generate([[*text, 5]], greedy(8))[0]
        assert out.token_ids == reference.greedy([*text, 5], 8)
        assert out.metrics.cached_tokens >= len(text) - 8
