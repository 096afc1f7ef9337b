"""Opens a store directory: recognises, refuses, empties, rebuilds or creates it.

`FORMAT` names the format and the boot of the machine that wrote the index. It is flushed when it is written, once a boot. A
crash may still leave nothing of it, zeros, or its beginning. These name no boot, so the index is rebuilt, as after every
other start of the machine. All of this happens under one lock: the first process does it and the others wait.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from millrace.errors import ConfigurationError, StorageError, UnsupportedFormatError
from millrace.events import Event, emit
from millrace.runtime.failures import disk_errors
from millrace.runtime.locks import FileLock
from millrace.runtime.private_files import (
    REPLACED,
    close_folder,
    find_folder,
    make_way,
    read_file,
    replace_file,
    require_file,
    require_folder,
)
from millrace.store.environment import DAMAGED_NAME, DATA_NAME, DamagedIndexError
from millrace.store.index import Index
from millrace.store.signals import Signals, died_inside, is_worth_a_check, note_check, retire
from millrace.store.transactions import SIGNALS_NAME

_log = logging.getLogger("millrace.store")

FORMAT_NAME = "millrace-store"
FORMAT_VERSION = 4
_FORMAT_LINE = f"{FORMAT_NAME} {FORMAT_VERSION}\n"
_OLD_FORMATS = tuple(f"{FORMAT_NAME} {number}" for number in range(1, FORMAT_VERSION))

FOLDERS_NAME = "folders"
RULES_NAME = "rules.json"
RULES_TEXT = "the pins, quotas, times to live and the size that were set for this cache"

Rebuild = Callable[[Path, Index], object]
"""Fills a new index from the files of the store in a directory. Raises `StorageError`."""

_MARKER = "FORMAT"
_PROCEED = (
    "choose another 'cache_dir'; or, if this directory holds only a cache, remove the directory: the cache is "
    "filled again"
)
_LOCK = "setup.lock"
_LONGEST_CHECK_SECONDS = 300.0
_EXIT_DAMAGED, _EXIT_UNKNOWN = 1, 3
_CHECK_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]);"
    "from millrace.store.setup import check_index; check_index()"
)
_DATA_FOLDERS = ("objects", "segments")
REPLICAS_NAME = "replicas"
_FOLDERS = ("index", "counters", REPLICAS_NAME, FOLDERS_NAME, *_DATA_FOLDERS)
_FILES = (_MARKER, "locks", _LOCK, RULES_NAME)
_OWN_NAMES = frozenset({*_FILES, f"{_MARKER}.new", *_FOLDERS, f"{RULES_NAME}.new"})


def open_directory(directory: Path, rebuild: Rebuild, *, on_dropped: Callable[[], None] = lambda: None) -> Index:
    """Prepare the store in `directory`, and open its index. `rebuild` fills a new index.

    Raises `ConfigurationError` or `UnsupportedFormatError` when the directory holds something else, which is not changed,
    and `StorageError` when it cannot be used. `on_dropped` as for `Index`.
    """
    with disk_errors(directory):
        find_folder(directory)
        make_way(directory / _LOCK)
        require_file(directory / _LOCK, alone=True)  # heartbeats are written to it
        # Without a limit: a rebuild may take long.
        lock = FileLock(directory / _LOCK, f"the process that sets up the cache in {directory}", limit=math.inf)
        with closing(lock), lock.threads, lock:
            _require_format(directory, _read_marker(directory))  # before anything is changed
            if close_folder(directory):
                every_user = "every user of this machine could write there"
                _discard(directory, ("index", REPLICAS_NAME, *_DATA_FOLDERS), every_user)
            _require_plain(directory)
            _make_way(directory)
            return _open(directory, rebuild, on_dropped)


def check_directory(directory: Path) -> None:
    """Raise the errors of `open_directory` that the content of `directory` causes, if it exists. Changes nothing."""
    with disk_errors(directory):
        if directory.exists():
            require_folder(directory)
            _require_plain(directory)
            _require_format(directory, _read_marker(directory))


def expire_metadata(directory: Path, moment: float) -> None:
    """Expire the metadata that was requested before `moment` in the store in `directory`, if it exists, without opening it.

    For a process that cannot open it, but has written to the origin. Raises the errors of `check_directory`.
    """
    check_directory(directory)
    path = directory / "index" / SIGNALS_NAME
    with disk_errors(directory):
        if path.exists():
            Signals(path).expire_metadata(moment)


def boot_id() -> str:
    """The id of this boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _require_plain(directory: Path) -> None:
    """Raise `StorageError` when a part of the store is a link, or belongs to another user.

    Checks only names that are read or written by path. Data files are opened without following links.
    """
    folders = [directory / name for name in _FOLDERS]
    for folder in folders:
        require_file(folder)
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(directory / "objects") as entries:
        for entry in entries:
            if entry.is_symlink() and len(entry.name) == 2:  # other names are never opened
                require_folder(Path(entry.path))
    for name in (*_FILES, f"index/{SIGNALS_NAME}"):
        require_file(directory / name, alone=True)
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(directory / "index") as entries:
        for entry in entries:
            if not entry.is_file(follow_symlinks=False):
                require_file(Path(entry.path))


