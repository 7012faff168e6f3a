"""Which prompts get log-probabilities, and the device memory that they need."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hybridrt.base.sampling_params import MAX_LOGPROBS
from hybridrt.runtime.step.pack import ScoredTokens
from hybridrt.runtime.step.plan import Admission, ExtendRow

# Reading the head's weights does not dominate, and the logits are small compared with activations.
LINES = 128


def prompt_logprob_bytes(vocab_size: int, itemsize: int) -> int:
    """Most bytes on the device: logits, those of all ranks, two copies in float32, and the results."""
    return LINES * (vocab_size * (2 * itemsize + 8) + (MAX_LOGPROBS + 1) * 12)


class Wanted(NamedTuple):
    """The prompt tokens of a chunk that get log-probabilities, with `top` alternatives each."""

    row: int
    tokens: Sequence[int]
    top: int


class PromptRequirements:
    """The request rows that need log-probabilities of their prompts, on the host."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[int, int]] = {}  # alternatives, and tokens of the prompt

    def note_admissions(self, admissions: Sequence[Admission]) -> None:
        for a in admissions:
            self._rows.pop(a.row, None)
            if a.params.prompt_logprobs is not None:
                self._rows[a.row] = a.params.prompt_logprobs, a.prompt_len

    def wanted_by_rows(
        self, extend: Sequence[ExtendRow], decoded: int
    ) -> tuple[list[Wanted], ScoredTokens[np.ndarray] | None]:
        """What a step's chunks give.

        Args:
            decoded: tokens of the decode rows before them.

        Returns:
            The wanted tokens; and their places in the batch, for the step's record, None where
                there are none.
        """
        wanted, places = list[Wanted](), list[np.ndarray]()
        for chunk in extend if self._rows else ():
            top, prompt_len = self._rows.get(chunk.row, (0, 0))
            count = min(len(chunk.tokens), prompt_len - 1 - chunk.computed)
            if count > 0:
                wanted.append(Wanted(chunk.row, [*chunk.tokens[1:], chunk.following][:count], top))
                places.append(np.arange(decoded, decoded + count, dtype=np.int32))
            decoded += len(chunk.tokens)
        if not wanted:
            return [], None
        tokens = np.array([token for each in wanted for token in each.tokens], np.int32)
        return wanted, ScoredTokens(np.concatenate(places), tokens)
