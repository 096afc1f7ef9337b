"""Several requests at once: their order, the first error, and an interrupt during requests of other threads."""

from __future__ import annotations

import sys
import threading
import time

import pytest
from tests.support.interrupts import interrupts
from tests.support.waiting import wait_until

from millrace.errors import DeniedError
from millrace.origin.side_by_side import _next, at_late_end, side_by_side


def test_side_by_side_results_are_in_the_order_of_the_items() -> None:
    lock, at_once, most, names = threading.Lock(), 0, 0, set[str]()

    def action(item: int) -> int:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
            names.add(threading.current_thread().name)
        time.sleep(0.002 if item % 3 else 0.01)
        with lock:
            at_once -= 1
        return item * item

    assert side_by_side(action, range(40), 4, "test-side") == [item * item for item in range(40)]
    assert most <= 4
    assert names <= {f"test-side_{number}" for number in range(4)}
    assert side_by_side(action, [], 4, "test-side") == []


def test_side_by_side_of_one_item_starts_no_thread() -> None:
    assert side_by_side(lambda _: threading.get_ident(), ["only"], 4, "test-side") == [threading.get_ident()]


def test_side_by_side_raises_the_first_error_at_once() -> None:
    go_on, begun = threading.Event(), list[int]()

    def action(item: int) -> None:
        begun.append(item)
        if item == 1:
            raise DeniedError("no")
        go_on.wait(300)

    try:
        with pytest.raises(DeniedError):
            side_by_side(action, range(100), 3, "test-side")
    finally:
        go_on.set()
    wait_until(lambda: not any(thread.name.startswith("test-side") for thread in threading.enumerate()))
    assert set(begun) <= {0, 1, 2, 3}  # three at once, and those after the failed one


def test_action_at_late_end_is_called_after_items_that_an_error_leaves_in_the_background() -> None:
    go_on, called = threading.Event(), list[bool]()

    def action(item: int) -> None:
        if item == 1:
            raise DeniedError("no")
        go_on.wait(300)

    with pytest.raises(DeniedError), at_late_end(lambda: called.append(go_on.is_set())):
        side_by_side(action, range(2), 2, "test-late")
    go_on.set()
    wait_until(lambda: True in called)


def test_interrupt_while_all_items_hang_ends_the_wait() -> None:
    go_on, begun = threading.Event(), list[int]()

    def action(item: int) -> None:
        begun.append(item)
        go_on.wait(300)

    def interrupt_the_wait() -> None:
        # Not before: an interrupt in the start of a thread may leave a lock of Python's own held.
        wait_until(lambda: sys._current_frames()[main].f_code is waits)
        interrupt_after(0.01)

    main, waits = threading.get_ident(), _next.__code__
    with interrupts() as interrupt_after:
        threading.Thread(target=interrupt_the_wait, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            side_by_side(action, range(100), 3, "test-side")
    assert not go_on.is_set()
    go_on.set()
    wait_until(lambda: not any(thread.name.startswith("test-side") for thread in threading.enumerate()))
    assert set(begun) <= {0, 1, 2}


def test_items_without_threads_run_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert side_by_side(lambda item: (item, threading.get_ident()), "ab", 4, "test-side") == [
        ("a", threading.get_ident()),
        ("b", threading.get_ident()),
    ]
