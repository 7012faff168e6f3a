"""From a SpeculativeConfig to a drafter."""

from hybridrt.runtime.drafting import Everywhere, draft_method
from hybridrt.runtime.model_runner import ModelRunner
from hybridrt.speculative.drafter import AdaptiveDrafter, Drafter


def make_drafter(target: ModelRunner, everywhere: Everywhere | None = None) -> Drafter:
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
