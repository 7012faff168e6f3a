"""Finds the first of several strings in text that comes in pieces (Aho and Corasick 1975)."""

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """A machine that reads each character once, however many strings there are and however long they are.

    A state is the longest end of what was read that begins a string: a node of the strings' prefix tree, 0 its root.

    Args:
        strings: what to find, none of them empty.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = sorted(strings, key=len)
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._found = [0]  # length of the longest string that ends in a state, 0 if none does
        for string in strings:
            self._insert(string)
        self._link()

    def scan(self, state: int, text: str) -> tuple[int, int]:
        """Reads on from `state`.

        Returns:
            The new state, and how many characters stand behind the beginning of the first string that was found: that
            many belong to it or come after it. 0 if none was found.
        """
        behind = 0
        for read, character in enumerate(text, 1):
            state = self._step(state, character)
            if self._found[state]:
                behind = max(behind, self._found[state] + len(text) - read)
        return state, behind

    def string_at(self, text: str, start: int) -> str:
        """The string that ends first of those which begin at `start`, as `scan` has found there."""
        return next(string for string in self._strings if text.startswith(string, start))

    def held(self, state: int) -> int:
        """Characters at the end of what was read that may be the beginning of a string."""
        return self._depth[state]

    def _insert(self, string: str) -> None:
        node = 0
        for character in string:
            child = self._next[node].get(character)
            if child is None:
                child = self._next[node][character] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[node] + 1)
                self._found.append(0)
            node = child
        self._found[node] = len(string)

    def _link(self) -> None:
        """For every state the next shorter end that begins a string; the shallow ones first, for those behind them."""
        self._shorter = [0] * len(self._next)
        queue = deque(self._next[0].values())
        while queue:
            node = queue.popleft()
            for character, child in self._next[node].items():
                self._shorter[child] = self._step(self._shorter[node], character)
                queue.append(child)
            self._found[node] = self._found[node] or self._found[self._shorter[node]]

    def _step(self, state: int, character: str) -> int:
        while state and character not in self._next[state]:
            state = self._shorter[state]
        return self._next[state].get(character, 0)
