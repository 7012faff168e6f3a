"""From a SpeculativeConfig to a drafter."""

from hybridrt.config import EngineConfig
from hybridrt.errors import ConfigError
from hybridrt.mem_cache.memory_plan import MemoryPlan
from hybridrt.speculative.draft_model import DraftModelDrafter
from hybridrt.speculative.drafter import AdaptiveDrafter, Drafter
from hybridrt.speculative.ngram import NgramDrafter


def make_drafter(config: EngineConfig, plan: MemoryPlan, vocab_size: int) -> Drafter:
    """The drafter that `config.speculative` names.

    Raises:
        ConfigError: it is not available for this model, or its vocabulary is another.
    """
    spec = config.speculative
    assert spec is not None
    if spec.method == "ngram":
        return AdaptiveDrafter(NgramDrafter(topk=spec.topk), spec.num_draft_tokens)
    if spec.method == "draft":
        return AdaptiveDrafter(DraftModelDrafter(config, plan, vocab_size), spec.num_draft_tokens)
    raise ConfigError('method "mtp" is not available yet; use "ngram" or "draft"')
