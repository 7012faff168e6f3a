"""What all tiny checkpoints have in common."""

from collections.abc import Callable
from typing import Any

VOCAB = 131
LENGTH = 256
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
Make = Callable[[], tuple[Any, Any]]
