"""Finds the first of several strings in text that comes in pieces (Aho and Corasick 1975)."""

from collections.abc import Iterable, Sequence


class StopStrings:
    """Reads each character once, whatever the number and length of the strings.

    A state is the longest end of the text that begins a string: a node of the strings' prefix tree,
    0 its root.

    Args:
        strings: none of them empty.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = sorted(strings, key=len)
        self._next: list[dict[str, int]] = [{}]
        self._depth, self._found = [0], [0]  # `_found`: the longest string that ends there
        for string in strings:
            self._add(string)
        self._shorter = [0] * len(self._next)  # the longest shorter end of a state that begins a string
        level = list(self._next[0].values())
        while level:  # short ones first
            level = [later for state in level for later in self._link(state)]

    def _add(self, string: str) -> None:
        state = 0
        for character in string:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._found.append(0)
            state = self._next[state][character]
        self._found[state] = len(string)

    def _link(self, state: int) -> Iterable[int]:
        self._found[state] = self._found[state] or self._found[self._shorter[state]]
        for character, later in self._next[state].items():
            self._shorter[later] = self._step(self._shorter[state], character)
        return self._next[state].values()

    def scan(self, state: int, text: str) -> tuple[int, int]:
        """Reads on from `state`.

        Returns:
            The new state, and the number of characters from the beginning of the first found string
                to the end; 0 if none was found.
        """
        past = 0
        for read, character in enumerate(text, 1):
            state = self._step(state, character)
            if self._found[state]:
                past = max(past, self._found[state] + len(text) - read)
        return state, past

    def string_at(self, text: str, start: int) -> str:
        """The string that ends first of those at `start`, where `scan` has found one."""
        return next(string for string in self._strings if text.startswith(string, start))

    def held(self, state: int) -> int:
        return self._depth[state]

    def _step(self, state: int, character: str) -> int:
        while state and character not in self._next[state]:
            state = self._shorter[state]
        return self._next[state].get(character, 0)
