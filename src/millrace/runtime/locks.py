"""Locks between the processes of a node, and single flight between the threads of a process.

The kernel frees the locks of a process that ends, however it ends, but not those of a process that is stopped (Ctrl-Z, a
debugger, a paused container). So a holder writes a heartbeat into the file when it takes a lock and at intervals while
it holds it: the time, and which process it is. A process that waits for the lock reads the heartbeat: when the time does not
advance for `SILENCE_SECONDS`, and the kernel runs no thread of the holder either, it continues without the holder. The clock
is the machine's (`CLOCK_MONOTONIC`), which all its processes share and which does not advance while the machine sleeps.

Heartbeats are hints. If they cannot be written, or are overwritten with something else, a wait is shorter or longer than it
could be, and nothing else happens.

Single flight: of several threads that request a block at the same time, one fetches it, and all receive the result. Between
processes, named locks do the same. A process that finds a lock held waits for the block to appear in the store. If the
holder is stopped, the wait ends after `SILENCE_SECONDS`. Then the block is fetched a second time, which costs one request
and has no other effect.

Which class to use: `FileLock` for one lock, `NamedLocks` for many locks in one file, `locked_directory` (`directories.py`)
for a directory, `Flights` for fetches.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import math
import os
import struct
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from contextvars import copy_context
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from typing_extensions import Buffer

from millrace.config import SILENCE_SECONDS, WORKING_SECONDS
from millrace.errors import StorageError
from millrace.events import fetch_id
from millrace.runtime import forks
from millrace.runtime.failures import disk_errors
from millrace.runtime.maintenance import TICK_SECONDS, PeriodicThread, Task

_IDLE_BEATS = 10  # signs are written to an unused file this many times more
GRACE_SECONDS = 0.3
"""A new holder may have taken a lock and not yet have written its sign; a process that waits looks again after this time."""
_LOOK_SECONDS = 0.05  # between two looks at the threads of a process
_SIGNAL_SECONDS = 0.5  # a signal just before the kernel starts to wait does not end the wait

_NAMED_PAUSES = (0.001, 0.05)
_FILE_LOCK_PAUSES = (0.00005, 0.005)  # first and longest pause between two attempts

_FLOCK = struct.Struct("hhqqi4x")  # struct flock on 64-bit Linux: type, whence, start, length, pid
_SIGN = struct.Struct("<QIIQ")  # a `Sign`, and the number of its lock
_SIGNS = 8192
_NEAR = 8
"""The heartbeat of a lock is at one of so many places. The first of them is the lock's number modulo `_SIGNS`."""

Sign = tuple[int, int, int]
"""A heartbeat: nanoseconds of the machine's clock, the process, and its namespace of process numbers."""

_NO_SIGN = (0, 0, 0)


class StoppedHolderError(StorageError):
    """`process` has a lock and is stopped, or has kept it for too long."""

    def __init__(self, process: str) -> None:
        super().__init__(
            f"{process} does not continue", next_step="continue or end processes that are stopped (state T in 'ps')"
        )
        self._process = process

    def __reduce__(self) -> tuple[type[StoppedHolderError], tuple[str]]:
        return type(self), (self._process,)


