"""What goes wrong with local files, in our own errors."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from millrace.errors import DiskFullError, MillraceError, StorageError


class LostDataError(StorageError):
    """The index and the files do not agree: somebody else removed or cut a file. Handled inside the cache."""

    code = "lost-data"


class FailingDiskError(StorageError):
    """The device does not answer, or takes no writes any more (EIO, EROFS and the like). Handled inside the cache."""

    code = "failing-disk"


_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
FAILING_ERRNOS = (errno.EIO, errno.EROFS, errno.ENODEV, errno.EUCLEAN, errno.ESTALE)
"""What a device in trouble answers; ext4 and xfs give the first two after they have shut down."""

NO_FILE_ERRNOS = (errno.EISDIR, errno.ELOOP, errno.ENOTDIR, errno.ENXIO, errno.ESPIPE)
"""What opening (following no link, waiting for nobody) or reading answers where something else has taken a file's place."""


@contextmanager
def disk_errors(path: str | Path) -> Iterator[None]:
    """Turn the operating system's errors on a local file into ours."""
    try:
        yield
    except OSError as error:
        if isinstance(error, MillraceError):
            raise
        if error.errno in _FULL:
            raise DiskFullError(f"no room left for {path}", next_step="free disk space or lower 'capacity'") from error
        if error.errno in _NO_DESCRIPTORS:
            raise StorageError(f"{path}: {error.strerror}", next_step="raise the limit with 'ulimit -n'") from error
        kind = FailingDiskError if error.errno in FAILING_ERRNOS else StorageError
        raise kind(f"{path}: {error.strerror}", next_step="check the disk and its permissions") from error
