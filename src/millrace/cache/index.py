"""The index of a store: LMDB, read by any process in about a microsecond without asking anyone.

Four tables: `objects` (one record an object version), `blocks` (one checksum a block that is here), `meta` (what the
origin said about a key, and pages of listings) and `state` (the store's own numbers). A block is in the cache when, and
only when, its checksum is in `blocks` under the object's current generation; a file's name or size proves nothing.

LMDB is opened without sync: killing a process loses nothing (the pages are the kernel's), and after a crash of the
machine the store is discarded (see `store.py`), so a write costs microseconds instead of a disk flush.

Traps handled here: one environment a process (py-lmdb refuses a second); a reader slot a transaction, so the table is
large; slots of killed readers are cleared on open; after a fork the child must open anew (`node.py` sees to it), but must
neither close what it inherited (that waits for threads that do not exist in the child) nor open the same path (py-lmdb
believes it open). It opens a hard link instead: LMDB's locks belong to the file, not to its name. py-lmdb 3 sees through
the link, hence the upper bound on its version.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import lmdb

from millrace.errors import DiskFullError, StorageError

_DATA_NAME = "index.mdb"
_MAP_BYTES = 64 << 30  # address space, not disk
_MAX_READERS = 8192

_OBJECT = struct.Struct("<QQIIQ")
_CHECKSUM = struct.Struct("<Q")
_U64 = struct.Struct("<Q")
_BLOCK_KEY = struct.Struct(">16sQI")


@dataclass(frozen=True, slots=True)
class Entry:
    """The record of one object version in a store.

    `generation` is never used twice in a store: a file is named by it, so that nothing that may be mapped is ever
    written again. `present` counts the blocks that are here.
    """

    object_id: bytes
    generation: int
    size: int
    block_bytes: int
    present: int

    @property
    def complete(self) -> bool:
        """Every block is here."""
        return self.present * self.block_bytes >= self.size


class DamagedIndexError(StorageError):
    """The index cannot be read; what it said is lost. Handled inside the cache."""

    code = "damaged-index"


@contextmanager
def _translated(path: str) -> Iterator[None]:
    try:
        yield
    except lmdb.DiskError as error:
        raise DiskFullError(f"cache index {path}: {error}", next_step="free disk space") from error
    except (lmdb.CorruptedError, lmdb.InvalidError, lmdb.PageNotFoundError, lmdb.VersionMismatchError) as error:
        raise DamagedIndexError(
            f"cache index {path}: {error}", next_step="remove the cache directory; it is filled again from the origin"
        ) from error
    except lmdb.Error as error:
        # LMDB tells a full disk while it writes as a plain system error.
        if os.strerror(errno.ENOSPC) in str(error):
            raise DiskFullError(f"cache index {path}: {error}", next_step="free disk space") from error
        raise StorageError(f"cache index {path}: {error}", next_step="check the disk and its permissions") from error


_fork_depth = 0


def _count_forks() -> None:
    global _fork_depth
    _fork_depth += 1


os.register_at_fork(after_in_child=_count_forks)


def _path_for_this_process(directory: Path) -> str:
    """The name under which this process opens the index: a hard link of its own for every level of forking."""
    path = directory / _DATA_NAME
    if _fork_depth == 0:
        return str(path)
    alias = directory / f"fork{_fork_depth}-{_DATA_NAME}"
    for suffix in ("", "-lock"):
        # The first to come makes the file; LMDB fills an empty one in.
        os.close(os.open(f"{path}{suffix}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        with contextlib.suppress(FileExistsError):
            os.link(f"{path}{suffix}", f"{alias}{suffix}")
    return str(alias)


class Index:
    """Typed access to the tables. Thread-safe; any number of processes at once; not usable after a fork.

    Raises `DamagedIndexError` when the files are no index, or shorter than they were.
    """

    def __init__(self, directory: Path) -> None:
        self._path = _path_for_this_process(directory)
        with _translated(self._path):
            self._env = lmdb.open(
                self._path,
                subdir=False,
                map_size=_MAP_BYTES,
                max_dbs=4,
                max_readers=_MAX_READERS,
                sync=False,
                metasync=False,
                readahead=False,
                mode=0o600,
            )
            # The lock file is written through a memory map: a hole in it, on a full disk, would kill the process.
            with open(f"{self._path}-lock", "rb+") as lock_file:
                os.posix_fallocate(lock_file.fileno(), 0, os.fstat(lock_file.fileno()).st_size)
            self._check_length()
            self._env.reader_check()
            self._objects = self._env.open_db(b"objects")
            self._blocks = self._env.open_db(b"blocks")
            self._meta = self._env.open_db(b"meta")
            self._state = self._env.open_db(b"state")

    def _check_length(self) -> None:
        """Reading past the end of a file that was cut would kill the process."""
        needed = (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"]
        if os.stat(self._path).st_size < needed:
            self._env.close()
            raise DamagedIndexError(f"cache index {self._path} was cut", next_step="remove the cache directory")

    def close(self) -> None:
        """Close the environment. Nothing of this process may use the index any more."""
        self._env.close()

    # --- objects and blocks -----------------------------------------------------------------------

    def get(self, object_id: bytes) -> Entry | None:
        """The record of an object version, or None."""
        with _translated(self._path), self._env.begin(self._objects) as txn:
            value = txn.get(object_id)
        return None if value is None else Entry(object_id, *_OBJECT.unpack(value)[:4])

    def create(self, object_id: bytes, size: int, block_bytes: int) -> Entry:
        """Return the record of an object version, making an empty one with a new generation when there is none."""
        entry = self.get(object_id)  # without the writers' lock, which every process of the node shares
        if entry is not None:
            return entry
        with _translated(self._path), self._env.begin(write=True) as txn:
            value = txn.get(object_id, db=self._objects)
            if value is not None:
                return Entry(object_id, *_OBJECT.unpack(value)[:4])
            generation = self._add(txn, b"generation", 1)
            txn.put(object_id, _OBJECT.pack(generation, size, block_bytes, 0, 0), db=self._objects)
            return Entry(object_id, generation, size, block_bytes, 0)

    def checksums(self, entry: Entry, blocks: Iterable[int]) -> list[int | None]:
        """The checksum of each block, None where it is not here."""
        with _translated(self._path), self._env.begin(self._blocks) as txn:
            values = [txn.get(_BLOCK_KEY.pack(entry.object_id, entry.generation, block)) for block in blocks]
        return [None if value is None else _CHECKSUM.unpack(value)[0] for value in values]

    def add_block(self, entry: Entry, block: int, nbytes: int, checksum: int) -> bool:
        """Record that a block's bytes are in the file. False when the object was removed meanwhile: drop the bytes."""
        key = _BLOCK_KEY.pack(entry.object_id, entry.generation, block)
        with _translated(self._path), self._env.begin(write=True) as txn:
            value = txn.get(entry.object_id, db=self._objects)
            if value is None:
                return False
            generation, size, block_bytes, present, flags = _OBJECT.unpack(value)
            if generation != entry.generation:
                return False
            if txn.put(key, _CHECKSUM.pack(checksum), db=self._blocks, overwrite=False):
                record = _OBJECT.pack(generation, size, block_bytes, present + 1, flags)
                txn.put(entry.object_id, record, db=self._objects)
                self._add(txn, b"used", nbytes)
            return True

    def drop_block(self, entry: Entry, block: int, nbytes: int) -> None:
        """Forget a block whose bytes turned out wrong."""
        with _translated(self._path), self._env.begin(write=True) as txn:
            if not txn.delete(_BLOCK_KEY.pack(entry.object_id, entry.generation, block), db=self._blocks):
                return
            value = txn.get(entry.object_id, db=self._objects)
            if value is not None:
                generation, size, block_bytes, present, flags = _OBJECT.unpack(value)
                record = _OBJECT.pack(generation, size, block_bytes, present - 1, flags)
                txn.put(entry.object_id, record, db=self._objects)
            self._add(txn, b"used", -nbytes)

    def remove(self, object_id: bytes) -> Entry | None:
        """Forget an object version and all its blocks in one step; returns its last record, or None."""
        with _translated(self._path), self._env.begin(write=True) as txn:
            value = txn.pop(object_id, db=self._objects)
            if value is None:
                return None
            entry = Entry(object_id, *_OBJECT.unpack(value)[:4])
            freed = 0
            cursor = txn.cursor(self._blocks)
            prefix = _BLOCK_KEY.pack(object_id, entry.generation, 0)
            found = cursor.set_range(prefix)
            while found and cursor.key()[:24] == prefix[:24]:
                block = _BLOCK_KEY.unpack(cursor.key())[2]
                freed += min((block + 1) * entry.block_bytes, entry.size) - block * entry.block_bytes
                found = cursor.delete()
            self._add(txn, b"used", -freed)
            return entry

    def entries(self) -> Iterator[Entry]:
        """Every object record, as of one moment."""
        with _translated(self._path), self._env.begin(self._objects) as txn:
            for key, value in txn.cursor():
                yield Entry(key, *_OBJECT.unpack(value)[:4])

    def used_bytes(self) -> int:
        """Bytes of all blocks that are here."""
        return self._number(b"used")

    # --- metadata ---------------------------------------------------------------------------------

    def get_meta(self, key: bytes) -> bytes | None:
        """A metadata record, or None."""
        with _translated(self._path), self._env.begin(self._meta) as txn:
            value: bytes | None = txn.get(key)
            return value

    def put_meta(self, records: Sequence[tuple[bytes, bytes]], *, unless_changed_since: int | None = None) -> bool:
        """Write metadata records, all in one step.

        With `unless_changed_since`, an earlier `change_count`, nothing is written when `change_meta` ran since then; gives
        whether it was written.
        """
        with _translated(self._path), self._env.begin(self._meta, write=True) as txn:
            if unless_changed_since is not None and self._read(txn, b"changes") != unless_changed_since:
                return False
            for key, value in records:
                txn.put(key, value)
            return True

    def change_meta(self, records: Sequence[tuple[bytes, bytes]] = (), delete: Iterable[bytes] = ()) -> None:
        """Write and remove records because the origin has changed; who asked the origin before that stores nothing."""
        with _translated(self._path), self._env.begin(self._meta, write=True) as txn:
            self._add(txn, b"changes", 1)
            for key, value in records:
                txn.put(key, value)
            for key in delete:
                txn.delete(key)

    def clear_meta(self) -> None:
        """Remove every metadata record; who asked the origin before that stores nothing."""
        with _translated(self._path), self._env.begin(write=True) as txn:
            self._add(txn, b"changes", 1)
            txn.drop(self._meta, delete=False)

    def change_count(self) -> int:
        """How often `change_meta` ran; to be read before the origin is asked."""
        return self._number(b"changes")

    def delete_meta(self, keys: Iterable[bytes]) -> None:
        """Remove metadata records; a missing one is no error."""
        with _translated(self._path), self._env.begin(self._meta, write=True) as txn:
            for key in keys:
                txn.delete(key)

    # --- the store's own numbers ------------------------------------------------------------------

    def _number(self, name: bytes) -> int:
        with _translated(self._path), self._env.begin(self._state) as txn:
            return self._read(txn, name)

    def _read(self, txn: lmdb.Transaction, name: bytes) -> int:
        value = txn.get(name, db=self._state)
        return 0 if value is None else int(_U64.unpack(value)[0])

    def _add(self, txn: lmdb.Transaction, name: bytes, amount: int) -> int:
        number = max(0, self._read(txn, name) + amount)
        txn.put(name, _U64.pack(number), db=self._state)
        return number
