"""Which peers are passed over because they did not answer: a breaker a peer, shared by the processes of a machine.

A failure opens it. While it is open one request is let through every so often, at first after 2 s, after more failures up to
15 s later; one that is answered closes it. So a dead peer costs a machine one deadline, and one more now and then.

The rules are pure functions. `Breakers` keeps the states in a small file of fixed slots, read and written by `pread` and
`pwrite`: a file that is cut, damaged, full or gone costs the sharing, never a read or the process.
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

_log = logging.getLogger("millrace")

FIRST_PAUSE_SECONDS = 2.0
LONGEST_PAUSE_SECONDS = 15.0

FORGOTTEN_SECONDS = 600.0
"""A peer that nobody has asked for so long is like one that never failed: it may have left, or its disk is another's now."""


# --- the rules, pure ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenBreaker:
    """That a peer failed; a closed breaker is None. Times are seconds of one clock.

    From `retry_at` on the next request is let through. `probing` says that one was, and its outcome is not known yet.
    """

    retry_at: float
    pause: float = FIRST_PAUSE_SECONDS
    probing: bool = False


def valid(state: OpenBreaker | None, now: float) -> OpenBreaker | None:
    """`state`, or None where it says nothing any more: it is old, or of a clock that was set anew by a restart."""
    if state is None or not FIRST_PAUSE_SECONDS <= state.pause <= LONGEST_PAUSE_SECONDS:
        return None
    return state if -FORGOTTEN_SECONDS < state.retry_at - now <= LONGEST_PAUSE_SECONDS else None


def when_asked(state: OpenBreaker | None, now: float) -> tuple[bool, OpenBreaker | None]:
    """Whether a peer is to be passed over by somebody who wants to ask it now, and the state after that."""
    if state is None:
        return False, None
    if now < state.retry_at:
        return True, state
    # Should the one that is let through now be killed, the next follows after the same pause.
    return False, OpenBreaker(now + state.pause, state.pause, probing=True)


def when_failed(state: OpenBreaker | None, now: float) -> OpenBreaker:
    """The state after a request failed. Those that were under way when the breaker opened change nothing."""
    if state is None:
        return OpenBreaker(now + FIRST_PAUSE_SECONDS)
    if not state.probing:
        return state
    pause = min(2 * state.pause, LONGEST_PAUSE_SECONDS)
    return OpenBreaker(now + pause, pause)


# --- where the states lie -------------------------------------------------------------------------

_SLOT_BYTES = 320
_BUCKET_SLOTS = 4
_BUCKET_BYTES = _BUCKET_SLOTS * _SLOT_BYTES
_BUCKETS = 256
_FIELDS = struct.Struct("<Qdd?H")  # checksum of all that follows, retry_at, pause, probing, length of the id
_ID_BYTES = _SLOT_BYTES - _FIELDS.size
_EMPTY = bytes(_SLOT_BYTES)
_EMPTY_BUCKET = bytes(_BUCKET_BYTES)

# A process that is stopped while it holds the lock must not stop the others' reads.
_LOCK_TRIES = 10
_LOCK_PAUSE_SECONDS = 0.001


