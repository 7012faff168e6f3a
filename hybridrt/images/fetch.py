"""Fetches images from https addresses of hosts that an operator allows.

A name is resolved once. The connection goes to that address, which must be public: a name that later
resolves to another address leads nowhere else. There are no redirects, proxies, cookies or passwords.
"""

import http.client
import ipaddress
import re
import socket
import ssl
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from hybridrt.base.errors import ConfigError, RequestError
from hybridrt.images.source import Address

HTTPS = 443
_HOST = re.compile(r"(?=.{1,253}(?::|$))[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*(:[0-9]{1,5})?")
_PIECE = 1 << 16


@dataclass(frozen=True)
class FetchLimits:
    """
    Attributes:
        seconds: to connect, after the name is resolved; then for the whole answer.
        max_bytes: of an image.
    """

    seconds: float = 10.0
    max_bytes: int = 1 << 25


def allowed_host(text: str) -> tuple[str, int]:
    """Name and port of "example.org" or "example.org:8443". Raises ConfigError."""
    name, _, port = text.lower().partition(":")
    if not _HOST.fullmatch(text.lower()) or not 0 < int(port or HTTPS) < 2**16:
        raise ConfigError(f"allowed image host {text!r}: it must be a name such as images.example.org, or NAME:PORT")
    return name, int(port or HTTPS)


class Fetcher:
    """Gets the bytes of an address.

    Args:
        hosts: those that may be asked, as `allowed_host` reads them. Names of other hosts below
            these are others.
    """

    def __init__(self, hosts: Sequence[str], limits: FetchLimits | None = None) -> None:
        self._hosts = {allowed_host(host) for host in hosts}
        self._limits = limits or FetchLimits()
        self._context = ssl.create_default_context()

    def __call__(self, address: Address, place: str) -> bytes:
        """Blocks. Raises RequestError, which names the part."""
        if (address.host.lower(), address.port) not in self._hosts:
            raise RequestError(
                f"{place}: images of the host {address.host!r} are not allowed here; send a data: URI, or serve with "
                "--allow-image-url HOST",
                place,
            )
        try:
            with socket.create_connection((_resolved(address), address.port), self._limits.seconds) as plain:
                return self._fetch(address, plain)
        except (OSError, http.client.HTTPException, ValueError) as e:
            text = str(e)[:200] or type(e).__name__
            raise RequestError(f"{place}: the image cannot be fetched from {address.host}: {text}", place) from e

    def _fetch(self, address: Address, plain: socket.socket) -> bytes:
        watched, late = plain.dup(), threading.Event()  # TLS takes the socket itself
        timer = threading.Timer(self._limits.seconds, _end, (watched, late))
        timer.daemon = True
        timer.start()
        try:
            with watched, self._context.wrap_socket(plain, server_hostname=address.host) as secure:
                connection = http.client.HTTPConnection(address.host, address.port)
                connection.sock = secure
                headers = {"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "hybridrt"}
                connection.request("GET", address.target, headers=headers)
                found = self._read(connection.getresponse())
                if late.is_set():  # an answer without a length seems to end there
                    raise TimeoutError(f"it takes more than {self._limits.seconds:g} seconds")
                return found
        finally:
            timer.cancel()

    def _read(self, response: http.client.HTTPResponse) -> bytes:
        if response.status != 200:
            raise ValueError(f"status {response.status}; it must be 200, and redirects are not followed")
        found, most = bytearray(), self._limits.max_bytes
        while piece := response.read(_PIECE):
            found += piece
            if len(found) > most:
                raise ValueError(f"it has more than {most} bytes")
        if response.length:
            raise ValueError("it breaks off, or takes too long")
        return bytes(found)


def _resolved(address: Address) -> str:
    """A host's first address. OSError if one of them is not public."""
    found = [str(info[4][0]) for info in socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)]
    for each in found:
        if not is_public(each):
            raise OSError("its name leads to an address that is not public")
    return found[0]


_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_UNICAST = ipaddress.IPv6Network("2000::/3")


def is_public(address: str) -> bool:
    """False for private, loopback, link-local, site-local, multicast and reserved addresses, and for
    those of IPv4 within IPv6 that are not public."""
    known = ipaddress.ip_address(address.partition("%")[0])
    found = [known]
    if isinstance(known, ipaddress.IPv6Address):
        if known in _NAT64:
            found.append(ipaddress.IPv4Address(int(known) & 0xFFFFFFFF))
        elif known.ipv4_mapped is None and known not in _UNICAST:
            return False
        found += [each for each in (known.ipv4_mapped, known.sixtofour, *(known.teredo or ())) if each is not None]
    return all(each.is_global and not each.is_multicast for each in found)


def _end(connection: socket.socket, late: threading.Event) -> None:
    """Wakes a thread that waits for the other side."""
    late.set()
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
