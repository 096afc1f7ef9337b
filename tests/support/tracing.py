"""Records which functions of Millrace a call runs, in every thread: for the pages on hot paths in `docs/architecture`."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import millrace

_ROOT = str(Path(millrace.__file__).parent) + "/"


_active: Trace | None = None

_BACKGROUND = ("millrace-maintenance", "millrace-beats", "millrace-heads", "millrace-seal")
"""The names of threads, or their beginnings, that run at intervals or verify files: no call waits for them."""


def _note_in_thread(frame: FrameType, event: str, argument: Any) -> None:
    if _active is not None and not threading.current_thread().name.startswith(_BACKGROUND):
        _active.note(frame, event, argument)


@contextmanager
def threads_traced() -> Iterator[None]:
    """Let traces see the threads that start inside the `with` block, without those of the background."""
    threading.setprofile(_note_in_thread)
    try:
        yield
    finally:
        threading.setprofile(None)  # type: ignore[arg-type]


class Trace:
    """Calls of functions below `src/millrace`, by first call. Use it as a context manager, inside of `threads_traced`."""

    def __init__(self) -> None:
        self.calls: dict[tuple[str, str], None] = {}
        """(file, function) in the order of the first call; files are relative to `src/millrace`."""

    @property
    def files(self) -> list[str]:
        """The files, in the order of the first call."""
        return list(dict.fromkeys(file for file, _ in self.calls))

    def __enter__(self) -> Trace:
        global _active
        _active = self
        sys.setprofile(self.note)
        return self

    def __exit__(self, *_: object) -> None:
        global _active
        sys.setprofile(None)
        _active = None

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        """Record a call; a profile function."""
        if event != "call":
            return
        code = frame.f_code
        if code.co_filename.startswith(_ROOT) and not code.co_name.startswith("<"):
            self.calls.setdefault((code.co_filename.removeprefix(_ROOT), code.co_qualname), None)


def traced(call: Callable[[], object]) -> Trace:
    """Run `call` and return the trace of its functions."""
    trace = Trace()
    with trace:
        call()
    return trace
