"""Records which functions of Millrace a call runs, in every thread: for the pages on hot paths in `docs/architecture`."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import millrace

_ROOT = str(Path(millrace.__file__).parent) + "/"


class Trace:
    """Calls of functions below `src/millrace`, by first call. Use it as a context manager; not reentrant."""

    def __init__(self) -> None:
        self.calls: dict[tuple[str, str], None] = {}
        """(file, function) in the order of the first call; files are relative to `src/millrace`."""

    @property
    def files(self) -> list[str]:
        """The files, in the order of the first call."""
        return list(dict.fromkeys(file for file, _ in self.calls))

    def __enter__(self) -> Trace:
        threading.setprofile_all_threads(self._note) if sys.version_info >= (3, 12) else threading.setprofile(
            self._note
        )
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile_all_threads(None) if sys.version_info >= (3, 12) else threading.setprofile(None)  # type: ignore[arg-type]

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
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
