"""Browsers get a page at `/`: it loads nothing from elsewhere and has no secret. test_page_in_chromium.py uses it."""

import asyncio
import re
from base64 import b64encode
from hashlib import sha256

import httpx
import pytest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hybridrt.engine.api.llm import LLM
from hybridrt.server.core.browser_page import read_page, wants_page
from hybridrt.server.core.config import ServerConfig
from hybridrt.server.core.guard import Guard
from tests.support.http_server import Served, serving

BROWSER = {"Accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}


def test_browsers_get_the_page_and_programs_json(served: Served) -> None:
    page = httpx.get(f"{served.url}/", headers=BROWSER)
    assert page.headers["content-type"] == "text/html; charset=utf-8" and page.text == read_page()[0]
    for headers in ({}, {"Accept": "application/json"}, {"Accept": "text/plain, text/htmlx"}):
        answer = httpx.get(f"{served.url}/", headers=headers)
        assert answer.json()["name"] == "hybridrt" and answer.headers["vary"] == "Accept"


def test_nothing_runs_in_the_page_but_its_own_script() -> None:
    text, headers = read_page()
    policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))
    assert policy.pop("script-src").startswith("'sha256-") and policy.pop("style-src").startswith("'sha256-")
    assert policy == {
        "default-src": "'none'", "connect-src": "'self'", "img-src": "data:", "base-uri": "'none'",
        "form-action": "'none'", "frame-ancestors": "'none'", "require-trusted-types-for": "'script'",
    }  # fmt: skip
    # What the policy would block, or what could make a text into elements.
    text = text.replace("http://www.w3.org/2000/svg", "")  # the name of elements, not an address
    assert not re.search(r"https?:|\b(src|href|style|on\w+)=|innerHTML|insertAdjacent|eval\(|document\.write", text)


def test_the_policy_has_the_hashes_of_the_elements() -> None:
    text, headers = read_page()
    for name in ("script", "style"):
        assert f"<{name}></{name}>" not in text
        content = text.partition(f"<{name}>")[2].partition(f"</{name}>")[0]
        digest = b64encode(sha256(content.encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}'" in headers["Content-Security-Policy"]


@pytest.mark.parametrize(
    ("method", "path", "accept", "expected"),
    [
        ("GET", "/", "text/html", True),
        ("GET", "/", "a/b, TEXT/HTML ;q=0.9", True),
        ("GET", "/", "*/*", False),
        ("POST", "/", "text/html", False),
        ("GET", "/metrics", "text/html", False),
        ("GET", "//", "text/html", False),
    ],
)
def test_who_gets_the_page(method: str, path: str, accept: str, expected: bool) -> None:
    assert wants_page({"method": method, "path": path, "headers": [(b"accept", accept.encode())]}) is expected


def test_the_page_needs_no_key_and_its_requests_do(embedded: LLM) -> None:
    with serving(embedded, api_keys=("good-key",)) as served:
        assert httpx.get(f"{served.url}/", headers=BROWSER).text == read_page()[0]
        for path, headers in (("/", {}), ("/engine", BROWSER), ("/metrics", BROWSER), ("/docs", BROWSER)):
            assert httpx.get(f"{served.url}{path}", headers=headers).status_code == 401


def test_a_guard_of_an_application_without_a_page_asks_browsers_for_a_key() -> None:
    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        await Response("inside")(scope, receive, send)

    for has_page, expected in ((False, 401), (True, 200)):
        guard = Guard(application, ServerConfig(api_keys=("good-key",), access_log=False), has_page)
        transport = httpx.ASGITransport(guard)  # type: ignore[arg-type]

        async def ask(transport: httpx.ASGITransport = transport) -> int:
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
                return (await client.get("/", headers=BROWSER)).status_code

        assert asyncio.run(ask()) == expected
