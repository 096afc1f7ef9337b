"""The usage records in the index of a store: one for each unit, cached or a ghost, and one for each group.

A *unit* is an object with its own file or a segment. A *ghost* is the record of an evicted unit, or
of a small object that was not kept. `policy.py` defines the records. They may be lost: a unit without one gets a new
one. They may be wrong about cached units, since a removal does not change them; so each drawn unit is checked.

The keys of units that were kept as *copies* (another node owns them) are in their own table, so that copies can be
drawn first; see `copies.py`.
"""

from __future__ import annotations

import random
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import xxhash

from millrace.cache.eviction.policy import GHOSTS_PER_RESIDENT, SAMPLE_SIZE, EvictionPolicy, Group, Unit
from millrace.cache.eviction.usage import CHECKPOINT_FILES, Tally, group_of, holds_copies
from millrace.store.index import Index
from millrace.store.records import ObjectName, number, pack_number
from millrace.store.transactions import Cursor, Reading, Table, Writing

_UNIT = struct.Struct("<QQQQQIf")  # bytes, last, gap, group, segment, time of the last use, uses
_GROUP = struct.Struct("<QQQQddd")  # last, bytes, units, longest gap, gap, hits, recent
_CLOCK = b"clock"
_LEAST_GHOSTS = 1024  # kept however few units are cached
_FORGOTTEN_AT_ONCE = 64


class UnitRecord(NamedTuple):
    """A unit with two fields that no policy uses: its segment (0: an object), and its last use, in Unix seconds."""

    unit: Unit
    segment: int
    used_at: int

    def pack(self) -> bytes:
        """The record without its key."""
        unit = self.unit
        return _UNIT.pack(unit.nbytes, unit.last, unit.gap, unit.group, self.segment, self.used_at, unit.uses)

    @classmethod
    def unpack(cls, key: bytes, value: bytes) -> UnitRecord:
        """The reverse of `pack`."""
        nbytes, last, gap, group, segment, used_at, uses = _UNIT.unpack(value)
        return cls(Unit(key=key, nbytes=nbytes, group=group, last=last, uses=uses, gap=gap), segment, used_at)


class Draw(NamedTuple):
    """Some units at one moment, their groups, and the clock."""

    records: Sequence[UnitRecord]
    groups: Mapping[int, Group]
    clock: int


