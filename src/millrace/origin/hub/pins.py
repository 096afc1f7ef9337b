"""The commits that a process has seen: the last one of each branch, and one for each content of a file."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass

from millrace.origin.hub.names import HubName, Repository

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
