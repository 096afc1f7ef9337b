"""Web servers as an origin: any object that has a URL, read by ranges, checked against its version. Read only.

Listings are made of the index pages that servers show of directories; a server without them cannot be listed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

from typing_extensions import Buffer

from millrace.errors import (
    ConfigurationError,
    MillraceError,
    ObjectChangedError,
    ObjectNotFoundError,
    OriginUnavailableError,
)
from millrace.origin.protocol import Listing, ListingPage, ObjectInfo
from millrace.origin.turns import TakesTurns
from millrace.origin.web.addresses import same_server, shown, url_of
from millrace.origin.web.answers import (
    ContentRange,
    check_encoding,
    content_length,
    content_range,
    modified_of,
    precondition,
    refusal,
    version_of,
)
from millrace.origin.web.bodies import announced_range, exact_body, index_text, outside
from millrace.origin.web.connections import Answer
from millrace.origin.web.credentials import netrc_header
from millrace.origin.web.index_pages import IndexPage, parse_index
from millrace.origin.web.listings import IndexListings
from millrace.origin.web.options import web_options
from millrace.origin.web.read_only import ReadOnlyOrigin
from millrace.origin.web.session import Session, SizeDiffersError
from millrace.origin.web.whole import WholeCopy

Result = TypeVar("Result")

_ROUTE_SECONDS = 300.0  # for how long a redirect is believed: without, each range of an object would cost two requests
# Statuses of servers that do not answer to HEAD although they have the object.
_TRY_GET = frozenset({400, 403, 405, 406, 500, 501})


@dataclass(frozen=True, slots=True)
class _Unsatisfied:
    """A range was refused; what the answer told of the object."""

    told: ContentRange | None


class WebOrigin(TakesTurns, ReadOnlyOrigin):
    """Everything that `http://` or `https://` reaches.

    Thread-safe; picklable (with the explicit `target_options`, passwords included); safe across fork.
    """

    _cannot_be_written = "web servers are read only"
    _write_instead = "write to an object store or to files"

    def __init__(self, scheme: str, target_options: Mapping[str, Any] | None = None) -> None:
        if scheme not in ("http", "https"):
            raise ConfigurationError(f"no web server serves {scheme}://", next_step="use http:// or https://")
        self._scheme = scheme
        self._target_options = dict(target_options or {})
        self._options = web_options(self._target_options)
        self._session = Session(self._options)

    def __repr__(self) -> str:
        return f"WebOrigin({self._scheme!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._scheme, self._target_options)

    @property
    def identity(self) -> str:
        return self._scheme

    @property
    def head_is_local(self) -> bool:
        return False

    def is_immutable(self, key: str) -> bool:
        return False

    # --- reading ----------------------------------------------------------------------------------

    def head(self, key: str) -> ObjectInfo:
        url = self._url(key)
        parts = urlsplit(url)
        if parts.path.endswith("/") and not parts.query:
            raise ObjectNotFoundError(f"{shown(url)} names a directory", next_step="name an object in it")
        session = self._now()
        refused = False
        if parts.netloc not in session.without_head:

            def described(answer: Answer) -> ObjectInfo | None:
                nonlocal refused
                refused = answer.status != 200
                if refused and answer.status not in _TRY_GET:
                    raise self._refusal(answer)
                size = content_length(answer.headers) if not refused else None
                # Some servers say 0 to HEAD for what they make on demand.
                return self._info(key, url, answer, size) if size else None

            if (told := self._ask("HEAD", url, {}, described)) is not None:
                return told
        info = self._head_by_get(key, url)
        if refused:
            session.without_head.add(parts.netloc)
        return info

    def _head_by_get(self, key: str, url: str) -> ObjectInfo:
        """Describe an object by its first byte, or by all of it where the server does not tell its size."""
        is_range = True

        def described(answer: Answer) -> ObjectInfo | None:
            nonlocal is_range
            is_range = answer.status in (206, 416)
            if is_range:
                told = content_range(answer.headers)
                size = told.total if told is not None else None
                if answer.status == 206:
                    answer.read(1)
                elif size:  # its first byte cannot be refused
                    size = None
            elif answer.status == 200:
                size = content_length(answer.headers)
            else:
                raise self._refusal(answer)
            return self._info(key, url, answer, size) if size is not None else None

        for headers in ({"Range": "bytes=0-0"}, {}):
            if (info := self._ask("GET", url, headers, described)) is not None:
                return info
            if not is_range:
                break
        whole = self._now().whole

        def adopted(answer: Answer) -> WholeCopy:
            if answer.status != 200:
                raise self._refusal(answer)
            self._check(url, answer)
            return whole.adopt(url, answer.give_away())

        with whole.turn(url), self._ask("GET", url, {}, adopted) as copy:
            return ObjectInfo(key=key, size=copy.size(), version=copy.version(), modified=copy.modified())

    def read(self, key: str, start: int, stop: int, *, version: str | None = None) -> Buffer:
        if not 0 <= start <= stop:
            raise ConfigurationError(f"bad byte range [{start}, {stop}) of {shown(self._url(key))}")
        if start == stop:
            return b""
        url = self._url(key)
        try:
            return self._read(key, url, start, stop, version)
        except SizeDiffersError as error:
            info = self.head(key)
            if info.size != error.size:  # a part that says it is the whole
                raise
            self._now().note_size(url, info.version, info.size)
            if version is not None:  # replaced under the same ETag: this is not what the reader was told of
                raise self._overwritten(url) from None
            return self._read(key, url, start, stop, None)

    def _read(self, key: str, url: str, start: int, stop: int, version: str | None) -> Buffer:
        whole = self._now().whole

        def use(answer: Answer) -> Buffer | WholeCopy | _Unsatisfied:
            with_length = content_length(answer.headers)
            if answer.status == 416:
                return _Unsatisfied(content_range(answer.headers))
            if answer.status != 200 or (start == 0 and stop == with_length):
                return self._read_answer(url, answer, start, stop, version)
            self._check(url, answer)
            if with_length is not None:  # else a part might say that it is the whole
                self._now().check_size(url, version_of(answer.headers, with_length), with_length)
            return whole.adopt(url, answer.give_away())

        with whole.turn(url):
            copy = whole.find(url, version)
            got = copy if copy is not None else self._ask_for_range(url, start, stop, version, use)
        if isinstance(got, _Unsatisfied):
            raise self._unsatisfied(key, url, start, stop, version, got.told)
        if not isinstance(got, WholeCopy):
            return got
        with got:  # outside of the turn: others may wait for their part of it
            return self._read_copy(got, url, start, stop, version)

    def _read_copy(self, copy: WholeCopy, url: str, start: int, stop: int, version: str | None) -> Buffer:
        if version is not None and copy.version() != version:
            raise self._overwritten(url)
        size = copy.size()
        try:
            self._now().check_size(url, copy.version(), size)
        except OriginUnavailableError:
            self._now().whole.drop(url, copy)
            raise
        if stop > size:
            raise outside(url, start, stop, size)
        return copy.read(start, stop)

    def _unsatisfied(
        self, key: str, url: str, start: int, stop: int, version: str | None, told: ContentRange | None
    ) -> MillraceError:
        """The error for a range that the server refuses: it ends behind the end, or the object is another one."""
        info = self.head(key) if told is None or told.total is None or version is not None else None
        if version is not None and info is not None and info.version != version:
            return self._overwritten(url)
        total = info.size if info is not None else told.total if told is not None else None
        if total is not None and stop <= total:
            return OriginUnavailableError(f"{shown(url)} refuses a range inside the object", next_step="read again")
        return outside(url, start, stop, total)

    def _read_answer(self, url: str, answer: Answer, start: int, stop: int, version: str | None) -> Buffer:
        """The bytes of an answer that holds this range and nothing else; what it must be is checked before they are read."""
        if answer.status not in (200, 206):
            raise self._refusal(answer)
        self._check(url, answer)
        size = stop
        if answer.status == 206:
            self._now().whole.has_ranges(url)
            _, size = announced_range(answer, url, start, stop)
        got_version = version_of(answer.headers, size)
        if version is not None and got_version != version:
            raise self._overwritten(url)
        self._now().check_size(url, got_version, size)
        if size < stop:
            raise outside(url, start, stop, size)
        return exact_body(answer, url, start, stop)

    def _overwritten(self, url: str) -> MillraceError:
        return ObjectChangedError(f"{shown(url)} was overwritten while it was read", next_step="open it again")

    # --- listing ----------------------------------------------------------------------------------

    def list_level(self, prefix: str) -> Listing:
        return self._listings().level(prefix)

    def list_all(self, prefix: str) -> Iterator[Sequence[ObjectInfo]]:
        return (page.objects for page in self.list_pages(prefix) if page.objects)

    def list_pages(
        self, prefix: str, *, after: str = "", settled: Callable[[str], ObjectInfo | None] | None = None
    ) -> Iterator[ListingPage]:
        return self._listings().pages(prefix, after)

    def _listings(self) -> IndexListings:
        """Each of the questions that a listing asks is tried again by itself."""

        def retrying(key: str, question: Callable[[str], Result]) -> Result:
            return self._turns.retrying(f"{self._scheme}://{key}", lambda: question(key))

        return IndexListings(lambda prefix: retrying(prefix, self._index), lambda key: retrying(key, self.head))

    def _index(self, prefix: str) -> IndexPage | None:
        """The index page of a directory, None where there is no such directory.

        Raises `UsageError` where there is something, but no page with links.
        """
        url = self._url(prefix.rstrip("/") + "/")

        def parsed(answer: Answer) -> IndexPage | None:
            if answer.status in (404, 410):
                return None
            if answer.status != 200:
                raise self._refusal(answer)
            return parse_index(answer.url, index_text(answer, url))

        return self._ask("GET", url, {"Accept": "text/html"}, parsed)

    # --- requests ---------------------------------------------------------------------------------

    def _now(self) -> Session:
        """What this process has open; what a parent process had is its own."""
        if self._session.pid != os.getpid():
            self._session = Session(self._options)
        return self._session

    def _url(self, key: str) -> str:
        return url_of(self._scheme, key)

    def _ask(
        self,
        method: str,
        url: str,
        extra: Mapping[str, str],
        use: Callable[[Answer], Result],
        *,
        route: str | None = None,
    ) -> Result:
        """Ask for `url`, or at once where that led to before; what `use` makes of the answer while it has its turn.

        The login for its server is sent to that one only.
        """
        session = self._now()

        def headers(target: str) -> Mapping[str, str]:
            given = self._options.headers if same_server(target, url) else self._options.open_headers
            return {**self._netrc(session, target), **given, **extra}

        return session.connections.ask(method, route or url, headers, use, turns=self._turns)

    def _ask_for_range(
        self, url: str, start: int, stop: int, version: str | None, use: Callable[[Answer], Result]
    ) -> Result:
        """Ask for a range, if there was a redirect at the place where that led to; of what is new there, from the start."""
        headers = {"Range": f"bytes={start}-{stop - 1}", **precondition(version)}
        routes = self._now().routes
        route, until = routes.get(url, ("", 0.0))
        if route and time.monotonic() < until:

            def use_if_same(answer: Answer) -> Result | None:
                told = content_range(answer.headers)
                size = told.total if told is not None else content_length(answer.headers)
                is_known = answer.status in (200, 206) and size is not None
                return use(answer) if is_known and version in (None, version_of(answer.headers, size or 0)) else None

            if (got := self._ask("GET", url, headers, use_if_same, route=route)) is not None:
                return got
            routes.pop(url, None)

        def use_and_note(answer: Answer) -> Result:
            if answer.url != url and answer.status == 206:
                self._now().note_route(url, answer.url, time.monotonic() + _ROUTE_SECONDS)
            return use(answer)

        return self._ask("GET", url, headers, use_and_note)

    def _netrc(self, session: Session, url: str) -> Mapping[str, str]:
        if self._options.signs_in or not self._options.trusts_environment:
            return {}
        server = urlsplit(url).netloc
        if server not in session.netrc:
            session.netrc[server] = netrc_header(url, os.environ)
        return session.netrc[server]

    def _check(self, url: str, answer: Answer) -> None:
        """Refuse what is no plain body of this object."""
        check_encoding(answer.headers, url)
        if urlsplit(answer.url).path == urlsplit(url).path + "/":
            raise ObjectNotFoundError(f"{shown(url)} is a directory", next_step="name an object in it")

    def _info(self, key: str, url: str, answer: Answer, size: int) -> ObjectInfo:
        self._check(url, answer)
        if answer.headers.get("Accept-Ranges", "").strip().lower() == "bytes":
            self._now().whole.has_ranges(url)
        version = version_of(answer.headers, size)
        self._now().note_size(url, version, size)
        return ObjectInfo(key=key, size=size, version=version, modified=modified_of(answer.headers))

    def _refusal(self, answer: Answer) -> MillraceError:
        return refusal(answer.status, answer.headers, answer.url, time.time())
