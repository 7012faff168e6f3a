"""Follows grammars token by token with llguidance, and makes bitmasks of the next tokens."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from hybridrt.base.errors import GrammarError
from hybridrt.engine.grammar.mask_time import Allowance, thread_seconds
from hybridrt.engine.grammar.thinking import ThinkingState
from hybridrt.speculative.draft import Draft

if TYPE_CHECKING:
    from llguidance import LLMatcher


class Grammar:
    """A compiled grammar. Any thread may use it.

    Copies of an LLMatcher share one lexer with a lock, so their masks are computed one after the
    other. So a grammar may have several roots, each with its own lexer; its matchers are copies of
    the roots in turn.

    Args:
        root: has read no token and computed a first mask.
        eos: tokens that end an output.
        text: its source.
        cheap: it compiles fast, so it may be compiled again.
        takes_back: llguidance can take tokens back: not if a rule has max_tokens or stop.

    Attributes:
        roots: one or more, all alike.
    """

    def __init__(
        self, root: "LLMatcher", eos: frozenset[int], text: str, cheap: bool = True, takes_back: bool = True
    ) -> None:
        self.roots: tuple[LLMatcher, ...] = (root,)
        self.eos, self.text, self.cheap, self.takes_back = eos, text, cheap, takes_back
        self._turn = count()

    def start(self) -> "tuple[int, LLMatcher]":
        roots = self.roots
        number = next(self._turn) % len(roots)
        return number, roots[number].deep_copy()


class Matcher:
    """Follows the output of one sample.

    Args:
        grammar: the grammar of the output.
        started: the number of a root of the grammar, and a copy of that root which has read the
            output so far. None: it is copied on first use, when the grammar may have more roots.
        thinking: where the output is in its reasoning; None: not in reasoning.

    Attributes:
        allowance: time for its tokens and masks.
    """

    def __init__(
        self,
        grammar: Grammar,
        started: "tuple[int, LLMatcher] | None" = None,
        thinking: ThinkingState | None = None,
    ) -> None:
        self._grammar, self.thinking, self.allowance = grammar, thinking, Allowance()
        if started is not None:
            self._started = started

    @cached_property
    def _started(self) -> "tuple[int, LLMatcher]":
        return self._grammar.start()

    @property
    def root(self) -> int:
        return self._started[0]

    @property
    def inner(self) -> "LLMatcher":
        """llguidance's matcher, which has read the output so far, without reasoning."""
        return self._started[1]

    @property
    def plain(self) -> bool:
        """llguidance alone follows the output, and can take drafts back."""
        return self.thinking is None and self._grammar.takes_back

    def copy(self) -> "Matcher":
        started = (self.root, self.inner.deep_copy()) if "_started" in self.__dict__ else None
        return Matcher(self._grammar, started, self.thinking)

    def advance(self, token: int) -> bool:
        """Reads a token of the output that does not end it. True if the output is complete and no
        token may follow.

        Raises:
            GrammarError: the grammar forbids the token, or a limit of llguidance or of time is
                exceeded.
        """
        with thread_seconds() as taken:
            if self.thinking is not None:
                self.thinking, read = self.thinking.after(token)
                if not read:
                    return False
            if not self.inner.consume_token(token):
                self.check_limits()
        self.allowance.advanced(taken[0])
        if self.inner.is_stopped():  # the output is of use, however long it took
            return True
        self.allowance.check_time()
        return False

    def check_limits(self) -> None:
        """Raises GrammarError if a limit is exceeded: llguidance's answers are then invalid."""
        self.allowance.check_time()
        if self.inner.is_error():
            reason = shortened(self.inner.get_error())
            raise GrammarError(f"structured_outputs cannot be followed any further: {reason}")

    def mask(self) -> np.ndarray:
        """int32 words up to the tokenizer's last token: one bit for each token that may come next."""
        mask = np.frombuffer(self.inner.compute_bitmask(), np.int32).copy()
        if self.thinking is not None:
            self.thinking.fill(mask)
        return mask

    def allowed(self, draft: Draft) -> Draft:
        """The nodes of a draft that may follow, with those before them. Tokens that end an output
        are left out: nothing follows them, and the draw before them gives them too.
        """
        with thread_seconds() as taken:
            found = self._allowed(draft)
        self.allowance.spend(taken[0])
        return found

    def _allowed(self, draft: Draft) -> Draft:
        if draft.is_chain and self.plain:
            end = next((i for i, token in enumerate(draft.tokens) if token in self._grammar.eos), len(draft))
            return draft.first(self.inner.validate_tokens(list(draft.tokens[:end])))
        kept = set[int]()
        self._walk(draft, 0, (self.inner, self.thinking), kept)
        return draft.only(kept)

    def _walk(self, draft: Draft, node: int, state: "_State", kept: set[int]) -> None:
        for child in draft.followers(node):
            token = draft.tokens[child - 1]
            if token not in self._grammar.eos:
                with self._taken(state, token) as after:
                    if after is not None:
                        kept.add(child)
                        self._walk(draft, child, after, kept)

    @contextmanager
    def _taken(self, state: "_State", token: int) -> "Iterator[_State | None]":
        """Yields the state after it; None if it may not come. Takes it back afterwards."""
        inner, thinking = state
        read = True
        if thinking is not None:
            if not thinking.allows(token):
                yield None
                return
            thinking, read = thinking.after(token)
        if not read:
            yield inner, thinking
            return
        if not self._grammar.takes_back:
            inner = inner.deep_copy()
        taken = inner.try_consume_tokens([token])
        yield (inner, thinking) if taken else None
        if taken and self._grammar.takes_back:
            inner.rollback(1)

    def fill_masks(self, draft: Draft, masks: np.ndarray) -> None:
        """Writes the mask after each allowed node of a draft: [1 + nodes, words] int32."""
        self._fill_node(draft, masks, 0, (self.inner, self.thinking))

    def _fill_node(self, draft: Draft, masks: np.ndarray, node: int, state: "_State") -> None:
        from llguidance.numpy import fill_next_token_bitmask

        inner, thinking = state
        if thinking is None or not thinking.inside:
            fill_next_token_bitmask(inner, masks, node)
        if thinking is not None:
            thinking.fill(masks[node])
        for child in draft.followers(node):
            with self._taken(state, draft.tokens[child - 1]) as after:
                if after is not None:
                    self._fill_node(draft, masks, child, after)


_State = tuple["LLMatcher", ThinkingState | None]


@dataclass(frozen=True, slots=True)
class MaskedRow:
    """A row that needs masks: one for its next token, and one after each of its drafts.

    Attributes:
        matcher: None: all tokens are allowed, because the row's request has ended.
    """

    matcher: Matcher | None
    draft: Draft


def shortened(text: str) -> str:
    return " ".join(text.split())[:500]
