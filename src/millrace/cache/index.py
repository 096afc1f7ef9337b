"""The index of a store: LMDB, read by any process in about a microsecond without asking anyone.

Seven tables: `objects` (one record an object version), `blocks` (one checksum a block of an object with a file of its own),
`segments` and `members` (which object lies in which segment), `meta` (what the origin said about a key, and pages of
listings), `tails` (ends of objects that were not kept) and `state` (the store's own numbers). A block is in the cache when,
and only when, its checksum is in `blocks` under the object's current generation, or the object lies in a segment; a file's
name or size proves nothing.

The index is never flushed and belongs to one boot of the machine; another builds it anew from the files (`rebuild.py`).
How LMDB is opened, and its traps: `environment.py`. How the records look: `records.py`.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import lmdb

from millrace.cache.environment import index_errors, open_environment, translated
from millrace.cache.records import (
    BLOCK_PREFIX_BYTES,
    Entry,
    ObjectName,
    SegmentRecord,
    block_key,
    block_of,
    generation_key,
    member_key,
    member_of,
    number,
    pack_number,
)
from millrace.cache.signals import Signals, Stamp
from millrace.cache.write_turn import WriteTurn

if TYPE_CHECKING:
    from lmdb import _Database as _Table

    _Transaction = lmdb.Transaction[bytes]
    MetaTransaction = lmdb.Transaction[memoryview]

_T = TypeVar("_T")

SIGNALS_NAME = "signals"
TURN_NAME = "write.turn"
_TABLES = (b"objects", b"blocks", b"segments", b"members", b"meta", b"state", b"tails", b"room")
_PAGE = 1000
_RESERVATION = struct.Struct("<Qd")


class Index:
    """Typed access to the tables. Thread-safe; any number of processes at once; not usable after a fork.

    `signals` is raised by whatever takes something away. Whatever writes raises `StorageError` when another process is at it
    and does not go on (`write_turn.py`). So does opening, which counts the time since `waiting_since`, a `time.monotonic()`.
    Raises `DamagedIndexError` when the files are no index, or shorter than they were.
    """

    def __init__(self, directory: Path, *, waiting_since: float | None = None) -> None:
        self._turn = WriteTurn(directory / TURN_NAME)
        try:
            self._env, self._path = open_environment(directory, tables=32)
        except BaseException:
            self._turn.close()
            raise
        try:
            self.signals = Signals(directory / SIGNALS_NAME)
            (
                self._objects,
                self._blocks,
                self._segments,
                self._members,
                self._meta,
                self._state,
                self._tails,
                self._room,
            ) = self._open_tables(waiting_since)
        except BaseException:
            self.close()
            raise

    def _open_tables(self, waiting_since: float | None) -> list[_Table]:
        # With LMDB the handle of a table takes a transaction that writes.
        with index_errors(self._path), self._turn.since(waiting_since), self._env.begin(write=True) as txn:
            self.signals.lower_to(txn.id() - 1)
            return [self._env.open_db(name, txn=txn) for name in _TABLES]

    def close(self) -> None:
        """Close the environment. Nothing of this process may use the index any more."""
        self._env.close()
        self._turn.close()

    def abandon(self) -> None:
        """In a forked child: let go of the parent's turn to write, and touch nothing else of it."""
        self._turn.abandon()

    def forget_dead_readers(self) -> None:
        """Free what processes that were killed while they read hold on to: the file would grow for as long as they do."""
        with index_errors(self._path):
            self._env.reader_check()

    def stamp(self) -> Stamp | None:
        """The numbers to note with what is looked up *after* this call; None while a change is just being made.

        What was looked up is true as long as `signals.read()` gives these numbers.
        """
        removals, changes = self.signals.numbers[:2]
        try:  # in the way of every open that was not answered before: no context manager of our own
            with self._env.begin() as txn:
                visible = txn.id()
        except lmdb.Error as error:
            raise translated(error, self._path) from error
        return Stamp(removals, changes) if removals <= visible and changes <= visible else None

    def look(self, read: Callable[[MetaTransaction], _T]) -> _T:
        """What `read` makes of the index as of one moment, in a transaction on metadata; `get_in` looks up objects there.

        Values are views that are valid only inside `read`.
        """
        try:  # in the way of every open that was not answered before: no context manager of our own
            with self._env.begin(self._meta, buffers=True) as txn:
                return read(txn)
        except lmdb.Error as error:
            raise translated(error, self._path) from error

    # --- objects ----------------------------------------------------------------------------------

    def get_in(self, txn: MetaTransaction, object_id: bytes) -> Entry | None:
        """The record of an object version inside `look`, or None."""
        value = txn.get(object_id, db=self._objects)
        return None if value is None else Entry.unpack(object_id, bytes(value))

    def get(self, object_id: bytes) -> Entry | None:
        """The record of an object version, or None."""
        try:
            with self._env.begin(self._objects) as txn:
                value = txn.get(object_id)
        except lmdb.Error as error:
            raise translated(error, self._path) from error
        return None if value is None else Entry.unpack(object_id, value)

    def get_as_of(self, object_id: bytes) -> tuple[Entry | None, int]:
        """What `get` gives, and the id of the last transaction that it sees."""
        try:
            with self._env.begin(self._objects) as txn:
                value, visible = txn.get(object_id), txn.id()
        except lmdb.Error as error:
            raise translated(error, self._path) from error
        return None if value is None else Entry.unpack(object_id, value), visible

    def create(self, object_id: bytes, size: int, block_bytes: int, name: ObjectName) -> Entry:
        """Return the record of an object version, making an empty one with a new generation when there is none."""
        entry = self.get(object_id)  # without the writers' lock, which every process of the node shares
        if entry is not None:
            return entry
        with self._writing() as txn:
            entry = self._get(txn, object_id)
            if entry is None:
                generation = self._add(txn, b"generation", 1)
                entry = Entry(object_id, generation, size, block_bytes, 0, packed_name=name.pack())
                self._put(txn, entry)
            return entry

    def add_small(
        self, object_id: bytes, size: int, name: ObjectName, *, segment: int, offset: int, checksum: int
    ) -> Entry | None:
        """Record that an object lies whole in a segment, whose bytes were written before.

        When the object is recorded already, in whatever place, that record stays and is returned: the bytes in the segment
        are then waste. None when the segment was removed meanwhile.
        """
        with self._writing() as txn:
            record = self._segment(txn, segment)
            if record is None:
                return None
            grown = max(0, offset + size - record.written_bytes)
            self._add(txn, b"used", grown)
            entry = self._get(txn, object_id)
            added = entry is None
            if entry is None:
                generation = self._add(txn, b"generation", 1)
                entry = Entry(
                    object_id, generation, size, max(1, size), 1, segment, offset, checksum, packed_name=name.pack()
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

    def seal(self, entry: Entry, *, inode: int, ctime_ns: int) -> bool:
        """Record that all blocks were verified from the file with this inode and change time.

        False when the object was removed or has lost blocks meanwhile.
        """
        with self._writing() as txn:
            now = self._current(txn, entry)
            if now is None or not now.complete:
                return False
            self._put(txn, now._replace(seal_inode=inode, seal_ctime_ns=ctime_ns))
            return True

    def unseal(self, entry: Entry) -> None:
        """Record that the file must be verified again before it is believed."""
        with self._writing() as txn:
            now = self._current(txn, entry)
            if now is not None and now.sealed:
                self._put(txn, now._replace(seal_inode=0, seal_ctime_ns=0))
                self.signals.removed(txn.id())

    def remove(self, object_id: bytes) -> Entry | None:
        """Forget an object version and all its blocks in one step; returns its last record, or None.

        The bytes of an object in a segment count as used until the segment goes.
        """
        with self._writing() as txn:
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

    def entries(self) -> Iterator[Entry]:
        """Every object record, in pages: no transaction stays open, and makes the file grow, while the caller thinks."""
        after = b""
        while found := self.page(after, _PAGE):
            yield from found
            after = found[-1].object_id

    def page(self, after: bytes, limit: int) -> list[Entry]:
        """Up to `limit` object records in the order of their ids, from the one after `after` (`b""`: the first) on."""
        with self._reading(self._objects) as txn:
            cursor = txn.cursor()
            found = cursor.set_range(after + b"\0")
            rows = itertools.islice(cursor, limit) if found else ()
            return [Entry.unpack(key, value) for key, value in rows]

    def used_bytes(self) -> int:
        """Bytes of all blocks that are here, and of all segments."""
        return self._number(b"used")

    def reserved_bytes(self, *, but: bytes, now: float) -> int:
        """What processes other than `but` are about to write. `now` is in seconds of the machine's clock since its start."""
        with self._reading(self._room) as txn:
            return sum(nbytes for owner, nbytes, until in _reservations(txn.cursor()) if owner != but and until > now)

    def reserve(self, owner: bytes, nbytes: int, *, now: float, until: float, fits: Callable[[int, int], bool]) -> bool:
        """Say that the process `owner` is about to write `nbytes` in all, if `fits(used, reserved by others)`.

        The reservation ends at `until` by itself, in case that the process dies.
        """
        with self._writing() as txn:
            rows = list(_reservations(txn.cursor(self._room)))
            others = sum(other for row, other, end in rows if row != owner and end > now)
            if not fits(self._read(txn, b"used"), others):
                return False
            for row, _, end in rows:
                if end <= now:
                    txn.delete(row, db=self._room)
            txn.put(owner, _RESERVATION.pack(nbytes, until), db=self._room)
            return True

    def release(self, owner: bytes, nbytes: int) -> None:
        """Say that the process `owner` is about to write only `nbytes` in all."""
        with self._writing() as txn:
            value = txn.get(owner, db=self._room)
            if value is not None and nbytes:
                txn.put(owner, _RESERVATION.pack(nbytes, _RESERVATION.unpack(value)[1]), db=self._room)
            elif value is not None:
                txn.delete(owner, db=self._room)

    # --- blocks -----------------------------------------------------------------------------------

    def checksums(self, entry: Entry, blocks: Iterable[int]) -> list[int | None]:
        """The checksum of each block, None where it is not here."""
        object_id, generation = entry.object_id, entry.generation
        try:
            with self._env.begin(self._blocks) as txn:
                values = [txn.get(block_key(object_id, generation, block)) for block in blocks]
        except lmdb.Error as error:
            raise translated(error, self._path) from error
        return [None if value is None else number(value) for value in values]

    def add_block(self, entry: Entry, block: int, nbytes: int, checksum: int) -> Entry | None:
        """Record that a block's bytes are in the file; returns the record as it is now.

        None when the object was removed meanwhile: drop the bytes.
        """
        key = block_key(entry.object_id, entry.generation, block)
        with self._writing() as txn:
            now = self._current(txn, entry)
            if now is not None and txn.put(key, pack_number(checksum), db=self._blocks, overwrite=False):
                now = now._replace(present=now.present + 1)
                self._put(txn, now)
                self._add(txn, b"used", nbytes)
            return now

    def drop_block(self, entry: Entry, block: int, nbytes: int) -> bool:
        """Forget a block whose bytes turned out wrong, and the seal of its file. False when it was not here."""
        with self._writing() as txn:
            if not txn.delete(block_key(entry.object_id, entry.generation, block), db=self._blocks):
                return False
            now = self._current(txn, entry)
            if now is not None:
                self._put(txn, now._replace(present=now.present - 1, seal_inode=0, seal_ctime_ns=0))
            self._add(txn, b"used", -nbytes)
            self.signals.removed(txn.id())
            return True

    # --- segments ---------------------------------------------------------------------------------

    def new_generation(self) -> int:
        """A number that no object or segment of this store has had."""
        with self._writing() as txn:
            return self._add(txn, b"generation", 1)

    def add_segment(self, generation: int, group: str) -> None:
        """Record a new, empty segment."""
        with self._writing() as txn:
            self._put_segment(txn, SegmentRecord(generation, 0, 0, group))

    def segment(self, generation: int) -> SegmentRecord | None:
        """The record of a segment, or None."""
        with self._reading(self._segments) as txn:
            return self._segment(txn, generation)

    def segment_records(self) -> list[SegmentRecord]:
        """Every segment, the oldest first."""
        with self._reading(self._segments) as txn:
            return [SegmentRecord.unpack(key, value) for key, value in txn.cursor()]

    def entries_in(self, generation: int, *, limit: int | None = None) -> list[Entry]:
        """The records of all objects in a segment, or of up to `limit` whose ids are the lowest."""
        found: list[Entry] = []
        with self._reading(self._members) as txn:
            cursor = txn.cursor()
            cursor.set_range(member_key(generation))
            while (object_id := member_of(cursor.key(), generation)) is not None and len(found) != limit:
                entry = self._get(txn, object_id)
                if entry is not None and entry.place == generation:
                    found.append(entry)
                cursor.next()
        return found

    def remove_segment(self, generation: int) -> list[Entry] | None:
        """Forget a segment with all objects in it in one step; returns their last records. None when there is none."""
        with self._writing() as txn:
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

    # --- a new index from the files ---------------------------------------------------------------

    def restore(self, objects: Sequence[tuple[Entry, Sequence[tuple[int, int]]]], *, used_bytes: int) -> None:
        """Enter objects that were found in files, with their (block, checksum) pairs, all in one step.

        `used_bytes` is what their blocks take; segments are entered apart. Objects that are recorded already are replaced.
        """
        with self._writing() as txn:
            for entry, blocks in objects:
                self._put(txn, entry)
                if entry.place:
                    txn.put(member_key(entry.place, entry.object_id), b"", db=self._members)
                for block, value in blocks:
                    txn.put(block_key(entry.object_id, entry.generation, block), pack_number(value), db=self._blocks)
            self._add(txn, b"used", used_bytes)

    def restore_segments(self, records: Iterable[SegmentRecord]) -> None:
        """Enter segments that were found."""
        with self._writing() as txn:
            for record in records:
                self._put_segment(txn, record)
                self._add(txn, b"used", record.written_bytes)

    @property
    def last_generation(self) -> int:
        """The highest number that any object or segment has; whatever is entered from now on gets a higher one."""
        return self._number(b"generation")

    def raise_generation(self, least: int) -> None:
        """See to it that every new generation is above `least`."""
        with self._writing() as txn:
            now = self._read(txn, b"generation")
            self._add(txn, b"generation", max(0, least - now))

    @property
    def built(self) -> bool:
        """Whether all that lies in the files was entered."""
        return self._number(b"built") == 1

    def set_built(self) -> None:
        """Say that all that lies in the files was entered."""
        with self._writing() as txn:
            txn.put(b"built", pack_number(1), db=self._state)

    # --- metadata (its records: `page_map.py`) -----------------------------------------------------

    def last_meta_before(self, key: bytes, read: Callable[[bytes, memoryview], _T]) -> _T | None:
        """What `read` makes of the last metadata record before `key`; None where there is none.

        The view that `read` gets is valid only inside it.
        """
        try:
            with self._env.begin(self._meta, buffers=True) as txn:
                cursor = txn.cursor()
                if not (cursor.prev() if cursor.set_range(key) else cursor.last()):
                    return None
                return read(bytes(cursor.key()), cursor.value())
        except lmdb.Error as error:
            raise translated(error, self._path) from error

    @contextmanager
    def meta_reading(self) -> Iterator[MetaTransaction]:
        """A transaction that reads metadata; values are views that are valid only inside it."""
        with index_errors(self._path), self._env.begin(self._meta, buffers=True) as txn:
            yield txn

    @contextmanager
    def meta_writing(self, *, changed: bool = False) -> Iterator[MetaTransaction]:
        """A transaction that writes metadata, all in one step; views that it gave end with the next write.

        `changed` tells everyone who believes what he was told that the origin has changed.
        """
        with index_errors(self._path), self._turn, self._env.begin(self._meta, write=True, buffers=True) as txn:
            yield txn
            if changed:
                self.signals.changed(txn.id())

    def meta_bytes(self) -> int:
        """What the metadata takes of the index."""
        with self._reading(self._meta) as txn:
            tree = txn.stat(self._meta)
        return int(tree["psize"] * (tree["branch_pages"] + tree["leaf_pages"] + tree["overflow_pages"]))

    def drop_meta(self, txn: MetaTransaction) -> None:
        """Remove every metadata record, inside a transaction that writes."""
        txn.drop(self._meta, delete=False)

    # --- ends of objects (their records: `footers.py`) ----------------------------------------------

    def tail(self, object_id: bytes) -> bytes | None:
        """The record of an object's end, or None."""
        with self._reading(self._tails) as txn:
            return txn.get(object_id)

    def tail_after(self, name: bytes) -> tuple[bytes, bytes] | None:
        """The record of the first object whose id is `name` or follows it, from the beginning after the end; with its id."""
        with self._reading(self._tails) as txn:
            cursor = txn.cursor()
            return cursor.item() if cursor.set_range(name) or cursor.first() else None

    def put_tail(self, object_id: bytes, value: bytes) -> None:
        """Write the record of an object's end in place of any other."""
        with self._writing(self._tails) as txn:
            old = txn.get(object_id)
            txn.put(object_id, value)
            self._add(txn, b"tails", len(value) - len(old or b""))

    def drop_tail(self, object_id: bytes) -> None:
        """Remove the record of an object's end; a missing one is no error."""
        if self.tail(object_id) is None:
            return
        with self._writing(self._tails) as txn:
            self._add(txn, b"tails", -len(txn.pop(object_id) or b""))

    def tail_bytes(self) -> int:
        """Bytes of all records of ends."""
        return self._number(b"tails")

    # --- tables of other modules (`usage_records.py`) -----------------------------------------------

    def table(self, name: bytes) -> _Table:
        """A table of this name, made when there is none."""
        with index_errors(self._path), self._turn, self._env.begin(write=True) as txn:
            return self._env.open_db(name, txn=txn)

    @contextmanager
    def reading(self) -> Iterator[_Transaction]:
        """A transaction that reads, as of one moment."""
        with self._reading(None) as txn:
            yield txn

    @contextmanager
    def writing(self) -> Iterator[_Transaction]:
        """A transaction that writes, all in one step."""
        with self._writing() as txn:
            yield txn

    def has_segment(self, txn: _Transaction, generation: int) -> bool:
        """Whether there is a segment of this generation."""
        return txn.get(generation_key(generation), db=self._segments) is not None

    def object_count(self, txn: _Transaction) -> int:
        """How many object versions have a record."""
        return txn.stat(self._objects)["entries"]

    # --- inside transactions ----------------------------------------------------------------------

    @contextmanager
    def _reading(self, table: _Table | None) -> Iterator[_Transaction]:
        with index_errors(self._path), self._env.begin(table) as txn:
            yield txn

    @contextmanager
    def _writing(self, table: _Table | None = None) -> Iterator[_Transaction]:
        with index_errors(self._path), self._turn, self._env.begin(table, write=True) as txn:
            yield txn

    def _get(self, txn: _Transaction, object_id: bytes) -> Entry | None:
        value = txn.get(object_id, db=self._objects)
        return None if value is None else Entry.unpack(object_id, value)

    def _current(self, txn: _Transaction, entry: Entry) -> Entry | None:
        """The record as it is now; None when the object was removed, and perhaps made anew, meanwhile."""
        now = self._get(txn, entry.object_id)
        return now if now is not None and now.generation == entry.generation else None

    def _put(self, txn: _Transaction, entry: Entry) -> None:
        txn.put(entry.object_id, entry.pack(), db=self._objects)

    def _delete_blocks(self, txn: _Transaction, entry: Entry) -> int:
        """Delete the checksums of an object; gives the bytes that they stood for."""
        freed = 0
        prefix = block_key(entry.object_id, entry.generation, 0)[:BLOCK_PREFIX_BYTES]
        cursor = txn.cursor(self._blocks)
        cursor.set_range(prefix)
        while cursor.key()[:BLOCK_PREFIX_BYTES] == prefix:
            block = block_of(cursor.key())
            freed += min((block + 1) * entry.block_bytes, entry.size) - block * entry.block_bytes
            cursor.delete()
        return freed

    def _segment(self, txn: _Transaction, generation: int) -> SegmentRecord | None:
        key = generation_key(generation)
        value = txn.get(key, db=self._segments)
        return None if value is None else SegmentRecord.unpack(key, value)

    def _put_segment(self, txn: _Transaction, record: SegmentRecord) -> None:
        txn.put(generation_key(record.generation), record.pack(), db=self._segments)

    def _number(self, name: bytes) -> int:
        with self._reading(self._state) as txn:
            return self._read(txn, name)

    def _read(self, txn: _Transaction, name: bytes) -> int:
        return number(txn.get(name, db=self._state))

    def _add(self, txn: _Transaction, name: bytes, amount: int) -> int:
        total = max(0, self._read(txn, name) + amount)
        txn.put(name, pack_number(total), db=self._state)
        return total


def _reservations(cursor: lmdb.Cursor[bytes]) -> Iterator[tuple[bytes, int, float]]:
    """Every reservation: who made it, bytes, and when it ends."""
    for owner, value in cursor:
        nbytes, until = _RESERVATION.unpack(value)
        yield owner, nbytes, until
