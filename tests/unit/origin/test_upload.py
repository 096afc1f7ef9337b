"""Uploads in parts that an interrupt ends, or that a forked process inherits."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import pytest
from tests.support.forked import in_child
from tests.support.interrupts import interrupted_at
from tests.support.waiting import wait_until
from typing_extensions import Buffer

from millrace.errors import UsageError
from millrace.origin.upload import PART_BYTES, ObjectUpload


class Target:
    """Where the parts go. `bodies` are the published objects, `aborted` counts the uploads that were aborted."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.aborted = 0
        self.may_take = threading.Event()
        self.may_take.set()

    def upload(self, parts: Iterator[Buffer]) -> None:
        taken = []
        try:
            for part in parts:
                taken.append(bytes(part[:10]))  # type: ignore[index]
                self.may_take.wait(60)
        except BaseException:
            self.aborted += 1
            raise
        self.bodies.append(b"".join(taken))

    def writer(self) -> ObjectUpload:
        return ObjectUpload("b/key", self.upload, lambda data: self.bodies.append(bytes(data)[:10]))


def running() -> list[threading.Thread]:
    # Also those that an interrupt has prevented from starting are in the list.
    return [thread for thread in threading.enumerate() if thread.name == "millrace-upload" and thread.is_alive()]


PART = b"0" * PART_BYTES


def test_interrupt_at_any_moment_of_close_publishes_all_or_nothing() -> None:
    for number in itertools.count():
        target = Target()
        writer = target.writer()
        writer.write(PART)
        writer.write(b"1" * 10)
        interrupt = interrupted_at(number, writer.close)
        if interrupt is not None:
            writer.abort()  # as the end of a `with` block, in case not a line of `close` has run
        wait_until(lambda: not running())
        assert (target.bodies, target.aborted) in (([b"0" * 10 + b"1" * 10], 0), ([], 1))
        if interrupt is None:
            break
    assert target.bodies
    assert number > 5


def test_interrupt_at_any_moment_of_write_sends_no_part_twice() -> None:
    for number in itertools.count():
        target = Target()
        writer = target.writer()
        interrupt = interrupted_at(number, lambda writer=writer: writer.write(PART))  # type: ignore[misc]
        if interrupt is None:
            writer.close()
            assert target.bodies == [b"0" * 10]
            break
        try:
            writer.write(b"1" * 10)
            writer.close()
        except (KeyboardInterrupt, UsageError, ValueError):
            writer.abort()
        wait_until(lambda: not running())
        # Before the first line of `write` the part is missing, after the last one it is there.
        assert target.bodies in ([], [b"1" * 10], [b"0" * 10 + b"1" * 10])
    assert number > 5


def test_interrupt_at_any_moment_of_the_first_part_raises_only_the_interrupt() -> None:
    for number in itertools.count():
        writer = Target().writer()

        def write(writer: ObjectUpload = writer) -> None:
            with writer:
                writer.write(PART)

        if interrupted_at(number, write) is None:  # any other exception fails
            break
        writer.abort()  # as the end of the file, in case not a line of `__exit__` has run
        wait_until(lambda: not running())
    assert number > 5


def test_close_after_an_interrupted_write_raises() -> None:
    target = Target()
    writer = target.writer()
    number = 0
    while (interrupted_at(number, lambda: writer.write(PART))) is not None and writer._cut_by is None:
        number += 1
    assert writer._cut_by is not None
    with pytest.raises(UsageError, match="a write was interrupted or failed: write it again"):
        writer.close()
    assert target.bodies == []


@pytest.mark.parametrize("nbytes", [10, PART_BYTES + 10])
def test_forked_process_cannot_write_or_publish_an_inherited_upload(nbytes: int) -> None:
    target = Target()
    writer = target.writer()
    writer.write(b"0" * nbytes)

    def child() -> str:
        with pytest.raises(UsageError, match="was forked: write and close it in the process that opened it"):
            writer.write(PART * 4)
        with pytest.raises(UsageError, match="before this process was forked"):
            writer.close()
        writer.abort()
        return str(len(target.bodies))

    assert in_child(child) == "0"
    writer.close()
    assert len(target.bodies) == 1
