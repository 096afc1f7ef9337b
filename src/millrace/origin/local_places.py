"""Whether a local file can be made where a key says, asked before obstore is.

obstore tries again for ever where the kernel says "no such file" of a directory that exists, as /proc does.
"""

from __future__ import annotations

import errno
import os
import tempfile

from millrace.errors import DeniedError, IsDirectoryError, UsageError

# File systems (by device number) on which a file was made, or refused for a reason that obstore can tell.
_known: set[int] = set()


def check_place(path: str) -> None:
    """Raise `IsDirectoryError` where `path` is a directory, `UsageError` below a file, `DeniedError` where none can be made.

    A few microseconds; once for every file system that is written to, a file without a name is made. Thread-safe.
    """
    if os.path.isdir(path):
        raise IsDirectoryError(f"file://{path} is a directory", next_step="name a file in it")
    folder = os.path.dirname(path)
    while True:
        try:
            about = os.stat(folder)
            break
        except NotADirectoryError:
            folder = os.path.dirname(folder)
        except FileNotFoundError:
            folder = os.path.dirname(folder)
        except OSError:
            return  # obstore is refused as well, and says why
    if not os.path.isdir(folder):
        raise UsageError(f"file://{path} lies below {folder}, which is a file", next_step="choose another name")
    if about.st_dev in _known:
        return
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        if error.errno == errno.ENOENT and os.path.isdir(folder):
            raise DeniedError(
                f"file://{path} cannot be made: no files can be in {folder}", next_step="choose another directory"
            ) from error
        return  # obstore is refused as well, and says why
    _known.add(about.st_dev)