def _make_way(directory: Path) -> None:
    """Move aside anything that is in the place of a part of the store."""
    for name in _FOLDERS:
        make_way(directory / name, folder=True)
    for name in _FILES:
        make_way(directory / name, lost=RULES_TEXT if name == RULES_NAME else "")


def _require_format(directory: Path, lines: list[str]) -> None:
    if lines and lines[0] not in (*_OLD_FORMATS, f"{FORMAT_NAME} {FORMAT_VERSION}"):
        raise UnsupportedFormatError(
            f"{directory}: has the format {lines[0][:60]!r}, this version reads '{FORMAT_NAME} {FORMAT_VERSION}'",
            next_step=_PROCEED,
        )


def _open(directory: Path, rebuild: Rebuild, on_dropped: Callable[[], None]) -> Index:
    lines = _read_marker(directory)
    _require_format(directory, lines)
    if lines and lines[0] in _OLD_FORMATS:
        old = lines[0].removeprefix(f"{FORMAT_NAME} ")
        reason = f"written in format {old}, this version writes format {FORMAT_VERSION}"
        _discard(directory, ("index", *_DATA_FOLDERS, "counters"), reason)
        lines = []
    for name in ("counters", *_DATA_FOLDERS):
        (directory / name).mkdir(mode=0o700, exist_ok=True)
    boot = boot_id()
    if lines[1:] != [boot, ""]:  # to the last newline
        if (directory / "index").exists():
            _discard(directory, ("index",), "not flushed before the last start of this machine")
        _write_marker(directory, boot)
    return _open_index(directory, rebuild, on_dropped)


def _open_index(directory: Path, rebuild: Rebuild, on_dropped: Callable[[], None]) -> Index:
    """The index; a new one, built from the files, if it is missing, damaged, or was not finished."""
    folder = directory / "index"
    if (folder / DATA_NAME).exists():
        try:
            _require_undamaged(directory, folder)
            index = Index(folder, on_dropped=on_dropped)
        except DamagedIndexError as error:
            reason = str(error)
        else:
            if index.built:
                return index
            index.close()
            reason = "it was not finished"
        _discard(directory, ("index",), reason)
    elif folder.exists():
        # Without the data file, the files next to it (locks, signals) belong to processes that still use the deleted one.
        shutil.rmtree(folder)
    folder.mkdir(mode=0o700)
    index = Index(folder, on_dropped=on_dropped)
    try:
        rebuild(directory, index)
    except BaseException:
        index.close()
        raise
    return index


