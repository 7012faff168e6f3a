"""Follows grammars of structured outputs token by token, with llguidance: which tokens may come next, as bitmasks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hybridrt.errors import GrammarError
from hybridrt.speculative.drafter import Draft

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher


class Matcher:
    """Follows the output of one sample.

    Args:
        inner: llguidance's matcher, which has taken the output so far.
        eos: tokens that end an output.
    """

    def __init__(self, inner: "LLMatcher", eos: frozenset[int]) -> None:
        self.inner, self._eos = inner, eos

    def copy(self) -> "Matcher":
        """A matcher in the same state, independent of this one."""
        return Matcher(self.inner.deep_copy(), self._eos)

    def advance(self, token: int) -> bool:
        """Takes a token of the output, other than one that ends it. Returns True if the output is complete and no token
        may follow.

        Raises:
            GrammarError: the grammar forbids the token, or a limit of llguidance is exceeded.
        """
        if not self.inner.consume_token(token):
            self.check()
        return self.inner.is_stopped()

    def check(self) -> None:
        """Raises GrammarError if llguidance has exceeded a limit: its answers are not valid after that."""
        if self.inner.is_error():
            reason = shortened(self.inner.get_error())
            raise GrammarError(f"structured_outputs cannot be followed any further: {reason}")

    def mask(self) -> np.ndarray:
        """int32 words up to the last token that the tokenizer knows: the tokens that may come next, a bit each."""
        return np.frombuffer(self.inner.compute_bitmask(), np.int32)

    def allowed(self, draft: Draft) -> Draft:
        """The nodes of a draft that may follow, those before them included. Tokens that end an output are left out:
        nothing follows them, and the draw before them gives them as well."""
        if draft.parents is None:
            end = next((i for i, token in enumerate(draft.tokens) if token in self._eos), len(draft))
            return draft.first(self.inner.validate_tokens(list(draft.tokens[:end])))
        kept = set[int]()
        self._walk(draft, 0, kept)
        number = {0: 0} | {node: i for i, node in enumerate(sorted(kept), 1)}
        parents = [number[draft.parents[node - 1]] for node in sorted(kept)]
        tokens = [draft.tokens[node - 1] for node in sorted(kept)]
        return Draft(tokens, None if parents == list(range(len(parents))) else parents)

    def _walk(self, draft: Draft, node: int, kept: set[int]) -> None:
        for child in _children(draft, node):
            token = draft.tokens[child - 1]
            if token not in self._eos and self.inner.try_consume_tokens([token]):
                kept.add(child)
                self._walk(draft, child, kept)
                self.inner.rollback(1)

    def fill_tree(self, draft: Draft, masks: np.ndarray, node: int = 0) -> None:
        """Writes the mask behind each node of a draft that the grammar allows: [1 + nodes, words] int32."""
        from llguidance.numpy import fill_next_token_bitmask

        fill_next_token_bitmask(self.inner, masks, node)
        for child in _children(draft, node):
            if self.inner.try_consume_tokens([draft.tokens[child - 1]]):
                self.fill_tree(draft, masks, child)
                self.inner.rollback(1)


def _children(draft: Draft, node: int) -> list[int]:
    """Numbers of a node's successors; 0 is the root."""
    return [i for i, parent in enumerate(draft.parents or (), 1) if parent == node]


@dataclass(frozen=True, slots=True)
class MaskedRow:
    """A row of a step that needs masks: one for its next token, and one behind each of its drafts.

    Attributes:
        matcher: None: all tokens are allowed, because the row's request has ended.
    """

    matcher: Matcher | None
    draft: Draft


def fill_masks(rows: Sequence[MaskedRow], words: int, executor: "LLExecutor") -> np.ndarray:
    """[sum(1 + len(draft)), words] int32, bit i % 32 of word i // 32 set where token i may follow. The masks of chains
    are computed in the executor's threads, without Python's lock."""
    from llguidance.numpy import fill_next_token_bitmask_par, fill_next_token_bitmask_par_with_draft_tokens

    masks = np.full((sum(1 + len(row.draft) for row in rows), words), -1, np.int32)
    plain, drafted, start = [], [], 0
    for row in rows:
        end = start + 1 + len(row.draft)
        if row.matcher is not None and row.draft.parents is not None:
            row.matcher.fill_tree(row.draft, masks[start:end])
        elif row.matcher is not None and len(row.draft):
            drafted.append((row.matcher.inner, start, list(row.draft.tokens)))
        elif row.matcher is not None:
            plain.append((row.matcher.inner, start))
        start = end
    if plain:
        fill_next_token_bitmask_par(executor, plain, masks)
    if drafted:
        fill_next_token_bitmask_par_with_draft_tokens(executor, drafted, masks)
    return masks


def shortened(text: str) -> str:
    """The text of an llguidance error in one line of at most 500 characters."""
    return " ".join(text.split())[:500]
