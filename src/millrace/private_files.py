"""Folders and files that are this user's alone: made so, looked at before they are believed, never reached through a link.

What lies in the cache decides which bytes a training job reads, and a node's folder holds the cluster's token. So every
folder is 0700 and every file 0600, whatever the umask. Nobody but this user and root can then put anything there; what may
have been put there before (in a folder that was once open to others) is found by looking without following links.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from pathlib import Path

from millrace.errors import StorageError
from millrace.events import Event, emit

_log = logging.getLogger("millrace")

_FOLDER_MODE = 0o700
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def make_folder(directory: Path) -> None:
    """Have a folder of this user, closed to others, at `directory`: `find_folder`, then `close_folder`."""
    find_folder(directory)
    close_folder(directory)


def find_folder(directory: Path) -> None:
    """Make `directory` and the folders above it that are missing, each for this user alone; or take one that is there.

    Raises `StorageError` for a link, for what is no folder, and for what belongs to another user; `OSError`.
    """
    _make(directory)
    require_folder(directory)


def _make(directory: Path) -> None:
    """As `Path.mkdir(parents=True)`, which gives the folders above the mode that the umask leaves."""
    try:
        os.mkdir(directory, _FOLDER_MODE)
    except FileNotFoundError:
        if not directory.parent.exists():  # in /proc, for one, it is there
            _make(directory.parent)
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory, _FOLDER_MODE)
    except FileExistsError:
        pass


def close_folder(directory: Path) -> bool:
    """Close a folder of this user to others, and tell it where it was open.

    Gives whether *every* user of the machine could write to it: then what is in it proves nothing. (A group that may is
    somebody's decision: Kubernetes gives volumes to groups.) Raises as `find_folder`.
    """
    status = require_folder(directory)
    open_to_others = stat.S_IMODE(status.st_mode) & _OTHERS
    if not open_to_others:
        return False
    # Not by its name: that could be a link by now.
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
    """Raise `StorageError` unless this is a folder of this user, and no link. Raises `FileNotFoundError`."""
    status = os.lstat(directory)
    _require_no_link(directory, status)
    if not stat.S_ISDIR(status.st_mode):
        raise StorageError(f"{directory} is no folder", next_step="remove it, or choose another 'cache_dir'")
    _require_own(directory, status)
    return status


def require_file(path: Path, *, alone: bool = False) -> None:
    """Raise `StorageError` where something lies at `path` that is no file of this user. Nothing there is right, too.

    With `alone` it must have no other name: a hard link would make us write into another file of this user.
    """
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return
    _require_no_link(path, status)
    if not stat.S_ISREG(status.st_mode):
        raise StorageError(f"{path} is no file", next_step="remove it: Millrace has not put it there")
    if alone and status.st_nlink > 1:
        raise StorageError(f"{path} is another file's, too (a hard link)", next_step="remove it here")
    _require_own(path, status)


def opener(path: str, flags: int) -> int:
    """For `open(..., opener=opener)`: follows no link, waits for nobody where there is no file, makes one for this user."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)


def read_file(path: Path) -> bytes:
    """What a file holds, not through a link. Raises `OSError`, `ELOOP` for a link."""
    with open(path, "rb", opener=opener) as file:
        return file.read()


def new_file(path: Path) -> int:
    """A descriptor to write a new file of this name; what has the name goes. Raises `OSError`."""
    path.unlink(missing_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


def _require_no_link(path: Path, status: os.stat_result) -> None:
    if stat.S_ISLNK(status.st_mode):
        raise StorageError(
            f"{path} is a symbolic link, which is not followed",
            next_step="remove it; to keep the cache elsewhere name that place in 'cache_dir'",
        )


def _require_own(path: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise StorageError(f"{path} belongs to another user", next_step="choose another 'cache_dir'")
