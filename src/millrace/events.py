"""What happened inside Millrace, for whoever wants to know: frozen events and the hooks that receive them.

The core emits; logging, metrics and tests listen. With no hook registered an event costs one truth test.
Hooks run in the thread that emits, must be quick, and must not raise.
"""

from __future__ import annotations

import logging
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

_hooks: tuple[Hook, ...] = ()


def add_hook(hook: Hook) -> Callable[[], None]:
    """Register `hook`; returns a function that removes it again. Process-wide and thread-safe."""
    global _hooks
    _hooks = (*_hooks, hook)

    def remove() -> None:
        global _hooks
        _hooks = tuple(other for other in _hooks if other is not hook)

    return remove


def emit(event: Event) -> None:
    """Give `event` to every hook. A hook that raises is logged and does not disturb the caller."""
    for hook in _hooks:
        try:
            hook(event)
        except Exception:  # noqa: BLE001 - a listener's fault, of any kind, must not break a read
            _log.exception("event hook %r failed on %s", hook, event.name)
