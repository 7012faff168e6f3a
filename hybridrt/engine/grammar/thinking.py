"""Follows the reasoning before an answer of a fixed form, and masks the tokens within it.

The grammar reads only from the tag on that ends the reasoning. So a budget is a count: drafts that
are taken back cost nothing, and the mask never changes.
"""

from dataclasses import dataclass, replace

import numpy as np

from hybridrt.base.errors import GrammarError
from hybridrt.base.structured_outputs import Thinking

_NO_LIMIT = 2**62


@dataclass(frozen=True, slots=True)
class ThinkingState:
    """Position of an output before its reasoning, which may be left out, or within it.

    Attributes:
        text: int32 words: the tokens that are text.
        left: how many tokens of reasoning may still come.
    """

    tags: Thinking
    text: np.ndarray
    inside: bool
    left: int

    @classmethod
    def start(cls, tags: Thinking, text: np.ndarray) -> "ThinkingState":
        return cls(tags, text, not tags.opens, _NO_LIMIT if tags.budget is None else tags.budget)

    def allows(self, token: int) -> bool:
        """True if a token may come next. Before the reasoning, the grammar decides too."""
        if not self.inside:
            return token not in self.tags.closes
        return token in self.tags.closes or (self.left > 0 and _has(self.text, token))

    def after(self, token: int) -> "tuple[ThinkingState | None, bool]":
        """The state after a token (None once the reasoning is over), and whether the grammar reads
        the token. GrammarError if it may not come next.
        """
        if not self.allows(token):
            raise GrammarError(
                f"token {token} cannot come within the reasoning: the masks of the request were not used"
            )
        if self.inside:
            ends = token in self.tags.closes
            return (None, True) if ends else (replace(self, left=self.left - 1), False)
        return (replace(self, inside=True), False) if token in self.tags.opens else (None, True)

    def fill(self, mask: np.ndarray) -> None:
        """Writes the tokens that may come next: [words] int32. Before the reasoning, `mask` is the
        grammar's.
        """
        size, closes = len(self.text), self.tags.closes
        if self.inside:
            mask[:] = 0
            if self.left > 0:
                mask[:size] = self.text
            _set(mask, closes, True)
        else:
            _set(mask, closes, False)
            _set(mask, self.tags.opens, True)


def _has(mask: np.ndarray, token: int) -> bool:
    word, bit = divmod(token, 32)
    return word < len(mask) and bool(int(mask[word]) >> bit & 1)


def _set(mask: np.ndarray, tokens: tuple[int, ...], allowed: bool) -> None:
    words = mask.view(np.uint32)
    for token in tokens:
        bit = np.uint32(1 << token % 32)
        words[token // 32] = words[token // 32] | bit if allowed else words[token // 32] & ~bit
