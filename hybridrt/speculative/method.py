"""A way of drafting, which a configuration names, and the drafter that it makes for a target."""

from abc import ABC, abstractmethod

from hybridrt.base.draft_methods import load_method
from hybridrt.base.engine_config import SpeculativeConfig
from hybridrt.base.errors import BackendError
from hybridrt.runtime.load.draft_needs import DraftNeeds, DraftTarget, Everywhere
from hybridrt.runtime.run.step_runner import StepRunner
from hybridrt.speculative.drafter import AdaptiveDrafter, Drafter


class DraftMethod(DraftNeeds, ABC):
    """A way of drafting. A subclass makes the drafter, and overrides the needs."""

    @abstractmethod
    def drafter(self, runner: DraftTarget, everywhere: Everywhere) -> Drafter:
        """The part that proposes, on rank 0.

        Args:
            runner: the target's, complete.
            everywhere: drafts with the device drafters of all ranks.

        Raises:
            ConfigError: it cannot draft for this target.
        """


def draft_method(config: SpeculativeConfig) -> DraftMethod:
    """The configured method. BackendError if an entry point names something else."""
    method = load_method(config.method)
    if not isinstance(method, DraftMethod):
        raise BackendError(f"method {config.method!r} leads to {method!r}; it must be a DraftMethod")
    return method


def make_drafter(target: StepRunner, everywhere: Everywhere | None = None) -> Drafter:
    """The drafter of the target's configuration.

    Args:
        everywhere: drafts on all tensor-parallel ranks; None for a single one.

    Raises:
        ConfigError: the method cannot draft for this target.
    """
    spec = target.config.speculative
    assert spec is not None
    inner = draft_method(spec).drafter(target, everywhere or target.draft)
    return AdaptiveDrafter(inner, spec.num_draft_tokens)
