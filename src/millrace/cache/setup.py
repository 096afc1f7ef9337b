"""Opening a store directory: recognise, refuse, empty, rebuild or create what lies there.

`FORMAT` names the format and the boot of the machine that wrote the index. It is flushed when it is written, once a boot.
What a crash can leave of it all the same (nothing, zeros, its beginning) names no boot: then the index is not believed, as
after every other start of the machine. All of this happens under one lock, so the first process does it and the others wait.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import time
from pathlib import Path

from millrace.cache.environment import DATA_NAME, DamagedIndexError
from millrace.cache.failures import disk_errors
from millrace.cache.index import SIGNALS_NAME, Index
from millrace.cache.rules_file import NEW_RULES_NAME, RULES_NAME
from millrace.errors import ConfigurationError, StorageError, UnsupportedFormatError
from millrace.events import Event, emit
from millrace.private_files import (
    close_folder,
    find_folder,
    new_file,
    opener,
    read_file,
    require_file,
    require_folder,
)

_log = logging.getLogger("millrace")

FORMAT_NAME = "millrace-store"
FORMAT_VERSION = 2
_FORMAT_LINE = f"{FORMAT_NAME} {FORMAT_VERSION}\n"
_OLD_FORMAT = f"{FORMAT_NAME} 1"

_MARKER = "FORMAT"
_LOCK = "setup.lock"
_PATIENCE_SECONDS = 15.0
_LOOK_SECONDS = 0.003
_DATA_FOLDERS = ("objects", "segments")
_FILES = (_MARKER, "locks", _LOCK, RULES_NAME)
_OWN_NAMES = frozenset({*_FILES, f"{_MARKER}.new", "index", *_DATA_FOLDERS, "counters", NEW_RULES_NAME})


def open_directory(directory: Path) -> Index:
    """Make the store in `directory` ready, and open its index.

    Raises `ConfigurationError` or `UnsupportedFormatError` when the directory holds something else, which is left as it
    is, and `StorageError` when it cannot be used.
    """
    waiting_since = time.monotonic()
    with disk_errors(directory):
        find_folder(directory)
        require_file(directory / _LOCK)
        with open(directory / _LOCK, "a", encoding="ascii", opener=opener) as lock:
            _take(lock.fileno(), directory)
            _require_format(directory, _read_marker(directory))  # before anything is changed
            if close_folder(directory):
                _discard(directory, ("index", *_DATA_FOLDERS), "every user of this machine could write there")
            _require_plain(directory)
            return _open(directory, waiting_since)


def _take(lock: int, directory: Path) -> None:
    """Wait for the lock of the set-up: for as long as whoever has it goes on, which the time of its file tells."""
    deadline, touched = 0.0, 0
    while True:
        try:
            # This kind of lock is not inherited: a child that is forked meanwhile does not hold it for ever.
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.utime(lock)
            return
        except (BlockingIOError, PermissionError) as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
        now, last = time.monotonic(), touched
        touched = os.fstat(lock).st_mtime_ns
        if touched != last:
            deadline = now + _PATIENCE_SECONDS
        if now > deadline:
            raise StorageError(
                f"the process that sets up the cache in {directory} does not go on",
                next_step="continue or end processes that are stopped (state T in 'ps')",
            )
        time.sleep(_LOOK_SECONDS)


def check_directory(directory: Path) -> None:
    """Raise what `open_directory` would because of what lies in `directory`, if it is there. Changes nothing."""
    if directory.exists():
        with disk_errors(directory):
            require_folder(directory)
            _require_plain(directory)
            _require_format(directory, _read_marker(directory))


def boot_id() -> str:
    """What tells this boot of the machine from others."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _require_plain(directory: Path) -> None:
    """Raise `StorageError` where a link, or something of another user, has the name of a part of the store.

    Only names through which something is read or written by path; data files are opened without following links each time.
    """
    folders = [directory / name for name in ("index", "counters", *_DATA_FOLDERS)]
    for folder in folders:
        with contextlib.suppress(FileNotFoundError):
            require_folder(folder)
    with contextlib.suppress(FileNotFoundError), os.scandir(directory / "objects") as found:
        for entry in found:
            if entry.is_symlink() and len(entry.name) == 2:  # other names are never opened
                require_folder(Path(entry.path))
    for name in (*_FILES, f"index/{SIGNALS_NAME}"):
        require_file(directory / name, alone=True)
    with contextlib.suppress(FileNotFoundError), os.scandir(directory / "index") as found:
        for entry in found:
            if not entry.is_file(follow_symlinks=False):
                require_file(Path(entry.path))


