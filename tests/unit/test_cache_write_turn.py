import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from millrace.cache.index import TURN_NAME, Index
from millrace.cache.records import ObjectName
from millrace.cache.write_turn import WriteTurn
from millrace.errors import StorageError

NAME = ObjectName("origin", "key", "version")
HOLD = (
    "import pathlib, sys; from millrace.cache.write_turn import WriteTurn;"
    "turn = WriteTurn(pathlib.Path(sys.argv[1])); turn.__enter__(); print('held', flush=True); sys.stdin.read()"
)


def holder(path: Path) -> subprocess.Popen[str]:
    """Another process that has the turn until it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.cache.write_turn.PATIENCE_SECONDS", 0.3)


@pytest.mark.usefixtures("impatient")
def test_who_does_not_go_on_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "turn"
    turn = WriteTurn(path)
    with holder(path) as other:
        other.send_signal(signal.SIGSTOP)
        for _ in range(2):
            with pytest.raises(StorageError, match="does not go on: continue or end") as raised, turn:
                pytest.fail("two have the turn")
        assert str(tmp_path) in str(raised.value)
        other.kill()
        other.wait()
        with turn:
            pass
        with turn:  # which was given back
            pass
    turn.close()


def test_who_was_stuck_is_not_waited_for_again_until_he_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    sleep = pauses.append
    path = tmp_path / "turn"
    turn = WriteTurn(path)
    with holder(path) as other:
        monkeypatch.setattr("millrace.cache.write_turn.PATIENCE_SECONDS", 0.2)
        with pytest.raises(StorageError), turn:
            pass
        monkeypatch.setattr("millrace.cache.write_turn.time.sleep", sleep)
        with pytest.raises(StorageError), turn:
            pass
        assert pauses == []
        other.kill()
        other.wait()
    with turn:
        pass
    turn.close()


@pytest.mark.usefixtures("impatient")
def test_threads_of_one_process_exclude_each_other(tmp_path: Path) -> None:
    turn = WriteTurn(tmp_path / "turn")
    inside, go_on, refused = threading.Event(), threading.Event(), []

    def hold() -> None:
        with turn:
            inside.set()
            go_on.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(30)
    try:
        with turn:
            pytest.fail("two have the turn")
    except StorageError as error:
        refused.append(error)
    go_on.set()
    thread.join()
    assert refused
    with turn:
        pass
    turn.close()


@pytest.mark.usefixtures("impatient")
def test_waiting_for_something_else_counts(tmp_path: Path) -> None:
    path = tmp_path / "turn"
    turn = WriteTurn(path)
    with holder(path) as other:
        with pytest.raises(StorageError), turn.since(0.0):
            pytest.fail("two have the turn")
        other.kill()
        other.wait()
    with turn.since(0.0):  # free: nobody has to wait
        pass
    turn.close()


@pytest.mark.usefixtures("impatient")
def test_a_forked_child_does_not_keep_the_turn_of_its_parent(tmp_path: Path) -> None:
    """A process is killed while it writes; a child that it had forked just then lives on."""
    path = tmp_path / "turn"
    code = (
        "import os, pathlib, sys, time; from millrace.cache.write_turn import WriteTurn;"
        "turn = WriteTurn(pathlib.Path(sys.argv[1])); os.register_at_fork(after_in_child=turn.abandon); turn.__enter__();"
        "child = os.fork(); print(child, flush=True) if child else None; time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        child = int(other.stdout.readline())
        try:
            other.kill()
            other.wait()
            with WriteTurn(path):
                os.kill(child, 0)  # it lives
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    "write",
    [
        lambda index: index.create(bytes(16), 100, 100, NAME),
        lambda index: index.put_tail(bytes(16), b"tail"),
        lambda index: index.table(b"another"),
        lambda index: index.meta_writing().__enter__(),
    ],
)
def test_an_index_that_somebody_holds_is_read_but_not_written(tmp_path: Path, write: Callable[[Index], object]) -> None:
    index = Index(tmp_path)
    entry = index.create(bytes(range(16)), 100, 100, NAME)
    with holder(tmp_path / TURN_NAME) as other:
        other.send_signal(signal.SIGSTOP)
        with pytest.raises(StorageError, match="does not go on"):
            write(index)
        assert index.get(entry.object_id) == entry
        other.kill()
        other.wait()
    write(index)
    index.close()
