"""obstore's clients of one storage system: one for each container (bucket), of this process's own, with its credentials.

What a forked child inherits would hang (`obstore_library.py`), so a child makes its own.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from millrace.errors import ConfigurationError, MillraceError
from millrace.origin.credentials import Found, find_credentials
from millrace.origin.obstore_library import obstore_library
from millrace.origin.options import StoreOptions, azure_options, gcs_options, s3_options

# Of uploads in parts, each of which obstore itself repeats.
RETRY: dict[str, Any] = {
    "max_retries": 8,
    "retry_timeout": timedelta(seconds=60),
    # Jittered: a server that restarts is waited for 10 to 20 seconds, one that is gone is an error after that.
    "backoff": {"init_backoff": timedelta(milliseconds=200), "max_backoff": timedelta(seconds=5), "base": 4},
}
# Requests that can be repeated whole are repeated above all origins (`origin/limits`), where the origin's budget is known.
_NO_RETRY: dict[str, Any] = {**RETRY, "max_retries": 0}

CLIENT: dict[str, Any] = {
    "connect_timeout": timedelta(seconds=5),
    "timeout": timedelta(seconds=120),
    "read_timeout": timedelta(seconds=20),
}

# A refusal may mean that credentials have ended or were replaced; they are looked up again, but not for every refusal.
_RENEW_SECONDS = 1.0


@dataclass(frozen=True)
class _Service:
    """How the storage of one scheme is spoken to: the name of obstore's class, and what translates the options."""

    store: str
    options: Callable[[Mapping[str, Any], Mapping[str, str]], StoreOptions]


_SERVICES: Mapping[str, _Service] = {
    "s3": _Service("S3Store", s3_options),
    "az": _Service("AzureStore", azure_options),
    "gs": _Service("GCSStore", gcs_options),
}


@dataclass
class _State:
    """What belongs to one process."""

    pid: int = field(default_factory=os.getpid)
    lock: threading.Lock = field(default_factory=threading.Lock)
    clients: dict[tuple[str, bool], Any] = field(default_factory=dict)
    found: Found | None = None
    renewed_at: float = 0.0


# Of a parent process: never destroyed, since that could wait for its threads.
_inherited: list[_State] = []


class Clients:
    """The clients of one scheme and `target_options`. Thread-safe; safe across fork; makes no request when it is made.

    Raises `ConfigurationError` for options that cannot be used.
    """

    def __init__(self, scheme: str, target_options: Mapping[str, Any]) -> None:
        self._scheme = scheme
        self._options: StoreOptions | None = None
        if scheme == "file":
            if target_options:
                raise ConfigurationError("local files take no target_options", next_step="leave them out")
        elif scheme in _SERVICES:
            self._options = _SERVICES[scheme].options(target_options, os.environ)
        else:
            raise ConfigurationError(
                f"no object store for {scheme}://", next_step=f"use file or one of {', '.join(_SERVICES)}"
            )
        self._state = _State()

    @property
    def identity(self) -> str:
        """The storage without any secret: scheme and endpoint."""
        return f"{self._scheme}+{self._options.endpoint}" if self._options is not None else self._scheme

    @property
    def may_write(self) -> bool:
        """Whether there is any use in trying to write."""
        return self._options is None or self._options.may_write

    def get(self, container: str, *, streams: bool = False) -> Any:
        """The client of a container; with `streams` the one for uploads of many requests, which retries each of them.

        Raises `DeniedError` where there are no credentials, and `ConfigurationError`.
        """
        state = self._current()
        client = state.clients.get((container, streams))
        if client is None:
            with state.lock:
                client = state.clients.get((container, streams))
                if client is None:
                    client = state.clients[container, streams] = self._make(state, container, streams)
        return client

    def renew(self, used: Any) -> bool:
        """After a refusal of the client `used`: look for credentials again. Returns whether to try again with a new client.

        Not for credentials that the user gave, nor for those that obstore finds itself.
        """
        state = self._current()
        with state.lock:
            # Not by ==: obstore's clients are equal where their options are, whatever credentials they go on with.
            if not any(used is each for each in state.clients.values()):
                return True  # another thread has found new ones meanwhile
            provider = state.found.provider if state.found is not None else None
            if provider is None or (self._options is not None and self._options.fixed is not None):
                return False
            if time.monotonic() - state.renewed_at < _RENEW_SECONDS:
                return False
            try:
                changed = provider.renew()
            finally:
                state.renewed_at = time.monotonic()  # a program that gives credentials may take longer than the pause
            if changed:
                state.clients.clear()
            return changed

    def credentials_error(self) -> MillraceError | None:
        """What the last attempt to get credentials raised in this process, None where it went well."""
        found = self._current().found
        return found.provider.error if found is not None and found.provider is not None else None

    def _current(self) -> _State:
        if self._state.pid != os.getpid():
            # The parent's clients belong to threads that do not exist here: neither use nor destroy them.
            _inherited.append(self._state)
            self._state = _State()
        return self._state

    def _make(self, state: _State, container: str, streams: bool) -> Any:
        stores = obstore_library().store
        if self._options is None:
            return stores.LocalStore("/")
        if state.found is None:
            state.found = find_credentials(self._scheme, self._options, os.environ)
        provider = state.found.provider
        if provider is not None:
            provider()  # here its error is the user's; inside of obstore it would be one among others
        return getattr(stores, _SERVICES[self._scheme].store)(
            container,
            config={**self._options.config, **state.found.config},
            client_options={**CLIENT, **self._options.client_options},
            retry_config=RETRY if streams else _NO_RETRY,
            credential_provider=provider,
        )
