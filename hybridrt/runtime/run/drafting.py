"""What a method of drafting declares to the runtime: memory, layers, and its parts on the host and the device."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec
import torch

from hybridrt.base.config import EngineConfig, ModelConfig, SpeculativeConfig
from hybridrt.base.draft_methods import DraftMethodBase, load_method
from hybridrt.base.errors import BackendError, ConfigError
from hybridrt.base.forward_batch import ForwardBatch
from hybridrt.base.sampling_params import SamplingParams
from hybridrt.models.base import CausalLM
from hybridrt.runtime.sampling.sampler import Accepted
from hybridrt.runtime.step.pack import Sections
from hybridrt.runtime.step.plan import StepHandle
from hybridrt.speculative.drafter import AdaptiveDrafter, Drafter

if TYPE_CHECKING:
    from hybridrt.runtime.load.build import RunTarget
    from hybridrt.runtime.run.step_runner import StepRunner


class DraftRow(msgspec.Struct, frozen=True, array_like=True):
    """A row to draft for: `computed` tokens have KV, pages are lent up to `end_page`, and the first token to draft is
    number `output_index` of the request's output."""

    row: int
    computed: int
    end_page: int
    output_index: int
    params: SamplingParams


class DeviceDrafter(Protocol):
    """The part of a drafter that every rank runs beside the model. It follows each step, and drafts between steps."""

    def capture(self, max_bs: int, progress: bool = False) -> None:
        """Records its own steps as graphs of up to `max_bs` rows, and adds them to `StepRunner.graphs`."""

    def follow(
        self,
        batch: ForwardBatch,
        hidden: torch.Tensor,
        accepted: Accepted | None,
        sections: Sections | None,
    ) -> None:
        """Behind a step that the model has run and whose tokens are drawn (`StepRunner.last_tokens`). Nothing may wait
        for the host.

        Args:
            batch, hidden: the step and the model's hidden states [T, hidden].
            accepted: of a verify step.
            sections: of a step with extend rows, packed with `following`.
        """

    def draft(self, rows: Sequence[DraftRow], steps: int, topk: int = 1) -> StepHandle:
        """Launches `steps` drafts for each row.

        Returns:
            Of each row, as its tokens: for every place its draft, then the `topk` likeliest tokens there.
        """


class DraftTask(msgspec.Struct, frozen=True):
    """Has a runner's device drafter draft `steps` places: what every rank is told to do."""

    rows: Sequence[DraftRow]
    steps: int
    topk: int

    def __call__(self, runner: "StepRunner") -> StepHandle:
        if runner.drafter is None:
            raise ConfigError("a task to draft on a runner without a device drafter")
        return runner.drafter.draft(self.rows, self.steps, self.topk)


# Calls a task with the runner of every rank; returns what the first one's call returns.
Everywhere = Callable[[DraftTask], StepHandle]


class DraftNeeds(DraftMethodBase):
    """What a way of drafting needs of its target; the defaults need nothing.

    Methods of bytes and pages are asked before anything is loaded, for one rank. The plan charges what they say.
    """

    def attach(self, model: CausalLM) -> None:
        """Adds layers to the target, their weights unset: a prediction head. ConfigError if it cannot have them."""

    def kv_layers(self, model: ModelConfig) -> tuple[int, ...]:
        """Layers beyond the target's own whose keys and values stand in every KV page of its pool."""
        return ()

    def row_pages(self, config: EngineConfig) -> int:
        """KV pages of every row in the target's pool, beside those that requests are lent."""
        return 0

    def row_bytes(self, config: EngineConfig, target: "RunTarget", max_len: int) -> int:
        """Bytes for each running request of at most `max_len` tokens, `row_pages` apart."""
        return 0

    def fixed_bytes(self, config: EngineConfig, target: "RunTarget") -> int:
        """Bytes that do not depend on rows: weights outside the target, buffers of graphs."""
        return 0

    def device_drafter(self, runner: "StepRunner") -> DeviceDrafter | None:
        """The part that runs beside the target on every rank, over its pools; None without one. The graphs of a target
        with one keep the hidden states."""
        return None


class DraftMethod(DraftNeeds, ABC):
    """A way of drafting. A subclass brings the drafter, and overrides what the method needs."""

    @abstractmethod
    def drafter(self, runner: "StepRunner", everywhere: Everywhere) -> Drafter:
        """The part that proposes, on rank 0.

        Args:
            runner: the target's, complete.
            everywhere: reaches the device drafters of all ranks.

        Raises:
            ConfigError: it cannot draft for this target.
        """


def draft_needs(config: EngineConfig) -> DraftNeeds:
    """What the configured method needs; without speculation nothing."""
    return DraftNeeds() if config.speculative is None else draft_method(config.speculative)


def draft_method(config: SpeculativeConfig) -> DraftMethod:
    """The method that a configuration names. BackendError if an entry point leads to something else."""
    method = load_method(config.method)
    if not isinstance(method, DraftMethod):
        raise BackendError(f"method {config.method!r} leads to {method!r}; it must be a DraftMethod")
    return method


def make_drafter(target: "StepRunner", everywhere: Everywhere | None = None) -> Drafter:
    """The drafter that the target's configuration names.

    Args:
        everywhere: reaches the target's tensor-parallel ranks; None where `target` is all there is.

    Raises:
        ConfigError: the method cannot draft for this target.
    """
    spec = target.config.speculative
    assert spec is not None
    inner = draft_method(spec).drafter(target, everywhere or (lambda task: task(target)))
    return AdaptiveDrafter(inner, spec.num_draft_tokens)
