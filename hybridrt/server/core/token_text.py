"""Single tokens as text and bytes, for log-probabilities."""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from hybridrt.engine.text.tokenizer import HFTokenizer
from hybridrt.server.wire.sse import encode

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """Maps characters of a byte-level vocabulary (Radford et al. 2019, GPT-2): printable bytes are
    themselves, others in order from U+0100 on.
    """
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in shown]
    return {chr(b): b for b in shown} | {chr(0x100 + i): b for i, b in enumerate(others)}


class TokenText:
    """Bytes of a vocabulary's tokens. A character may take several tokens, so a token may be no
    text. Without a tokenizer, a token's text is its number."""

    def __init__(self, tokenizer: HFTokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = {}
        self._heads: dict[int, bytes] = {}  # each token's entry without its number
        backend: Any = tokenizer and getattr(tokenizer.hf, "backend_tokenizer", None)
        byte_level = "ByteLevel" in str(getattr(backend, "decoder", ""))
        self._alphabet = _byte_alphabet() if byte_level else {}

    def spelled(self, token: int) -> bytes:
        known = self._known.get(token)
        if known is None:
            known = self._known[token] = self._bytes(token)
        return known

    def text(self, token: int) -> str:
        """The token's text; U+FFFD replaces bytes that are no character by themselves."""
        return self.spelled(token).decode(errors="replace")

    def entry(self, token: int, found: Mapping[int, float], most: int) -> msgspec.Raw:
        """A token in OpenAI's form, with its log-probability and those of the `most` likeliest,
        best first. It is JSON text: a tenth of a dictionary's memory and time."""
        best = sorted(found.items(), key=lambda each: -each[1])[:most]
        top = b"},".join([self._head(each) + encode(logprob) for each, logprob in best]) + b"}" * bool(best)
        return msgspec.Raw(b'%b%b,"top_logprobs":[%b]}' % (self._head(token), encode(found[token]), top))

    def _head(self, token: int) -> bytes:
        head = self._heads.get(token)
        if head is None:
            text, spelled = encode(self.text(token)), encode(list(self.spelled(token)))
            head = self._heads[token] = b'{"token":%b,"bytes":%b,"logprob":' % (text, spelled)
        return head

    def _bytes(self, token: int) -> bytes:
        if self._tokenizer is None:
            return str(token).encode()
        piece = self._tokenizer.piece(token)
        if piece is None:  # unknown to the tokenizer
            return b""
        if token not in self._tokenizer.hf.added_tokens_decoder:
            if self._alphabet and all(character in self._alphabet for character in piece):
                return bytes(self._alphabet[character] for character in piece)
            if byte := _BYTE_PIECE.fullmatch(piece):
                return bytes([int(byte[1], 16)])
        return self._tokenizer.decode([token], skip_special_tokens=False).encode(errors="replace")


class TokenNumbers(TokenText):
    """A token's text is its number, in vLLM's form, so that each token has another text."""

    def text(self, token: int) -> str:
        """The text of a token, such as token_id:5."""
        return f"token_id:{token}"
