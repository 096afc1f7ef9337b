"""`fs.local_folder`: a directory of real files with the objects of a URL, see `CacheManagement.local_folder`.

The objects are loaded, verified and linked (`store/folders.py`). A hard link must be on the disk of its object: on a node
with several disks the directory is on the first one, and has symbolic links to hard links on the others.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import pyarrow as pa

from millrace.cache.disk import Disk
from millrace.cache.reading.locations import stored_object
from millrace.errors import DiskFullError, MillraceError, StorageError, UsageError
from millrace.figures import size_text
from millrace.filesystem.loading import LoadProgress, everything, load, pattern_root, select
from millrace.filesystem.opens import is_pattern
from millrace.origin import ObjectInfo
from millrace.runtime import forks
from millrace.runtime.failures import LostDataError, disk_errors
from millrace.store.folders import Folder, link
from millrace.store.records import Entry, object_id

if TYPE_CHECKING:
    from millrace.filesystem.listing import ListingFileSystem

_ATTEMPTS = 5
_COPY_BYTES = 8 << 20
_NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK)
_LONGEST_NAME = 255


class LocalFolder:
    """One call of `local_folder`; a context manager. `path` is the directory, inside the block."""

    def __init__(
        self,
        fs: ListingFileSystem,
        url: str,
        *,
        directory: str | os.PathLike[str] | None = None,
        copy: bool = False,
        progress: Callable[[LoadProgress], None] | None = None,
    ) -> None:
        self._fs, self._url, self._copy, self._progress = fs, url, copy, progress
        self._directory = None if directory is None else os.path.abspath(directory)
        self._folders: dict[Disk, Folder] = {}
        self._owner = forks.Owner()
        self._made: bool | None = None  # whether the directory was created here; None: it is not used
        self.path = ""
        self.objects = self.linked_bytes = self.copied_bytes = self.fetched_bytes = 0
        """The files, the bytes of links and of copies, and the bytes that were not cached before."""

    def __enter__(self) -> LocalFolder:
        disks = self._fs.node.open_disks
        if not disks:
            raise self._fs.node.unusable()
        chosen = list(select(self._fs, self._url))
        names = file_names(self._fs, self._url, [info.key for info in chosen])
        if not self._copy:
            self._require_capacity(sum(info.size for info in chosen), disks)
        guard = None
        try:
            if self._directory is None:
                self.path = str(self._folder_on(disks[0]).path)
            else:
                self.path = self._directory
                made = _make_directory(self._directory)
                guard = _lock_directory(self._directory)
                self._made = made
                if not self._copy and os.stat(self.path).st_dev not in {
                    os.stat(disk.store.directory).st_dev for disk in disks
                }:
                    raise _not_linkable(self.path, disks[0], errno.EXDEV)
            self._fill(names)
        except BaseException:
            self._remove()
            if self._made is not None:
                self._clear(self._made)
            raise
        finally:
            if guard is not None:
                try:
                    fcntl.flock(guard, fcntl.LOCK_UN)  # a child that was forked meanwhile has the descriptor open, too
                finally:
                    os.close(guard)
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def __del__(self) -> None:
        with suppress(AttributeError, StorageError):  # not initialized; or reported by the end of the block
            self._remove()  # the folder of an interrupted call: its links would keep their objects on the disk

    def _remove(self) -> None:
        """Remove the folders in the stores."""
        if self._owner.is_this_process:  # not in a forked child that leaves the block
            for disk, folder in list(self._folders.items()):
                try:
                    folder.remove()
                except Exception:
                    raise
                except BaseException:  # a second Ctrl-C: a large folder takes a while
                    folder.remove()
                    raise
                del self._folders[disk]

    def _clear(self, made: bool) -> None:
        """Remove the files from a directory of the user after an error, and the directory if it was created here."""
        for each in os.scandir(self.path):
            if each.is_dir(follow_symlinks=False):
                shutil.rmtree(each.path)
            else:
                os.unlink(each.path)
        if made:
            os.rmdir(self.path)

    def _folder_on(self, disk: Disk) -> Folder:
        if disk not in self._folders:
            self._folders[disk] = Folder(disk.store.directory)
        return self._folders[disk]

    # --- files --------------------------------------------------------------------------------------

    def _fill(self, names: dict[str, str]) -> None:
        wanted: dict[Disk, set[bytes]] = {disk: set() for disk in self._fs.node.open_disks}

        def want(info: ObjectInfo) -> None:
            number = self._id_of(info)
            disk = self._fs.node.disk_of(number)
            if disk is not None and disk in wanted:
                wanted[disk].add(number)

        try:
            for disk, numbers in wanted.items():
                disk.evictor.wanted[self] = numbers
            self._load_and_place(names, want)
        finally:
            for disk in wanted:
                disk.evictor.wanted.pop(self, None)

    def _load_and_place(self, names: dict[str, str], want: Callable[[ObjectInfo], None]) -> None:
        urls, placed, before = [self._url], set[str](), -1
        for _ in range(_ATTEMPTS):
            full: DiskFullError | None = None
            loaded: dict[str, ObjectInfo] = {}

            def share(info: ObjectInfo, into: dict[str, ObjectInfo] = loaded) -> tuple[tuple[int, int], ...]:
                if info.key in placed:
                    return ()
                into[info.key] = info  # the last one is the version that is loaded, see `_load_again`
                want(info)
                return tuple(everything(info))

            try:
                self.fetched_bytes += load(self._fs, urls, progress=self._progress, share=share).fetched_bytes
            except DiskFullError as error:
                full = error
            if new := loaded.keys() - names.keys():  # listed since, or in another order of the listing
                names.update(file_names(self._fs, self._url, [*names, *new]))
            left = [info for info in loaded.values() if not self._place(info, names[info.key])]
            placed.update(loaded.keys() - {info.key for info in left})
            if full is not None:  # it may have ended the listing, so everything is listed again
                if len(placed) == before:
                    raise full
            elif not left:
                return
            else:
                urls = [self._fs.unstrip_protocol(info.key) for info in left]
            before = len(placed)
        raise full or DiskFullError(
            f"{urls[0]}: was removed from the cache {_ATTEMPTS} times before the folder was complete",
            next_step="enlarge the cache with 'millrace resize'",
        )

    def _place(self, info: ObjectInfo, name: str) -> bool:
        """Create the file of one object. False if it must be loaded again."""
        target = os.path.join(self.path, name)
        with disk_errors(target):
            os.makedirs(os.path.dirname(target), exist_ok=True)
            if not info.size:
                self._write(target, ())
                return self._done(linked=0, copied=0)
            node = self._fs.node
            number = self._id_of(info)
            disk = node.disk_of(number)
            if disk is None:
                raise node.unusable()
            entry = disk.store.index.get(number)
            if entry is None or not entry.complete:
                return False
            if entry.place:
                found = stored_object(disk, entry)
                if found is None:
                    return False
                self._require_room(disk, entry.size)
                self._write(target, (found[0],))
                return self._done(linked=0, copied=entry.size)
            if self._copy:
                self._require_room(disk, entry.size)
                return self._copy_file(disk, entry, target) and self._done(linked=0, copied=entry.size)
            return self._link(disk, entry, target) and self._done(linked=entry.size, copied=0)

    def _id_of(self, info: ObjectInfo) -> bytes:
        return object_id(self._fs.origin.identity, info.key, info.version, info.size)

    def _done(self, *, linked: int, copied: int) -> bool:
        self.objects += 1
        self.linked_bytes += linked
        self.copied_bytes += copied
        return True

    def _link(self, disk: Disk, entry: Entry, target: str) -> bool:
        try:
            if self._directory is not None or disk is next(iter(self._folders)):
                return link(disk.store, disk.sealer, entry, target)
            other = str(self._folder_on(disk).path / str(self.objects))
            if not link(disk.store, disk.sealer, entry, other):
                return False
            os.symlink(other, target)
            return True
        except OSError as error:
            if isinstance(error, MillraceError) or error.errno not in _NO_LINKS:
                raise
            raise _not_linkable(self.path, disk, error.errno) from error

    def _copy_file(self, disk: Disk, entry: Entry, target: str) -> bool:
        try:
            sealed = disk.sealer.seal(entry)
            if sealed is None:
                return False
            descriptor = os.open(disk.store.path(entry), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except (LostDataError, FileNotFoundError):
            return False
        with open(descriptor, "rb", buffering=0) as file:
            self._write(target, iter(lambda: file.read(_COPY_BYTES), b""))
            if os.stat(target).st_size == entry.size and sealed.seal_holds(os.fstat(descriptor)):
                return True
        os.unlink(target)
        return False

    @staticmethod
    def _write(target: str, pieces: Iterable[bytes | pa.Buffer]) -> None:
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "wb") as file:
            for piece in pieces:
                file.write(piece)
            os.fchmod(descriptor, 0o444)

    def _require_capacity(self, nbytes: int, disks: Sequence[Disk]) -> None:
        """Raise `DiskFullError` before anything is fetched if the objects cannot all be cached."""
        capacity = sum(disk.store.space.capacity_bytes() for disk in disks)
        if nbytes > capacity:
            raise DiskFullError(
                f"the cache is too small: {self._url} has {size_text(nbytes)}, the capacity is {size_text(capacity)}",
                next_step="enlarge it with 'millrace resize', or choose fewer objects",
            )

    def _require_room(self, disk: Disk, nbytes: int) -> None:
        """Raise `DiskFullError` if a copy would leave too little space: copies are not part of the cache's capacity."""
        own = os.stat(self.path).st_dev == os.stat(disk.store.directory).st_dev
        if not (disk.store.space.leaves_min_free(nbytes) if own else shutil.disk_usage(self.path).free > nbytes):
            raise DiskFullError(
                f"{self.path}: no space for a copy of {size_text(nbytes)}"
                + (" that leaves 'min_free' on the disk" if own else ""),
                next_step="free disk space, or choose fewer objects",
            )