def try_lock_byte(descriptor: int, byte: int) -> bool:
    """Take the lock of a byte of a file that is open for writing, until it is closed, unless another open file has it."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
    except (BlockingIOError, PermissionError):  # EAGAIN or, as POSIX allows, EACCES
        return False
    return True


def _unlock_byte(descriptor: int, byte: int) -> None:
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, byte, 1, 0))


def is_byte_locked(descriptor: int, byte: int) -> bool:
    """Whether another open file has the lock of a byte."""
    wanted = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    return bool(_FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, wanted))[0] != fcntl.F_UNLCK)


def has_byte_lock(process: int, descriptor: int, byte: int) -> bool:
    """Whether a process has the lock of a byte of an open file. True where the kernel does not show its locks."""
    file, folder = os.fstat(descriptor), f"/proc/{process}"
    try:
        names = os.listdir(f"{folder}/fdinfo")
    except OSError:  # of another user
        return True
    for name in names:
        with contextlib.suppress(OSError):  # closed meanwhile
            for line in Path(f"{folder}/fdinfo/{name}").read_bytes().splitlines():
                # "lock: 1: OFDLCK ADVISORY WRITE -1 08:01:5678 3 7"; the kernel joins the ranges of one open file.
                fields = line.split()
                if fields[:1] != [b"lock:"] or not int(fields[-2]) <= byte:
                    continue
                # Not by the inode in the line: a file on another file system may have the same.
                is_inside = fields[-1] == b"EOF" or byte <= int(fields[-1])
                if is_inside and os.path.samestat(os.stat(f"{folder}/fd/{name}"), file):
                    return True
    return False


def silent_from(stamp: int, first_look: int) -> int:
    """The time from which a holder counts as stopped if its sign, `stamp`, first read at `first_look`, does not change.

    All are nanoseconds of the machine's clock; 0 stands for no time. Pure.
    """
    silence, grace = int(SILENCE_SECONDS * 1e9), int(GRACE_SECONDS * 1e9)
    if 0 < stamp <= first_look:
        return max(stamp + silence, first_look + grace)
    return first_look + silence  # of another boot, or not a time


def place_of(signs: Sequence[tuple[int, int, int, int]], number: int, now: int) -> int:
    """Which of the places of a lock its holder writes to: that of its last sign, or else that of the oldest one. Pure.

    So a lock that is held for long keeps its place, and no other lock seems to be held by the same process.
    """
    times = [sign[0] if sign[0] <= now else 0 for sign in signs]  # of another boot, or not a time
    own = [place for place, sign in enumerate(signs) if sign[3] == number and sign[0]]
    return max(own, key=times.__getitem__) if own else times.index(min(times))


def lock_number(name: bytes, part: int = 0) -> int:
    """The number of the lock of a name, such as an object id, and a part of it, such as a block."""
    digest = hashlib.blake2b(name + part.to_bytes(8, "big"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2


class SharedLocks:
    """Numbered locks between processes: byte ranges of the file `path`, which is created if missing.

    Thread-safe for different numbers. A forked child closes the file, so that the parent's locks end with the parent; it
    opens its own. The constructor raises `StorageError`, other calls `OSError`.
    """

    _near = _NEAR

    def __init__(self, path: Path) -> None:
        with disk_errors(path):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._beating = threading.Lock()
        self._held: set[int] = set()
        self._silent: dict[int, Sign] = {}
        self._idle_beats = 0
        _all_locks.add(self)

    def close(self) -> None:
        """Release everything. Idempotent."""
        with self._beating:  # a heartbeat must not be written into a file that gets the same number
            descriptor, self._descriptor = self._descriptor, -1
            self._held.clear()
        if descriptor >= 0:
            os.close(descriptor)

    def _close_in_child(self) -> None:
        self._beating = threading.Lock()  # a thread of the parent may have held it
        self.close()

    def try_acquire(self, number: int) -> bool:
        """Take a lock unless another process has it."""
        try:
            if not try_lock_byte(self._descriptor, number):
                return False
        except BaseException:  # perhaps an interrupt right after it was locked
            with contextlib.suppress(OSError):
                _unlock_byte(self._descriptor, number)
            raise
        self._held.add(number)
        if self._silent:
            self._silent.pop(number, None)
        # Another process may have had a turn since our last sign. With its sign, ours would not count as stopped.
        now = time.monotonic_ns()
        place, last = self._find_sign(number, now)
        if now - last[0] > TICK_SECONDS * 1e9 or last[1:] != _this_process:
            self._write_sign(place, number, now)
        self._idle_beats = 0
        start_beats(self.beat)
        return True

    def acquire(self, number: int, *, limit: float | None = None, pauses: tuple[float, float] = _NAMED_PAUSES) -> bool:
        """Wait for a lock. False when its holder is stopped, or after the limit; arguments as for `LockWait`."""
        wait = None
        while not self.try_acquire(number):
            wait = wait or LockWait(self, limit=limit, pauses=pauses)
            if wait.is_over(number):
                return False
            time.sleep(wait.next_pause())
        return True

    def release(self, number: int) -> None:
        """Release a lock."""
        with self._beating:  # a heartbeat must not replace that of the next holder
            try:
                self._held.discard(number)
                _unlock_byte(self._descriptor, number)
            except BaseException:
                if self._descriptor >= 0:  # an interrupt: the file may be locked still
                    self._held.add(number)
                raise

    def let_go(self, *numbers: int) -> None:
        """Release those of these locks that this process has. After an interrupt here, call it again."""
        for number in numbers:
            if number in self._held:
                self.release(number)

    def beat(self) -> bool:
        """Write a heartbeat for every lock that is held; returns whether to call this again."""
        with self._beating:
            if self._descriptor < 0:
                return False
            now = time.monotonic_ns()
            held = tuple(self._held)
            for number in held:
                self._write_sign(self._find_sign(number, now)[0], number, now)
        self._idle_beats = 0 if held else self._idle_beats + 1
        return self._idle_beats < _IDLE_BEATS

    def sign_of(self, number: int) -> Sign:
        """The last sign of a holder of this lock."""
        return self._find_sign(number, time.monotonic_ns())[1]

    def has_lock(self, process: int, number: int) -> bool:
        """Whether a process has this lock. Slow."""
        return has_byte_lock(process, self._descriptor, number)

    def _find_sign(self, number: int, now: int) -> tuple[int, Sign]:
        """The place of the next sign of a lock's holder, and the last sign."""
        first, nbytes, data = number % _SIGNS, _SIGN.size * self._near, b""
        with contextlib.suppress(OSError):  # a failing disk: the same as no sign
            data = os.pread(self._descriptor, nbytes, first * _SIGN.size)
        signs = list(_SIGN.iter_unpack(data.ljust(nbytes, b"\0")))
        at = place_of(signs, number, now)
        *sign, written_for = signs[at]
        return first + at, cast(Sign, tuple(sign)) if written_for == number else _NO_SIGN

    def _write_sign(self, place: int, number: int, now: int) -> None:
        # On a full or failing disk other processes may treat this one as stopped, which costs them a request.
        with contextlib.suppress(OSError):
            os.pwrite(self._descriptor, _SIGN.pack(now, *_this_process, number), place * _SIGN.size)


