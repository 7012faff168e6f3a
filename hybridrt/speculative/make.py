"""From a SpeculativeConfig to a drafter."""

from hybridrt.runtime.model_runner import ModelRunner
from hybridrt.speculative.draft_model import DraftModelDrafter
from hybridrt.speculative.drafter import AdaptiveDrafter, Drafter
from hybridrt.speculative.mtp import Everywhere, MTPDrafter
from hybridrt.speculative.ngram import NgramDrafter


def make_drafter(target: ModelRunner, everywhere: Everywhere | None = None) -> Drafter:
    """The drafter that the target's configuration names.

    Args:
        everywhere: reaches the target's tensor-parallel ranks; None where `target` is all there is.

    Raises:
        ConfigError: the draft model's vocabulary is another.
    """
    spec = target.config.speculative
    assert spec is not None
    inner: Drafter
    if target.mtp is not None:
        inner = MTPDrafter(everywhere or (lambda task: task(target)), spec.num_draft_tokens, spec.topk)
    elif spec.method == "draft":
        inner = DraftModelDrafter(target.config, target.plan, target.model_config.vocab_size)
    else:
        inner = NgramDrafter(topk=spec.topk)
    return AdaptiveDrafter(inner, spec.num_draft_tokens)
