"""The registry of ways to draft: those of this package, and those of entry points."""

from functools import cache

from hybridrt.base.errors import ConfigError
from hybridrt.base.plugins import Plugins

# "module:object" of each method's hybridrt.speculative.method.DraftMethod.
BUILT_IN = {
    "ngram": "hybridrt.speculative.ngram:METHOD",
    "draft": "hybridrt.speculative.draft_model:METHOD",
    "mtp": "hybridrt.speculative.mtp:METHOD",
}


class DraftMethodBase:
    """Base of `hybridrt.speculative.method.DraftMethod`: what a SpeculativeConfig asks of its
    method.

    Attributes:
        takes_model: the method needs SpeculativeConfig.draft_model; other methods refuse it.
        on_device: the method has a `DraftNeeds.device_drafter`. Steps with prompts then have no graphs.
    """

    takes_model = False
    on_device = False


DRAFTERS = Plugins("hybridrt.drafters", BUILT_IN, "method", DraftMethodBase, ConfigError)


@cache
def load_method(name: str) -> DraftMethodBase:
    """The method of a name.

    Raises:
        ConfigError: there is none of that name.
        BackendError: its package cannot be imported, or provides something else.
    """
    return DRAFTERS.load(name)
