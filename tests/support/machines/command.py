"""A program that runs on a machine of a test."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import psutil

from millrace.testing.process import ChildProcess

_PATIENCE_SECONDS = 180.0


class Command:
    """A program that runs on a machine; a context manager that ends it. It ends with its machine, and with this process."""

    def __init__(self, process: ChildProcess) -> None:
        self.process = process

    @property
    def pid(self) -> int | None:
        """Its process, as this machine names it; None when it has ended, or has not yet begun."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children():
                return child.pid
        return None

    def exit_status(self) -> int | None:
        """The exit status, or None while it runs."""
        return self.process.exit_status()

    def wait(self, seconds: float = _PATIENCE_SECONDS) -> int:
        """Wait until it ends by itself; returns its exit status."""
        deadline = time.monotonic() + seconds
        while (status := self.exit_status()) is None:
            assert time.monotonic() < deadline, "a command on a machine does not end"
            time.sleep(0.05)
        return status

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Send it this signal, and see it end: after ten seconds by `kill -9`."""
        for each, seconds in ((number, 10.0), (signal.SIGKILL, _PATIENCE_SECONDS)):
            if self.exit_status() is None and (pid := self.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, each)
                with contextlib.suppress(AssertionError):
                    self.wait(seconds)
        self.process.kill()

    def kill(self) -> None:
        """`kill -9`."""
        self.stop(signal.SIGKILL)

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
