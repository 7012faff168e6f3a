"""Finds the first of several strings in text that comes in pieces (Aho and Corasick 1975)."""

from collections.abc import Sequence


class StopStrings:
    """A machine that reads each character once, however many strings there are and however long they are.

    A state is the longest end of what was read that begins a string: a node of the strings' prefix tree, 0 its root.

    Args:
        strings: what to find, none of them empty.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = sorted(strings, key=len)
        states = sorted(dict.fromkeys(["", *(s[:end] for s in strings for end in range(1, len(s) + 1))]), key=len)
        number = {text: state for state, text in enumerate(states)}
        self._depth = list(map(len, states))
        self._next: list[dict[str, int]] = [{} for _ in states]
        self._shorter = [0] * len(states)  # of a state's ends, the longest other one that begins a string
        self._found = [0] * len(states)  # length of the longest string that ends in a state, 0 if none does
        for string in strings:
            self._found[number[string]] = len(string)
        for state, text in enumerate(states[1:], 1):  # short ones first: long ones look at their ends
            before, last = number[text[:-1]], text[-1]
            self._next[before][last] = state
            if before:
                self._shorter[state] = self._step(self._shorter[before], last)
            self._found[state] = self._found[state] or self._found[self._shorter[state]]

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

    def _step(self, state: int, character: str) -> int:
        while state and character not in self._next[state]:
            state = self._shorter[state]
        return self._next[state].get(character, 0)