class UsageRecords:
    """The records of the store with this index. Thread- and process-safe; raises `StorageError` when the disk fails."""

    def __init__(self, index: Index, policy: EvictionPolicy, *, seed: int | None = None) -> None:
        self._index = index
        self._policy = policy
        self._residents = index.table(b"units")
        self._ghosts = index.table(b"ghosts")
        self._groups = index.table(b"unit_groups")
        self._numbers = index.table(b"unit_numbers")
        self._copies = index.table(b"copies")
        self._random = random.Random(seed)

    def note(self, tallies: Sequence[Tally], *, capacity_bytes: int, now: float) -> list[bytes]:
        """Enter uses, in their order, in one transaction. Returns the keys of the ghosts that were deleted for space."""
        if not tallies:
            return []
        groups = self._groups_of(tallies)

        def write(txn: Writing) -> list[bytes]:
            book = _Book(self, txn, capacity_bytes, int(now))
            for tally in tallies:
                group = groups.get(tally.key)
                book.enter(tally, None if group is None else group_number(group))
                copy = tally.copy if group is None or not tally.segment else holds_copies(group)
                if copy is not None and tally.kept:
                    book.mark(tally.key, copy=copy)
            dropped = self._drop_some(txn, book)
            book.close()
            return dropped

        return self._index.write(write, last_pages=True)

    def enter_unknown(self, units: Iterable[tuple[bytes, int, int, str]], *, now: float) -> None:
        """Create the missing records of units: (key, segment, bytes, group) of each. A ghost returns with its uses."""

        def write(txn: Writing) -> None:
            book = _Book(self, txn, 0, int(now))
            for key, segment, nbytes, group in units:
                if txn.get(key, db=self._residents) is None:
                    # Stored again, and its process has not noted that yet. Its group still counts a ghost.
                    ghost = txn.pop(key, db=self._ghosts)
                    if ghost is None:
                        book.add(key, segment, nbytes, group_number(group))
                    else:
                        txn.put(key, ghost, db=self._residents)
                    if holds_copies(group):
                        book.mark(key, copy=True)
            book.close()

        self._index.write(write)

    def draw(self, count: int) -> Draw:
        """About `count` random cached units; all of them if there are fewer."""
        with self._index.reading() as txn:
            rows = _some_after(txn.cursor(self._residents), self._random.randbytes(16), count)
            return self._drawn(txn, rows)

    def draw_copies(self, count: int) -> Draw:
        """About `count` random units that are marked as copies. Removed units lose their mark."""
        with self._index.reading() as txn:
            keys = [key for key, _ in _some_after(txn.cursor(self._copies), self._random.randbytes(16), count)]
            rows = [(key, value) for key in keys if (value := txn.get(key, db=self._residents)) is not None]
            drawn = self._drawn(txn, rows)
        if len(rows) < len(keys):
            self.mark_copies(set(keys) - {key for key, _ in rows}, copy=False)
        return drawn

    def mark_copies(self, keys: Iterable[bytes], *, copy: bool) -> None:
        """Mark cached units as copies, or remove their marks."""

        def write(txn: Writing) -> None:
            for key in keys:
                if not copy:
                    txn.delete(key, db=self._copies)
                elif txn.get(key, db=self._residents) is not None:
                    txn.put(key, b"", db=self._copies)

        self._index.write(write)

    def copy_count(self) -> int:
        """The number of units that are marked as copies."""
        with self._index.reading() as txn:
            return txn.entries(self._copies)

    def find(self, keys: Iterable[bytes]) -> Draw:
        """The members of the units that are cached and have a record."""
        with self._index.reading() as txn:
            rows = [(key, value) for key in keys if (value := txn.get(key, db=self._residents)) is not None]
            return self._drawn(txn, rows)

    def page(self, after: bytes, limit: int) -> list[UnitRecord]:
        """Up to `limit` cached units in the order of their keys, after `after` (`b""`: from the first on)."""
        with self._index.reading() as txn:
            cursor = txn.cursor(self._residents)
            found: list[UnitRecord] = []
            more = cursor.set_range(after + b"\0")
            while more and len(found) < limit:
                found.append(UnitRecord.unpack(*cursor.item()))
                more = cursor.next()
            return self._with_marks(txn, found)

    def get(self, key: bytes) -> UnitRecord | None:
        """The record of a unit, cached or a ghost; None without one."""
        with self._index.reading() as txn:
            value = txn.get(key, db=self._residents) or txn.get(key, db=self._ghosts)
            return None if value is None else UnitRecord.unpack(key, value)

    def used_at(self, keys: Sequence[bytes]) -> list[int | None]:
        """The last use of each unit, in Unix seconds, to within a second; None if unknown."""
        with self._index.reading() as txn:
            values = [txn.get(key, db=self._residents) for key in keys]
        return [None if value is None else UnitRecord.unpack(b"", value).used_at for value in values]

    def gone(self, keys: Iterable[bytes]) -> None:
        """Turn removed units into ghosts. Records of segments are deleted, because a segment never returns."""

        def write(txn: Writing) -> None:
            book = _Book(self, txn, 0, 0)
            for key in keys:
                value = txn.pop(key, db=self._residents)
                txn.delete(key, db=self._copies)
                if value is None:
                    continue
                record = UnitRecord.unpack(key, value)
                if record.segment:
                    book.shrink_group(record.unit)
                else:
                    txn.put(key, value, db=self._ghosts)
            book.close()

        self._index.write(write, last_pages=True)

    def group(self, number: int) -> Group:
        """The record of a group."""
        with self._index.reading() as txn:
            return _read_group(txn, self._groups, number, _clock(txn, self._numbers))

    @property
    def clock(self) -> int:
        """The bytes of traffic so far."""
        with self._index.reading() as txn:
            return _clock(txn, self._numbers)

    def counts(self) -> tuple[int, int]:
        """The number of cached units, and the number of ghosts."""
        with self._index.reading() as txn:
            return txn.entries(self._residents), txn.entries(self._ghosts)

    def is_marked(self, mark: bytes) -> bool:
        """Whether a mark is set in this index."""
        with self._index.reading() as txn:
            return txn.get(mark, db=self._numbers) is not None

    def set_mark(self, mark: bytes) -> None:
        """Set a mark for the lifetime of this index."""

        def write(txn: Writing) -> None:
            txn.put(mark, pack_number(1), db=self._numbers)

        self._index.write(write)

    def claim(self, what: bytes, pause_seconds: float) -> bool:
        """Whether no process of the node did `what` within the last `pause_seconds`; then the caller does it now."""
        now = time.clock_gettime_ns(time.CLOCK_BOOTTIME)  # an index does not outlive a boot
        due = int(now - pause_seconds * 1e9)
        with self._index.reading() as txn:
            if number(txn.get(what, db=self._numbers)) > due:
                return False

        def write(txn: Writing) -> bool:
            if number(txn.get(what, db=self._numbers)) > due:
                return False
            txn.put(what, pack_number(now), db=self._numbers)
            return True

        return self._index.write(write, last_pages=True)

    # --- inside -----------------------------------------------------------------------------------

    def _groups_of(self, tallies: Sequence[Tally]) -> dict[bytes, str]:
        """The groups of units without a record. This may need lookups, so it runs before the transaction."""
        with self._index.reading() as txn:
            unknown = [
                tally
                for tally in tallies
                if txn.get(tally.key, db=self._residents) is None and txn.get(tally.key, db=self._ghosts) is None
            ]
        return {tally.key: self._find_group(tally) for tally in unknown}

    def _find_group(self, tally: Tally) -> str:
        if tally.segment:
            segment = self._index.segment(tally.segment)
            if segment is not None:
                return segment.group
        if tally.group is not None:
            return tally.group()
        name = ObjectName.unpack(tally.packed_name)
        return group_of(name.origin, name.key)

    def _drawn(self, txn: Reading, rows: Iterable[tuple[bytes, bytes]]) -> Draw:
        records = self._with_marks(txn, [UnitRecord.unpack(key, value) for key, value in rows])
        clock = _clock(txn, self._numbers)
        groups = {record.unit.group: _read_group(txn, self._groups, record.unit.group, clock) for record in records}
        return Draw(records, groups, clock)

    def _with_marks(self, txn: Reading, records: list[UnitRecord]) -> list[UnitRecord]:
        if not txn.entries(self._copies):  # always true on a node without a cluster
            return records
        return [
            record
            if txn.get(record.unit.key, db=self._copies) is None
            else record._replace(unit=record.unit._replace(copy=True))
            for record in records
        ]

    def _drop_some(self, txn: Writing, book: _Book) -> list[bytes]:
        dropped = []
        units = txn.entries(self._residents)
        excess = txn.entries(self._ghosts) - max(
            _LEAST_GHOSTS, GHOSTS_PER_RESIDENT * max(units, self._index.object_count(txn))
        )
        for _ in range(min(excess, _FORGOTTEN_AT_ONCE)):
            rows = _some_after(txn.cursor(self._ghosts), self._random.randbytes(16), SAMPLE_SIZE)
            sample = [UnitRecord.unpack(key, value).unit for key, value in rows]
            unit = self._policy.least_promising(sample, clock=book.clock, capacity_bytes=book.capacity_bytes)
            txn.delete(unit.key, db=self._ghosts)
            book.shrink_group(unit)
            dropped.append(unit.key)
        return dropped


