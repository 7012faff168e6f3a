"""Log-probabilities of many tokens as arrays: 8 bytes an entry, over a hundred in a dict."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class TokenScores:
    """Natural log-probabilities of N consecutive tokens, and of the k likeliest tokens at each
    place, best first.

    Shapes: tokens [N] int32, own [N] float32; ids [N, k] int32, best [N, k] float32.
    """

    tokens: np.ndarray
    own: np.ndarray
    ids: np.ndarray
    best: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def width(self) -> int:
        """Most entries of a token: its own, and the likeliest."""
        return 1 + self.ids.shape[1]

    @property
    def finite(self) -> bool:
        """No entry is NaN. Minus infinity is allowed."""
        return not (np.isnan(self.own).any() or np.isnan(self.best).any())

    def part(self, start: int, end: int | None = None) -> "TokenScores":
        """The scores of tokens start to end - 1, without a copy."""
        return TokenScores(self.tokens[start:end], self.own[start:end], self.ids[start:end], self.best[start:end])

    def entries(self) -> list[dict[int, float]]:
        """A dictionary for each token, its own entry first."""
        rows = zip(*(part.tolist() for part in (self.tokens, self.own, self.ids, self.best)), strict=True)
        return [{token: own, **dict(zip(ids, best, strict=True))} for token, own, ids, best in rows]
