"""An origin within limits: the same Protocol around any other origin, with slots, gate, rate and retries."""

from __future__ import annotations

import contextlib
import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from typing_extensions import Buffer

from millrace.config import LIMIT_NAMES, resolve_limits
from millrace.origin.base import BaseOrigin, request_seconds, resumed
from millrace.origin.protocol import Listing, ListingPage, ObjectInfo, ObjectWriter, Origin
from millrace.origin.upload import ObjectUpload
from millrace.runtime.forks import imported

if TYPE_CHECKING:
    from millrace.origin.limits.slots import NodeLimiter

Result = TypeVar("Result")

DEFAULT_MAX_REQUESTS = 128
"""A network card of 100 Gbit/s needs about 130 requests at the 90 MB/s that S3 delivers for one. With small objects, at
30 ms each, 128 at once are some 4,000 a second; S3 supports 5,500 for one prefix."""

DEFAULT_MAX_WEB_REQUESTS = 16
"""For web servers, whose capacity is unknown: what a few browsers would send."""

_WEB = frozenset({"http", "https"})  # one origin is many servers; the first part of each key is one
_MOST_LIMITERS = 64  # limiters of web servers that one origin keeps open without using them
_FOLDER = ("millrace", "limits")  # in a cache directory, next to the nodes' folders: they share the limits
_SERVER = re.compile(r"[^/?#]*")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The explicit limits (`config.LIMIT_NAMES`) of an origin of this `scheme`.

    Other limits come from the environment and the file where the origin is used, because directories differ per node.
    """

    scheme: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, scheme: str, arguments: Mapping[str, Any] | None = None) -> Limits:
        """The limits with these options; None stands for an option that is not set."""
        given = {name: value for name, value in (arguments or {}).items() if name in LIMIT_NAMES and value is not None}
        return cls(scheme=scheme, arguments=given)


def limited(origin: Origin, limits: Limits) -> Origin:
    """`origin` within `limits`; unchanged if it sends no requests over a network. Raises `ConfigurationError`."""
    return origin if origin.head_is_local else LimitedOrigin(origin, limits)


def requests_in_flight(cache_dir: Path) -> int:
    """The requests to origins in progress, of all processes that share `cache_dir`."""
    slots_in_use = imported("millrace.origin.limits.node_state").slots_in_use
    in_flight = 0
    with contextlib.suppress(OSError):  # without the directory there was no request
        for path in cache_dir.joinpath(*_FOLDER).iterdir():
            with contextlib.suppress(OSError):  # a file that is not one of slots
                in_flight += slots_in_use(path)
    return in_flight


class OriginLimiter:
    """The `RequestLimiter` of one origin: the node's limiter for each URL, and retries.

    On the web each server has a limiter, also one that is reached by a redirect. Thread-safe, safe across fork. It uses the
    `origin` only for its name, and for the header `Retry-After` if the origin's library hides that.
    """

    def __init__(self, origin: Origin, limits: Limits) -> None:
        self._origin = origin
        self._is_web = limits.scheme in _WEB
        found = resolve_limits(limits.arguments)
        self._directory = found.directory.joinpath(*_FOLDER) if found.directory is not None else None
        self._most = found.max_requests or (DEFAULT_MAX_WEB_REQUESTS if self._is_web else DEFAULT_MAX_REQUESTS)
        self._per_second = found.requests_per_second
        self._timeout = found.timeout_seconds
        self.request_seconds = math.inf if self._timeout is None else request_seconds(self._timeout)
        self._limiters: dict[str, NodeLimiter] = {}

    # The modules that send requests are imported here: a process that finds everything in the cache does not need them.

    def retrying(self, url: str, operation: Callable[[], Result], *, once: bool = False) -> Result:
        plain, mark, _ = url.partition("?") if self._is_web else (url, "", "")
        shown = f"{plain}?..." if mark else plain  # the query may be a signature
        retried = imported("millrace.origin.limits.retrying").retried
        result: Result = retried(shown, operation, once=once, timeout=self._timeout)
        return result

    def slot(self, url: str, request: Callable[[], Result]) -> Result:
        in_slot = imported("millrace.origin.limits.retrying").in_slot
        result: Result = in_slot(
            self.limiter_of(url), url, request, lambda: self._retry_after(url), timeout=self._timeout
        )
        return result

    def limiter_of(self, url: str) -> NodeLimiter:
        """The limiter of a request for `url`."""
        name = self._name(url)
        limiter = self._limiters.get(name)
        if limiter is not None and name:
            self._limiters[name] = self._limiters.pop(name, limiter)  # the most recently used is the last
        if limiter is None:
            identity = name or self._origin.identity
            file = hashlib.blake2b(identity.encode(errors="surrogateescape"), digest_size=16).hexdigest()
            path = self._directory / file if self._directory is not None else None
            node_limiter = imported("millrace.origin.limits.slots").node_limiter
            made: NodeLimiter = node_limiter(identity, path, most=self._most, per_second=self._per_second)
            limiter = self._limiters.setdefault(name, made)
            self._drop_idle()
        return limiter

    def _name(self, url: str) -> str:
        """The name of the limiter: empty, or on the web the server."""
        if not self._is_web:
            return ""
        scheme, _, rest = url.partition("://")
        server = _SERVER.match(rest)
        assert server is not None  # it matches any text
        return f"{scheme} {server[0]}"

    def _drop_idle(self) -> None:
        """Drop limiters of servers, each with two open files. Their state stays in the file."""
        for name in list(self._limiters)[:-_MOST_LIMITERS]:
            limiter = self._limiters.get(name)
            if limiter is not None and limiter.is_idle:
                self._limiters.pop(name, None)

    def _retry_after(self, url: str) -> float | None:
        module = imported("millrace.origin.limits.retry_after")  # HTTP and TLS, which are rarely needed
        seconds: float | None = module.request_retry_after(self._origin, url.partition("://")[2])
        return seconds


class LimitedOrigin:
    """`inner` within the limits of this node, with retries.

    A `BaseOrigin` takes a slot for each of its requests; for other origins each call takes one. Thread-safe, safe across
    fork; pickles as `inner` and the explicit limits. Streams of `open_writer` with several parts are neither limited nor
    retried here: the library that sends them retries each part.
    """

    def __init__(self, inner: Origin, limits: Limits) -> None:
        self.inner = inner
        self._limits = limits
        self._limiter = OriginLimiter(inner, limits)
        self._takes_slots = isinstance(inner, BaseOrigin)
        self._origin: Origin = inner.within(self._limiter) if isinstance(inner, BaseOrigin) else inner

    def __repr__(self) -> str:
        return f"LimitedOrigin({self.inner!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.inner, self._limits)

    @property
    def identity(self) -> str:
        return self.inner.identity

    @property
    def head_is_local(self) -> bool:
        return False  # see `limited`

    def is_immutable(self, key: str) -> bool:
        return self.inner.is_immutable(key)

    # --- requests ---------------------------------------------------------------------------------

    def head(self, key: str) -> ObjectInfo:
        return self._retried(key, lambda: self._origin.head(key))

    def read(self, key: str, start: int, stop: int, *, version: str | None = None) -> Buffer:
        return self._retried(key, lambda: self._origin.read(key, start, stop, version=version))

    def list_level(self, prefix: str) -> Listing:
        if self._takes_slots:
            return self._origin.list_level(prefix)
        return self._retried(prefix, lambda: self._origin.list_level(prefix))

    def list_all(self, prefix: str) -> Iterator[Sequence[ObjectInfo]]:
        for page in self.list_pages(prefix):
            if page.objects:
                yield page.objects

    def list_pages(
        self, prefix: str, *, after: str = "", settled: Callable[[str], ObjectInfo | None] | None = None
    ) -> Iterator[ListingPage]:
        if self._takes_slots:
            return self._origin.list_pages(prefix, after=after, settled=settled)
        return resumed(
            lambda behind: self._origin.list_pages(prefix, after=behind, settled=settled),
            after,
            lambda next_page: self._retried(prefix, next_page),
        )

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        self._retried(key, lambda: self._origin.put(key, data, if_absent=if_absent), once=if_absent)

    def open_writer(self, key: str) -> ObjectWriter:
        writer = self._retried(key, lambda: self._origin.open_writer(key))
        if isinstance(writer, ObjectUpload):
            writer.send_whole_by(lambda data: self.put(key, data))
        return writer

    def delete(self, keys: Sequence[str]) -> None:
        if not keys:
            return
        if self._takes_slots:
            self._origin.delete(keys)
        else:
            self._retried(keys[0], lambda: self._origin.delete(keys))

    def _retried(self, key: str, operation: Callable[[], Result], *, once: bool = False) -> Result:
        url = self._url(key)
        if self._takes_slots:
            return self._limiter.retrying(url, operation, once=once)
        return self._limiter.retrying(url, lambda: self._limiter.slot(url, operation), once=once)

    def limiter_of(self, key: str) -> NodeLimiter:
        """The limiter of requests for `key`: one for all keys, on the web one for each server."""
        return self._limiter.limiter_of(self._url(key))

    def _url(self, key: str) -> str:
        return f"{self._limits.scheme}://{key}"