def _require_format(directory: Path, lines: list[str]) -> None:
    if lines and lines[0] not in (_OLD_FORMAT, f"{FORMAT_NAME} {FORMAT_VERSION}"):
        raise UnsupportedFormatError(
            f"{directory} has the format {lines[0][:60]!r}, this version reads '{FORMAT_NAME} {FORMAT_VERSION}'",
            next_step="choose another 'cache_dir', or remove this one",
        )


def _open(directory: Path, waiting_since: float) -> Index:
    lines = _read_marker(directory)
    _require_format(directory, lines)
    if lines and lines[0] == _OLD_FORMAT:
        # Never released, so nobody's data: what it holds is fetched again.
        _discard(directory, ("index", *_DATA_FOLDERS), "written in format 1, which this version does not read")
        lines = []
    for name in ("counters", *_DATA_FOLDERS):
        (directory / name).mkdir(mode=0o700, exist_ok=True)
    boot = boot_id()
    if lines[1:] != [boot, ""]:  # to the last newline
        if (directory / "index").exists():
            _discard(directory, ("index",), "not flushed before the last start of this machine")
        _write_marker(directory, boot)
    return _open_index(directory, waiting_since)


def _open_index(directory: Path, waiting_since: float) -> Index:
    """The index; a new one, built from the files, where it is gone, damaged, or was never finished."""
    folder = directory / "index"
    if (folder / DATA_NAME).exists():
        try:
            # Who opens the store holds others up meanwhile, so these count the time that they have waited for that.
            index = Index(folder, waiting_since=waiting_since)
        except DamagedIndexError as error:
            reason = str(error)
        else:
            if index.built:
                return index
            index.close()
            reason = "it was not finished"
        _discard(directory, ("index",), reason)
    elif folder.exists():
        # Without the data, what lies beside it (locks, signals) belongs to processes that still use the deleted one.
        shutil.rmtree(folder)
    from millrace.cache.rebuild import rebuild  # once in the life of a store, not in every process that opens it

    folder.mkdir(mode=0o700)
    index = Index(folder)
    try:
        rebuild(directory, index, goes_on=lambda: os.utime(directory / _LOCK))
    except BaseException:
        index.close()
        raise
    return index


def _read_marker(directory: Path) -> list[str]:
    """The lines of `FORMAT`, with what follows the last newline.

    None where there is no store yet, and where a crash of the machine has left nothing of the marker, or a part that says
    nothing. Refuses what was not made by us.
    """
    marker = directory / _MARKER
    require_file(marker)
    try:
        data = read_file(marker)
    except FileNotFoundError:
        data = b""
    if _says_nothing(data):
        foreign = sorted(set(os.listdir(directory)) - _OWN_NAMES)
        if foreign:
            raise ConfigurationError(
                f"{directory} is no cache directory (it holds {foreign[0]!r})",
                next_step="choose an empty directory for 'cache_dir'",
            )
        return []
    try:
        return data.decode("ascii").split("\n")
    except UnicodeDecodeError as error:
        raise UnsupportedFormatError(
            f"{marker} was not written by Millrace", next_step="choose another 'cache_dir'"
        ) from error


def _says_nothing(marker: bytes) -> bool:
    """Whether this may be all that a crash has left of our marker: less than the line of the format, and zeros behind it."""
    return _FORMAT_LINE.encode().startswith(marker.rstrip(b"\0"))


def _write_marker(directory: Path, boot: str) -> None:
    """Have `FORMAT` name this boot, on the disk itself when this returns: a crash would leave a name without content."""
    temporary = directory / f"{_MARKER}.new"
    with open(new_file(temporary), "w", encoding="ascii") as file:
        file.write(f"{_FORMAT_LINE}{boot}\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, directory / _MARKER)
    _flush_folder(directory)


def _flush_folder(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems know no such thing. Then the old marker may come back, which names another boot.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _discard(directory: Path, names: tuple[str, ...], reason: str) -> None:
    """Remove folders of the store, and say so."""
    there = [name for name in names if os.path.lexists(directory / name)]
    for name in there:
        if (directory / name).is_symlink():
            (directory / name).unlink()
        else:
            shutil.rmtree(directory / name)
    if there:
        what = "the index" if there == ["index"] else "what was cached"
        emit(Event(name="cache.store.discarded", subject=str(directory), detail=f"{what}: {reason}"))
        _log.warning("the cache in %s gives up %s: %s", directory, what, reason)
