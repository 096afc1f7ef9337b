"""One origin's budget on this node: who may ask it, and when. All processes of the node share it through a `Board`."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path

from millrace.config import MOST_REQUESTS
from millrace.errors import StorageError
from millrace.events import Event, emit
from millrace.origin.limits.board import Board, Number
from millrace.origin.limits.chance import CHANCE
from millrace.origin.limits.decisions import (
    LONGEST_CLOSED_SECONDS,
    Window,
    after_busy,
    after_success,
    next_start,
    pause_of_gate,
)

# How often a process looks for a slot that another one gave back, from the first to the last time.
_FIRST_LOOK_SECONDS, _LAST_LOOK_SECONDS = 0.001, 0.02
# How often it asks the kernel about every slot: a process that was killed has left its hints behind.
_THOROUGH_SECONDS = 1.0
# A waiter behind others is woken when its turn comes. It looks by itself, too: a wake-up must not get lost for ever.
_BEHIND_SECONDS = 0.5


class Turn:
    """What one request has of a budget: nothing when it is made, a place among those who wait, then leave to be sent.

    `began` is when it got that; `closed_seconds` how long it was waited for because the gate was closed. A budget refers to
    its turns weakly: one that nobody has any more, because its thread was interrupted twice, is over.
    """

    __slots__ = ("__weakref__", "_bell", "began", "closed_seconds", "slot")

    def __init__(self) -> None:
        self.slot = -1
        self.began = 0.0
        self.closed_seconds = 0.0
        self._bell: threading.Lock | None = None

    def sleep(self, seconds: float) -> None:
        """Until `wake`, but no longer."""
        assert self._bell is not None
        self._bell.acquire(timeout=seconds)

    def listen(self) -> None:
        """Before others may call `wake`."""
        self._bell = threading.Lock()
        self._bell.acquire()

    def wake(self) -> None:
        """Called under the budget's lock."""
        if self._bell is not None and self._bell.locked():
            self._bell.release()


@dataclass(frozen=True, slots=True)
class Closed:
    """No leave: the gate stays closed for `seconds` more, which is longer than the caller would wait."""

    seconds: float


