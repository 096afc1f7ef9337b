import logging
import threading
import time
from collections.abc import Iterator

import pytest

from millrace import events
from millrace.events import Event, add_hook, emit


def test_hooks_come_and_go() -> None:
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


def test_a_hook_that_raises_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def broken(event: Event) -> None:
        raise RuntimeError(event.name)

    remove = add_hook(broken)
    with caplog.at_level(logging.ERROR, logger="millrace"):
        emit(Event(name="x.y"))
    remove()
    assert "x.y" in caplog.text


def test_hooks_added_at_the_same_time_are_all_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(tuple[tuple[object, events.Hook], ...]):
        """Gives way to the other threads between the reading of the hooks and their writing."""

        def __iter__(self) -> Iterator[tuple[object, events.Hook]]:
            time.sleep(0.1)
            return super().__iter__()

    before = events._hooks
    monkeypatch.setattr(events, "_hooks", Slow(before))
    threads = [threading.Thread(target=add_hook, args=(lambda event: None,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(events._hooks) == len(before) + 4
