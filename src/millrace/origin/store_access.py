"""What reading, listing and writing an object store have in common: keys, clients, errors, and what an object is."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from millrace.errors import ConfigurationError, DeniedError, MillraceError, ObjectNotFoundError
from millrace.origin import unusable
from millrace.origin.clients import Clients
from millrace.origin.interruptible import interruptible
from millrace.origin.obstore_library import obstore_library
from millrace.origin.protocol import ObjectInfo
from millrace.origin.translation import bucket_word, translate
from millrace.origin.turns import TakesTurns

Result = TypeVar("Result")

_QUOTED = re.compile(r"([\"'`]).*?\1")

# In bytes of UTF-8. No cloud has longer keys, and Linux no longer parts of a path.
_KEY_BYTES = 1024
_PATH_BYTES = 4095
_PART_BYTES = 255

# Begins the version of an object for which the origin has no ETag.
MADE_UP = "~"


class StoreAccess(TakesTurns):
    """One storage system (scheme, endpoint, credentials) with all its buckets. Thread-safe; safe across fork."""

    def __init__(self, scheme: str, target_options: Mapping[str, Any] | None = None) -> None:
        self._scheme = scheme
        self._target_options = dict(target_options or {})
        self._clients = Clients(scheme, self._target_options)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.identity!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._scheme, self._target_options)

    @property
    def identity(self) -> str:
        return self._clients.identity

    @property
    def head_is_local(self) -> bool:
        return self._scheme == "file"

    def is_immutable(self, key: str) -> bool:
        return False

    def head(self, key: str) -> ObjectInfo:
        def request(client: Any, path: str) -> ObjectInfo:
            if not path:  # obstore would describe a bucket as an empty object
                raise ObjectNotFoundError(f"{self._scheme}://{key} is no object", next_step="name an object in it")
            if self._scheme == "file" and os.path.isdir("/" + path):
                raise FileNotFoundError(key)
            return self._info(key, obstore_library().head(client, path))

        return self._request(key, request)

    def _request(self, key: str, action: Callable[[Any, str], Result], *, streams: bool = False) -> Result:
        """Run `action(client, path)`, which is one request, on the client of the key's bucket, with our errors, in a turn.

        When it is refused and other credentials are found than those that were used, a second time with those.
        """
        client, path = self._locate(key, streams=streams)
        try:
            return self._in_turn(key, lambda: action(client, path))
        except DeniedError:
            if not self._clients.renew(client):
                raise
        renewed, path = self._locate(key, streams=streams)
        return self._in_turn(key, lambda: action(renewed, path))

    def _in_turn(self, key: str, call: Callable[[], Result]) -> Result:
        """Make a call of obstore's that sends one request."""

        def request() -> Result:
            with self._translated(key):
                return self._waited(call)

        return self._turns.turn(f"{self._scheme}://{key}", request)

    def _retrying(self, key: str, question: Callable[[], Result]) -> Result:
        return self._turns.retrying(f"{self._scheme}://{key}", question)

    def _waited(self, call: Callable[[], Result]) -> Result:
        """Make a call of obstore's so that Ctrl-C is heard; local files are not waited for as long."""
        return call() if self._scheme == "file" else interruptible(call)

    def _bucket(self, key: str) -> str:
        """The part of a key that obstore's answers lack, with its slash."""
        return "/" if self._scheme == "file" else key.split("/", 1)[0] + "/"

    def _locate(self, key: str, *, streams: bool = False) -> tuple[Any, str]:
        """Split `key` into the client of its bucket and the path inside. `streams`: the client for uploads in parts."""
        name = key.strip("/")
        if self._scheme == "file":
            bucket, path = "", name
        else:
            bucket, _, path = name.partition("/")
            if not bucket:
                word = bucket_word(self._scheme)
                raise ConfigurationError(
                    f"{self._scheme}:// without a {word}", next_step=f"write {self._scheme}://{word}/key"
                )
        if name and unusable.IN_PATHS.search(name):  # obstore would call it a bad value, and not say of what
            raise ObjectNotFoundError(
                f"{self._scheme}://{key} is no valid object name",
                next_step="use UTF-8 without control characters, and no empty, '.' or '..' parts",
            )
        if self._scheme == "az" and "\\" in name:
            raise ObjectNotFoundError(
                f"az://{key} is no valid object name", next_step="leave the backslash out: Azure makes a slash of it"
            )
        if _is_too_long(self._scheme, path):
            raise ObjectNotFoundError(
                f"{self._scheme}://{key[:64]}... is no valid object name", next_step="use a shorter name"
            )
        try:
            return self._clients.get(bucket, streams=streams), path
        except obstore_library().exceptions.BaseError as error:  # from options or variables that it cannot use
            why = _QUOTED.sub("...", str(error).strip().partition("\n")[0])  # what is quoted may be a secret
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
        """Turn obstore's exceptions into ours, naming the object."""
        try:
            yield
        except MillraceError:
            raise
        except Exception as error:
            translated = translate(error, f"{self._scheme}://{key}", self.identity, self._clients.credentials_error())
            if translated is None:
                raise
            raise translated from error


def _is_too_long(scheme: str, path: str) -> bool:
    """Whether no storage of this scheme has a name as long as this; known without a request."""
    if len(path) * 4 <= _PART_BYTES:
        return False
    size = len(path.encode())
    if scheme != "file":
        return size > _KEY_BYTES
    return size > _PATH_BYTES or any(len(part.encode()) > _PART_BYTES for part in path.split("/"))
