"""A headless Chromium, controlled through its DevTools pipe without further dependencies."""

from __future__ import annotations

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

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run")
TIMEOUT = 60.0  # seconds for one answer


def chromium() -> str:
    """Return the path of Chromium; skip the test if it is not installed."""
    path = next((path for name in NAMES if (path := shutil.which(name))), None)
    if path is None or shutil.which("bash") is None:
        pytest.skip(f"needs a browser ({' or '.join(NAMES)}) and bash")
    return path


class Browser:
    """A browser process that opens pages one after the other."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._buffer = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, *, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its answer; events that arrive before it are kept."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + TIMEOUT
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"no answer from Chromium for {TIMEOUT:g} seconds"
            part = os.read(self._answers, 1 << 20)
            assert part, "Chromium has exited"
            self._buffer += part
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    def open(
        self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False, scripts: bool = True
    ) -> Page:
        """Open a file as a page and wait until it is loaded."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        phone = width < 600
        page.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        colours = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", media="", features=[colours])
        page.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        self.events.clear()
        page.call("Page.navigate", url=path.resolve().as_uri())
        page.wait("Page.loadEventFired")
        return page


class Page:
    """A tab of the browser."""

    def __init__(self, browser: Browser, session: str) -> None:
        self.browser, self.session = browser, session

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self.browser.call(method, session=self.session, **parameters)

    def wait(self, event: str) -> None:
        """Wait for an event."""
        while not any(each.get("method") == event for each in self.browser.events):
            self.browser.events.append(self.browser._next())

    def run(self, code: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def point(self, selector: str, *, x: float = 0.5, y: float = 0.5) -> None:
        """Move the mouse over an element, to these fractions of its width and height."""
        element = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{element}.scrollIntoView({{block: 'center'}})")
        left, top, width, height = self.run(
            f"(b => [b.left, b.top, b.width, b.height])({element}.getBoundingClientRect())"
        )
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=left + x * width, y=top + y * height)

    def press(self, key: str) -> None:
        for event in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=event, key=key, code=key)

    def screenshot(
        self,
        path: Path,
        *,
        selector: str | None = None,
        until: str | None = None,
        margin: int = 0,
        whole: bool = False,
        quality: int | None = None,
    ) -> None:
        """Write a screenshot of the window, of the whole page, of an element, or from one element ``until`` another."""
        options: dict[str, Any] = {"format": "png"} if quality is None else {"format": "webp", "quality": quality}
        if selector is not None or whole:
            boxes = [self._box(each) for each in (selector or "html", until or selector or "html")]
            x, y = (min(box[axis] for box in boxes) - margin for axis in (0, 1))
            width, height = (max(box[axis] + box[axis + 2] for box in boxes) + margin - (x, y)[axis] for axis in (0, 1))
            clip = {"x": x, "y": y, "width": width, "height": height, "scale": 1}
            # Capture beyond the window only if needed: it moves the pointer off the element below it.
            beyond = y + height > self.run("scrollY + innerHeight") or y < self.run("scrollY")
            options |= {"clip": clip, "captureBeyondViewport": beyond}
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", **options)["data"]))

    def _box(self, selector: str) -> list[float]:
        """Return left, top, width and height of an element on the page."""
        element = f"document.querySelector({json.dumps(selector)})"
        box: list[float] = self.run(
            f"(b => [b.left + scrollX, b.top + scrollY, b.width, b.height])({element}.getBoundingClientRect())"
        )
        return box

    @property
    def errors(self) -> list[str]:
        """Exceptions, warnings of the browser and console errors of the page."""
        self.run("0")  # earlier messages arrive before this answer
        errors = []
        for event in self.browser.events:
            method, parameters = event.get("method"), event.get("params", {})
            if (
                method == "Runtime.exceptionThrown"
                or (method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"))
                or (method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"))
            ):
                errors.append(json.dumps(parameters))
        return errors

    @property
    def requests(self) -> list[str]:
        """The addresses that the page requested."""
        sent = [event for event in self.browser.events if event.get("method") == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]


@contextmanager
def started(profile: Path) -> Iterator[Browser]:
    """Start a browser with its own profile, and end it afterwards."""
    command = [chromium(), *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={profile}"]
    import fcntl  # exists wherever bash does

    ours_in, theirs_out = os.pipe()
    theirs_in, ours_out = os.pipe()
    # Chromium expects its ends of the pipes as descriptors 3 and 4; numbers above 9 cannot collide with these.
    high = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (theirs_in, theirs_out)]
    process = subprocess.Popen(
        ["bash", "-c", f'exec "$@" 3<&{high[0]} 4>&{high[1]}', "bash", *command],
        pass_fds=high,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    for end in (theirs_in, theirs_out, *high):
        os.close(end)
    browser = Browser(ours_out, ours_in)
    try:
        yield browser
        browser.call("Browser.close")
        process.wait(timeout=TIMEOUT)
    finally:
        process.kill()
        process.wait()
        os.close(ours_in)
        os.close(ours_out)
