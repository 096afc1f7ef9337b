"""Opens the index, runs its transactions, and removes records that do not verify.

A record that does not verify is absent for every reader. The next transaction that writes removes it, with the records that
depend on it, and `drop_damaged` corrects the totals. A damaged number, which nothing can replace, or damage to the
structure of LMDB's file ends the use of the index by this process, and the next one rebuilds it (`index_guard.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import lmdb

from millrace.errors import StorageError
from millrace.events import Event, emit
from millrace.runtime.locks import FileLock
from millrace.store.environment import DATA_NAME, INDEX_ERRORS, DamagedIndexError, open_environment, translated
from millrace.store.index_guard import IndexGuard
from millrace.store.records import (
    BLOCK_KEY_BYTES,
    BLOCK_PREFIX_BYTES,
    Entry,
    SegmentRecord,
    block_key,
    block_of,
    number,
    pack_number,
)
from millrace.store.signals import Signals
from millrace.store.tables import CHECKSUM_BYTES, Reading, Table, Writing

SIGNALS_NAME = "signals"
WRITE_LOCK_NAME = "write.lock"
_TABLES = (b"objects", b"blocks", b"segments", b"members", b"meta", b"state", b"tails", b"room")
_NUMBERS = b"N"  # the first byte of the keys of the metadata's own numbers
_MOST_FREE_PAGES = 8192  # 32 MiB


class IndexTransactions:
    """An open index: its tables by name, and transactions on them. `Index` adds typed access.

    `on_dropped` is called for every record that did not verify and was removed.
    """

    def __init__(self, directory: Path, *, on_dropped: Callable[[], None] = lambda: None) -> None:
        # A wait for LMDB's own lock of writers has no end. So a process takes this one first, and continues without the
        # index when its holder is stopped.
        self._write_lock = FileLock(directory / WRITE_LOCK_NAME, f"the process that writes to the cache in {directory}")
        self._env: Any = None
        try:
            self.signals = Signals(directory / SIGNALS_NAME)
            self._guard = IndexGuard(f"{directory}/{DATA_NAME}", self.signals)
            self._path = str(directory / DATA_NAME)
            with self._guard:  # a process that LMDB ends while it opens the index leaves its mark, too
                self._env, self._path = open_environment(directory, tables=32)
            self._guard.watch()
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
        # With LMDB the handle of a table takes a transaction that writes.
        with self._errors(lmdb.Error), self._write_lock, self._guard, self._env.begin(write=True) as txn:
            self.signals.lower_to(txn.id() - 1)
            return [Table.named(name, self._env.open_db(name, txn=txn)) for name in _TABLES]

    def close(self) -> None:
        """Close the environment. This process must not use the index afterwards."""
        if self._env is not None:
            self._env.close()
        if hasattr(self, "_guard"):
            self._guard.close()
        self._write_lock.close()

    def abandon(self) -> None:
        """In a forked child: close the parent's locks, and leave the rest."""
        self._guard.close()

    def clear_dead_readers(self) -> None:
        """Free the reader slots of killed processes. A slot in use makes the file grow."""
        with self._errors(lmdb.Error), self._guard:
            self._env.reader_check()

    def table(self, name: bytes) -> Table:
        """The table of this name, created if it is missing."""
        with self._errors(lmdb.Error), self._write_lock, self._guard, self._env.begin(write=True) as txn:
            return Table.named(name, self._env.open_db(name, txn=txn))

    @contextmanager
    def reading(self) -> Iterator[Reading]:
        """A transaction that reads, as of one moment."""
        with self._reading(None) as txn:
            yield txn

    @contextmanager
    def writing(self) -> Iterator[Writing]:
        """A transaction that writes, all in one step."""
        with self._writing() as txn:
            yield txn

    # --- inside transactions ----------------------------------------------------------------------

    @contextmanager
    def _reading(self, table: Table | None, *, views: bool = False) -> Iterator[Reading]:
        with self._errors(*INDEX_ERRORS), self._guard, self._env.begin(buffers=True) as txn:
            yield Reading(txn, table, self._note, views=views)

    @contextmanager
    def _writing(self, table: Table | None = None, *, views: bool = False) -> Iterator[Writing]:
        with self._errors(lmdb.Error), self._write_lock, self._guard, self._env.begin(write=True, buffers=True) as raw:
            if self._noted:
                self._drop_noted(raw)
            yield self._wrapped(raw, table, views=views)

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
            with self._writing() as txn:
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
                block = block_of(key)
                self._put(txn, entry._replace(present=max(0, entry.present - 1), seal_inode=0, seal_ctime_ns=0))
                start = block * entry.block_bytes
                self._add(txn, b"used", -max(0, min(start + entry.block_bytes, entry.size) - start))
        elif table is self._objects:
            self._delete_prefix(raw, self._blocks, key)
            self._uncounted = True
        elif table is self._segments:
            self._uncounted = True
        elif table is self._tails:
            self._add(txn, b"tails", -max(0, nbytes))
        if table in (self._blocks, self._objects, self._segments):
            self.signals.removed(raw.id())

    def _delete_prefix(self, raw: Any, table: Table, prefix: bytes) -> None:
        cursor = raw.cursor(table.handle)
        cursor.set_range(prefix)
        while bytes(cursor.key()).startswith(prefix) and cursor.key():
            cursor.delete()

    def _count_again(self, txn: Writing) -> None:
        """Recompute the used bytes after records were lost. A missing last block counts as present."""
        used = sum(SegmentRecord.unpack(key, value).written_bytes for key, value in txn.cursor(self._segments))
        for key, value in txn.cursor(self._objects):
            entry = Entry.unpack(key, value)
            used += 0 if entry.place else min(entry.size, entry.present * entry.block_bytes)
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
        with self._errors(lmdb.Error), self._write_lock, self._guard:
            raw = self._env.begin(write=True)
            try:
                # No free pages in a row are enough for this record, so LMDB reads the whole list of them.
                pages = min(self._env.info()["last_pgno"] + 1, _MOST_FREE_PAGES)
                raw.put(b"exercised", bytes(pages * self._env.stat()["psize"]), db=self._state.handle)
            finally:
                raw.abort()
        with self._writing() as writing:
            writing.put(b"exercised", pack_number(1), db=self._state)

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
