"""Folders of hard links to data files: cached objects as plain files for other programs.

A link keeps the bytes of an object, also without its name in the store. The store never writes to a linked file, and
the eviction skips it (`Store.is_linked`), because removing it would free no space. So a folder needs no record: when its
links are deleted, by anyone, the objects are evictable again.

A process has an exclusive lock (`flock`) on each of its folders in the store. The kernel releases it when the process and
its forked children have ended. A folder without a lock is removed by the next process.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from millrace.errors import StorageError
from millrace.runtime.directories import locked_directory
from millrace.runtime.failures import LostDataError, disk_errors
from millrace.runtime.private_files import make_folder
from millrace.store.records import Entry
from millrace.store.seals import Sealer
from millrace.store.setup import FOLDERS_NAME
from millrace.store.store import Store, unlink

_READ_ONLY = 0o444
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Folder:
    """A new folder in the store in `directory`, which this process has locked until `remove`. Raises `StorageError`."""

    def __init__(self, directory: Path) -> None:
        root = directory / FOLDERS_NAME
        self.path = root / f"{os.getpid()}-{secrets.token_hex(4)}"
        self._descriptor = -1
        try:
            with disk_errors(root):
                make_folder(root)
                # Between its creation and its lock a folder looks abandoned.
                with locked_directory(root, fcntl.LOCK_EX):
                    os.mkdir(self.path, 0o700)
                    self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                    fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        except BaseException:
            with suppress(StorageError):  # the first failure is the one to report
                self.remove()
            raise

    def remove(self) -> None:
        """Remove the folder. Files and maps that are open stay readable. After an interrupt here, call it again."""
        try:
            with disk_errors(self.path), suppress(FileNotFoundError):
                shutil.rmtree(self.path)
        except Exception:
            self._unlock()
            raise
        self._unlock()

    def _unlock(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def remove_abandoned(directory: Path) -> Iterator[str]:
    """Remove the folders of ended processes from the store in `directory`; yields their paths. Raises `StorageError`.

    A folder with content that this user may not remove stays.
    """
    root = directory / FOLDERS_NAME
    with disk_errors(root):
        try:
            guard = os.open(root, _FOLDER)
        except (FileNotFoundError, NotADirectoryError):
            return
        try:
            if not _try_lock(guard):
                return
            try:
                yield from _remove_unlocked(root, guard)
            finally:
                fcntl.flock(guard, fcntl.LOCK_UN)  # a child that was forked meanwhile has the descriptor open, too
        finally:
            os.close(guard)


def _remove_unlocked(root: Path, guard: int) -> Iterator[str]:
    for name in os.listdir(guard):
        try:
            folder = os.open(name, _FOLDER, dir_fd=guard)
        except OSError:  # not a folder of ours
            continue
        try:
            if _try_lock(folder):
                try:
                    shutil.rmtree(root / name)
                except PermissionError:  # another user has written to it; the others must not wait for that
                    continue
                yield str(root / name)
        finally:
            os.close(folder)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def link(store: Store, sealer: Sealer, entry: Entry, target: str) -> bool:
    """Make `target` a hard link to the data file of a complete object, which is verified first and read-only from then on.

    False if the object was removed meanwhile, or has damaged blocks, which are dropped; fetch it again. Raises `OSError`
    for a target that cannot be linked, and `StorageError`.
    """
    path = store.path(entry)
    try:
        sealed = sealer.seal(entry)
        if sealed is None:
            return False
        os.link(path, target, follow_symlinks=False)
    except (LostDataError, FileNotFoundError):
        return False
    found = os.lstat(target)
    same = (found.st_ino, found.st_mtime_ns, found.st_size) == (sealed.seal_inode, sealed.seal_mtime_ns, sealed.size)
    if same and stat.S_ISREG(found.st_mode):
        os.chmod(target, _READ_ONLY)
        sealer.check_seal(sealed)  # the link and the mode have changed the time in the seal
        now = store.index.get(entry.object_id)
        if now is not None and now.generation == entry.generation:
            return True
    unlink(target)
    return False
