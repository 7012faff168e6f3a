"""HTTP/1.1 as uvicorn reads it with httptools, with a limit on what comes before the body."""

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# Browsers and proxies send a few hundred bytes; other servers stop at 8 to 64 KiB.
MAX_HEAD_BYTES = 64 * 1024


class LimitedHttp(HttpToolsProtocol):
    """Ends a connection whose address and headers are longer than MAX_HEAD_BYTES: httptools would keep all of it."""

    _head_bytes = 0

    def on_message_begin(self) -> None:
        """A request begins."""
        self._head_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """A piece of the address."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header."""
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def _count(self, length: int) -> None:
        self._head_bytes += length
        if self._head_bytes > MAX_HEAD_BYTES:
            # httptools turns what a callback raises into a parser's error, which uvicorn answers with 400 and the end.
            raise ValueError(f"more than {MAX_HEAD_BYTES} bytes of headers")
