"""Giving a finished file its name only if nobody has that name: the one step on a file system that has a single winner."""

from __future__ import annotations

import ctypes
import errno
import os

# How file systems say that they have no hard links: FAT, and some in user space.
_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EMLINK})
_AT_FDCWD, _RENAME_NOREPLACE = -100, 1


def move_new(temporary: str, path: str) -> None:
    """Rename `temporary` to `path`, in one atomic step. Raises `FileExistsError` when that name is taken."""
    try:
        # A plain rename would replace what has the name.
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        _rename_new(temporary, path)
        return
    os.unlink(temporary)


def _rename_new(temporary: str, path: str) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    source, target = os.fsencode(temporary), os.fsencode(path)
    if library.renameat2(_AT_FDCWD, source, _AT_FDCWD, target, _RENAME_NOREPLACE) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