class _Book:
    """The records during one write transaction; groups and the clock are written at its `close`."""

    def __init__(self, records: UsageRecords, txn: Writing, capacity_bytes: int, now: int) -> None:
        self._txn = txn
        self._policy = records._policy
        self._residents, self._ghosts = records._residents, records._ghosts
        self._group_table, self._numbers, self._copies = records._groups, records._numbers, records._copies
        self._now = now
        self._changed: dict[int, Group] = {}
        self.capacity_bytes = max(1, capacity_bytes)
        self.clock = _clock(txn, self._numbers)

    def enter(self, tally: Tally, group: int | None) -> None:
        if not ObjectName.unpack(tally.packed_name).key.endswith(CHECKPOINT_FILES):
            # A restore reads much at once, which does not show that the data sets are idle.
            self.clock += tally.hit_bytes + tally.miss_bytes
        for object_id in tally.joined:
            value = self._txn.pop(object_id, db=self._ghosts)
            if value is not None:
                self.shrink_group(UnitRecord.unpack(object_id, value).unit)
        value = self._txn.get(tally.key, db=self._residents)
        here = value is not None or tally.kept
        if value is None:
            value = self._txn.pop(tally.key, db=self._ghosts) if here else self._txn.get(tally.key, db=self._ghosts)
        if value is None:
            if group is None:  # it had a record a moment ago
                return
            self._touch_group(group, tally, None)
            self.add(tally.key, tally.segment, tally.nbytes, group, here=here)
            return
        before = UnitRecord.unpack(tally.key, value).unit
        self._touch_group(before.group, tally, before)
        unit = self._policy.touched(before, clock=self.clock, capacity_bytes=self.capacity_bytes)
        if tally.nbytes > unit.nbytes:  # a segment grows
            self._resize_group(unit.group, tally.nbytes - unit.nbytes, 0)
            unit = unit._replace(nbytes=tally.nbytes)
        self._put(UnitRecord(unit, tally.segment, self._now), here=here)

    def add(self, key: bytes, segment: int, nbytes: int, group: int, *, here: bool = True) -> None:
        self._resize_group(group, nbytes, 1)
        unit = Unit(key=key, nbytes=nbytes, group=group, last=self.clock)
        self._put(UnitRecord(unit, segment, self._now), here=here)

    def mark(self, key: bytes, *, copy: bool) -> None:
        if copy:
            self._txn.put(key, b"", db=self._copies)
        else:
            self._txn.delete(key, db=self._copies)

    def shrink_group(self, unit: Unit) -> None:
        self._resize_group(unit.group, -unit.nbytes, -1)

    def close(self) -> None:
        self._txn.put(_CLOCK, pack_number(self.clock), db=self._numbers)
        for key, group in self._changed.items():
            if group.units <= 0:
                self._txn.delete(pack_number(key), db=self._group_table)
                continue
            value = _GROUP.pack(
                group.last, group.bytes, group.units, group.longest_gap, group.gap, group.hits, group.recent
            )
            self._txn.put(pack_number(key), value, db=self._group_table)

    def _put(self, record: UnitRecord, *, here: bool) -> None:
        self._txn.put(record.unit.key, record.pack(), db=self._residents if here else self._ghosts)

    def _group(self, key: int) -> Group:
        group = self._changed.get(key)
        return _read_group(self._txn, self._group_table, key, self.clock) if group is None else group

    def _touch_group(self, key: int, tally: Tally, before: Unit | None) -> None:
        self._changed[key] = self._policy.group_touched(
            self._group(key),
            clock=self.clock,
            nbytes=tally.nbytes,
            capacity_bytes=self.capacity_bytes,
            before=before,
            hit=tally.hit_bytes > tally.miss_bytes,
        )

    def _resize_group(self, key: int, nbytes: int, units: int) -> None:
        group = self._group(key)
        self._changed[key] = group._replace(bytes=max(0, group.bytes + nbytes), units=max(0, group.units + units))


def _clock(txn: Reading, table: Table) -> int:
    return number(txn.get(_CLOCK, db=table))


def group_number(group: str) -> int:
    """The number of a group in the records."""
    return xxhash.xxh3_64_intdigest(group.encode("utf-8", "surrogatepass"))


def _read_group(txn: Reading, table: Table, key: int, clock: int) -> Group:
    value = txn.get(pack_number(key), db=table)
    if value is None:
        return Group(last=clock)
    last, nbytes, units, longest_gap, gap, hits, recent = _GROUP.unpack(value)
    return Group(last=last, bytes=nbytes, units=units, longest_gap=longest_gap, gap=gap, hits=hits, recent=recent)


def _some_after(cursor: Cursor, key: bytes, count: int) -> Iterator[tuple[bytes, bytes]]:
    """Up to `count` rows from `key` on, continued at the first row. Keys are digests, so neighbours are unrelated."""
    more = cursor.set_range(key)
    seen = 0
    while more and seen < count:
        yield cursor.item()
        seen += 1
        more = cursor.next()
    if seen < count:
        more = cursor.first()
        while more and seen < count and cursor.key() < key:
            yield cursor.item()
            seen += 1
            more = cursor.next()
