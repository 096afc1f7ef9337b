"""Transactions on the index: a guard around LMDB, tables whose records carry checksums, and the removal of damaged records.

*The guard.* LMDB does not verify its file. It reads through a map, so a file that was cut kills the process (SIGBUS), and
some damaged pages end it by an assertion (SIGABRT) or a bad address. A check of the length before each transaction prevents
the first. The others cannot be caught in the process. So each process marks a word of the signals page while it has
transactions open, under a lock that ends with the process. A word that is marked and not locked belongs to a process that
died in a transaction: the next process that opens the store checks the index (`setup.py`) and rebuilds it where that fails.

*Tables.* A record is stored with the xxh3 of its value, seeded with the xxh3 of its key and the name of its table. So a
value that was damaged, or moved to another key or table, does not verify. Such a record is absent for every reader. No
other code reads or writes values of the index.

*A full disk.* LMDB needs free pages to delete a record: it writes changed pages anew, and the old ones are free two
transactions later. After a transaction that takes the last free pages, none can commit. So the index keeps pages for
removals, which are transactions with `last_pages`. The data file is allocated that far beyond LMDB's last page.
If the disk has no space for that, a transaction that would leave fewer pages raises `DiskFullError` before it is committed.

*Damaged records.* The next transaction that writes removes them, with the records that depend on them, and `drop_damaged`
corrects the totals. A damaged number, which nothing can replace, or damage to the structure of LMDB's file ends the use of
the index by this process, and the next one rebuilds it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import lmdb
import xxhash
from typing_extensions import Buffer

from millrace.errors import DiskFullError, StorageError
from millrace.events import Event, emit
from millrace.runtime import forks
from millrace.runtime.failures import FULL_ERRNOS, disk_errors
from millrace.runtime.locks import FileLock, try_lock_byte
from millrace.runtime.private_files import new_file
from millrace.store.environment import (
    DAMAGED_NAME,
    DATA_NAME,
    INDEX_ERRORS,
    DamagedIndexError,
    open_environment,
    translated,
)
from millrace.store.records import (
    BLOCK_KEY_BYTES,
    BLOCK_PREFIX_BYTES,
    Entry,
    SegmentRecord,
    block_key,
    block_of,
    cached_in,
    number,
    pack_number,
    unpack_block,
)
from millrace.store.signals import FIRST, RETIRED, RETIRED_MARK, UNUSED, WORDS, Signals

if TYPE_CHECKING:
    from lmdb import _Database


class IndexGuard:
    """A context manager around transactions on the index whose data file is `data`. Thread-safe, and may be nested.

    Entering raises `DamagedIndexError` once the index is damaged. Not usable after a fork.
    """

    def __init__(self, data: str, signals: Signals) -> None:
        self._data = data
        self._numbers = signals.numbers
        self._nbytes = 0
        self._inside = 0  # not in the page, which may be damaged
        self._error: DamagedIndexError | None = None
        self._file = self._lock = -1
        _guards.add(self)
        with disk_errors(signals.path):
            # A separate descriptor: LMDB moves the position of its own.
            self._lock = os.open(signals.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                self._slot = self._claim()
            except BaseException:
                self.close()
                raise

    def _claim(self) -> int:
        """The word of this process. The unused word if all are taken: the death of this process is then not noticed."""
        for attempt in range(WORDS):
            slot = FIRST + (os.getpid() + attempt) % WORDS
            if not self._numbers[slot] and try_lock_byte(self._lock, slot):
                return slot
        return UNUSED

    def watch(self) -> None:
        """Begin to check that the data file, which LMDB has opened, does not become shorter."""
        with disk_errors(self._data):
            self._file = os.open(self._data, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)

    def __enter__(self) -> None:
        if self._error is not None:
            raise self._error
        if self._file >= 0:
            known = self._nbytes  # before the check: another thread may find a longer file meanwhile
            nbytes = os.lseek(self._file, 0, os.SEEK_END)
            if nbytes < known:
                raise self.damaged("it was cut")
            if nbytes > known:
                self._nbytes = nbytes
        if self._numbers[RETIRED] == RETIRED_MARK:
            raise self.damaged("another process discarded it")
        self._inside += 1
        self._numbers[self._slot] = 1

    def __exit__(self, *_: object) -> None:
        self._inside -= 1  # no other thread runs between this line's instructions, nor between those of the next one
        self._numbers[self._slot] = self._inside > 0

    @property
    def nbytes(self) -> int:
        """The length of the data file when a transaction was last entered."""
        return self._nbytes

    def allocate(self, nbytes: int) -> bool:
        """Allocate the data file up to `nbytes`, with the lock of writers. False when the disk has no space for that.

        True on a file system that cannot allocate.
        """
        missing = nbytes - self._nbytes
        if missing <= 0:
            return True
        try:
            disk = os.fstatvfs(self._file)
            if disk.f_bavail * disk.f_frsize < missing:  # an attempt may wait for the disk
                return False
            os.posix_fallocate(self._file, self._nbytes, missing)
        except OSError as error:
            return error.errno not in FULL_ERRNOS
        return True

    def damaged(self, why: str) -> DamagedIndexError:
        """The error of this and every later transaction. The next process that opens the store rebuilds the index."""
        if self._error is None:
            self._error = DamagedIndexError(
                f"cache index {self._data}: {why}",
                next_step="restart the processes that use the cache: the index is then rebuilt",
            )
            self._mark()
        return self._error

    def _mark(self) -> None:
        try:
            found = os.stat(self._data)
            if self._file < 0 or os.path.samestat(found, os.fstat(self._file)):  # else it has been replaced already
                os.close(new_file(Path(self._data).parent / DAMAGED_NAME))
        except OSError:
            return  # a full disk, or the index is gone: the next process that opens it finds the damage itself

    def close(self) -> None:
        """Release everything; also called in a forked child, where it closes the parent's files."""
        for descriptor in (self._file, self._lock):
            if descriptor >= 0:
                os.close(descriptor)
        self._file = self._lock = -1


