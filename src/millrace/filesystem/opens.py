"""From a path to an object: the key that a path names, and the results of recent opens of this process.

An open looks up the object of the path, whether all of it is cached, and where. With the result, the next open of the same
path costs about a microsecond. Results are valid until a write, a removal or an expiry of all metadata changes a number in a
page that all processes of the node map (`signals.py`), or until the metadata is stale. An entry contains those numbers and
that time, and a hit compares them instead of repeating the lookups.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pyarrow as pa
from fsspec.utils import stringify_path

from millrace.cache.eviction.usage import AccessRecord
from millrace.cache.reading.locations import NativeObject
from millrace.config import absolute_path
from millrace.errors import ObjectNotFoundError, StorageError, UsageError, shown_key
from millrace.events import Hooks
from millrace.origin.addresses import locate, require_same_place
from millrace.origin.keys import UNUSABLE_CHARACTERS
from millrace.origin.schemes import is_of_fsspec, refuse_password, service_of
from millrace.runtime import forks
from millrace.runtime.forks import importing
from millrace.store.maps import MapSlot, will_need
from millrace.store.records import Entry
from millrace.store.signals import Signals, Stamp

_log = logging.getLogger("millrace.filesystem")

# --- paths ----------------------------------------------------------------------------------------

OWN_SCHEME = "millrace"

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


class Paths:
    """The paths of one file system: with its own scheme or an alias, with `millrace://`, or without a scheme.

    A path with another scheme, account or host raises `UsageError`, because its meaning would be a guess.
    """

    def __init__(self, scheme: str, options: Mapping[str, Any], identity: str) -> None:
        service = service_of(scheme)
        self.aliases = service.aliases
        self.rooted = service.rooted
        """Whether keys are absolute paths of this machine rather than bucket/key."""
        self._scheme, self._options, self._identity = scheme, dict(options), identity
        self._is_azure = service.scheme == "az"
        self._begin = f"{scheme}://"
        if is_of_fsspec(service):
            with importing():
                from millrace.origin.fsspec_origin.clients import class_of

            # Libraries that read a host from a URL must find none before the path.
            self._begin += class_of(scheme).root_marker

    def strip(self, path: Any) -> Any:
        """The result of fsspec's `_strip_protocol`: a path or a list of paths without schemes; local ones are absolute."""
        if isinstance(path, list):
            return [self.strip(item) for item in path]
        text = text_of(path)
        if "://" in text:
            text = self._without_scheme(text)
        if not self.rooted:
            return text.strip("/")  # like listed names, or no pattern would match
        text = text.rstrip("/") if not text.startswith("/") else "/" + text.strip("/")
        if text.startswith("/") and "/." not in text and "//" not in text:
            return text
        return absolute_path(text)

    def key_of(self, path: str) -> str:
        """The key of `path` at the origin. A relative local path is resolved against the current directory.

        Raises `ObjectNotFoundError` for control characters and text that is not UTF-8: no origin has such a name, and the
        pages of the metadata use them.
        """
        if self.rooted:
            return _usable(str(self.strip(path)), self._begin)
        if isinstance(path, str) and "://" not in path:  # the usual case, on the path of every first open
            key = path.strip("/")
        else:
            key = str(self.strip(path)).strip("/")
        if ":" in key:
            refuse_password(self._scheme, key)
        if self._is_azure and "@" in key:  # pyarrow removes the scheme and keeps the account
            key = self._located(self._scheme, key)
        return _usable(key, self._begin)

    def normalized(self, path: str) -> str:
        """The path without its scheme, as pyarrow's `normalize_path` returns it. A relative local path stays relative."""
        if not self.rooted:
            return self.key_of(path)
        text = text_of(path)
        return self._without_scheme(text) if "://" in text else text

    def url_of(self, path: str) -> str:
        """The URL of a path, with the same key."""
        name = str(self.strip(path))
        return f"{self._scheme}://{name}" if self.rooted else self._begin + name.lstrip("/")

    def is_movable(self, path: str) -> bool:
        """Whether `path` is relative, so that its meaning depends on the current directory."""
        return self.rooted and not self.normalized(path).startswith("/")

    def _without_scheme(self, text: str) -> str:
        found = _SCHEME.match(text)
        if found is None:  # a key that contains "://"
            return text
        scheme, rest = found[1].lower(), text[found.end() :]
        if scheme == OWN_SCHEME:
            return rest
        if scheme not in self.aliases:
            raise UsageError(
                f"{scheme}:// paths do not belong to a file system of {self._scheme}://",
                next_step=f"open it with millrace.filesystem({scheme!r}, ...)",
            )
        return self._located(scheme, rest)

    def _located(self, scheme: str, rest: str) -> str:
        if self.rooted:
            return rest
        refuse_password(scheme, rest)
        key, place = locate(scheme, rest)
        require_same_place(place, self._options, self._identity)
        return key


