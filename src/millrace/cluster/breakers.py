"""Breakers: one for each peer, shared by the processes of a machine. Requests skip a peer with an open breaker.

A failure opens it. While it is open, one request is let through at intervals, after 2 s at first, after more failures up to
15 s; a response closes it. `Cluster.is_available` probes in the background, so readers wait for the first deadline only.

The rules are pure functions. `Breakers` stores the states in a small file with one slot for each hash of a peer's id, read
and written by `pread` and `pwrite`. A truncated, damaged or missing file only ends the sharing, never a read or the process;
so does a slot that another open breaker uses.
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import xxhash

from millrace.events import Event, emit
from millrace.runtime import forks

_log = logging.getLogger("millrace.cluster")

FIRST_PAUSE_SECONDS = 2.0
LONGEST_PAUSE_SECONDS = 15.0

FORGOTTEN_SECONDS = 600.0
"""A breaker that was not used for this long counts as closed: the peer may have left."""


# --- the rules, pure ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenBreaker:
    """The state of an open breaker; None stands for a closed one. Times are seconds of one clock.

    The next request after `retry_at` is let through. While `probing`, the outcome of that request is not known yet.
    """

    retry_at: float
    pause: float = FIRST_PAUSE_SECONDS
    probing: bool = False


def valid(state: OpenBreaker | None, now: float) -> OpenBreaker | None:
    """`state`, or None if it is invalid: too old, or from before a restart of the machine."""
    if state is None or not FIRST_PAUSE_SECONDS <= state.pause <= LONGEST_PAUSE_SECONDS:
        return None
    return state if -FORGOTTEN_SECONDS < state.retry_at - now <= LONGEST_PAUSE_SECONDS else None


def before_request(state: OpenBreaker | None, now: float) -> tuple[bool, OpenBreaker | None]:
    """Whether to skip a peer now, and the state afterwards."""
    if state is None:
        return False, None
    if now < state.retry_at:
        return True, state
    # If the process of this request is killed, the next one follows after the same pause.
    return False, OpenBreaker(now + state.pause, state.pause, probing=True)


def after_failure(state: OpenBreaker | None, now: float) -> OpenBreaker:
    """The state after a failed request. Requests sent before the breaker opened change nothing."""
    if state is None:
        return OpenBreaker(now + FIRST_PAUSE_SECONDS)
    if not state.probing:
        return state
    pause = min(2 * state.pause, LONGEST_PAUSE_SECONDS)
    return OpenBreaker(now + pause, pause)


# --- the shared file ------------------------------------------------------------------------------

_SLOTS = 4096
_SLOT = struct.Struct("<QQdd?7x")  # checksum of all that follows, hash of the peer's id, retry_at, pause, probing
_EMPTY = bytes(_SLOT.size)

# A process that is stopped while it holds the lock must not block the reads of others. Therefore the wait is short.
_LOCK_TRIES = 10
_LOCK_PAUSE_SECONDS = 0.001


class Breakers:
    """The breakers of all peers. Thread- and process-safe, usable after a fork. Never raises.

    `path` is the file that the machine's processes share, created if it is missing; None keeps the states in this process.
    `clock` returns seconds of a clock that all these processes share. For `start_seconds` after the creation, a peer that
    has not responded yet may not have started: its breaker opens without an event. `name_of` returns the name of a peer in
    events.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        clock: Callable[[], float] | None = None,
        start_seconds: float = 0.0,
        name_of: Callable[[str], str] = str,
    ) -> None:
        self._clock = clock or boot_seconds
        self._name_of = name_of
        self._started_by = self._clock() + start_seconds
        self._responded: set[str] = set()
        self._reported: set[str] = set()
        """The peers with an open breaker whose event this process has emitted."""
        self._own: dict[str, OpenBreaker] = {}
        self._lock = threading.Lock()
        self._descriptor = -1 if path is None else _open(path)
        if self._descriptor >= 0:
            weakref.finalize(self, os.close, self._descriptor)
        _after_fork.add(self)

    def is_open(self, member_id: str) -> bool:
        """Whether to skip a peer. False also for the one request per interval that is let through."""
        now = self._clock()
        state = self._read(member_id, now)
        if state is None or now < state.retry_at:
            return state is not None
        with self._locked():
            skipped, after = before_request(self._read(member_id, now), now)
            if not skipped:
                self._write(member_id, after, now)
        return skipped

    def is_known_open(self, member_id: str) -> bool:
        """Whether a peer's breaker is open. Unlike `is_open`, this never lets a request through."""
        return self._read(member_id, self._clock()) is not None

    def failed(self, member_id: str) -> None:
        """Record a request without a response: refused, interrupted, or after its deadline."""
        now = self._clock()
        with self._locked():
            before = self._read(member_id, now)
            after = after_failure(before, now)
            if after != before:
                self._write(member_id, after, now)
            if before is None:
                self._reported.discard(member_id)  # another process may have closed it since
            is_new = before is None and self._is_to_report(member_id, now)
        if is_new:
            emit(Event(name="peer.breaker.opened", subject=self._name_of(member_id)))

    def worked(self, member_id: str) -> None:
        """Record a response."""
        now = self._clock()
        self._responded.add(member_id)
        if self._read(member_id, now) is None:
            return
        with self._locked():
            before = self._read(member_id, now)
            self._write(member_id, None, now)
            self._reported.discard(member_id)
        if before is not None:
            emit(Event(name="peer.breaker.closed", subject=self._name_of(member_id)))

    def report(self, member_id: str) -> None:
        """Emit the event of a change that another process has made. For the node, which reports for its machine."""
        now = self._clock()
        with self._lock:
            is_open = self._read(member_id, now) is not None
            was_open = member_id in self._reported
            is_new = self._is_to_report(member_id, now) if is_open else was_open
            if not is_open:
                self._reported.discard(member_id)
        if is_new:
            change = "opened" if is_open else "closed"
            emit(Event(name=f"peer.breaker.{change}", subject=self._name_of(member_id)))

    # --- inside -----------------------------------------------------------------------------------

    def _is_to_report(self, member_id: str, now: float) -> bool:
        """Whether to emit the event of an open breaker now; then it counts as emitted. Under the lock."""
        if member_id in self._reported or (now < self._started_by and member_id not in self._responded):
            return False
        self._reported.add(member_id)
        return True

    def _read(self, member_id: str, now: float) -> OpenBreaker | None:
        own = valid(self._own.get(member_id), now) if self._own else None
        if own is not None or self._descriptor < 0:
            return own
        key = _key_of(member_id)
        found, state = self._slot(key)
        return valid(state, now) if found == key else None

    def _write(self, member_id: str, state: OpenBreaker | None, now: float) -> None:
        """Store a state, in this process if the file has no space for it."""
        self._own.pop(member_id, None)
        if not self._write_shared(_key_of(member_id), state, now) and state is not None:
            self._own[member_id] = state

    def _write_shared(self, key: int, state: OpenBreaker | None, now: float) -> bool:
        if self._descriptor < 0:
            return False
        found, held = self._slot(key)
        if found != key and valid(held, now) is not None:
            return False
        try:
            packed = _EMPTY if state is None else _packed(key, state)
            return os.pwrite(self._descriptor, packed, key % _SLOTS * _SLOT.size) == _SLOT.size
        except OSError:  # a full or failing disk: the state is not shared
            return False

    def _slot(self, key: int) -> tuple[int, OpenBreaker | None]:
        """The key and the state in the slot of a key; (0, None) for an empty, damaged or unreadable one."""
        try:
            data = os.pread(self._descriptor, _SLOT.size, key % _SLOTS * _SLOT.size)
        except OSError:
            return 0, None
        if data == _EMPTY or len(data) < _SLOT.size:
            return 0, None
        checksum, found, retry_at, pause, probing = _SLOT.unpack(data)
        # While another process writes the slot it reads as empty, which costs one useless request.
        if checksum != xxhash.xxh3_64_intdigest(data[8:]):
            return 0, None
        return found, OpenBreaker(retry_at, pause, probing)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Exclude other threads and, except after a timeout, other processes that change states."""
        with self._lock:
            held = self._descriptor >= 0 and _try_lock(self._descriptor)
            try:
                yield
            finally:
                if held:
                    fcntl.lockf(self._descriptor, fcntl.LOCK_UN)


def _open(path: Path) -> int:
    """The descriptor of the shared file; -1 if it cannot be used."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        _log.warning("%s: %s; breakers are not shared with other processes", path, error.strerror)
        return -1


def _try_lock(descriptor: int) -> bool:
    for attempt in range(_LOCK_TRIES):
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:  # another process has it, or the file system has no locks
            if attempt < _LOCK_TRIES - 1:
                time.sleep(_LOCK_PAUSE_SECONDS)
    return False


def _key_of(member_id: str) -> int:
    return xxhash.xxh3_64_intdigest(member_id.encode("utf-8", "surrogatepass"))


def _packed(key: int, state: OpenBreaker) -> bytes:
    rest = _SLOT.pack(0, key, state.retry_at, state.pause, state.probing)[8:]
    return xxhash.xxh3_64_intdigest(rest).to_bytes(8, "little") + rest


def boot_seconds() -> float:
    """A clock that all processes of the machine share, and that also runs while it sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _new_lock(breakers: Breakers) -> None:
    breakers._lock = threading.Lock()  # another thread of the parent may have held it


_after_fork = forks.objects_reset_in_child(_new_lock)
