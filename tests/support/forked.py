"""Runs a function in a forked child, or keeps a child alive."""

from __future__ import annotations

import os
from collections.abc import Callable


def in_child(look: Callable[[], str]) -> str:
    """The text that `look` returns in a forked child."""
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(sending, look().encode())
        finally:
            os._exit(0)
    os.close(sending)
    with os.fdopen(receiving) as text:
        found = text.read()
    assert os.waitpid(child, 0)[1] == 0
    return found


class WaitingChild:
    """A forked child, which has what its parent had open when it was created, and does nothing until `end`."""

    def __init__(self) -> None:
        waiting, self._end = os.pipe()
        begun, begin = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._end)
            os.write(begin, b"x")
            os.read(waiting, 1)
            os._exit(0)
        os.read(begun, 1)  # what a child does at its start is done
        for descriptor in (waiting, begun, begin):
            os.close(descriptor)

    def end(self) -> None:
        os.write(self._end, b"x")
        os.close(self._end)
        assert os.waitpid(self._pid, 0)[1] == 0
