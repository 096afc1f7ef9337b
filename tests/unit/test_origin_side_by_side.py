"""Several requests at once: their order, the first error, and an interrupt, with threads that are in the middle of one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from tests.interrupts import interrupts

from millrace.errors import DeniedError
from millrace.origin.side_by_side import side_by_side


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_results_come_in_the_order_of_the_items_from_so_many_threads() -> None:
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


def test_one_item_needs_no_thread() -> None:
    assert side_by_side(lambda _: threading.get_ident(), ["only"], 4, "test-side") == [threading.get_ident()]


def test_the_first_error_is_raised_while_others_hang() -> None:
    go_on, begun = threading.Event(), list[int]()

    def action(item: int) -> None:
        begun.append(item)
        if item == 1:
            raise DeniedError("no")
        go_on.wait(60)

    try:
        with pytest.raises(DeniedError):
            side_by_side(action, range(100), 3, "test-side")
    finally:
        go_on.set()
    until(lambda: not any(thread.name.startswith("test-side") for thread in threading.enumerate()))
    assert set(begun) <= {0, 1, 2, 3}  # three at once, and what followed the failed one


def test_an_interrupt_is_heard_while_all_hang() -> None:
    go_on, begun = threading.Event(), list[int]()

    def action(item: int) -> None:
        begun.append(item)
        go_on.wait(60)

    with interrupts() as interrupt_after:
        interrupt_after(0.1)
        with pytest.raises(KeyboardInterrupt):
            side_by_side(action, range(100), 3, "test-side")
    assert not go_on.is_set()
    go_on.set()
    until(lambda: not any(thread.name.startswith("test-side") for thread in threading.enumerate()))
    assert set(begun) <= {0, 1, 2}


def test_without_threads_one_after_the_other_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert side_by_side(lambda item: (item, threading.get_ident()), "ab", 4, "test-side") == [
        ("a", threading.get_ident()),
        ("b", threading.get_ident()),
    ]
