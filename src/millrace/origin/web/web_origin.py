"""Web servers as an origin: any object that has a URL, read by ranges and checked against its version. Read only.

Listings come from the index pages of servers; a server without them cannot be listed.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

from typing_extensions import Buffer

from millrace.errors import ConfigurationError, MillraceError, ObjectNotFoundError, OriginUnavailableError
from millrace.origin.base import BaseOrigin
from millrace.origin.protocol import Listing, ListingPage, ObjectInfo
from millrace.origin.web.addresses import same_server, shown, url_of
from millrace.origin.web.connections import Connections, Response
from millrace.origin.web.listings import IndexListings, IndexPage, parse_index
from millrace.origin.web.options import WebOptions, netrc_header, web_options
from millrace.origin.web.responses import (
    ContentRange,
    announced_range,
    check_encoding,
    content_length,
    content_range,
    exact_body,
    index_text,
    modified_of,
    precondition,
    refusal,
    version_of,
)
from millrace.origin.web.whole import WholeCopies, WholeCopy
from millrace.runtime import forks

Result = TypeVar("Result")

_REMEMBERED = 16_384
_ROUTE_SECONDS = 300.0  # how long a redirect is reused; otherwise each range of an object would cost two requests
# Statuses of servers that refuse HEAD for objects that they have.
_TRY_GET = frozenset({400, 403, 405, 406, 500, 501})


class _SizeDiffersError(OriginUnavailableError):
    """A response has another size than an earlier one of the same version: `size` in bytes."""

    size = 0


class _Session:
    """The state of one process: connections, copies of objects without ranges, and observations. Thread-safe.

    `without_head` are servers that refuse HEAD; `netrc` has the login of each server; `routes` has the target of each
    redirect and its expiry (monotonic seconds).
    """

    def __init__(self, options: WebOptions) -> None:
        self.connections = Connections(
            verify=options.verify, silence_seconds=options.timeout_seconds, use_proxies=options.trusts_environment
        )
        self.whole = WholeCopies()
        self.without_head: set[str] = set()
        self.netrc: dict[str, Mapping[str, str]] = {}
        self.routes: OrderedDict[str, tuple[str, float]] = OrderedDict()
        self._sizes: OrderedDict[str, tuple[str, int]] = OrderedDict()

    def note_route(self, url: str, target: str) -> None:
        """Record a redirect."""
        self.routes[url] = (target, time.monotonic() + _ROUTE_SECONDS)
        while len(self.routes) > _REMEMBERED:
            self.routes.popitem(last=False)

    def note_size(self, url: str, version: str, size: int) -> None:
        """Record the size of a version."""
        self._sizes[url] = (version, size)
        while len(self._sizes) > _REMEMBERED:
            self._sizes.popitem(last=False)

    def check_size(self, url: str, version: str, size: int) -> None:
        """Raise `_SizeDiffersError` if a version had another size before: a truncated body may claim to be the whole."""
        known_version, known_size = self._sizes.get(url, ("", 0))
        if known_version == version and known_size != size:
            error = _SizeDiffersError(
                f"{shown(url)} has {size} bytes instead of {known_size} in the same version",
                next_step="read again; if it persists, a proxy in between truncates bodies",
            )
            error.size = size
            raise error
        self.note_size(url, version, size)


@dataclass(frozen=True, slots=True)
class _Unsatisfied:
    """A refused range; `found` is the header `Content-Range` of the response."""

    found: ContentRange | None


class WebOrigin(BaseOrigin):
    """All servers behind `http://` or `https://`. See `BaseOrigin` for threads, forks and pickles."""

    cannot_be_written = "web servers are read only; write to an object store or to files"

    def __init__(self, scheme: str, target_options: Mapping[str, Any] | None = None) -> None:
        if scheme not in ("http", "https"):
            raise ConfigurationError(f"no web server serves {scheme}://", next_step="use http:// or https://")
        super().__init__(scheme, target_options)
        self._options = web_options(self._target_options)
        self._sessions: forks.PerProcess[_Session] = forks.PerProcess(lambda _: _Session(self._options))

    # --- reading ----------------------------------------------------------------------------------

    def head(self, key: str) -> ObjectInfo:
        url = self._address(key)
        parts = urlsplit(url)
        if parts.path.endswith("/") and not parts.query:
            raise ObjectNotFoundError(f"{shown(url)} names a directory", next_step="name an object in it")
        session = self._sessions.get()
        refused = False
        if parts.netloc not in session.without_head:

            def described(response: Response) -> ObjectInfo | None:
                nonlocal refused
                refused = response.status != 200
                if refused and response.status not in _TRY_GET:
                    raise self._refusal(response)
                size = content_length(response) if not refused else None
                # Some servers send 0 to HEAD for generated objects.
                return self._info(key, url, response, size) if size else None

            if (info := self._request("HEAD", url, {}, described)) is not None:
                return info
        info = self._head_by_get(key, url)
        if refused:
            session.without_head.add(parts.netloc)
        return info

    def _head_by_get(self, key: str, url: str) -> ObjectInfo:
        """Describe an object by a GET of its first byte, or of the whole if the server does not send its size."""
        is_range = True

        def described(response: Response) -> ObjectInfo | None:
            nonlocal is_range
            is_range = response.status in (206, 416)
            if is_range:
                found = content_range(response.headers)
                size = found.total if found is not None else None
                if response.status == 206:
                    response.read(1)
                elif size:  # invalid: the first byte cannot be refused
                    size = None
            elif response.status == 200:
                size = content_length(response)
            else:
                raise self._refusal(response)
            return self._info(key, url, response, size) if size is not None else None

        for headers in ({"Range": "bytes=0-0"}, {}):
            if (info := self._request("GET", url, headers, described)) is not None:
                return info
            if not is_range:
                break
        whole = self._sessions.get().whole

        def downloaded(response: Response) -> WholeCopy:
            if response.status != 200:
                raise self._refusal(response)
            self._check(url, response)
            return whole.download(url, response)

        with whole.one_at_a_time(url):
            copy = self._request("GET", url, {}, downloaded)
        return ObjectInfo(key=key, size=copy.size, version=copy.version, modified=copy.modified)

    def read_range(self, key: str, start: int, stop: int, version: str | None) -> Buffer:
        url = self._address(key)
        try:
            return self._read(key, url, start, stop, version)
        except _SizeDiffersError as error:
            info = self.head(key)
            if info.size != error.size:  # a truncated body that claims to be the whole
                raise
            self._sessions.get().note_size(url, info.version, info.size)
            if version is not None:  # overwritten under the same ETag
                raise self._overwritten(key) from None
            return self._read(key, url, start, stop, None)

    def _read(self, key: str, url: str, start: int, stop: int, version: str | None) -> Buffer:
        whole = self._sessions.get().whole

        def use(response: Response) -> Buffer | WholeCopy | _Unsatisfied:
            length = content_length(response)
            if response.status == 416:
                return _Unsatisfied(content_range(response.headers))
            if response.status != 200 or (start == 0 and stop == length):
                return self._body(key, url, response, start, stop, version)
            self._check(url, response)
            if length is not None:  # otherwise a truncated body might claim to be the whole
                self._sessions.get().check_size(url, version_of(response.headers, length), length)
            return whole.download(url, response)

        with whole.one_at_a_time(url):
            copy = whole.find(url, version)
            got = copy if copy is not None else self._request_range(url, start, stop, version, use)
        if isinstance(got, _Unsatisfied):
            raise self._range_error(key, start, stop, version, got.found)
        return self._read_copy(key, url, got, start, stop, version) if isinstance(got, WholeCopy) else got

    def _read_copy(self, key: str, url: str, copy: WholeCopy, start: int, stop: int, version: str | None) -> Buffer:
        if version is not None and copy.version != version:
            raise self._overwritten(key)
        try:
            self._sessions.get().check_size(url, copy.version, copy.size)
        except OriginUnavailableError:
            self._sessions.get().whole.drop(url)
            raise
        if stop > copy.size:
            raise self._outside(key, start, stop, copy.size)
        return copy.read(start, stop)

    def _range_error(
        self, key: str, start: int, stop: int, version: str | None, found: ContentRange | None
    ) -> MillraceError:
        """The error for a refused range: it ends past the object's end, or the object was overwritten."""
        info = self.head(key) if found is None or found.total is None or version is not None else None
        if version is not None and info is not None and info.version != version:
            return self._overwritten(key)
        total = info.size if info is not None else found.total if found is not None else None
        if total is not None and stop <= total:
            return OriginUnavailableError(
                f"{self._shown(key)} refuses a range inside the object", next_step="read again"
            )
        return self._outside(key, start, stop, total)

    def _body(self, key: str, url: str, response: Response, start: int, stop: int, version: str | None) -> Buffer:
        """The body of a response, which must be exactly this range; its headers are checked before it is read."""
        if response.status not in (200, 206):
            raise self._refusal(response)
        self._check(url, response)
        size = stop
        if response.status == 206:
            self._sessions.get().whole.has_ranges(url)
            _, size = announced_range(response, url, start, stop)
        found = version_of(response.headers, size)
        if version is not None and found != version:
            raise self._overwritten(key)
        self._sessions.get().check_size(url, found, size)
        if size < stop:
            raise self._outside(key, start, stop, size)
        return exact_body(response, url, start, stop)

    # --- listing ----------------------------------------------------------------------------------

    def list_level(self, prefix: str) -> Listing:
        return self._listings().level(prefix)

    def list_pages(
        self, prefix: str, *, after: str = "", settled: Callable[[str], ObjectInfo | None] | None = None
    ) -> Iterator[ListingPage]:
        return self._listings().pages(prefix, after)

    def _listings(self) -> IndexListings:
        """Each request of a listing is retried by itself."""

        def retrying(key: str, operation: Callable[[str], Result]) -> Result:
            return self._retrying(key, lambda: operation(key))

        return IndexListings(lambda prefix: retrying(prefix, self._index), lambda key: retrying(key, self.head))

    def _index(self, prefix: str) -> IndexPage | None:
        """The index page of a directory; None if there is no such directory.

        Raises `UsageError` for another kind of response.
        """
        url = self._address(prefix.rstrip("/") + "/")

        def parsed(response: Response) -> IndexPage | None:
            if response.status in (404, 410):
                return None
            if response.status != 200:
                raise self._refusal(response)
            return parse_index(response.url, index_text(response, url))

        return self._request("GET", url, {"Accept": "text/html"}, parsed)

    # --- requests ---------------------------------------------------------------------------------

    def _address(self, key: str) -> str:
        """The checked URL of a key."""
        return url_of(self._scheme, key)

    def _shown(self, key: str) -> str:
        return shown(self._address(key))

    def _request(
        self,
        method: str,
        url: str,
        extra: Mapping[str, str],
        use: Callable[[Response], Result],
        *,
        route: str | None = None,
    ) -> Result:
        """Send a request for `url`, or directly to its known redirect target `route`; returns the result of `use`.

        The login is sent only to the server of `url`.
        """
        session = self._sessions.get()

        def headers(target: str) -> Mapping[str, str]:
            given = self._options.headers if same_server(target, url) else self._options.open_headers
            return {**self._netrc(session, target), **given, **extra}

        return session.connections.request(method, route or url, headers, use, limiter=self._limiter)

    def _request_range(
        self, url: str, start: int, stop: int, version: str | None, use: Callable[[Response], Result]
    ) -> Result:
        """Request a range from the known redirect target; if there is none, or it has another version, from `url`."""
        headers = {"Range": f"bytes={start}-{stop - 1}", **precondition(version)}
        session = self._sessions.get()
        route, until = session.routes.get(url, ("", 0.0))
        if route and time.monotonic() < until:

            def use_if_same(response: Response) -> Result | None:
                found = content_range(response.headers)
                size = found.total if found is not None else content_length(response)
                is_known = response.status in (200, 206) and size is not None
                is_same = is_known and version in (None, version_of(response.headers, size or 0))
                return use(response) if is_same else None

            try:
                got = self._request("GET", url, headers, use_if_same, route=route)
            except MillraceError:
                session.routes.pop(url, None)  # the server may redirect the next try to another mirror
                raise
            if got is not None:
                return got
            session.routes.pop(url, None)

        def use_and_note(response: Response) -> Result:
            if response.url != url and response.status == 206:
                session.note_route(url, response.url)
            return use(response)

        return self._request("GET", url, headers, use_and_note)

    def _netrc(self, session: _Session, url: str) -> Mapping[str, str]:
        if self._options.signs_in or not self._options.trusts_environment:
            return {}
        server = urlsplit(url).netloc
        if server not in session.netrc:
            session.netrc[server] = netrc_header(url, os.environ)
        return session.netrc[server]

    def _check(self, url: str, response: Response) -> None:
        """Raise an error for a compressed body and for a directory."""
        check_encoding(response.headers, url)
        if urlsplit(response.url).path == urlsplit(url).path + "/":
            raise ObjectNotFoundError(f"{shown(url)} is a directory", next_step="name an object in it")

    def _info(self, key: str, url: str, response: Response, size: int) -> ObjectInfo:
        self._check(url, response)
        if response.headers.get("Accept-Ranges", "").strip().lower() == "bytes":
            self._sessions.get().whole.has_ranges(url)
        version = version_of(response.headers, size)
        self._sessions.get().note_size(url, version, size)
        return ObjectInfo(key=key, size=size, version=version, modified=modified_of(response.headers))

    def _refusal(self, response: Response) -> MillraceError:
        return refusal(response.status, response.headers, response.url, time.time())
