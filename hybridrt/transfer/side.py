"""The parts of an LLM that a transfer needs, on both sides."""

from dataclasses import dataclass

import torch

from hybridrt.base.errors import ConfigError
from hybridrt.engine.api.llm import LLM
from hybridrt.engine.core.engine import Engine
from hybridrt.parallel.tensor_parallel import TensorParallelExecutor
from hybridrt.runtime.run.model_runner import ModelRunner
from hybridrt.runtime.run.state_arena import ImageLayout
from hybridrt.transfer.handshake import Handshake, handshake_of


@dataclass(frozen=True)
class WorkerSide:
    """One side of transfers.

    Attributes:
        engine: runs the requests.
        handshake: what the other side must agree with.
        layout: of the images on each rank.
        arena: rank 0's memory for them, [transfer_bytes] uint8.
        split: the executor that leads the other ranks; None if there are none.
    """

    engine: Engine
    handshake: Handshake
    layout: ImageLayout
    arena: torch.Tensor
    split: TensorParallelExecutor | None = None

    @classmethod
    def from_llm(cls, llm: LLM) -> "WorkerSide":
        """The side of an LLM.

        Raises:
            ConfigError: the LLM was built without `transfer_bytes`.
        """
        executor = llm.engine.executor
        split = executor if isinstance(executor, TensorParallelExecutor) else None
        runner = split.runner if split else executor
        assert isinstance(runner, ModelRunner)
        if runner.arena is None:
            raise ConfigError(
                "this LLM has no arena for states that come or go; build it with transfer_bytes, for example 2**28"
            )
        handshake = handshake_of(runner.config, runner.target, runner.model_path, runner.pools.kv.scales)
        return cls(llm.engine, handshake, runner.arena.layout, runner.arena.buffer, split)
