"""Which prompts become one vector, and which hidden states of a step they take."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hybridrt.runtime.step.plan import Admission, ExtendRow


class Pooled(NamedTuple):
    """The tokens `start` to `end` of a step's batch, whose hidden states are summed for a row."""

    row: int
    start: int
    end: int

    def sum(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, hidden] to [hidden] float32."""
        return torch.sum(hidden[self.start : self.end], 0, dtype=torch.float32)


class PoolingRequirements:
    """The request rows whose prompts are pooled, on the host."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[str, int]] = {}  # kind, and tokens of the prompt

    def note_admissions(self, admissions: Sequence[Admission]) -> None:
        for a in admissions:
            self._rows.pop(a.row, None)
            if a.params.pooling is not None:
                self._rows[a.row] = a.params.pooling, a.prompt_len

    def pooled_by_rows(self, extend: Sequence[ExtendRow], decoded: int) -> list[Pooled]:
        """What a step's chunks give. `decoded`: tokens of the decode rows before them."""
        found = list[Pooled]()
        for chunk in extend if self._rows else ():
            kind, prompt_len = self._rows.get(chunk.row, ("", 0))
            count = min(len(chunk.tokens), prompt_len - chunk.computed)
            if kind == "mean" and count > 0:
                found.append(Pooled(chunk.row, decoded, decoded + count))
            elif kind == "last" and count > 0 and chunk.computed + count == prompt_len:
                found.append(Pooled(chunk.row, decoded + count - 1, decoded + count))
            decoded += len(chunk.tokens)
        return found
