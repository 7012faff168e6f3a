"""Browsers get a page at `/`: it loads nothing from elsewhere, holds no secret, and its chat and figures work."""

import asyncio
import json
import re
import shutil
import subprocess
from base64 import b64encode
from hashlib import sha256
from pathlib import Path
from typing import Any

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
DRIVER = Path(__file__).parents[1] / "support" / "page_driver.js"
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")


def run_page(url: str, folder: Path, key: str = "") -> dict[str, Any]:
    """What the page shows after two messages."""
    (script,) = re.findall(r"<script>(.*?)</script>", read_page()[0], re.DOTALL)
    file = folder / "page.js"
    file.write_text(script)
    command = ["node", str(DRIVER), str(file), url, key]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


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
        "default-src": "'none'", "connect-src": "'self'", "base-uri": "'none'", "form-action": "'none'",
        "frame-ancestors": "'none'", "require-trusted-types-for": "'script'",
    }  # fmt: skip
    # What the policy would block, or what could make a text into elements.
    assert not re.search(r"https?:|\b(src|href|style|on\w+)=|innerHTML|insertAdjacent|eval\(|document\.write", text)


def test_the_policy_has_the_hashes_of_the_elements() -> None:
    text, headers = read_page()
    for name in ("script", "style"):
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


@needs_node
def test_the_chat_streams_and_the_figures_move(served: Served, tmp_path: Path) -> None:
    found = run_page(served.url, tmp_path)
    assert [kind for kind, _ in found["log"]] == ["user", "assistant", "user", "assistant"]
    assert found["log"][0][1] == "<b>one</b>" and all(text for _, text in found["log"])
    assert found["bodies"][1]["messages"] == [
        {"role": "user", "content": "<b>one</b>"},
        {"role": "assistant", "content": found["log"][1][1]},
        {"role": "user", "content": "two"},
    ]
    shown = found["shown"]
    assert shown["model"] == "tested" and shown["state"] == "" and shown["running"] == 0
    assert re.fullmatch(r"\d+, \d+, \d+ of [1-9]\d*", shown["slots"]) and shown["kv"].endswith(" %")
    assert shown["largest"].endswith(" ms") and len(found["points"].split(" ")) > 1
    assert found["events"] == [["a", "b\nc"], "data: d"]


@needs_node
def test_the_page_needs_no_key_and_its_requests_do(embedded: LLM, tmp_path: Path) -> None:
    with serving(embedded, api_keys=("good-key",)) as served:
        assert httpx.get(f"{served.url}/", headers=BROWSER).text == read_page()[0]
        for path, headers in (("/", {}), ("/metrics", BROWSER), ("/docs", BROWSER)):
            assert httpx.get(f"{served.url}{path}", headers=headers).status_code == 401
        found = run_page(served.url, tmp_path)
        assert [kind for kind, _ in found["log"]] == ["user", "error"] * 2 and "API key" in found["shown"]["state"]
        found = run_page(served.url, tmp_path, "good-key")
        assert [kind for kind, _ in found["log"]] == ["user", "assistant"] * 2 and found["shown"]["state"] == ""


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
