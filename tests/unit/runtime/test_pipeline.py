"""Jobs in threads: failed ones keep no reference to data of the caller, and interrupts leave no thread."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref

import pytest

from millrace.runtime.pipeline import ThreadPool, run_in_order


class Data:
    """What a caller works on."""


def test_failed_jobs_leave_no_reference_to_the_data_of_their_caller() -> None:
    def load(data: Data) -> None:
        begun = threading.Barrier(4)

        def work(number: int) -> None:
            begun.wait(60.0)
            raise ValueError(f"{number} of {data}")

        list(run_in_order(range(4), work, 4))

    data = Data()
    seen = weakref.ref(data)
    gc.disable()
    try:
        with pytest.raises(ValueError, match="0 of"):
            load(data)
        del data
        assert seen() is None
    finally:
        gc.enable()


def test_pool_whose_first_start_is_interrupted_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    before = set(threading.enumerate())
    pool = ThreadPool(str, 1)
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pool.submit(1)
    pool.close()
    assert set(threading.enumerate()) == before


def test_pool_whose_thread_cannot_start_raises_and_can_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    pool = ThreadPool(str, 1)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", failing)
        with pytest.raises(RuntimeError, match="can't start"):
            pool.submit(1)
    assert pool.submit(2).result() == "2"
    pool.close()


def test_pool_whose_start_is_interrupted_before_the_thread_begins_can_be_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(_: threading.Thread) -> None:
        raise KeyboardInterrupt

    pool = ThreadPool(str, 1)
    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pool.submit(1)
    pool.close()


def test_pool_whose_close_was_interrupted_waits_for_its_job_when_closed_again() -> None:
    begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def work(_: int) -> None:
        begun.set()
        may_end.wait(60)
        ended.set()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    pool = ThreadPool(work, 1)
    pool.submit(1)
    assert begun.wait(60)
    previous = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - the signal may come before the call
            threading.Timer(0.1, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1)).start()
            pool.close()
    finally:
        signal.signal(signal.SIGUSR1, previous)
    threading.Timer(0.2, may_end.set).start()
    pool.close()
    assert ended.is_set()


def test_pool_in_a_forked_process_can_be_closed() -> None:
    pool = ThreadPool(str, 1)
    assert pool.submit(1).result() == "1"
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        pool.close()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    pool.close()
