"""The limiter of an origin: its state among real processes, slots that the kernel releases, the gate, and the schedule."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import signal
import stat
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.support.clocks import TimeWithoutWaits
from tests.support.interrupts import WITH_IS_BROKEN, interrupts
from tests.support.origins import MemoryOrigin
from tests.support.stacks import new_stacks, stacks_of, write_stacks_on_signal
from tests.support.waiting import wait_until

from millrace.config import SILENCE_SECONDS
from millrace.errors import ConfigurationError, StorageError
from millrace.events import Event
from millrace.origin import open_origin
from millrace.origin.base import LimitedOrigin, Limits, limited
from millrace.origin.limits import slots as slots_module
from millrace.origin.limits.retrying import in_slot
from millrace.origin.limits.slots import FEW_REQUESTS, GateClosed, NodeLimiter, NodeState, Number, Slot, node_limiter

DEADLINE = 60.0

HOLDER = """
import sys, time
from pathlib import Path
from millrace.origin.limits.slots import NodeLimiter
limiter = NodeLimiter("x", Path(sys.argv[1]), most=int(sys.argv[2]), per_second=None)
slots = [limiter.acquire(60.0) for _ in range(int(sys.argv[3]))]
print("held", flush=True)
sys.stdin.readline()
for slot in slots:
    limiter.release(slot, responded=True)
print("left", flush=True)
sys.stdin.readline()
"""


class Holder:
    """A process that holds slots of a limiter."""

    def __init__(self, path: Path, most: int, slots: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(path), str(most), str(slots)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.next_line() == "held"

    def next_line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "limits" / "origin"


@pytest.fixture
def hold(path: Path) -> Iterator[Callable[[int, int], Holder]]:
    """Start a process that holds so many slots of at most so many: `hold(most, slots)`."""
    holders: list[Holder] = []

    def start(most: int, slots: int) -> Holder:
        holders.append(Holder(path, most, slots))
        return holders[-1]

    yield start
    for holder in holders:
        holder.end()


def acquire(limiter: NodeLimiter, patience_seconds: float = 60.0) -> Slot:
    slot = limiter.acquire(patience_seconds)
    assert isinstance(slot, Slot)
    return slot


def in_thread(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def make(path: Path | None, most: int = 4, per_second: float | None = None) -> NodeLimiter:
    return NodeLimiter("test+origin", path, most=most, per_second=per_second)


# --- slots --------------------------------------------------------------------------------------------


def test_each_holder_of_a_slot_writes_a_newer_sign(tmp_path: Path) -> None:
    states, signs = [NodeState(tmp_path / "x"), NodeState(tmp_path / "x")], []
    for holder, other in (states, reversed(states)):
        assert holder.take(0)
        assert not other.take(0)
        assert (holder.taken_by_others(), other.taken_by_others()) == ([], [0])
        signs.append(other.sign_of(0))
        holder.beat(0)
        signs.append(other.sign_of(0))
        holder.release(0)
    assert signs == sorted(set(signs))
    assert states[0].taken_by_others() == []


def test_slots_of_a_killed_process_do_not_count_as_taken(path: Path, hold: Callable[[int, int], Holder]) -> None:
    holder = hold(4, 3)
    state = NodeState(path)
    assert len(state.taken_by_others()) == 3
    holder.end()
    assert state.taken_by_others() == []


@pytest.mark.parametrize("shared", [True, False])
def test_requests_in_flight_never_exceed_the_limit(path: Path, shared: bool) -> None:
    limiter = make(path if shared else None)
    lock, at_once, seen = threading.Lock(), 0, []

    def work() -> None:
        nonlocal at_once
        for _ in range(40):
            slot = acquire(limiter)
            with lock:
                at_once += 1
                seen.append(at_once)
            time.sleep(0.0002)
            with lock:
                at_once -= 1
            limiter.release(slot, responded=True)

    threads = [in_thread(work) for _ in range(16)]
    for thread in threads:
        thread.join(DEADLINE)
        assert not thread.is_alive()
    assert len(seen) == 16 * 40
    assert max(seen) <= 4


def test_slots_of_two_processes_are_shared(path: Path, hold: Callable[[int, int], Holder]) -> None:
    holder = hold(4, 3)
    limiter = make(path)
    last = acquire(limiter)
    waiting: list[Slot] = []
    thread = in_thread(lambda: waiting.append(acquire(limiter)))
    time.sleep(0.2)
    assert not waiting  # nothing to wait on: it must stay so
    holder.go_on()
    thread.join(DEADLINE)
    assert len(waiting) == 1
    limiter.release(last, responded=True)
    limiter.release(waiting[0], responded=True)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_slots_of_a_killed_process_become_free(
    path: Path, hold: Callable[[int, int], Holder], number: signal.Signals
) -> None:
    holder = hold(4, 4)
    limiter = make(path)
    slots: list[Slot] = []
    threads = [in_thread(lambda: slots.append(acquire(limiter))) for _ in range(4)]
    time.sleep(0.1)
    assert not slots
    holder.process.send_signal(number)
    for thread in threads:
        thread.join(DEADLINE)
    assert len({slot.number for slot in slots}) == 4


def test_limiter_with_a_lower_limit_keeps_its_own(path: Path, hold: Callable[[int, int], Holder]) -> None:
    hold(8, 6)
    modest = make(path, most=2)
    got: list[Slot] = []
    for _ in range(3):
        in_thread(lambda: got.append(acquire(modest)))
    time.sleep(0.2)
    assert len(got) <= 2
    assert {slot.number for slot in got} <= {0, 1}


def test_waiters_of_one_process_are_served_in_order(path: Path) -> None:
    limiter = make(path, most=1)
    first = acquire(limiter)
    order: list[int] = []

    def work(number: int) -> None:
        slot = acquire(limiter)
        order.append(number)
        limiter.release(slot, responded=True)

    threads = []
    for number in range(6):
        threads.append(in_thread(lambda number=number: work(number)))  # type: ignore[misc]
        wait_until(lambda number=number: len(limiter._waiting) == number + 1)  # type: ignore[misc]
    limiter.release(first, responded=True)
    for thread in threads:
        thread.join(DEADLINE)
    assert order == list(range(6))


def test_waiters_of_two_processes_both_get_slots(path: Path) -> None:
    """A process that always has waiters must not keep every slot to itself."""
    program = """
