"""Follows grammars of structured outputs token by token, with llguidance: which tokens may come next, as bitmasks."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, count
from typing import TYPE_CHECKING

import numpy as np

from hybridrt.errors import GrammarError
from hybridrt.speculative.drafter import Draft

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher


class Grammar:
    """A compiled grammar. Any thread may use it.

    Copies of an LLMatcher share one lexer behind a lock: their masks are computed one after the other, however many
    threads there are. So a grammar may have several roots, each with a lexer of its own, and its matchers are copies of
    the roots in turn.

    Args:
        root: has taken no token and computed a first mask.
        eos: tokens that end an output.
        cheap: it takes little time to compile, so that it may be compiled again.

    Attributes:
        roots: one or more, all alike.
    """

    def __init__(self, root: "LLMatcher", eos: frozenset[int], cheap: bool = True) -> None:
        self.roots: tuple[LLMatcher, ...] = (root,)
        self.eos, self.cheap = eos, cheap
        self._turn = count()

    def start(self) -> "tuple[int, LLMatcher]":
        """The number of the next root, and a copy of it."""
        roots = self.roots
        number = next(self._turn) % len(roots)
        return number, roots[number].deep_copy()


class Matcher:
    """Follows the output of one sample.

    Args:
        grammar: what the output follows.
        started: the number of a root, and a copy of it that has taken the output so far. None: the matcher starts when
            it is first needed, when the grammar may have more roots.
    """

    def __init__(self, grammar: Grammar, started: "tuple[int, LLMatcher] | None" = None) -> None:
        self._grammar = grammar
        if started is not None:
            self._started = started

    @cached_property
    def _started(self) -> "tuple[int, LLMatcher]":
        return self._grammar.start()

    @property
    def root(self) -> int:
        """The number of the grammar's root whose lexer this matcher uses."""
        return self._started[0]

    @property
    def inner(self) -> "LLMatcher":
        """llguidance's matcher, which has taken the output so far."""
        return self._started[1]

    def copy(self) -> "Matcher":
        """A matcher in the same state, independent of this one."""
        started = (self.root, self.inner.deep_copy()) if "_started" in self.__dict__ else None
        return Matcher(self._grammar, started)

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
            end = next((i for i, token in enumerate(draft.tokens) if token in self._grammar.eos), len(draft))
            return draft.first(self.inner.validate_tokens(list(draft.tokens[:end])))
        kept = set[int]()
        self._walk(draft, 0, kept)
        number = {0: 0} | {node: i for i, node in enumerate(sorted(kept), 1)}
        parents = [number[draft.parents[node - 1]] for node in sorted(kept)]
        return Draft.of_tree([draft.tokens[node - 1] for node in sorted(kept)], parents)

    def _walk(self, draft: Draft, node: int, kept: set[int]) -> None:
        for child in _children(draft, node):
            token = draft.tokens[child - 1]
            if token not in self._grammar.eos and self.inner.try_consume_tokens([token]):
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
    are computed in the executor's threads, without Python's lock. A thread takes neighbours, so those of one root stand
    together: two threads would wait for its lexer."""
    from llguidance.numpy import fill_next_token_bitmask_par, fill_next_token_bitmask_par_with_draft_tokens

    starts = [0, *accumulate(1 + len(row.draft) for row in rows)]
    masks = np.full((starts[-1], words), -1, np.int32)
    live = [(row.matcher, row.draft, start) for row, start in zip(rows, starts) if row.matcher is not None]
    plain, drafted = [], []
    for matcher, draft, start in sorted(live, key=lambda row: row[0].root):
        if draft.parents is not None:
            matcher.fill_tree(draft, masks[start : start + 1 + len(draft)])
        elif len(draft):
            drafted.append((matcher.inner, start, list(draft.tokens)))
        else:
            plain.append((matcher.inner, start))
    if plain:
        fill_next_token_bitmask_par(executor, plain, masks)
    if drafted:
        fill_next_token_bitmask_par_with_draft_tokens(executor, drafted, masks)
    return masks


def shortened(text: str) -> str:
    """The text of an llguidance error in one line of at most 500 characters."""
    return " ".join(text.split())[:500]
