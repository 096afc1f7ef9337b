"""What obstore calls for credentials, and how they are renewed."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from millrace.errors import MillraceError

Answer = Callable[[], dict[str, Any]]
"""Gives credentials in obstore's form; `expires_at` says when it is to be asked again, None for never."""


class Provider:
    """Credentials from one place. Thread-safe; belongs to one process.

    The place is looked up at the first use, and again by `renew`: files are read again, programs run again.
    """

    def __init__(self, look_up: Callable[[], Answer]) -> None:
        self._look_up = look_up
        self._answer: Answer | None = None
        self._last: dict[str, Any] | None = None
        self._lock = threading.Lock()
        self.error: MillraceError | None = None
        """What the last call raised; obstore gives on only its text."""

    def __repr__(self) -> str:
        return "Provider()"

    def __call__(self) -> dict[str, Any]:
        """The credentials of now. Raises `DeniedError` where there are none."""
        with self._lock:
            try:
                if self._answer is None:
                    self._answer = self._look_up()
                self._last, self.error = self._answer(), None
            except MillraceError as error:
                self.error = error
                raise
            return dict(self._last)

    def renew(self) -> bool:
        """Look the place up again. Returns whether the credentials are others than those that were given last."""
        with self._lock:
            fresh = self._look_up()
            found = fresh()
            changed = self._last is None or _secrets(found) != _secrets(self._last)
            self._answer, self._last = fresh, found
            return changed


def _secrets(answer: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name != "expires_at"}


@dataclass(frozen=True)
class Found:
    """Where credentials come from: a provider for obstore to call, or `config` by which it finds them itself."""

    provider: Provider | None = None
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)


def metadata_answers(address: tuple[str, int]) -> bool:
    """Whether something listens where a cloud's machines find their identity. Waits a second at most."""
    try:
        socket.create_connection(address, timeout=1).close()
    except OSError:
        return False
    return True
