import fcntl
import itertools
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.support.held_locks import holding
from tests.support.interrupts import interrupted_at
from tests.support.waiting import in_other_thread, wait_until

from millrace.errors import StorageError
from millrace.runtime.directories import locked_directory
from millrace.runtime.locks import (
    _LOOK_SECONDS,
    _SIGNS,
    Activity,
    FileLock,
    LockWait,
    NamedLocks,
    Outcome,
    SharedLocks,
    SilenceCheck,
    StoppedHolderError,
    lock_number,
    place_of,
    this_process,
)

HOLD = (
    "import pathlib, sys; from millrace.runtime.locks import FileLock;"
    "lock = FileLock(pathlib.Path(sys.argv[1]), 'a process'); lock.threads.acquire();"
    "lock.__enter__(); print('held', flush=True); sys.stdin.read()"
)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.runtime.locks.SILENCE_SECONDS", 0.3)


@pytest.mark.usefixtures("impatient")
def test_file_lock_whose_holder_is_stopped_raises(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    lock = FileLock(path, f"the holder of {path}")
    with holding(HOLD, path) as other:
        other.send_signal(signal.SIGSTOP)
        for _ in range(2):
            with pytest.raises(StorageError, match="does not continue: continue or end") as raised, lock:
                pytest.fail("two hold the lock")
        assert str(tmp_path) in str(raised.value)
        other.kill()
        other.wait()
        with lock.threads, lock:
            pass
        with lock.threads, lock:  # it was released
            pass
    lock.close()


@pytest.mark.usefixtures("impatient")
def test_file_lock_whose_holder_is_stopped_raises_at_once_the_second_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    sleep = pauses.append
    path = tmp_path / "lock"
    lock = FileLock(path, f"the holder of {path}")
    with holding(HOLD, path) as other:
        other.send_signal(signal.SIGSTOP)
        with pytest.raises(StorageError), lock:
            pass
        monkeypatch.setattr("millrace.runtime.locks.time.sleep", sleep)
        with pytest.raises(StorageError), lock:
            pass
        assert pauses == []
        other.kill()
        other.wait()
    with lock.threads, lock:
        pass
    lock.close()


def test_file_lock_taken_again_after_another_process_has_the_sign_of_its_holder(tmp_path: Path) -> None:
    """With the sign of a process that runs, a stopped holder would be waited for each time until `WORKING_SECONDS`."""
    path = tmp_path / "lock"
    lock = FileLock(path, "a process")
    code = (
        "import pathlib, sys; from millrace.runtime import locks; locks.TICK_SECONDS = 1000;"
        "lock = locks.FileLock(pathlib.Path(sys.argv[1]), 'a process'); lock.threads.acquire();"
        "lock.__enter__(); lock.__exit__();"
        "print('released', flush=True); sys.stdin.readline(); lock.__enter__(); print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        try:
            assert other.stdout.readline() == "released\n"
            with lock.threads, lock:
                assert lock.sign_of(0)[1] == os.getpid()
            other.stdin.write("\n")
            other.stdin.flush()
            assert other.stdout.readline() == "held\n"
            assert lock.sign_of(0)[1] == other.pid
        finally:
            other.kill()
    lock.close()


@pytest.mark.parametrize(
    ("signs", "place"),
    [
        ([(0, 0, 0, 0), (0, 0, 0, 0)], 0),  # a new file
        ([(5, 1, 1, 7), (0, 0, 0, 0)], 0),  # written before
        ([(8, 2, 1, 9), (0, 0, 0, 0)], 1),  # the first place is in use
        ([(8, 2, 1, 9), (5, 1, 1, 7)], 1),
        ([(8, 2, 1, 9), (9, 2, 1, 11)], 0),  # all are: the oldest
        ([(4, 2, 1, 7), (5, 1, 1, 7)], 1),  # two, after a race: the last
        ([(8, 2, 1, 9), (99, 2, 1, 9)], 1),  # of the future: another boot
        ([(8, 2, 1, 9), (99, 2, 1, 7), (5, 2, 1, 11)], 1),
        ([(0, 0, 0, 0), (99, 2, 1, 7)], 1),  # written since the clock was read, or in another time namespace
        ([(5, 2, 1, 7), (99, 2, 1, 7)], 0),
        ([(8, 2, 1, 9), (0, 2, 1, 7), (5, 2, 1, 7)], 2),
    ],
)
def test_place_of_a_sign(signs: list[tuple[int, int, int, int]], place: int) -> None:
    assert place_of(signs, 7, now=10) == place


@pytest.mark.usefixtures("impatient")
def test_running_holder_of_another_lock_does_not_make_a_stopped_one_seem_to_run(tmp_path: Path) -> None:
    """The places of the two were the same, and each reader waited for `WORKING_SECONDS`: 180 s for each block."""
    code = (
        "import pathlib, sys; from millrace.runtime.locks import _SIGNS, SharedLocks;"
        "locks = SharedLocks(pathlib.Path(sys.argv[1])); locks.try_acquire(3 + _SIGNS);"
        "print('held', flush=True); sys.stdin.read()"
    )
    locks = SharedLocks(tmp_path / "locks")
    with holding(code, tmp_path / "locks") as other:
        other.send_signal(signal.SIGSTOP)
        assert locks.try_acquire(3)
        wait = LockWait(locks)
        deadline = time.monotonic() + 60
        while not wait.is_silent(3 + _SIGNS):
            assert time.monotonic() < deadline
            locks.beat()
            time.sleep(0.01)
        assert locks.sign_of(3)[1] == os.getpid()
        assert locks.sign_of(3 + _SIGNS)[1] == other.pid
    locks.close()


@pytest.mark.usefixtures("impatient")
def test_sign_of_a_former_holder_does_not_make_a_stopped_one_seem_to_run(tmp_path: Path) -> None:
    """The holder is stopped before it writes its sign. The last one is that of a process that runs: of the waiting one."""
    code = (
        "import pathlib, sys; from millrace.runtime.locks import SharedLocks, try_lock_byte;"
        "locks = SharedLocks(pathlib.Path(sys.argv[1])); assert try_lock_byte(locks._descriptor, 3);"
        "print('held', flush=True); sys.stdin.read()"
    )
    locks = SharedLocks(tmp_path / "locks")
    assert locks.try_acquire(3)
    locks.release(3)
    with holding(code, tmp_path / "locks") as other:
        other.send_signal(signal.SIGSTOP)
        assert locks.sign_of(3)[1] == os.getpid()
        assert not locks.acquire(3, limit=60.0)
        assert LockWait(locks).is_silent(3)
        assert locks.has_lock(other.pid, 3)
        assert not locks.has_lock(os.getpid(), 3)
    assert locks.acquire(3)
    assert locks.has_lock(os.getpid(), 3)
    locks.close()


@pytest.mark.usefixtures("impatient")
def test_process_that_is_stopped_for_long_is_silent_at_the_first_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process that opened a store waited .6 s, one after the other: 40 s for 64 of them."""
    path = tmp_path / "lock"
    with holding(HOLD, path) as other:
        other.send_signal(signal.SIGSTOP)
        assert not SharedLocks(path).acquire(0, limit=60.0)
        monkeypatch.setattr("millrace.runtime.locks.GRACE_SECONDS", 600.0)
        locks = SharedLocks(path)
        assert LockWait(locks).is_silent(0)
        locks.close()


def test_file_lock_is_not_released_in_the_middle_of_a_beat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The beat would replace the sign of the next holder."""
    lock = FileLock(tmp_path / "lock", "a process")
    lock.threads.acquire()
    lock.__enter__()
    writing, proceed = threading.Event(), threading.Event()

    def write_sign(place: int, number: int, now: int) -> None:
        writing.set()
        assert proceed.wait(300)

    monkeypatch.setattr(lock, "_write_sign", write_sign)
    beat = threading.Thread(target=lock.beat)
    beat.start()
    assert writing.wait(300)
    release = threading.Thread(target=lock.__exit__)
    release.start()
    release.join(0.2)
    assert release.is_alive()
    proceed.set()
    release.join()
    beat.join()
    lock.close()


def test_file_lock_held_by_another_thread_is_taken_after_its_release(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "lock", "a thread")
    inside, proceed, order = threading.Event(), threading.Event(), []

    def hold() -> None:
        with lock.threads, lock:
            inside.set()
            proceed.wait(120)
            order.append("first")

    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(120)
    proceed.set()
    with lock.threads, lock:
        order.append("second")
    thread.join()
    assert order == ["first", "second"]
    lock.close()


def test_file_lock_that_an_interrupt_left_locked_becomes_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a Ctrl-C at the first instruction of `release`, while the process lives on and writes heartbeats."""
    path = tmp_path / "lock"
    lock, other = FileLock(path, "a process"), FileLock(path, "another one")
    release = SharedLocks.release

    def interrupted(self: SharedLocks, number: int) -> None:
        monkeypatch.setattr(SharedLocks, "release", release)
        raise KeyboardInterrupt

    monkeypatch.setattr(SharedLocks, "release", interrupted)
    with pytest.raises(KeyboardInterrupt), lock.threads, lock:
        pass
    with other.threads, other:
        pass
    with lock.threads, lock:
        pass
    for each in (lock, other):
        each.close()


@pytest.mark.parametrize("at", [fcntl.F_WRLCK, fcntl.F_UNLCK], ids=["lock", "unlock"])
def test_file_lock_is_free_after_an_interrupt_next_to_a_system_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """A Ctrl-C is raised after the call that locks the file, or before the one that unlocks it."""
    path = tmp_path / "lock"
    lock, other = FileLock(path, "a process"), FileLock(path, "another one", limit=60.0)
    call, interrupts = fcntl.fcntl, [at]

    def interrupted(descriptor: int, command: int, argument: bytes) -> object:
        is_here = threading.current_thread() is threading.main_thread()  # not a thread that another test left
        found = is_here and interrupts and struct.unpack_from("h", argument)[0] == at
        if found and at == fcntl.F_UNLCK:
            interrupts.clear()
            raise KeyboardInterrupt
        result = call(descriptor, command, argument)
        if found:
            interrupts.clear()
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(fcntl, "fcntl", interrupted)
    with pytest.raises(KeyboardInterrupt), lock.threads, lock:
        pass
    assert not interrupts
    lock.beat()
    assert other.try_acquire(0)
    for each in (lock, other):
        each.close()


@pytest.mark.parametrize("method", ["acquire", "release"])
def test_named_lock_is_free_after_an_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    path = tmp_path / "locks"
    locks, other = NamedLocks(path), NamedLocks(path)
    original = getattr(locks, method)

    def interrupted(number: int) -> None:
        monkeypatch.setattr(locks, method, original)
        if method == "acquire":  # an interrupt right after it
            original(number)
        raise KeyboardInterrupt

    monkeypatch.setattr(locks, method, interrupted)
    with pytest.raises(KeyboardInterrupt), locks.threads(b"a"), locks.processes(b"a"):
        pass
    assert other.try_acquire(lock_number(b"a"))
    for each in (locks, other):
        each.close()


@pytest.mark.usefixtures("impatient")
def test_file_lock_of_a_killed_parent_is_free_while_its_child_runs(tmp_path: Path) -> None:
    """A process is killed while it holds the lock; a child that it had forked before still runs."""
    path = tmp_path / "lock"
    code = (
        "import os, pathlib, sys, time; from millrace.runtime.locks import FileLock;"
        "lock = FileLock(pathlib.Path(sys.argv[1]), 'a process'); lock.threads.acquire(); lock.__enter__();"
        "child = os.fork(); print(child, flush=True) if child else None; time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        child = int(other.stdout.readline())
        try:
            other.kill()
            other.wait()
            with FileLock(path, "a process"):
                os.kill(child, 0)  # it lives
        finally:
            os.kill(child, signal.SIGKILL)


def test_running_process_is_silent_for_none_of_its_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is too slow to write its signs, as on a busy machine; later it does not run at all."""
    for name, seconds in {"SILENCE_SECONDS": 0.0, "GRACE_SECONDS": 0.0, "_LOOK_SECONDS": 600.0}.items():
        monkeypatch.setattr(f"millrace.runtime.locks.{name}", seconds)
    process = subprocess.Popen(["sleep", "600"])
    try:
        while "State:\tS" not in Path(f"/proc/{process.pid}/status").read_text(encoding="ascii"):
            time.sleep(0.01)
        check = SilenceCheck(lambda number: (1, process.pid, this_process()[1]), {}, lambda process, number: True)
        assert [check.is_silent(number) for number in range(3)] == [False, False, False]
        process.send_signal(signal.SIGSTOP)
        assert os.waitpid(process.pid, os.WUNTRACED)[1] != 0
        monkeypatch.setattr("millrace.runtime.locks._LOOK_SECONDS", 0.0)
        check.is_silent(0)  # it has run since the last look
        assert [check.is_silent(number) for number in range(3)] == [True, True, True]
    finally:
        process.kill()
        process.wait()


def test_process_whose_threads_all_wait_for_the_disk_does_not_continue(tmp_path: Path) -> None:
    """So does the kernel show a process of a paused container (cgroup v1). A process that works has idle threads as well."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    # Waits for its child, which waits for the other end of the pipe: without a signal, as for a disk.
    spawn = "os.posix_spawn('/bin/true', ['true'], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 9, sys.argv[1], os.O_RDONLY, 0)])"
    start = "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()"
    for idle, expected in (("", False), (start, True)):
        code = f"import os, sys, threading, time\n{idle}\n{spawn}"
        process = subprocess.Popen([sys.executable, "-c", code, str(fifo)])
        try:
            status = Path(f"/proc/{process.pid}/status")
            wait_until(lambda status=status: "State:\tD" in status.read_text(encoding="ascii"))
            activity = Activity()
            activity.continues(process.pid)
            time.sleep(2 * _LOOK_SECONDS)
            assert activity.continues(process.pid) is expected
        finally:
            process.kill()
            os.close(os.open(fifo, os.O_RDWR))  # ends its child; does not wait for a reader
            process.wait()


def test_process_that_ran_since_the_last_look_continues_when_it_was_checked_for_a_stop_since() -> None:
    """A holder whose heartbeats are late was checked at each attempt, and had to run between the last two of them."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        activity = Activity()
        wait_until(lambda: not activity.continues(process.pid))
        time.sleep(2 * _LOOK_SECONDS)
        process.stdin.write(b"a")
        assert process.stdout.read(1) == b"a"
        wait_until(lambda: "State:\tS" in Path(f"/proc/{process.pid}/status").read_text(encoding="ascii"))
        assert not activity.is_stopped(process.pid)
        time.sleep(2 * _LOOK_SECONDS)
        assert activity.continues(process.pid)
        process.send_signal(signal.SIGSTOP)
        assert os.waitpid(process.pid, os.WUNTRACED)[1] != 0
        wait_until(lambda: activity.is_stopped(process.pid))
        process.kill()


def test_named_lock_held_by_another_thread_is_taken_after_its_release(tmp_path: Path) -> None:
    locks = NamedLocks(tmp_path / "locks")
    order: list[str] = []
    inside, proceed = threading.Event(), threading.Event()

    def hold() -> None:
        with locks.threads(b"a"), locks.processes(b"a"):
            inside.set()
            proceed.wait(120)
            order.append("first")

    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(120)
    with locks.threads(b"b"), locks.processes(b"b"):  # another name is free
        proceed.set()
    with locks.threads(b"a"), locks.processes(b"a"):
        order.append("second")
    thread.join()
    assert order == ["first", "second"]
    assert dict(locks._threads) == {}
    locks.close()


@pytest.mark.usefixtures("impatient")
def test_named_lock_whose_holder_is_stopped_is_entered_without_it(tmp_path: Path) -> None:
    path = tmp_path / "locks"
    code = (
        "import pathlib, sys; from millrace.runtime.locks import NamedLocks;"
        "locks = NamedLocks(pathlib.Path(sys.argv[1])); held = locks.processes(b'a'); held.__enter__();"
        "print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(path)]
    locks = NamedLocks(path)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        other.send_signal(signal.SIGSTOP)
        with locks.threads(b"a"), locks.processes(b"a"):
            assert other.poll() is None
        other.kill()
    locks.close()


def test_directory_lock_is_free_while_a_child_forked_under_it_runs(tmp_path: Path) -> None:
    waiting, ending = os.pipe()
    with locked_directory(tmp_path, fcntl.LOCK_EX):
        child = os.fork()
        if child == 0:
            os.close(ending)
            os.read(waiting, 1)  # until the parent closes its end
            os._exit(0)
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(descriptor)
        os.close(ending)
        os.waitpid(child, 0)
        os.close(waiting)


def test_interrupt_at_any_moment_leaves_a_named_lock_free(tmp_path: Path) -> None:
    locks, other = NamedLocks(tmp_path / "locks"), NamedLocks(tmp_path / "locks")

    def enter(locks: NamedLocks) -> str:
        with locks.threads(b"a"), locks.processes(b"a"):
            return "entered"

    for number in itertools.count():
        interrupt = interrupted_at(number, lambda: enter(locks))  # as long as it exists, so does its traceback
        wait_until(lambda: other.try_acquire(lock_number(b"a")))  # a beat releases it
        other.release(lock_number(b"a"))
        assert in_other_thread(lambda: enter(locks)) == "entered"
        if interrupt is None:
            break
    assert number > 5
    for each in (locks, other):
        each.close()


# --- outcomes of calls ------------------------------------------------------------------------------


def test_interrupt_at_any_moment_of_a_wait_leaves_the_outcome_usable() -> None:
    for number in itertools.count():
        outcome: Outcome[int] = Outcome()
        waits_no_more = threading.Event()

        def end(outcome: Outcome[int] = outcome, over: threading.Event = waits_no_more) -> None:
            while not outcome._waiting and not over.is_set():
                time.sleep(0.0005)
            outcome.set_result(7)

        thread = threading.Thread(target=end)
        thread.start()
        interrupt = interrupted_at(number, outcome.result)  # as long as it exists, so does its traceback
        waits_no_more.set()
        assert in_other_thread(outcome.result) == 7
        thread.join(60.0)
        assert not thread.is_alive()
        if interrupt is None:
            break
    assert number > 3


def test_interrupt_at_any_moment_of_the_end_of_a_call_leaves_nobody_waiting() -> None:
    for number in itertools.count():
        outcome: Outcome[int] = Outcome()
        results: list[int] = []
        thread = threading.Thread(target=lambda outcome=outcome, results=results: results.append(outcome.result()))
        thread.start()
        while not outcome._waiting:
            time.sleep(0.0005)
        interrupt = interrupted_at(number, lambda outcome=outcome: outcome.set_result(7))
        outcome.set_result(8)  # as the code that handles the interrupt
        thread.join(60.0)
        assert not thread.is_alive()
        assert results in ([7], [8])
        assert outcome.result() == results[0]
        if interrupt is None:
            break
    assert results == [7]
    assert number > 1


def test_error_of_a_stopped_holder_is_picklable() -> None:
    error = StoppedHolderError("process 7")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.next_step) == (StoppedHolderError, str(error), error.next_step)
