"""An origin over any file system of fsspec.

A library gives no read that holds for one version only. So a read that names a version asks, after it has its bytes, whether
the object is still of that version: since the version was that before, too, it was all the time in between.
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
    ObjectChangedError,
    ObjectNotFoundError,
    OriginBusyError,
    OriginUnavailableError,
    UsageError,
)
from millrace.origin.fsspec_origin import uploads
from millrace.origin.fsspec_origin.clients import Clients
from millrace.origin.fsspec_origin.describing import describe, is_directory
from millrace.origin.fsspec_origin.library import class_of
from millrace.origin.fsspec_origin.naming import (
    identity_of,
    is_local,
    is_usable,
    lies_in_memory,
    only_a_secret_tells_whose,
    part_of_nothing,
    this_process,
)
from millrace.origin.fsspec_origin.translation import translated
from millrace.origin.protocol import Listing, ListingPage, ObjectInfo
from millrace.origin.turns import TakesTurns
from millrace.origin.upload import ObjectUpload

Result = TypeVar("Result")

_LIST_PAGE = 1000

# Libraries that only read, or that write in a way that replaces what else is in the same file.
_READ_ONLY = frozenset({"data", "gist", "git", "github", "libarchive", "reference", "tar", "zip"})


class FsspecOrigin(TakesTurns):
    """The storage that fsspec has a library for, with `target_options` for that library.

    A call of the library counts as a request: how many it sends for one, and whether it repeats them, is its own.

    Thread-safe, safe across fork; picklable by its two arguments, secrets included, where these are picklable. What lies in
    memory (`memory://`) exists in one process only. Raises `ConfigurationError` for a protocol that fsspec does not know,
    and `MissingDependencyError` for one whose library is not installed.
    """

    def __init__(self, scheme: str, target_options: Mapping[str, Any] | None = None) -> None:
        self._scheme = scheme
        self._target_options = dict(target_options or {})
        self._class = class_of(scheme)
        self._rooted = self._class.root_marker == "/"
        self._identity = identity_of(scheme, self._target_options)  # once: it is asked for at every open
        if only_a_secret_tells_whose(scheme, self._target_options):
            self._identity += f"+only={uuid.uuid4().hex}"  # nothing made of the secret may be stored, also no checksum
        self._in_memory = lies_in_memory(scheme, self._target_options)
        self._clients = Clients(self._class, self._target_options)

    def __repr__(self) -> str:
        return f"FsspecOrigin({self.identity!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._scheme, self._target_options), {"_identity": self._identity}

    @property
    def identity(self) -> str:
        return f"{self._identity}+{this_process()}" if self._in_memory else self._identity

    @property
    def head_is_local(self) -> bool:
        return is_local(self._scheme, self._target_options)

    def is_immutable(self, key: str) -> bool:
        return False

    # --- reading ----------------------------------------------------------------------------------

    def head(self, key: str) -> ObjectInfo:
        return self._request(key, lambda fs, path: self._describe(fs, path, key))

    def read(self, key: str, start: int, stop: int, *, version: str | None = None) -> Buffer:
        if not 0 <= start <= stop:
            raise ConfigurationError(f"bad byte range [{start}, {stop}) of {key}")
        if start == stop:
            return b""
        data = self._cat(key, start, stop)
        if version is None and len(data) == stop - start:
            return data
        info = self.head(key)
        if version is not None and info.version != version:
            raise ObjectChangedError(f"{self._url(key)} was overwritten while it was read", next_step="open it again")
        if stop > info.size:
            raise self._outside(info, start, stop)
        if len(data) != stop - start:
            raise OriginUnavailableError(
                f"{self._url(key)} answered {len(data)} bytes for the range [{start}, {stop})",
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
            except Exception:  # some say so of a range behind the end, each in its own way
                is_unclear = True
                raise

        try:
            return self._request(key, request)
        except OriginBusyError:
            raise
        except MillraceError as error:
            if is_unclear and stop > (info := self.head(key)).size:
                raise self._outside(info, start, stop) from error
            raise

    def _outside(self, info: ObjectInfo, start: int, stop: int) -> UsageError:
        return UsageError(
            f"the range [{start}, {stop}) ends past the {info.size} bytes of {self._url(info.key)}",
            next_step="read inside the object",
        )

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
            except (FileNotFoundError, NotADirectoryError):
                return Listing((), ())
            base = f"{prefix}/" if prefix else ""
            named = [(self._key(str(entry["name"])), entry) for entry in entries]
            # A library that is asked for a file lists that file.
            below = [(key, entry) for key, entry in named if key.startswith(base) and len(key) > len(base)]
            objects = [
                describe(key, entry, self._url(key))
                for key, entry in below
                if not is_directory(entry) and not part_of_nothing(key)
            ]
            prefixes = [key for key, entry in below if is_directory(entry)]
            return Listing(objects, prefixes, is_directory=bool(below) or not named)

        return self._turns.retrying(self._url(prefix), lambda: self._request(prefix, request))

    def list_all(self, prefix: str) -> Iterator[Sequence[ObjectInfo]]:
        return (page.objects for page in self.list_pages(prefix) if page.objects)

    def list_pages(
        self, prefix: str, *, after: str = "", settled: Callable[[str], ObjectInfo | None] | None = None
    ) -> Iterator[ListingPage]:
        """A walk in the order of the keys: one request a directory, in memory for the largest of them."""
        prefix = prefix.strip("/")
        first = self.list_level(prefix)
        objects: list[ObjectInfo] = []
        for info in self._walk(first, after):
            objects.append(info)
            if len(objects) == _LIST_PAGE:
                yield ListingPage(objects, False, first.is_directory)
                objects = []
        yield ListingPage(objects, True, first.is_directory)

    def _walk(self, listing: Listing, after: str) -> Iterator[ObjectInfo]:
        entries: list[tuple[str, ObjectInfo | None]] = [(info.key, info) for info in listing.objects]
        entries += [(f"{name}/", None) for name in listing.prefixes]
        for key, info in sorted(entries, key=lambda entry: entry[0]):
            if info is None:
                if key > after or after.startswith(key):
                    yield from self._walk(self.list_level(key), after)
            elif key > after:
                yield info

    # --- writing ----------------------------------------------------------------------------------

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        self._require_writable(key)
        body = memoryview(data).cast("B")

        def request(fs: Any, path: str) -> None:
            if if_absent:
                uploads.create(fs, path, body, self._url(key))
            else:
                uploads.write_one(fs, path, body)

        self._request(key, request)

    def open_writer(self, key: str) -> ObjectUpload:
        self._require_writable(key)

        def upload(parts: Iterator[Buffer]) -> None:
            with self._ask(key, long=True) as (fs, path):
                uploads.write(fs, path, parts)

        return ObjectUpload(key, upload, lambda data: self.put(key, data))

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._require_writable(key)
            self._turns.retrying(self._url(key), functools.partial(self._request, key, uploads.remove))

    def _require_writable(self, key: str) -> None:
        if self._scheme in _READ_ONLY:
            raise UsageError(f"{self._url(key)} can only be read", next_step="write to another storage")

    # --- names ------------------------------------------------------------------------------------

    def _request(self, key: str, action: Callable[[Any, str], Result]) -> Result:
        """Run `action(fs, path)`, which is one call of the library or a few that belong together, in a turn."""

        def request() -> Result:
            with self._ask(key) as (fs, path):
                return action(fs, path)

        return self._turns.turn(self._url(key), request)

    @contextlib.contextmanager
    def _ask(self, key: str, *, long: bool = False) -> Iterator[tuple[Any, str]]:
        """A file system of the library and its path for `key`; what it raises becomes ours."""
        if key.strip("/") and not is_usable(key.strip("/")):
            raise ObjectNotFoundError(
                f"{self._url(key)!r} is no valid object name",
                next_step="use UTF-8 without control characters, and no empty, '.' or '..' parts",
            )
        lend = self._clients.lend_long if long else self._clients.lend
        with translated(self._url(key), self._target_options), lend() as fs:
            yield fs, ("/" if self._rooted else "") + key.strip("/")

    def _key(self, name: str) -> str:
        return name.removeprefix(f"{self._scheme}://").strip("/")

    def _url(self, key: str) -> str:
        return f"{self._scheme}://{key}"