import sys, threading, time
from pathlib import Path
from millrace.origin.limits.slots import NodeLimiter
limiter = NodeLimiter("x", Path(sys.argv[1]), most=2, per_second=None)
stop, done = threading.Event(), [0]
def work():
    while not stop.is_set():
        slot = limiter.acquire(60.0)
        time.sleep(0.002)
        limiter.release(slot, responded=True)
        done[0] += 1
threads = [threading.Thread(target=work) for _ in range(6)]
[thread.start() for thread in threads]
print("runs", flush=True)
while sys.stdin.readline().strip() != "end":
    print(done[0], flush=True)
stop.set()
"""
    both = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]

    def ask(process: subprocess.Popen[str]) -> int:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("how many\n")
        process.stdin.flush()
        return int(process.stdout.readline())

    try:
        for process in both:
            assert process.stdout is not None
            assert process.stdout.readline() == "runs\n"
        begun = [ask(process) for process in both]
        wait_until(lambda: all(ask(process) >= before + 20 for process, before in zip(both, begun, strict=True)))
    finally:
        for process in both:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("waits_for", ["a slot", "the gate", "the schedule"])
def test_interrupted_wait_leaves_no_slot_and_no_waiter(path: Path, waits_for: str) -> None:
    limiter = make(path, most=1, per_second=0.01 if waits_for == "the schedule" else None)
    held = acquire(limiter)
    if waits_for != "a slot":
        limiter.release(held, responded=True)
    if waits_for == "the gate":
        limiter.close_gate(held, retry_after=50.0)
    with interrupts() as interrupt_after:

        def wait() -> None:
            interrupt_after(0.1)
            limiter.acquire(60.0)

        with pytest.raises(KeyboardInterrupt):
            wait()
    limiter.release(held, responded=True)
    assert not limiter._waiting
    assert not limiter._held


@pytest.mark.skipif(WITH_IS_BROKEN, reason="python/cpython#148874: an interrupt at `with lock:` leaves the lock held")
def test_interrupt_at_any_moment_leaves_no_slot_and_no_waiter(path: Path) -> None:
    limiter = make(path, most=2)
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            in_slot(limiter, "x", lambda: time.sleep(0), lambda: None)

    threads = [in_thread(work) for _ in range(3)]
    try:
        with interrupts() as interrupt_after:
            for number in range(400):
                with contextlib.suppress(KeyboardInterrupt):
                    interrupt_after(0.0002 + number * 5e-6)
                    while True:
                        in_slot(limiter, "x", lambda: None, lambda: None)
    finally:
        stop.set()
    for thread in threads:
        thread.join(DEADLINE)
        assert not thread.is_alive()
    # Only these two are left: the next caller releases a slot that an interrupt in the middle of a release has left.
    slots = [acquire(limiter), acquire(limiter)]
    assert set(limiter._held) == {slot.number for slot in slots}
    assert not limiter._waiting


def test_slot_without_references_is_released(path: Path) -> None:
    limiter = make(path, most=1)
    lost = acquire(limiter)
    threads = [in_thread(lambda: limiter.release(acquire(limiter), responded=True)) for _ in range(2)]
    wait_until(lambda: len(limiter._waiting) == 2)
    gone = Slot()
    limiter._waiting.appendleft(weakref.ref(gone))  # as of a thread that was interrupted again while it cleaned up
    del lost, gone
    for thread in threads:
        thread.join(DEADLINE)
        assert not thread.is_alive()


# --- fork ---------------------------------------------------------------------------------------------


STACKS = new_stacks()  # of all children


def in_child(call: Callable[[], bool]) -> int:
    """Fork; the child calls and returns the result as its exit code. Returns its pid."""
    pid = os.fork()
    if pid == 0:
        code = 2
        try:
            write_stacks_on_signal(STACKS)
            code = 0 if call() else 1
        finally:
            os._exit(code)
    return pid


def exit_code(pid: int) -> int:
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    found = stacks_of(pid, STACKS)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError(f"the child hangs: {found}")


@pytest.mark.parametrize("shared", [True, False])
def test_forked_child_has_no_slots_of_its_parent(path: Path, shared: bool) -> None:
    limiter = node_limiter("forked", path if shared else None, most=2, per_second=None)
    held = acquire(limiter)

    def child() -> bool:
        limiter.release(held, responded=True)  # the parent's: nothing happens
        mine = acquire(limiter)
        return mine.number != held.number if shared else True

    assert exit_code(in_child(child)) == 0
    # The child's slot came back with its end, and the parent's own was not given away.
    other = acquire(limiter)
    assert other.number != held.number


def test_forked_child_that_outlives_its_parent_does_not_keep_its_slots(path: Path) -> None:
    """The kernel frees locks of a description when its last copy is closed: the child must not have one."""
    program = """
