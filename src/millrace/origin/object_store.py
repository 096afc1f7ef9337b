"""Origins that obstore speaks to: S3 and everything with its interface, and local files.

obstore is the fastest client that was measured, releases the GIL, and sends `If-Match`. Clients are made per process: what
a forked child inherits would hang (`obstore_library.py`).
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any

from typing_extensions import Buffer

from millrace.errors import (
    ConfigurationError,
    MillraceError,
    ObjectChangedError,
    ObjectNotFoundError,
    OriginUnavailableError,
    UsageError,
)
from millrace.origin.credentials import credential_provider
from millrace.origin.obstore_library import obstore_library
from millrace.origin.options import s3_options
from millrace.origin.protocol import Listing, ListingPage, ObjectInfo
from millrace.origin.translation import s3_code, translate
from millrace.origin.upload import PART_BYTES, ObjectUpload

_UPLOAD_CONCURRENCY = 4
_LIST_PAGE = 1000
_MARKER_THREADS = 16

_RETRY = {
    "max_retries": 8,
    "retry_timeout": timedelta(seconds=60),
    # Jittered: a server that restarts is waited for 10 to 20 seconds, one that is gone is an error after that.
    "backoff": {"init_backoff": timedelta(milliseconds=200), "max_backoff": timedelta(seconds=5), "base": 4},
}
_CLIENT = {
    "connect_timeout": timedelta(seconds=5),
    "timeout": timedelta(seconds=120),
    "read_timeout": timedelta(seconds=20),
}


# Control characters, bytes that were no UTF-8 (as Python keeps them in a string), and parts that a URL would resolve away.
_UNUSABLE = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]|(?:^|/)\.{0,2}(?:/|$)")

# Begins the version of an object for which the origin has no ETag.
_MADE_UP = "~"


def _is_strong(version: str) -> bool:
    """Whether a version may be sent as `If-Match`: a weak ETag never matches there, and one that is made up says nothing."""
    return not version.startswith(("W/", _MADE_UP))


# Clients of a parent process: never destroyed, since that could wait for its threads.
_inherited: list[dict[str, Any]] = []


class ObjectStoreOrigin:
    """One storage system (scheme, endpoint, credentials) with all its buckets.

    Thread-safe; picklable (with the explicit `target_options`, secrets included, as documented); safe across fork.
    """

    def __init__(self, scheme: str, target_options: Mapping[str, Any] | None = None) -> None:
        self._scheme = scheme
        self._target_options = dict(target_options or {})
        if scheme == "s3":
            options = s3_options(self._target_options, os.environ)
            self._identity = f"s3+{options.endpoint}"
        elif scheme == "file":
            if self._target_options:
                raise ConfigurationError("local files take no target_options", next_step="leave them out")
            self._identity = "file"
        else:
            raise ConfigurationError(f"no object store for {scheme}://", next_step="use s3:// or file://")
        self._clients: dict[str, Any] = {}
        self._pid = os.getpid()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"ObjectStoreOrigin({self._identity!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._scheme, self._target_options)

    @property
    def identity(self) -> str:
        return self._identity

    @property
    def head_is_local(self) -> bool:
        return self._scheme == "file"

    def is_immutable(self, key: str) -> bool:
        return False

    # --- reading ----------------------------------------------------------------------------------

    def head(self, key: str) -> ObjectInfo:
        client, path = self._locate(key)
        if not path:  # obstore would describe a bucket as an empty object
            raise ObjectNotFoundError(f"{self._scheme}://{key} is no object", next_step="name an object in it")
        with self._translated(key):
            if self._scheme == "file" and os.path.isdir("/" + path):
                raise FileNotFoundError(key)
            return self._info(key, obstore_library().head(client, path))

    def read(self, key: str, start: int, stop: int, *, version: str | None = None) -> Buffer:
        if not 0 <= start <= stop:
            raise ConfigurationError(f"bad byte range [{start}, {stop}) of {key}")
        if start == stop:
            return b""
        client, path = self._locate(key)
        options: dict[str, Any] = {"range": (start, stop)}
        if version and _is_strong(version):
            options["if_match"] = version
        with self._translated(key):
            try:
                result = obstore_library().get(client, path, options=options)
            except obstore_library().exceptions.GenericError as error:
                if s3_code(error) == "InvalidRange" or self._scheme == "file":
                    info = self.head(key)
                    if start >= info.size:
                        raise self._outside(info, start, stop, version) from error
                raise
            if version and not _is_strong(version) and self._info(key, result.meta).version != version:
                raise self._overwritten(key)
            data: Buffer = result.bytes()
        got = len(memoryview(data))
        if got != stop - start:
            if result.meta["size"] < stop and got == result.meta["size"] - start:
                raise self._outside(self._info(key, result.meta), start, stop, version)
            raise OriginUnavailableError(
                f"{self._scheme}://{key} answered {got} bytes for the range [{start}, {stop})",
                next_step="read again; if it persists, a proxy in between truncates bodies",
            )
        return data

    def _outside(self, info: ObjectInfo, start: int, stop: int, version: str | None) -> MillraceError:
        """The error for a range that ends past the object's end: it was longer when the reader was told, or never."""
        if version and version != info.version:
            return self._overwritten(info.key)
        return UsageError(
            f"the range [{start}, {stop}) ends past the {info.size} bytes of {self._scheme}://{info.key}",
            next_step="read inside the object",
        )

    def _overwritten(self, key: str) -> MillraceError:
        return ObjectChangedError(
            f"{self._scheme}://{key} was overwritten while it was read", next_step="open it again"
        )

    # --- listing ----------------------------------------------------------------------------------

    def list_level(self, prefix: str) -> Listing:
        prefix = prefix.strip("/")
        client, path = self._locate(prefix)
        bucket = self._bucket(prefix)
        with self._translated(prefix), self._listable(prefix):
            result = obstore_library().list_with_delimiter(client, path or None)
            objects = [self._info(bucket + meta["path"], meta) for meta in result["objects"] if meta["path"] != path]
            prefixes = [bucket + name for name in result["common_prefixes"]]
            folders = set(prefixes)
            return Listing(
                objects=[info for info in objects if info.size or info.key not in folders],
                prefixes=prefixes,
                # A bucket that answers, a folder's marker (it alone has the prefix's own name), or a local directory.
                is_directory=not path
                or any(meta["path"] == path for meta in result["objects"])
                or (self._scheme == "file" and os.path.isdir("/" + path)),
            )

    def list_all(self, prefix: str) -> Iterator[Sequence[ObjectInfo]]:
        for page in self.list_pages(prefix):
            if page.objects:
                yield page.objects

    def list_pages(
        self, prefix: str, *, after: str = "", settled: Callable[[str], ObjectInfo | None] | None = None
    ) -> Iterator[ListingPage]:
        if self._scheme == "file":
            return self._list_local_pages(prefix.strip("/"), after)
        return self._list_remote_pages(prefix.strip("/"), after, settled or (lambda _: None))

    def _list_remote_pages(
        self, prefix: str, after: str, settled: Callable[[str], ObjectInfo | None]
    ) -> Iterator[ListingPage]:
        client, path = self._locate(prefix)
        bucket = self._bucket(prefix)
        # The marker of the folder itself is wanted when listing begins, and is not an object below it.
        offset = after.removeprefix(bucket).rstrip("/") if after.rstrip("/") != prefix else ""
        with self._translated(prefix), self._listable(prefix):
            held_back: list[ObjectInfo] = []
            is_directory = not path
            for chunk in obstore_library().list(client, path or None, offset=offset or None, chunk_size=_LIST_PAGE):
                last = len(chunk) < _LIST_PAGE
                is_directory = is_directory or any(meta["path"] == path for meta in chunk)
                found = held_back + [self._info(bucket + meta["path"], meta) for meta in chunk if meta["path"] != path]
                objects = without_folder_markers(found)
                # Whether the last one is a marker shows with the first of the next page.
                held_back = objects[-1:] if objects and objects[-1].size == 0 and not last else []
                objects = objects[: len(objects) - len(held_back)]
                yield ListingPage(self._with_empty_folders(objects, settled), last, is_directory)
                if last:
                    return
            yield ListingPage(self._with_empty_folders(held_back, settled), True, is_directory)

    def _list_local_pages(self, prefix: str, after: str) -> Iterator[ListingPage]:
        """A walk in the order of the keys, which obstore's own is not; bounded by the largest directory."""
        objects: list[ObjectInfo] = []
        is_directory = os.path.isdir("/" + prefix)
        for info in self._walk(prefix, after):
            objects.append(info)
            if len(objects) == _LIST_PAGE:
                yield ListingPage(objects, False, is_directory)
                objects = []
        yield ListingPage(objects, True, is_directory)

    def _walk(self, prefix: str, after: str) -> Iterator[ObjectInfo]:
        listing = self.list_level(prefix)
        entries: list[tuple[str, ObjectInfo | None]] = [(info.key, info) for info in listing.objects]
        entries += [(f"{name}/", None) for name in listing.prefixes]
        for key, info in sorted(entries, key=lambda entry: entry[0]):
            if info is None:
                if key > after or after.startswith(key):
                    yield from self._walk(key, after)
            elif key > after:
                yield info

    def _with_empty_folders(
        self, objects: Sequence[ObjectInfo], settled: Callable[[str], ObjectInfo | None]
    ) -> Sequence[ObjectInfo]:
        """Tell the markers of empty folders from empty objects, by a slash at the end of their key.

        obstore takes the slash off, but cannot fetch such a name either: an empty object that a listing names and a request
        does not find is a marker. Costs a request for each empty object that is not settled.
        """
        empty = [info for info in objects if not info.size]
        if not empty:
            return objects
        earlier = {info.key: settled(info.key) for info in empty}
        names = {info.key: told.key for info in empty if (told := earlier[info.key]) is not None and _same(info, told)}
        unsure = [info.key for info in empty if info.key not in names]
        if unsure:
            with ThreadPoolExecutor(min(len(unsure), _MARKER_THREADS), thread_name_prefix="millrace-markers") as pool:
                for key, found in zip(unsure, pool.map(self._is_object, unsure), strict=True):
                    names[key] = key if found else f"{key}/"
        return [info if info.size else replace(info, key=names[info.key]) for info in objects]

    def _is_object(self, key: str) -> bool:
        try:
            self.head(key)
        except ObjectNotFoundError:
            return False
        return True

    # --- writing ----------------------------------------------------------------------------------

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        client, path = self._locate(key)
        with self._translated(key):
            # A view as plain bytes: obstore takes one-dimensional uint8 buffers only.
            body = memoryview(data).cast("B")
            obstore_library().put(client, path, body, mode="create" if if_absent else "overwrite", use_multipart=False)

    def open_writer(self, key: str) -> ObjectUpload:
        client, path = self._locate(key)

        def upload(parts: Iterator[Buffer]) -> None:
            with self._translated(key):
                obstore_library().put(
                    client,
                    path,
                    parts,
                    use_multipart=True,
                    chunk_size=PART_BYTES,
                    max_concurrency=_UPLOAD_CONCURRENCY,
                )

        return ObjectUpload(key, upload, lambda data: self.put(key, data))

    def delete(self, keys: Sequence[str]) -> None:
        by_bucket: dict[str, list[str]] = {}
        for key in keys:
            by_bucket.setdefault(self._bucket(key), []).append(key)
        for members in by_bucket.values():
            located = [self._locate(key) for key in members]
            with self._translated(members[0]):
                if self._scheme == "file":
                    for _, path in located:
                        with contextlib.suppress(FileNotFoundError):
                            obstore_library().delete(located[0][0], path)
                else:
                    obstore_library().delete(located[0][0], [path for _, path in located])

    # --- clients and errors -----------------------------------------------------------------------

    def _bucket(self, key: str) -> str:
        """The part of a key that obstore's answers lack, with its slash."""
        return "/" if self._scheme == "file" else key.split("/", 1)[0] + "/"

    def _locate(self, key: str) -> tuple[Any, str]:
        """Split `key` into the client of its bucket and the path inside."""
        name = key.strip("/")
        if self._scheme == "file":
            bucket, path = "", name
        else:
            bucket, _, path = name.partition("/")
            if not bucket:
                raise ConfigurationError(
                    f"{self._scheme}:// without a bucket", next_step=f"write {self._scheme}://bucket/key"
                )
        if name and _UNUSABLE.search(name):  # obstore would call it a bad value, and not say of what
            raise ObjectNotFoundError(
                f"{self._scheme}://{key} is no valid object name",
                next_step="use UTF-8 without control characters, and no empty, '.' or '..' parts",
            )
        if self._pid != os.getpid():
            # The parent's clients belong to threads that do not exist here: neither use nor destroy them.
            _inherited.append(self._clients)
            self._clients, self._lock, self._pid = {}, threading.Lock(), os.getpid()
        client = self._clients.get(bucket)
        if client is None:
            with self._lock:
                client = self._clients.get(bucket)
                if client is None:
                    client = self._clients[bucket] = self._make_client(bucket)
        return client, path

    def _make_client(self, bucket: str) -> Any:
        if self._scheme == "file":
            return obstore_library().store.LocalStore("/")
        options = s3_options(self._target_options, os.environ)
        return obstore_library().store.S3Store(
            bucket,
            config=dict(options.config),
            client_options={**_CLIENT, **options.client_options},
            retry_config=_RETRY,
            credential_provider=credential_provider(options, os.environ),
        )

    def _info(self, key: str, meta: Mapping[str, Any]) -> ObjectInfo:
        version = (
            meta["e_tag"] or f"{_MADE_UP}{meta['version'] or ''}-{meta['size']}-{meta['last_modified'].timestamp()}"
        )
        return ObjectInfo(key=key, size=meta["size"], version=version, modified=meta["last_modified"].timestamp())

    @contextlib.contextmanager
    def _listable(self, prefix: str) -> Iterator[None]:
        """Tell a listed name that obstore cannot take from one that was asked for: the others are there all the same."""
        try:
            yield
        except obstore_library().exceptions.InvalidPathError as error:
            if "//" in prefix:
                raise
            raise UsageError(
                f"{self._scheme}://{prefix} holds an object whose name cannot be used ({error})",
                next_step="rename that object (no control characters, no empty parts), or list a directory without it",
            ) from error

    @contextlib.contextmanager
    def _translated(self, key: str) -> Iterator[None]:
        """Turn obstore's exceptions into ours, naming the object."""
        url = f"{self._scheme}://{key}"
        try:
            yield
        except MillraceError:
            raise
        except Exception as error:
            translated = translate(error, url, self._identity)
            if translated is None:
                raise
            raise translated from error


def _same(info: ObjectInfo, earlier: ObjectInfo) -> bool:
    return (info.version, info.modified) == (earlier.version, earlier.modified)


def without_folder_markers(objects: Sequence[ObjectInfo]) -> list[ObjectInfo]:
    """Leave out the empty objects that consoles and some servers make for folders: the key lies right above another one.

    `objects` are in the order of the origin, which lists a marker immediately before what is in its folder.
    """
    following = [info.key for info in objects[1:]] + [""] * bool(objects)
    return [
        info
        for info, next_key in zip(objects, following, strict=True)
        if info.size or not next_key.startswith(info.key + "/")
    ]
