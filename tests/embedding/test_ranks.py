"""A model over several ranks of a host engine."""

import threading
from typing import Any

import pytest
import torch
from torch import distributed

from hybridrt.base.errors import ConfigError
from hybridrt.embedding import EngineConfig, TPGroup, join_ranks, load, plan_memory
from tests.support.checkpoints import CheckpointStore
from tests.support.embedded import LENGTH, ROWS, continuation, make, start


@pytest.mark.parametrize(
    ("name", "size", "options"),
    [
        ("falcon-split", 2, {"state_mode": "replay"}),
        pytest.param("qwen-split", 2, {"expert_parallel": True}, marks=pytest.mark.slow),
        pytest.param("nemotron-split_groups", 2, {"state_mode": "classic"}, marks=pytest.mark.slow),
        pytest.param("qwen-split", 4, {}, marks=pytest.mark.slow),
    ],
)
def test_each_rank_has_the_logits_of_one(
    name: str, size: int, options: dict[str, Any], checkpoints: CheckpointStore
) -> None:
    store, results, fields = distributed.HashStore(), dict[int, Any](), options | {"device": "cpu", "dtype": "float32"}
    fields |= {"max_running_requests": ROWS, "max_model_len": LENGTH, "page_size": 4}
    path = str(checkpoints[name].path)

    def run(rank: int) -> None:
        group = join_ranks(store, rank, size, device="cpu", loopback=True)
        loaded = load(EngineConfig(path, tp_size=size, **fields), tp=group)
        plan = plan_memory(loaded, budget_bytes=2**24 >> rank)
        runtime = make(loaded)
        results[rank] = plan, continuation(runtime, start(runtime), 5, 12)
        assert group.comm is not None
        group.comm.close()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    alone = {key: value for key, value in fields.items() if key != "expert_parallel"}
    runtime = make(load(EngineConfig(path, **alone)))
    wanted = continuation(runtime, start(runtime), 5, 12)
    for rank in range(size):
        assert torch.equal(results[rank][1], results[0][1]), "the same bits on each rank"
        torch.testing.assert_close(results[rank][1], wanted, rtol=1e-3, atol=1e-4)
        assert results[rank][0] == results[0][0], "the smallest budget counts"


def test_arguments_that_do_not_belong_together_are_refused() -> None:
    store: Any = distributed.HashStore()
    for given, text in (((None, 0, 1), "store is None"), ((store, 2, 2), "rank is 2"), ((store, 0, 0), "size is 0")):
        with pytest.raises(ConfigError, match=text):
            join_ranks(*given, device="cpu")
    for size, group in ((2, None), (2, TPGroup()), (1, TPGroup(0, 2))):
        with pytest.raises(ConfigError, match=f"tp_size is {size}, and tp is a group of "):
            load(EngineConfig("embedded", tp_size=size), tp=group)
