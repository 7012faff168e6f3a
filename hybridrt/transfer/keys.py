"""The key that all workers of a transfer share."""

from hybridrt.channel import keys
from hybridrt.channel.keys import Key

VARIABLE = "HYBRIDRT_TRANSFER_KEY"


def find_key(key: Key | None) -> str | None:
    """The key as text, or a Path of its file; None: HYBRIDRT_TRANSFER_KEY. Raises ConfigError as
    `keys.find_key`.
    """
    return keys.find_key(key, "transfer key", VARIABLE)
