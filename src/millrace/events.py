"""What happened inside Millrace, for whoever wants to know: frozen events and the hooks that receive them.

The core emits; logging, metrics and tests listen. With no hook registered an event costs one truth test.
Hooks run in the thread that emits, must be quick, and must not raise.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

_log = logging.getLogger("millrace")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One thing that happened.

    `name` is stable and dotted (`cache.block.corrupt`); `subject` names the object, file or node; `nbytes`
    is the amount concerned where there is one; `detail` is for people. An event never carries a secret.
    """

    name: str
    subject: str = ""
    nbytes: int = 0
    detail: str = ""


Hook = Callable[[Event], None]

# Replaced as a whole under the lock, read without it: `emit` costs no lock.
_hooks: tuple[tuple[object, Hook], ...] = ()
_lock = threading.Lock()


def add_hook(hook: Hook) -> Callable[[], None]:
    """Register `hook`; returns a function that removes it again (once: a hook added twice is called twice).

    Process-wide and thread-safe. An event that is being emitted meanwhile may still reach, or not yet reach, the hook.
    """
    global _hooks
    token = object()
    with _lock:
        _hooks = (*_hooks, (token, hook))

    def remove() -> None:
        global _hooks
        with _lock:
            _hooks = tuple(entry for entry in _hooks if entry[0] is not token)

    return remove


def emit(event: Event) -> None:
    """Give `event` to every hook. A hook that raises is logged and does not disturb the caller."""
    for _, hook in _hooks:
        try:
            hook(event)
        except Exception:  # noqa: BLE001 - a listener's fault, of any kind, must not break a read
            _log.exception("event hook %r failed on %s", hook, event.name)


def _new_lock() -> None:
    # Another thread of the parent may have held it.
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_new_lock)
