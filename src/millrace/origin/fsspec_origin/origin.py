"""An origin over any file system of fsspec.

The libraries have no conditional reads. So a read with a version describes the object after it has the bytes: if the version
is the same before and after, the bytes are of that version.
"""

from __future__ import annotations

import contextlib
import functools
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from typing_extensions import Buffer

from millrace.errors import (
    ConfigurationError,
    MillraceError,
    ObjectNotFoundError,
    OriginBusyError,
    OriginUnavailableError,
    UsageError,
)
from millrace.origin.base import BaseOrigin, byte_view, pages_of, walk
from millrace.origin.fsspec_origin import uploads
from millrace.origin.fsspec_origin.clients import Clients, class_of
from millrace.origin.fsspec_origin.naming import (
    identity_of,
    is_in_memory,
    is_incomplete,
    is_local,
    is_usable,
    needs_secret_for_identity,
    this_process,
)
from millrace.origin.fsspec_origin.translation import describe, is_directory, kind_of, translated
from millrace.origin.options.store import unusable_in
from millrace.origin.protocol import Listing, ListingPage, ObjectInfo
from millrace.origin.upload import ObjectUpload

Result = TypeVar("Result")

_LIST_PAGE = 1000

# Libraries that only read, or whose writes replace other content of the same file.
_READ_ONLY = frozenset({"data", "gist", "git", "github", "libarchive", "reference", "tar", "zip"})