def text_of(path: Any) -> str:
    """The text of a path, which may be an `os.PathLike`, as for fsspec. Raises `UsageError` for anything else."""
    if isinstance(path, str):
        return path
    text = stringify_path(path)
    if not isinstance(text, str):
        raise UsageError(f"{path!r:.200} is not a path", next_step="give a text or a pathlib.Path")
    return text


def _usable(key: str, begin: str) -> str:
    """`key`, if an object can have this name; `isprintable` is the quick test."""
    if not key.isprintable() and UNUSABLE_CHARACTERS.search(key):
        raise unusable_name(begin + key)
    return key


def unusable_name(name: str) -> ObjectNotFoundError:
    """The error for a name with control characters, or that is not UTF-8."""
    return ObjectNotFoundError(f"{name} is not a valid object name", next_step="use UTF-8 without control characters")


def names_directory(path: Any) -> bool:
    """Whether `path` ends in a slash, and so can only name a directory."""
    return str(path).endswith("/")


def without_any_scheme(path: Any, schemes: Iterable[str]) -> str:
    """A path without its scheme, if that is one of `schemes`. For fsspec's class method, which has no file system."""
    text = str(path)
    scheme, separator, rest = text.partition("://")
    if separator and (scheme.lower() == OWN_SCHEME or scheme.lower() in schemes):
        text = rest
    return text.rstrip("/") if not text.startswith("/") else "/" + text.strip("/")


def is_pattern(key: str, origin_identity: str, *, wildcards: str = "*?[") -> bool:
    """Whether `key` contains a wildcard. The '?' of a web address begins its query and is not a wildcard."""
    if "?" in key and origin_identity in ("http", "https"):
        return False
    return any(each in key for each in wildcards)


# --- recent opens ---------------------------------------------------------------------------------

open_hooks: Hooks[[str, str]] = Hooks("open hook")
"""Called with the identity of the origin and the key when this process opens an object, in the thread that opens it.

An open without hooks costs one truth test: `if open_hooks.registered: open_hooks.call(...)`. A forked child has none.
"""

forks.reset_in_child(open_hooks.registered.clear)


def log_mapped(entry: Entry, began: float) -> None:
    """Log at DEBUG an open that is served by a memory map. `began` is in seconds of `time.time`.

    Opens of the same path by the same process are logged from then on: they log only where there is a hook.
    """
    if _log.isEnabledFor(logging.DEBUG):
        key, seconds = shown_key(entry.name.key), time.time() - began
        _log.debug("%s: all %d bytes mapped in %.6f s", key, entry.size, seconds)
        if not open_hooks.registered:
            _keep_logging()


def _keep_logging() -> None:
    """Have `open_hooks` in use until DEBUG is disabled, so that opens from a map are logged, too."""

    def check_level(identity: str, key: str) -> None:
        if not _log.isEnabledFor(logging.DEBUG):
            remove()

    remove = open_hooks.add(check_level)


_MAX_ENTRIES = 1 << 16
_IDLE_SECONDS = 10.0  # after this time the kernel may have dropped the pages


