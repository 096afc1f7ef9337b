"""Private directories and files: created for this user only, checked before use, never opened through a link.

The cache determines the bytes that a training job reads, and a node's directory contains the cluster's token. So every
directory has mode 0700 and every file 0600, whatever the umask. Only this user and root can then write there. Files that
others wrote before, in a directory that was once open to them, are found by checks that do not follow links.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import time
from pathlib import Path

from millrace.errors import StorageError
from millrace.events import Event, emit

_log = logging.getLogger("millrace.runtime")

_FOLDER_MODE = 0o700
_FILE_MODE = 0o600
REPLACED = ".replaced-"
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def make_folder(directory: Path) -> None:
    """Create a private directory, or make an existing one private: `find_folder`, then `close_folder`."""
    find_folder(directory)
    close_folder(directory)


def find_folder(directory: Path) -> None:
    """Create `directory` and its missing parents, each for this user only, unless it exists.

    Raises `StorageError` for a link, anything but a directory, and a directory of another user; `OSError`.
    """
    _make(directory)
    require_folder(directory)


def _make(directory: Path) -> None:
    """As `Path.mkdir(parents=True)`, but the parents are also private."""
    try:
        os.mkdir(directory, _FOLDER_MODE)
    except FileNotFoundError:
        if not directory.parent.exists():  # in /proc, for example, it exists
            _make(directory.parent)
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory, _FOLDER_MODE)
    except FileExistsError:
        pass


def close_folder(directory: Path) -> bool:
    """Make a directory of this user private. A change of its mode is logged.

    Returns whether *every* user of the machine could write to it; then its content cannot be trusted. (Write access for a
    group is a decision of the administrator: Kubernetes assigns volumes to groups.) Raises as `find_folder`.
    """
    status = require_folder(directory)
    open_to_others = stat.S_IMODE(status.st_mode) & _OTHERS
    if not open_to_others:
        return False
    # Not by its path, which could be a link by now.
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fchmod(descriptor, stat.S_IMODE(status.st_mode) & _FOLDER_MODE)
    finally:
        os.close(descriptor)
    detail = f"its mode was {stat.S_IMODE(status.st_mode):04o}"
    emit(Event(name="cache.folder.closed", subject=str(directory), detail=detail))
    _log.warning("%s was open to other users (%s) and is closed to them now", directory, detail)
    return bool(status.st_mode & stat.S_IWOTH)


def require_folder(directory: Path) -> os.stat_result:
    """Raise `StorageError` unless this is a directory of this user, and not a link. Raises `FileNotFoundError`."""
    status = os.lstat(directory)
    _require_no_link(directory, status)
    if not stat.S_ISDIR(status.st_mode):
        raise StorageError(f"{directory}: is not a directory", next_step="remove it, or choose another 'cache_dir'")
    _require_own(directory, status)
    return status


def require_file(path: Path, *, alone: bool = False) -> None:
    """Raise `StorageError` if a link, or a file of another user, is at `path`. A missing file is accepted.

    With `alone` it must not have another name: writes through a hard link would change another file of this user.
    """
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return
    _require_no_link(path, status)
    if alone and stat.S_ISREG(status.st_mode) and status.st_nlink > 1:  # a directory always has two
        raise StorageError(f"{path}: has another name, too (a hard link)", next_step="remove it here")
    _require_own(path, status)


def make_way(path: Path, *, folder: bool = False, lost: str = "") -> None:
    """Remove or rename anything at `path` that prevents a file of this user, or with `folder` a directory; see `recreate`.

    Raises as `require_file`, and `OSError`.
    """
    require_file(path)
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return
    if not (stat.S_ISDIR if folder else stat.S_ISREG)(status.st_mode):
        # In the place of a directory even a file may contain data.
        why = "is not a directory" if folder else "is not a file"
        recreate(path, why, lost=lost, keep=folder and status.st_size > 0)
        return
    needed = _FOLDER_MODE if folder else _FILE_MODE
    if status.st_mode & needed != needed:
        os.chmod(path, needed)


def recreate(path: Path, why: str, *, lost: str = "", keep: bool = False) -> None:
    """Remove a small file of the cache that cannot be used, so that its owner recreates it. Logs the loss.

    A directory in its place, and with `keep` anything else, is renamed: `REPLACED` and a number are added to its name.
    """
    with contextlib.suppress(FileNotFoundError):
        if keep or stat.S_ISDIR(os.lstat(path).st_mode):
            os.rename(path, path.with_name(f"{path.name}{REPLACED}{time.time_ns()}"))
        else:
            os.unlink(path)
    detail = f"it {why}" + (f"; lost: {lost}" if lost else "")
    emit(Event(name="cache.file.recreated", subject=str(path), detail=detail))
    _log.warning("%s is recreated: %s", path, detail)


def opener(path: str, flags: int) -> int:
    """For `open(..., opener=opener)`: does not follow links, does not wait for a FIFO, and creates private files."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)


def read_file(path: Path) -> bytes:
    """The content of a file. Does not follow links. Raises `OSError`, `ELOOP` for a link."""
    with open(path, "rb", opener=opener) as file:
        return file.read()


def new_file(path: Path) -> int:
    """A descriptor to write a new file at this path, in place of any other. Raises `OSError`."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        recreate(path, "is not a file")
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file atomically. Its content is flushed: otherwise it may be empty after a crash of the machine.

    For one writer at a time: the temporary name is that of the file with `.new` added. Raises `OSError`.
    """
    temporary = path.with_name(f"{path.name}.new")
    with open(new_file(temporary), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _require_no_link(path: Path, status: os.stat_result) -> None:
    if stat.S_ISLNK(status.st_mode):
        raise StorageError(
            f"{path}: is a symbolic link, which is not followed",
            next_step="remove it; to keep the cache elsewhere, set 'cache_dir' to that directory",
        )


def _require_own(path: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise StorageError(f"{path}: belongs to another user", next_step="choose another 'cache_dir'")
