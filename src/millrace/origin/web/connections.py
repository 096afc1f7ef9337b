"""HTTP connections, shared by all threads of a process; a forked child opens its own."""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401  # otherwise imported by the thread that looks up a host, see `runtime.forks`
import functools
import http.client
import logging
import math
import os
import queue
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

import urllib3
from urllib3.exceptions import HTTPError, LocationValueError, SSLError

from millrace.errors import (
    ConfigurationError,
    MillraceError,
    OriginUnavailableError,
    RetryableError,
    UsageError,
)
from millrace.origin.base import UNLIMITED, RequestLimiter
from millrace.origin.reachability import Cause, cause_of, diagnose, note_response, proxy_of, trusted_context
from millrace.origin.web.addresses import redirected, shown
from millrace.origin.web.options import SILENCE_SECONDS
from millrace.runtime import forks
from millrace.runtime.maintenance import PeriodicThread

Result = TypeVar("Result")

_CONNECT_SECONDS = 5.0
_BODY_SECONDS = 120.0  # as for object stores: a block of 8 MiB fails below 70 KB/s
_KEPT_CONNECTIONS = 128  # to one server; more than threads that read at once
_SERVERS = 32
_CHUNK_BYTES = 1 << 20
_DRAINED_BYTES = 16 << 10
_DRAIN_SECONDS = 0.2
_REDIRECTS = 10
_MOVED = frozenset({301, 302, 303, 307, 308})


class _IdleConnections:
    """Takes the place of the queue of urllib3's pools: the last one is used first. A forked child has none.

    Each method is one step on a list, so that an interrupt (Ctrl-C) leaves no lock held, as it can in Python's queue.
    """

    def __init__(self, maxsize: int = 0) -> None:
        self._maxsize = maxsize
        self._idle: list[Any] = []
        _queues.add(self)

    def renew(self) -> None:
        self._idle = []

    def qsize(self) -> int:
        return len(self._idle)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """The last one. Never waits: urllib3 opens another connection."""
        try:
            return self._idle.pop()
        except IndexError:
            raise queue.Empty from None

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        if len(self._idle) >= self._maxsize:
            raise queue.Full
        self._idle.append(item)


# urllib3 closes its pools when they are collected and at the exit: a child must not close connections of its parent.
_queues = forks.objects_reset_in_child(_IdleConnections.renew)


class _Head:
    """The lines of a response's head. `is_cut` when the connection ended before the empty line after them."""

    def __init__(self, file: Any) -> None:
        self._file, self.is_cut = file, False

    def readline(self, limit: int = -1) -> bytes:
        line: bytes = self._file.readline(limit)
        self.is_cut = self.is_cut or not line
        return line

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class _WholeHead(http.client.HTTPResponse):
    """Refuses a head that is cut, which Python's class takes for a response without a body."""

    def begin(self) -> None:
        file: Any = self.fp
        head: Any = _Head(file)
        self.fp = head
        try:
            super().begin()
        finally:
            if self.fp is head:
                self.fp = file
        if head.is_cut:
            raise http.client.RemoteDisconnected("the connection ended in the head of the response")


class _HttpConnection(urllib3.connection.HTTPConnection):
    response_class = _WholeHead

    def getresponse(self) -> urllib3.HTTPResponse:  # type: ignore[override]  # as in urllib3
        with _in_time(self):
            return super().getresponse()


class _HttpsConnection(urllib3.connection.HTTPSConnection):
    response_class = _WholeHead

    def getresponse(self) -> urllib3.HTTPResponse:  # type: ignore[override]  # as in urllib3
        with _in_time(self):
            return super().getresponse()


class _HttpPool(urllib3.HTTPConnectionPool):
    QueueCls: Any = _IdleConnections
    ConnectionCls = _HttpConnection


class _HttpsPool(urllib3.HTTPSConnectionPool):
    QueueCls: Any = _IdleConnections
    ConnectionCls = _HttpsConnection


