"""obstore's clients of one storage system: one for each container (bucket) of each process, with its credentials.

Inherited clients would hang (`obstore_library.py`), so a forked child creates its own.
"""

from __future__ import annotations

import math
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
from millrace.runtime import forks

# For uploads in parts, which obstore itself retries.
RETRY: dict[str, Any] = {
    "max_retries": 8,
    "retry_timeout": timedelta(seconds=60),
    # With jitter: waits 10 to 20 seconds for a server that restarts, then fails.
    "backoff": {"init_backoff": timedelta(milliseconds=200), "max_backoff": timedelta(seconds=5), "base": 4},
}
# Other requests are retried around all origins (`origin/limits`), within the limits.
_NO_RETRY: dict[str, Any] = {**RETRY, "max_retries": 0}

CLIENT: dict[str, Any] = {
    "connect_timeout": timedelta(seconds=5),
    "timeout": timedelta(seconds=120),
    "read_timeout": timedelta(seconds=20),
}

# A refusal may mean that credentials have expired; they are looked up again, but not for every refusal.
_RENEW_SECONDS = 1.0


@dataclass(frozen=True)
class _Service:
    """The name of obstore's class for a scheme, and the function that translates its options."""

    store: str
    options: Callable[[Mapping[str, Any], Mapping[str, str]], StoreOptions]


_SERVICES: Mapping[str, _Service] = {
    "s3": _Service("S3Store", s3_options),
    "az": _Service("AzureStore", azure_options),
    "gs": _Service("GCSStore", gcs_options),
}


@dataclass
class _State:
    """The clients and credentials of one process."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    clients: dict[tuple[str, bool], Any] = field(default_factory=dict)
    found: Found | None = None
    renewed_at: float = 0.0


class Clients:
    """The clients of one scheme and `target_options`. Thread-safe; safe across fork. The constructor sends no request.

    No request takes longer than `request_seconds`, and no retry of a part of an upload starts after that time.

    Raises `ConfigurationError` for options that cannot be used.
    """

    def __init__(self, scheme: str, target_options: Mapping[str, Any], *, request_seconds: float = math.inf) -> None:
        self._scheme = scheme
        self._request_seconds = request_seconds
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
        self._states: forks.PerProcess[_State] = forks.PerProcess(lambda _: _State())

    @property
    def identity(self) -> str:
        """The storage without any secret: scheme and endpoint."""
        return f"{self._scheme}+{self._options.endpoint}" if self._options is not None else self._scheme

    @property
    def address(self) -> str:
        """The URL of the server that requests go to; empty for local files."""
        return self._options.address if self._options is not None else ""

    @property
    def may_write(self) -> bool:
        """Whether writes are possible."""
        return self._options is None or self._options.may_write

    def get(self, container: str, *, streams: bool = False) -> Any:
        """The client of a container; with `streams` the one for uploads of many requests, which retries each of them.

        Raises `DeniedError` without credentials, and `ConfigurationError`.
        """
        state = self._states.get()
        client = state.clients.get((container, streams))
        if client is None:
            with state.lock:
                client = state.clients.get((container, streams))
                if client is None:
                    client = state.clients[container, streams] = self._make(state, container, streams)
        return client

    def renew(self, used: Any) -> bool:
        """Look for credentials again after a refusal of the client `used`. Returns whether to retry with a new client.

        Not for explicit credentials, and not for those that obstore finds itself.
        """
        state = self._states.get()
        with state.lock:
            # Not ==: obstore's clients with equal options are equal, also with other credentials.
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
                state.renewed_at = time.monotonic()  # a credential program may take longer than the pause
            if changed:
                state.clients.clear()
            return changed

    def credentials_error(self) -> MillraceError | None:
        """The error of the last attempt to get credentials in this process; None after a success."""
        found = self._states.get().found
        return found.provider.error if found is not None and found.provider is not None else None

    def _make(self, state: _State, container: str, streams: bool) -> Any:
        stores = obstore_library().store
        if self._options is None:
            return stores.LocalStore("/")
        if state.found is None:
            state.found = find_credentials(self._scheme, self._options, os.environ)
        provider = state.found.provider
        if provider is not None:
            provider()  # raises its own error here; inside of obstore it would be a general one
        return getattr(stores, _SERVICES[self._scheme].store)(
            container,
            config={**self._options.config, **state.found.config},
            client_options={**self._within(CLIENT), **self._options.client_options},
            retry_config=self._within(RETRY) if streams else _NO_RETRY,
            credential_provider=provider,
        )

    def _within(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """`settings` with all times limited to the time of a request."""
        if math.isinf(self._request_seconds):
            return dict(settings)
        longest = timedelta(seconds=self._request_seconds)
        return {name: min(each, longest) if isinstance(each, timedelta) else each for name, each in settings.items()}
