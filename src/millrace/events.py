"""The event stream: frozen events, and the hooks that receive them.

The core emits; logs (`event_log.py`), metrics (`cache/measures.py`) and users register hooks. Hooks run in the thread that
emits, must be quick, and must not raise.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Generic, ParamSpec

_log = logging.getLogger("millrace")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event.

    `name` is stable and dotted (`cache.block.corrupt`); `subject` names the object, file or node; `nbytes`
    is the amount concerned where there is one; `detail` is for people. `values` are figures for metrics, by name. An event
    never contains a secret.
    """

    name: str
    subject: str = ""
    nbytes: int = 0
    detail: str = ""
    values: Mapping[str, float] | None = None


Parameters = ParamSpec("Parameters")


class Hooks(Generic[Parameters]):
    """Functions that are called when something happens. Process-wide and thread-safe without a lock.

    Hooks run in the thread of the caller, must be quick, and must not raise. A concurrent call may or may not reach a hook
    that is being added or removed.
    """

    __slots__ = ("_kind", "registered")

    def __init__(self, kind: str) -> None:
        self._kind = kind
        # One operation on a dict is atomic, also at a fork: no lock is needed.
        self.registered: dict[object, Callable[Parameters, None]] = {}
        """Empty without a hook. Test it before `call` to save the call and its arguments."""

    def add(self, hook: Callable[Parameters, None]) -> Callable[[], None]:
        """Register `hook`; returns a function that removes it again. A hook that is added twice is called twice."""
        token = object()
        self.registered[token] = hook

        def remove() -> None:
            self.registered.pop(token, None)

        return remove

    def call(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        """Call every hook. An exception of a hook is logged and does not reach the caller."""
        for hook in list(self.registered.values()):
            try:
                hook(*args, **kwargs)
            except Exception:  # noqa: BLE001 - a hook's error, of any kind, must not break a read
                _log.exception("%s %r failed on %r", self._kind, hook, args)


Hook = Callable[[Event], None]

_hooks: Hooks[[Event]] = Hooks("event hook")


def add_hook(hook: Hook) -> Callable[[], None]:
    """Call `hook` with every event from now on; returns a function that removes it again. See `Hooks`."""
    return _hooks.add(hook)


def redirect(hook: Hook) -> None:
    """Call only `hook` from now on, in a process that passes its events to another one."""
    _hooks.registered.clear()
    _hooks.add(hook)


def emit(event: Event) -> None:
    """Call every hook with `event`. An exception of a hook is logged and does not reach the caller."""
    if _hooks.registered:
        _hooks.call(event)


# --- the fetch that an event belongs to -----------------------------------------------------------

fetch_id: ContextVar[str] = ContextVar("millrace-fetch", default="")
"""The id of the fetch in progress in this thread; empty outside of one. It is in the log lines of the read that waits,
of the fetch, and of its requests to peers and to the origin. Hooks can read it. `runtime/locks.py` sets it."""
