"""Tables of the index whose records carry a checksum, and transactions that verify every record they return.

A record is stored with the xxh3 of its value, seeded with the xxh3 of its key and the name of its table. So a value that was
damaged, or moved to another key or table, does not verify. Such a record is absent for the caller, and `on_damaged` is
called with its table and key. No other code reads or writes values of the index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import xxhash
from typing_extensions import Buffer

if TYPE_CHECKING:
    from lmdb import _Database

_Bytes = TypeVar("_Bytes", bytes, memoryview)

_digest, _seed = xxhash.xxh3_64_digest, xxhash.xxh3_64_intdigest

CHECKSUM_BYTES = 8
"""The length of the checksum of a record."""

_MOST_BYTES = 64 << 20  # every record is shorter: a greater length is damaged, and its bytes may not be in the file


class Table(NamedTuple):
    """A table of the index, and the seed of the checksums of its records."""

    handle: _Database
    name: bytes
    seed: int

    @classmethod
    def named(cls, name: bytes, handle: _Database) -> Table:
        """Returns the table of this name."""
        return cls(handle, name, _seed(name))

    def seal(self, key: bytes, value: Buffer) -> bytes:
        """The record to store for `value` under `key`."""
        return b"".join((value, _digest(value, _seed(key, self.seed))))

    def unseal(self, key: Buffer, record: _Bytes) -> _Bytes | None:
        """The value of a record; None when it does not verify."""
        value = record[:-CHECKSUM_BYTES]
        if len(record) <= _MOST_BYTES and _digest(value, _seed(key, self.seed)) == record[-CHECKSUM_BYTES:]:
            return value
        return None


OnDamaged = Callable[[Table, bytes], None]


class Reading:
    """An LMDB transaction (with `buffers=True`) that reads. Values are copied unless `views` is set."""

    __slots__ = ("_convert", "_note", "_on_damaged", "_table", "_txn", "id")

    def __init__(self, txn: Any, table: Table | None, on_damaged: OnDamaged, *, views: bool = False) -> None:
        self._txn = txn
        self._table = table
        self._convert: Any = memoryview if views else bytes
        self._note = self._on_damaged = on_damaged
        self.id: Callable[[], int] = txn.id

    def get(self, key: bytes, *, db: Table | None = None) -> Any:
        """The value under `key`; None when there is none that verifies."""
        table = db or self._table
        assert table is not None
        record = self._txn.get(key, db=table.handle)
        if record is None:
            return None
        value = table.unseal(key, record)
        if value is not None:
            return self._convert(value)
        self._on_damaged(table, key)
        return None

    def cursor(self, db: Table | None = None) -> Cursor:
        """A cursor over the records of a table that verify."""
        table = db or self._table
        assert table is not None
        return Cursor(self._txn.cursor(table.handle), table, self._note, self._convert)

    def entries(self, db: Table) -> int:
        """The number of records of a table."""
        return int(self._txn.stat(db.handle)["entries"])

    def nbytes(self, db: Table) -> int:
        """The bytes of all pages of a table."""
        tree = self._txn.stat(db.handle)
        return int(tree["psize"] * (tree["branch_pages"] + tree["leaf_pages"] + tree["overflow_pages"]))


class Writing(Reading):
    """A transaction that also writes. `on_damaged` removes a record that `get` finds; those of cursors are only noted."""

    __slots__ = ()

    def __init__(
        self, txn: Any, table: Table | None, *, note: OnDamaged, on_damaged: OnDamaged, views: bool = False
    ) -> None:
        super().__init__(txn, table, on_damaged, views=views)
        self._note = note  # a record must not be removed under a cursor

    def put(self, key: bytes, value: Buffer, *, db: Table | None = None) -> None:
        """Store a value, or replace it."""
        table = db or self._table
        assert table is not None
        self._txn.put(key, table.seal(key, value), db=table.handle)

    def delete(self, key: bytes, *, db: Table | None = None) -> bool:
        """Remove a record; False when there was none."""
        table = db or self._table
        assert table is not None
        return bool(self._txn.delete(key, db=table.handle))

    def pop(self, key: bytes, *, db: Table | None = None) -> Any:
        """Remove a record and return its value; None when there was none that verifies."""
        value = self.get(key, db=db)
        if value is not None:
            self.delete(key, db=db)
        return value

    def clear(self, db: Table) -> None:
        """Remove every record of a table."""
        self._txn.drop(db.handle, delete=False)


class Cursor:
    """A position among the records of a table that verify. Others are noted and skipped."""

    __slots__ = ("_convert", "_cursor", "_key", "_note", "_table", "_value")

    def __init__(self, cursor: Any, table: Table, note: OnDamaged, convert: Callable[[memoryview], Any]) -> None:
        self._cursor, self._table, self._note, self._convert = cursor, table, note, convert
        self._key: Any = b""
        self._value: Any = b""

    def _at(self, found: bool, step: Callable[[], bool]) -> bool:
        while found:
            key, record = self._cursor.item()
            value = self._table.unseal(key, record)
            if value is not None:
                self._key, self._value = self._convert(key), self._convert(value)
                return True
            self._note(self._table, bytes(key))
            found = step()
        self._key = self._value = b""
        return False

    def set_range(self, key: bytes) -> bool:
        """Go to the first record whose key is `key` or follows it."""
        return self._at(self._cursor.set_range(key), self._cursor.next)

    def before(self, key: bytes) -> bool:
        """Go to the last record before `key`."""
        return self._at(self._cursor.prev() if self._cursor.set_range(key) else self._cursor.last(), self._cursor.prev)

    def first(self) -> bool:
        """Go to the first record."""
        return self._at(self._cursor.first(), self._cursor.next)

    def last(self) -> bool:
        """Go to the last record."""
        return self._at(self._cursor.last(), self._cursor.prev)

    def next(self) -> bool:
        """Go to the next record."""
        return self._at(self._cursor.next(), self._cursor.next)

    def prev(self) -> bool:
        """Go to the record before."""
        return self._at(self._cursor.prev(), self._cursor.prev)

    def key(self) -> Any:
        """The key of the present record; empty after the last one."""
        return self._key

    def value(self) -> Any:
        """The value of the present record."""
        return self._value

    def item(self) -> tuple[Any, Any]:
        """Key and value of the present record."""
        return self._key, self._value

    def delete(self) -> bool:
        """Remove the present record and go to the next one."""
        self._cursor.delete()
        return self._at(bool(self._cursor.key()), self._cursor.next)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        """The present record, or the first one, and all that follow."""
        more = bool(self._key) or self.first()
        while more:
            yield self._key, self._value
            more = self.next()
