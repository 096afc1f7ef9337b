"""Origins that obstore speaks to: S3 and everything with its interface, and local files.

obstore is the fastest client that was measured, releases the GIL, and sends `If-Match`. Clients are made per process: what
a forked child inherits would hang (`obstore_library.py`).
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

from typing_extensions import Buffer

from millrace.errors import (
    ConfigurationError,
    DeniedError,
    MillraceError,
    ObjectChangedError,
    ObjectExistsError,
    ObjectNotFoundError,
    OriginUnavailableError,
)
from millrace.origin.obstore_library import obstore_library
from millrace.origin.options import s3_options
from millrace.origin.protocol import Listing, ObjectInfo

# One part of a streamed upload. S3 allows 10,000 parts, so a file may have 160 GB; S3's own ceiling of 5 TB would need
# parts that grow, and nothing here writes such files.
_PART_BYTES = 16 << 20
_UPLOAD_CONCURRENCY = 4
_LIST_PAGE = 1000

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

    # --- reading ----------------------------------------------------------------------------------

    def head(self, key: str) -> ObjectInfo:
        client, path = self._locate(key)
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
        with self._translated(key):
            options: dict[str, Any] = {"range": (start, stop)}
            if version:
                options["if_match"] = version
            data: Buffer = obstore_library().get(client, path, options=options).bytes()
        if len(memoryview(data)) != stop - start:
            raise OriginUnavailableError(
                f"{self._scheme}://{key} answered {len(memoryview(data))} bytes for the range [{start}, {stop})",
                next_step="read again; if it persists, a proxy in between truncates bodies",
            )
        return data

    # --- listing ----------------------------------------------------------------------------------

    def list_level(self, prefix: str) -> Listing:
        prefix = prefix.strip("/")
        client, path = self._locate(prefix)
        bucket = self._bucket(prefix)
        with self._translated(prefix):
            result = obstore_library().list_with_delimiter(client, path or None)
            objects = [self._info(bucket + meta["path"], meta) for meta in result["objects"] if meta["path"] != path]
            return Listing(objects=objects, prefixes=[bucket + name for name in result["common_prefixes"]])

    def list_all(self, prefix: str) -> Iterator[Sequence[ObjectInfo]]:
        prefix = prefix.strip("/")
        client, path = self._locate(prefix)
        bucket = self._bucket(prefix)
        with self._translated(prefix):
            held_back: list[ObjectInfo] = []
            for page in obstore_library().list(client, path or None, chunk_size=_LIST_PAGE):
                found = held_back + [self._info(bucket + meta["path"], meta) for meta in page if meta["path"] != path]
                objects = without_folder_markers(found)
                # Whether the last one is a marker shows with the first of the next page.
                held_back = objects[-1:] if objects and objects[-1].size == 0 else []
                if len(objects) > len(held_back):
                    yield objects[: len(objects) - len(held_back)]
            if held_back:
                yield held_back

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
                    chunk_size=_PART_BYTES,
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
        if self._scheme == "file":
            bucket, path = "", key.strip("/")
        else:
            bucket, _, path = key.strip("/").partition("/")
            if not bucket:
                raise ConfigurationError(
                    f"{self._scheme}:// without a bucket", next_step=f"write {self._scheme}://bucket/key"
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
        )

    def _info(self, key: str, meta: Mapping[str, Any]) -> ObjectInfo:
        version = meta["e_tag"] or meta["version"] or f"{meta['size']}-{meta['last_modified'].timestamp()}"
        return ObjectInfo(key=key, size=meta["size"], version=version, modified=meta["last_modified"].timestamp())

    @contextlib.contextmanager
    def _translated(self, key: str) -> Iterator[None]:
        """Turn obstore's exceptions into ours, naming the object."""
        url = f"{self._scheme}://{key}"
        try:
            yield
        except MillraceError:
            raise
        except Exception as error:
            translated = _translate(error, url, self._identity)
            if translated is None:
                raise
            raise translated from error


