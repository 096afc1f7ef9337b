"""What a process knows of commits: where a branch was last seen, and which one has the content that a reader wants."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass

from millrace.origin.hub.names import HubName, Repository

_REMEMBERED_CONTENTS = 100_000
_REMEMBERED_ROUTES = 10_000
_ROUTE_SECONDS = 600.0  # signed addresses of the hub hold for an hour


@dataclass(frozen=True, slots=True)
class Route:
    """Where the bytes of a file of a commit are: an address with a signature in it, and what is there."""

    url: str
    version: str
    size: int
    until: float


class Pins:
    """Thread-safe; for one process."""

    def __init__(self, earlier: Pins | None = None) -> None:
        """With `earlier`, a forked child takes over what its parent knew, and not its lock."""
        self._lock = threading.Lock()
        self._branches: dict[tuple[Repository, str], str] = dict(earlier._branches) if earlier else {}
        self._contents: OrderedDict[tuple[Repository, str, str], str] = OrderedDict(
            earlier._contents if earlier else {}
        )
        self._dates: dict[tuple[Repository, str], float] = dict(earlier._dates) if earlier else {}
        self._routes: OrderedDict[tuple[Repository, str, str], Route] = OrderedDict()

    def commit_of(self, name: HubName) -> str | None:
        """The commit that reads of this revision are of; None before it was looked up."""
        return name.revision if name.names_a_commit else self._branches.get((name.repository, name.revision))

    def pin(self, name: HubName, commit: str) -> None:
        """Reads of this revision are of `commit` from now on."""
        if not name.names_a_commit:
            self._branches[name.repository, name.revision] = commit

    def commit_with(self, name: HubName, version: str) -> str | None:
        """A commit where the file has this content, as far as one was seen."""
        return self._contents.get((name.repository, name.path, version))

    def saw(self, repository: Repository, path: str, version: str, commit: str) -> None:
        """Note that `path` has this content in `commit`."""
        with self._lock:
            self._contents[repository, path, version] = commit
            if len(self._contents) > _REMEMBERED_CONTENTS:
                self._contents.popitem(last=False)

    def date(self, repository: Repository, commit: str) -> float | None:
        """When the repository was last changed as of `commit`, in Unix seconds; None before it was asked for."""
        return self._dates.get((repository, commit))

    def note_date(self, repository: Repository, commit: str, date: float) -> None:
        self._dates[repository, commit] = date

    def route(self, repository: Repository, commit: str, path: str) -> Route | None:
        """Where the bytes of a file are, while the address holds."""
        found = self._routes.get((repository, commit, path))
        return found if found is not None and found.until > time.monotonic() else None

    def note_route(self, repository: Repository, commit: str, path: str, url: str, version: str, size: int) -> None:
        route = Route(url, version, size, time.monotonic() + _ROUTE_SECONDS)
        with self._lock:
            self._routes[repository, commit, path] = route
            if len(self._routes) > _REMEMBERED_ROUTES:
                self._routes.popitem(last=False)

    def forget_route(self, repository: Repository, commit: str, path: str) -> None:
        with self._lock:
            self._routes.pop((repository, commit, path), None)
