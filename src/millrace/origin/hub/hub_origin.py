"""The Hugging Face hub as an origin. Read only.

A commit never changes, so every read is of a commit. A branch or tag is resolved at its first use and with each description
and listing (`head`, `list_...`), which the cache requests as its consistency requires. The version of a file is the id of
its content: a new commit changes only the versions of the files that it changed, and a reader of an older version continues
to read it from the commit that has it.

`Pins` holds the commits that a process has seen: the last one of each branch, and one for each content of a file.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from typing_extensions import Buffer

from millrace.errors import (
    ConfigurationError,
    MillraceError,
    ObjectNotFoundError,
    OriginUnavailableError,
)
from millrace.origin.base import BaseOrigin, RequestLimiter
from millrace.origin.hub.client import Entry, HubClient, RouteGoneError
from millrace.origin.hub.names import HubName, Repository, parse_name
from millrace.origin.hub.options import hub_options
from millrace.origin.protocol import Listing, ListingPage, ObjectInfo
from millrace.runtime import forks

_REMEMBERED_CONTENTS = 100_000
_REMEMBERED_ROUTES = 10_000
_ROUTE_SECONDS = 600.0  # signed addresses of the hub expire after an hour


@dataclass(frozen=True, slots=True)
class Route:
    """A signed URL for the bytes of a file of a commit, with its version and size."""

    url: str
    version: str
    size: int
    until: float


class Pins:
    """Thread-safe; for one process."""

    def __init__(self, earlier: Pins | None = None) -> None:
        """With `earlier`, a forked child copies the state of its parent without the lock."""
        self._lock = threading.Lock()
        self._branches: dict[tuple[Repository, str], str] = dict(earlier._branches) if earlier else {}
        self._contents: OrderedDict[tuple[Repository, str, str], str] = OrderedDict(
            earlier._contents if earlier else {}
        )
        self._dates: dict[tuple[Repository, str], float] = dict(earlier._dates) if earlier else {}
        self._routes: OrderedDict[tuple[Repository, str, str], Route] = OrderedDict()

    def commit_of(self, name: HubName) -> str | None:
        """The commit for reads of this revision; None before it was resolved."""
        return name.revision if name.names_a_commit else self._branches.get((name.repository, name.revision))

    def pin(self, name: HubName, commit: str) -> None:
        """Use `commit` for reads of this revision from now on."""
        if not name.names_a_commit:
            self._branches[name.repository, name.revision] = commit

    def commit_with(self, name: HubName, version: str) -> str | None:
        """A commit with this content of the file, if one was seen."""
        return self._contents.get((name.repository, name.path, version))

    def saw(self, repository: Repository, path: str, version: str, commit: str) -> None:
        """Note that `path` has this content in `commit`."""
        with self._lock:
            self._contents[repository, path, version] = commit
            if len(self._contents) > _REMEMBERED_CONTENTS:
                self._contents.popitem(last=False)

    def date(self, repository: Repository, commit: str) -> float | None:
        """The date of a commit in Unix seconds; None before it was requested."""
        return self._dates.get((repository, commit))

    def note_date(self, repository: Repository, commit: str, date: float) -> None:
        self._dates[repository, commit] = date

    def route(self, repository: Repository, commit: str, path: str) -> Route | None:
        """The route to the bytes of a file, if it has not expired."""
        found = self._routes.get((repository, commit, path))
        return found if found is not None and found.until > time.monotonic() else None

    def note_route(self, repository: Repository, commit: str, path: str, url: str, version: str, size: int) -> None:
        route = Route(url, version, size, time.monotonic() + _ROUTE_SECONDS)
        with self._lock:
            self._routes[repository, commit, path] = route
            if len(self._routes) > _REMEMBERED_ROUTES:
                self._routes.popitem(last=False)

    def drop_route(self, repository: Repository, commit: str, path: str) -> None:
        with self._lock:
            self._routes.pop((repository, commit, path), None)


_LIST_PAGE = 1000
MOST_AT_ONCE = 20_000

TreePages = Callable[[str, bool], Iterator[Sequence[Entry]]]
"""Returns the pages of a directory: with everything below it (True), or only its own level."""


class _Session:
    """The state of one process."""

    def __init__(self, client: HubClient, pins: Pins) -> None:
        self.client, self.pins = client, pins


def _sessions(make_client: Callable[[], HubClient], pins: Pins) -> forks.PerProcess[_Session]:
    """A forked child has its own connections and starts with the pins of its parent."""

    def make(parent: _Session | None) -> _Session:
        return _Session(make_client(), pins if parent is None else Pins(parent.pins))

    return forks.PerProcess(make)


class HubOrigin(BaseOrigin):
    """One hub (endpoint) with all its repositories. See `BaseOrigin` for threads, forks and pickles.

    Without an explicit token each process looks for one in its own environment and home.
    """

    cannot_be_written = (
        "the Hugging Face hub is read only here; upload with huggingface_hub, or write to an object store"
    )

    def __init__(self, scheme: str, target_options: Mapping[str, Any] | None = None) -> None:
        if scheme != "hf":
            raise ConfigurationError(f"the hub does not serve {scheme}://", next_step="use hf://")
        super().__init__(scheme, target_options)
        self._options = hub_options(self._target_options, os.environ)
        self._identity = f"hf+{self._options.endpoint}"
        self._sessions = _sessions(lambda: HubClient(self._options), Pins())

    def within(self, limiter: RequestLimiter) -> Self:
        twin = super().within(limiter)
        twin._sessions = _sessions(lambda: HubClient(self._options, limiter), self._sessions.get().pins)
        return twin

    def is_immutable(self, key: str) -> bool:
        if "@" not in key:
            return False
        try:
            return parse_name(key).names_a_commit
        except MillraceError:
            return False

    # --- reading ----------------------------------------------------------------------------------

    def head(self, key: str) -> ObjectInfo:
        name = self._file(key)
        session = self._sessions.get()
        found = session.client.describe(name.repository, name.revision, name.path, name.url)
        session.pins.pin(name, found.commit)
        session.pins.saw(name.repository, name.path, found.version, found.commit)
        return ObjectInfo(key, found.size, found.version, self._date(name, found.commit))

    def read_range(self, key: str, start: int, stop: int, version: str | None) -> Buffer:
        name = self._file(key)
        pins = self._sessions.get().pins
        known = pins.commit_with(name, version) if version is not None else None
        commit, missing = known or pins.commit_of(name), None
        if commit is not None:
            try:
                data = self._read_commit(name, commit, start, stop, version)
            except ObjectNotFoundError as error:
                if name.names_a_commit:
                    raise
                data, missing = None, error  # the commit was removed (a squashed history), or the file is newer
            if data is not None:
                return data
        if not name.names_a_commit:
            # Another process has seen a newer commit of this branch, or this one has not resolved it yet.
            newest = self._look_up(name)
            if newest != commit and (data := self._read_commit(name, newest, start, stop, version)) is not None:
                return data
        if missing is not None:
            raise missing
        raise self._overwritten(key)

    def _read_commit(self, name: HubName, commit: str, start: int, stop: int, version: str | None) -> Buffer | None:
        """The range of a file of a commit; None if its content is not `version`."""
        session, where = self._sessions.get(), (name.repository, commit, name.path)
        route = session.pins.route(*where)
        if route is not None and version in (None, route.version) and stop <= route.size:
            try:
                return session.client.read_route(route.url, start, stop, route.size)
            except RouteGoneError:
                session.pins.drop_route(*where)
            except MillraceError:
                session.pins.drop_route(*where)  # the hub may redirect the next try to another server
                raise
        found, data = session.client.read(*where, name.url, start, stop, version)
        if version is not None and found.version != version:
            return None
        session.pins.saw(name.repository, name.path, found.version, commit)
        if found.route is None:
            return data
        try:
            data = session.client.read_route(found.route, start, stop, found.size)
        except RouteGoneError as error:
            raise OriginUnavailableError(
                f"{name.url}: the address from the hub for its bytes is not valid",
                next_step="read again; if it persists, check the clock of this machine and proxies",
            ) from error
        session.pins.note_route(*where, found.route, found.version, found.size)
        return data

    def _look_up(self, name: HubName) -> str:
        """Resolve a revision to its present commit, and pin reads to it."""
        session = self._sessions.get()
        commit = session.client.commit(name.repository, name.revision, name.url)
        session.pins.pin(name, commit.id)
        session.pins.note_date(name.repository, commit.id, commit.modified)
        return commit.id

    def _date(self, name: HubName, commit: str) -> float:
        """The date of a commit in Unix seconds: one request for each commit."""
        session = self._sessions.get()
        date = session.pins.date(name.repository, commit)
        if date is None:
            date = session.client.commit(name.repository, commit, name.url).modified
            session.pins.note_date(name.repository, commit, date)
        return date

    # --- listing ----------------------------------------------------------------------------------

    def list_level(self, prefix: str) -> Listing:
        name = parse_name(prefix)
        commit = self._commit_to_list(name)
        objects: list[ObjectInfo] = []
        prefixes: list[str] = []
        is_directory = not name.path
        try:
            for page in self._sessions.get().client.tree(name.repository, commit, name.path, name.url, recursive=False):
                for entry in page:
                    is_directory = is_directory or entry.path != name.path
                    if entry.version is None:
                        prefixes.append(name.key(entry.path))
                    elif entry.path != name.path:
                        objects.append(self._info(name, commit, entry))
        except ObjectNotFoundError:
            if not name.path:
                raise
        return Listing(sorted(objects, key=lambda info: info.key), sorted(prefixes), is_directory)

    def list_pages(
        self, prefix: str, *, after: str = "", settled: Callable[[str], ObjectInfo | None] | None = None
    ) -> Iterator[ListingPage]:
        name = parse_name(prefix)
        commit = self._commit_to_list(name)
        client = self._sessions.get().client

        def pages(path: str, recursive: bool) -> Iterator[Sequence[Entry]]:
            return client.tree(name.repository, commit, path, name.url, recursive=recursive)

        objects: list[ObjectInfo] = []
        is_directory = not name.path
        try:
            for entry in walk_tree(pages, name.path, after.removeprefix(f"{name.root}/")):
                is_directory = True
                objects.append(self._info(name, commit, entry))
                if len(objects) == _LIST_PAGE:
                    yield ListingPage(objects, False, is_directory)
                    objects = []
        except ObjectNotFoundError:
            if not name.path:
                raise
        yield ListingPage(objects, True, is_directory)

    def _commit_to_list(self, name: HubName) -> str:
        if name.names_a_commit:
            return name.revision
        return self._limiter.retrying(name.url, lambda: self._look_up(name))

    def _info(self, name: HubName, commit: str, entry: Entry) -> ObjectInfo:
        assert entry.version is not None
        pins = self._sessions.get().pins
        pins.saw(name.repository, entry.path, entry.version, commit)
        date = pins.date(name.repository, commit)
        if date is None:
            date = self._limiter.retrying(name.url, lambda: self._date(name, commit))
        return ObjectInfo(name.key(entry.path), entry.size, entry.version, date)

    # --- names ---------------------------------------------------------------------------------

    def _file(self, key: str) -> HubName:
        name = parse_name(key)
        if not name.path or key.endswith("/"):
            raise ObjectNotFoundError(f"hf://{key} does not name a file", next_step="name a file in it")
        return name


def walk_tree(pages: TreePages, path: str, after: str = "", most_at_once: int = MOST_AT_ONCE) -> Iterator[Entry]:
    """The files below `path` whose paths follow `after`, sorted, with few requests and bounded memory.

    The hub lists in another order (directories first), in pages of a thousand. A directory with up to `most_at_once` files
    is read whole and sorted. A larger one is read level by level, each directory in it by the same rule.
    """
    files: list[Entry] = []
    for page in pages(path, True):
        files += (each for each in page if each.version is not None and each.path > after and each.path != path)
        if len(files) > most_at_once:
            break
    else:
        yield from sorted(files, key=lambda entry: entry.path)
        return
    del files
    level = [each for page in pages(path, False) for each in page if each.path != path]
    names = sorted((each.path if each.version is not None else f"{each.path}/", each) for each in level)
    for name, entry in names:
        if entry.version is not None:
            if name > after:
                yield entry
        elif name > after or after.startswith(name):
            yield from walk_tree(pages, entry.path, after, most_at_once)