class Breakers:
    """The breakers of all peers. Thread- and process-safe, usable after a fork. Never raises.

    `path` is the file that the machine's processes share, made when it is missing; None keeps the states in this process.
    `clock` gives seconds that agree between them.
    """

    def __init__(self, path: Path | None, *, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or _boot_seconds
        self._own: dict[str, OpenBreaker] = {}
        self._lock = threading.Lock()
        self._descriptor = -1 if path is None else _open(path)
        if self._descriptor >= 0:
            weakref.finalize(self, os.close, self._descriptor)
        _after_fork.add(self)

    def is_open(self, member_id: str) -> bool:
        """Whether to pass a peer over; False also for the one request every few seconds that finds out how it is."""
        now = self._clock()
        state = self._read(member_id, now)
        if state is None or now < state.retry_at:
            return state is not None
        with self._locked():
            passed_over, after = when_asked(self._read(member_id, now), now)
            if not passed_over:
                self._write(member_id, after, now)
        return passed_over

    def is_known_open(self, member_id: str) -> bool:
        """Whether a peer did not answer when it was last asked; unlike `is_open` this lets no request through."""
        return self._read(member_id, self._clock()) is not None

    def failed(self, member_id: str) -> None:
        """A request was not answered: it was refused, cut off, or its deadline passed."""
        now = self._clock()
        with self._locked():
            before = self._read(member_id, now)
            after = when_failed(before, now)
            if after != before:
                self._write(member_id, after, now)
        if before is None:
            emit(Event(name="peer.breaker.opened", subject=member_id))

    def worked(self, member_id: str) -> None:
        """A request was answered."""
        now = self._clock()
        if self._read(member_id, now) is None:
            return
        with self._locked():
            before = self._read(member_id, now)
            self._write(member_id, None, now)
        if before is not None:
            emit(Event(name="peer.breaker.closed", subject=member_id))

    def open_ids(self) -> list[str]:
        """The ids of the peers that are passed over, sorted."""
        now = self._clock()
        found = {member_id for member_id, state in list(self._own.items()) if valid(state, now)}
        for bucket in range(_BUCKETS if self._descriptor >= 0 else 0):
            found.update(member_id for member_id, state in self._slots(bucket) if member_id and valid(state, now))
        return sorted(found)

    # --- inside -----------------------------------------------------------------------------------

    def _read(self, member_id: str, now: float) -> OpenBreaker | None:
        own = valid(self._own.get(member_id), now) if self._own else None
        if own is not None or self._descriptor < 0:
            return own
        slots = self._slots(_bucket_of(member_id))
        return next((valid(state, now) for found, state in slots if found == member_id), None)

    def _write(self, member_id: str, state: OpenBreaker | None, now: float) -> None:
        """Note a state, in this process where the file has no room for it."""
        self._own.pop(member_id, None)
        if not self._write_shared(member_id, state, now) and state is not None:
            self._own[member_id] = state

    def _write_shared(self, member_id: str, state: OpenBreaker | None, now: float) -> bool:
        if self._descriptor < 0:
            return False
        bucket = _bucket_of(member_id)
        slots = self._slots(bucket)
        mine = [place for place, (found, _) in enumerate(slots) if found == member_id]
        free = [place for place, (_, held) in enumerate(slots) if valid(held, now) is None]
        packed = _EMPTY if state is None else _packed(member_id, state)
        if packed is None or not (mine or free):
            return state is None
        try:
            place = bucket * _BUCKET_BYTES + (mine or free)[0] * _SLOT_BYTES
            return os.pwrite(self._descriptor, packed, place) == _SLOT_BYTES
        except OSError:  # a full or failing disk: then each process finds out by itself
            return False

    def _slots(self, bucket: int) -> list[tuple[str, OpenBreaker | None]]:
        """What lies in a bucket: ids and states; ("", None) for a slot that is empty or damaged."""
        try:
            data = os.pread(self._descriptor, _BUCKET_BYTES, bucket * _BUCKET_BYTES)
        except OSError:
            data = b""
        if data == _EMPTY_BUCKET[: len(data)]:
            return [("", None)] * _BUCKET_SLOTS
        data = data.ljust(_BUCKET_BYTES, b"\0")
        return [_unpacked(data[start : start + _SLOT_BYTES]) for start in range(0, _BUCKET_BYTES, _SLOT_BYTES)]

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Alone among the threads and, as a rule, the processes that change states."""
        with self._lock:
            held = self._descriptor >= 0 and _try_lock(self._descriptor)
            try:
                yield
            finally:
                if held:
                    fcntl.lockf(self._descriptor, fcntl.LOCK_UN)


def _open(path: Path) -> int:
    """The descriptor of the shared file; -1 where it cannot be used."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        _log.warning("%s: %s; this process finds out by itself which peers do not answer", path, error.strerror)
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


def _bucket_of(member_id: str) -> int:
    return xxhash.xxh3_64_intdigest(member_id.encode("utf-8", "surrogatepass")) % _BUCKETS


def _packed(member_id: str, state: OpenBreaker) -> bytes | None:
    """A slot; None for an id that is too long for it."""
    name = member_id.encode("utf-8", "surrogatepass")
    if len(name) > _ID_BYTES:
        return None
    fields = _FIELDS.pack(0, state.retry_at, state.pause, state.probing, len(name))[8:]
    rest = (fields + name).ljust(_SLOT_BYTES - 8, b"\0")
    return xxhash.xxh3_64_intdigest(rest).to_bytes(8, "little") + rest


def _unpacked(slot: bytes) -> tuple[str, OpenBreaker | None]:
    checksum, retry_at, pause, probing, length = _FIELDS.unpack_from(slot)
    # Another process may just be writing it; then it reads as empty, and somebody asks a peer in vain.
    if not length or length > _ID_BYTES or checksum != xxhash.xxh3_64_intdigest(slot[8:]):
        return "", None
    name = slot[_FIELDS.size : _FIELDS.size + length].decode("utf-8", "surrogatepass")
    return name, OpenBreaker(retry_at, pause, probing)


def _boot_seconds() -> float:
    """One clock for all processes of the machine, which also counts while it sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


_after_fork: weakref.WeakSet[Breakers] = weakref.WeakSet()


def _new_locks() -> None:
    # Another thread of the parent may have held one.
    for breakers in _after_fork:
        breakers._lock = threading.Lock()


os.register_at_fork(after_in_child=_new_locks)
