"""Finds the tokens of an answer's text, for log-probabilities of content that a parser cuts out."""

from codecs import getincrementaldecoder
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from hybridrt.engine.request.outputs import Delta
from hybridrt.server.core.token_text import TokenText

Entry = Any  # what TokenText.entry makes
TextPiece = tuple[str, Sequence[int], Any]  # text, its tokens, the finish reason after it


class TextTokens:
    """Cuts deltas into texts of single tokens. A parser that reads these gives the same events as
    with joined deltas, and `tokens_of_text` finds the tokens of each.

    A token without text, such as a special one that is left out, belongs to no event.

    Args:
        most: how many of the likeliest tokens each entry has.
    """

    def __init__(self, token_text: TokenText, most: int) -> None:
        self._token_text, self._most = token_text, most
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._text, self._place = "", 0  # text so far; where tokens are missing
        self._waiting = deque[tuple[str, int, Entry]]()  # their text may be held back
        self._read: list[tuple[str, Entry]] = []

    def pieces(self, delta: Delta) -> Iterator[TextPiece]:
        """The texts of the delta's tokens, for as many as have come."""
        self._text, self._place = self._text[self._place :] + delta.text, 0
        for token, logprobs in zip(delta.token_ids, delta.logprobs or (), strict=True):
            text = self._decoder.decode(self._token_text.spelled(token))
            self._waiting.append((text, token, self._token_text.entry(token, logprobs, self._most)))
        final = delta.finish_reason is not None
        while self._waiting and (found := self._text_of(self._waiting[0][0], final)) is not None:
            spelled, token, entry = self._waiting.popleft()
            self._place += len(found)
            if found or not spelled:  # one without text begins a character of several tokens
                self._read.append((found, entry))
            yield found, [token], None
        rest = self._text[self._place :] if final or not self._waiting else ""
        if final or rest:  # text that its tokens do not spell
            self._text, self._place = "", 0
            yield rest, (), delta.finish_reason

    def tokens_of_text(self, text: str) -> list[Entry]:
        """The tokens of an event's text. Those before them belong to no event."""
        whole = "".join(piece for piece, _ in self._read)
        start = max(whole.rfind(text), 0)
        taken, left, place = list[Entry](), list[tuple[str, Entry]](), 0
        for piece, entry in self._read:
            if place >= start + len(text):
                left.append((piece, entry))
            elif place + len(piece) > start or (place == start and not piece):
                taken.append(entry)
            place += len(piece)
        self._read = left
        return taken

    def drop(self) -> list[Entry]:
        """Drops the tokens of a call. The last one may yet begin the following text."""
        del self._read[:-1]
        return []

    def _text_of(self, spelled: str, final: bool) -> str | None:
        """Returns None if more must come first. A tokenizer may spell a token without the space
        before it, and a stop string may cut one.
        """
        if self._text.startswith(spelled, self._place):
            return spelled
        behind_space = f" {spelled}"
        if self._text.startswith(behind_space, self._place):
            return behind_space
        # Copies of the whole rest would take quadratic time.
        rest = self._text[self._place : self._place + len(behind_space) + 1]
        if spelled.startswith(rest) or behind_space.startswith(rest):
            return rest if final else None
        return ""
