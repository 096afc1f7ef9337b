"""An origin within limits: the same Protocol around any other origin."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from typing_extensions import Buffer

from millrace.config import LIMIT_NAMES, resolve_limits
from millrace.origin.importing import imported
from millrace.origin.protocol import Listing, ListingPage, ObjectInfo, ObjectWriter, Origin
from millrace.origin.upload import ObjectUpload

if TYPE_CHECKING:
    from millrace.origin.limits.budget import Budget

Result = TypeVar("Result")

DEFAULT_MAX_REQUESTS = 128
"""A network card of 100 Gbit/s needs about 130 requests at the 90 MB/s that S3 gives to one; and of small objects, at 30 ms
each, 128 at once are some 4,000 a second, which is what S3 promises for one prefix (5,500)."""

DEFAULT_MAX_WEB_REQUESTS = 16
"""Of a web server nobody knows what it bears. That is what a few browsers would ask of it."""

WEB = frozenset({"http", "https"})
"""Schemes of which one origin is many servers, the first part of each key."""

# Servers of the web whose budgets one origin keeps open, besides those in use.
_MOST_BUDGETS = 64

# Inside a cache directory, beside the folders of its nodes: the limits are those of all of them together.
_FOLDER = ("millrace", "limits")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the user said about the limits (`config.LIMIT_NAMES`) of an origin of this `scheme`.

    What was not said is looked for where the origin is used, in the environment and the file: directories differ per node.
    """

    scheme: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, scheme: str, arguments: Mapping[str, Any] | None = None) -> Limits:
        """The limits with these explicit options, None where one was not given."""
        given = {name: value for name, value in (arguments or {}).items() if name in LIMIT_NAMES and value is not None}
        return cls(scheme=scheme, arguments=given)

    @property
    def default_max_requests(self) -> int:
        return DEFAULT_MAX_WEB_REQUESTS if self.scheme in WEB else DEFAULT_MAX_REQUESTS


def limited(origin: Origin, limits: Limits) -> Origin:
    """`origin` within `limits`; itself where it sends no requests over a network. Raises `ConfigurationError`."""
    return origin if origin.head_is_local else LimitedOrigin(origin, limits)


class LimitedOrigin:
    """`inner`, asked within the budget that this node has for it, and again where that can help.

    Thread-safe, safe across fork; pickles as `inner` and what was said about the limits. Streams of `open_writer` that
    need several parts are not limited and not tried again here: the library that sends them tries each part again.
    """

    def __init__(self, inner: Origin, limits: Limits) -> None:
        self.inner = inner
        self._limits = limits
        found = resolve_limits(limits.arguments)
        self._directory = found.directory.joinpath(*_FOLDER) if found.directory is not None else None
        self._most = found.max_requests or limits.default_max_requests
        self._per_second = found.requests_per_second
        self._budgets: dict[str, Budget] = {}

    def __repr__(self) -> str:
        return f"LimitedOrigin({self.inner!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.inner, self._limits)

    @property
    def identity(self) -> str:
        return self.inner.identity

    @property
    def head_is_local(self) -> bool:
        return self.inner.head_is_local

    def is_immutable(self, key: str) -> bool:
        return self.inner.is_immutable(key)

    # --- requests ---------------------------------------------------------------------------------

    def head(self, key: str) -> ObjectInfo:
        return self._run(key, lambda: self.inner.head(key))

    def read(self, key: str, start: int, stop: int, *, version: str | None = None) -> Buffer:
        return self._run(key, lambda: self.inner.read(key, start, stop, version=version))

    def list_level(self, prefix: str) -> Listing:
        return self._run(prefix, lambda: self.inner.list_level(prefix))

    def list_all(self, prefix: str) -> Iterator[Sequence[ObjectInfo]]:
        for page in self.list_pages(prefix):
            if page.objects:
                yield page.objects

    def list_pages(
        self, prefix: str, *, after: str = "", settled: Callable[[str], ObjectInfo | None] | None = None
    ) -> Iterator[ListingPage]:
        pages: Iterator[ListingPage] | None = None
        position, is_directory = after, False

        def next_page() -> ListingPage | None:
            nonlocal pages
            if pages is None:
                pages = self.inner.list_pages(prefix, after=position, settled=settled)
            try:
                return next(pages, None)
            except BaseException:
                pages = None  # a generator that has raised is over: the next try begins behind what was told
                raise

        while (page := self._run(prefix, next_page)) is not None:
            # Told by the page that shows it, and by all that follow, also when the listing had to begin again behind it.
            is_directory = is_directory or page.is_directory
            if page.objects:
                position = page.objects[-1].key
            yield page if page.is_directory == is_directory else replace(page, is_directory=is_directory)
            if page.last:
                return

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        self._run(key, lambda: self.inner.put(key, data, if_absent=if_absent), once=if_absent)

    def open_writer(self, key: str) -> ObjectWriter:
        writer = self.inner.open_writer(key)
        if isinstance(writer, ObjectUpload):
            writer.send_whole_by(lambda data: self.put(key, data))
        return writer

    def delete(self, keys: Sequence[str]) -> None:
        if keys:
            self._run(keys[0], lambda: self.inner.delete(keys))

    def _run(self, key: str, request: Callable[[], Result], *, once: bool = False) -> Result:
        # Here, because a process that finds everything in the cache never comes here.
        retrying = imported("millrace.origin.limits.retrying")
        url = f"{self._limits.scheme}://{key}"
        result: Result = retrying.carry_out(
            self.budget_of(key), url, request, lambda: self._retry_after(key), once=once
        )
        return result

    def budget_of(self, key: str) -> Budget:
        """The budget that requests for `key` count in: one for all keys, on the web one for each server."""
        server = key.partition("/")[0] if self._limits.scheme in WEB else ""
        budget = self._budgets.get(server)
        if budget is not None and server:
            self._budgets[server] = self._budgets.pop(server, budget)  # the last used is the last
        if budget is None:
            name = f"{self.identity} {server}".strip()
            file = hashlib.blake2b(name.encode(errors="surrogateescape"), digest_size=16).hexdigest()
            path = self._directory / file if self._directory is not None else None
            shared = imported("millrace.origin.limits.budget").shared_budget
            made: Budget = shared(name, path, most=self._most, per_second=self._per_second)
            budget = self._budgets.setdefault(server, made)
            self._let_idle_ones_go()
        return budget

    def _let_idle_ones_go(self) -> None:
        """A budget in use has two open files, and the web has many servers. What it knows stays in its file."""
        for server in list(self._budgets)[:-_MOST_BUDGETS]:
            budget = self._budgets.get(server)
            if budget is not None and budget.is_idle:
                self._budgets.pop(server, None)

    def _retry_after(self, key: str) -> float | None:
        asking = imported("millrace.origin.limits.asking")  # HTTP and TLS, for what hardly ever happens
        seconds: float | None = asking.ask_retry_after(self.inner, key)
        return seconds
