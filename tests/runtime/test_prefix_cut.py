"""Prefixes that some ranks have saved, for another number of ranks."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from hybridrt.base.engine_config import EngineConfig
from hybridrt.collectives.groups import TPGroup
from hybridrt.engine.cache.sessions import Sessions
from hybridrt.engine.core.engine import Engine
from hybridrt.mem_cache.prefix_tree.cache_key import CacheKey
from hybridrt.runtime.load.load_target import load_target
from hybridrt.runtime.load.make_plan import make_plan
from hybridrt.runtime.load.runtime import build_pools
from hybridrt.runtime.run.prefix_copy import prefix_shapes
from hybridrt.runtime.run.prefix_cut import PrefixCut
from tests.models.test_models_parity import prompts
from tests.runtime.test_tensor_parallel import Groups
from tests.support.checkpoints import SPLIT, CheckpointStore
from tests.support.levels import sweep
from tests.support.samples import Sample, Samples
from tests.support.session import Session, greedy


@pytest.mark.parametrize("name", sweep(SPLIT, 4))
def test_pieces_that_are_cut_twice_are_those_that_are_cut_once(name: str, checkpoints: CheckpointStore) -> None:
    """From 1, 2 and 4 ranks to 1, 2 and 4. Shapes are those of each number of ranks' own pools."""
    path = checkpoints[name].path
    shapes, cuts = {}, {}
    for ranks in (1, 2, 4):
        config = EngineConfig(
            str(path), device="cpu", dtype="float32", load_format="dummy", tp_size=ranks, max_model_len=64
        )
        target = load_target(config, TPGroup(size=ranks))[1]
        pools = build_pools(config, target, make_plan(config, target, budget_bytes=1 << 24))
        shapes[ranks], cuts[ranks] = prefix_shapes(pools, ranks, 5, 2), PrefixCut(target.model_config, ranks)
    whole = {each: torch.randn(shape) for each, (shape, _) in shapes[1].items()}
    assert whole
    for theirs in (1, 2, 4):
        saved = cuts[theirs].recut(whole)
        assert {each: tuple(tensor.shape) for each, tensor in saved.items()} == {
            each: shape for each, (shape, _) in shapes[theirs].items()
        }
        for ours in (1, 2, 4):
            assert cuts[ours].shapes(shapes[ours], theirs) == shapes[theirs]
            for each, tensor in cuts[ours].recut(saved).items():
                assert torch.equal(tensor, cuts[ours].recut(whole)[each]), each


@pytest.fixture(scope="module")
def groups() -> Iterator[Groups]:
    started = Groups()
    yield started
    started.close()


@pytest.mark.parametrize(
    ("name", "saving", "loading"),
    [
        pytest.param(name, *sizes, marks=pytest.mark.soak if (i + 5 * j) % 7 or 4 in sizes else pytest.mark.slow)
        for i, name in enumerate(["falcon-split", "qwen-split", "kimi-split", "lfm2-split", "swa_ssm-split"])
        for j, sizes in enumerate([(2, 1), (1, 2), (2, 4), (4, 1)])
    ],
)
def test_a_session_of_other_ranks_continues(
    name: str, saving: int, loading: int, groups: Groups, checkpoints: CheckpointStore, tmp_path: Path
) -> None:
    """What one number of ranks has computed serves another: the answer to a longer prompt is that of one process. Four
    processes are left to the soak level; pieces of four ranks are cut above."""
    text, file = prompts(21)[0], tmp_path / "talk"
    answer = checkpoints[name].greedy(text, 7)
    longer = [*text, *answer[:6], 5, 6, 7]

    def open_session(ranks: int) -> Session:
        split = {"ranks": groups[ranks], "tp_size": ranks} if ranks > 1 else {}
        found = Session(checkpoints[name].path, page_size=4, prefix_cache=True, **split)  # type: ignore[arg-type]
        found.runner.pools.req_to_token.tables.zero_()  # pages before a window are in no table
        return found

    session = open_session(saving)
    engine = session.engine(prefix_cache=True, grid=4)
    assert ask(engine, text, 7).token_ids == answer
    sessions(session, engine).save(file, np.array([*text, *answer], np.int32), CacheKey(), "")
    close(session)
    session = open_session(loading)
    engine = session.engine(prefix_cache=True, grid=4)
    loaded = sessions(session, engine).load(file, CacheKey(), True)
    output = ask(engine, longer, 5)
    close(session)
    assert output.metrics is not None
    assert len(loaded.token_ids) >= output.metrics.cached_tokens >= len(text) - 4
    assert output.token_ids == checkpoints[name].greedy(longer, 5)


def sessions(session: Session, engine: Engine) -> Sessions:
    executor = session.split or session.runner
    return Sessions(executor, session.coordinator, engine.turns, engine._change, lambda: None)


def ask(engine: Engine, prompt: list[int], count: int) -> Sample:
    found = Samples()
    engine.add_request(prompt, greedy(count), "a")
    while engine.has_unfinished():
        found.add(engine.step())
    return found["a", 0]


def close(session: Session) -> None:
    if session.split is not None:
        session.split.close()
