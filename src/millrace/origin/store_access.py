"""Reads objects of an object store, and the common part of listing and writing: names, clients, errors, descriptions.

obstore has one client for each container (bucket), with its credentials. Inherited clients would hang
(`obstore_library.py`), so a forked child creates its own. Requests are methods of the client: a client and its methods are
of the same image of the extension. In the main thread, Ctrl-C interrupts a request (`interruptible`).
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple, Self, TypeVar

from typing_extensions import Buffer

from millrace.errors import ConfigurationError, DeniedError, MillraceError, ObjectNotFoundError, OriginUnavailableError
from millrace.origin.base import BaseOrigin, RequestLimiter
from millrace.origin.credentials import Found, find_credentials
from millrace.origin.keys import UNUSABLE_IN_PATHS, bucket_word, check_readable
from millrace.origin.obstore_library import is_panic, obstore_library
from millrace.origin.options import StoreOptions, azure_options, gcs_options, s3_options
from millrace.origin.protocol import ObjectInfo
from millrace.origin.reachability import diagnose, note_response
from millrace.origin.side_by_side import action_at_late_end
from millrace.origin.translation import is_outside, panicked, translate
from millrace.runtime import forks

Result = TypeVar("Result")

OBJECT_STORES = frozenset({"s3", "az", "gs", "file"})
"""The schemes whose names `check_name` checks."""

# Others, such as a space, cause a panic of obstore. Access points have colons, some containers of Azure a dollar sign.
_BUCKET = re.compile(r"[A-Za-z0-9._:$-]+")

# The longest keys of all clouds, and the longest paths and parts of paths in Linux, in bytes of UTF-8.
_KEY_BYTES = 1024
_PATH_BYTES = 4095
_PART_BYTES = 255

_QUOTED = re.compile(r"([\"'`]).*?\1")

# The prefix of the version of an object without an ETag.
MADE_UP = "~"


# For uploads in parts, which obstore itself retries.
RETRY: dict[str, Any] = {
    # The time ends first, as in `retrying.PATIENCE`.
    "max_retries": 60,
    "retry_timeout": timedelta(seconds=60),
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


class _Service(NamedTuple):
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
    renewal_error: OriginUnavailableError | None = None


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
        options = self._options
        self.identity = f"{scheme}+{options.endpoint}" if options is not None else scheme
        """The storage without any secret: scheme and endpoint."""
        self.address = options.address if options is not None else ""
        """The URL of the server that requests go to; empty for local files."""
        self.may_write = options is None or options.may_write
        self._states: forks.PerProcess[_State] = forks.PerProcess(lambda _: _State())

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

        Not for explicit credentials, and not for those that obstore finds itself. Raises `OriginUnavailableError` if the
        last look failed for now.
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
                if (failed := state.renewal_error) is not None:
                    raise OriginUnavailableError(failed.message, next_step=failed.next_step)
                return False
            state.renewal_error = None
            try:
                changed = provider.renew()
            except OriginUnavailableError as error:
                state.renewal_error = error
                raise
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


class StoreAccess(BaseOrigin):
    """One storage system (scheme, endpoint, credentials) with all its buckets. Thread-safe; safe across fork."""

    def __init__(self, scheme: str, target_options: Mapping[str, Any] | None = None) -> None:
        super().__init__(scheme, target_options)
        self._clients = Clients(scheme, self._target_options)
        self._identity = self._clients.identity
        self._is_reached = False

    def within(self, limiter: RequestLimiter) -> Self:
        copy = super().within(limiter)
        if limiter.request_seconds < math.inf:
            copy._clients = Clients(self._scheme, self._target_options, request_seconds=limiter.request_seconds)
        return copy

    @property
    def head_is_local(self) -> bool:
        return self._scheme == "file"

    def head(self, key: str) -> ObjectInfo:
        def request(client: Any, path: str) -> ObjectInfo:
            if not path:  # obstore would describe a bucket as an empty object
                raise ObjectNotFoundError(f"{self._url(key)} is not an object", next_step="name an object in it")
            if self._scheme == "file":
                check_readable("/" + path)
            return self._info(key, client.head(path))

        return self._request(key, request)

    def read_range(self, key: str, start: int, stop: int, version: str | None) -> Buffer:
        options: dict[str, Any] = {"range": (start, stop)}
        if version and _is_strong(version):
            options["if_match"] = version

        def request(client: Any, path: str) -> tuple[Any, Buffer] | Exception:
            try:
                result = client.get(path, options=options)
            except obstore_library().exceptions.GenericError as error:
                if is_outside(error) or self._scheme == "file":
                    refused: Exception = error
                    return refused  # another request shows whether it is behind the end
                raise
            # Also after a precondition, which a proxy may have dropped.
            if version and not _is_version(self._info(key, result.meta).version, version):
                raise self._overwritten(key)
            return result.meta, result.bytes()

        response = self._request(key, request)
        if isinstance(response, Exception):
            info = self.head(key)
            if start >= info.size:
                raise self._range_error(info, start, stop, version) from response
            with self._translated(key):
                raise response
        meta, data = response
        got = len(memoryview(data))
        if got != stop - start:
            if meta["size"] < stop and got == meta["size"] - start:
                raise self._range_error(self._info(key, meta), start, stop, version)
            raise OriginUnavailableError(
                f"{self._url(key)} returned {got} bytes for the range [{start}, {stop})",
                next_step="read again; if it persists, a proxy in between truncates bodies",
            )
        return data

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
            if not self._is_reached and self._clients.address:
                note_response(self._clients.address)
                self._is_reached = True
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

    def _range_error(self, info: ObjectInfo, start: int, stop: int, version: str | None) -> MillraceError:
        """The error for a range that ends past the object's end: the object was longer before, or never."""
        if version and version != info.version:
            return self._overwritten(info.key)
        return self._outside(info.key, start, stop, info.size)

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


