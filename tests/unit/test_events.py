import logging
import threading
from collections.abc import Callable

import pytest

from millrace import events
from millrace.events import Event, add_hook, emit


def test_removed_hook_is_not_called() -> None:
    seen: list[str] = []

    def hook(event: Event) -> None:
        seen.append(event.name)

    first, second = add_hook(hook), add_hook(hook)
    emit(Event(name="a"))
    first()
    first()  # removing twice removes nothing else
    emit(Event(name="b"))
    second()
    emit(Event(name="c"))
    assert seen == ["a", "a", "b"]


def test_hook_that_raises_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def broken(event: Event) -> None:
        raise RuntimeError(event.name)

    remove = add_hook(broken)
    with caplog.at_level(logging.ERROR, logger="millrace"):
        emit(Event(name="x.y"))
    remove()
    assert "x.y" in caplog.text


def test_hooks_added_by_many_threads_are_all_kept_and_removed() -> None:
    before = len(events._hooks.registered)
    start = threading.Barrier(16)
    removers: list[Callable[[], None]] = []

    def add_many() -> None:
        start.wait(120)
        removers.extend(add_hook(lambda event: None) for _ in range(100))

    threads = [threading.Thread(target=add_many) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(events._hooks.registered) == before + 1600
    for remove in removers:
        remove()
    assert len(events._hooks.registered) == before
