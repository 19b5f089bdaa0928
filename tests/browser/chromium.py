"""A headless Chromium, and its DevTools protocol over a pipe: what a page does, asked for instead of waited for.

Needs Chromium or Chrome (Debian: ``apt-get install chromium``); ``BLN_BROWSER`` names another executable.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome-headless-shell")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
)  # fmt: skip
PATIENCE = 60
"""Seconds until something that must happen has not."""


def executable() -> str:
    named = os.environ.get("BLN_BROWSER")
    found = named or next(filter(None, map(shutil.which, NAMES)), None)
    if not found:
        pytest.fail(
            f"no browser found (looked for {', '.join(NAMES)}): install one, on Debian with `apt-get install "
            "chromium`, or name an executable in BLN_BROWSER",
            pytrace=False,
        )
    return found


class Page:
    """One tab. ``problems`` are the errors and warnings of its console, ``requests`` the addresses it asked for."""

    def __init__(self, to: int, answers: int) -> None:
        self._to, self._from, self._rest, self._asked = to, answers, b"", 0
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._loads = 0
        self._session: str | None = None
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command, and take note of what happens until it is answered."""
        self._asked += 1
        session = {"sessionId": self._session} if self._session else {}
        message = {"id": self._asked, "method": method, "params": parameters, **session}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + PATIENCE
        while (answer := self._next(until)).get("id") != self._asked:
            self._note(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def open(self, address: str) -> None:
        """Go there, and wait until it is loaded."""
        before = self._loads
        failed = self.ask("Page.navigate", url=address).get("errorText")
        assert not failed, f"{address}: {failed}"
        until = time.monotonic() + PATIENCE
        while self._loads == before:
            self._note(self._next(until))

    def do(self, script: str) -> Any:
        """The value of a JavaScript expression, or what its promise becomes."""
        done = self.ask("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def wait(self, script: str) -> Any:
        """The value of an expression as soon as it is something."""
        until = time.monotonic() + PATIENCE
        while not (value := self.do(script)):
            assert time.monotonic() < until, f"never came true: {script}"
            time.sleep(0.05)
        return value

    def resize(self, width: int, height: int = 900) -> None:
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def picture(self, path: Path) -> None:
        """Save the whole page as a PNG, for people to look at."""
        size = self.ask("Page.getLayoutMetrics")["cssContentSize"]
        shot = self.ask("Page.captureScreenshot", captureBeyondViewport=True, clip={**size, "scale": 1})
        path.write_bytes(base64.b64decode(shot["data"]))

    def _next(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], max(0.0, until - time.monotonic()))
            assert ready, "the browser did not answer"
            received = os.read(self._from, 1 << 20)
            assert received, "the browser is gone"
            self._rest += received
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _note(self, message: dict[str, Any]) -> None:
        what, told = message.get("method"), message.get("params", {})
        if what == "Page.loadEventFired":
            self._loads += 1
        elif what == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        elif what == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(told["exceptionDetails"]))
        elif what == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.problems.append(f"{told['entry']['text']} {told['entry'].get('url', '')}")
        elif what == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
            self.problems.append(json.dumps(told["args"]))


@contextmanager
def opened(folder: Path) -> Iterator[Page]:
    """A page of a browser of its own, whose profile is in the folder."""
    (commands, to), (answers, by) = os.pipe(), os.pipe()
    command = [executable(), *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={folder / 'profile'}"]
    script = f'exec "$@" 3<&{commands} 4>&{by}'  # the protocol's file descriptors
    browser = subprocess.Popen(
        ["bash", "-c", script, "bash", *command],
        pass_fds=(commands, by),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(commands)
    os.close(by)
    try:
        page = Page(to, answers)
        yield page
        page.ask("Browser.close")
    finally:
        os.close(to)  # without its commands it ends
        try:
            browser.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            browser.kill()
            browser.wait()
        os.close(answers)
