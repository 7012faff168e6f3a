"""A log of requests and of lost cache entries, for `hybridrt explain`: a file of JSON lines.

It has the token ids of prompts and answers. So it is off unless `EngineConfig.request_log` names a
file.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Annotated, Literal

import msgspec

from hybridrt.base.errors import CacheDumpError, ConfigError, reason
from hybridrt.base.files import read_bytes
from hybridrt.base.formats import Format, json_format
from hybridrt.engine.cache.prefix_store import PrefixStore
from hybridrt.engine.request.sample_request import Request
from hybridrt.mem_cache.prefix_tree.cache_events import EVENTS
from hybridrt.mem_cache.prefix_tree.cache_key import CacheKey
from hybridrt.mem_cache.prefix_tree.prefix_cache import MissReason

FORMAT = Format("hybridrt requests", 1, "write the log again with request_log")
MAX_BYTES = 1 << 30  # of a file
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Skips = Literal["", "prompt_logprobs", "pooling"]
Tokens = list[Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]]  # ids of the prefix cache
log = logging.getLogger("hybridrt.cache")


class LoggedCache(msgspec.Struct, frozen=True, tag="cache"):
    """The first line. `keeps`: the prefix cache is on. `grid`: of PrefixStore."""

    keeps: bool
    grid: Count
    format: str = str(FORMAT)


class LoggedRequest(msgspec.Struct, frozen=True, tag="request"):
    """A sample that has ended.

    Attributes:
        key: number of its CacheKey.
        admitted, ended: seconds; None: it was never started.
        cached: first tokens that were not computed.
        failed: it left nothing in the cache.
        skips: the parameter with which it may not use the cache.
        why, token, tokens: of its CacheMiss.
        pieces: texts of token ids that the log has not had before; empty without a tokenizer.
    """

    request_id: str
    key: Count
    prompt: Tokens
    answer: Tokens
    admitted: float | None
    ended: float
    cached: Count = 0
    failed: bool = False
    skips: Skips = ""
    why: MissReason | None = None
    token: Count = 0
    tokens: Count = 0
    pieces: dict[int, str] = {}


class LostEntries(msgspec.Struct, frozen=True, tag="lost"):
    """Entries of one text that the device's tier has lost, of `CacheEvent`. `pages`: how many."""

    why: str
    key: Count
    tokens: Tokens
    states: list[Count]
    pages: Count


Line = LoggedCache | LoggedRequest | LostEntries


def check_log(path: str) -> None:
    """ConfigError if a log cannot be written there. What the file has is left; a new one is empty."""
    _open(path, "ab").close()


class RequestLog:
    """Writes the log while an engine runs.

    Args:
        decode: a token id's text; None without a tokenizer.

    Raises:
        ConfigError: the file cannot be opened.
    """

    def __init__(self, path: str, store: PrefixStore, decode: Callable[[int], str] | None) -> None:
        self._file = _open(path, "wb")
        self._events, self._decode = store.subscribe(EVENTS), decode
        self._keys, self._known, self._written = dict[CacheKey, int](), set[int](), 0
        self._write(LoggedCache(store.keeps, store.grid))

    def note(self, request: Request) -> None:
        """A sample has ended, and its entries are still its own."""
        for event in self._events.read():
            if event.what in ("lost", "cleared") and event.tier == "device":
                key, tokens = self._number(event.key), event.tokens.tolist()
                self._write(LostEntries(event.why, key, tokens, list(event.states), len(event.pages)))
        metrics, miss, params = request.metrics, request.metrics.cache_miss, request.params
        skips: Skips = "pooling" if params.pooling == "mean" else ""
        skips = skips if params.prompt_logprobs is None else "prompt_logprobs"
        line = LoggedRequest(
            request.request_id, self._number(request.cache_key),
            request.prompt_ids.tolist() if request.spans else request.prompt, request.output,
            metrics.admission_time, metrics.finish_time or 0.0, metrics.cached_tokens, request.error is not None,
            skips, pieces=self._new_pieces(request),
        )  # fmt: skip
        if miss is not None:
            line = msgspec.structs.replace(line, why=miss.why, token=miss.token, tokens=miss.tokens)
        self._write(line)

    def close(self) -> None:
        self._file.close()

    def _number(self, key: CacheKey) -> int:
        return self._keys.setdefault(key, len(self._keys))

    def _new_pieces(self, request: Request) -> dict[int, str]:
        if self._decode is None:
            return {}
        new = {*request.prompt, *request.output} - self._known
        self._known |= new
        return {token: self._decode(token) for token in sorted(new)}

    def _write(self, line: Line) -> None:
        """A full disk ends the log, and no request."""
        if self._file.closed:
            return
        data = msgspec.json.encode(line) + b"\n"
        self._written += len(data)
        try:
            if self._written > MAX_BYTES:
                raise OSError(f"it would have more than {MAX_BYTES} bytes")
            self._file.write(data)
            self._file.flush()
        except OSError as e:
            log.error("the log of requests ends: %s", e)
            with contextlib.suppress(OSError):  # closing writes what the full disk has not taken
                self._file.close()


def read_log(path: str | Path) -> tuple[LoggedCache, list[LoggedRequest | LostEntries]]:
    """Reads and checks a file of RequestLog. Its last line may be cut off.

    Raises:
        CacheDumpError: it cannot be read, or is no such file; the text names the line.
    """
    try:
        data = read_bytes(path, MAX_BYTES)
    except (OSError, ValueError) as e:
        raise CacheDumpError(f"the log {path} cannot be read: {e}") from e
    _check_format(path, data)
    lines = list(_lines(path, data))
    if not lines or not isinstance(lines[0], LoggedCache):
        raise CacheDumpError(f"{path} is no log of requests: write one with request_log")
    rest = [line for line in lines[1:] if not isinstance(line, LoggedCache)]
    if len(rest) < len(lines) - 1:
        raise CacheDumpError(f"{path} holds the logs of several engines; pass one of them")
    return lines[0], rest


def _check_format(path: str | Path, data: bytes) -> None:
    """Checks the first line before others are read: another version's lines may have other fields."""
    first, _, rest = data.partition(b"\n")
    if not first and not rest:
        return
    try:
        refusal = FORMAT.refusal(json_format(first))
    except (msgspec.MsgspecError, ValueError, RecursionError) as e:
        raise CacheDumpError(f"line 1 of the log {path} is damaged: {e}") from e
    if refusal:
        raise CacheDumpError(f"{path} is no log of requests that this version reads: {refusal}")


def _lines(path: str | Path, data: bytes) -> Iterator[Line]:
    decoder = msgspec.json.Decoder(Line)
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        try:
            yield decoder.decode(line)
        except (msgspec.MsgspecError, ValueError, RecursionError) as e:
            raise CacheDumpError(f"line {number} of the log {path} is damaged: {e}") from e


def _open(path: str, mode: str) -> IO[bytes]:
    try:
        return Path(path).open(mode)
    except (OSError, ValueError) as e:
        raise ConfigError(f"request_log is {path!r}, which cannot be written: {reason(e)}") from e