class Budget:
    """How many requests are in flight to one origin, how many begin in a second, and whether any may at all now.

    `most` and `per_second` (None: no limit) are this process's; the rest is common to all that use the file `path`. Where
    there can be no such file, the budget is of this process alone, and an event (`origin.limits.private`) says why.

    Thread-safe. Safe across fork: the child has none of the parent's requests in flight, and goes on with the same file. A
    wait is interrupted by signals, as any sleep is. Makes no thread.
    """

    def __init__(self, identity: str, path: Path | None, *, most: int, per_second: float | None) -> None:
        self._identity = identity
        self.path = path
        self.most = most
        self.per_second = per_second
        self._board: Board | None = None
        self._after_fork()

    def _after_fork(self) -> None:
        self._lock = threading.Lock()
        self._schedule = threading.Lock()
        self._waiting: deque[weakref.ref[Turn]] = deque()
        self._held: dict[int, weakref.ref[Turn]] = {}
        self._lost: deque[weakref.ref[Turn]] = deque()
        self._next = CHANCE.randrange(MOST_REQUESTS)
        self._thorough_at = 0.0
        board = self._board
        if board is not None:
            try:
                board.after_fork()
            except OSError as error:
                self._tell_private(str(error))

    @property
    def is_idle(self) -> bool:
        """Whether no request of this process has a turn, or waits for one."""
        return not self._held and not self._waiting

    # --- a request --------------------------------------------------------------------------------

    def enter(self, patience_seconds: float, turn: Turn | None = None) -> Turn | Closed:
        """Wait until a request may begin. Every `Turn` must be given back by `leave`.

        `patience_seconds` is how long a closed gate is waited for, in all; a turn behind other requests, as long
        as it takes. Who may be interrupted makes the `turn` before the `try` whose `finally` gives it back.
        """
        turn = turn or Turn()
        try:
            return self._enter(turn, patience_seconds)
        except BaseException:
            self._let_go(turn)
            raise

    def _enter(self, turn: Turn, patience_seconds: float) -> Turn | Closed:
        while True:
            pause = self._closed_for()
            if pause > 0:
                if turn.closed_seconds + pause > patience_seconds:
                    return Closed(pause)
                time.sleep(pause)
                turn.closed_seconds += pause
                continue
            if not self._take_slot(turn):
                continue
            self.book()
            if self._closed_for() <= 0:
                turn.began = time.monotonic()
                return turn
            self._let_go(turn)

    def leave(self, turn: Turn, *, answered: bool) -> None:
        """Give the turn back, also one that has nothing. `answered`: the origin did, and not that it is busy."""
        self._let_go(turn)
        if answered:
            self._succeeded(turn)

    def answered(self, turn: Turn) -> None:
        """Note that the origin has answered, of a turn that goes on."""
        self._succeeded(turn)

    def book(self) -> None:
        """Wait until the rate allows one request more, for one that is sent in a turn after its own."""
        if self.per_second is not None:
            self._await_schedule(self.per_second)

    def busy(self, turn: Turn, retry_after: float | None) -> bool:
        """The origin wants fewer requests: close the gate for the whole node, for `retry_after` seconds if it said so.

        Of requests that were under way together only the first counts; True for that one.
        """
        board = self._the_board()
        with self._lock, board.exclusive():
            now, numbers = time.monotonic(), board.numbers
            first = turn.began > numbers[Number.CLOSED_AT] or now < numbers[Number.CLOSED_AT]
            closings = int(numbers[Number.CLOSINGS])
            pause = left = self._closed_for()
            if first or retry_after is not None:
                pause = max(left, pause_of_gate(closings, retry_after, CHANCE.random()))
                numbers[Number.CLOSED_UNTIL] = now + pause
            if first:
                numbers[Number.CLOSED_AT] = now
                numbers[Number.CLOSINGS] = closings + 1
                self._set_window(after_busy(self._window()))
        if first or pause > left + 1.0:
            asked = "" if retry_after is None else f", the origin asked for {retry_after:.3g} s"
            emit(Event(name="origin.gate.closed", subject=self._identity, detail=f"for {pause:.2f} s{asked}"))
        return first

    def _succeeded(self, turn: Turn) -> None:
        board = self._the_board()
        numbers = board.numbers
        if not numbers[Number.CLOSINGS] and MOST_REQUESTS - numbers[Number.HELD_BACK] >= self.most:
            return  # as nearly always
        with self._lock, board.exclusive():
            if turn.began <= numbers[Number.CLOSED_AT]:
                return  # of before the closing: no sign that it is over
            closings, numbers[Number.CLOSINGS] = int(numbers[Number.CLOSINGS]), 0.0
            window = after_success(self._window())
            self._set_window(window)
        if closings:
            emit(
                Event(
                    name="origin.gate.opened",
                    subject=self._identity,
                    detail=f"after {closings} closings; {window.requests} requests at once now",
                )
            )

    # --- gate, window, schedule -------------------------------------------------------------------

    def _closed_for(self) -> float:
        """For how many seconds the gate stays closed, 0 or less when it is open."""
        seconds: float = self._the_board().numbers[Number.CLOSED_UNTIL] - time.monotonic()
        return seconds if seconds <= LONGEST_CLOSED_SECONDS else 0.0

    def _window(self) -> Window:
        numbers = self._the_board().numbers
        return Window(MOST_REQUESTS - numbers[Number.HELD_BACK], numbers[Number.THRESHOLD], self.most)

    def _set_window(self, window: Window) -> None:
        numbers = self._the_board().numbers
        numbers[Number.HELD_BACK] = MOST_REQUESTS - window.size
        numbers[Number.THRESHOLD] = window.threshold

    def _await_schedule(self, per_second: float) -> None:
        board = self._the_board()
        with self._schedule:  # one thread of a process looks, the others come after it
            while True:
                with self._lock, board.exclusive():
                    now, booked = time.monotonic(), board.numbers[Number.BOOKED_UNTIL]
                    start, board.numbers[Number.BOOKED_UNTIL] = next_start(booked, now, per_second)
                if start <= now:
                    return
                time.sleep(start - now)

    # --- slots ------------------------------------------------------------------------------------

    def _take_slot(self, turn: Turn) -> bool:
        """Take a slot, in the order of asking; False when the gate has closed meanwhile."""
        board = self._the_board()
        with self._lock:
            if self._first_waiting(board) is None and self._free_slot(board, turn):
                return True
            turn.listen()
            self._waiting.append(weakref.ref(turn))
            if len(self._waiting) == 1:
                board.say_waiting(True)
        took = self._wait_for_slot(board, turn)
        with self._lock:
            self._wait_no_more(board, turn)
        return took

    def _wait_for_slot(self, board: Board, turn: Turn) -> bool:
        look = _FIRST_LOOK_SECONDS
        while True:
            with self._lock:
                first = self._first_waiting(board) is turn
                if first and self._free_slot(board, turn):
                    return True
            if self._closed_for() > 0:
                return False
            # Only the first of a process looks for what other processes give back.
            turn.sleep(look * CHANCE.uniform(0.5, 1.0) if first else _BEHIND_SECONDS)
            look = min(look * 1.5, _LAST_LOOK_SECONDS) if first else _FIRST_LOOK_SECONDS

    def _first_waiting(self, board: Board) -> Turn | None:
        """Who is next in this process; under the lock."""
        while self._waiting:
            turn = self._waiting[0]()
            if turn is not None:
                return turn
            self._waiting.popleft()
            if not self._waiting:
                board.say_waiting(False)
        return None

    def _wait_no_more(self, board: Board, turn: Turn) -> None:
        """Take the turn out of those who wait, if it is there; under the lock."""
        mine = weakref.ref(turn)
        if mine in self._waiting:
            self._waiting.remove(mine)
            if not self._waiting:
                board.say_waiting(False)
        if (following := self._first_waiting(board)) is not None:
            following.wake()

    def _free_slot(self, board: Board, turn: Turn) -> bool:
        """Take any free slot of those that the window allows; under the lock."""
        if self._lost:
            count = len(self._lost)
            for slot in [slot for slot, holder in self._held.items() if holder() is None]:
                self._give(board, slot)
            for _ in range(count):  # last: an interrupt before it only makes the next one look again
                self._lost.popleft()
        stop = self._window().requests
        start = self._next % stop
        for begin, end in ((start, stop), (0, start)):
            slot = board.find(begin, end)
            while slot >= 0:
                if self._take(board, slot, turn):
                    return True
                slot = board.find(slot + 1, end)
        now = time.monotonic()
        if now >= self._thorough_at:
            for slot in range(stop):
                if self._take(board, slot, turn):
                    return True
            self._thorough_at = now + _THOROUGH_SECONDS  # not where there was one: the dead process may have had more
        return False

    def _take(self, board: Board, slot: int, turn: Turn) -> bool:
        """Noted before it is taken, and forgotten after it is given: no interrupt leaves one that is taken and not noted."""
        if slot in self._held:
            return False
        turn.slot = slot
        self._held[slot] = weakref.ref(turn, self._lost.append)
        if board.take(slot):
            self._next = slot
            return True
        del self._held[slot]
        return False

    def _give(self, board: Board, slot: int) -> None:
        board.give(slot)
        del self._held[slot]

    def _let_go(self, turn: Turn) -> None:
        """Give back what the turn has. Idempotent."""
        board = self._the_board()
        with self._lock:
            holder = self._held.get(turn.slot)
            if holder is not None and holder() is turn:  # else it has none, or one from before a fork: the parent's
                self._give(board, turn.slot)
            if not self._waiting:
                return
            if weakref.ref(turn) in self._waiting:
                self._wait_no_more(board, turn)
            # Where other processes wait, too, each has the same chance; else the next one here need not even look.
            elif not board.others_wait() and (following := self._first_waiting(board)) is not None:
                following.wake()

    # --- the board --------------------------------------------------------------------------------

    def _the_board(self) -> Board:
        board = self._board
        if board is None:
            with self._lock:
                board = self._board
                if board is None:
                    board = self._board = self._open_board()
        return board

    def _open_board(self) -> Board:
        if self.path is None:
            self._tell_private("this user has no place for a cache")
            return Board(None)
        try:
            return Board(self.path)
        except (StorageError, OSError) as error:
            self._tell_private(str(error))
            return Board(None)

    def _tell_private(self, why: str) -> None:
        emit(Event(name="origin.limits.private", subject=self._identity, detail=why))


# --- one budget for each origin in a process ----------------------------------------------------------

_budgets: weakref.WeakValueDictionary[Hashable, Budget] = weakref.WeakValueDictionary()
_budgets_lock = threading.Lock()


def shared_budget(identity: str, path: Path | None, *, most: int, per_second: float | None) -> Budget:
    """The budget of this process with these limits, which goes when nobody has it any more. Touches no file."""
    key = (identity, path, most, per_second)
    with _budgets_lock:
        budget = _budgets.get(key)
        if budget is None:
            budget = _budgets[key] = Budget(identity, path, most=most, per_second=per_second)
        return budget


def _after_fork_in_child() -> None:
    global _budgets_lock
    _budgets_lock = threading.Lock()
    for budget in list(_budgets.values()):
        budget._after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
