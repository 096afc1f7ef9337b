"""The entry point of the command `millrace`. Outside the package, whose imports take a quarter of a second.

Ctrl-C during these imports prints one line and exits with 130, as it does later, without Python's traceback.
"""

from __future__ import annotations

import os
import signal
from types import FrameType


def main() -> int:
    """Run the command line; returns the exit code."""
    usual = signal.getsignal(signal.SIGINT)
    if usual is signal.default_int_handler:  # it is left ignored where it is, as in the background of a shell
        signal.signal(signal.SIGINT, _end)
    try:
        from millrace.cli import add_commands, main

        add_commands()
    finally:
        signal.signal(signal.SIGINT, usual)
    return main()


def _end(_signal: int, _frame: FrameType | None) -> None:
    """End at once: an import in progress could swallow an exception. Nothing has started that must be stopped."""
    os.write(2, b"millrace: interrupted; nothing is left running\n")
    os._exit(130)