class HotOpen(AccessRecord):
    """The result of opening one path. It refers to a map by its slot, and so keeps neither memory nor disk space.

    Valid while the numbers of the signals are equal to `changes` (index of the metadata) and `removals` (store of the
    bytes).
    """

    __slots__ = (
        "changes",
        "disk",
        "last",
        "metadata",
        "offset",
        "removals",
        "signals",
        "since",
        "slot",
        "touched",
        "until",
        "whole",
    )

    def __init__(
        self,
        found: NativeObject,
        slot: MapSlot,
        removals: int,
        since: float,
        until: float,
        changes: tuple[Signals, int],
    ) -> None:
        # On the path of every first open: positional, and without the base class.
        self.entry = found.entry
        self.disk = disk = found.disk
        self.slot = slot
        self.offset = found.offset
        self.whole = found.offset == 0 and found.buffer is slot.buffer
        self.since = since
        self.until = until
        self.signals = disk.store.index.signals.numbers
        self.removals = removals
        self.metadata = changes[0].numbers
        self.changes = changes[1]
        self.last = since  # just read or requested
        self.touched = disk.usage.touched


class HotOpens:
    """Recent opens of one file system in this process, by the path as the caller wrote it.

    Keeps the last 32,768 to 65,536 paths in two generations; when the young one is full, the old one is dropped. Thread-safe
    without a lock: every step is one operation on a dict, and threads that change generations at the same time lose entries
    at worst, which a full lookup finds again. After a fork all entries are invalid, as their maps are.
    """

    def __init__(self, *, max_entries: int = _MAX_ENTRIES) -> None:
        self.clock: Callable[[], float] = time.time
        self._young: dict[str, HotOpen] = {}
        self._old: dict[str, HotOpen] = {}
        self._limit = max_entries // 2
        _all.add(self)

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def find(self, path: str) -> pa.Buffer | None:
        """All bytes of the object at `path`, if its entry is valid; counts as a use. None: a full lookup is needed."""
        hot = self._young.get(path)
        if hot is None:
            hot = self._old.pop(path, None)
            if hot is None:
                return None
            self._put(path, hot)
        slot = hot.slot
        buffer = slot.buffer
        # There is no buffer if the cache was closed or inherited by a fork.
        # If the clock was set back, the age is unknown.
        if buffer is None or not hot.since <= (now := self.clock()) < hot.until:
            return None
        try:
            if hot.metadata[1] != hot.changes or (hot.signals[0] != hot.removals and not _renew(hot)):
                return None
        except ValueError:  # the disk of the metadata was closed, and its signals are unmapped
            return None
        slot.used = True
        hot.touched(hot)
        if open_hooks.registered:
            open_hooks.call(hot.entry.name.origin, hot.entry.name.key)
            log_mapped(hot.entry, now)
        if hot.whole:
            return buffer
        piece = buffer.slice(hot.offset, hot.entry.size)
        if now - hot.last > _IDLE_SECONDS:
            will_need(piece)
        hot.last = now
        return piece

    def keep(self, path: str, found: NativeObject, *, until: float, changes: tuple[Signals, int]) -> HotOpen | None:
        """Keep an open until something changes, at most until `until`. A private copy is not kept."""
        if found.slot is None or found.removals is None:
            return None
        hot = HotOpen(found, found.slot, found.removals, self.clock(), until, changes)
        self._put(path, hot)
        return hot

    def _put(self, path: str, hot: HotOpen) -> None:
        young = self._young
        if len(young) >= self._limit and path not in young:
            self._old, self._young = young, {path: hot}
        else:
            young[path] = hot


_all: weakref.WeakSet[HotOpens] = weakref.WeakSet()


def drop_hot_opens() -> None:
    """Drop the opens of all file systems of this process, after a change that could not be written to the index."""
    while True:
        with contextlib.suppress(RuntimeError):  # another thread creates a file system
            kept = list(_all)
            break
    for opens in kept:
        opens._young, opens._old = {}, {}


def _renew(hot: HotOpen) -> bool:
    """Whether the object is still stored after a removal from the store. One lookup in the index."""
    index = hot.disk.store.index
    try:
        stamp: Stamp | None = index.stamp()
        if stamp is None or index.get(hot.entry.object_id) != hot.entry:
            return False
    except StorageError:
        return False  # the full lookup raises and reports the same error
    hot.removals = stamp.removals
    return True
