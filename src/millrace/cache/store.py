"""One disk's share of the cache: sparse files of blocks beside their index.

Layout of a store directory (format 2)::

    FORMAT               "millrace-store 2", then the boot id of the machine that wrote the index
    index/               LMDB, see `index.py`, and the page of signals
    objects/ab/abcd...-7 one sparse file an object version: 32 hex digits of its id, a dash, its generation; see `trailer.py`
    segments/            small objects, many in a file, see `segments.py`
    counters/            see `counters.py`
    locks                byte-range locks of fetches, see `flight.py`

Any number of processes read and write one store at once. A block is written to its place in the file first, then to the
file's trailer, and recorded in the index last, so what the index names is there; writing a block twice writes the same
bytes. A file is unlinked after its record is gone and its name is never used again, so whoever has it open or mapped keeps
reading it.

Nothing is flushed. After another start of the machine the index is built anew from the trailers (`rebuild.py`), and every
block is verified before its first use.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import xxhash
from typing_extensions import Buffer

from millrace.cache import trailer
from millrace.cache.blocks import span_of
from millrace.cache.failures import LostDataError, disk_errors
from millrace.cache.records import Entry
from millrace.cache.rules_file import RulesFile
from millrace.cache.setup import open_directory
from millrace.config import Amount
from millrace.errors import StorageError
from millrace.events import Event, emit

_EXACT_BYTES = 1 << 30
_RESERVED_SECONDS = 60.0
_SLACK_SECONDS = 0.05
_RESERVE_ATTEMPTS = 4
_RESERVE_PAUSE_SECONDS = 0.004


class _Slack(NamedTuple):
    """So many bytes may be reserved without another look, under these limits, until then (`time.monotonic`)."""

    nbytes: int = 0
    limit: Amount | None = None
    min_free: Amount | None = None
    until: float = 0.0


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
        self._owner = os.urandom(16)
        self._announced = False
        self._slack = _Slack()
        self.index = open_directory(directory)
        self.on_corrupt: Callable[[], None] = lambda: None
        """Called for every block that turned out wrong."""
        self.on_failure: Callable[[StorageError], None] = lambda _: None
        """Hears of a disk that fails where no error is raised."""

    def close(self) -> None:
        """Close the index. Files opened from the store stay readable."""
        self.index.close()

    def set_limits(self, *, capacity: Amount, min_free: Amount) -> None:
        """Change how much may be stored from now on; what is stored already stays."""
        self._capacity, self._min_free = capacity, min_free

    # --- files ------------------------------------------------------------------------------------

    def path(self, entry: Entry) -> str:
        """The data file of an object version."""
        return f"{self.directory}/objects/{trailer.file_name(entry)}"

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
                self._unless_removed(entry, descriptor)
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

    def _unless_removed(self, entry: Entry, descriptor: int) -> None:
        """Take back a file that was made after the object was removed, and its file unlinked: nobody else would."""
        try:
            now = self.index.get(entry.object_id)
            if now is None or now.generation != entry.generation:
                unlink(self.path(entry))
                raise LostDataError(f"{self.path(entry)} was removed", next_step="open the object again")
        except BaseException:
            os.close(descriptor)
            raise

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
        """Put one block in its place and record it; returns the record. None when the object was removed meanwhile, or its
        file turns out to be cut, which removes it.

        Raises `DiskFullError` or `StorageError`; the block is then not recorded.
        """
        view = memoryview(data).cast("B")
        start, stop = span_of(block, block + 1, entry.size, entry.block_bytes)
        if len(view) != stop - start:
            raise ValueError(f"block {block} has {len(view)} bytes instead of {stop - start}")
        value = checksum(view)
        if self._give_up_if_cut(entry, descriptor):
            return None
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

    def drop_wrong_blocks(
        self, entry: Entry, descriptor: int, blocks: range, *, stop: Callable[[], bool]
    ) -> list[int] | None:
        """Verify those of `blocks` that are here, without keeping their bytes; gives the wrong ones.

        These are forgotten and reported. None when `stop()` said to end early.
        """
        wrong: list[int] = []
        buffer = memoryview(bytearray(min(entry.block_bytes, entry.size)))
        for block, expected in zip(blocks, self.index.checksums(entry, blocks), strict=True):
            if stop():
                return None
            if expected is None:
                continue
            start, end = span_of(block, block + 1, entry.size, entry.block_bytes)
            with disk_errors(self.path(entry)):
                nbytes = os.preadv(descriptor, [buffer[: end - start]], start)
            if nbytes != end - start or checksum(buffer[: end - start]) != expected:
                self._drop_block(entry, descriptor, block)
                wrong.append(block)
        return wrong

    def _drop_block(self, entry: Entry, descriptor: int, block: int) -> None:
        if self._give_up_if_cut(entry, descriptor):
            return
        start, stop = span_of(block, block + 1, entry.size, entry.block_bytes)
        path = self.path(entry)
        try:
            # First the file and then the index: whoever fetches the block anew does so after both.
            with disk_errors(path):
                _write(descriptor, bytes(trailer.BLOCK_ENTRY_BYTES), trailer.block_offset(entry, block))
        finally:
            if self.index.drop_block(entry, block, stop - start):
                emit(Event(name="cache.block.corrupt", subject=path, nbytes=stop - start, detail=f"block {block}"))
                self.on_corrupt()

    def _give_up_if_cut(self, entry: Entry, descriptor: int) -> bool:
        """Whether somebody has cut the file, or made it longer; the object is then removed.

        Nothing may be written to such a file: it would grow again, with zeros where readers that have it open believe to
        have verified something.
        """
        path = self.path(entry)
        with disk_errors(path):
            if os.fstat(descriptor).st_size == trailer.file_bytes(entry):
                return False
        now = self.index.get(entry.object_id)
        if now is not None and now.generation == entry.generation:
            emit(Event(name="cache.file.lost", subject=path, detail="it has another size"))
            self.remove(entry.object_id)
        return True

    def missing(self, entry: Entry, blocks: Sequence[int]) -> list[int]:
        """Those of `blocks` that are not here."""
        present = self.index.checksums(entry, blocks)
        return [block for block, value in zip(blocks, present, strict=True) if value is None]

    def remove(self, object_id: bytes) -> None:
        """Forget an object version and unlink its file. Readers that have it open or mapped keep reading."""
        entry = self.index.remove(object_id)
        if entry is not None and not entry.place:
            unlink(self.path(entry))

    # --- room -------------------------------------------------------------------------------------

    def shortage(self, nbytes: int) -> int:
        """How many bytes have to go before `nbytes` more keep the store inside its capacity and the disk above `min_free`.

        What any process has reserved counts as used. Zero or less: there is room.
        """
        return self._shortage(nbytes, self.index.used_bytes(), self._reserved_by_others())

    def has_room(self, nbytes: int) -> bool:
        """Whether there is no `shortage`."""
        return self.shortage(nbytes) <= 0

    def leaves_min_free(self, nbytes: int) -> bool:
        """Whether `nbytes` more leave the disk above `min_free`, whatever the capacity."""
        with disk_errors(self.directory):
            disk = os.statvfs(self.directory)
        free = disk.f_bavail * disk.f_frsize - self._reserved - nbytes
        return free >= self._min_free.of(disk.f_blocks * disk.f_frsize)

    def reserve(self, nbytes: int) -> bool:
        """Reserve room until `release`, if there is any. A disk in trouble has none.

        Other processes see the reservation when the store is nearly full (the last eighth, or 1 GiB if that is more), so
        they stay inside the limits together. A reservation that is kept for longer than a minute is not respected any more.
        """
        for _ in range(_RESERVE_ATTEMPTS):
            with self._reserve_lock:
                in_doubt = 0
                try:
                    granted = self._reserve(nbytes)
                    if not granted and self.shortage(nbytes) <= self._reserved:
                        in_doubt = self._reserved
                except StorageError as error:
                    self.on_failure(error)
                    granted = False
                self._reserved += nbytes if granted else 0
            if granted or not in_doubt:
                return granted
            # Between its writing and its `release` a block counts twice.
            time.sleep(_RESERVE_PAUSE_SECONDS)
        return False

    def release(self, nbytes: int) -> None:
        """Give back what was reserved: it was written, or will not be."""
        with self._reserve_lock:
            self._reserved -= nbytes
            if self._announced:
                try:
                    self.index.release(self._owner, self._reserved)
                    self._announced = self._reserved > 0
                except StorageError as error:
                    self.on_failure(error)

    def _reserve(self, nbytes: int) -> bool:
        if self._takes_from_slack(nbytes):
            return True
        shortage = self.shortage(nbytes)
        if shortage > 0:
            return False
        if not self._announced and -shortage >= max(self.capacity_bytes() // 8, _EXACT_BYTES):
            self._slack = _Slack(-shortage // 8, self._limit(), self._min_free, time.monotonic() + _SLACK_SECONDS)
            return True
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        granted = self.index.reserve(
            self._owner,
            self._reserved + nbytes,
            now=now,
            until=now + _RESERVED_SECONDS,
            fits=lambda used, others: self._shortage(nbytes, used, others) <= 0,
        )
        self._announced = self._announced or granted
        return granted

    def _takes_from_slack(self, nbytes: int) -> bool:
        """Take from a part of what was free a moment ago: looking costs more than writing a small object."""
        slack = self._slack
        if (
            slack.nbytes < nbytes
            or self._announced
            or time.monotonic() >= slack.until
            or (slack.limit, slack.min_free) != (self._limit(), self._min_free)
        ):
            return False
        self._slack = slack._replace(nbytes=slack.nbytes - nbytes)
        return True

    def _reserved_by_others(self) -> int:
        return self.index.reserved_bytes(but=self._owner, now=time.clock_gettime(time.CLOCK_BOOTTIME))

    def _shortage(self, nbytes: int, used: int, others: int) -> int:
        with disk_errors(self.directory):
            disk = os.statvfs(self.directory)
        total, free = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
        wanted = self._reserved + others + nbytes
        return max(wanted + self._min_free.of(total) - free, used + wanted - self._limit().of(total))

    def capacity_bytes(self) -> int:
        """The capacity on this disk."""
        with disk_errors(self.directory):
            disk = os.statvfs(self.directory)
        return self._limit().of(disk.f_blocks * disk.f_frsize)

    def free_bytes(self) -> int:
        """Free bytes of the disk."""
        with disk_errors(self.directory):
            disk = os.statvfs(self.directory)
        return disk.f_bavail * disk.f_frsize

    def min_free_bytes(self) -> int:
        """How many bytes of the disk must stay free."""
        return self._min_free.of(self.disk_bytes())

    def disk_bytes(self) -> int:
        """The size of the disk, whoever fills it."""
        with disk_errors(self.directory):
            disk = os.statvfs(self.directory)
        return disk.f_blocks * disk.f_frsize

    def _limit(self) -> Amount:
        """What somebody has resized the store to holds for every process, whatever its option says."""
        return self.rules.current().capacity or self._capacity