def _is_strong(version: str) -> bool:
    """Whether a version can be sent as `If-Match`: a weak ETag never matches, and a made-up version is not an ETag."""
    return not version.startswith(("W/", MADE_UP))


def _is_version(responded: str, wanted: str) -> bool:
    """Whether a response has the wanted version. A proxy may make an ETag weak without changing a byte."""
    return responded == wanted or (_is_strong(wanted) and responded == f"W/{wanted}")


# --- names ----------------------------------------------------------------------------------------


def check_name(scheme: str, key: str) -> tuple[str, str]:
    """Split `key` of an object store into its bucket, empty for local files, and the path inside. Makes no request.

    Raises `ObjectNotFoundError` if no object and no prefix can have this name, `ConfigurationError` without a bucket.
    """
    name = key.strip("/")
    bucket, _, path = ("", "", name) if scheme == "file" else name.partition("/")
    if scheme != "file" and not _BUCKET.fullmatch(bucket):
        word = bucket_word(scheme)
        if not bucket:
            raise ConfigurationError(
                f"{scheme}:// without a {word}",
                next_step=f"{word}s cannot be listed; write {scheme}://{word}/key",
            )
        pattern = any(each in bucket for each in "*?[")
        raise ObjectNotFoundError(
            f"{scheme}://{bucket} is not the name of a {word}",
            next_step=f"{word}s cannot be listed; put patterns after the name of one" if pattern else "check the name",
        )
    if name and UNUSABLE_IN_PATHS.search(name):  # the error of obstore would not name it
        raise ObjectNotFoundError(
            f"{scheme}://{key} is not a valid object name",
            next_step="use UTF-8 without control characters, and no empty, '.' or '..' parts",
        )
    if scheme == "az" and "\\" in name:
        raise ObjectNotFoundError(
            f"az://{key} is not a valid object name", next_step="remove the backslash: Azure replaces it by a slash"
        )
    if _is_too_long(scheme, path):
        raise ObjectNotFoundError(
            f"{scheme}://{key[:64]}... is not a valid object name", next_step="use a shorter name"
        )
    return bucket, path


def _is_too_long(scheme: str, path: str) -> bool:
    """Whether the path is longer than any name of this scheme's storages."""
    if len(path) * 4 <= _PART_BYTES:
        return False
    size = len(path.encode())
    if scheme != "file":
        return size > _KEY_BYTES
    return size > _PATH_BYTES or any(len(part.encode()) > _PART_BYTES for part in path.split("/"))


# --- calls that Ctrl-C interrupts -----------------------------------------------------------------

# obstore's calls ignore signals: Python runs signal handlers only in the main thread, between its instructions, so not
# inside of such a call. In the main thread, another thread runs the call (`interruptible`). If the wait is interrupted, that
# thread finishes the call alone, and the next call gets a new thread.

# A signal just before the kernel starts to wait does not end the wait.
_LOOK_SECONDS = 0.5


class _Call:
    """One call and its outcome."""

    __slots__ = ("action", "done", "error", "result")

    def __init__(self, action: Callable[[], Any]) -> None:
        self.action = action
        self.done = threading.Lock()
        self.done.acquire()
        self.result: Any = None
        self.error: BaseException | None = None


class _Caller:
    """A daemon thread that runs calls one after the other, for the process that created it."""

    def __init__(self) -> None:
        self.owner = forks.Owner()
        self.calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        try:
            threading.Thread(target=self._run, name="millrace-origin-call", daemon=True).start()
        except BaseException:  # an interrupt: it may have started
            self.calls.put(None)
            raise

    def _run(self) -> None:
        while (call := self.calls.get()) is not None:
            try:
                call.result = call.action()
            except BaseException as error:  # noqa: BLE001 - raised again in the main thread
                call.error = error
            call.done.release()
            del call  # frees its memory before the next call


# At most one, for the main thread.
_idle: list[_Caller] = []


def interruptible(action: Callable[[], Result]) -> Result:
    """Return or raise the outcome of `action`. In the main thread signal handlers run meanwhile, and may raise.

    After such an exception `action` continues in the background (`at_late_end`). Costs some 50 microseconds in the main
    thread, nothing in others. Safe across fork.
    """
    if threading.current_thread() is not threading.main_thread():
        return action()
    # Removed while in use: a signal handler that sends its own request gets another.
    caller = _idle.pop() if _idle else None
    if caller is None or not caller.owner.is_this_process:
        try:
            caller = _Caller()
        except RuntimeError:  # no more threads, or the interpreter is ending
            return action()
    try:
        call = _Call(action)
        caller.calls.put(call)
        while not call.done.acquire(timeout=_LOOK_SECONDS):
            pass
    except BaseException:
        if (after := action_at_late_end()) is not None:
            caller.calls.put(_Call(after))
        caller.calls.put(None)  # it ends after the calls
        raise
    if _idle:
        caller.calls.put(None)
    else:
        _idle.append(caller)
    if call.error is not None:
        try:
            raise call.error
        finally:
            del call
    result: Result = call.result
    return result