# The sockets that wait for the head of a response, and when it must be complete, in monotonic seconds. The timeout of a
# socket begins again with every byte.
_heads: dict[Any, float] = {}
_watch = PeriodicThread("millrace-heads")


def _leave_heads_to_parent() -> None:
    forks.keep_inherited(dict(_heads))  # to shut one down here would end the connection of the parent
    _heads.clear()


forks.reset_in_child(_leave_heads_to_parent)


def _shut_down_late_heads() -> bool:
    now = time.monotonic()
    for sock, deadline in list(_heads.items()):
        if now > deadline and _heads.pop(sock, None) is not None:
            # Of TLS inside of TLS (an https proxy): the socket below.
            plain = sock if isinstance(sock, socket.socket) else sock.socket
            with contextlib.suppress(OSError):  # closed meanwhile
                # Not `SSLSocket.shutdown`, after which reads return, and writes send, bytes without TLS: the head may have
                # arrived in this moment, and the body is read or the connection reused.
                socket.socket.shutdown(plain, socket.SHUT_RDWR)
    return bool(_heads)


@contextlib.contextmanager
def _in_time(connection: Any) -> Iterator[None]:
    """Shut the connection down when the head of its response takes longer than the connection's timeout."""
    sock, seconds = connection.sock, connection.timeout
    if sock is None or not isinstance(seconds, int | float):
        yield
        return
    _heads[sock] = time.monotonic() + seconds
    try:
        with contextlib.suppress(RuntimeError):  # the interpreter is ending, and starts no threads
            _watch.register(_shut_down_late_heads)
        yield
    finally:
        _heads.pop(sock, None)


class _Quiet(logging.Filter):
    """Removes our requests from urllib3's log: their queries may be signatures."""

    def __init__(self) -> None:
        super().__init__()
        self.ours = threading.local()

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING or not getattr(self.ours, "sending", False)

    @contextlib.contextmanager
    def sending(self) -> Iterator[None]:
        self.ours.sending = True
        try:
            yield
        finally:
            self.ours.sending = False


_quiet = _Quiet()
logging.getLogger("urllib3.connectionpool").addFilter(_quiet)


class Response:
    """One response with an unread body. Leaving the `with` block returns the connection, or closes it in mid-body.

    `url` is the final URL after redirects. For one thread.
    """

    def __init__(self, response: urllib3.BaseHTTPResponse, url: str, seconds: float = math.inf) -> None:
        """`seconds`: the longest time until the end of the body."""
        self._response = response
        self.url = url
        self._deadline = time.monotonic() + seconds

    @property
    def status(self) -> int:
        return self._response.status

    @property
    def headers(self) -> Mapping[str, str]:
        return self._response.headers

    def read(self, size: int) -> bytes:
        """At most `size` bytes of the body. Raises `OriginUnavailableError` if it breaks off or takes too long."""
        deadline = time.monotonic() + _BODY_SECONDS
        parts: list[bytes] = []
        while size > 0 and (part := self._read_part(min(size, _CHUNK_BYTES))):
            parts.append(part)
            size -= len(part)
            if size and time.monotonic() > deadline:
                raise OriginUnavailableError(f"{shown(self.url)} is sent too slowly", next_step="try again later")
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def stream(self, chunk_bytes: int = 1 << 20) -> Iterator[bytes]:
        """The whole body, in pieces. One of known length may take any time; the caller checks its rate."""
        if self._response.length_remaining is not None:
            self._deadline = math.inf
        while part := self._read_part(chunk_bytes):
            yield part

    def _read_part(self, size: int) -> bytes:
        """The bytes in the socket, at most `size`, so that the caller notices a server that sends very slowly."""
        if time.monotonic() > self._deadline:
            raise OriginUnavailableError(
                f"{shown(self.url)} takes longer than the option 'timeout' allows",
                next_step="raise it, or try again later",
            )
        with _translated(self.url):
            part: bytes = self._response.read1(size)
            return part

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        # No wait after an interrupt or a stall.
        self._close(drain=exc is None or (isinstance(exc, MillraceError) and not isinstance(exc, RetryableError)))

    def _close(self, *, drain: bool) -> None:
        """Return the connection if the body is read nearly to its end; otherwise close it."""
        left = self._response.length_remaining
        # Cheaper than another connection: redirects, refusals, HEAD.
        if drain and left is not None and left <= _DRAINED_BYTES:
            with contextlib.suppress(HTTPError, OSError):  # then it is closed below
                self._drain(time.monotonic() + _DRAIN_SECONDS)
        self._response.close()
        self._response.release_conn()

    def _drain(self, deadline: float) -> None:
        """Read to the end; raises if the server sends nothing until `deadline`, in monotonic seconds."""
        sock: socket.socket | None = getattr(self._response.connection, "sock", None)
        if sock is None:  # not reusable
            return
        patience = sock.gettimeout()
        while (seconds := deadline - time.monotonic()) > 0:
            sock.settimeout(seconds)
            if not self._response.read1(_DRAINED_BYTES):
                break
        sock.settimeout(patience)


