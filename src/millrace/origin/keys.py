"""Checks before any request: characters that no name has, and places where no local file can be."""

from __future__ import annotations

import errno
import os
import re
import stat
import tempfile

from millrace.errors import (
    DeniedError,
    IsDirectoryError,
    NotDirectoryError,
    UsageError,
)

UNUSABLE_CHARACTERS = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
"""Control characters, and bytes that are not UTF-8, as Python keeps them in a string."""

UNUSABLE_IN_PATHS = re.compile(rf"{UNUSABLE_CHARACTERS.pattern}|(?:^|/)\.{{0,2}}(?:/|$)")
"""Also empty parts, `.` and `..`, which a URL or a file system resolves to another name."""

# File systems (by device number) that can store a file, or refuse one with an error that obstore reports.
_known: set[int] = set()


def bucket_word(scheme: str) -> str:
    """The service's word for a bucket."""
    return "container" if scheme == "az" else "bucket"


# obstore retries forever if the kernel reports "no such file" for a directory that exists, as /proc does.


def check_readable(path: str) -> None:
    """Raise `FileNotFoundError` for a directory, and `UsageError` for a pipe or device, for which obstore would wait."""
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return  # obstore gets the same error and reports it
    if stat.S_ISDIR(mode):
        raise FileNotFoundError(path)
    if not stat.S_ISREG(mode):
        raise UsageError(
            f"file://{path} is not a regular file", next_step="read pipes and devices with Python's open()"
        )


def check_place(path: str) -> None:
    """Raise an error if no file can be created at `path`.

    `IsDirectoryError` for a directory, `UsageError` for a pipe or device, which the file would replace, `NotDirectoryError`
    below a file, `DeniedError` on a file system without files.
    Takes a few microseconds. For the first write to a file system it creates an unnamed file. Thread-safe.
    """
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):  # no such file; or obstore gets the same error and reports it
        mode = stat.S_IFREG
    if stat.S_ISDIR(mode):
        raise IsDirectoryError(f"file://{path} is a directory", next_step="name a file in it")
    if not stat.S_ISREG(mode):
        raise UsageError(
            f"file://{path} is not a regular file", next_step="write to pipes and devices with Python's open()"
        )
    folder = os.path.dirname(path)
    while True:
        try:
            status = os.stat(folder)
            break
        except (FileNotFoundError, NotADirectoryError):
            folder = os.path.dirname(folder)
        except OSError:
            return  # obstore gets the same error and reports it
    if not os.path.isdir(folder):
        raise NotDirectoryError(f"file://{path} is below {folder}, which is a file", next_step="choose another name")
    if status.st_dev in _known:
        return
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        if error.errno == errno.ENOENT and os.path.isdir(folder):
            raise DeniedError(
                f"file://{path} cannot be created: {folder} cannot contain files", next_step="choose another directory"
            ) from error
        return  # obstore gets the same error and reports it
    _known.add(status.st_dev)