def file_names(fs: ListingFileSystem, url: str, keys: Iterable[str]) -> dict[str, str]:
    """The relative path of each key's file. Raises `UsageError` for keys that cannot be files of one directory."""
    every, base = list(keys), fs.key_of(url)
    if every == [base]:
        root = base.rpartition("/")[0]
    else:
        root = pattern_root(base) if is_pattern(base, fs.origin.identity) else base
    names = {key: key.removeprefix(root).lstrip("/") for key in every}
    folders: set[str] = set()
    for key, name in names.items():
        parts = name.split("/")
        if any(part in ("", ".", "..") or len(os.fsencode(part)) > _LONGEST_NAME for part in parts):
            raise _no_file(fs, key, "its name is not a path of files")
        folders.update("/".join(parts[:count]) for count in range(1, len(parts)))
    for key, name in names.items():
        if name in folders:
            raise _no_file(fs, key, "other objects are below it as a directory")
    return names


def _no_file(fs: ListingFileSystem, key: str, problem: str) -> UsageError:
    return UsageError(
        f"{fs.unstrip_protocol(key)}: cannot be a file, {problem}", next_step="choose other objects with a pattern"
    )


def _make_directory(path: str) -> bool:
    """Create a directory; returns whether it was missing. Raises `UsageError` for one with content, or something else."""
    with disk_errors(path):
        made = not os.path.lexists(path)
        try:
            os.makedirs(path, exist_ok=True)
            content = os.listdir(path)
        except (FileExistsError, NotADirectoryError) as error:
            raise UsageError(f"{path}: is not a directory", next_step="choose a new or empty directory") from error
    if content:
        raise UsageError(f"{path}: is not empty", next_step="choose a new or empty directory, or delete it first")
    return made


def _lock_directory(path: str) -> int:
    """Lock an empty directory while it is filled; returns a descriptor to close. Raises `UsageError`."""
    with disk_errors(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.listdir(path):
            raise UsageError(f"{path}: is not empty", next_step="choose a new or empty directory, or delete it first")
    except BlockingIOError as error:
        os.close(descriptor)
        raise UsageError(f"{path}: another process fills it now", next_step="choose another directory") from error
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _not_linkable(path: str, disk: Disk, code: int) -> StorageError:
    if code == errno.EXDEV:
        problem, step = (
            f"is on another file system than the cache in {disk.store.directory}",
            "choose a directory there",
        )
    else:
        problem, step = f"the file system has no more hard links ({os.strerror(code)})", "use another file system"
    return StorageError(f"{path}: {problem}", next_step=f"{step}, or copy the files (copy=True, --copy)")