@dataclass(frozen=True, slots=True)
class _Moved:
    """A redirect."""

    target: str


class Connections:
    """The connections of one origin, with `use_proxies` through the environment's proxies (HTTPS_PROXY, NO_PROXY and so on).

    `verify` is False for unchecked certificates, or the path of the trusted ones. A server that sends nothing for
    `silence_seconds` has stalled. Nothing is retried here. Thread-safe; safe across fork.
    """

    def __init__(
        self, *, verify: bool | str = True, silence_seconds: float = SILENCE_SECONDS, use_proxies: bool = True
    ) -> None:
        self._verify, self._silence_seconds, self._use_proxies = verify, silence_seconds, use_proxies
        self._managers: dict[tuple[str, bool], urllib3.PoolManager] = {}
        self._lock, self._owner = threading.Lock(), forks.Owner()

    def request(
        self,
        method: str,
        url: str,
        headers: Callable[[str], Mapping[str, str]],
        use: Callable[[Response], Result],
        *,
        limiter: RequestLimiter = UNLIMITED,
        follow: Callable[[str], bool] = lambda target: True,
    ) -> Result:
        """Send a request and return the result of `use` for its response.

        Follows redirects for which `follow(target)` is True. Each hop has its own slot until `use` has returned, which must
        not send requests. `headers` returns the headers for a URL, so that it can hide secrets from other servers. Raises
        `OriginUnavailableError` if a retry may help, otherwise `UsageError`.
        """
        for _ in range(_REDIRECTS):
            hop = functools.partial(self._hop, method, url, headers, use, limiter, follow)
            result = limiter.slot(shown(url), hop)
            if not isinstance(result, _Moved):
                return result
            url = result.target
        raise UsageError(f"{shown(url)} redirects in a circle", next_step="read the final address itself")

    def _hop(
        self,
        method: str,
        url: str,
        headers: Callable[[str], Mapping[str, str]],
        use: Callable[[Response], Result],
        limiter: RequestLimiter,
        follow: Callable[[str], bool],
    ) -> Result | _Moved:
        with self._send(method, url, headers(url), limiter) as response:
            location = response.headers.get("Location")
            if response.status in _MOVED and location and follow(target := redirected(url, location)):
                return _Moved(target)
            return use(response)

    def _send(self, method: str, url: str, headers: Mapping[str, str], limiter: RequestLimiter) -> Response:
        with _translated(url), _quiet.sending():
            response = self._manager(url).request(
                method,
                url,
                timeout=urllib3.Timeout(
                    connect=min(_CONNECT_SECONDS, limiter.request_seconds),
                    read=min(self._silence_seconds, limiter.request_seconds),
                ),
                headers={"Accept-Encoding": "identity", **headers},
                retries=False,
                redirect=False,
                preload_content=False,
                decode_content=False,
            )
        note_response(url)
        return Response(response, url, limiter.request_seconds)

    def _manager(self, url: str) -> urllib3.PoolManager:
        if not self._owner.is_this_process:  # the parent's connections belong to the parent
            self._managers, self._lock, self._owner = {}, threading.Lock(), forks.Owner()
        proxy = proxy_of(url) if self._use_proxies else ""
        encrypted = url.startswith("https:") or proxy.startswith("https:")
        manager = self._managers.get((proxy, encrypted))
        if manager is None:
            with self._lock:
                manager = self._managers.get((proxy, encrypted))
                if manager is None:
                    manager = self._managers[proxy, encrypted] = self._make_manager(proxy, encrypted)
        return manager

    def _make_manager(self, proxy: str, encrypted: bool) -> urllib3.PoolManager:
        options: dict[str, Any] = {
            "num_pools": _SERVERS,
            "maxsize": _KEPT_CONNECTIONS,
            **(_tls(self._verify) if encrypted else {}),  # reading all certificates takes a while
        }
        manager: urllib3.PoolManager
        if proxy:
            parts = urllib3.util.parse_url(proxy)
            login = urllib3.make_headers(proxy_basic_auth=parts.auth) if parts.auth else None
            manager = urllib3.ProxyManager(parts._replace(auth=None).url, proxy_headers=login, **options)
        else:
            manager = urllib3.PoolManager(**options)
        manager.pool_classes_by_scheme = {"http": _HttpPool, "https": _HttpsPool}
        return manager