def _require_undamaged(directory: Path, folder: Path) -> None:
    """Raise `DamagedIndexError` if a process found the index damaged, or LMDB ended a process because of it."""
    if (folder / DAMAGED_NAME).exists():
        raise DamagedIndexError("a process found it damaged")
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.is_file(follow_symlinks=False):
                raise DamagedIndexError(f"{entry.name} is not a file")
            make_way(Path(entry.path))
    signals = Signals(folder / SIGNALS_NAME)
    died = died_inside(signals)
    if not died:
        return
    intact = is_worth_a_check(signals) and is_intact(folder)
    if intact:
        note_check(signals, died)
    elif intact is False:  # otherwise opening it fails for the same reason, and a later process checks it
        raise DamagedIndexError("a process died in a transaction on it, and it did not pass a check")


def _read_marker(directory: Path) -> list[str]:
    """The lines of `FORMAT`, with the rest after the last newline.

    An empty list when there is no store yet, or a crash of the machine has left nothing usable of the marker. Raises
    `ConfigurationError` or `UnsupportedFormatError` when Millrace has not made the directory.
    """
    marker = directory / _MARKER
    require_file(marker)
    try:
        data = read_file(marker)
    except FileNotFoundError:
        data = b""
    except OSError as error:
        raise UnsupportedFormatError(f"{marker}: cannot be read ({error.strerror})", next_step=_PROCEED) from error
    if _is_torn(data):
        foreign = sorted(name for name in os.listdir(directory) if name.partition(REPLACED)[0] not in _OWN_NAMES)
        if foreign:
            raise ConfigurationError(
                f"{directory}: is not a cache directory (it holds {foreign[0]!r})",
                next_step="choose an empty directory for 'cache_dir'",
            )
        return []
    try:
        return data.decode("ascii").split("\n")
    except UnicodeDecodeError as error:
        raise UnsupportedFormatError(f"{marker}: was not written by Millrace", next_step=_PROCEED) from error


def _is_torn(marker: bytes) -> bool:
    """Whether a crash may have left this of our marker: less than the line of the format, followed by zeros."""
    return _FORMAT_LINE.encode().startswith(marker.rstrip(b"\0"))


def _write_marker(directory: Path, boot: str) -> None:
    """Write this boot to `FORMAT`, and flush it: otherwise a crash would leave a name without content."""
    replace_file(directory / _MARKER, f"{_FORMAT_LINE}{boot}\n".encode("ascii"))
    _flush_folder(directory)


def _flush_folder(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems do not support this. Then the old marker may return, which names another boot.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _discard(directory: Path, names: tuple[str, ...], reason: str) -> None:
    """Remove parts of the store, and report it."""
    found = [name for name in names if os.path.lexists(directory / name)]
    if "index" in found and (directory / "index" / SIGNALS_NAME).is_file():
        with contextlib.suppress(StorageError):  # a page that cannot be mapped is not in use
            retire(Signals(directory / "index" / SIGNALS_NAME))
    for name in found:
        if (directory / name).is_symlink() or not (directory / name).is_dir():
            (directory / name).unlink()
        else:
            shutil.rmtree(directory / name)
    if found:
        what = "the index" if found == ["index"] else "its content"
        emit(Event(name="cache.store.discarded", subject=str(directory), detail=f"{what}: {reason}"))
        _log.warning("the cache in %s discards %s: %s", directory, what, reason)


def check_index() -> None:
    """The main function of a process that reads every record of the index in the directory `argv[2]`, and writes to it."""
    try:
        index = Index(Path(sys.argv[2]))
        index.exercise()
    except DamagedIndexError:
        sys.exit(_EXIT_DAMAGED)
    except StorageError:  # a process that writes is stopped, or the disk is full
        sys.exit(_EXIT_UNKNOWN)


def is_intact(folder: Path) -> bool | None:
    """Whether another process, which LMDB may end, can read and write the index in `folder`.

    None when a stopped process or the disk prevents the check.
    """
    command = [sys.executable, "-c", _CHECK_PROGRAM, json.dumps(sys.path), str(folder)]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_LONGEST_CHECK_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):  # no interpreter, or no memory for one: a rebuild is always right
        return False
    return None if done.returncode == _EXIT_UNKNOWN else done.returncode == 0
