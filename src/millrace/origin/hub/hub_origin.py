"""The Hugging Face hub as an origin. Read only.

A commit never changes, so every read is of a commit. A branch or tag is looked up when it is first used, and again when
somebody asks for a description or a listing (`head`, `list_...`), which the cache does as its consistency asks. The version
of a file is the id of its content: a new commit changes only the versions of the files that it changed, and a reader of an
older one goes on reading it from the commit that has it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

from typing_extensions import Buffer

from millrace.errors import (
    ConfigurationError,
    MillraceError,
    ObjectChangedError,
    ObjectNotFoundError,
    OriginUnavailableError,
)
from millrace.origin.hub.client import Entry, HubClient, RouteGoneError
from millrace.origin.hub.names import HubName, parse_name
from millrace.origin.hub.options import hub_options
from millrace.origin.hub.pins import Pins
from millrace.origin.hub.trees import walk
from millrace.origin.protocol import Listing, ListingPage, ObjectInfo
from millrace.origin.turns import TakesTurns, Turns
from millrace.origin.web.read_only import ReadOnlyOrigin

_LIST_PAGE = 1000


class _Session:
    """What one process has open and knows."""

    def __init__(self, client: HubClient, pins: Pins) -> None:
        self.pid, self.client, self.pins = os.getpid(), client, pins


class HubOrigin(TakesTurns, ReadOnlyOrigin):
    """One hub (endpoint) with all its repositories.

    Thread-safe; picklable (with the explicit `target_options`, a token included); safe across fork. A token that is not
    given is looked for by each process in its own environment and home.
    """

    _cannot_be_written = "the Hugging Face hub is read only here"
    _write_instead = "upload with huggingface_hub, or write to an object store"

    def __init__(self, scheme: str, target_options: Mapping[str, Any] | None = None) -> None:
        if scheme != "hf":
            raise ConfigurationError(f"the hub serves no {scheme}://", next_step="use hf://")
        self._target_options = dict(target_options or {})
        self._options = hub_options(self._target_options, os.environ)
        self._session = _Session(HubClient(self._options), Pins())

    def __repr__(self) -> str:
        return f"HubOrigin({self.identity!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ("hf", self._target_options)

    def within(self, turns: Turns) -> Self:
        twin = super().within(turns)
        twin._session = _Session(HubClient(self._options, turns), self._now().pins)
        return twin

    @property
    def identity(self) -> str:
        return f"hf+{self._options.endpoint}"

    @property
    def head_is_local(self) -> bool:
        return False

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
        session = self._now()
        told = session.client.describe(name.repository, name.revision, name.path, name.url)
        session.pins.pin(name, told.commit)
        session.pins.saw(name.repository, name.path, told.version, told.commit)
        return ObjectInfo(key, told.size, told.version, self._date(name, told.commit))

    def read(self, key: str, start: int, stop: int, *, version: str | None = None) -> Buffer:
        name = self._file(key)
        if not 0 <= start <= stop:
            raise ConfigurationError(f"bad byte range [{start}, {stop}) of hf://{key}")
        if start == stop:
            return b""
        pins = self._now().pins
        known = pins.commit_with(name, version) if version is not None else None
        commit, missing = known or pins.commit_of(name), None
        if commit is not None:
            try:
                data = self._read_commit(name, commit, start, stop, version)
            except ObjectNotFoundError as error:
                if name.names_a_commit:
                    raise
                data, missing = None, error  # the commit is gone (a squashed history), or the file came later
            if data is not None:
                return data
        if not name.names_a_commit:
            # Somebody else has seen a newer commit of this branch, or nobody has looked here yet.
            newest = self._look_up(name)
            if newest != commit and (data := self._read_commit(name, newest, start, stop, version)) is not None:
                return data
        if missing is not None:
            raise missing
        raise ObjectChangedError(f"hf://{key} was overwritten while it was read", next_step="open it again")

    def _read_commit(self, name: HubName, commit: str, start: int, stop: int, version: str | None) -> Buffer | None:
        """The range of a file of a commit; None where that has other content than `version`."""
        session, where = self._now(), (name.repository, commit, name.path)
        route = session.pins.route(*where)
        if route is not None and version in (None, route.version) and stop <= route.size:
            try:
                return session.client.read_route(route.url, start, stop, route.size)
            except RouteGoneError:
                session.pins.forget_route(*where)
        told, data = session.client.read(*where, name.url, start, stop, version)
        if version is not None and told.version != version:
            return None
        session.pins.saw(name.repository, name.path, told.version, commit)
        if told.route is None:
            return data
        try:
            data = session.client.read_route(told.route, start, stop, told.size)
        except RouteGoneError as error:
            raise OriginUnavailableError(
                f"{name.url}: the address that the hub gave for its bytes does not hold",
                next_step="read again; if it persists, check the clock of this machine and proxies",
            ) from error
        session.pins.note_route(*where, told.route, told.version, told.size)
        return data

    def _look_up(self, name: HubName) -> str:
        """The commit that a revision names now; reads are of it from now on."""
        session = self._now()
        commit = session.client.commit(name.repository, name.revision, name.url)
        session.pins.pin(name, commit.id)
        session.pins.note_date(name.repository, commit.id, commit.modified)
        return commit.id

    def _date(self, name: HubName, commit: str) -> float:
        """When the repository was last changed as of a commit: one request for each commit."""
        session = self._now()
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
            for page in self._now().client.tree(name.repository, commit, name.path, name.url, recursive=False):
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

    def list_all(self, prefix: str) -> Iterator[Sequence[ObjectInfo]]:
        return (page.objects for page in self.list_pages(prefix) if page.objects)

    def list_pages(
        self, prefix: str, *, after: str = "", settled: Callable[[str], ObjectInfo | None] | None = None
    ) -> Iterator[ListingPage]:
        name = parse_name(prefix)
        commit = self._commit_to_list(name)
        client = self._now().client

        def pages(path: str, recursive: bool) -> Iterator[Sequence[Entry]]:
            return client.tree(name.repository, commit, path, name.url, recursive=recursive)

        objects: list[ObjectInfo] = []
        is_directory = not name.path
        try:
            for entry in walk(pages, name.path, after.removeprefix(f"{name.root}/")):
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
        return self._turns.retrying(name.url, lambda: self._look_up(name))

    def _info(self, name: HubName, commit: str, entry: Entry) -> ObjectInfo:
        assert entry.version is not None
        pins = self._now().pins
        pins.saw(name.repository, entry.path, entry.version, commit)
        date = pins.date(name.repository, commit)
        if date is None:
            date = self._turns.retrying(name.url, lambda: self._date(name, commit))
        return ObjectInfo(name.key(entry.path), entry.size, entry.version, date)

    # --- names and processes ----------------------------------------------------------------------

    def _file(self, key: str) -> HubName:
        name = parse_name(key)
        if not name.path or key.endswith("/"):
            raise ObjectNotFoundError(f"hf://{key} names no file", next_step="name a file in it")
        return name

    def _now(self) -> _Session:
        """What this process has open; a forked child has connections of its own, and knows what its parent knew."""
        if self._session.pid != os.getpid():
            self._session = _Session(HubClient(self._options, self._turns), Pins(self._session.pins))
        return self._session
