"""The credential provider that obstore calls, and the renewal of its credentials."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from millrace.errors import ConfigurationError, MillraceError, OriginUnavailableError
from millrace.origin.options.store import is_sendable, stripped, unusable_in

_MOST_SHARED_SECONDS = 5.0

ReadCredentials = Callable[[], dict[str, Any]]
"""Returns credentials in obstore's form; it is called again at `expires_at`, None for never."""


class Provider:
    """Credentials from one place. Thread-safe; belongs to one process.

    The place is read at the first use, and again by `renew`: files are read again, programs run again. While the place
    fails for now, the last credentials are used until they expire. The error of a slow place is raised again for as long as
    it took, up to 5 s: requests come here one after the other, and the last of 100 would otherwise wait 100 times as long.
    """

    def __init__(self, look_up: Callable[[], ReadCredentials]) -> None:
        self._look_up = look_up
        self._read: ReadCredentials | None = None
        self._last: dict[str, Any] | None = None
        self._failed_until = 0.0
        self._lock = threading.Lock()
        self.error: MillraceError | None = None
        """The error of the last call; obstore only returns its text."""

    def __repr__(self) -> str:
        return "Provider()"

    def __call__(self) -> dict[str, Any]:
        """The present credentials. Raises `DeniedError` if there are none, `ConfigurationError` for unusable ones."""
        with self._lock:
            began = time.monotonic()
            if self.error is None or began >= self._failed_until:
                try:
                    if self._read is None:
                        self._read = self._look_up()
                    self._last, self.error = usable(self._read()), None
                except MillraceError as error:
                    self.error, now = error, time.monotonic()
                    self._failed_until = now + min(now - began, _MOST_SHARED_SECONDS)
            if self.error is not None and not (isinstance(self.error, OriginUnavailableError) and self._is_valid()):
                raise type(self.error)(self.error.message, next_step=self.error.next_step) from self.error
            return dict(self._last or {})

    def _is_valid(self) -> bool:
        """Whether the last credentials have not expired. They are requested again minutes before."""
        until = (self._last or {}).get("expires_at")
        return isinstance(until, datetime) and until > datetime.now(UTC)

    def renew(self) -> bool:
        """Read the place again. Returns whether the credentials have changed."""
        with self._lock:
            fresh = self._look_up()
            found = usable(fresh())
            changed = self._last is None or _secrets(found) != _secrets(self._last)
            self._read, self._last, self._failed_until = fresh, found, 0.0
            return changed


def usable(credentials: Mapping[str, Any]) -> dict[str, Any]:
    """The credentials without white space around them. Raises `ConfigurationError` if a request cannot contain them.

    For every credential, also a renewed one: of options, variables, profiles, programs and services.
    """
    cleaned: dict[str, Any] = stripped(dict(credentials))
    for name, value in cleaned.items():
        if isinstance(value, str) and not is_sendable(value):
            raise ConfigurationError(
                f"the credential {name!r} that was found contains a space, a line end, or a character that is not ASCII",
                next_step="correct the variable, profile, file or program with the credentials",
            )
    return cleaned


def _secrets(credentials: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in credentials.items() if name != "expires_at"}


@dataclass(frozen=True)
class Found:
    """The source of credentials: a provider that obstore calls, or `config` with which it finds them itself."""

    provider: Provider | None = None
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)


def for_obstore(names: Iterable[str], environ: Mapping[str, str]) -> dict[str, str]:
    """obstore's options for the variables `names`, which it reads itself, if their cleaned value in `environ` differs.

    Raises `ConfigurationError` for control characters.
    """
    for name in names:
        if unusable_in(environ[name], lines=False):
            raise ConfigurationError(f"{name} contains a control character", next_step="set the variable again")
    return {name.lower(): environ[name] for name in names if os.environ.get(name, environ[name]) != environ[name]}


def metadata_responds(address: tuple[str, int]) -> bool:
    """Whether a metadata service of a cloud responds at an address. Waits a second at most."""
    try:
        socket.create_connection(address, timeout=1).close()
    except OSError:
        return False
    return True
