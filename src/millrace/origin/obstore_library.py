"""obstore, usable also in forked processes.

obstore runs its requests on threads of one runtime that lives in the extension module. A forked child inherits the runtime
without its threads, and every request there would wait forever, also with new clients. A child therefore loads a second
image of the extension, copied to an anonymous file (the dynamic loader identifies a library by its inode), which starts its
own runtime. That costs a child about 20 ms and 15 MB, once, and only when the parent had used obstore.

obstore's calls also ignore signals: Python runs signal handlers only in the main thread, between its instructions, so not
inside of such a call. In the main thread, another thread runs the call (`interruptible`). If the wait is interrupted, that
thread finishes the call alone, and the next call gets a new thread.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar

from millrace.origin.side_by_side import action_at_late_end
from millrace.runtime import forks
from millrace.runtime.forks import importing

Result = TypeVar("Result")

_EXTENSION = "obstore._obstore"

_loaded_in: forks.Owner | None = None


def obstore_library() -> Any:
    """The `obstore` package for this process. Its types and errors must not be kept across a fork."""
    global _loaded_in
    if _loaded_in is None or not _loaded_in.is_this_process:
        with importing():
            if _loaded_in is None or not _loaded_in.is_this_process:
                if _loaded_in is not None:
                    _load_second_image()
                _import()
                # Last: another thread must not use a half imported package.
                _loaded_in = forks.Owner()
    return sys.modules["obstore"]  # the child has another package object than the parent


def is_panic(error: BaseException) -> bool:
    """Whether an error is an internal one of obstore; pyo3 raises a `BaseException` whose class cannot be imported."""
    return (type(error).__module__, type(error).__name__) == ("pyo3_runtime", "PanicException")


def _import() -> None:
    for name in ("obstore.store", "obstore.exceptions"):
        importlib.import_module(name)  # not `imported`: the child's package is another one


class _SecondImage:
    """Finds the extension in the copied file."""

    def __init__(self, path: str) -> None:
        self._path = path

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _EXTENSION:
            return None
        return importlib.util.spec_from_loader(name, importlib.machinery.ExtensionFileLoader(name, self._path))


def _load_second_image() -> None:
    """Replace the obstore package of this process by one over a fresh copy of the extension."""
    source: Any = sys.modules[_EXTENSION]
    copy = os.memfd_create("millrace-obstore", os.MFD_CLOEXEC)
    try:
        with open(_original_path or source.__file__, "rb") as file:
            while os.sendfile(copy, file.fileno(), None, 1 << 30):
                pass
        for name in [name for name in sys.modules if name == "obstore" or name.startswith("obstore.")]:
            _retired.append(sys.modules.pop(name))
        finder: Any = _SecondImage(f"/proc/self/fd/{copy}")
        sys.meta_path.insert(0, finder)
        try:
            _import()
        finally:
            sys.meta_path.remove(finder)
    finally:
        os.close(copy)


def _remember_path() -> str | None:
    package = importlib.util.find_spec(_EXTENSION.partition(".")[0])
    if package is None:
        return None
    # Not by its full name, which would import the package: a process that finds everything cached never needs it.
    spec = importlib.machinery.PathFinder.find_spec(_EXTENSION, package.submodule_search_locations)
    return spec.origin if spec is not None else None


# The path of the extension; the module that a grandchild inherits has only "/proc/self/fd/...".
_original_path: str | None = _remember_path()
# The modules of the parent are kept: unloading them would run destructors that wait for its threads.
_retired: list[ModuleType] = []


# --- calls that Ctrl-C interrupts -----------------------------------------------------------------

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
        try:
            threading.Thread(target=self._run, name="millrace-origin-call", daemon=True).start()
        except BaseException:  # an interrupt: it may have started
            self.calls.put(None)
            raise

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

    After such an exception `action` continues in the background (`at_late_end`). Costs some 50 microseconds in the main
    thread, nothing in others. Safe across fork.
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
    try:
        call = _Call(action)
        caller.calls.put(call)
        while not call.done.acquire(timeout=_LOOK_SECONDS):
            pass
    except BaseException:
        if (after := action_at_late_end()) is not None:
            caller.calls.put(_Call(after))
        caller.calls.put(None)  # it ends after the calls
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
