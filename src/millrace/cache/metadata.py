"""What the origin said about keys, remembered in the index for as long as the chosen consistency allows.

One record a key (size, version, time), and listings in pages of a thousand names, so that a listing of any length is read
in bounded memory. A listing refreshes the records of everything that it names: opening a listed object asks nothing.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from millrace.cache.index import Index
from millrace.errors import ChangedError
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
        value = self._index.get_meta(_slot("object", origin, key))
        record = _Record.unpack(value) if value is not None else None
        return record.info if record is not None and self._fresh(record.fetched) else None

    def stat(self, origin: Origin, key: str) -> ObjectInfo:
        """Describe an object, from memory while fresh. Raises `ObjectNotFoundError`."""
        info = self.known(origin, key)
        if info is not None:
            return info
        asked = self._clock()
        try:
            info = origin.head(key)
        except FileNotFoundError:
            value = self._index.get_meta(_slot("object", origin, key))
            if value is not None:
                self.forget(origin, key)
                self._on_changed(origin, _Record.unpack(value).info)
            raise
        self._remember(origin, [info], asked)
        return info

    def refresh(self, origin: Origin, key: str) -> ObjectInfo:
        """Ask the origin whatever the age of what is remembered (the object was found changed)."""
        info = origin.head(key)
        self._remember(origin, [info], self._clock())
        return info

    def forget(self, origin: Origin, key: str) -> None:
        """Drop what is remembered of `key` and of the listings that could name it (it was written or removed)."""
        slots = [_slot("object", origin, key)]
        parent = key
        while parent:
            parent = parent.rpartition("/")[0]
            slots += [_slot("listed", origin, parent, depth) for depth in ("level", "all")]
        self._index.delete_meta(slots)

    # --- listings ---------------------------------------------------------------------------------

    def known_directory(self, origin: Origin, prefix: str) -> bool:
        """Whether a fresh listing says that something lies below `prefix`; asks nobody."""
        for depth in ("level", "all"):
            for objects, prefixes in self._pages(origin, prefix, depth):
                if objects or prefixes:
                    return True
        return False

    def list_level(self, origin: Origin, prefix: str) -> Listing:
        """What lies directly below `prefix`; an empty listing where there is nothing."""
        objects: list[ObjectInfo] = []
        prefixes: list[str] = []
        for page_objects, page_prefixes in self._pages(origin, prefix, "level"):
            objects += page_objects
            prefixes += page_prefixes
        if objects or prefixes:
            return Listing(objects=objects, prefixes=prefixes)
        asked = self._clock()
        listing = origin.list_level(prefix)
        self._write_listing(origin, prefix, "level", asked, iter([(listing.objects, listing.prefixes)]))
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
            asked = self._clock()
            writer = _ListingWriter(self, origin, prefix, "all", asked)
            for page in origin.list_all(prefix):
                writer.add(page, ())
                yield page
            # A listing that was broken off never gets here, and so is never taken for whole.
            writer.finish()

    # --- inside -----------------------------------------------------------------------------------

    def _fresh(self, fetched: float) -> bool:
        return self._max_age > 0 and self._clock() - fetched <= self._max_age

    def _remember(self, origin: Origin, infos: Sequence[ObjectInfo], asked: float) -> None:
        records = []
        for info in infos:
            slot = _slot("object", origin, info.key)
            value = self._index.get_meta(slot)
            if value is not None:
                old = _Record.unpack(value).info
                if (old.version, old.size) != (info.version, info.size):
                    self._on_changed(origin, old)
            records.append((slot, _Record(info, asked).pack()))
        self._index.put_meta(records)

    def _pages(self, origin: Origin, prefix: str, depth: Depth) -> Iterator[tuple[Sequence[ObjectInfo], Sequence[str]]]:
        """The pages of a remembered listing while it is fresh; none when it is not remembered."""
        value = self._index.get_meta(_slot("listed", origin, prefix, depth))
        if value is None:
            return
        asked, _, count = json.loads(value)
        if not self._fresh(asked):
            return
        for number in range(count):
            page = self._index.get_meta(_slot("page", origin, prefix, f"{depth} {asked} {number}"))
            if page is None:
                raise ChangedError(f"the listing of {prefix} changed while it was read", next_step="list it again")
            names, sizes, versions, modified, prefixes = json.loads(page)
            yield [ObjectInfo(*row) for row in zip(names, sizes, versions, modified, strict=True)], prefixes

    def _write_listing(
        self,
        origin: Origin,
        prefix: str,
        depth: Depth,
        asked: float,
        parts: Iterator[tuple[Sequence[ObjectInfo], Sequence[str]]],
    ) -> None:
        writer = _ListingWriter(self, origin, prefix, depth, asked)
        for objects, prefixes in parts:
            writer.add(objects, prefixes)
        writer.finish()


class _ListingWriter:
    """Writes a listing page by page; it is valid from `finish` on. Two generations of pages are kept for readers."""

    def __init__(self, cache: MetadataCache, origin: Origin, prefix: str, depth: Depth, asked: float) -> None:
        self._cache, self._origin, self._prefix, self._depth, self._asked = cache, origin, prefix, depth, asked
        self._count = 0

    def add(self, objects: Sequence[ObjectInfo], prefixes: Sequence[str]) -> None:
        for start in range(0, max(len(objects), 1), PAGE_OBJECTS):
            page = objects[start : start + PAGE_OBJECTS]
            self._cache._remember(self._origin, page, self._asked)
            columns = [
                [info.key for info in page],
                [info.size for info in page],
                [info.version for info in page],
                [info.modified for info in page],
                list(prefixes) if start == 0 else [],
            ]
            self._cache._index.put_meta([(self._page_slot(self._asked, self._count), json.dumps(columns).encode())])
            self._count += 1

    def finish(self) -> None:
        index = self._cache._index
        slot = _slot("listed", self._origin, self._prefix, self._depth)
        value = index.get_meta(slot)
        previous = json.loads(value) if value is not None else [None, None, 0]
        index.put_meta([(slot, json.dumps([self._asked, previous[0], self._count]).encode())])
        if previous[1] is not None:
            self._delete_pages(previous[1])

    def _page_slot(self, asked: float, number: int) -> bytes:
        return _slot("page", self._origin, self._prefix, f"{self._depth} {asked} {number}")

    def _delete_pages(self, asked: float) -> None:
        index = self._cache._index
        number = 0
        while index.get_meta(self._page_slot(asked, number)) is not None:
            index.delete_meta([self._page_slot(asked, number)])
            number += 1
