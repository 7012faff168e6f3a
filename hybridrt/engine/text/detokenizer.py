"""Text of a request, token by token, with characters that span tokens and stop strings."""

from collections.abc import Sequence

from hybridrt.engine.text.stop_strings import StopStrings
from hybridrt.engine.text.tokenizer import Tokenizer

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_CONTEXT = 6  # that decide how the first output token reads


class Detokenizer:
    """Decodes a small window again with new tokens, because a token's text depends on its
    neighbours.

    tokenizers.decoders.DecodeStream is not usable: it raises if byte fallback reads a run of bytes
    anew (a newline, then a byte that is no character), outputs the prompt's text if the prompt ends
    within a character, and drops held-back text at the end.

    The window's first `_read` tokens are text already, of `_known` characters. The rest of its text
    is new, and is given out once it does not end within a character.

    Args:
        prompt: the prompt's token ids; output reads as their continuation.
        stop: strings that end the text; it is cut before the first of them. Samples of one request
            share the object.
        include_stop: cut after that string instead.
        skip_special_tokens: special tokens leave nothing in the text.

    Attributes:
        stopped_by: the stop string that has ended the text; None while there is none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stop: StopStrings | None = None,
        *,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special_tokens
        self._stop, self._include_stop = stop, include_stop
        self._stop_state = 0
        self.stopped_by: str | None = None
        self._text = ""
        self._window = list(prompt[-_CONTEXT:])
        self._read = len(self._window)
        self._known = len(self._decode(self._window))

    def advance(self, tokens: Sequence[int], may_stop: bool = True) -> bool:
        """Reads tokens. True if a stop string has appeared and may; the text is then cut before it."""
        window = self._window
        window += tokens
        text = self._decode(window)
        known = self._known
        if len(text) <= known:
            # Decoding a row of special tokens each step would take quadratic time.
            del window[self._read : -_CONTEXT]
            return False
        if text.endswith(_INCOMPLETE):
            return False
        self._window = window = window[self._read :]
        self._read, self._known = len(window), len(self._decode(window))
        return self._extend(text[known:], may_stop)

    def would_stop(self, tokens: Sequence[int]) -> bool:
        """True if these tokens, coming next, would complete a stop string. Nothing is read."""
        if self._stop is None:
            return False
        text = self._decode([*self._window, *tokens]).rstrip(_INCOMPLETE)
        return self._stop.scan(self._stop_state, text[self._known :])[1] > 0

    def finish(self, tokens: Sequence[int], may_stop: bool = True) -> bool:
        """Reads the last tokens, without a character whose last bytes never came. True as for
        `advance`.
        """
        text = self._decode([*self._window, *tokens]).rstrip(_INCOMPLETE)
        return self._extend(text[self._known :], may_stop)

    def take_text(self, final: bool) -> str:
        """The text since the last call. Holds back a possible beginning of a stop string unless
        `final`.
        """
        held = self._stop.held(self._stop_state) if self._stop is not None and not final else 0
        end = len(self._text) - held
        text, self._text = self._text[:end], self._text[end:]
        return text

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=self._skip_special)

    def _extend(self, fresh: str, may_stop: bool) -> bool:
        self._text += fresh
        if self._stop is None:
            return False
        self._stop_state, past = self._stop.scan(self._stop_state, fresh)
        if past and may_stop:
            start = len(self._text) - past
            self.stopped_by = self._stop.string_at(self._text, start)
            self._text = self._text[: start + len(self.stopped_by) * self._include_stop]
        return past > 0 and may_stop
