"""What a drafting method declares to the runtime: memory, extra layers, and its device part."""

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import torch

from hybridrt.base.draft_methods import DraftMethodBase, load_method
from hybridrt.base.engine_config import EngineConfig
from hybridrt.base.errors import BackendError
from hybridrt.base.forward_batch import ForwardBatch
from hybridrt.base.model_config import ModelConfig
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.mem_cache.pools.memory_plan import MemoryPlan
from hybridrt.mem_cache.pools.pools import Pools
from hybridrt.models.base import CausalLM
from hybridrt.runtime.load.start_kernels import StartAhead
from hybridrt.runtime.load.target import RunTarget
from hybridrt.runtime.replay.graph_runner import GraphRunner
from hybridrt.runtime.sampling.sampler import Accepted, Sampler
from hybridrt.runtime.step.pack import PromptArrays
from hybridrt.runtime.step.plan import StepHandle


class DraftRow(msgspec.Struct, frozen=True, array_like=True):
    """A row to draft for: `computed` tokens have KV, pages before `end_page` are lent, and the
    first draft is number `output_index` of the output."""

    row: int
    computed: int
    end_page: int
    output_index: int
    params: SamplingParams


class DraftTarget(Protocol):
    """What a drafter sees of its target's runner: attributes of `StepRunner`."""

    config: EngineConfig
    model: CausalLM
    model_config: ModelConfig
    memory_plan: MemoryPlan
    pools: Pools
    sampler: Sampler
    last_tokens: torch.Tensor
    device: torch.device
    graphs: dict[int, GraphRunner]
    ahead: StartAhead | None


class DeviceDrafter(Protocol):
    """The part of a drafter that every rank runs. It follows each step, and drafts between steps."""

    def capture(self, max_bs: int, progress: bool = False) -> None:
        """Adds graphs of its steps, of up to `max_bs` rows, to `DraftTarget.graphs`."""

    def follow(
        self,
        batch: ForwardBatch,
        hidden: torch.Tensor,
        accepted: Accepted | None,
        prompts: PromptArrays[torch.Tensor] | None,
    ) -> None:
        """Called after a step's tokens are drawn (`DraftTarget.last_tokens`). Must not wait for the
        host.

        Args:
            batch, hidden: the step and the model's hidden states [T, hidden].
            accepted: accepted tokens of a verify step.
            prompts: extend rows of a step that has some, packed with `following`.
        """

    def draft(self, rows: Sequence[DraftRow], steps: int, topk: int = 1) -> StepHandle:
        """Launches `steps` drafts for each row.

        Returns:
            The handle of [rows, steps * (1 + topk)] tokens: for every step the draft, then the
            `topk` likeliest tokens of its place.
        """


# Calls DeviceDrafter.draft on every rank, and returns the handle of rank 0.
Everywhere = Callable[[Sequence[DraftRow], int, int], StepHandle]


class DraftNeeds(DraftMethodBase):
    """What a drafting method needs of its target; by default nothing.

    Methods of bytes and pages are called before anything is loaded, for one rank. The plan charges
    them.
    """

    def attach(self, model: CausalLM) -> None:
        """Adds layers with unset weights to the target: a prediction head. ConfigError if it cannot
        have them."""

    def kv_layers(self, model: ModelConfig) -> tuple[int, ...]:
        """Further layers with keys and values in every KV page of the target's pool."""
        return ()

    def row_pages(self, config: EngineConfig) -> int:
        """KV pages of every row in the target's pool, in addition to lent ones."""
        return 0

    def row_bytes(self, config: EngineConfig, target: RunTarget, max_len: int) -> int:
        """Bytes for each running request of at most `max_len` tokens, without `row_pages`."""
        return 0

    def fixed_bytes(self, config: EngineConfig, target: RunTarget) -> int:
        """Bytes that do not depend on rows: weights outside the target, buffers of graphs."""
        return 0

    def device_drafter(self, runner: DraftTarget) -> DeviceDrafter | None:
        """The part that every rank runs, over the target's pools. With one, the target's graphs
        keep hidden states."""
        return None


def draft_needs(config: EngineConfig) -> DraftNeeds:
    """The configured method's needs; nothing without speculation. BackendError if an entry point
    names something else."""
    if config.speculative is None:
        return DraftNeeds()
    method = load_method(config.speculative.method)
    if not isinstance(method, DraftNeeds):
        raise BackendError(f"method {config.speculative.method!r} leads to {method!r}; it must be a DraftMethod")
    return method
