"""A headless Chromium, driven by its DevTools protocol over two pipes. The browser is Debian's (`chromium-headless-shell`).

The protocol needs no library: a message is JSON that ends with a NUL byte. https://chromedevtools.github.io/devtools-protocol
"""

from __future__ import annotations

import base64
import functools
import json
import os
import select
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from millrace.errors import MissingDependencyError
from millrace.testing.process import ChildProcess, log_tail

_DEBIAN = Path(__file__).parents[2] / ".deps" / "debian"
_NAMES = ("chromium-headless-shell", "chromium", "google-chrome")
_ANSWER_SECONDS = 120.0
_LOOK_SECONDS = 0.1

# The browser reads requests from descriptor 3 and writes responses to 4.
_LAUNCHER = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
_FONTS = """<?xml version="1.0"?><fontconfig>{}<cachedir>{}</cachedir>
<match target="pattern"><edit name="family" mode="append" binding="strong"><string>DejaVu Sans</string></edit></match>
</fontconfig>"""


@functools.cache
def find_chromium() -> Path:
    """The browser: on the PATH, or where `tools/debian-packages.sh` unpacks it in the clone.

    Raises `MissingDependencyError`.
    """
    unpacked = _DEBIAN / "usr" / "lib" / "chromium" / "chromium-headless-shell"
    for candidate in (*map(shutil.which, _NAMES), unpacked):
        if candidate and os.access(candidate, os.X_OK):
            return Path(candidate).resolve()
    raise MissingDependencyError("no Chromium", next_step="install Debian's package chromium-headless-shell")


class Chromium:
    """One browser with its profile in `directory`. A context manager; it dies with this process. Not thread-safe."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._log = directory / "chromium.log"
        self._number = 0
        self._received = b""
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        self._directory.mkdir(parents=True, exist_ok=True)
        fonts = self._directory / "fonts.conf"
        folders = "".join(f"<dir>{folder}</dir>" for folder in ("/usr/share/fonts", _DEBIAN / "usr/share/fonts"))
        fonts.write_text(_FONTS.format(folders, self._directory / "fonts"))
        found = [*(_DEBIAN / "usr/lib").glob("*-linux-gnu"), *(_DEBIAN / "usr/lib").glob("*-linux-gnu/pulseaudio")]
        libraries = [str(folder) for folder in found]
        given = [os.environ["LD_LIBRARY_PATH"]] if os.environ.get("LD_LIBRARY_PATH") else []
        environment = {"FONTCONFIG_FILE": str(fonts), **os.environ, "LD_LIBRARY_PATH": ":".join([*given, *libraries])}
        its_in, self._out = os.pipe()
        self._in, its_out = os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        flags += ["--remote-debugging-pipe", f"--user-data-dir={self._directory / 'profile'}", "about:blank"]
        self._process = ChildProcess(
            [sys.executable, "-c", _LAUNCHER, str(its_in), str(its_out), find_chromium(), *flags],
            log=self._log,
            env=environment,
            pass_fds=(its_in, its_out),
        )
        os.close(its_in)
        os.close(its_out)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        os.close(self._in)
        os.close(self._out)

    def open(self, url: str, *, width: int = 1280) -> Tab:
        """Open a page in a new tab."""
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        tab = Tab(self, target, session, width)
        answer = tab.call("Page.navigate", url=url)
        assert "errorText" not in answer, (url, answer)
        self._until_loaded(session, 0, lambda loader: loader == answer["loaderId"])
        return tab

    def call(self, method: str, parameters: dict[str, Any], *, session: str | None = None) -> dict[str, Any]:
        """The result of a command. Events that arrive meanwhile are appended to `events`."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + _ANSWER_SECONDS
        while True:
            answer = self._next(deadline)
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _until_loaded(self, session: str, first: int, is_wanted: Callable[[str], bool]) -> None:
        """Wait until a document is loaded, by the events from number `first` on.

        A command for a page can fail while a document replaces another, so none is sent meanwhile.
        """
        deadline = time.monotonic() + _ANSWER_SECONDS
        place = first
        while True:
            while place == len(self.events):
                self.events.append(self._next(deadline))
            event = self.events[place]
            place += 1
            if event.get("sessionId") == session and event["method"] == "Page.lifecycleEvent":
                loader: str = event["params"]["loaderId"]
                if event["params"]["name"] == "load" and is_wanted(loader):
                    return

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._received:
            poll = select.poll()  # a process of the tests may have too many files for `select`
            poll.register(self._in, select.POLLIN)
            ready = poll.poll(1000 * max(0.0, deadline - time.monotonic()))
            data = os.read(self._in, 1 << 20) if ready else b""
            assert data, f"Chromium does not respond: {log_tail(self._log)}"
            self._received += data
        text, _, self._received = self._received.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message


class Tab:
    """One open page."""

    def __init__(self, browser: Chromium, target: str, session: str, width: int) -> None:
        self._browser = browser
        self._target = target
        self._session = session
        self._width = width
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.call("Page.setLifecycleEventsEnabled", enabled=True)
        self.resize(800)

    def close(self) -> None:
        """Close it, in whatever state it is: the browser does it, not the page."""
        self._browser.call("Target.closeTarget", {"targetId": self._target})

    def reload(self) -> None:
        """Load the page again; returns when it is loaded."""
        first = len(self._browser.events)
        present = self.call("Page.getFrameTree")["frameTree"]["frame"]["loaderId"]
        self.call("Page.reload")
        self._browser._until_loaded(self._session, first, lambda loader: loader != present)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a command for this page."""
        return self._browser.call(method, parameters, session=self._session)

    def resize(self, height: int) -> None:
        """Set the height of the window."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=self._width, height=height, deviceScaleFactor=1, mobile=False
        )

    def evaluate(self, expression: str) -> Any:
        """The JSON value of an expression of JavaScript."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, expression: str, *, seconds: float = 120.0) -> Any:
        """The value of an expression as soon as it is true."""
        deadline = time.monotonic() + seconds
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < deadline, (expression, self.evaluate("document.body.innerText"))
            time.sleep(_LOOK_SECONDS)
        return value

    def text(self, selector: str) -> str:
        """The text of an element as it is shown."""
        found: str = self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")
        return found

    def press(self, key: str) -> None:
        """Press and release a key without a character, such as `Tab`."""
        codes = {"Tab": 9, "Enter": 13, "ArrowRight": 39}
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key], **text)

    def screenshot(self, path: Path, *, dark: bool = False) -> None:
        """Write the whole page as PNG, in light or dark colours."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.resize(int(self.evaluate("document.documentElement.scrollHeight")))
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def problems(self) -> list[Any]:
        """Errors of the page: exceptions, violations of its policy, failed requests."""
        found = []
        for event in self._browser.events:
            if event.get("sessionId") != self._session:
                continue
            if event["method"] == "Runtime.exceptionThrown":
                found.append(event["params"]["exceptionDetails"])
            elif event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] in ("error", "warning"):
                found.append(event["params"]["entry"])
        return found
