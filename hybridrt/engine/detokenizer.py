"""Text of a request, token by token: characters that span tokens, and stop strings."""

from collections.abc import Sequence

from hybridrt.engine.stop_strings import StopStrings
from hybridrt.engine.tokenizer import Tokenizer

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_CONTEXT = 6  # prompt tokens that decide how the first output token reads (leading space, a split character)


class Detokenizer:
    """Decodes a small window again with each new token, because a token's text depends on its neighbours.

    The window is ids[prefix:]. Its part ids[prefix:read] is text already; what the whole window's text has beyond that
    part's is new, and becomes text once it does not end within a character.

    Args:
        prompt: the prompt's token ids; output reads as their continuation.
        stop: strings that end the text; it is cut before the first of them. Samples of one request share the object.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: StopStrings | None = None) -> None:
        self.text = ""
        self._tokenizer = tokenizer
        self._stop = stop
        self._stop_state = 0
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
        held = self._stop.held(self._stop_state) if self._stop is not None else 0
        return self.text[: len(self.text) - held]

    def _extend(self, fresh: str) -> bool:
        self.text += fresh
        if self._stop is None:
            return False
        self._stop_state, behind = self._stop.scan(self._stop_state, fresh)
        if behind:
            self.text = self.text[:-behind]
        return behind > 0
