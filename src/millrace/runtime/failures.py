"""Errors of local files, as errors of Millrace."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from millrace.errors import DiskFullError, MillraceError, StorageError


class LostDataError(StorageError):
    """A file that the index records was removed or cut. Handled inside the cache."""

    code = "lost-data"


class FailingDiskError(StorageError):
    """The device fails, or does not accept writes any more (EIO, EROFS and the like). Handled inside the cache."""

    code = "failing-disk"


FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
FAILING_ERRNOS = (errno.EIO, errno.EROFS, errno.ENODEV, errno.EUCLEAN, errno.ESTALE)
"""The errors of a failing device; ext4 and xfs return the first two after they have shut down."""

NO_FILE_ERRNOS = (errno.EISDIR, errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.ESPIPE)
"""The errors of opening (without following links or waiting) or reading anything else in the place of a file."""


def reason_of(error: BaseException) -> str:
    """The text of an error for a log line: without the number that the operating system's have. Never empty."""
    if isinstance(error, MillraceError):
        return str(error)
    if isinstance(error, LookupError):  # its text is only the key
        return f"{type(error).__name__}: {error}"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


DEFECT = "a defect of Millrace, whose traceback is in the log"
"""The reason of an error that is logged with its traceback."""


@contextmanager
def disk_errors(path: str | Path) -> Iterator[None]:
    """Translate the operating system's errors on a local file."""
    try:
        yield
    except (OSError, OverflowError) as error:
        raise_disk_error(error, path)


def raise_disk_error(error: OSError | OverflowError, path: str | Path) -> NoReturn:
    """Raise the translation of an error, as `disk_errors` does. An error of Millrace is raised unchanged.

    For hot paths: entering `disk_errors` costs a microsecond, and `try` costs nothing.
    """
    try:
        if isinstance(error, MillraceError):
            raise error
        raise disk_error(error, path) from error
    finally:
        del error  # its traceback refers to this frame: a cycle would keep the frames, with their buffers


def disk_error(error: OSError | OverflowError, path: str | Path) -> StorageError:
    """The translation of an error of the operating system on a local file."""
    if isinstance(error, OverflowError) or error.errno == errno.EFBIG:  # the first is for a size that no file has
        return _too_large(path)
    if error.errno in FULL_ERRNOS:
        return DiskFullError(f"{path}: no space left on the disk", next_step="free disk space or lower 'capacity'")
    if error.errno in _NO_DESCRIPTORS:
        return StorageError(f"{path}: {error.strerror}", next_step="raise the limit with 'ulimit -n'")
    kind = FailingDiskError if error.errno in FAILING_ERRNOS else StorageError
    return kind(f"{path}: {error.strerror}", next_step="check the disk and its permissions")


def _too_large(path: str | Path) -> DiskFullError:
    """The disk is healthy: only this object is not stored."""
    return DiskFullError(f"{path}: larger than a file on this disk can be", next_step="use another file system")
