"""What the origin said about keys, remembered in the index for as long as the chosen consistency allows.

One record a key (size, version, time), and listings in pages of a thousand names, so that a listing of any length is read
in bounded memory. A listing refreshes the records of everything that it names: opening a listed object asks nothing.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from millrace.cache.index import Index
from millrace.errors import ChangedError, StorageError
from millrace.events import Event, emit
from millrace.origin import Listing, ObjectInfo, Origin

PAGE_OBJECTS = 1000

Depth = Literal["level", "all"]
"""Whether a listing names what lies directly below its prefix, or everything."""


@dataclass(frozen=True, slots=True)
class _Record:
    info: ObjectInfo
    fetched: float

    def pack(self) -> bytes:
        info = self.info
        return json.dumps([info.key, info.size, info.version, info.modified, self.fetched]).encode()

    @classmethod
    def unpack(cls, value: bytes) -> _Record:
        key, size, version, modified, fetched = json.loads(value)
        return cls(ObjectInfo(key, size, version, modified), fetched)


@dataclass(frozen=True, slots=True)
class _Moment:
    """When the origin was asked: the time, and how many changes were known by then."""

    asked: float
    changes: int


@dataclass(frozen=True, slots=True)
class _Listed:
    """A listing that is remembered: when it was asked for, how many pages it has, and the one before it."""

    asked: float
    pages: int
    previous: float | None
    stale: bool = False

    def pack(self) -> bytes:
        return json.dumps([self.asked, self.pages, self.previous, self.stale]).encode()

    @classmethod
    def unpack(cls, value: bytes) -> _Listed:
        return cls(*json.loads(value))


def _slot(kind: str, origin: Origin, key: str, extra: str = "") -> bytes:
    """The key of a record in the index: a digest, because S3's keys are longer than LMDB's may be."""
    text = "\0".join((kind, origin.identity, key, extra))
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=20).digest()


class MetadataCache:
    """Answers `stat` and listings from the index while they are fresh, else from the origin.

    `max_age_seconds` is 0 (ask every time), `inf` (never ask twice) or a time. `on_changed` is told the old description
    of an object whose version turns out to have changed, or which is gone. Thread- and process-safe.
    """

    def __init__(
        self,
        index: Index,
        *,
        max_age_seconds: float,
        on_changed: Callable[[Origin, ObjectInfo], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._index = index
        self._max_age = max_age_seconds
        self._on_changed = on_changed
        self._clock = clock

    # --- objects ----------------------------------------------------------------------------------

    def known(self, origin: Origin, key: str) -> ObjectInfo | None:
        """What is remembered of an object and still fresh; asks nobody."""
        known = self._known_until(origin, key)
        return None if known is None else known[0]

    def _known_until(self, origin: Origin, key: str) -> tuple[ObjectInfo, float] | None:
        try:
            value = self._index.get_meta(_slot("object", origin, key))
        except StorageError as error:
            emit(Event(name="cache.disk.failed", subject="index", detail=str(error)))
            return None
        record = _Record.unpack(value) if value is not None else None
        if record is None or not self._fresh(record.fetched):
            return None
        return record.info, record.fetched + self._max_age

    def stat(self, origin: Origin, key: str) -> ObjectInfo:
        """Describe an object, from memory while fresh. Raises `ObjectNotFoundError`."""
        return self.stat_until(origin, key)[0]

    def stat_until(self, origin: Origin, key: str) -> tuple[ObjectInfo, float]:
        """Describe an object as `stat` does, and say until when (by `time.time`) that may be believed."""
        known = self._known_until(origin, key)
        if known is not None:
            return known
        moment = self._moment()
        try:
            info = origin.head(key)
        except FileNotFoundError:
            if self._index.get_meta(_slot("object", origin, key)) is not None:
                self.forget(origin, key)
            raise
        self._remember(origin, [info], moment)
        return info, moment.asked + self._max_age

    def forget(self, origin: Origin, key: str) -> None:
        """Drop what is remembered of `key` and of the listings that could name it (it was written or removed).

        The version that was known is reported as changed. An answer of the origin that is on its way is not remembered.
        """
        slot = _slot("object", origin, key)
        value = self._index.get_meta(slot)
        stale: list[tuple[bytes, bytes]] = []
        parent = key
        while parent:
            parent = parent.rpartition("/")[0]
            for depth in ("level", "all"):
                listed = _slot("listed", origin, parent, depth)
                record = self._index.get_meta(listed)
                if record is not None:
                    # Kept, but never fresh again: the next listing finds here which pages to remove.
                    stale.append((listed, replace(_Listed.unpack(record), stale=True).pack()))
        self._index.change_meta(stale, delete=[slot])
        if value is not None:
            self._on_changed(origin, _Record.unpack(value).info)

    def forget_all(self) -> None:
        """Drop everything that is remembered, for every process of this node. What is cached stays, and is found again."""
        self._index.clear_meta()

    # --- listings ---------------------------------------------------------------------------------

    def known_directory(self, origin: Origin, prefix: str) -> bool:
        """Whether a fresh listing says that something lies below `prefix`; asks nobody."""
        for depth in ("level", "all"):
            first = next(self._pages(origin, prefix, depth), ((), ()))
            if any(first):
                return True
        return False

    def list_level(self, origin: Origin, prefix: str) -> Listing:
        """What lies directly below `prefix`; an empty listing where there is nothing."""
        try:
            pages = list(self._pages(origin, prefix, "level"))
        except ChangedError:
            pages = []  # replaced while it was read: ask the origin
        objects = [info for page, _ in pages for info in page]
        prefixes = [name for _, names in pages for name in names]
        if objects or prefixes:  # that there is nothing is never believed: somebody may be about to write
            return Listing(objects=objects, prefixes=prefixes)
        moment = self._moment()
        listing = origin.list_level(prefix)
        writer = _ListingWriter(self, origin, prefix, "level", moment)
        writer.add(listing.objects, listing.prefixes)
        writer.finish()
        return listing

    def list_all(self, origin: Origin, prefix: str) -> Iterator[Sequence[ObjectInfo]]:
        """Every object below `prefix`, in pages.

        Raises `ChangedError` when other processes listed the prefix anew twice while this one was reading.
        """
        remembered = False
        for objects, _ in self._pages(origin, prefix, "all"):
            remembered = True
            yield objects
        if not remembered:
            writer = _ListingWriter(self, origin, prefix, "all", self._moment())
            for page in origin.list_all(prefix):
                writer.add(page, ())
                yield page
            # A listing that was broken off never gets here, and so is never taken for whole.
            writer.finish()

    # --- inside -----------------------------------------------------------------------------------

    def _moment(self) -> _Moment:
        return _Moment(self._clock(), self._index.change_count())

    def _fresh(self, fetched: float) -> bool:
        return self._max_age > 0 and self._clock() - fetched <= self._max_age

    def _remember(self, origin: Origin, infos: Sequence[ObjectInfo], moment: _Moment) -> None:
        records = []
        for info in infos:
            slot = _slot("object", origin, info.key)
            value = self._index.get_meta(slot)
            if value is not None:
                old = _Record.unpack(value).info
                if (old.version, old.size) != (info.version, info.size):
                    self._on_changed(origin, old)
            records.append((slot, _Record(info, moment.asked).pack()))
        self._write(records, moment)

    def _write(self, records: Sequence[tuple[bytes, bytes]], moment: _Moment) -> None:
        """Remember an answer of the origin, unless something was written there since it was asked.

        A disk that will not take it costs the memory, not the read.
        """
        try:
            self._index.put_meta(records, unless_changed_since=moment.changes)
        except StorageError as error:
            emit(Event(name="cache.disk.failed", subject="index", detail=str(error)))

    def _pages(self, origin: Origin, prefix: str, depth: Depth) -> Iterator[tuple[Sequence[ObjectInfo], Sequence[str]]]:
        """The pages of a remembered listing while it is fresh; none when it is not remembered."""
        value = self._index.get_meta(_slot("listed", origin, prefix, depth))
        listed = _Listed.unpack(value) if value is not None else None
        if listed is None or listed.stale or not self._fresh(listed.asked):
            return
        for number in range(listed.pages):
            page = self._index.get_meta(_page_slot(origin, prefix, depth, listed.asked, number))
            if page is None:
                raise ChangedError(f"the listing of {prefix} changed while it was read", next_step="list it again")
            names, sizes, versions, modified, prefixes = json.loads(page)
            yield [ObjectInfo(*row) for row in zip(names, sizes, versions, modified, strict=True)], prefixes


def _page_slot(origin: Origin, prefix: str, depth: Depth, asked: float, number: int) -> bytes:
    return _slot("page", origin, prefix, f"{depth} {asked} {number}")


class _ListingWriter:
    """Writes a listing page by page; it is valid from `finish` on. Two generations of pages are kept for readers."""

    def __init__(self, cache: MetadataCache, origin: Origin, prefix: str, depth: Depth, moment: _Moment) -> None:
        self._cache, self._origin, self._prefix, self._depth, self._moment = cache, origin, prefix, depth, moment
        self._pages = 0

    def add(self, objects: Sequence[ObjectInfo], prefixes: Sequence[str]) -> None:
        for start in range(0, max(len(objects), 1), PAGE_OBJECTS):
            page = objects[start : start + PAGE_OBJECTS]
            self._cache._remember(self._origin, page, self._moment)
            columns = [
                [info.key for info in page],
                [info.size for info in page],
                [info.version for info in page],
                [info.modified for info in page],
                list(prefixes) if start == 0 else [],
            ]
            slot = _page_slot(self._origin, self._prefix, self._depth, self._moment.asked, self._pages)
            self._cache._write([(slot, json.dumps(columns).encode())], self._moment)
            self._pages += 1

    def finish(self) -> None:
        index = self._cache._index
        slot = _slot("listed", self._origin, self._prefix, self._depth)
        value = index.get_meta(slot)
        old = _Listed.unpack(value) if value is not None else None
        new = _Listed(self._moment.asked, self._pages, previous=old.asked if old else None)
        self._cache._write([(slot, new.pack())], self._moment)
        if old is not None and old.previous is not None:
            self._delete_pages(old.previous)

    def _delete_pages(self, asked: float) -> None:
        index = self._cache._index
        number = 0
        while index.get_meta(slot := _page_slot(self._origin, self._prefix, self._depth, asked, number)) is not None:
            index.delete_meta([slot])
            number += 1


class NoMemory:
    """Stands in for `MetadataCache` where there is no disk: remembers nothing, asks the origin every time."""

    def known(self, origin: Origin, key: str) -> ObjectInfo | None:
        return None

    def stat(self, origin: Origin, key: str) -> ObjectInfo:
        return origin.head(key)

    def stat_until(self, origin: Origin, key: str) -> tuple[ObjectInfo, float]:
        return origin.head(key), 0.0

    def forget(self, origin: Origin, key: str) -> None:
        pass

    def forget_all(self) -> None:
        pass

    def known_directory(self, origin: Origin, prefix: str) -> bool:
        return False

    def list_level(self, origin: Origin, prefix: str) -> Listing:
        return origin.list_level(prefix)

    def list_all(self, origin: Origin, prefix: str) -> Iterator[Sequence[ObjectInfo]]:
        return origin.list_all(prefix)