def _tls(verify: bool | str) -> dict[str, Any]:
    """urllib3's options for certificates. Raises `ConfigurationError` if the trusted ones cannot be read."""
    if verify is False:
        return {"cert_reqs": "CERT_NONE", "assert_hostname": False}
    try:
        if isinstance(verify, str):
            in_a_folder = os.path.isdir(verify)
            context = ssl.create_default_context(
                cafile=None if in_a_folder else verify, capath=verify if in_a_folder else None
            )
        else:
            context = trusted_context()
    except (OSError, ImportError) as error:
        raise ConfigurationError(
            "the trusted certificates cannot be read", next_step="set 'verify' to the path of a PEM file"
        ) from error
    return {"ssl_context": context}


@contextlib.contextmanager
def _translated(url: str) -> Iterator[None]:
    """Replace urllib3's exceptions by Millrace's, which name the resource without its query."""
    try:
        yield
    except SSLError as error:
        if any(isinstance(each, ssl.SSLCertVerificationError) for each in (error, *error.args)):
            raise ConfigurationError(
                f"the certificate of {shown(url)} is not trusted ({_reason(error)})",
                next_step="set target_options={'verify': path} to the path of the trusted certificates",
            ) from error
        raise _unavailable(url, error) from error
    except LocationValueError:
        raise UsageError(f"{shown(url)} is not a valid URL", next_step="check it") from None  # the error has the query
    except (HTTPError, OSError) as error:
        raise _unavailable(url, error) from error


def _unavailable(url: str, error: Exception) -> OriginUnavailableError:
    cause = cause_of(error, urlsplit(url).netloc.rpartition("@")[2])
    if cause is None and url.startswith("http:"):  # TLS has its own errors, also with certificates from `verify`
        cause = diagnose(url)
    cause = cause or Cause(_reason(error), "check that the server is up and reachable from this machine", None)
    return cause.error(f"{shown(url)} cannot be read")


def _reason(error: Exception) -> str:
    """The message of a dependency, short and without a URL."""
    text = " ".join(str(part) for part in error.args if not isinstance(part, urllib3.HTTPConnectionPool)) or str(error)
    return f"{type(error).__name__}: {' '.join(text.split())[:160]}"
