"""One disk's share of the cache: sparse files of blocks beside their index.

Layout of a store directory (format 1)::

    FORMAT               "millrace-store 1", then the boot id of the machine that wrote it
    index/               LMDB, see `index.py`
    objects/ab/abcd...-7 one sparse file an object version: 32 hex digits of its id, a dash, its generation
    counters/            see `counters.py`
    locks                byte-range locks of fetches, see `flight.py`

Any number of processes read and write one store at once. A block is written to its place in the file first and recorded
in the index second, so what the index names is there; writing a block twice writes the same bytes. A file is unlinked
after its record is gone and its name is never used again, so whoever has it open or mapped keeps reading it.

Files are not flushed: a crash of the machine may leave zeros behind, so a store that another boot wrote is discarded.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import xxhash
from typing_extensions import Buffer

from millrace.cache import trailer
from millrace.cache.blocks import span_of
from millrace.cache.environment import DamagedIndexError
from millrace.cache.failures import LostDataError, disk_errors
from millrace.cache.index import Index
from millrace.cache.records import Entry
from millrace.cache.rules_file import NEW_RULES_NAME, RULES_NAME, RulesFile
from millrace.config import Amount
from millrace.errors import ConfigurationError, StorageError, UnsupportedFormatError
from millrace.events import Event, emit

FORMAT_NAME = "millrace-store"
FORMAT_VERSION = 2

_OWN_NAMES = frozenset(
    {
        "FORMAT",
        "FORMAT.new",
        "index",
        "objects",
        "counters",
        "segments",
        "locks",
        "setup.lock",
        RULES_NAME,
        NEW_RULES_NAME,
    }
)


def checksum(data: Buffer) -> int:
    """The checksum of a block: xxh3, 64 bits (11 GB/s, releases the GIL)."""
    return xxhash.xxh3_64_intdigest(data)


def unlink(path: str) -> None:
    """Remove a data file, or what somebody put in its place; a folder that is not empty is left."""
    with disk_errors(path):
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass
        except IsADirectoryError:
            with contextlib.suppress(OSError):
                os.rmdir(path)


def _write(descriptor: int, data: Buffer, offset: int) -> None:
    view = memoryview(data)
    position = 0
    while position < len(view):
        position += os.pwrite(descriptor, view[position:], offset + position)


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


class Store:
    """Opens or creates the store in `directory`. Thread- and process-safe; not usable after a fork.

    Raises `UnsupportedFormatError` when the directory holds something else, `StorageError` when it cannot be used.
    """

    def __init__(self, directory: Path, *, capacity: Amount, min_free: Amount) -> None:
        self.directory = directory
        self._capacity = capacity
        self._min_free = min_free
        self.rules = RulesFile(directory)
        self._reserved = 0
        self._reserve_lock = threading.Lock()
        with disk_errors(directory):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if directory.stat().st_uid != os.geteuid():
                raise StorageError(f"{directory} belongs to another user", next_step="choose another 'cache_dir'")
            with open(directory / "setup.lock", "a", encoding="ascii") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                self._prepare()
                self.index = self._open_index()

    def close(self) -> None:
        """Close the index. Files opened from the store stay readable."""
        self.index.close()

    def set_limits(self, *, capacity: Amount, min_free: Amount) -> None:
        """Change how much may be stored from now on; what is stored already stays."""
        self._capacity, self._min_free = capacity, min_free

    # --- files ------------------------------------------------------------------------------------

    def path(self, entry: Entry) -> str:
        """The data file of an object version."""
        name = entry.object_id.hex()
        return f"{self.directory}/objects/{name[:2]}/{name}-{entry.generation}"

    def open_data(self, entry: Entry) -> int:
        """Open the data file for reading and writing blocks; returns a descriptor to close.

        The file of an object without blocks is made, sparse. Raises `LostDataError` when blocks are recorded but their file
        is gone, is no file any more or has another size: what the index says of them is not true.
        """
        path = self.path(entry)
        # O_NONBLOCK: opening what somebody put in the file's place, such as a FIFO, must not wait.
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        with disk_errors(path):
            try:
                descriptor = os.open(path, flags)
            except FileNotFoundError:
                self._require_no_blocks(entry, "is gone")
                os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
                descriptor = os.open(path, flags | os.O_CREAT, 0o600)
            except OSError as error:
                if error.errno not in (errno.EISDIR, errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
                    raise
                raise LostDataError(f"{path} is no file any more", next_step="open the object again") from error
            try:
                self._check_size(entry, descriptor)
            except BaseException:
                os.close(descriptor)
                raise
            return descriptor

    def _check_size(self, entry: Entry, descriptor: int) -> None:
        expected = trailer.file_bytes(entry)
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise LostDataError(f"{self.path(entry)} is no file any more", next_step="open the object again")
        if found.st_size != expected:
            self._require_no_blocks(entry, "has another size")
            if found.st_size > expected:
                os.ftruncate(descriptor, expected)
            _write(descriptor, trailer.pack_footer(entry), trailer.footer_offset(entry))

    def _require_no_blocks(self, entry: Entry, what: str) -> None:
        now = self.index.get(entry.object_id)
        if now is None or now.generation != entry.generation or now.present:
            raise LostDataError(f"{self.path(entry)} {what}", next_step="open the object again")

    def write_block(self, entry: Entry, descriptor: int, block: int, data: Buffer) -> Entry | None:
        """Put one block in its place and record it; returns the record. None when the object was removed meanwhile.

        Raises `DiskFullError` or `StorageError`; the block is then not recorded.
        """
        view = memoryview(data).cast("B")
        start, stop = span_of(block, block + 1, entry.size, entry.block_bytes)
        if len(view) != stop - start:
            raise ValueError(f"block {block} has {len(view)} bytes instead of {stop - start}")
        value = checksum(view)
        with disk_errors(self.path(entry)):
            _write(descriptor, view, start)
            _write(descriptor, trailer.pack_block(entry, block, value), trailer.block_offset(entry, block))
        return self.index.add_block(entry, block, len(view), value)

    def read_block(self, entry: Entry, descriptor: int, block: int) -> bytes | None:
        """Read one block and verify it. None when it is not here; a wrong one is forgotten, reported, and also None."""
        expected = self.index.checksums(entry, [block])[0]
        if expected is None:
            return None
        start, stop = span_of(block, block + 1, entry.size, entry.block_bytes)
        with disk_errors(self.path(entry)):
            data = os.pread(descriptor, stop - start, start)
        if len(data) == stop - start and checksum(data) == expected:
            return data
        self._drop_block(entry, descriptor, block)
        return None

    def wrong_blocks(self, entry: Entry, descriptor: int, blocks: range, *, stop: Callable[[], bool]) -> list[int]:
        """Verify blocks from the file without returning their bytes; gives those that are not here or wrong.

        Wrong ones are forgotten and reported. Ends early when `stop()` says so; the blocks that are left count as wrong.
        """
        wrong = []
        buffer = memoryview(bytearray(min(entry.block_bytes, entry.size)))
        for block, expected in zip(blocks, self.index.checksums(entry, blocks), strict=True):
            if stop():
                return [*wrong, *range(block, blocks.stop)]
            first, last = span_of(block, block + 1, entry.size, entry.block_bytes)
            with disk_errors(self.path(entry)):
                nbytes = os.preadv(descriptor, [buffer[: last - first]], first)
            if expected is None:
                wrong.append(block)
            elif nbytes != last - first or checksum(buffer[: last - first]) != expected:
                self._drop_block(entry, descriptor, block)
                wrong.append(block)
        return wrong

    def _drop_block(self, entry: Entry, descriptor: int, block: int) -> None:
        start, stop = span_of(block, block + 1, entry.size, entry.block_bytes)
        path = self.path(entry)
        emit(Event(name="cache.block.corrupt", subject=path, nbytes=stop - start, detail=f"block {block}"))
        try:
            # First the file and then the index: whoever fetches the block anew does so after both.
            with disk_errors(path):
                _write(descriptor, bytes(trailer.BLOCK_ENTRY_BYTES), trailer.block_offset(entry, block))
        finally:
            self.index.drop_block(entry, block, stop - start)

    def missing(self, entry: Entry, blocks: Sequence[int]) -> list[int]:
        """Those of `blocks` that are not here."""
        present = self.index.checksums(entry, blocks)
        return [block for block, value in zip(blocks, present, strict=True) if value is None]

    def remove(self, object_id: bytes) -> None:
        """Forget an object version and unlink its file. Readers that have it open or mapped keep reading."""
        entry = self.index.remove(object_id)
        if entry is not None:
            unlink(self.path(entry))

    # --- room -------------------------------------------------------------------------------------

    def has_room(self, nbytes: int) -> bool:
        """Whether `nbytes` more keep the store inside its capacity and the disk above `min_free`.

        What threads of this process have reserved counts as used. Other processes may be about to write as well, so
        together they may go over by one request each.
        """
        with disk_errors(self.directory):
            disk = os.statvfs(self.directory)
        total, free = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
        wanted = self._reserved + nbytes
        if free - wanted < self._min_free.of(total):
            return False
        return self.index.used_bytes() + wanted <= self._limit().of(total)

    @contextmanager
    def reserved(self, nbytes: int) -> Iterator[bool]:
        """Reserve room for the time of the block; gives whether there was any. A disk in trouble has none."""
        with self._reserve_lock:
            try:
                granted = self.has_room(nbytes)
            except StorageError as error:
                emit(Event(name="cache.disk.failed", subject=str(self.directory), detail=str(error)))
                granted = False
            self._reserved += nbytes if granted else 0
        try:
            yield granted
        finally:
            if granted:
                with self._reserve_lock:
                    self._reserved -= nbytes

    def capacity_bytes(self) -> int:
        """The capacity on this disk."""
        with disk_errors(self.directory):
            disk = os.statvfs(self.directory)
        return self._limit().of(disk.f_blocks * disk.f_frsize)

    def disk_bytes(self) -> int:
        """The size of the disk, whoever fills it."""
        with disk_errors(self.directory):
            disk = os.statvfs(self.directory)
        return disk.f_blocks * disk.f_frsize

    def _limit(self) -> Amount:
        """What somebody has resized the store to holds for every process, whatever its option says."""
        return self.rules.current().capacity or self._capacity

    # --- format -----------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Recognise, refuse, discard or create what lies in the directory. Runs under the set-up lock."""
        marker = self.directory / "FORMAT"
        try:
            lines = marker.read_text(encoding="ascii").splitlines()
        except FileNotFoundError:
            foreign = sorted(set(os.listdir(self.directory)) - _OWN_NAMES)
            if foreign:
                raise ConfigurationError(
                    f"{self.directory} is no cache directory (it holds {foreign[0]!r})",
                    next_step="choose an empty directory for 'cache_dir'",
                ) from None
            lines = []
        except UnicodeDecodeError as error:
            raise UnsupportedFormatError(
                f"{marker} was not written by Millrace", next_step="choose another 'cache_dir'"
            ) from error
        if lines and lines[0] == f"{FORMAT_NAME} 1":
            # Never released, so nobody's data: what it holds is fetched again.
            self._discard("written in format 1, which this version does not read")
            lines = []
        if lines and lines[0] != f"{FORMAT_NAME} {FORMAT_VERSION}":
            raise UnsupportedFormatError(
                f"{self.directory} has the format {lines[0][:60]!r}, this version reads '{FORMAT_NAME} {FORMAT_VERSION}'",
                next_step="choose another 'cache_dir', or remove this one",
            )
        boot = _boot_id()
        if lines[1:2] != [boot]:
            self._discard("written before the last start of this machine")
            temporary = self.directory / "FORMAT.new"
            temporary.unlink(missing_ok=True)
            with open(temporary, "x", encoding="ascii") as file:
                file.write(f"{FORMAT_NAME} {FORMAT_VERSION}\n{boot}\n")
            os.replace(temporary, marker)
        for name in ("index", "objects", "counters"):
            (self.directory / name).mkdir(mode=0o700, exist_ok=True)

    def _open_index(self) -> Index:
        try:
            return Index(self.directory / "index")
        except DamagedIndexError as error:
            # Without it nothing says what the files hold. They are a cache: the origin has it all.
            self._discard(str(error))
            for name in ("index", "objects"):
                (self.directory / name).mkdir(mode=0o700)
            return Index(self.directory / "index")

    def _discard(self, reason: str) -> None:
        for name in ("index", "objects"):
            if (self.directory / name).exists():
                shutil.rmtree(self.directory / name)
                emit(Event(name="cache.store.discarded", subject=str(self.directory), detail=reason))