class FsspecOrigin(BaseOrigin):
    """A storage with a library of fsspec; `target_options` are the options of the library.

    A call of the library counts as one request, although it may send several or retry them. `memory://` exists in one
    process only. Raises `ConfigurationError` for a protocol that fsspec does not have, and `MissingDependencyError` if its
    library is not installed. See `BaseOrigin` for threads, forks and pickles.
    """

    def __init__(self, scheme: str, target_options: Mapping[str, Any] | None = None) -> None:
        super().__init__(scheme, target_options)
        for name, value in self._target_options.items():
            if unusable_in(value, lines=False):
                raise ConfigurationError(
                    f"option {name!r} of {scheme}:// contains a line end", next_step="copy the value again, as one line"
                )
        self._class = class_of(scheme)
        self._rooted = self._class.root_marker == "/"
        self._identity = identity_of(scheme, self._target_options)  # computed once: used at every open
        if needs_secret_for_identity(scheme, self._target_options):
            # Not derived from the secret, of which not even a checksum may be stored.
            self._identity += f"+only={uuid.uuid4().hex}"
        self._in_memory = is_in_memory(scheme, self._target_options)
        self._clients = Clients(self._class, self._target_options)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._scheme, self._target_options), {"_identity": self._identity}

    @property
    def identity(self) -> str:
        return f"{self._identity}+{this_process()}" if self._in_memory else self._identity

    @property
    def head_is_local(self) -> bool:
        return is_local(self._scheme, self._target_options)

    # --- reading ----------------------------------------------------------------------------------

    def head(self, key: str) -> ObjectInfo:
        return self._request(key, lambda fs, path: self._describe(fs, path, key))

    def read_range(self, key: str, start: int, stop: int, version: str | None) -> Buffer:
        data = self._cat(key, start, stop)
        if version is None and len(data) == stop - start:
            return data
        info = self.head(key)
        if version is not None and info.version != version:
            raise self._overwritten(key)
        if stop > info.size:
            raise self._outside(key, start, stop, info.size)
        if len(data) != stop - start:
            raise OriginUnavailableError(
                f"{self._url(key)} returned {len(data)} bytes for the range [{start}, {stop})",
                next_step="read again; if it persists, the library behind it cannot read ranges",
            )
        return data

    def _cat(self, key: str, start: int, stop: int) -> bytes:
        is_unclear = False

        def request(fs: Any, path: str) -> bytes:
            nonlocal is_unclear
            try:
                return bytes(fs.cat_file(path, start=start, end=stop))
            except (FileNotFoundError, PermissionError, ConnectionError, TimeoutError):
                raise
            except Exception:  # may be a range behind the end, with a different error in each library
                is_unclear = True
                raise

        try:
            return self._request(key, request)
        except OriginBusyError:
            raise
        except MillraceError as error:
            if is_unclear and stop > (info := self.head(key)).size:
                raise self._outside(key, start, stop, info.size) from error
            raise

    def _describe(self, fs: Any, path: str, key: str) -> ObjectInfo:
        fs.invalidate_cache()
        info = fs.info(path)
        if is_directory(info):
            raise ObjectNotFoundError(f"{self._url(key)} is a directory", next_step="name an object in it")
        return describe(key, info, self._url(key))

    # --- listing ----------------------------------------------------------------------------------

    def list_level(self, prefix: str) -> Listing:
        prefix = prefix.strip("/")

        def request(fs: Any, path: str) -> Listing:
            fs.invalidate_cache()
            try:
                entries = fs.ls(path, detail=True)
            except Exception as error:
                if not issubclass(kind_of(error), FileNotFoundError | NotADirectoryError):
                    raise
                return Listing((), ())
            base = f"{prefix}/" if prefix else ""
            named = [(self._key(str(entry["name"])), entry) for entry in entries]
            # Some libraries list a file as itself.
            below = [(key, entry) for key, entry in named if key.startswith(base) and len(key) > len(base)]
            objects = [
                describe(key, entry, self._url(key))
                for key, entry in below
                if not is_directory(entry) and not is_incomplete(key)
            ]
            prefixes = [key for key, entry in below if is_directory(entry)]
            return Listing(objects, prefixes, is_directory=bool(below) or not named)

        return self._retrying(prefix, lambda: self._request(prefix, request))

    def list_pages(
        self, prefix: str, *, after: str = "", settled: Callable[[str], ObjectInfo | None] | None = None
    ) -> Iterator[ListingPage]:
        """A walk in the order of the keys: one request for each directory, one directory in memory at a time.

        An empty directory is an empty object whose key ends in a slash.
        """
        prefix = prefix.strip("/")
        first = self.list_level(prefix)
        objects = walk(self.list_level, first, after, lambda key: ObjectInfo(key, size=0, version="", modified=0.0))
        yield from pages_of(objects, _LIST_PAGE, is_directory=first.is_directory)

    # --- writing ----------------------------------------------------------------------------------

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        self._require_writable(key)
        body = byte_view(data)

        def request(fs: Any, path: str) -> None:
            if if_absent:
                uploads.create(fs, path, body, self._url(key))
            else:
                uploads.write_one(fs, path, body)

        self._request(key, request)

    def open_writer(self, key: str) -> ObjectUpload:
        self._require_writable(key)

        def upload(parts: Iterator[Buffer]) -> None:
            with self._client(key, long=True) as (fs, path):
                uploads.write(fs, path, parts)

        return ObjectUpload(key, upload, lambda data: self.put(key, data))

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._require_writable(key)
            self._retrying(key, functools.partial(self._request, key, uploads.remove))

    def _require_writable(self, key: str) -> None:
        if self._scheme in _READ_ONLY:
            raise UsageError(f"{self._url(key)} is read only", next_step="write to another storage")

    # --- names ------------------------------------------------------------------------------------

    def _request(self, key: str, action: Callable[[Any, str], Result]) -> Result:
        """Run `action(fs, path)`, which is one call of the library or a few related ones, in a slot."""

        def request() -> Result:
            with self._client(key) as (fs, path):
                return action(fs, path)

        return self._slot(key, request)

    @contextlib.contextmanager
    def _client(self, key: str, *, long: bool = False) -> Iterator[tuple[Any, str]]:
        """A file system of the library and its path for `key`. Replaces its errors by Millrace's."""
        if key.strip("/") and not is_usable(key.strip("/")):
            raise ObjectNotFoundError(
                f"{self._url(key)!r} is not a valid object name",
                next_step="use UTF-8 without control characters, and no empty, '.' or '..' parts",
            )
        lend = self._clients.lend_long if long else self._clients.lend
        with translated(self._url(key), self._target_options), lend() as fs:
            yield fs, ("/" if self._rooted else "") + key.strip("/")

    def _key(self, name: str) -> str:
        return name.removeprefix(f"{self._scheme}://").strip("/")