_all_locks = forks.objects_reset_in_child(SharedLocks._close_in_child)


class SilenceCheck:
    """Whether the holders of locks that this process waits for are stopped. Not thread-safe.

    `sign_of` returns the last sign of the holder of a lock, and `silent` contains those of stopped holders. `has_lock`
    returns whether a process has a lock.
    """

    def __init__(
        self, sign_of: Callable[[int], Sign], silent: dict[int, Sign], has_lock: Callable[[int, int], bool]
    ) -> None:
        self._sign_of = sign_of
        self._silent = silent
        self._has_lock = has_lock
        self._seen: dict[int, tuple[Sign, int]] = {}
        self._former: dict[int, Sign] = {}
        self._activity = Activity()

    def is_silent(self, number: int) -> bool:
        """Whether the holder of a lock, which was just found to be held, is stopped. Later calls return at once."""
        sign, now = self._sign_of(number), time.monotonic_ns()
        if self._silent.get(number) == sign:
            return True
        seen = self._seen.get(number)
        if seen is None or seen[0] != sign:
            seen = self._seen[number] = (sign, now)
        if self._is_stopped_for_long(number, sign, now):
            self._silent[number] = sign
            return True
        if now < silent_from(sign[0], seen[1]):
            return False
        if sign[2] == _this_process[1] and self._activity.continues(sign[1]):
            # A holder that was stopped right after it took the lock has not written its sign: `sign` is a former holder's.
            is_holder = self._has_lock(sign[1], number)
            if is_holder or self._former.get(number) != sign:
                self._seen[number] = (sign, now)  # look again in a moment
                if not is_holder:
                    self._former[number] = sign
                return False
        self._silent[number] = sign
        return True

    def _is_stopped_for_long(self, number: int, sign: Sign, now: int) -> bool:
        """Whether the kernel shows the holder as stopped, and its sign is old: no second look is necessary."""
        return (
            0 < sign[0] <= now - int(SILENCE_SECONDS * 1e9)
            and sign[2] == _this_process[1]
            and self._activity.is_stopped(sign[1])
            and self._has_lock(sign[1], number)
        )


class LockWait(SilenceCheck):
    """One wait for locks that other processes hold. Not thread-safe.

    It ends after `limit` seconds (default: `WORKING_SECONDS`), or when the holder is stopped. `pauses` are the first and
    the longest pause between two attempts, in seconds.
    """

    def __init__(
        self, locks: SharedLocks, *, limit: float | None = None, pauses: tuple[float, float] = _NAMED_PAUSES
    ) -> None:
        super().__init__(locks.sign_of, locks._silent, locks.has_lock)
        self._deadline = time.monotonic() + (WORKING_SECONDS if limit is None else limit)
        self._pause, self._longest_pause = pauses

    def is_over(self, number: int) -> bool:
        """Whether to continue without a lock that another process was just found to hold."""
        return self.is_silent(number) or time.monotonic() >= self._deadline

    def next_pause(self) -> float:
        """The seconds to wait before the next attempt; doubles up to the longest pause."""
        pause, self._pause = self._pause, min(2 * self._pause, self._longest_pause)
        return pause


