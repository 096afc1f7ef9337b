"""The part of the cache on one disk: sparse files of blocks, and their index.

Layout of a store directory (format 4)::

    FORMAT               "millrace-store 4", then the boot id of the machine that wrote the index
    index/               LMDB, see `index.py`, and the page of signals
    objects/ab/abcd...-7 one sparse file an object version: 32 hex digits of its id, a dash, its generation. It holds exactly
                         the object's bytes. Its name and checksums are in the sidecar abcd...-7.idx, see `records.py`
    segments/            small objects, many in a file, see `segments.py`
    folders/             hard links to data files, see `folders.py`
    counters/            see `counters.py`
    locks                byte-range locks of fetches, see `locks.py`

Any number of processes read and write one store at the same time. A block is written to the file first, then its checksum to
the sidecar, and the index record last, so every recorded block exists. A block that is written twice has the same
bytes. A file is unlinked after its record is removed, and its name is never used again, so open and mapped files stay
readable.

Data is not flushed. After another start of the machine the index is rebuilt from the sidecars (`rebuild.py`), and every
block is verified before its first use.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Container, Sequence
from pathlib import Path

import xxhash
from typing_extensions import Buffer

from millrace.config import Amount
from millrace.errors import StorageError
from millrace.events import Event, emit
from millrace.runtime.failures import NO_FILE_ERRNOS, LostDataError, disk_errors, raise_disk_error
from millrace.store import records
from millrace.store.records import (
    Entry,
    Pages,
    blocks_of,
    coalesce,
    page_count,
    page_number,
    page_span,
    pages_of,
    span_of,
)
from millrace.store.setup import Rebuild, open_directory
from millrace.store.space import Space

_MAX_VERIFIED_OBJECTS = 4096


def checksum(data: Buffer) -> int:
    """The checksum of a block: xxh3, 64 bits (11 GB/s, releases the GIL)."""
    return xxhash.xxh3_64_intdigest(data)


def unlink(path: str) -> None:
    """Remove a data file, or anything else at its path; a directory that is not empty stays."""
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


def _is_read_only(descriptor: int) -> bool:
    """Whether a folder has, or had, the file (`folders.py`). It is never written again."""
    return not os.fstat(descriptor).st_mode & stat.S_IWUSR


class VerifiedBlocks:
    """The verified blocks of objects, by the generation of their file. Thread-safe.

    Beyond `max_objects` the least recently opened objects are removed; their next reader verifies them again.
    """

    def __init__(self, max_objects: int = _MAX_VERIFIED_OBJECTS) -> None:
        self._blocks: OrderedDict[int, set[int]] = OrderedDict()
        self._max_objects = max_objects
        self._lock = threading.Lock()

    def of(self, generation: int) -> set[int]:
        """The set that all readers of this file share. Readers add the blocks that they verify."""
        with self._lock:
            blocks = self._blocks.setdefault(generation, set())
            self._blocks.move_to_end(generation)
            while len(self._blocks) > self._max_objects:
                self._blocks.popitem(last=False)
        return blocks


class Store:
    """Opens or creates the store in `directory`. Thread- and process-safe; not usable after a fork.

    `rebuild` fills a new index. `resized` returns the capacity that all processes use instead of
    `capacity`, or None. Called for each: `on_corrupt`, a block with wrong bytes; `on_dropped`, an index record that did not
    verify; `on_failure`, a disk error that is not raised. Raises `UnsupportedFormatError` when the directory holds something
    else, `StorageError` when it cannot be used.
    """

    def __init__(
        self,
        directory: Path,
        *,
        capacity: Amount,
        min_free: Amount,
        rebuild: Rebuild,
        resized: Callable[[], Amount | None] = lambda: None,
        on_corrupt: Callable[[], None] = lambda: None,
        on_dropped: Callable[[], None] = lambda: None,
        on_failure: Callable[[StorageError], None] = lambda _: None,
    ) -> None:
        self.directory = directory
        self.index = open_directory(directory, rebuild, on_dropped=on_dropped)
        self.space = Space(
            directory, self.index, capacity=capacity, min_free=min_free, resized=resized, on_failure=on_failure
        )
        self._on_corrupt = on_corrupt

    def close(self) -> None:
        """Close the index. Files opened from the store stay readable."""
        self.index.close()

    # --- files in folders -------------------------------------------------------------------------

    def is_linked(self, entry: Entry) -> bool:
        """Whether a folder has the data file of an object: removing it from the store would free no space."""
        if entry.place:
            return False
        try:
            return os.lstat(self.path(entry)).st_nlink > 1
        except OSError:  # then there is nothing to keep
            return False

    # --- files ------------------------------------------------------------------------------------

    def path(self, entry: Entry) -> str:
        """The data file of an object version."""
        return f"{self.directory}/objects/{records.file_name(entry)}"

    def open_data(self, entry: Entry) -> int:
        """Open the data file for reading and writing blocks; returns a descriptor to close.

        The file of an object without blocks is created, sparse, and its sidecar. Raises `LostDataError` when blocks are
        recorded but their file is missing, not a file, or has another size.
        """
        path = self.path(entry)
        # O_NONBLOCK: opening a FIFO in the file's place must not wait.
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            try:
                descriptor, created = os.open(path, flags), False
            except PermissionError:  # the file is, or was, part of a folder, see `folders.py`
                descriptor, created = os.open(path, flags & ~os.O_RDWR), False
            except FileNotFoundError:
                self._require_no_blocks(entry, "is gone")
                os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
                descriptor, created = os.open(path, flags | os.O_CREAT, 0o600), True
            except OSError as error:
                if error.errno not in (errno.EISDIR, errno.ELOOP, errno.ENOTDIR, errno.ENXIO):
                    raise
                raise LostDataError(f"{path}: is not a file any more", next_step="open the object again") from error
            try:
                if created:
                    self._unless_removed(entry)
                self._check_size(entry, descriptor)
            except BaseException:
                os.close(descriptor)
                raise
            return descriptor
        except (OSError, OverflowError) as error:
            raise_disk_error(error, path)

    def _unless_removed(self, entry: Entry) -> None:
        """Remove files that were created after their object was removed. No other process would remove them."""
        now = self.index.get(entry.object_id)
        if now is None or now.generation != entry.generation:
            self._unlink(entry)
            raise LostDataError(f"{self.path(entry)}: was removed", next_step="open the object again")

    def _check_size(self, entry: Entry, descriptor: int) -> None:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise LostDataError(f"{self.path(entry)}: is not a file any more", next_step="open the object again")
        if found.st_size != entry.size:
            self._require_no_blocks(entry, "has another size")
            # Before the size: a file of the right size has a sidecar.
            self._write_sidecar(entry, records.pack_header(entry), 0, create=True)
            os.ftruncate(descriptor, entry.size)
            self._unless_removed(entry)

    def _write_sidecar(self, entry: Entry, data: bytes, offset: int, *, create: bool = False) -> None:
        """Write to the sidecar. A missing one is ignored: the blocks are then lost in the next rebuild."""
        path = self.path(entry) + records.SIDECAR_SUFFIX
        flags = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | (os.O_CREAT if create else 0)
        try:
            try:
                descriptor = os.open(path, flags, 0o600)
            except OSError as error:
                if error.errno in (errno.ENOENT, *NO_FILE_ERRNOS):
                    return
                raise
            try:
                _write(descriptor, data, offset)
            finally:
                os.close(descriptor)
        except (OSError, OverflowError) as error:
            raise_disk_error(error, path)

    def _require_no_blocks(self, entry: Entry, what: str) -> None:
        now = self.index.get(entry.object_id)
        if now is None or now.generation != entry.generation or now.cached_bytes:
            raise LostDataError(f"{self.path(entry)}: {what}", next_step="open the object again")

    def write_block(self, entry: Entry, descriptor: int, block: int, data: Buffer) -> Entry | None:
        """Write one block and record it. Returns the record.

        None when the object was removed meanwhile, or its file was cut; the object is then removed.

        Raises `DiskFullError` or `StorageError`; the block is then not recorded.
        """
        view = memoryview(data).cast("B")
        start, stop = span_of(block, block + 1, entry.size, entry.block_bytes)
        if len(view) != stop - start:
            raise ValueError(f"block {block} has {len(view)} bytes instead of {stop - start}")
        value = checksum(view)
        if self._remove_if_cut(entry, descriptor):
            return None
        try:
            if not self._write_bytes(entry, descriptor, view, start):
                return None
        except (OSError, OverflowError) as error:
            raise_disk_error(error, self.path(entry))
        self._write_sidecar(entry, records.pack_block(entry, block, value), records.block_offset(entry, block))
        return self.index.add_block(entry, block, value)

    def _write_bytes(self, entry: Entry, descriptor: int, view: memoryview, start: int) -> bool:
        """Write to the data file. One that is read-only must have the bytes already; otherwise the object is removed."""
        if not _is_read_only(descriptor):
            _write(descriptor, view, start)
        elif os.pread(descriptor, len(view), start) != view:
            self._remove_current(entry)
            return False
        return True

    def write_pages(self, entry: Entry, descriptor: int, start: int, data: Buffer) -> Entry | None:
        """Write and record the bytes from `start` on: whole pages, of any number of blocks. Returns as `write_block`.

        A block whose last page is written becomes a complete one.
        """
        view = memoryview(data).cast("B")
        stop = start + len(view)
        now: Entry | None = entry
        pages: dict[int, Pages] = {}
        if self._remove_if_cut(entry, descriptor):
            return None
        for block in blocks_of(start, stop, entry.block_bytes):
            first, end = span_of(block, block + 1, entry.size, entry.block_bytes)
            if start <= first and end <= stop:
                now = self.write_block(entry, descriptor, block, view[first - start : end - start])
                continue
            inside = [(page, page_span(entry, block, page)) for page in pages_of(entry, block, start, stop)]
            if not inside:
                continue
            pages[block] = {page: checksum(view[begin - start : last - start]) for page, (begin, last) in inside}
            begin, last = inside[0][1][0], inside[-1][1][1]
            with disk_errors(self.path(entry)):
                if not self._write_bytes(entry, descriptor, view[begin - start : last - start], begin):
                    return None
        if pages:
            now = self.index.add_pages(entry, pages)
            for block, state in zip(pages, self.index.block_states(entry, pages), strict=True):
                if isinstance(state, dict) and len(state) == page_count(entry, block):
                    now = self._join_pages(entry, descriptor, block) or now
        return now

    def _join_pages(self, entry: Entry, descriptor: int, block: int) -> Entry | None:
        """Record a block, all of whose pages are cached and right, as a complete one."""
        whole = self.read_pages(entry, descriptor, *span_of(block, block + 1, entry.size, entry.block_bytes))
        if whole is None:
            return None
        value = checksum(whole)
        self._write_sidecar(entry, records.pack_block(entry, block, value), records.block_offset(entry, block))
        return self.index.add_block(entry, block, value)

    def read_pages(
        self, entry: Entry, descriptor: int, start: int, stop: int, verified: Container[int] = ()
    ) -> bytes | None:
        """The bytes `[start, stop)` inside one block, if its pages are cached and right; otherwise None.

        Pages whose `page_number` is in `verified` are not verified. A wrong page is removed with its block, and reported.
        """
        block = start // entry.block_bytes
        state = self.index.block_states(entry, [block])[0]
        wanted = pages_of(entry, block, start, stop, touched=True)
        if not isinstance(state, dict) or any(page not in state for page in wanted):
            return None
        first, end = page_span(entry, block, wanted[0])[0], page_span(entry, block, wanted[-1])[1]
        with disk_errors(self.path(entry)):
            data = os.pread(descriptor, end - first, first)
        view = memoryview(data)
        for page in wanted:
            begin, last = page_span(entry, block, page)
            in_doubt = len(data) != end - first or page_number(entry, block, page) not in verified
            if in_doubt and checksum(view[begin - first : last - first]) != state[page]:
                self._drop_block(entry, descriptor, block)
                return None
        return data if (first, end) == (start, stop) else data[start - first : stop - first]

    def gaps(self, entry: Entry, start: int, stop: int) -> list[tuple[int, int]]:
        """The byte ranges of whole pages to fetch so that `[start, stop)` is cached; ascending, and they do not touch."""
        gaps: list[tuple[int, int]] = []
        blocks = blocks_of(start, stop, entry.block_bytes)
        for block, state in zip(blocks, self.index.block_states(entry, blocks), strict=True):
            if isinstance(state, int):
                continue
            wanted = pages_of(entry, block, start, stop, touched=True)
            runs = [wanted] if state is None else coalesce((page for page in wanted if page not in state), len(wanted))
            for run in runs:
                first, end = page_span(entry, block, run[0])[0], page_span(entry, block, run[-1])[1]
                if gaps and gaps[-1][1] == first:
                    gaps[-1] = gaps[-1][0], end
                else:
                    gaps.append((first, end))
        return gaps

    def read_block(self, entry: Entry, descriptor: int, block: int) -> bytes | None:
        """Read one block and verify it. None when it is not cached; a wrong block is removed and reported, and also None."""
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
        """Verify `blocks`, without keeping their bytes. Returns those that are wrong or not cached as a whole.

        Wrong ones are removed and reported. None when `stop()` returned True.
        """
        wrong: list[int] = []
        buffer = memoryview(bytearray(min(entry.block_bytes, entry.size)))
        for block, expected in zip(blocks, self.index.checksums(entry, blocks), strict=True):
            if stop():
                return None
            if expected is None:  # only its pages are recorded: it is not verified as a block
                wrong.append(block)
                continue
            start, end = span_of(block, block + 1, entry.size, entry.block_bytes)
            with disk_errors(self.path(entry)):
                nbytes = os.preadv(descriptor, [buffer[: end - start]], start)
            if nbytes != end - start or checksum(buffer[: end - start]) != expected:
                self._drop_block(entry, descriptor, block)
                wrong.append(block)
        return wrong

    def _drop_block(self, entry: Entry, descriptor: int, block: int) -> None:
        if self._remove_if_cut(entry, descriptor):
            return
        start, stop = span_of(block, block + 1, entry.size, entry.block_bytes)
        path = self.path(entry)
        try:
            # First the sidecar and then the index: a new fetch of the block happens after both.
            self._write_sidecar(entry, bytes(records.BLOCK_ENTRY_BYTES), records.block_offset(entry, block))
        finally:
            if self.index.drop_block(entry, block):
                emit(Event(name="cache.block.corrupt", subject=path, nbytes=stop - start, detail=f"block {block}"))
                self._on_corrupt()
                if _is_read_only(descriptor):  # it cannot be repaired
                    self._remove_current(entry)

    def _remove_if_cut(self, entry: Entry, descriptor: int) -> bool:
        """Whether the file was cut or extended; the object is then removed.

        Such a file must not be written to: it would grow again, with zeros where its readers have verified other bytes.
        """
        path = self.path(entry)
        try:
            if os.fstat(descriptor).st_size == entry.size:
                return False
        except OSError as error:
            raise_disk_error(error, path)
        if self._remove_current(entry):
            emit(Event(name="cache.file.lost", subject=path, detail="it has another size"))
        return True

    def _remove_current(self, entry: Entry) -> bool:
        """Remove an object unless it was removed, or removed and created again, meanwhile. Returns whether it was there."""
        now = self.index.get(entry.object_id)
        if now is None or now.generation != entry.generation:
            return False
        self.remove(entry.object_id)
        return True

    def missing(self, entry: Entry, blocks: Sequence[int]) -> list[int]:
        """Those of `blocks` that are not completely cached."""
        present = self.index.checksums(entry, blocks)
        return [block for block, value in zip(blocks, present, strict=True) if value is None]

    def remove(self, object_id: bytes) -> None:
        """Remove an object version and unlink its file. Open and mapped files stay readable."""
        entry = self.index.remove(object_id)
        if entry is not None and not entry.place:
            self._unlink(entry)

    def _unlink(self, entry: Entry) -> None:
        path = self.path(entry)
        unlink(path)
        unlink(path + records.SIDECAR_SUFFIX)
