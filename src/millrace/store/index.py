"""The index of a store: LMDB, which any process reads in about a microsecond without a message.

The tables: `objects` (one record per object version), `blocks` (per block of an object with its own file its checksum, or
the checksums of its cached pages if it is not complete),
`segments` and `members` (the objects of each segment), `meta` (descriptions of keys by the origin, and pages of listings),
`tails` (ends of objects that were not stored), `room` (reservations) and `state` (the store's own numbers). A block is
cached if and only if its checksum is in `blocks` under the object's current generation, or the object is in a segment. The
name or size of a file proves nothing.

The index is never flushed and belongs to one boot of the machine; after another it is rebuilt from the files (`rebuild.py`).
How records are verified, and damaged ones handled: `transactions.py`. How LMDB is opened, and its traps: `environment.py`.
How the records look: `records.py`.
"""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

import lmdb

from millrace.store.environment import INDEX_ERRORS
from millrace.store.records import (
    BLOCK_PREFIX_BYTES,
    Entry,
    ObjectName,
    Pages,
    SegmentRecord,
    block_key,
    block_of,
    cached_in,
    generation_key,
    member_key,
    member_of,
    pack_number,
    pack_pages,
    unpack_block,
)
from millrace.store.signals import CHANGE_ID, Stamp
from millrace.store.transactions import Cursor, IndexTransactions, Reading, Writing

_T = TypeVar("_T")

_PAGE = 1000
_RESERVATION = struct.Struct("<Qd")


