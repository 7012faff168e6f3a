"""Checks Host, Origin and Content-Type before a body is read: a web page may have sent the request.

A browser lets every page send requests to this machine. It names the page in `Origin`, and asks
first (CORS) if the content type is JSON. After DNS rebinding only `Host` shows the page. Any client
may send X-Forwarded-Host.
"""

import re
from collections.abc import Iterable
from ipaddress import IPv6Address, ip_address

from starlette.types import Scope

from hybridrt.server.wire.errors import APIError

_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{0,5})?")
_ORIGIN = re.compile(r"(https?)://(.+)", re.IGNORECASE)
_PORTS = {"http": ":80", "https": ":443"}
_JSON = re.compile(r"application/(json|[a-z0-9!#$&^_.-]+\+json)[ \t]*(;.*)?", re.IGNORECASE)
_READS = ("GET", "HEAD", "OPTIONS")


def split_authority(text: str) -> tuple[str, str] | None:
    """Host and port of a `Host` header. The host is in lower case, without brackets and final dot;
    an IP address is in its shortest form. The port is ":8000", or "". None: it is no such text."""
    found = _AUTHORITY.fullmatch(text)
    if found is None:
        return None
    name, port = found[1], (found[2] or "").removesuffix(":")
    if name.startswith("[") or name.replace(".", "").isdigit():
        address = _address(name.strip("[]").removesuffix("."))
        return None if address is None else (address, port)
    name = name.lower().removesuffix(".")
    return (name, port) if name else None


def host_name(text: str) -> str | None:
    """A host without a port, in the same form; an IPv6 address may lack its brackets. None: it is
    none."""
    name, port = split_authority(f"[{text}]" if _address(text) and ":" in text else text) or ("", "")
    return None if port else name or None


def _address(text: str) -> str | None:
    try:
        address = ip_address(text.partition("%")[0])  # requests do not name a zone
    except ValueError:
        return None
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return str(address)


def _is_loopback(host: str) -> bool:
    return host == "localhost" or (_address(host) is not None and ip_address(host).is_loopback)


class PageRules:
    """Refuses requests of foreign pages.

    Args:
        bound: the host that the server listens on.
        hosts: further names that it has; "*": any.
        origins: pages that may call; "*": all.
    """

    def __init__(self, bound: str, hosts: Iterable[str], origins: Iterable[str]) -> None:
        self._bound = host_name(bound.partition("%")[0])
        self._hosts = {"*" if host == "*" else host_name(host) for host in hosts}
        self._origins = {origin.lower() for origin in origins}
        self._everywhere = self._bound in ("0.0.0.0", "::")

    def check_sender(self, scope: Scope) -> None:
        """APIError if Host is not this server, or Origin is a page that may not call."""
        hosts, origins = _values(scope, b"host"), _values(scope, b"origin")
        authority = split_authority(hosts[0]) if len(hosts) == 1 else None
        if authority is None:
            text = "the request needs one Host header, such as localhost:8000"
            raise APIError(400, text, code="invalid_host", headers={"Connection": "close"})
        if not self._is_own(authority[0], scope):
            text = f"{authority[0][:200]} is not a name of this server: serve with --allowed-host {authority[0][:200]}"
            raise APIError(403, text, code="host_not_allowed")
        if origins and not (len(origins) == 1 and self._may_call(origins[0], authority)):
            raise APIError(
                403, "pages of this origin may not call: serve with --allowed-origin", code="origin_not_allowed"
            )

    def _is_own(self, host: str, scope: Scope) -> bool:
        if "*" in self._hosts or host in self._hosts or host == self._bound or _is_loopback(host):
            return True
        if self._everywhere:  # DNS rebinding gives no IP address in Host
            return _address(host) is not None
        local = scope.get("server")
        return local is not None and host == _address(local[0])

    def _may_call(self, origin: str, authority: tuple[str, str]) -> bool:
        """Allows the named pages, and the server's own. A proxy may change the scheme."""
        if "*" in self._origins or origin.lower() in self._origins:
            return True
        found = _ORIGIN.fullmatch(origin)
        own = None if found is None else split_authority(found[2])
        if found is None or own is None:
            return False
        default = _PORTS[found[1].lower()]
        return (own[0], own[1] or default) == (authority[0], authority[1] or default)


def check_content_type(scope: Scope) -> None:
    """APIError for a body that is not sent as JSON: any page may send one of another type, or of
    none."""
    types = _values(scope, b"content-type")
    length = _values(scope, b"content-length")
    has_body = bool(_values(scope, b"transfer-encoding")) or length not in ([], ["0"])
    if (has_body or (types and scope["method"] not in _READS)) and not (len(types) == 1 and _JSON.fullmatch(types[0])):
        raise APIError(400, "the body must be a JSON object, sent with Content-Type: application/json")


def _values(scope: Scope, name: bytes) -> list[str]:
    """Returns all: clients and servers disagree on which of two counts."""
    return [value.decode("latin-1").strip(" \t") for key, value in scope["headers"] if key == name]
