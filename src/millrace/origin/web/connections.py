"""HTTP connections that are kept and used again, by all threads of a process; a forked child makes its own."""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401  # else by the first thread that looks up a host, see `origin.importing`
import functools
import logging
import os
import queue
import socket
import ssl
import threading
import time
import urllib.request
import weakref
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
from millrace.origin.importing import imported
from millrace.origin.turns import FREE, Turns
from millrace.origin.web.addresses import redirected, shown
from millrace.origin.web.options import SILENCE_SECONDS

Result = TypeVar("Result")

_CONNECT_SECONDS = 5.0
_BODY_SECONDS = 120.0  # as for object stores: below 70 KB/s a block of 8 MiB is given up
_KEPT_CONNECTIONS = 128  # to one server; more than threads that read at once
_SERVERS = 32
_CHUNK_BYTES = 1 << 20
_DRAINED_BYTES = 16 << 10
_DRAIN_SECONDS = 0.2
_REDIRECTS = 10
_MOVED = frozenset({301, 302, 303, 307, 308})


class _ForkSafeQueue(queue.LifoQueue[Any]):
    """Where urllib3 keeps idle connections. In a forked child it is emptied, with locks that no lost thread holds."""

    def __init__(self, maxsize: int = 0) -> None:
        super().__init__(maxsize)
        _queues.add(self)

    def renew(self) -> None:
        self.mutex = threading.Lock()
        self.not_empty = threading.Condition(self.mutex)
        self.not_full = threading.Condition(self.mutex)
        self.all_tasks_done = threading.Condition(self.mutex)
        self.queue = []


_queues: weakref.WeakSet[_ForkSafeQueue] = weakref.WeakSet()


def _renew_queues() -> None:
    # urllib3 closes its pools when they are collected and at the end of the process, and would wait for such a lock.
    for each in list(_queues):
        each.renew()


os.register_at_fork(after_in_child=_renew_queues)


class _HttpPool(urllib3.HTTPConnectionPool):
    QueueCls = _ForkSafeQueue


class _HttpsPool(urllib3.HTTPSConnectionPool):
    QueueCls = _ForkSafeQueue


class _Quiet(logging.Filter):
    """Keeps urllib3's log of requests free of ours: it has queries in it, which may be signatures."""

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


class Answer:
    """One answer, its body not read yet. Leaving the `with` block gives the connection back, or closes it in mid-body.

    `url` is what answered, after redirects. For one thread.
    """

    def __init__(
        self, response: urllib3.BaseHTTPResponse, url: str, keep: Callable[[], Callable[[], None]] = FREE.keep
    ) -> None:
        self._response = response
        self.url = url
        self._keep = keep
        self._end_of_turn: Callable[[], None] | None = None
        self._is_given_away = False

    def give_away(self) -> Answer:
        """The same answer for another owner, another thread too: closing this one does nothing from now on.

        Called where the answer is used: its turn ends when the other owner closes it.
        """
        other = Answer(self._response, self.url)
        other._end_of_turn = self._keep()
        self._is_given_away = True
        return other

    @property
    def status(self) -> int:
        return self._response.status

    @property
    def headers(self) -> Mapping[str, str]:
        return self._response.headers

    def read(self, size: int) -> bytes:
        """At most `size` bytes of the body. Raises `OriginUnavailableError` where it breaks off or takes too long."""
        deadline = time.monotonic() + _BODY_SECONDS
        parts: list[bytes] = []
        while size > 0 and (part := self._read_part(min(size, _CHUNK_BYTES))):
            parts.append(part)
            size -= len(part)
            if size and time.monotonic() > deadline:
                raise OriginUnavailableError(f"{shown(self.url)} is sent too slowly", next_step="try again later")
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def stream(self, chunk_bytes: int = 1 << 20) -> Iterator[bytes]:
        """The whole body, in pieces."""
        while part := self._read_part(chunk_bytes):
            yield part

    def _read_part(self, size: int) -> bytes:
        """What the socket has, at most `size` bytes, so that a server that sends a byte now and then is given up in time."""
        with _translated(self.url):
            part: bytes = self._response.read1(size)
            return part

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an interrupt, or a stall, nothing is waited for.
        self.close(drain=exc is None or (isinstance(exc, MillraceError) and not isinstance(exc, RetryableError)))

    def close(self, *, drain: bool = True) -> None:
        """Give the connection back if the body is read nearly to its end, close it if not. Idempotent."""
        if self._is_given_away:
            return
        try:
            self._close(drain)
        finally:
            if self._end_of_turn is not None:
                self._end_of_turn()

    def _close(self, drain: bool) -> None:
        left = self._response.length_remaining
        # Cheaper than another connection: redirects, refusals, HEAD.
        if drain and left is not None and left <= _DRAINED_BYTES:
            with contextlib.suppress(HTTPError, OSError):  # else it is closed below
                self._drain(time.monotonic() + _DRAIN_SECONDS)
        self._response.close()
        self._response.release_conn()

    def _drain(self, deadline: float) -> None:
        """Read to the end; not after `deadline`, in monotonic seconds. Raises where the server is silent until then."""
        sock: socket.socket | None = getattr(self._response.connection, "sock", None)
        if sock is None:  # it is not used again
            return
        patience = sock.gettimeout()
        while (seconds := deadline - time.monotonic()) > 0:
            sock.settimeout(seconds)
            if not self._response.read1(_DRAINED_BYTES):
                break
        sock.settimeout(patience)


@dataclass(frozen=True, slots=True)
class _Moved:
    """An answer that is elsewhere."""

    target: str