import os, sys, time
from pathlib import Path
from millrace.origin.limits.slots import node_limiter
limiter = node_limiter("x", Path(sys.argv[1]), most=1, per_second=None)
slot = limiter.acquire(60.0)
pid = os.fork()
if pid == 0:
    time.sleep(60)
    os._exit(0)
print(pid, flush=True)
sys.stdin.readline()
os._exit(0)
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        parent.kill()
        parent.wait()
        slots: list[Slot] = []
        thread = in_thread(lambda: slots.append(acquire(make(path, most=1))))
        thread.join(DEADLINE)
        assert len(slots) == 1
    finally:
        os.kill(child, signal.SIGKILL)
        parent.communicate()


def test_forked_child_of_a_busy_parent_acquires_slots(path: Path) -> None:
    limiter = node_limiter("busy parent", path, most=2, per_second=None)
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            limiter.release(acquire(limiter), responded=True)

    threads = [in_thread(work) for _ in range(4)]
    try:
        for _ in range(5):

            def child() -> bool:
                limiter.release(acquire(limiter), responded=True)
                return True

            assert exit_code(in_child(child)) == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join(DEADLINE)


# --- gate ---------------------------------------------------------------------------------------------


def test_closed_gate_applies_to_every_process(path: Path) -> None:
    one, other = make(path), make(path)
    slot = acquire(one)
    assert one.close_gate(slot, retry_after=1000.0)
    one.release(slot, responded=False)
    for limiter in (one, other):
        answer = limiter.acquire(60.0)
        assert isinstance(answer, GateClosed)
        assert 800.0 < answer.seconds <= 905.0  # 1,000 s is more than any gate stays closed


