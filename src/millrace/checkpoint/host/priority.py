"""Scheduling priority of single threads."""

from __future__ import annotations

import os
import sys
import threading

from millrace.events import Event, emit

_NICEST = 19


def lower_priority(niceness: int) -> None:
    """Make the calling thread nicer by `niceness`, up to 19 in all; nobody may take that back without privileges.

    Threads that it starts inherit it, so a thread that might start some for others must not be made nicer. Only Linux has a
    priority for each thread; elsewhere this does nothing. A refusal is an event.
    """
    if niceness <= 0 or sys.platform != "linux":
        return
    thread = threading.get_native_id()
    try:
        os.setpriority(os.PRIO_PROCESS, thread, min(_NICEST, os.getpriority(os.PRIO_PROCESS, thread) + niceness))
    except OSError as error:
        emit(Event(name="checkpoint.priority.failed", subject=f"thread {thread}", detail=str(error)))
