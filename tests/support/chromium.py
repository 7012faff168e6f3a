"""Chromium without a window, driven over the DevTools protocol through a pair of pipes. It reaches 127.0.0.1 alone."""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
WAIT = 60.0  # seconds after which a test gives up
# Names of hosts lead nowhere, so nothing but the server can be loaded. The sandbox does not work for root, nor in
# most containers; the only page is ours.
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-extensions",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run",
    "--hide-scrollbars", "--remote-debugging-pipe", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)  # fmt: skip
# Chromium reads the protocol from file 3 and writes it to file 4.
_START = """
import fcntl, os, sys
high = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3]]  # they may be 3 or 4 themselves
for file, number in zip(high, (3, 4)):
    os.dup2(file, number)
    os.close(file)
os.execv(sys.argv[3], sys.argv[3:])
"""
_PROBLEMS = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded", "Audits.issueAdded")
_KEYS = {"Enter": (13, "\r"), "Tab": (9, ""), "Escape": (27, "")}


def find_chromium() -> str | None:
    """The path of a Chromium or Chrome that starts; None without one. Some systems have a script of
    that name which only says how to install it."""
    for path in filter(None, map(shutil.which, NAMES)):
        if subprocess.run([path, "--version"], capture_output=True, timeout=WAIT).returncode == 0:
            return path
    return None


class Chromium:
    """A browser and its messages. `open` makes a page; other calls are about the latest one."""

    def __init__(self, process: "subprocess.Popen[bytes]", inward: int, outward: int) -> None:
        self._process, self._inward, self._outward = process, inward, outward
        self._held, self._count, self._session, self._context = b"", 0, "", ""
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol, and its result."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._outward, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._count:
            self.events.append(answer)
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._held:
            ready, _, _ = select.select([self._inward], [], [], WAIT)
            assert ready, "Chromium does not answer"
            part = os.read(self._inward, 1 << 20)
            assert part, f"Chromium has ended with {self._process.poll()}"
            self._held += part
        message, _, self._held = self._held.partition(b"\0")
        return json.loads(message)

    def open(self, url: str, width: int = 1280, height: int = 800) -> None:
        """A new page, without cookies and storage of others. It takes the place of the latest one."""
        self._session = ""
        if self._context:
            self.call("Target.disposeBrowserContext", browserContextId=self._context)
        self.events = []
        self._context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=self._context)["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Audits"):
            self.call(f"{domain}.enable")
        self.resize(width, height)
        self.call("Page.navigate", url=url)
        self.until(f"location.href === {json.dumps(url)} && document.readyState === 'complete'")

    def resize(self, width: int, height: int, dark: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def value(self, expression: str) -> Any:
        """The value of an expression in the page, as JSON carries it."""
        found = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True,
            allowUnsafeEvalBlockedByCSP=False,
        )  # fmt: skip
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def text(self, name: str) -> str:
        """The text of the element with this id."""
        found: str = self.value(f"document.getElementById({json.dumps(name)}).textContent")
        return found

    def until(self, expression: str) -> Any:
        """Waits until an expression is true."""
        deadline = time.monotonic() + WAIT
        while not (found := self.value(expression)):
            assert time.monotonic() < deadline, f"{expression} does not become true"
            time.sleep(0.02)
        return found

    def write(self, text: str) -> None:
        """Types a text where the focus is."""
        self.call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        number, text = _KEYS[key]
        known = {"key": key, "code": key, "windowsVirtualKeyCode": number}
        self.call("Input.dispatchKeyEvent", type="keyDown", **known, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **known)

    def picture(self) -> bytes:
        """What is to be seen, as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def requests(self) -> list[dict[str, Any]]:
        """The page's requests so far: method, url, postData."""
        self.value("0")
        return [e["params"]["request"] for e in self.events if e["method"] == "Network.requestWillBeSent"]

    def problems(self) -> list[dict[str, Any]]:
        """Exceptions, lines of the console and violations of the page's policy so far."""
        self.value("0")
        return [event["params"] for event in self.events if event["method"] in _PROBLEMS]


@contextmanager
def chromium(path: str, folder: Path) -> Iterator[Chromium]:
    """The browser of this path, which keeps its files in `folder`."""
    (reads, outward), (inward, writes) = os.pipe(), os.pipe()
    command = [sys.executable, "-ISc", _START, str(reads), str(writes), path, *FLAGS, f"--user-data-dir={folder}"]
    log = folder / "chromium.log"
    with log.open("wb") as errors:
        process = subprocess.Popen(command, pass_fds=(reads, writes), stdout=errors, stderr=errors)
    os.close(reads)
    os.close(writes)
    try:
        yield Chromium(process, inward, outward)
    finally:
        os.close(outward)  # Chromium ends
        try:
            process.wait(WAIT)
        finally:
            process.kill()
            os.close(inward)