def without_folder_markers(objects: Sequence[ObjectInfo]) -> list[ObjectInfo]:
    """Leave out the empty objects that consoles and some servers make for folders: the key lies right above another one.

    `objects` are in the order of the origin, which lists a marker immediately before what is in its folder.
    """
    following = [*(info.key for info in objects[1:]), ""]
    return [
        info
        for info, next_key in zip(objects, following, strict=True)
        if info.size or not next_key.startswith(info.key + "/")
    ]


def _translate(error: Exception, url: str, identity: str) -> MillraceError | None:
    """Our error for one of obstore's; None for what is a fault of our own."""
    library = obstore_library().exceptions
    if isinstance(error, FileNotFoundError):
        return ObjectNotFoundError(f"{url} does not exist", next_step="check the name and the endpoint")
    if isinstance(error, library.PreconditionError):
        return ObjectChangedError(f"{url} was overwritten while it was read", next_step="open it again")
    if isinstance(error, library.AlreadyExistsError):
        return ObjectExistsError(f"{url} exists already", next_step="choose another name")
    if isinstance(error, library.PermissionDeniedError | library.UnauthenticatedError | PermissionError):
        return DeniedError(
            f"access to {url} was denied", next_step="check the credentials and their rights on this bucket"
        )
    if isinstance(error, library.InvalidPathError):
        return ObjectNotFoundError(f"{url} is no valid object name", next_step="check the name")
    if isinstance(error, library.BaseError | OSError | ValueError):
        return OriginUnavailableError(
            f"{url}: {identity} failed ({_first_line(error)})",
            next_step="check that the endpoint is up and reachable from this machine",
        )
    return None


def _first_line(error: BaseException) -> str:
    """The first line of a dependency's message, short enough for one line of ours."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:200]


class _AbortUploadError(Exception):
    """Raised into obstore's part iterator so that it aborts the multipart upload."""


class ObjectUpload:
    """Streams one object out in parts: obstore runs in a thread of its own and pulls parts from a short queue.

    Memory is bounded by the parts in the queue and in flight. An object that fits one part becomes a single PUT.
    Not thread-safe: one writer at a time.
    """

    def __init__(
        self, key: str, upload: Callable[[Iterator[Buffer]], None], put_whole: Callable[[Buffer], None]
    ) -> None:
        self._key = key
        self._upload = upload
        self._put_whole = put_whole
        self._part = bytearray()
        self._parts: queue.Queue[Buffer | BaseException | None] = queue.Queue(maxsize=2)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._finished = False

    def write(self, data: Buffer, /) -> int:
        if self._finished:
            raise ValueError(f"upload of {self._key} is closed")
        view = memoryview(data).cast("B")
        position = 0
        while position < len(view):
            taken = view[position : position + _PART_BYTES - len(self._part)]
            self._part += taken
            position += len(taken)
            if len(self._part) == _PART_BYTES:
                self._send(self._part)
                self._part = bytearray()
        return len(view)

    def close(self) -> None:
        if self._finished:
            return
        if self._thread is None:
            self._finished = True
            self._put_whole(self._part)
            return
        if self._part:
            self._send(self._part)
        self._send(None)
        self._finished = True
        self._thread.join()
        if self._error is not None:
            raise self._error

    def abort(self) -> None:
        if self._finished:
            return
        self._finished = True
        self._part = bytearray()
        if self._thread is not None:
            while self._thread.is_alive():
                with contextlib.suppress(queue.Full):
                    self._parts.put(_AbortUploadError(), timeout=0.1)
                    break
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        if exc_type is None:
            self.close()
        else:
            self.abort()

    def _send(self, part: Buffer | None) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="millrace-upload", daemon=True)
            self._thread.start()
        while self._error is None:
            try:
                self._parts.put(part, timeout=0.2)
                return
            except queue.Full:
                continue
        self._finished = True
        self._thread.join()
        raise self._error

    def _run(self) -> None:
        try:
            self._upload(self._pull())
        except BaseException as error:  # noqa: BLE001 - raised again in the writer's thread
            self._error = error

    def _pull(self) -> Iterator[Buffer]:
        while (part := self._parts.get()) is not None:
            if isinstance(part, BaseException):
                raise part
            yield part