class NamedLocks(SharedLocks):
    """Locks by name, between the threads of this process and the processes of the node. Thread-safe.

    `with locks.threads(name), locks.processes(name): ...`, in this order, for the same reason as with `FileLock`.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._lock = threading.Lock()
        self._threads: weakref.WeakValueDictionary[int, threading.Lock] = weakref.WeakValueDictionary()
        self._inside: dict[int, threading.Lock] = {}  # of the blocks of `processes`

    def threads(self, name: bytes) -> threading.Lock:
        """The lock of `name` between the threads of this process."""
        number = lock_number(name)
        with self._lock:
            lock = self._threads.get(number)
            if lock is None:
                lock = self._threads[number] = threading.Lock()
            return lock

    def processes(self, name: bytes) -> AbstractContextManager[None]:
        """Hold the lock of `name` between processes for a `with` block.

        Continues without the lock after `SILENCE_SECONDS` if its holder in another process is stopped. So the block may run
        in two processes at the same time.
        """
        return _Held(self, lock_number(name), self.threads(name))

    def beat(self) -> bool:
        for number, lock in tuple(self._inside.items()):
            _release_if_left(self, number, lock)
        return super().beat()


class _Held:
    """The context manager of `NamedLocks.processes`."""

    __slots__ = ("_locks", "_number", "_threads")

    def __init__(self, locks: NamedLocks, number: int, threads: threading.Lock) -> None:
        self._locks, self._number, self._threads = locks, number, threads

    def __enter__(self) -> None:
        self._locks._inside[self._number] = self._threads
        try:
            self._locks.acquire(self._number)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            self._locks.let_go(self._number)
        except BaseException:
            self._locks.let_go(self._number)
            raise
        # Only now: until then a heartbeat releases a lock that an interrupt leaves.
        del self._locks._inside[self._number]


def _release_if_left(locks: SharedLocks, number: int, threads: threading.Lock) -> None:
    """Release a lock between processes that an interrupt has left: no thread has the lock between threads."""
    if number in locks._held and threads.acquire(blocking=False):
        try:
            if number in locks._held:
                locks.release(number)
        finally:
            threads.release()


class FileLock(SharedLocks):
    """One lock between all processes, by the file `path`, and between their threads: `with lock.threads, lock: ...`.

    A context manager, not to be nested. Entering raises `StoppedHolderError` when the holder is stopped, after
    `SILENCE_SECONDS` and from then on at once, and after `limit` seconds (default: `WORKING_SECONDS`) in any case. `holder`
    names the holder in that error.

    `threads` is entered first, without Python code in between, so an interrupt (Ctrl-C) cannot leave it locked. One that
    leaves the file locked is noticed by the next heartbeat, which finds the file locked and no thread inside.
    """

    _near = 1  # no other lock is in the file

    def __init__(self, path: Path, holder: str, *, limit: float | None = None) -> None:
        super().__init__(path)
        self._holder = holder
        self._limit = WORKING_SECONDS if limit is None else limit
        self.threads = threading.Lock()

    def __enter__(self) -> None:
        try:
            if not self.acquire(0, limit=self._limit, pauses=_FILE_LOCK_PAUSES):
                raise StoppedHolderError(self._holder)
        except BaseException:  # also an interrupt right after the file was locked
            self.release(0)
            raise

    def __exit__(self, *_: object) -> None:
        self.release(0)

    def beat(self) -> bool:
        _release_if_left(self, 0, self.threads)
        return super().beat()


class Activity:
    """Whether processes run at all: on a machine on which hundreds need a processor, a heartbeat may be late."""

    def __init__(self) -> None:
        # When, the switches of its threads, whether it continues, and whether it is stopped.
        self._looks: dict[int, tuple[float, int, bool, bool]] = {}

    def continues(self, process: int) -> bool:
        """Whether a thread of a process runs, waits for a processor or a disk, or has run since the last look, if any.

        When all threads wait for a disk, the container of the process is paused (cgroup v1), or its disk hangs. Looks at
        intervals only: a process may have several locks that are checked one after the other.
        """
        now = time.monotonic()
        looked, known, result, _ = self._looks.get(process, (-math.inf, -1, False, False))
        if now - looked < _LOOK_SECONDS:
            return result
        states, switches = set(), 0
        with contextlib.suppress(OSError):  # it has ended
            for thread in os.listdir(f"/proc/{process}/task"):
                with contextlib.suppress(OSError):
                    for line in Path(f"/proc/{process}/task/{thread}/status").read_bytes().splitlines():
                        name, _, value = line.partition(b":")
                        if name == b"State":
                            states.add(value[1:2])
                        switches += int(value) if name.endswith(b"voluntary_ctxt_switches") else 0
        result = b"R" in states or (b"D" in states and len(states) > 1) or known != switches
        self._looks[process] = now, switches, result, bool(states) and states <= {b"T", b"t"}
        return result

    def is_stopped(self, process: int) -> bool:
        """Whether the kernel shows all threads of a process as stopped. Looks at intervals, as `continues` does.

        Reads the main thread first. To read all threads is slow, and would make the next interval of `continues` too short.
        """
        try:
            state = Path(f"/proc/{process}/task/{process}/stat").read_bytes().rpartition(b")")[2][1:2]
        except OSError:  # it has ended
            return False
        if state not in (b"T", b"t"):
            return False
        self.continues(process)
        return self._looks[process][3]

    def any_holder_continues(self, descriptor: int) -> bool:
        """The same of the processes that have a lock (`flock`, `lockf`) of a file. False where none can be found."""
        inode = str(os.fstat(descriptor).st_ino)
        with contextlib.suppress(OSError):
            for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
                # "1: FLOCK ADVISORY WRITE 1234 08:01:5678 0 EOF"; of one that waits, "->" comes after the number.
                fields = line.split()
                if len(fields) > 5 and fields[5].rpartition(":")[2] == inode and self.continues(int(fields[4])):
                    return True
        return False


def _identify() -> tuple[int, int]:
    """This process, and its namespace of process numbers."""
    try:
        return os.getpid(), os.stat("/proc/self/ns/pid").st_ino & 0xFFFFFFFF  # 32 bits, as in the kernel
    except OSError:
        return os.getpid(), os.getpid()  # a namespace that no other process has


_this_process = _identify()


def this_process() -> tuple[int, int]:
    """The number of this process, and its namespace of process numbers."""
    return _this_process


_beats = PeriodicThread("millrace-beats")  # apart from maintenance, whose tasks may take long


def start_beats(beat: Task) -> None:
    """Call `beat`, which is quick and does not raise, twice a second until it returns False. Cheap when repeated."""
    if beat in _beats.due:  # part of every lock: without a call, and below without a context manager
        return
    try:  # noqa: SIM105
        _beats.register(beat)
    except RuntimeError:  # no more threads, or the interpreter is ending: others wait less for this process
        pass


def _identify_child() -> None:
    global _this_process
    _this_process = _identify()


forks.reset_in_child(_identify_child)


# --- single flight ----------------------------------------------------------------------------------

BlockKey = tuple[bytes, int]
"""An object id and a block number."""


Value = TypeVar("Value")


class Outcome(Generic[Value]):
    """What a call has returned or raised, for the threads that wait for it. Thread-safe.

    As a `Future` of `concurrent.futures`, without its condition: an interrupt (Ctrl-C) in the Python code of a condition
    leaves its lock held, and then the thread that makes the call waits without end. Here no thread waits for another one in
    the middle of a method: all shared state is in lists, which change in one step.
    """

    def __init__(self) -> None:
        self._ends: list[tuple[Any, BaseException | None]] = []  # the first one counts
        self._waiting: list[threading.Lock] = []  # one lock for each thread that waits, which the end releases

    def done(self) -> bool:
        """Whether the call has ended."""
        return bool(self._ends)

    def wait(self) -> None:
        """Wait for the end of the call. In the main thread signal handlers run meanwhile, and may raise."""
        if self._ends:
            return
        woken = threading.Lock()
        woken.acquire()
        self._waiting.append(woken)  # before the next look: the thread that ends the call sees one of the two
        while not self._ends:
            woken.acquire(timeout=_SIGNAL_SECONDS)

    def exception(self) -> BaseException | None:
        """Wait for the end of the call; returns its exception, or None."""
        self.wait()
        return self._ends[0][1]

    def result(self) -> Value:
        """Wait for the end of the call; returns or raises its outcome."""
        self.wait()
        value, error = self._ends[0]
        if error is not None:
            try:
                raise error
            finally:
                del error, self  # the traceback refers to them: a cycle
        return cast(Value, value)

    def set_result(self, value: Value) -> None:
        """End the call with its result, unless it has ended already."""
        self._end(value, None)

    def set_exception(self, error: BaseException) -> None:
        """End the call with an exception, unless it has ended already."""
        self._end(None, error)

    def run(self, action: Callable[[], Value]) -> None:
        """Make the call."""
        try:
            self.set_result(action())
        except BaseException as error:  # noqa: BLE001 - raised by `result`
            self.set_exception(error)

    def _end(self, value: Value | None, error: BaseException | None) -> None:
        if not self._ends:
            self._ends.append((value, error))
        with contextlib.suppress(IndexError):  # none is left
            while True:
                self._waiting.pop().release()  # after an interrupt in between, that thread looks again in a moment


class Flight(Outcome[Buffer]):
    """The fetch of a block. Its result is the bytes of the block. Thread-safe."""

    def __init__(self) -> None:
        super().__init__()
        self._on_promote: Callable[[], None] | None = None
        self._promoted = False
        self.fetch_id = ""
        """The id of the fetch that it is a part of, see `events.fetch_id`."""

    def on_promote(self, promote: Callable[[], None]) -> None:
        """Call `promote`, once or twice, when a caller waits for the block; at once if one waits already."""
        self._on_promote = promote
        if self._promoted:
            promote()

    def promote(self) -> None:
        """Note that a caller waits for the block, which was requested as read-ahead."""
        # Written before the other is read, as in `on_promote`: one of the two sees both.
        self._promoted = True
        if self._on_promote is not None:
            self._on_promote()


class Flights:
    """The fetches in progress in this process. Thread-safe."""

    def __init__(self) -> None:
        self._flights: dict[BlockKey, Flight] = {}
        self._lock = threading.Lock()

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._flights

    def join(self, object_id: bytes, blocks: Iterable[int]) -> tuple[dict[int, Flight], dict[int, Flight]]:
        """Split `blocks` into those that the caller must fetch and those that are in flight already.

        The caller must end every flight of the first kind, by `complete` or `fail`.
        """
        mine: dict[int, Flight] = {}
        theirs: dict[int, Flight] = {}
        try:
            with self._lock:
                for block in blocks:
                    flight = self._flights.get((object_id, block))
                    if flight is None:
                        mine[block] = flight = Flight()
                        self._flights[object_id, block] = flight
                    else:
                        theirs[block] = flight
        except BaseException:  # an interrupt: other threads would wait without end for a flight without an end
            for block, flight in mine.items():
                self.fail((object_id, block), flight, StorageError("a fetch was interrupted", next_step="read again"))
            raise
        return mine, theirs

    def complete(self, key: BlockKey, flight: Flight, data: Buffer) -> None:
        """Pass a fetched block to all that wait for it, unless it has failed: the thread that started it was interrupted."""
        self._remove(key, flight)
        flight.set_result(data)

    def fail(self, key: BlockKey, flight: Flight, error: BaseException) -> None:
        """Raise `error` in all that wait for a block, unless it is complete."""
        self._remove(key, flight)
        flight.set_exception(error)

    def _remove(self, key: BlockKey, flight: Flight) -> None:
        # Only this flight: after it has ended, another one for the same block may be in progress.
        with self._lock:
            if self._flights.get(key) is flight:
                del self._flights[key]


# --- the fetch that an event belongs to -----------------------------------------------------------

_fetches = itertools.count(1)
_MACHINE = f"{zlib.crc32(os.uname().nodename.encode()) & 0xFFFF:04x}"


def new_fetch_id() -> str:
    """An id that no other fetch on this machine has at this time, and hardly one on another machine."""
    return f"{_MACHINE}-{os.getpid():x}-{next(_fetches):x}"


def in_fetch(identifier: str, action: Callable[[], Value]) -> Value:
    """The result of `action`. Events and log lines of this thread are part of a fetch until it returns or raises.

    A function and not a context manager, for the reason in `IndexTransactions.write`: after an interrupt, all later reads of
    the thread would seem to be part of this fetch.
    """
    context = copy_context()
    context.run(fetch_id.set, identifier)
    return context.run(action)