def test_pause_within_the_patience_is_waited_for_and_counted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots_module, "time", TimeWithoutWaits())
    limiter = make(path)
    slot = acquire(limiter)
    limiter.close_gate(slot, retry_after=2.0)
    limiter.release(slot, responded=False)
    later = acquire(limiter)
    assert later.started - slot.started >= 2.0
    assert later.gate_seconds == pytest.approx(later.started - slot.started)
    limiter.release(later, responded=True)


def test_slow_downs_of_concurrent_requests_close_the_gate_once(path: Path, events: list[Event]) -> None:
    limiter = make(path, most=64)
    crowd = [acquire(limiter) for _ in range(40)]
    assert [limiter.close_gate(slot, None) for slot in crowd].count(True) == 1
    state = limiter._state
    assert state is not None
    assert state.numbers[Number.CLOSINGS] == 1
    assert limiter._window().requests == FEW_REQUESTS
    assert limiter._window().threshold == 32.0
    assert [event.name for event in events] == ["origin.gate.closed"]


def test_gate_after_a_pause_opens_for_a_few_and_then_for_more(path: Path, events: list[Event]) -> None:
    limiter = make(path, most=8)
    crowd = [acquire(limiter) for _ in range(8)]
    limiter.close_gate(crowd[0], retry_after=0.05)
    for slot in crowd:
        limiter.release(slot, responded=True)  # successes of before the closing open nothing
    assert [event.name for event in events] == ["origin.gate.closed"]
    few = [acquire(limiter) for _ in range(FEW_REQUESTS)]
    got: list[Slot] = []
    thread = in_thread(lambda: got.append(acquire(limiter)))
    time.sleep(0.1)
    assert not got
    for slot in few:
        limiter.release(slot, responded=True)
    thread.join(DEADLINE)
    assert len(got) == 1
    assert [event.name for event in events] == ["origin.gate.closed", "origin.gate.opened"]
    assert {event.subject for event in events} == {"test+origin"}
    limiter.release(got[0], responded=True)
    while not limiter._window().is_open:
        limiter.release(acquire(limiter), responded=True)
    assert len(events) == 2


def test_success_with_a_low_limit_does_not_open_the_window_of_a_higher_one(path: Path) -> None:
    modest, large = make(path, most=4), make(path, most=64)
    crowd = [acquire(large) for _ in range(64)]
    large.close_gate(crowd[0], retry_after=0.05)
    for slot in crowd:
        large.release(slot, responded=False)
    for _ in range(40):
        modest.release(acquire(modest), responded=True)
    assert modest._window().is_open
    assert not large._window().is_open
    while not large._window().is_open:
        large.release(acquire(large), responded=True)
    assert large._window().requests == 64


def test_gate_after_repeated_closings_stays_closed_longer(path: Path) -> None:
    limiter = make(path)
    state = NodeState(path)
    pauses = []
    for _ in range(6):
        slot = Slot()
        slot.started = time.monotonic()
        limiter.close_gate(slot, None)
        pauses.append(state.numbers[Number.CLOSED_UNTIL] - state.numbers[Number.CLOSED_AT])
        with state.exclusive():
            state.numbers[Number.CLOSED_UNTIL] = 0.0  # as if the time had passed
    assert all(later > 0.9 * earlier for earlier, later in zip(pauses, pauses[2:5], strict=False))
    assert pauses[-1] > 1.9


# --- rate ---------------------------------------------------------------------------------------------


