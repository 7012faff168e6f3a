"""The key of cached entries: requests share pages and states with those of an equal key alone."""

from typing import NamedTuple


class CacheKey(NamedTuple):
    """What KV and states depend on besides the tokens. Every cached thing has one: (key, token ids)
    name its pages and states in the prefix tree, in main memory, in a session and in a transfer.

    Attributes:
        salt: SamplingParams.cache_salt; "" without.
        weights: version of the weights. "" (always, so far): as loaded. Sessions and transfers
            compare a digest of the checkpoint too (`state_identity`).
        adapter: hash of the adapter. "" (always, so far): none.
    """

    salt: str = ""
    weights: str = ""
    adapter: str = ""

    def other_than_salt(self) -> dict[str, str]:
        """The fields that another process must have too, by name, without empty ones."""
        return {name: value for name, value in self._asdict().items() if value and name != "salt"}


DEFAULT_KEY = CacheKey()
