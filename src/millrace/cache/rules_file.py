"""The file `rules.json` of a store: what `resize`, `pin` and `limit` decided, for every process that uses the store.

It lies beside the index, not in it, since the index is rebuilt from data files after a crash. A change is written aside and
renamed, under a lock of the store's directory, so a reader sees the old rules or the new ones.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from millrace.cache.rules import NO_RULES, Rules, decode, encode
from millrace.errors import MillraceError, StorageError
from millrace.events import Event, emit
from millrace.private_files import new_file, read_file

RULES_NAME = "rules.json"
NEW_RULES_NAME = "rules.json.new"

_LOOK_EVERY_SECONDS = 0.5

_log = logging.getLogger("millrace")


class RulesFile:
    """The rules of the store in `directory`. Thread- and process-safe. Nothing is opened between two calls.

    What cannot be read is reported once, and the last rules that could be read go on holding: a damaged file costs no read.
    One of which nothing is left (it is empty, or all zeros) is replaced by the next change; any other is left to be mended.
    """

    def __init__(self, directory: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._directory = directory
        self._path = directory / RULES_NAME
        self._clock = clock
        self._lock = threading.Lock()
        self._rules = NO_RULES
        self._seen: tuple[int, ...] | None = None
        self._look_at = -1.0

    def current(self) -> Rules:
        """The rules, at most half a second old; asks the disk no oftener than that."""
        if self._clock() < self._look_at:
            return self._rules
        with self._lock:
            self._look_at = self._clock() + _LOOK_EVERY_SECONDS
            self._look()
        return self._rules

    def change(self, edit: Callable[[Rules], Rules]) -> Rules:
        """Replace the rules by `edit` of the newest ones; returns them. Nothing is written where nothing changes.

        Raises `UnsupportedFormatError` or `StorageError` when the file cannot be read, and `StorageError` when it cannot be
        written; the old rules then hold.
        """
        with self._lock:
            try:
                directory = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    fcntl.flock(directory, fcntl.LOCK_EX)
                    blank = self._is_blank()
                    old = self._rules if blank else self._read()
                    new = edit(old)
                    if new != old or blank:
                        self._write(encode(new))
                        os.fsync(directory)
                finally:
                    os.close(directory)  # ends the lock
            except OSError as error:
                if isinstance(error, MillraceError):
                    raise
                raise StorageError(
                    f"{self._path}: {error.strerror}", next_step="check the disk and its permissions"
                ) from error
            self._rules, self._seen, self._look_at = new, None, -1.0
            return new

    def _write(self, data: bytes) -> None:
        temporary = self._directory / NEW_RULES_NAME
        descriptor = new_file(temporary)
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, self._path)

    def _look(self) -> None:
        try:
            about = os.stat(self._path)
            seen: tuple[int, ...] = (about.st_ino, about.st_mtime_ns, about.st_size)
        except FileNotFoundError:
            seen = ()
        except OSError as error:
            self._report(str(error.strerror))
            return
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._rules = self._read()
        except (MillraceError, OSError) as error:
            self._report(str(error))

    def _is_blank(self) -> bool:
        """Whether the file is there with nothing in it that somebody could mend."""
        try:
            return not read_file(self._path).strip(b"\0")
        except FileNotFoundError:
            return False

    def _read(self) -> Rules:
        try:
            data = read_file(self._path)
        except FileNotFoundError:
            return NO_RULES
        return decode(data, source=str(self._path))

    def _report(self, why: str) -> None:
        emit(Event(name="cache.rules.unreadable", subject=str(self._path), detail=why))
        _log.warning("the last known pins, quotas and size go on holding: %s", why)
