"""A command in a terminal, and what its screen shows."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.chromium import Chromium

_END = "\x1b[J\r\n"  # of each state
_PAGE = """<!doctype html><meta charset="utf-8"><title>terminal</title>
<style>
  body {{ margin: 0; background: #1b1f27; color: #e6e6e6 }}
  pre {{ margin: 0; padding: 14px 18px; font: 14px/1.35 "DejaVu Sans Mono" }}
</style>
<pre>{text}</pre>"""


class Terminal:
    """Runs a command in a terminal of `columns` and `rows`; a context manager, which ends the command with Ctrl-C."""

    def __init__(
        self, command: Sequence[str], *, columns: int = 110, rows: int = 40, env: Mapping[str, str] | None = None
    ) -> None:
        self._command = command
        self._size = struct.pack("HHHH", rows, columns, 0, 0)
        self._environment = env
        self._output = b""

    def __enter__(self) -> Self:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, self._size)
        self._process = subprocess.Popen(
            self._command, env=self._environment, stdin=slave, stdout=slave, stderr=slave, start_new_session=True
        )
        os.close(slave)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGINT)
        self._read_until_end()
        self.status = self._process.wait(300)
        os.close(self._master)

    def screen(self) -> list[str]:
        """The lines of the newest complete state of a command with `--watch`."""
        states = [each for each in self._output.decode(errors="replace").split("\x1b[H") if each.endswith(_END)]
        text = states[-1].removeprefix("\x1b[J") if states else ""
        return re.sub(r"\x1b\[[KJ]", "", text.replace("\r\n", "\n")).rstrip("\n").split("\n")

    def until(self, *texts: str, seconds: float = 120.0) -> list[str]:
        """Wait until the screen shows all `texts`; returns its lines."""
        deadline = time.monotonic() + seconds
        while not all(text in "\n".join(self.screen()) for text in texts):
            if time.monotonic() > deadline or not self._read(1.0):
                raise AssertionError(f"the screen does not show {texts}:\n" + "\n".join(self.screen()))
        return self.screen()

    def _read(self, seconds: float) -> bool:
        """Read what the command wrote; whether it may write more."""
        poll = select.poll()  # a process of the tests may have too many files for `select`
        poll.register(self._master)
        if not poll.poll(seconds * 1000):
            return True
        try:
            piece = os.read(self._master, 1 << 16)
        except OSError:  # the command has ended
            return False
        self._output += piece
        return bool(piece)

    def _read_until_end(self) -> None:
        while self._read(300.0) and self._process.poll() is None:
            pass


def take_picture(browser: Chromium, lines: Sequence[str], path: Path) -> None:
    """Write the lines of a screen as PNG."""
    text = "\n".join(lines).replace("&", "&amp;").replace("<", "&lt;")
    page = path.with_suffix(".html")
    page.write_text(_PAGE.format(text=text))
    try:
        tab = browser.open(page.as_uri(), width=960)
        tab.resize(10)  # no higher than its text
        tab.screenshot(path)
        tab.close()
    finally:
        page.unlink()