class Index(IndexTransactions):
    """Typed access to the tables. Thread-safe; any number of processes at once; not usable after a fork.

    Every removal raises `signals`. Writes, and opening, raise `StorageError` when a writing process is stopped, and
    `DamagedIndexError` when the files are not an index, or were cut.
    """

    def stamp(self) -> Stamp | None:
        """The numbers to store with results that are looked up *after* this call; None while a change is in progress.

        The results are valid as long as `signals.read()` returns these numbers.
        """
        removals, changes = self.signals.numbers[:2]
        try:  # part of every first open: no context manager of our own
            with self._guard, self._env.begin() as txn:
                visible = txn.id()
        except lmdb.Error as error:
            raise self._failed(error) from error
        return Stamp(removals, changes) if removals <= visible and changes & CHANGE_ID <= visible else None

    def look(self, read: Callable[[Reading], _T]) -> _T:
        """The result of `read`, called with a transaction on metadata, in which `get_in` looks up objects.

        Values are views that are valid only inside `read`.
        """
        try:  # part of every first open: no context manager of our own
            with self._guard, self._env.begin(buffers=True) as txn:
                return read(Reading(txn, self._meta, self._note, views=True))
        except INDEX_ERRORS as error:
            raise self._failed(error) from error

    # --- objects ----------------------------------------------------------------------------------

    def get_in(self, txn: Reading, object_id: bytes) -> Entry | None:
        """The record of an object version inside `look`, or None."""
        value = txn.get(object_id, db=self._objects)
        return None if value is None else Entry.unpack(object_id, bytes(value))

    def get(self, object_id: bytes) -> Entry | None:
        """The record of an object version, or None."""
        return self.get_as_of(object_id)[0]

    def get_as_of(self, object_id: bytes) -> tuple[Entry | None, int]:
        """As `get`, with the id of the last transaction that it sees."""
        objects, guard = self._objects, self._guard
        guard.__enter__()  # part of every first open: only the necessary steps
        try:
            with self._env.begin() as txn:
                record, visible = txn.get(object_id, db=objects.handle), txn.id()
        except (MemoryError, *INDEX_ERRORS) as error:
            raise self._failed(error) from error
        finally:
            guard.__exit__()
        if record is None:
            return None, visible
        value = objects.unseal(object_id, record)
        if value is None:
            self._note(objects, object_id)
            return None, visible
        return Entry.unpack(object_id, value), visible

    def create(self, object_id: bytes, size: int, block_bytes: int, name: ObjectName) -> Entry:
        """Return the record of an object version; an empty one with a new generation is created if there is none."""
        entry = self.get(object_id)  # without the writers' lock, which every process of the node shares
        if entry is not None:
            return entry

        def write(txn: Writing) -> Entry:
            entry = self._get(txn, object_id)
            if entry is None:
                generation = self._next_generation(txn)
                entry = Entry(object_id, generation, size, block_bytes, 0, packed_name=name.pack())
                self._put(txn, entry)
            return entry

        return self.write(write)

    def add_small(
        self, object_id: bytes, size: int, name: ObjectName, *, segment: int, offset: int, checksum: int
    ) -> Entry | None:
        """Record that an object is stored in a segment, whose bytes were written before.

        If the object has a record already, that record stays and is returned; the bytes in the segment are then waste. None
        when the segment was removed meanwhile.
        """

        def write(txn: Writing) -> Entry | None:
            record = self._segment(txn, segment)
            if record is None:
                return None
            grown = max(0, offset + size - record.written_bytes)
            self._add(txn, b"used", grown)
            entry = self._get(txn, object_id)
            added = entry is None
            if entry is None:
                generation = self._next_generation(txn)
                entry = Entry(
                    object_id, generation, size, max(1, size), size, segment, offset, checksum, packed_name=name.pack()
                )
                self._put(txn, entry)
                txn.put(member_key(segment, object_id), b"", db=self._members)
            self._put_segment(
                txn,
                record._replace(
                    written_bytes=record.written_bytes + grown, live_bytes=record.live_bytes + (size if added else 0)
                ),
            )
            return entry

        return self.write(write)

    def seal(self, entry: Entry, file: os.stat_result) -> bool:
        """Record that all blocks were verified from the file with this inode, these times and this number of links.

        False when the object was removed or has lost blocks meanwhile.
        """

        def write(txn: Writing) -> bool:
            now = self._current(txn, entry)
            if now is None or not now.complete:
                return False
            self._put(txn, now.with_seal(file))
            return True

        return self.write(write)

    def unseal(self, entry: Entry) -> None:
        """Record that the file must be verified again before its next map."""

        def write(txn: Writing) -> None:
            now = self._current(txn, entry)
            if now is not None and now.sealed:
                self._put(txn, now.with_seal(None))
                self.signals.removed(txn.id())

        self.write(write, last_pages=True)

    def remove(self, object_id: bytes) -> Entry | None:
        """Remove an object version and all its blocks in one step; returns its last record, or None.

        The bytes of an object in a segment count as used until the segment is removed.
        """

        def write(txn: Writing) -> Entry | None:
            entry = self._get(txn, object_id)
            if entry is None:
                return None
            txn.delete(object_id, db=self._objects)
            if entry.place:
                txn.delete(member_key(entry.place, object_id), db=self._members)
                record = self._segment(txn, entry.place)
                if record is not None:
                    self._put_segment(txn, record._replace(live_bytes=max(0, record.live_bytes - entry.size)))
            else:
                self._add(txn, b"used", -self._delete_blocks(txn, entry))
            self.signals.removed(txn.id())
            return entry

        return self.write(write, last_pages=True)

    def entries(self, after: bytes = b"") -> Iterator[Entry]:
        """Every object record after an id, in pages. An open transaction would make the file grow, so none stays open."""
        while found := self.page(after, _PAGE):
            yield from found
            after = found[-1].object_id

    def page(self, after: bytes, limit: int) -> list[Entry]:
        """Up to `limit` object records in the order of their ids, from the one after `after` (`b""`: the first) on."""
        with self.reading(self._objects) as txn:
            cursor = txn.cursor()
            found = cursor.set_range(after + b"\0")
            rows = itertools.islice(cursor, limit) if found else ()
            return [Entry.unpack(key, value) for key, value in rows]

    def used_bytes(self) -> int:
        """Bytes of all cached blocks, of all segments, and of all replicas of checkpoints."""
        with self.reading(self._state) as txn:
            return self._used(txn)

    def set_replica_bytes(self, nbytes: int) -> None:
        """Record the bytes of the replicas of checkpoints next to the store. Only the node process stores them."""

        def write(txn: Writing) -> None:
            txn.put(b"replicas", pack_number(nbytes), db=self._state)

        self.write(write, last_pages=True)

    def reserved_bytes(self, *, but: bytes, now: float) -> int:
        """Bytes that processes other than `but` have reserved. `now` is in seconds since the start of the machine."""
        with self.reading(self._room) as txn:
            return sum(nbytes for owner, nbytes, until in _reservations(txn.cursor()) if owner != but and until > now)

    def reserve(self, owner: bytes, nbytes: int, *, now: float, until: float, fits: Callable[[int, int], bool]) -> bool:
        """Set the reservation of the process `owner` to `nbytes`, if `fits(used, reserved by others)`.

        The reservation ends at `until`, in case the process dies.
        """

        def write(txn: Writing) -> bool:
            rows = list(_reservations(txn.cursor(self._room)))
            others = sum(other for row, other, end in rows if row != owner and end > now)
            if not fits(self._used(txn), others):
                return False
            for row, _, end in rows:
                if end <= now:
                    txn.delete(row, db=self._room)
            txn.put(owner, _RESERVATION.pack(nbytes, until), db=self._room)
            return True

        return self.write(write)

    def release(self, owner: bytes, nbytes: int) -> None:
        """Lower the reservation of the process `owner` to `nbytes`."""

        def write(txn: Writing) -> None:
            value = txn.get(owner, db=self._room)
            if value is not None and nbytes:
                txn.put(owner, _RESERVATION.pack(nbytes, _RESERVATION.unpack(value)[1]), db=self._room)
            elif value is not None:
                txn.delete(owner, db=self._room)

        self.write(write, last_pages=True)

    # --- blocks -----------------------------------------------------------------------------------

    def checksums(self, entry: Entry, blocks: Iterable[int]) -> list[int | None]:
        """The checksum of each block; None for one that is not completely cached."""
        return [state if isinstance(state, int) else None for state in self.block_states(entry, blocks)]

    def block_states(self, entry: Entry, blocks: Iterable[int]) -> list[int | Pages | None]:
        """The checksum of each block, or its cached pages; None for one without any."""
        object_id, generation = entry.object_id, entry.generation
        try:
            with self._guard, self._env.begin(buffers=True) as raw:
                txn = Reading(raw, self._blocks, self._note)
                values = [txn.get(block_key(object_id, generation, block)) for block in blocks]
        except INDEX_ERRORS as error:
            raise self._failed(error) from error
        return [None if value is None else unpack_block(value) for value in values]

    def add_block(self, entry: Entry, block: int, checksum: int) -> Entry | None:
        """Record that a block's bytes are in the file. Returns the present record; None when the object was removed."""
        return self._add_states(entry, {block: checksum})

    def add_pages(self, entry: Entry, pages: Mapping[int, Pages]) -> Entry | None:
        """Record that the bytes of these pages, by block, are in the file. Returns as `add_block`."""
        return self._add_states(entry, pages)

    def _add_states(self, entry: Entry, states: Mapping[int, int | Pages]) -> Entry | None:
        def write(txn: Writing) -> Entry | None:
            before = {
                block: self._block_state(txn, entry, block) for block in states
            }  # a damaged one changes the object
            now = self._current(txn, entry)
            if now is None:
                return None
            added = 0
            for block, state in states.items():
                old = before[block]
                if isinstance(old, int):
                    continue
                merged = state if isinstance(state, int) else {**old, **state} if old else state
                value = pack_number(merged) if isinstance(merged, int) else pack_pages(merged)
                txn.put(block_key(entry.object_id, entry.generation, block), value, db=self._blocks)
                added += cached_in(entry, block, merged) - cached_in(entry, block, old or {})
            if added:
                now = now._replace(cached_bytes=now.cached_bytes + added)
                self._put(txn, now)
                self._add(txn, b"used", added)
            return now

        return self.write(write)

    def drop_block(self, entry: Entry, block: int) -> bool:
        """Remove a block with wrong bytes, all of its pages, and the seal of its file. False when nothing was cached."""

        def write(txn: Writing) -> bool:
            state = self._block_state(txn, entry, block)
            if state is None:
                return False
            txn.delete(block_key(entry.object_id, entry.generation, block), db=self._blocks)
            nbytes = cached_in(entry, block, state)
            now = self._current(txn, entry)
            if now is not None:
                left = max(0, now.cached_bytes - nbytes)
                self._put(txn, now._replace(cached_bytes=left).with_seal(None))
            self._add(txn, b"used", -nbytes)
            self.signals.removed(txn.id())
            return True

        return self.write(write, last_pages=True)

    # --- segments ---------------------------------------------------------------------------------

    def new_generation(self) -> int:
        """A number that no object or segment of this store has had."""

        def write(txn: Writing) -> int:
            return self._next_generation(txn)

        return self.write(write)

    def add_segment(self, generation: int, group: str) -> None:
        """Record a new, empty segment."""

        def write(txn: Writing) -> None:
            self._put_segment(txn, SegmentRecord(generation, 0, 0, group))

        self.write(write)

    def segment(self, generation: int) -> SegmentRecord | None:
        """The record of a segment, or None."""
        with self.reading(self._segments) as txn:
            return self._segment(txn, generation)

    def segment_records(self) -> list[SegmentRecord]:
        """Every segment, the oldest first."""
        with self.reading(self._segments) as txn:
            return [SegmentRecord.unpack(key, value) for key, value in txn.cursor()]

    def entries_in(self, generation: int, *, limit: int | None = None) -> list[Entry]:
        """The records of all objects in a segment, or of up to `limit` whose ids are the lowest."""
        found: list[Entry] = []
        with self.reading(self._members) as txn:
            cursor = txn.cursor()
            cursor.set_range(member_key(generation))
            while (object_id := member_of(cursor.key(), generation)) is not None and len(found) != limit:
                entry = self._get(txn, object_id)
                if entry is not None and entry.place == generation:
                    found.append(entry)
                cursor.next()
        return found

    def remove_segment(self, generation: int) -> list[Entry] | None:
        """Remove a segment with all of its objects in one step; returns their last records. None when there is none."""

        def write(txn: Writing) -> list[Entry] | None:
            record = self._segment(txn, generation)
            if record is None:
                return None
            removed = []
            cursor = txn.cursor(self._members)
            cursor.set_range(member_key(generation))
            while (object_id := member_of(cursor.key(), generation)) is not None:
                entry = self._get(txn, object_id)
                if entry is not None and entry.place == generation:
                    txn.delete(object_id, db=self._objects)
                    removed.append(entry)
                cursor.delete()
            txn.delete(generation_key(generation), db=self._segments)
            self._add(txn, b"used", -record.written_bytes)
            self.signals.removed(txn.id())
            return removed

        return self.write(write, last_pages=True)

    # --- a new index from the files ---------------------------------------------------------------

    def restore(self, objects: Sequence[tuple[Entry, Sequence[tuple[int, int]]]], *, used_bytes: int) -> None:
        """Record objects that were found in files, with their (block, checksum) pairs, in one step.

        `used_bytes` is the size of their blocks; segments are recorded separately. Existing records are replaced.
        """

        def write(txn: Writing) -> None:
            for entry, blocks in objects:
                self._put(txn, entry)
                if entry.place:
                    txn.put(member_key(entry.place, entry.object_id), b"", db=self._members)
                for block, value in blocks:
                    txn.put(block_key(entry.object_id, entry.generation, block), pack_number(value), db=self._blocks)
            self._add(txn, b"used", used_bytes)

        self.write(write, last_pages=True)

    def restore_segments(self, records: Iterable[SegmentRecord]) -> None:
        """Record segments that were found in files."""

        def write(txn: Writing) -> None:
            for record in records:
                self._put_segment(txn, record)
                self._add(txn, b"used", record.written_bytes)

        self.write(write, last_pages=True)

    @property
    def last_generation(self) -> int:
        """The highest generation of any object or segment. Later ones are higher."""
        return self._number(b"generation")

    def raise_generation(self, least: int) -> None:
        """Make every new generation higher than `least`."""

        def write(txn: Writing) -> None:
            now = self._read(txn, b"generation")
            self._add(txn, b"generation", max(0, least - now))

        self.write(write, last_pages=True)

    @property
    def built(self) -> bool:
        """Whether the rebuild from the files is complete."""
        return self._number(b"built") == 1

    def set_built(self) -> None:
        """Record that the rebuild from the files is complete. Raises `DiskFullError` when the last pages are not left."""

        def write(txn: Writing) -> None:
            txn.put(b"built", pack_number(1), db=self._state)

        self.write(write)

    # --- metadata (its records: `page_map.py`) -----------------------------------------------------

    def last_meta_before(self, key: bytes, read: Callable[[bytes, memoryview], _T]) -> _T | None:
        """The result of `read`, called with the last metadata record before `key`; None when there is none.

        The view is valid only inside `read`.
        """
        try:
            with self._guard, self._env.begin(buffers=True) as txn:
                cursor = Reading(txn, self._meta, self._note, views=True).cursor()
                return read(bytes(cursor.key()), cursor.value()) if cursor.before(key) else None
        except INDEX_ERRORS as error:
            raise self._failed(error) from error

    def meta_reading(self) -> AbstractContextManager[Reading]:
        """A transaction that reads metadata; values are views that are valid only inside it."""
        return self.reading(self._meta, views=True)

    def meta_write(self, action: Callable[[Writing], _T], *, changed: bool = False, last_pages: bool = False) -> _T:
        """As `write`, for metadata. Views of the transaction are valid until its next write.

        `changed` signals every process that cached descriptions of the origin are out of date.
        """

        def write(txn: Writing) -> _T:
            result = action(txn)
            if changed:
                self.signals.changed(txn.id())
            return result

        return self.write(write, self._meta, views=True, last_pages=last_pages)

    def meta_bytes(self) -> int:
        """Bytes of the metadata in the index."""
        with self.reading(self._meta) as txn:
            return txn.nbytes(self._meta)

    def drop_meta(self, txn: Writing) -> None:
        """Remove every metadata record, inside a transaction that writes."""
        txn.clear(self._meta)

    # --- ends of objects (their records: `cache/footers.py`) -------------------------------------------

    def tail(self, object_id: bytes) -> bytes | None:
        """The record of an object's end, or None."""
        with self.reading(self._tails) as txn:
            value: bytes | None = txn.get(object_id)
            return value

    def tail_after(self, name: bytes) -> tuple[bytes, bytes] | None:
        """The id and the tail of the first object whose id is `name` or follows it; after the last one, of the first."""
        with self.reading(self._tails) as txn:
            cursor = txn.cursor()
            return cursor.item() if cursor.set_range(name) or cursor.first() else None

    def put_tail(self, object_id: bytes, value: bytes) -> None:
        """Store the record of an object's end, or replace it."""

        def write(txn: Writing) -> None:
            old = txn.get(object_id)
            txn.put(object_id, value)
            self._add(txn, b"tails", len(value) - len(old or b""))

        self.write(write, self._tails)

    def drop_tail(self, object_id: bytes) -> None:
        """Remove the record of an object's end; a missing one is ignored."""
        if self.tail(object_id) is None:
            return

        def write(txn: Writing) -> None:
            self._add(txn, b"tails", -len(txn.pop(object_id) or b""))

        self.write(write, self._tails, last_pages=True)

    def tail_bytes(self) -> int:
        """Bytes of all records of ends."""
        return self._number(b"tails")

    # --- inside transactions of other modules (`usage_records.py`) ------------------------------------

    def has_segment(self, txn: Reading, generation: int) -> bool:
        """Whether there is a segment of this generation."""
        return txn.get(generation_key(generation), db=self._segments) is not None

    def object_count(self, txn: Reading) -> int:
        """How many object versions have a record."""
        return txn.entries(self._objects)

    # --- inside transactions ----------------------------------------------------------------------

    def _current(self, txn: Reading, entry: Entry) -> Entry | None:
        """The present record; None if the object was removed, or removed and created again, meanwhile."""
        now = self._get(txn, entry.object_id)
        return now if now is not None and now.generation == entry.generation else None

    def _block_state(self, txn: Reading, entry: Entry, block: int) -> int | Pages | None:
        value = txn.get(block_key(entry.object_id, entry.generation, block), db=self._blocks)
        return None if value is None else unpack_block(value)

    def _delete_blocks(self, txn: Writing, entry: Entry) -> int:
        """Delete the checksums of an object; returns the bytes of their blocks."""
        freed = 0
        prefix = block_key(entry.object_id, entry.generation, 0)[:BLOCK_PREFIX_BYTES]
        cursor = txn.cursor(self._blocks)
        cursor.set_range(prefix)
        while cursor.key()[:BLOCK_PREFIX_BYTES] == prefix:
            freed += cached_in(entry, block_of(cursor.key()), unpack_block(cursor.value()))
            cursor.delete()
        return freed

    def _segment(self, txn: Reading, generation: int) -> SegmentRecord | None:
        key = generation_key(generation)
        value = txn.get(key, db=self._segments)
        return None if value is None else SegmentRecord.unpack(key, value)

    def _put_segment(self, txn: Writing, record: SegmentRecord) -> None:
        txn.put(generation_key(record.generation), record.pack(), db=self._segments)

    def _number(self, name: bytes) -> int:
        with self.reading(self._state) as txn:
            return self._read(txn, name)

    def _used(self, txn: Reading) -> int:
        return self._read(txn, b"used") + self._read(txn, b"replicas")

    def _next_generation(self, txn: Writing) -> int:
        """A number that was never used in the store. When the last one is lost, the index counts as damaged."""
        if txn.get(b"generation", db=self._state) is None and (
            txn.entries(self._objects) or txn.entries(self._segments) or self._read(txn, b"built")
        ):
            raise self._guard.damaged("it has lost the number of the last generation")
        return self._add(txn, b"generation", 1)


def _reservations(cursor: Cursor) -> Iterator[tuple[bytes, int, float]]:
    """Every reservation: owner, bytes, and end."""
    for owner, value in cursor:
        nbytes, until = _RESERVATION.unpack(value)
        yield owner, nbytes, until