def test_rate_of_two_limiters_is_shared(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # By the times of the bookings: a thread may be delayed between its booking and the start of its request.
    begun: list[float] = []
    book = slots_module.next_start

    def noted(booked_until: float, now: float, per_second: float) -> tuple[float, float]:
        start, booked = book(booked_until, now, per_second)
        if start <= now:
            begun.append(now)
        return start, booked

    monkeypatch.setattr(slots_module, "next_start", noted)
    # A delayed thread is not taken for a stopped process.
    monkeypatch.setattr(slots_module, "SILENCE_SECONDS", DEADLINE)
    limiters = [make(path, most=64, per_second=50.0) for _ in range(2)]

    def work(limiter: NodeLimiter) -> None:
        for _ in range(5):
            limiter.release(acquire(limiter), responded=True)

    threads = [in_thread(lambda limiter=limiter: work(limiter)) for limiter in limiters for _ in range(2)]  # type: ignore[misc]
    for thread in threads:
        thread.join(DEADLINE)
    assert len(begun) == 20
    assert begun == sorted(begun)
    assert begun[-1] - begun[0] >= (20 - 5) / 50.0 - 0.001  # all but one burst of a tenth of a second


# --- the file -----------------------------------------------------------------------------------------


def test_state_file_has_private_permissions(path: Path) -> None:
    before = os.umask(0)
    try:
        make(path).acquire(1.0)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_state_file_behind_a_link_is_refused(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    path.parent.mkdir(mode=0o700)
    path.symlink_to(target)
    with pytest.raises(StorageError):
        NodeState(path)
    assert target.read_bytes() == b"precious"


@pytest.mark.parametrize("place", ["file", "link", "pipe"])
def test_limiter_without_a_shared_file_is_private_to_the_process(
    tmp_path: Path, events: list[Event], place: str
) -> None:
    path = tmp_path / "limits" / "origin"
    if place == "file":
        path.parent.write_bytes(b"in the way")
    else:
        path.parent.mkdir(mode=0o700)
        if place == "link":
            path.symlink_to("/dev/zero")
        else:
            os.mkfifo(path)
    limiter = make(path, most=1)
    slot = acquire(limiter)
    got: list[Slot] = []
    thread = in_thread(lambda: got.append(acquire(limiter)))
    time.sleep(0.05)
    assert not got
    limiter.release(slot, responded=True)
    thread.join(DEADLINE)
    assert len(got) == 1
    expected = "cache.file.recreated" if place == "pipe" else "origin.limits.private"
    assert [event.name for event in events] == [expected]


@pytest.mark.parametrize("content", [b"", b"x" * 20_000, b"millrace-limits 1 of another boot\n" + b"\xff" * 9_000])
def test_state_file_of_another_boot_or_program_is_initialized(path: Path, content: bytes, events: list[Event]) -> None:
    """Its numbers would be a closed gate, a schedule of another clock, and slots without a holder."""
    path.parent.mkdir(mode=0o700)
    path.write_bytes(content)
    limiter = make(path, most=3)
    slots = [limiter.acquire(0.0) for _ in range(3)]
    assert all(isinstance(slot, Slot) for slot in slots)
    state = limiter._shared_state()
    assert state.is_shared
    assert list(state.numbers[:8]) == [0.0] * 8
    assert not events
    after = NodeState(path)  # as another process opens it: it is valid, and not created a second time
    with after.exclusive():
        after.numbers[Number.CLOSINGS] = 7.0
    assert list(NodeState(path).numbers[:8]) == [7.0 * (number == Number.CLOSINGS) for number in range(8)]
    assert [slot for slot in range(8) if not after.take(slot)] == sorted(limiter._held)


def test_process_stopped_during_a_change_does_not_stop_the_others(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real stopped process keeps the lock. The others wait for it each time, with a bound."""
    monkeypatch.setattr(slots_module, "SILENCE_SECONDS", 0.1)
    program = """
import os, signal, sys
from pathlib import Path
from millrace.origin.limits.slots import NodeState
with NodeState(Path(sys.argv[1])).exclusive():
    print("in", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
"""
    limiter = make(path, most=1, per_second=1000.0)
    numbers = limiter._shared_state().numbers
    with subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"in\n"
            began = time.monotonic()
            slot = acquire(limiter)
            assert time.monotonic() - began >= 0.1
            booked = numbers[Number.BOOKED_UNTIL]
            assert booked > began  # the rate counts all the same, and so does the gate
            assert limiter.close_gate(slot, 30.0)
            assert isinstance(limiter.acquire(1.0), GateClosed)
            assert not limiter._shared_state()._lock(slots_module._flock(fcntl.F_WRLCK, slots_module._MUTEX_BYTE))
        finally:
            process.kill()
    # A dead one blocks no other.
    monkeypatch.setattr(slots_module, "SILENCE_SECONDS", 600.0)
    with limiter._shared_state().exclusive():
        numbers[Number.CLOSED_UNTIL] = 0.0
    limiter.release(slot, responded=True)
    limiter.release(acquire(limiter), responded=True)
    assert numbers[Number.BOOKED_UNTIL] > booked


def test_process_killed_while_waiting_has_booked_nothing(path: Path) -> None:
    program = """
import sys, threading, time
from pathlib import Path
from millrace.origin.limits.slots import NodeLimiter
limiter = NodeLimiter("x", Path(sys.argv[1]), most=64, per_second=0.2)
for _ in range(16):
    threading.Thread(target=limiter.acquire, args=(60.0,), daemon=True).start()
while len(limiter._held) < 15:  # one has had its slot
    time.sleep(0.01)
time.sleep(0.1)
print("wait", flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"wait\n"
        process.kill()
    limiter = make(path, per_second=0.2)
    assert limiter._shared_state().numbers[Number.BOOKED_UNTIL] <= time.monotonic() + 5.0
    limiter._shared_state().numbers[Number.BOOKED_UNTIL] = time.monotonic() + 1e6
    limiter.release(acquire(limiter), responded=True)


# --- around an origin ---------------------------------------------------------------------------------


def test_limited_origin_after_a_pickle_has_the_limits_of_the_receiver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_MAX_REQUESTS", "5")
    origin = open_origin("s3", {"key": "k", "secret": "s3cr3t"}, {"request_rate": 10, "cache_dir": str(tmp_path)})
    assert isinstance(origin, LimitedOrigin)
    assert "s3cr3t" not in repr(origin)
    monkeypatch.setenv("MILLRACE_MAX_REQUESTS", "6")  # as on the receiver's node
    copy = pickle.loads(pickle.dumps(origin))
    assert copy.identity == origin.identity
    here, there = origin.limiter_of("b/k"), copy.limiter_of("b/k")
    assert (here.most, here.per_second) == (5, 10.0)
    assert (there.most, there.per_second) == (6, 10.0)
    assert there.path == here.path
    assert not any(tmp_path.iterdir())  # before the first request


@pytest.mark.parametrize(("scheme", "most"), [("s3", 128), ("hf", 128), ("https", 16), ("sftp", 128)])
def test_default_max_requests_depends_on_the_scheme(tmp_path: Path, scheme: str, most: int) -> None:
    origin = limited(MemoryOrigin(identity="remote"), Limits.of(scheme, {"cache_dir": str(tmp_path)}))
    assert isinstance(origin, LimitedOrigin)
    assert origin.limiter_of("b/k").most == most


def test_limited_local_origin_is_unchanged() -> None:
    local = MemoryOrigin(identity="local", head_is_local=True)
    assert limited(local, Limits.of("file")) is local


def test_open_origin_with_an_invalid_limit_raises() -> None:
    with pytest.raises(ConfigurationError, match="max_requests"):
        open_origin("s3", {}, {"max_requests": "many"})


def test_origins_of_one_storage_share_a_limiter(tmp_path: Path) -> None:
    limits = Limits.of("s3", {"cache_dir": str(tmp_path)})
    first, second = (limited(MemoryOrigin(identity="same"), limits) for _ in range(2))
    other = limited(MemoryOrigin(identity="other"), limits)
    assert isinstance(first, LimitedOrigin)
    assert isinstance(second, LimitedOrigin)
    assert isinstance(other, LimitedOrigin)
    assert first.limiter_of("b/k") is second.limiter_of("c/d")
    assert other.limiter_of("b/k").path != first.limiter_of("b/k").path


def test_web_servers_have_separate_limiters(tmp_path: Path) -> None:
    origin = limited(MemoryOrigin(identity="https"), Limits.of("https", {"cache_dir": str(tmp_path)}))
    assert isinstance(origin, LimitedOrigin)
    busy = origin.limiter_of("busy.example/x")
    slot = acquire(busy)
    busy.close_gate(slot, retry_after=600.0)
    busy.release(slot, responded=False)
    assert origin.limiter_of("busy.example/y") is busy
    assert isinstance(origin.limiter_of("other.example:8443/x").acquire(0.0), Slot)
    assert isinstance(busy.acquire(0.0), GateClosed)


def test_limiters_of_many_web_servers_keep_few_files_open(tmp_path: Path) -> None:
    origin = open_origin("http", None, {"cache_dir": str(tmp_path)})
    assert isinstance(origin, LimitedOrigin)
    used = origin.limiter_of("used.example/x")
    used.release(acquire(used), responded=True)
    in_flight = acquire(origin.limiter_of("slow.example/x"))
    slow = origin.limiter_of("slow.example/x")
    before = count_open(tmp_path)
    for number in range(200):
        assert origin.limiter_of("used.example/x") is used
        limiter = origin.limiter_of(f"host{number}.example/x")
        limiter.release(acquire(limiter), responded=True)
    assert count_open(tmp_path) <= before + 2 * 64
    assert origin.limiter_of("slow.example/y") is slow
    slow.release(in_flight, responded=True)


def count_open(folder: Path) -> int:
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{name}").startswith(str(folder))
    return found


def test_state_file_replaced_during_the_open_is_an_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_file = slots_module._open_file

    def open_and_replace(path: Path) -> int:
        descriptor = open_file(path)
        other = path.with_name("other")
        other.write_bytes(path.read_bytes())
        other.rename(path)
        return descriptor

    monkeypatch.setattr(slots_module, "_open_file", open_and_replace)
    with pytest.raises(StorageError, match="changes while it is opened"):
        NodeState(path)


@pytest.mark.parametrize("number", sorted(value for value in vars(Number).values() if isinstance(value, int)))
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 1e300, -1e300])
def test_limiter_with_a_damaged_number_grants_slots(path: Path, number: int, value: float) -> None:
    limiter = make(path, per_second=1000.0)
    limiter.release(acquire(limiter), responded=True)
    NodeState(path).numbers[number] = value
    for _ in range(2):
        limiter.release(acquire(limiter), responded=True)
    slot = acquire(limiter)
    limiter.close_gate(slot, 0.001)
    limiter.release(slot, responded=False)


@pytest.mark.slow
def test_running_process_without_signs_of_life_keeps_its_slots_until_it_is_stopped(path: Path) -> None:
    """On a busy machine the thread that writes the signs may not run for seconds."""
    program = """
import sys, time
from pathlib import Path
from millrace.origin.limits import slots
slots.start_beats = lambda beat: None
limiter = slots.NodeLimiter("test+origin", Path(sys.argv[1]), most=1, per_second=None)
slot = limiter.acquire(60.0)
print("in", flush=True)
while True:
    time.sleep(0.01)
"""
    with subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"in\n"
            limiter, entered = make(path, most=1), threading.Event()
            waiting = in_thread(lambda: (acquire(limiter), entered.set()))
            assert not entered.wait(2 * SILENCE_SECONDS)
            process.send_signal(signal.SIGSTOP)
            assert entered.wait(60)
            waiting.join(60)
        finally:
            process.kill()


def test_stopped_process_with_every_slot_does_not_stop_the_others(path: Path) -> None:
    """Other processes use as many additional slots as it has, and no more."""
    program = """
import sys
from pathlib import Path
from millrace.origin.limits.slots import NodeLimiter
limiter = NodeLimiter("test+origin", Path(sys.argv[1]), most=2, per_second=None)
slots = [limiter.acquire(60.0) for _ in range(2)]
print("in", flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", program, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"in\n"
            process.send_signal(signal.SIGSTOP)
            limiter, entered = make(path, most=2), []
            threads = [in_thread(lambda: entered.append(acquire(limiter))) for _ in range(3)]
            deadline = time.monotonic() + 120
            while len(entered) < 2:
                assert time.monotonic() < deadline, "a stopped process holds up the others"
                time.sleep(0.02)
            with limiter._lock:  # the third thread tries each slot for a moment
                assert len(limiter._held) == 2
            limiter.release(entered[0], responded=True)
            for thread in threads:
                thread.join(300)
            assert len(entered) == 3
        finally:
            process.kill()


def test_process_stopped_while_it_takes_the_only_slot_does_not_stop_the_others(path: Path) -> None:
    """It has the lock of the slot, and has not written its sign and its mark yet: the sign is that of this process."""
    program = """
import os, signal, sys
from pathlib import Path
from millrace.origin.limits import slots
state = slots.NodeState(Path(sys.argv[1]))
assert state._lock(slots._flock(slots.fcntl.F_WRLCK, slots._MARKS))
print("in", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""
    limiter, entered = make(path, most=1), threading.Event()
    limiter.release(acquire(limiter), responded=True)
    with subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"in\n"
            in_thread(lambda: (acquire(limiter), entered.set()))
            assert entered.wait(60), "a stopped process holds up the others"
        finally:
            process.kill()
