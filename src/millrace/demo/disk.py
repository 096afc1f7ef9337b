"""The operating system's errors on local files, as ours."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from millrace.errors import DiskFullError, MillraceError, StorageError


@contextmanager
def local_files(path: str | os.PathLike[str], *, next_step: str = "choose another --directory") -> Iterator[None]:
    """Turn an `OSError` of the block, which works on files in `path`, into `DiskFullError` or `StorageError`."""
    try:
        yield
    except MillraceError:
        raise
    except OSError as error:
        # The error knows better than we do which file it was.
        where = os.fspath(error.filename) if isinstance(error.filename, str | os.PathLike) else os.fspath(path)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFullError(f"no room left for {where}", next_step=f"free some, or {next_step}") from error
        raise StorageError(f"{where}: {error.strerror or error}", next_step=next_step) from error