class Connections:
    """The connections of one origin, with `use_proxies` through those of the environment (HTTPS_PROXY, NO_PROXY and so on).

    `verify` is whether certificates are checked, or the path of those to trust. A server that is silent for
    `silence_seconds` has stalled. No request is repeated here. Thread-safe; safe across fork.
    """

    def __init__(
        self, *, verify: bool | str = True, silence_seconds: float = SILENCE_SECONDS, use_proxies: bool = True
    ) -> None:
        self._verify, self._silence_seconds, self._use_proxies = verify, silence_seconds, use_proxies
        self._managers: dict[tuple[str, bool], urllib3.PoolManager] = {}
        self._lock, self._pid = threading.Lock(), os.getpid()

    def ask(
        self,
        method: str,
        url: str,
        headers: Callable[[str], Mapping[str, str]],
        use: Callable[[Answer], Result],
        *,
        turns: Turns = FREE,
        follow: Callable[[str], bool] = lambda target: True,
    ) -> Result:
        """What `use` makes of the answer to a request, sent again to where it redirects as long as `follow(target)` says so.

        Each of them has a turn of its own, which lasts until `use` has returned: that sends no request, and gives the answer
        away if it is to stay open. `headers` gives those for a URL: it decides what another server is told. Raises
        `OriginUnavailableError` for what another try may cure, `UsageError` for what it will not.
        """
        for _ in range(_REDIRECTS):
            told = turns.turn(shown(url), functools.partial(self._hop, method, url, headers, use, turns, follow))
            if not isinstance(told, _Moved):
                return told
            url = told.target
        raise UsageError(f"{shown(url)} redirects in a circle", next_step="read the address where the bytes are")

    def _hop(
        self,
        method: str,
        url: str,
        headers: Callable[[str], Mapping[str, str]],
        use: Callable[[Answer], Result],
        turns: Turns,
        follow: Callable[[str], bool],
    ) -> Result | _Moved:
        with self._send(method, url, headers(url), turns) as answer:
            location = answer.headers.get("Location")
            if answer.status in _MOVED and location and follow(target := redirected(url, location)):
                return _Moved(target)
            return use(answer)

    def _send(self, method: str, url: str, headers: Mapping[str, str], turns: Turns) -> Answer:
        with _translated(url), _quiet.sending():
            response = self._manager(url).request(
                method,
                url,
                headers={"Accept-Encoding": "identity", **headers},
                retries=False,
                redirect=False,
                preload_content=False,
                decode_content=False,
            )
        return Answer(response, url, turns.keep)

    def _manager(self, url: str) -> urllib3.PoolManager:
        if self._pid != os.getpid():  # the parent's connections are its own
            self._managers, self._lock, self._pid = {}, threading.Lock(), os.getpid()
        proxy = _proxy_of(url) if self._use_proxies else ""
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
            "timeout": urllib3.Timeout(connect=_CONNECT_SECONDS, read=self._silence_seconds),
            **(_tls(self._verify) if encrypted else {}),  # to read all certificates takes a while
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


def _proxy_of(url: str) -> str:
    """The proxy that the environment names for `url`, empty for none."""
    parts = urlsplit(url)
    proxy = urllib.request.getproxies_environment().get(parts.scheme, "")
    if not proxy or urllib.request.proxy_bypass_environment(parts.netloc):  # type: ignore[attr-defined]
        return ""
    return proxy if "://" in proxy else f"http://{proxy}"


def _tls(verify: bool | str) -> dict[str, Any]:
    """What urllib3 needs to know about certificates. Raises `ConfigurationError` where those to trust cannot be read."""
    if verify is False:
        return {"cert_reqs": "CERT_NONE", "assert_hostname": False}
    context = ssl.create_default_context()
    try:
        if isinstance(verify, str):
            in_a_folder = os.path.isdir(verify)
            context = ssl.create_default_context(
                cafile=None if in_a_folder else verify, capath=verify if in_a_folder else None
            )
        elif not context.cert_store_stats()["x509_ca"] and not _has_hashed_certificates():
            certifi = imported("certifi")  # an image without a system's certificates
            context.load_verify_locations(certifi.where())
    except (OSError, ImportError) as error:
        raise ConfigurationError(
            "the certificates to trust cannot be read", next_step="give the path of a PEM file as 'verify'"
        ) from error
    return {"ssl_context": context}


def _has_hashed_certificates() -> bool:
    """Whether the system keeps certificates one by one, which OpenSSL reads only when it needs one."""
    folder = ssl.get_default_verify_paths().capath
    return bool(folder and os.path.isdir(folder) and os.listdir(folder))


@contextlib.contextmanager
def _translated(url: str) -> Iterator[None]:
    """Turn urllib3's exceptions into ours, naming the resource without its query."""
    try:
        yield
    except SSLError as error:
        if any(isinstance(each, ssl.SSLCertVerificationError) for each in (error, *error.args)):
            raise ConfigurationError(
                f"the certificate of {shown(url)} is not trusted ({_reason(error)})",
                next_step="give the path of the certificates to trust as target_options={'verify': path}",
            ) from error
        raise _unavailable(url, error) from error
    except LocationValueError:
        raise UsageError(f"{shown(url)} is no valid URL", next_step="check it") from None  # it repeats the query
    except (HTTPError, OSError) as error:
        raise _unavailable(url, error) from error


def _unavailable(url: str, error: Exception) -> OriginUnavailableError:
    return OriginUnavailableError(
        f"{shown(url)} cannot be read ({_reason(error)})",
        next_step="check that the server is up and reachable from this machine",
    )


def _reason(error: Exception) -> str:
    """What went wrong, in a dependency's words; short, and without a URL."""
    text = " ".join(str(part) for part in error.args if not isinstance(part, urllib3.HTTPConnectionPool)) or str(error)
    return f"{type(error).__name__}: {' '.join(text.split())[:160]}"
