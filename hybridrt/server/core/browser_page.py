"""The page that browsers get at `/`: a chat, and the engine's figures. It is one static file without secrets."""

import base64
import hashlib
import re
from importlib.resources import files

from starlette.types import Scope

PAGE_PATH = "/"
_SECTIONS = ("script", "style")


def wants_page(scope: Scope) -> bool:
    """True for a browser: it names text/html in `Accept`. Programs that accept everything get JSON."""
    if scope["path"] != PAGE_PATH or scope["method"] != "GET":
        return False
    accepted = b",".join(value for name, value in scope["headers"] if name == b"accept").decode("latin-1")
    return any(part.partition(";")[0].strip().lower() == "text/html" for part in accepted.split(","))


def read_page() -> tuple[str, dict[str, str]]:
    """The page and its headers. Nothing runs in it but its own script, known by its hash, and it
    connects to this server alone."""
    text = (files("hybridrt") / "assets" / "page" / "index.html").read_text("utf-8")
    allowed = "; ".join(f"{name}-src '{_digest(text, name)}'" for name in _SECTIONS)
    policy = (
        f"default-src 'none'; {allowed}; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'; require-trusted-types-for 'script'"
    )
    return text, {
        "Content-Security-Policy": policy,
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
        "Vary": "Accept",
        "X-Content-Type-Options": "nosniff",
    }


def _digest(text: str, name: str) -> str:
    """The hash of the only element of this name, as a policy names it."""
    (content,) = re.findall(rf"<{name}>(.*?)</{name}>", text, re.DOTALL)
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
