"""Text of a request, token by token: characters that span tokens, and stop strings."""

from collections.abc import Sequence

from hybridrt.engine.tokenizer import Tokenizer

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_CONTEXT = 6  # prompt tokens that decide how the first output token reads (leading space, a split character)


class Detokenizer:
    """Decodes a small window again with each new token, because a token's text depends on its neighbours.

    The window is ids[prefix:]. Its part ids[prefix:read] is text already; what the whole window's text has beyond that
    part's is new, and becomes text once it does not end within a character.

    Args:
        prompt: the prompt's token ids; output reads as their continuation.
        stop: strings that end the text; it is cut before the first of them.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self.text = ""
        self._tokenizer = tokenizer
        self._stop = stop
        self._ids = list(prompt[-_CONTEXT:])
        self._prefix = 0
        self._read = len(self._ids)
        self._known = tokenizer.decode(self._ids)

    def append(self, token: int) -> None:
        """Takes a token; its text appears with the next `advance`."""
        self._ids.append(token)

    def advance(self) -> bool:
        """Decodes what has been appended. True if a stop string has appeared; `text` is then cut before it."""
        if self._read == len(self._ids):
            return False
        window = self._tokenizer.decode(self._ids[self._prefix :])
        fresh = window[len(self._known) :]
        if not fresh or fresh.endswith(_INCOMPLETE):
            return False
        self._prefix, self._read = self._read, len(self._ids)
        self._known = self._tokenizer.decode(self._ids[self._prefix : self._read])
        return self._extend(fresh)

    def finish(self) -> bool:
        """Decodes the rest, but for a character whose last bytes never came. True as for `advance`."""
        window = self._tokenizer.decode(self._ids[self._prefix :]).rstrip(_INCOMPLETE)
        self._prefix = self._read = len(self._ids)
        fresh, self._known = window[len(self._known) :], ""
        return self._extend(fresh)

    @property
    def visible_text(self) -> str:
        """`text` but for an end that may be the beginning of a stop string."""
        return self.text[: len(self.text) - self._held()]

    def _extend(self, fresh: str) -> bool:
        start = len(self.text)
        self.text += fresh
        found = [self.text.find(s, max(0, start - len(s) + 1)) for s in self._stop]
        cut = min((i for i in found if i >= 0), default=None)
        if cut is None:
            return False
        self.text = self.text[:cut]
        return True

    def _held(self) -> int:
        longest = max(map(len, self._stop), default=0) - 1
        for n in range(min(longest, len(self.text)), 0, -1):
            tail = self.text[-n:]
            if any(s.startswith(tail) for s in self._stop):
                return n
        return 0
