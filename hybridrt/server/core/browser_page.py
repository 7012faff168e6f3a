"""The page that browsers get at `/`: a chat, and the engine live. It is one static text without secrets."""

import base64
import hashlib
from importlib.resources import files

from starlette.types import Scope

PAGE_PATH = "/"
# Elements of index.html, which are empty there, and the files that they get.
_SECTIONS = {"style": ("page.css",), "script": ("chat.js", "engine.js")}


def wants_page(scope: Scope) -> bool:
    """True for a browser: it names text/html in `Accept`. Programs that accept everything get JSON."""
    if scope["path"] != PAGE_PATH or scope["method"] != "GET":
        return False
    accepted = b",".join(value for name, value in scope["headers"] if name == b"accept").decode("latin-1")
    return any(part.partition(";")[0].strip().lower() == "text/html" for part in accepted.split(","))


def read_page() -> tuple[str, dict[str, str]]:
    """The page and its headers. Nothing runs in it but its own script, known by its hash, and it
    connects to this server alone."""
    folder = files("hybridrt") / "assets" / "page"
    text, digests = (folder / "index.html").read_text("utf-8"), []
    for name, parts in _SECTIONS.items():
        content = "".join((folder / part).read_text("utf-8") for part in parts)
        text = text.replace(f"<{name}></{name}>", f"<{name}>{content}</{name}>")
        digests.append(f"{name}-src '{_digest(content)}'")
    policy = (
        f"default-src 'none'; {'; '.join(digests)}; connect-src 'self'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    )
    return text, {
        "Content-Security-Policy": policy,
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
        "Vary": "Accept",
        "X-Content-Type-Options": "nosniff",
    }


def _digest(content: str) -> str:
    """The hash of an element's content, as a policy names it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
