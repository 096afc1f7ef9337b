"""The budget of an origin: its board among real processes, slots that the kernel gives back, the gate, and the schedule."""

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
from tests.interrupts import interrupts

from millrace.errors import ConfigurationError, StorageError
from millrace.events import Event, add_hook
from millrace.origin import open_origin
from millrace.origin.limits import LimitedOrigin, Limits, limited
from millrace.origin.limits import board as board_module
from millrace.origin.limits.board import Board, Number
from millrace.origin.limits.budget import Budget, Closed, Turn, shared_budget
from millrace.origin.limits.decisions import FEW_REQUESTS
from millrace.origin.limits.retrying import in_turn
from millrace.testing.origins import MemoryOrigin

DEADLINE = 30.0

HOLDER = """
import sys, time
from pathlib import Path
from millrace.origin.limits.budget import Budget
budget = Budget("x", Path(sys.argv[1]), most=int(sys.argv[2]), per_second=None)
turns = [budget.enter(60.0) for _ in range(int(sys.argv[3]))]
print("held", flush=True)
sys.stdin.readline()
for turn in turns:
    budget.leave(turn, answered=True)
print("left", flush=True)
sys.stdin.readline()
"""


class Holder:
    """A process that holds turns of a budget."""

    def __init__(self, path: Path, most: int, turns: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(path), str(most), str(turns)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.says() == "held"

    def says(self) -> str:
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
    """Start a process that holds so many turns of at most so many: `hold(most, turns)`."""
    holders: list[Holder] = []

    def start(most: int, turns: int) -> Holder:
        holders.append(Holder(path, most, turns))
        return holders[-1]

    yield start
    for holder in holders:
        holder.end()


@pytest.fixture
def events() -> Iterator[list[Event]]:
    seen: list[Event] = []
    remove = add_hook(seen.append)
    yield seen
    remove()


def enter(budget: Budget, patience_seconds: float = 60.0) -> Turn:
    turn = budget.enter(patience_seconds)
    assert isinstance(turn, Turn)
    return turn


def in_thread(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


def make(path: Path | None, most: int = 4, per_second: float | None = None) -> Budget:
    return Budget("test+origin", path, most=most, per_second=per_second)


# --- slots --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [True, False])
def test_no_more_than_the_most_are_in_flight(path: Path, shared: bool) -> None:
    budget = make(path if shared else None)
    lock, at_once, seen = threading.Lock(), 0, []

    def work() -> None:
        nonlocal at_once
        for _ in range(40):
            turn = enter(budget)
            with lock:
                at_once += 1
                seen.append(at_once)
            time.sleep(0.0002)
            with lock:
                at_once -= 1
            budget.leave(turn, answered=True)

    threads = [in_thread(work) for _ in range(16)]
    for thread in threads:
        thread.join(DEADLINE)
        assert not thread.is_alive()
    assert len(seen) == 16 * 40
    assert max(seen) <= 4


def test_processes_share_the_slots(path: Path, hold: Callable[[int, int], Holder]) -> None:
    holder = hold(4, 3)
    budget = make(path)
    last = enter(budget)
    waiting: list[Turn] = []
    thread = in_thread(lambda: waiting.append(enter(budget)))
    time.sleep(0.2)
    assert not waiting  # nothing to wait on: it must stay so
    holder.go_on()
    thread.join(DEADLINE)
    assert len(waiting) == 1
    budget.leave(last, answered=True)
    budget.leave(waiting[0], answered=True)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_is_killed_gives_its_slots_back(
    path: Path, hold: Callable[[int, int], Holder], number: signal.Signals
) -> None:
    holder = hold(4, 4)
    budget = make(path)
    turns: list[Turn] = []
    threads = [in_thread(lambda: turns.append(enter(budget))) for _ in range(4)]
    time.sleep(0.1)
    assert not turns
    holder.process.send_signal(number)
    for thread in threads:
        thread.join(DEADLINE)
    assert len({turn.slot for turn in turns}) == 4


def test_one_that_asks_for_less_keeps_to_it(path: Path, hold: Callable[[int, int], Holder]) -> None:
    hold(8, 6)
    modest = make(path, most=2)
    got: list[Turn] = []
    for _ in range(3):
        in_thread(lambda: got.append(enter(modest)))
    time.sleep(0.2)
    assert len(got) <= 2
    assert {turn.slot for turn in got} <= {0, 1}


def test_turns_are_given_in_the_order_of_asking(path: Path) -> None:
    budget = make(path, most=1)
    first = enter(budget)
    order: list[int] = []

    def work(number: int) -> None:
        turn = enter(budget)
        order.append(number)
        budget.leave(turn, answered=True)

    threads = []
    for number in range(6):
        threads.append(in_thread(lambda number=number: work(number)))  # type: ignore[misc]
        until(lambda number=number: len(budget._waiting) == number + 1)  # type: ignore[misc]
    budget.leave(first, answered=True)
    for thread in threads:
        thread.join(DEADLINE)
    assert order == list(range(6))


def test_two_processes_that_both_want_all_get_both(path: Path) -> None:
    """One that always has somebody waiting must not keep every slot to itself."""
    program = """
import sys, threading, time
from pathlib import Path
from millrace.origin.limits.budget import Budget
budget = Budget("x", Path(sys.argv[1]), most=2, per_second=None)
stop, done = threading.Event(), [0]
def work():
    while not stop.is_set():
        turn = budget.enter(60.0)
        time.sleep(0.002)
        budget.leave(turn, answered=True)
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
        until(lambda: all(ask(process) >= before + 20 for process, before in zip(both, begun, strict=True)))
    finally:
        for process in both:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("waits_for", ["a slot", "the gate", "the schedule"])
def test_an_interrupted_wait_leaves_nothing_behind(path: Path, waits_for: str) -> None:
    budget = make(path, most=1, per_second=0.01 if waits_for == "the schedule" else None)
    held = enter(budget)
    if waits_for != "a slot":
        budget.leave(held, answered=True)
    if waits_for == "the gate":
        budget.busy(held, retry_after=50.0)
    with interrupts() as interrupt_after:
        interrupt_after(0.1)
        with pytest.raises(KeyboardInterrupt):
            budget.enter(60.0)
    budget.leave(held, answered=True)
    assert not budget._waiting
    assert not budget._held


def test_an_interrupt_at_any_moment_leaves_nothing_behind(path: Path) -> None:
    budget = make(path, most=2)
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            in_turn(budget, "x", lambda: time.sleep(0), lambda: None)

    threads = [in_thread(work) for _ in range(3)]
    try:
        with interrupts() as interrupt_after:
            for number in range(400):
                with contextlib.suppress(KeyboardInterrupt):
                    interrupt_after(0.0002 + number * 5e-6)
                    while True:
                        in_turn(budget, "x", lambda: None, lambda: None)
    finally:
        stop.set()
    for thread in threads:
        thread.join(DEADLINE)
        assert not thread.is_alive()
    # Nobody but the last who asks is left: what an interrupt in the middle of giving back leaves is found by who looks.
    turns = [enter(budget), enter(budget)]
    assert set(budget._held) == {turn.slot for turn in turns}
    assert not budget._waiting


def test_a_turn_that_nobody_has_any_more_is_over(path: Path) -> None:
    budget = make(path, most=1)
    lost = enter(budget)
    threads = [in_thread(lambda: budget.leave(enter(budget), answered=True)) for _ in range(2)]
    until(lambda: len(budget._waiting) == 2)
    gone = Turn()
    budget._waiting.appendleft(weakref.ref(gone))  # as of a thread that was interrupted again while it cleaned up
    del lost, gone
    for thread in threads:
        thread.join(DEADLINE)
        assert not thread.is_alive()


# --- fork ---------------------------------------------------------------------------------------------


def in_child(call: Callable[[], bool]) -> int:
    """Fork; the child calls and tells by its exit code. Returns its pid."""
    pid = os.fork()
    if pid == 0:
        code = 2
        try:
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
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError("the child hangs")


@pytest.mark.parametrize("shared", [True, False])
def test_a_child_has_none_of_the_parents_turns(path: Path, shared: bool) -> None:
    budget = shared_budget("forked", path if shared else None, most=2, per_second=None)
    held = enter(budget)

    def child() -> bool:
        budget.leave(held, answered=True)  # the parent's: nothing happens
        mine = enter(budget)
        return mine.slot != held.slot if shared else True

    assert exit_code(in_child(child)) == 0
    # The child's slot came back with its end, and the parent's own was not given away.
    other = enter(budget)
    assert other.slot != held.slot


def test_a_child_that_lives_on_does_not_keep_the_parents_slots(path: Path) -> None:
    """The kernel frees locks of a description when its last copy is closed: the child must not have one."""
    program = """
import os, sys, time
from pathlib import Path
from millrace.origin.limits.budget import shared_budget
budget = shared_budget("x", Path(sys.argv[1]), most=1, per_second=None)
turn = budget.enter(60.0)
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
        turns: list[Turn] = []
        thread = in_thread(lambda: turns.append(enter(make(path, most=1))))
        thread.join(DEADLINE)
        assert len(turns) == 1
    finally:
        os.kill(child, signal.SIGKILL)
        parent.communicate()


def test_a_child_is_not_held_up_by_what_the_parents_threads_did(path: Path) -> None:
    budget = shared_budget("busy parent", path, most=2, per_second=None)
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            budget.leave(enter(budget), answered=True)

    threads = [in_thread(work) for _ in range(4)]
    try:
        for _ in range(5):

            def child() -> bool:
                budget.leave(enter(budget), answered=True)
                return True

            assert exit_code(in_child(child)) == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join(DEADLINE)


# --- gate ---------------------------------------------------------------------------------------------


def test_the_gate_closes_for_every_process(path: Path) -> None:
    one, other = make(path), make(path)
    turn = enter(one)
    assert one.busy(turn, retry_after=1000.0)
    one.leave(turn, answered=False)
    for budget in (one, other):
        answer = budget.enter(60.0)
        assert isinstance(answer, Closed)
        assert 800.0 < answer.seconds <= 905.0  # 1,000 s is more than any gate stays closed


def test_a_pause_within_the_patience_is_waited_for_and_counted(path: Path) -> None:
    budget = make(path)
    turn = enter(budget)
    budget.busy(turn, retry_after=0.2)
    budget.leave(turn, answered=False)
    later = enter(budget)
    assert later.began - turn.began >= 0.2
    assert 0.1 < later.closed_seconds < 10.0
    budget.leave(later, answered=True)


def test_answers_to_requests_of_one_crowd_close_it_once(path: Path, events: list[Event]) -> None:
    budget = make(path, most=64)
    crowd = [enter(budget) for _ in range(40)]
    assert [budget.busy(turn, None) for turn in crowd].count(True) == 1
    board = budget._board
    assert board is not None
    assert board.numbers[Number.CLOSINGS] == 1
    assert budget._window().requests == FEW_REQUESTS
    assert budget._window().threshold == 32.0
    assert [event.name for event in events] == ["origin.gate.closed"]


def test_it_opens_for_a_few_and_then_for_more(path: Path, events: list[Event]) -> None:
    budget = make(path, most=8)
    crowd = [enter(budget) for _ in range(8)]
    budget.busy(crowd[0], retry_after=0.05)
    for turn in crowd:
        budget.leave(turn, answered=True)  # successes of before the closing open nothing
    assert [event.name for event in events] == ["origin.gate.closed"]
    few = [enter(budget) for _ in range(FEW_REQUESTS)]
    got: list[Turn] = []
    thread = in_thread(lambda: got.append(enter(budget)))
    time.sleep(0.1)
    assert not got
    for turn in few:
        budget.leave(turn, answered=True)
    thread.join(DEADLINE)
    assert len(got) == 1
    assert [event.name for event in events] == ["origin.gate.closed", "origin.gate.opened"]
    assert {event.subject for event in events} == {"test+origin"}
    budget.leave(got[0], answered=True)
    while not budget._window().is_open:
        budget.leave(enter(budget), answered=True)
    assert len(events) == 2


def test_who_may_have_little_opens_nothing_for_who_may_have_more(path: Path) -> None:
    modest, large = make(path, most=4), make(path, most=64)
    crowd = [enter(large) for _ in range(64)]
    large.busy(crowd[0], retry_after=0.05)
    for turn in crowd:
        large.leave(turn, answered=False)
    for _ in range(40):
        modest.leave(enter(modest), answered=True)
    assert modest._window().is_open
    assert not large._window().is_open
    while not large._window().is_open:
        large.leave(enter(large), answered=True)
    assert large._window().requests == 64


def test_one_closing_after_another_lasts_longer(path: Path) -> None:
    budget = make(path)
    board = Board(path)
    pauses = []
    for _ in range(6):
        turn = Turn()
        turn.began = time.monotonic()
        budget.busy(turn, None)
        now = time.monotonic()
        pauses.append(board.numbers[Number.CLOSED_UNTIL] - now)
        with board.exclusive():
            board.numbers[Number.CLOSED_UNTIL] = 0.0  # as if the time had passed
    assert all(later > 0.9 * earlier for earlier, later in zip(pauses, pauses[2:5], strict=False))
    assert pauses[-1] > 1.8


# --- rate ---------------------------------------------------------------------------------------------


def test_the_rate_is_common_to_all(path: Path) -> None:
    begun: list[float] = []
    budgets = [make(path, most=64, per_second=50.0) for _ in range(2)]

    def work(budget: Budget) -> None:
        for _ in range(5):
            turn = enter(budget)
            begun.append(turn.began)
            budget.leave(turn, answered=True)

    threads = [in_thread(lambda budget=budget: work(budget)) for budget in budgets for _ in range(2)]  # type: ignore[misc]
    for thread in threads:
        thread.join(DEADLINE)
    assert len(begun) == 20
    begun.sort()
    assert begun[-1] - begun[0] >= (20 - 5) / 50.0 - 0.01  # all but one burst of a tenth of a second


# --- the file -----------------------------------------------------------------------------------------


def test_the_file_is_this_users_alone(path: Path) -> None:
    before = os.umask(0)
    try:
        make(path).enter(1.0)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_link_is_not_followed(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    path.parent.mkdir(mode=0o700)
    path.symlink_to(target)
    with pytest.raises(StorageError):
        Board(path)
    assert target.read_bytes() == b"precious"


@pytest.mark.parametrize("place", ["file", "link", "pipe"])
def test_without_a_shared_file_a_process_keeps_to_its_own_budget(
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
    budget = make(path, most=1)
    turn = enter(budget)
    got: list[Turn] = []
    thread = in_thread(lambda: got.append(enter(budget)))
    time.sleep(0.05)
    assert not got
    budget.leave(turn, answered=True)
    thread.join(DEADLINE)
    assert len(got) == 1
    assert [event.name for event in events] == ["origin.limits.private"]


@pytest.mark.parametrize("content", [b"", b"x" * 20_000, b"millrace-limits 1 of another boot\n" + b"\xff" * 9_000])
def test_what_another_boot_or_program_left_is_begun_anew(path: Path, content: bytes, events: list[Event]) -> None:
    """Its numbers would be a closed gate, a schedule of another clock, and slots that nobody has."""
    path.parent.mkdir(mode=0o700)
    path.write_bytes(content)
    budget = make(path, most=3)
    turns = [budget.enter(0.0) for _ in range(3)]
    assert all(isinstance(turn, Turn) for turn in turns)
    board = budget._the_board()
    assert board.is_shared
    assert list(board.numbers[: len(Number)]) == [0.0] * len(Number)
    assert not events
    after = Board(path)  # as another process opens it: it is what it should be, and not begun a second time
    with after.exclusive():
        after.numbers[Number.CLOSINGS] = 7.0
    assert [Board(path).numbers[number] for number in Number] == [
        7.0 * (number is Number.CLOSINGS) for number in Number
    ]
    assert [slot for slot in range(8) if not after.take(slot)] == sorted(budget._held)


def test_a_process_that_stopped_in_the_middle_of_a_change_stops_nobody(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real one, which the others wait for each time, but not for ever, and whose lock nobody takes away."""
    monkeypatch.setattr(board_module, "_MUTEX_SECONDS", 0.1)
    program = """
import os, signal, sys
from pathlib import Path
from millrace.origin.limits.board import Board
with Board(Path(sys.argv[1])).exclusive():
    print("in", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
"""
    budget = make(path, most=1, per_second=1000.0)
    numbers = budget._the_board().numbers
    with subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"in\n"
            began = time.monotonic()
            turn = enter(budget)
            assert time.monotonic() - began >= 0.1
            booked = numbers[Number.BOOKED_UNTIL]
            assert booked > began  # the rate counts all the same, and so does the gate
            assert budget.busy(turn, 30.0)
            assert isinstance(budget.enter(1.0), Closed)
            assert not budget._the_board()._lock(board_module._flock(fcntl.F_WRLCK, board_module._MUTEX_BYTE))
        finally:
            process.kill()
    # Dead, it holds up nobody any more.
    monkeypatch.setattr(board_module, "_MUTEX_SECONDS", 600.0)
    with budget._the_board().exclusive():
        numbers[Number.CLOSED_UNTIL] = 0.0
    budget.leave(turn, answered=True)
    budget.leave(enter(budget), answered=True)
    assert numbers[Number.BOOKED_UNTIL] > booked


def test_who_was_killed_while_it_waited_for_the_schedule_has_booked_nothing(path: Path) -> None:
    program = """
import sys, threading, time
from pathlib import Path
from millrace.origin.limits.budget import Budget
budget = Budget("x", Path(sys.argv[1]), most=64, per_second=0.2)
for _ in range(16):
    threading.Thread(target=budget.enter, args=(60.0,), daemon=True).start()
while len(budget._held) < 15:  # one has had its turn
    time.sleep(0.01)
time.sleep(0.1)
print("wait", flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"wait\n"
        process.kill()
    budget = make(path, per_second=0.2)
    assert budget._the_board().numbers[Number.BOOKED_UNTIL] <= time.monotonic() + 5.0
    budget._the_board().numbers[Number.BOOKED_UNTIL] = time.monotonic() + 1e6
    budget.leave(enter(budget), answered=True)


# --- around an origin ---------------------------------------------------------------------------------


def test_a_limited_origin_is_the_same_in_a_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_MAX_REQUESTS", "5")
    origin = open_origin("s3", {"key": "k", "secret": "s3cr3t"}, {"request_rate": 10, "cache_dir": str(tmp_path)})
    assert isinstance(origin, LimitedOrigin)
    assert "s3cr3t" not in repr(origin)
    monkeypatch.setenv("MILLRACE_MAX_REQUESTS", "6")  # as on the receiver's node
    copy = pickle.loads(pickle.dumps(origin))
    assert copy.identity == origin.identity
    here, there = origin.budget_of("b/k"), copy.budget_of("b/k")
    assert (here.most, here.per_second) == (5, 10.0)
    assert (there.most, there.per_second) == (6, 10.0)
    assert there.path == here.path
    assert not any(tmp_path.iterdir())  # before the first request


@pytest.mark.parametrize(("scheme", "most"), [("s3", 128), ("hf", 128), ("https", 16), ("sftp", 128)])
def test_defaults_by_scheme(tmp_path: Path, scheme: str, most: int) -> None:
    origin = limited(MemoryOrigin(identity="remote"), Limits.of(scheme, {"cache_dir": str(tmp_path)}))
    assert isinstance(origin, LimitedOrigin)
    assert origin.budget_of("b/k").most == most


def test_what_is_local_has_no_limits() -> None:
    local = MemoryOrigin(identity="local", head_is_local=True)
    assert limited(local, Limits.of("file")) is local


def test_a_bad_limit_is_told_when_the_origin_is_opened() -> None:
    with pytest.raises(ConfigurationError, match="max_requests"):
        open_origin("s3", {}, {"max_requests": "many"})


def test_origins_of_one_storage_share_a_budget(tmp_path: Path) -> None:
    limits = Limits.of("s3", {"cache_dir": str(tmp_path)})
    first, second = (limited(MemoryOrigin(identity="same"), limits) for _ in range(2))
    other = limited(MemoryOrigin(identity="other"), limits)
    assert isinstance(first, LimitedOrigin)
    assert isinstance(second, LimitedOrigin)
    assert isinstance(other, LimitedOrigin)
    assert first.budget_of("b/k") is second.budget_of("c/d")
    assert other.budget_of("b/k").path != first.budget_of("b/k").path


def test_servers_of_the_web_have_a_budget_each(tmp_path: Path) -> None:
    origin = limited(MemoryOrigin(identity="https"), Limits.of("https", {"cache_dir": str(tmp_path)}))
    assert isinstance(origin, LimitedOrigin)
    busy = origin.budget_of("busy.example/x")
    turn = enter(busy)
    busy.busy(turn, retry_after=600.0)
    busy.leave(turn, answered=False)
    assert origin.budget_of("busy.example/y") is busy
    assert isinstance(origin.budget_of("other.example:8443/x").enter(0.0), Turn)
    assert isinstance(busy.enter(0.0), Closed)


def test_many_servers_of_the_web_keep_few_files_open(tmp_path: Path) -> None:
    origin = open_origin("http", None, {"cache_dir": str(tmp_path)})
    assert isinstance(origin, LimitedOrigin)
    used = origin.budget_of("used.example/x")
    used.leave(enter(used), answered=True)
    in_flight = enter(origin.budget_of("slow.example/x"))
    slow = origin.budget_of("slow.example/x")
    before = count_open(tmp_path)
    for number in range(200):
        assert origin.budget_of("used.example/x") is used
        budget = origin.budget_of(f"host{number}.example/x")
        budget.leave(enter(budget), answered=True)
    assert count_open(tmp_path) <= before + 2 * 64
    assert origin.budget_of("slow.example/y") is slow
    slow.leave(in_flight, answered=True)


def count_open(folder: Path) -> int:
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{name}").startswith(str(folder))
    return found


def test_locks_and_numbers_are_of_one_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really = board_module._File.close

    def close_and_replace(file: board_module._File) -> None:
        really(file)
        other = path.with_name("other")
        other.write_bytes(path.read_bytes())
        other.rename(path)

    monkeypatch.setattr(board_module._File, "close", close_and_replace)
    with pytest.raises(StorageError, match="changes while it is opened"):
        Board(path)
