"""Runs blocking calls of a library that ignores signals, so that Ctrl-C ends the wait for them.

Python runs signal handlers only in the main thread, between its instructions, so not inside of such a call. In the main
thread, another thread runs the call. If the wait is interrupted, that thread finishes the call alone, and the next call
gets a new thread.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from millrace.runtime import forks

Result = TypeVar("Result")


# A signal just before the kernel starts to wait does not end the wait.
_LOOK_SECONDS = 0.5


class _Call:
    """One call and its outcome."""

    __slots__ = ("action", "done", "error", "result")

    def __init__(self, action: Callable[[], Any]) -> None:
        self.action = action
        self.done = threading.Lock()
        self.done.acquire()
        self.result: Any = None
        self.error: BaseException | None = None


class _Caller:
    """A daemon thread that runs calls one after the other, for the process that created it."""

    def __init__(self) -> None:
        self.owner = forks.Owner()
        self.calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="millrace-origin-call", daemon=True).start()

    def _run(self) -> None:
        while (call := self.calls.get()) is not None:
            try:
                call.result = call.action()
            except BaseException as error:  # noqa: BLE001 - raised again in the main thread
                call.error = error
            call.done.release()
            del call  # frees its memory before the next call


# At most one, for the main thread.
_idle: list[_Caller] = []


def interruptible(action: Callable[[], Result]) -> Result:
    """Return or raise the outcome of `action`. In the main thread signal handlers run meanwhile, and may raise.

    After such an exception `action` continues in the background. Costs some 50 microseconds in the main thread, nothing in
    others. Safe across fork.
    """
    if threading.current_thread() is not threading.main_thread():
        return action()
    # Removed while in use: a signal handler that sends its own request gets another.
    caller = _idle.pop() if _idle else None
    if caller is None or not caller.owner.is_this_process:
        try:
            caller = _Caller()
        except RuntimeError:  # no more threads, or the interpreter is ending
            return action()
    call = _Call(action)
    try:
        caller.calls.put(call)
        while not call.done.acquire(timeout=_LOOK_SECONDS):
            pass
    except BaseException:
        caller.calls.put(None)  # it ends after the call
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
