"""Tells whoever wants to know that this process opens an object to read it.

With nobody listening an open pays for one truth test: `if opens.listeners: opens.tell(...)`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

Listener = Callable[[str, str], None]
"""Is given the identity of the origin and the key. Must be quick, and must not raise."""

# Replaced as a whole under the lock, read without it.
listeners: tuple[Listener, ...] = ()
_lock = threading.Lock()


def listen(listener: Listener) -> None:
    """Have `listener` called for every open of this process, in the thread that opens."""
    global listeners
    with _lock:
        listeners = (*listeners, listener)


def unlisten(listener: Listener) -> None:
    """Call `listener` no more. One that does not listen is no error."""
    global listeners
    with _lock:
        listeners = tuple(other for other in listeners if other != listener)


def tell(origin_identity: str, key: str) -> None:
    """An object is being opened."""
    for listener in listeners:
        listener(origin_identity, key)


def _after_fork() -> None:
    # Whoever listens lives in the parent; its threads are not here.
    global listeners, _lock
    listeners, _lock = (), threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
