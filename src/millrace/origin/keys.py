"""Checks of keys before any request: names that no storage accepts, and places where no local file can be."""

from __future__ import annotations

import errno
import os
import re
import stat
import tempfile

from millrace.errors import (
    ConfigurationError,
    DeniedError,
    IsDirectoryError,
    NotDirectoryError,
    ObjectNotFoundError,
    UsageError,
)

UNUSABLE_CHARACTERS = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
"""Control characters, and bytes that are not UTF-8, as Python keeps them in a string."""

UNUSABLE_IN_PATHS = re.compile(rf"{UNUSABLE_CHARACTERS.pattern}|(?:^|/)\.{{0,2}}(?:/|$)")
"""Also empty parts, `.` and `..`, which a URL or a file system resolves to another name."""

OBJECT_STORES = frozenset({"s3", "az", "gs", "file"})
"""The schemes whose names `check_name` checks."""

# Others, such as a space, cause a panic of obstore. Access points have colons, some containers of Azure a dollar sign.
_BUCKET = re.compile(r"[A-Za-z0-9._:$-]+")

# The longest keys of all clouds, and the longest paths and parts of paths in Linux, in bytes of UTF-8.
_KEY_BYTES = 1024
_PATH_BYTES = 4095
_PART_BYTES = 255

# File systems (by device number) that can store a file, or refuse one with an error that obstore reports.
_known: set[int] = set()


def bucket_word(scheme: str) -> str:
    """The service's word for a bucket."""
    return "container" if scheme == "az" else "bucket"


def check_name(scheme: str, key: str) -> tuple[str, str]:
    """Split `key` of an object store into its bucket, empty for local files, and the path inside. Makes no request.

    Raises `ObjectNotFoundError` if no object and no prefix can have this name, `ConfigurationError` without a bucket.
    """
    name = key.strip("/")
    bucket, _, path = ("", "", name) if scheme == "file" else name.partition("/")
    if scheme != "file":
        word = bucket_word(scheme)
        if not bucket:
            raise ConfigurationError(
                f"{scheme}:// without a {word}",
                next_step=f"{word}s cannot be listed; write {scheme}://{word}/key",
            )
        if not _BUCKET.fullmatch(bucket):
            pattern = any(each in bucket for each in "*?[")
            raise ObjectNotFoundError(
                f"{scheme}://{bucket} is not the name of a {word}",
                next_step=f"{word}s cannot be listed; put patterns after the name of one"
                if pattern
                else "check the name",
            )
    if name and UNUSABLE_IN_PATHS.search(name):  # the error of obstore would not name it
        raise ObjectNotFoundError(
            f"{scheme}://{key} is not a valid object name",
            next_step="use UTF-8 without control characters, and no empty, '.' or '..' parts",
        )
    if scheme == "az" and "\\" in name:
        raise ObjectNotFoundError(
            f"az://{key} is not a valid object name", next_step="remove the backslash: Azure replaces it by a slash"
        )
    if _is_too_long(scheme, path):
        raise ObjectNotFoundError(
            f"{scheme}://{key[:64]}... is not a valid object name", next_step="use a shorter name"
        )
    return bucket, path


def _is_too_long(scheme: str, path: str) -> bool:
    """Whether the path is longer than any name of this scheme's storages."""
    if len(path) * 4 <= _PART_BYTES:
        return False
    size = len(path.encode())
    if scheme != "file":
        return size > _KEY_BYTES
    return size > _PATH_BYTES or any(len(part.encode()) > _PART_BYTES for part in path.split("/"))


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
