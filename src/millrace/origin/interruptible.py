"""Blocking calls of a library that looks at no signals, made so that Ctrl-C ends the wait for them.

Python runs signal handlers in the main thread only, between its own instructions: while that thread is inside such a
call they wait for its end. So there, and only there, another thread makes the call; when the wait is interrupted that
thread is left to end alone, and the next call gets a new one.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")


# A signal just before the kernel begins to wait does not end the wait.
_LOOK_SECONDS = 0.5


class _Call:
    """One call, and what came of it."""

    __slots__ = ("action", "done", "error", "result")

    def __init__(self, action: Callable[[], Any]) -> None:
        self.action = action
        self.done = threading.Lock()
        self.done.acquire()
        self.result: Any = None
        self.error: BaseException | None = None


class _Caller:
    """A daemon thread that makes calls one after the other, in the process that made it."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="millrace-origin-call", daemon=True).start()

    def _run(self) -> None:
        while (call := self.calls.get()) is not None:
            try:
                call.result = call.action()
            except BaseException as error:  # noqa: BLE001 - raised again in the main thread
                call.error = error
            call.done.release()
            del call  # nothing of it is kept until the next


# One at most, of the main thread: there is no other to share it with.
_idle: list[_Caller] = []


def interruptible(action: Callable[[], Result]) -> Result:
    """What `action` gives or raises. In the main thread a signal's handler is heard meanwhile, and may raise.

    What `action` then still does goes on in the background. Some 50 microseconds in the main thread, nothing in others.
    Safe across fork.
    """
    if threading.current_thread() is not threading.main_thread():
        return action()
    # Taken away while it is used: a handler that sends a request of its own gets another.
    caller = _idle.pop() if _idle else None
    if caller is None or caller.pid != os.getpid():
        try:
            caller = _Caller()
        except RuntimeError:  # no more threads, or the interpreter is at its end
            return action()
    call = _Call(action)
    try:
        caller.calls.put(call)
        while not call.done.acquire(timeout=_LOOK_SECONDS):
            pass
    except BaseException:
        caller.calls.put(None)  # it ends when the call has
        raise
    if _idle:
        caller.calls.put(None)
    else:
        _idle.append(caller)
    if call.error is not None:
        try:
            raise call.error
        finally:
            del call
    result: Result = call.result
    return result
