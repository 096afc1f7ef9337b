"""The common part of reading, listing and writing an object store: keys, clients, errors and descriptions of objects."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self, TypeVar

from millrace.errors import ConfigurationError, DeniedError, MillraceError, ObjectNotFoundError
from millrace.origin.base import BaseOrigin, RequestLimiter
from millrace.origin.clients import Clients
from millrace.origin.interruptible import interruptible
from millrace.origin.keys import check_name, check_readable
from millrace.origin.obstore_library import is_panic, obstore_library
from millrace.origin.protocol import ObjectInfo
from millrace.origin.reachability import diagnose, note_answer
from millrace.origin.translation import panicked, translate

Result = TypeVar("Result")

_QUOTED = re.compile(r"([\"'`]).*?\1")

# The prefix of the version of an object without an ETag.
MADE_UP = "~"


class StoreAccess(BaseOrigin):
    """One storage system (scheme, endpoint, credentials) with all its buckets. Thread-safe; safe across fork."""

    def __init__(self, scheme: str, target_options: Mapping[str, Any] | None = None) -> None:
        super().__init__(scheme, target_options)
        self._clients = Clients(scheme, self._target_options)

    def within(self, limiter: RequestLimiter) -> Self:
        twin = super().within(limiter)
        if limiter.request_seconds < math.inf:
            twin._clients = Clients(self._scheme, self._target_options, request_seconds=limiter.request_seconds)
        return twin

    @property
    def identity(self) -> str:
        return self._clients.identity

    @property
    def head_is_local(self) -> bool:
        return self._scheme == "file"

    def head(self, key: str) -> ObjectInfo:
        def request(client: Any, path: str) -> ObjectInfo:
            if not path:  # obstore would describe a bucket as an empty object
                raise ObjectNotFoundError(f"{self._url(key)} is not an object", next_step="name an object in it")
            if self._scheme == "file":
                check_readable("/" + path)
            return self._info(key, obstore_library().head(client, path))

        return self._request(key, request)

    def _request(self, key: str, action: Callable[[Any, str], Result], *, streams: bool = False) -> Result:
        """Run `action(client, path)`, which is one request, with the client of the key's bucket, in a slot.

        Raises our errors. After a refusal it runs a second time if other credentials are found.
        """
        client, path = self._locate(key, streams=streams)
        try:
            return self._in_slot(key, lambda: action(client, path))
        except DeniedError:
            if not self._clients.renew(client):
                raise
        renewed, path = self._locate(key, streams=streams)
        return self._in_slot(key, lambda: action(renewed, path))

    def _in_slot(self, key: str, call: Callable[[], Result]) -> Result:
        """Run a call of obstore that sends one request."""

        def request() -> Result:
            with self._translated(key):
                result = self._waited(call)
            if self._clients.address:
                note_answer(self._clients.address)
            return result

        return self._slot(key, request)

    def _waited(self, call: Callable[[], Result]) -> Result:
        """Run a call of obstore so that Ctrl-C interrupts it; calls for local files are short."""
        return call() if self._scheme == "file" else interruptible(call)

    def _bucket(self, key: str) -> str:
        """The first part of a key, with its slash; the paths of obstore's responses do not have it."""
        return "/" if self._scheme == "file" else key.split("/", 1)[0] + "/"

    def _locate(self, key: str, *, streams: bool = False) -> tuple[Any, str]:
        """Split `key` into the client of its bucket and the path inside. `streams`: the client for uploads in parts."""
        bucket, path = check_name(self._scheme, key)
        try:
            return self._clients.get(bucket, streams=streams), path
        except BaseException as error:
            if is_panic(error):
                raise panicked(self._url(key)) from error
            if not isinstance(error, obstore_library().exceptions.BaseError):
                raise
            # Caused by unusable options or variables.
            why = _QUOTED.sub("...", str(error).strip().partition("\n")[0])  # quoted text may be a secret
            raise ConfigurationError(
                f"{self._scheme}://{bucket} cannot be opened ({why})",
                next_step="correct target_options, or the environment variables that they stand for",
            ) from error

    def _info(self, key: str, meta: Mapping[str, Any]) -> ObjectInfo:
        modified = meta["last_modified"].timestamp()
        etag = meta["e_tag"]
        if etag and self._scheme == "az" and not etag.endswith('"'):
            etag = f'"{etag}"'  # Azure's listings leave the quotes out
        version = etag or f"{MADE_UP}{meta['version'] or ''}-{meta['size']}-{modified}"
        return ObjectInfo(key=key, size=meta["size"], version=version, modified=modified)

    @contextlib.contextmanager
    def _translated(self, key: str) -> Iterator[None]:
        """Replace obstore's exceptions by Millrace's, which name the object."""
        try:
            yield
        except MillraceError:
            raise
        except BaseException as error:
            if is_panic(error):
                raise panicked(self._url(key)) from error
            if not isinstance(error, Exception):
                raise
            address = self._clients.address
            translated = translate(
                error,
                self._url(key),
                self.identity,
                self._clients.credentials_error(),
                (lambda: diagnose(address, seconds=self._limiter.request_seconds / 4)) if address else (lambda: None),
            )
            if translated is None:
                raise
            raise translated from error