# Also that of an index that another thread of the parent was opening: while the child lives, its death would not be noticed.
_guards = forks.objects_reset_in_child(IndexGuard.close)


_T = TypeVar("_T")
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


SIGNALS_NAME = "signals"
WRITE_LOCK_NAME = "write.lock"
_TABLES = (b"objects", b"blocks", b"segments", b"members", b"meta", b"state", b"tails", b"room")
_NUMBERS = b"N"  # the first byte of the keys of the metadata's own numbers
_MOST_FREE_PAGES = 8192  # 32 MiB
_LAST_PAGES = 256  # 1 MiB: more than a page of a listing, which one transaction replaces


class IndexTransactions:
    """An open index: its tables by name, and transactions on them. `Index` adds typed access.

    `on_dropped` is called for every record that did not verify and was removed.
    """

    def __init__(self, directory: Path, *, on_dropped: Callable[[], None] = lambda: None) -> None:
        # A wait for LMDB's own lock of writers has no end. So a process takes this one first, and continues without the
        # index when its holder is stopped.
        self._write_lock = FileLock(directory / WRITE_LOCK_NAME, f"the process that writes to the cache in {directory}")
        self._writer = 0  # the thread that has the lock
        self._env: Any = None
        self._path = str(directory / DATA_NAME)
        try:
            self.signals = Signals(directory / SIGNALS_NAME)
            self._guard = IndexGuard(f"{directory}/{DATA_NAME}", self.signals)
            with self._guard:  # a process that LMDB ends while it opens the index leaves its mark, too
                self._env, self._path = open_environment(directory, tables=32)
            self._guard.watch()
            self._page_bytes = int(self._env.stat()["psize"])
            self._tables: dict[bytes, Table] = {}
            self._noted: set[tuple[Table, bytes]] = set()
            self._uncounted = False
            self._on_dropped = on_dropped
            (
                self._objects,
                self._blocks,
                self._segments,
                self._members,
                self._meta,
                self._state,
                self._tails,
                self._room,
            ) = self._open_tables()
        except BaseException:
            self.close()
            raise

    def _open_tables(self) -> list[Table]:
        def define(txn: Any) -> list[Table]:
            self.signals.lower_to(txn.id() - 1)
            return [Table.named(name, self._env.open_db(name, txn=txn)) for name in _TABLES]

        tables = self._define(define)
        self._tables = {table.name: table for table in tables}
        self._as_writer(self._allocate_last_pages)  # before the disk is full
        return tables

    def _define(self, action: Callable[[Any], _T]) -> _T:
        """The result of `action`, called with a transaction that may create tables: with LMDB it is one that writes."""

        def work() -> _T:
            with self._env.begin(write=True) as txn:
                return action(txn)

        return self._as_writer(work)

    def close(self) -> None:
        """Close the environment. This process must not use the index afterwards."""
        if self._env is not None:
            self._env.close()
        if hasattr(self, "_guard"):
            self._guard.close()
        self._write_lock.close()

    def clear_dead_readers(self) -> None:
        """Free the reader slots of killed processes. A slot in use makes the file grow."""
        with self._errors(lmdb.Error), self._guard:
            self._env.reader_check()

    def table(self, name: bytes) -> Table:
        """The table of this name, created if it is missing."""
        table = self._define(lambda txn: Table.named(name, self._env.open_db(name, txn=txn)))
        self._tables = {**self._tables, name: table}
        return table

    def reading(self, table: Table | None = None, *, views: bool = False) -> AbstractContextManager[Reading]:
        """A transaction that reads, as of one moment; of `table` where its methods name none."""
        return _OpenReading(self, table, views=views)

    def write(
        self,
        action: Callable[[Writing], _T],
        table: Table | None = None,
        *,
        views: bool = False,
        last_pages: bool = False,
    ) -> _T:
        """The result of `action`, called with a transaction that writes, all in one step; to `table` where none is named.

        `last_pages`: may use the pages that are kept for removals on a full disk, as eviction and its records do.

        After an exception of `action` nothing was written. Raises `StorageError`, also at once when this thread is inside
        of such a call already: in a signal handler that interrupts it.

        A function and not a context manager, which could be left with its locks held, and then this process and all others
        would wait for them: Python runs signal handlers at the first instruction of a function, so also of an `__exit__`
        written in Python, and in `contextlib` after a generator has yielded. An interrupt (Ctrl-C) raised there ends the
        `with` block, but not the transaction. The locks of threads and LMDB's transactions have methods in C.
        """

        def work() -> _T:
            has_pages = last_pages or self._allocate_last_pages()
            with self._env.begin(write=True, buffers=True) as raw:
                if self._noted:
                    self._drop_noted(raw)
                result = action(self._wrapped(raw, table, views=views))
                if not has_pages:
                    self._require_last_pages(raw)
                return result

        return self._as_writer(work)

    def _allocate_last_pages(self) -> bool:
        """Allocate the last pages beyond those that LMDB uses. False when the disk is full."""
        end = (self._env.info()["last_pgno"] + 1 + _LAST_PAGES) * self._page_bytes
        # More at a time: most transactions then find the pages allocated.
        if self._guard.nbytes >= end:
            return True
        return self._guard.allocate(end + _LAST_PAGES * self._page_bytes) or self._guard.allocate(end)

    def _require_last_pages(self, raw: Any) -> None:
        """Raise `DiskFullError` if the transaction would leave less than the last pages of the allocated file."""
        pages = self._guard.nbytes // self._page_bytes
        for table in self._tables.values():
            tree = raw.stat(table.handle)
            pages -= tree["branch_pages"] + tree["leaf_pages"] + tree["overflow_pages"]
        if pages < _LAST_PAGES:
            raise DiskFullError(f"cache index {self._path}: no space left on the disk", next_step="free disk space")

    def _as_writer(self, work: Callable[[], _T]) -> _T:
        """The result of `work`, called with the locks of a process that writes."""
        thread = threading.get_ident()
        if self._writer == thread:  # it would wait for itself without end
            raise StorageError(
                f"cache index {self._path}: this thread is writing to it already",
                next_step="use the cache after the signal handler has returned, not in it",
            )
        try:
            with self._write_lock.threads:
                self._writer = thread
                try:
                    with self._write_lock, self._guard:
                        return work()
                finally:
                    self._writer = 0
        except lmdb.Error as error:
            raise self._failed(error) from error

    # --- inside transactions ----------------------------------------------------------------------

    def _wrapped(self, raw: Any, table: Table | None = None, *, views: bool = False) -> Writing:
        return Writing(raw, table, note=self._note, on_damaged=partial(self._drop, raw), views=views)

    @contextmanager
    def _errors(self, *kinds: type[Exception]) -> Iterator[None]:
        try:
            yield
        except kinds as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> StorageError:
        """Translates an LMDB error. After damage this process stops using the index, and the next one rebuilds it."""
        ours = translated(error, self._path)
        return self._guard.damaged(str(error)) if isinstance(ours, DamagedIndexError) else ours

    # --- records that do not verify -----------------------------------------------------------------

    def _note(self, table: Table, key: bytes) -> None:
        """Note a record that does not verify, for removal. Raises `DamagedIndexError` when nothing can replace it."""
        if table.name == b"state" or (table.name == b"meta" and key[:1] == _NUMBERS):
            raise self._guard.damaged("a number in it does not verify")
        self._noted.add((table, bytes(key)))

    def drop_damaged(self) -> None:
        """Remove the records that were found damaged since the last writing transaction, and correct the totals."""
        if self._noted or self._uncounted:
            self.write(self._count_if_needed, last_pages=True)

    def _count_if_needed(self, txn: Writing) -> None:
        if self._uncounted:
            self._count_again(txn)
            self._uncounted = False

    def _drop_noted(self, raw: Any) -> None:
        noted, self._noted = self._noted, set()
        while noted:  # not a loop over the set: a thread that reads may add to it meanwhile
            table, key = noted.pop()
            record = raw.get(key, db=table.handle)
            if record is None:
                # It was found by position but not by key, so the order of the keys is damaged; or it was removed meanwhile.
                if any(bytes(at) == key for at in raw.cursor(table.handle).iternext(keys=True, values=False)):
                    raise self._guard.damaged("its keys are not in order")
            elif table.unseal(key, record) is None:
                self._drop(raw, table, key)

    def _drop(self, raw: Any, table: Table, key: bytes) -> None:
        """Remove a record that does not verify, with the records that depend on it."""
        self._note(table, key)
        self._noted.discard((table, key))
        nbytes = len(raw.get(key, db=table.handle)) - CHECKSUM_BYTES
        raw.delete(key, db=table.handle)
        emit(
            Event(name="cache.index.corrupt", subject=self._path, detail=f"a record of the table {table.name.decode()}")
        )
        self._on_dropped()
        txn = self._wrapped(raw)
        if table is self._blocks and len(key) == BLOCK_KEY_BYTES:
            entry = self._get(txn, key[:16])
            if entry is not None and key.startswith(block_key(*entry[:2], 0)[:BLOCK_PREFIX_BYTES]):
                left = self._bytes_of_blocks(txn, entry)
                self._put(txn, entry._replace(cached_bytes=left).with_seal(None))
                self._add(txn, b"used", left - entry.cached_bytes)
        elif table is self._objects:
            self._delete_prefix(raw, self._blocks, key)
            self._uncounted = True
        elif table is self._segments:
            self._uncounted = True
        elif table is self._tails:
            self._add(txn, b"tails", -max(0, nbytes))
        if table in (self._blocks, self._objects, self._segments):
            self.signals.removed(raw.id())

    def _bytes_of_blocks(self, txn: Reading, entry: Entry) -> int:
        """The cached bytes of an object by the records of its blocks."""
        total, prefix = 0, block_key(*entry[:2], 0)[:BLOCK_PREFIX_BYTES]
        cursor = txn.cursor(self._blocks)
        cursor.set_range(prefix)
        while cursor.key()[:BLOCK_PREFIX_BYTES] == prefix:
            total += cached_in(entry, block_of(cursor.key()), unpack_block(cursor.value()))
            cursor.next()
        return total

    def _delete_prefix(self, raw: Any, table: Table, prefix: bytes) -> None:
        cursor = raw.cursor(table.handle)
        cursor.set_range(prefix)
        while bytes(cursor.key()).startswith(prefix) and cursor.key():
            cursor.delete()

    def _count_again(self, txn: Writing) -> None:
        """Recompute the used bytes after records were lost."""
        used = sum(SegmentRecord.unpack(key, value).written_bytes for key, value in txn.cursor(self._segments))
        for key, value in txn.cursor(self._objects):
            entry = Entry.unpack(key, value)
            used += 0 if entry.place else min(entry.size, entry.cached_bytes)
        txn.put(b"used", pack_number(used), db=self._state)

    def exercise(self) -> None:
        """Read and look up every record, read the list of free pages, and write one record.

        LMDB fails, or ends the process, where its structure is damaged. A record that does not verify is not such damage.
        """
        with self._errors(*INDEX_ERRORS), self._guard, self._env.begin() as raw:
            names = [bytes(name) for name, _ in raw.cursor()]
        for table in [self.table(name) for name in names]:
            with self._errors(*INDEX_ERRORS), self._guard, self._env.begin(buffers=True) as raw:
                finder = raw.cursor(table.handle)
                for key, record in raw.cursor(table.handle):
                    table.unseal(key, record)
                    if not finder.set_key(key):
                        raise self._guard.damaged("its keys are not in order")
        self._as_writer(self._read_free_pages)
        self.write(lambda txn: txn.put(b"exercised", pack_number(1), db=self._state), last_pages=True)

    def _read_free_pages(self) -> None:
        raw = self._env.begin(write=True)
        try:
            # No free pages in a row are enough for this record, so LMDB reads the whole list of them.
            pages = min(self._env.info()["last_pgno"] + 1, _MOST_FREE_PAGES)
            raw.put(b"exercised", bytes(pages * self._env.stat()["psize"]), db=self._state.handle)
        finally:
            raw.abort()

    def _get(self, txn: Reading, object_id: bytes) -> Entry | None:
        value = txn.get(object_id, db=self._objects)
        return None if value is None else Entry.unpack(object_id, value)

    def _put(self, txn: Writing, entry: Entry) -> None:
        txn.put(entry.object_id, entry.pack(), db=self._objects)

    def _read(self, txn: Reading, name: bytes) -> int:
        return number(txn.get(name, db=self._state))

    def _add(self, txn: Writing, name: bytes, amount: int) -> int:
        total = max(0, self._read(txn, name) + amount)
        txn.put(name, pack_number(total), db=self._state)
        return total


class _OpenReading:
    """The context manager of `IndexTransactions.reading`. Used once, by one thread.

    An interrupt at the first instruction of `__exit__` leaves the transaction open as long as its traceback exists. No other
    transaction waits for it; meanwhile LMDB does not reuse pages.
    """

    __slots__ = ("_index", "_raw", "_table", "_views")

    def __init__(self, index: IndexTransactions, table: Table | None, *, views: bool) -> None:
        self._index, self._table, self._views = index, table, views
        self._raw: Any = None

    def __enter__(self) -> Reading:
        index = self._index
        index._guard.__enter__()
        try:
            self._raw = index._env.begin(buffers=True)
            return Reading(self._raw, self._table, index._note, views=self._views)
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._raw is not None:
                self._raw.abort()
        finally:
            self._index._guard.__exit__()
        if isinstance(error, INDEX_ERRORS):
            raise self._index._failed(error) from error
