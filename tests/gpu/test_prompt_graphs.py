"""A replay of a step with prompts is the same step without a graph, bit for bit, and close to the unpadded step."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hybridrt.runtime.replay.prompt_graphs import PromptGraphs
from hybridrt.runtime.step.pack_padded import PROMPT_ROWS, StateSaves
from hybridrt.runtime.step.plan import StepPlan
from tests.gpu.rig import DECODING, DEVICE, FAMILIES, PRODUCTION, Owned, Rows, pool_tensors, same_bits
from tests.support.checkpoints import CheckpointStore
from tests.support.prompt_steps import Play

pytestmark = PRODUCTION
LENGTHS = [1 + 7 * i % 40 for i in range(12)]
LONGEST = 240


class Steps:
    """Runs a step from the same pools in several ways."""

    def __init__(self, path: Path, **config: Any) -> None:
        self.rows = Rows(path, LENGTHS, max_model_len=256, **config)
        self.runner = self.rows.runner
        if DEVICE == "cpu":
            self.runner.capture()
        assert self.runner.prompt_graphs is not None
        self.graphs: PromptGraphs = self.runner.prompt_graphs
        self.runner.graphs.clear()
        self.tensors = pool_tensors(self.runner.pools) | {"last tokens": self.runner.last_tokens[None]}
        self.before = self.snapshot()
        self.logits: list[Tensor] = []
        sampler: Any = self.runner.sampler
        self.runner.sampler = lambda logits, *more: (self.logits.append(logits.clone()), sampler(logits, *more))[1]  # type: ignore[assignment,func-returns-value]

    @property
    def spare(self) -> int:
        """The first of the slots of no row."""
        first = self.rows.spare[0]
        assert self.rows.spare == [*range(first, first + PROMPT_ROWS)]
        return first

    def snapshot(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.tensors.items()}

    def run(self, plan: StepPlan, graphs: PromptGraphs | None) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Logits, and the pools after the step."""
        for name, tensor in self.tensors.items():
            tensor.copy_(self.before[name])
        self.logits = []
        self.runner.prompt_graphs = graphs
        self.runner.launch(plan).result()
        return self.logits, self.snapshot()

    def directly(self, plan: StepPlan) -> tuple[list[Tensor], dict[str, Tensor]]:
        """The function that was recorded, over the same buffers."""
        bucket = self.graphs.bucket(plan)
        assert bucket is not None
        graph = self.graphs._graphs[bucket]
        recorded, graph.replay = graph.replay, self.graphs._bind(graph)
        try:
            return self.run(plan, self.graphs)
        finally:
            graph.replay = recorded

    def check(self, plan: StepPlan, tolerance: float | None) -> None:
        """`tolerance`: of the eager step without padding, over a tensor's largest value; None: do not compare."""
        wanted, wanted_pools = self.directly(plan)
        plain, plain_pools = self.run(plan, None)
        got, pools = self.run(plan, self.graphs)
        assert len(got) == len(wanted) == len(plain)
        for line in zip(got, wanted):
            assert line[0].isfinite().all() and same_bits(*line)
        for name, tensor in pools.items():
            assert same_bits(tensor[:, 1:], wanted_pools[name][:, 1:]), name
        if tolerance is not None:
            for line in zip(got, plain):
                assert_near(*line, tolerance, "logits")
            for name, tensor in pools.items():
                if name == "slabs":
                    self.check_slabs(tensor, plain_pools[name], tolerance)
                else:
                    assert_near(tensor[:, 1:], plain_pools[name][:, 1:], tolerance, name)
        self.before = pools

    def check_slabs(self, got: Tensor, wanted: Tensor, tolerance: float) -> None:
        """Numbers of pages and states are near, and all other bytes are the same, but for scratch."""
        pages = np.concatenate([*self.rows.pages.values()]).T.tolist()
        owned = Owned(self.runner.pools, pages, [*self.rows.slots, *self.rows.spare])
        near = owned.numbers(wanted)
        for name, tensor in owned.numbers(got).items():
            assert_near(tensor, near[name], tolerance, name)
        assert not owned.others_changed(torch.cat((wanted[:, :1], got[:, 1:]), 1), wanted)


def assert_near(got: Tensor, wanted: Tensor, tolerance: float, what: str) -> None:
    got, wanted = got.float(), wanted.float()
    assert torch.equal(got.isnan(), wanted.isnan()), what
    error = (got - wanted).nan_to_num(0.0).abs().max() / wanted.nan_to_num(0.0).abs().max().clamp(1.0, 100.0)
    assert error <= tolerance, f"{what}: {error:.1e}"


def check_all(path: Path, tolerance: float | None, steps: int, *, saves: bool = True, **config: Any) -> None:
    made = Steps(path, prefix_cache=saves, **config)
    spare = made.spare if made.graphs.saves is not StateSaves.NONE else None
    play = Play(
        dict(made.rows.computed), spare, 5, tokens=200, longest=LONGEST, prompts=4, decoding=len(LENGTHS) - 1,
        most_saves=made.graphs.saves.most,
    )  # fmt: skip
    for _ in range(steps):
        plan = play.step()
        if plan.extend:
            made.check(plan, tolerance)


@pytest.mark.parametrize(("name", "state_mode"), DECODING)
def test_steps(name: str, state_mode: str, checkpoints: CheckpointStore) -> None:
    check_all(checkpoints[name].path, 2e-3, 10, state_mode=state_mode)


@pytest.mark.parametrize("name", FAMILIES)
def test_steps_that_save_no_states(name: str, checkpoints: CheckpointStore) -> None:
    check_all(checkpoints[name].path, 2e-3, 6, saves=False)


@pytest.mark.parametrize("name", [*FAMILIES, "kimi-plain", "lfm2-biases_tied", "jamba-plain"])
def test_steps_in_bfloat16(name: str, checkpoints: CheckpointStore) -> None:
    check_all(checkpoints[name].path, None, 10, dtype="bfloat16")


@pytest.mark.parametrize("name", FAMILIES)
@torch.inference_mode()
def test_a_thousand_replays_are_alike(name: str, checkpoints: CheckpointStore) -> None:
    """Kernels of a step that start before the one in front has ended would read what it has not written yet."""
    made = Steps(checkpoints[name].path, dtype="bfloat16")
    play = Play(dict(made.rows.computed), made.spare, 5, tokens=200, longest=LONGEST, prompts=4, decoding=11)
    while not (len((plan := play.step()).decode) and len(plan.extend) > 2):
        made.check(plan, None)
    bucket = made.graphs.bucket(plan)
    assert bucket is not None
    first = made.graphs.replay(plan, bucket).logits.clone()
    different = torch.zeros((), dtype=torch.int64, device=first.device)
    for _ in range(1000):
        for name_, tensor in made.tensors.items():
            tensor.copy_(made.before[name_])
        different += (made.graphs.replay(plan, bucket).logits != first).any()
    assert first.isfinite().all() and not different
