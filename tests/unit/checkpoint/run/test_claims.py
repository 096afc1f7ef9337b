"""Claims: one process at a time saves into a run, and the kernel, not a clock, shows which processes are dead."""

from __future__ import annotations

import io
import json
import os
import pickle
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from tests.support.forked import in_child

from millrace.checkpoint.run import claims as claims_module
from millrace.checkpoint.run import processes
from millrace.checkpoint.run.claims import Claim, ClaimRecord, dead_saves
from millrace.checkpoint.run.processes import Process, state_of, this_process
from millrace.checkpoint.run.run_layout import Run, _ObjectPlace, checkpoint_name, open_run
from millrace.checkpoint.state.tensors import _SAFE_GLOBALS_LOCK, check_blob
from millrace.checkpoint.storage.object_storage import ObjectStorage
from millrace.errors import OriginUnavailableError, RunTakenError, StorageError, UsageError
from millrace.events import add_hook
from millrace.origin import open_origin


@pytest.fixture(params=["local", "object store"])
def run(request, tmp_path):
    place = tmp_path / "run"
    if request.param == "local":
        return open_run(place)
    origin = open_origin("file")
    return Run(
        ObjectStorage(f"file://{place}", origin, str(place)), _ObjectPlace(f"file://{place}", origin, str(place))
    )


def names(run) -> list[str]:
    return [file.name for file in run.files("writer-")]


def record_of(process: Process, **fields) -> ClaimRecord:
    return ClaimRecord(process=process, token="t", created=1e9, **fields)


def publish(run, number: int, record: ClaimRecord) -> None:
    run.storage.prepare()
    run.storage.publish(f"writer-{number:012d}.json", record.encode(), replace=True)


# --- another process (this file is its own program) -----------------------------------------------

_PROGRAM = """
import sys
from millrace.checkpoint.run.claims import Claim
from millrace.checkpoint.run.run_layout import open_run
claim = Claim.take(open_run(sys.argv[1]), wait_seconds=0)
claim.announce(sys.argv[2:])
print(claim.number, flush=True)
sys.stdin.readline()
claim.release()
print("released", flush=True)
sys.stdin.readline()
"""


@contextmanager
def holder(path, *saving):
    """Another process that has taken the run."""
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(path), *saving], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline().strip().isdigit()
        yield process
    finally:
        process.kill()
        process.communicate()


# --- taking and losing ----------------------------------------------------------------------------


def test_second_claim_has_the_next_number(run):
    first = Claim.take(run)
    first.check()
    assert (first.number, names(run)) == (1, ["writer-000000000001.json"])
    second = Claim.take(run)
    second.check()
    assert (second.number, names(run)) == (2, ["writer-000000000002.json"])
    with pytest.raises(RunTakenError, match=f"pid {os.getpid()} on "):
        first.check()
    first.release()  # changes nothing
    second.check()
    assert names(run) == ["writer-000000000002.json"]


def test_claim_after_release_has_the_next_number(run):
    first = Claim.take(run)
    first.release()
    second = Claim.take(run, wait_seconds=0)
    assert second.number == 2
    with pytest.raises(RunTakenError):
        first.check()
    with pytest.raises(RunTakenError):
        first.announce(["step-000000000001"])


def test_removed_claim_is_lost(run):
    claim = Claim.take(run)
    run.storage.delete(names(run))
    with pytest.raises(RunTakenError, match=r"writer-000000000001.json, the claim of this process, was removed"):
        claim.check()
    # Numbers start again; the old claim is not mistaken for the new one with its number.
    again = Claim.take(run)
    assert again.number == claim.number
    with pytest.raises(RunTakenError):
        claim.check()
    again.check()


@pytest.mark.parametrize("content", [b"", b"not a claim", None])
def test_claim_with_replaced_file_names_the_file(run, tmp_path, content):
    claim = Claim.take(run)
    path = tmp_path / "run" / names(run)[0]
    path.unlink()
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    with pytest.raises(RunTakenError, match=r"writer-000000000001.json, the claim of this process, was removed or rep"):
        claim.check()


@pytest.mark.parametrize(
    "make",
    [os.mkdir, os.mkfifo, lambda path: os.symlink("missing", path), lambda path: os.symlink("/dev/zero", path)],
    ids=["directory", "pipe", "dangling link", "link to a device"],
)
def test_claim_whose_name_is_not_a_file_names_the_path(tmp_path, monkeypatch, make):
    monkeypatch.setattr(claims_module, "_MAX_TAKE_ATTEMPTS", 3)
    make(tmp_path / "writer-000000000001.json")
    with pytest.raises(StorageError, match=r"/writer-000000000001.json is not a file, .*: remove it"):
        Claim.take(open_run(tmp_path))


def test_claim_whose_file_was_replaced_by_a_copy_is_still_held(run):
    claim = Claim.take(run)
    (file,) = run.files("writer-")
    data = bytes(memoryview(run.storage.read(file, 0, file.size)))
    run.storage.delete([file.name])
    run.storage.publish(file.name, data, replace=True)
    claim.check()
    claim.check()


def test_foreign_files_are_not_claims(run):
    run.storage.prepare()
    for name in ("writer-1.json", "writer-000000000009.json.bak", "writers-000000000009.json"):
        run.storage.publish(name, b"mine", replace=True)
    assert Claim.take(run).number == 1
    assert len(run.files("")) == 4


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"null", b'{"process": 3}', b"\xff" * 100, b'{"process": {"pid": []}}']
)
def test_unreadable_claim_is_replaced(run, data):
    run.storage.prepare()
    run.storage.publish("writer-000000000007.json", data, replace=True)
    assert Claim.take(run, wait_seconds=0).number == 8


def test_slow_claim_with_reused_number_is_lost(run, monkeypatch):
    """It listed the claims before two others took the run in turn. Its number is free again."""
    Claim.take(run)
    newest, newer = claims_module._newest, []

    def slow(run):
        seen = newest(run)
        if not newer:
            newer.append(None)
            Claim.take(run)
            newer[0] = Claim.take(run)
        return seen

    monkeypatch.setattr(claims_module, "_newest", slow)
    claim = Claim.take(run)
    assert (newer[0].number, claim.number) == (3, 4)
    assert names(run) == ["writer-000000000004.json"]
    claim.check()


def test_claim_of_another_host_is_replaced_at_once(run):
    publish(run, 5, record_of(replace(this_process(), boot="another", pid=1)))
    assert Claim.take(run, wait_seconds=0).number == 6


def test_claim_of_dead_process_is_replaced_at_once(run, tmp_path):
    with holder(tmp_path / "run") as other:
        other.send_signal(signal.SIGKILL)
        # Not reaped yet: its pid is still there.
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
        Claim.take(run, wait_seconds=0).check()


def test_claim_of_running_process_is_waited_for(run, tmp_path):
    with holder(tmp_path / "run") as other:
        with pytest.raises(RunTakenError, match=rf"pid {other.pid} on .*since 2.*: end that process") as caught:
            Claim.take(run, wait_seconds=0.1)
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
        other.stdin.write("\n")
        other.stdin.flush()
        assert other.stdout.readline() == "released\n"
        assert Claim.take(run, wait_seconds=0).number == 2


def test_claim_in_a_forked_child_is_refused(run):
    claim = Claim.take(run)

    def check() -> str:
        try:
            claim.check()
        except UsageError as error:
            return str(error)
        return "accepted"

    assert "before the fork" in in_child(check)


def test_claim_that_a_thread_uses_during_a_fork_does_not_block_the_child(run):
    claim, one = Claim.take(run), io.BytesIO()
    torch.save(1, one)

    def use() -> str:
        signal.alarm(120)  # ends a child that waits for a lock
        claim.release()
        with pytest.raises(UsageError, match="before the fork"):
            claim.announce([])
        with pytest.raises(UsageError, match="before the fork"):
            claim.check()
        assert check_blob(one.getvalue(), "key", ()) == 1
        return f"{len(run.scan())} checkpoints"

    with claim._lock, run._lock.get(), _SAFE_GLOBALS_LOCK.get():  # as another thread of this process would hold them
        assert in_child(use) == "0 checkpoints"
    claim.check()


def test_claim_cleanup_on_failing_storage_emits_an_event(run, monkeypatch):
    claim = Claim.take(run)
    seen = []
    remove = add_hook(lambda event: seen.append(event.name))

    def broken(*args, **options):
        raise OriginUnavailableError("down")

    for name, event in (("delete", "checkpoint.claim.clean.failed"), ("publish", "checkpoint.claim.release.failed")):
        with monkeypatch.context() as patch:
            patch.setattr(type(run.storage), name, broken)
            if name == "delete":
                claim = Claim.take(run)
            else:
                claim.release()
        assert seen.pop() == event
    remove()
    with monkeypatch.context() as patch:
        patch.setattr(type(run.storage), "stat", lambda *_: (_ for _ in ()).throw(StorageError("bad disk")))
        with pytest.raises(StorageError):
            Claim.take(run)


# --- what dead writers were saving ----------------------------------------------------------------


def test_claim_records_the_save_of_a_dead_writer(run, tmp_path):
    a, b, c = (checkpoint_name(step) for step in (1, 2, 3))
    with holder(tmp_path / "run", a) as other:
        assert dead_saves(run) == frozenset()
        other.kill()
        other.wait()
    assert dead_saves(run) == {a}
    claim = Claim.take(run)
    claim.announce([b])
    assert dead_saves(run) == {a}
    # A new save there removes it from the list permanently.
    claim.announce([a])
    assert dead_saves(run) == frozenset()
    claim.announce([])
    assert dead_saves(run) == frozenset()
    # Of a writer of which nothing is known, nothing is known to be dead.
    publish(run, 9, record_of(replace(this_process(), namespace="pid:[1]"), saving=(b,), left=(c,)))
    assert dead_saves(run) == {c}


def test_claim_with_invalid_checkpoint_names_ignores_them(run):
    data = json.loads(record_of(replace(this_process(), started=1)).encode())
    data["saving"] = ["../../etc", "step-000000000001", 3, "notes"]
    run.storage.prepare()
    run.storage.publish("writer-000000000001.json", json.dumps(data).encode(), replace=True)
    assert dead_saves(run) == {"step-000000000001"}


# --- processes ------------------------------------------------------------------------------------


def test_process_with_same_pid_is_distinguished(tmp_path):
    here = this_process()
    assert here.started > 0
    assert here.boot
    assert state_of(here) == "here"
    assert state_of(replace(here, started=here.started + 1)) == "dead"
    assert state_of(replace(here, pid=(1 << 22) + 1)) == "dead"
    assert state_of(replace(here, pid=1 << 70)) == "dead"
    for field in ("boot", "namespace"):
        assert state_of(replace(here, **{field: "another"})) == "elsewhere"
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    other = replace(here, pid=child.pid, started=processes._started(child.pid))
    assert state_of(other) == "alive"
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert state_of(other) == "dead"
    child.communicate()
    assert state_of(other) == "dead"


@pytest.mark.parametrize(
    ("stat", "started"),
    [
        ("7 (a) b) R) S 1 7 7 0 -1 4 1 0 0 0 1 1 0 0 20 0 3 0 4711 9 9 9", 4711),
        ("7 (x) Z 1 7 7 0 -1 4 1 0 0 0 1 1 0 0 20 0 1 0 4711 9 9 9", 0),
        ("7 (first thread ended) Z 1 7 7 0 -1 4 1 0 0 0 1 1 0 0 20 0 2 0 4711 9 9 9", 4711),
        ("", None),
    ],
)
def test_start_tick_of_process_is_read(monkeypatch, stat, started):
    monkeypatch.setattr(processes, "_text", lambda path: stat)
    assert processes._started(7) == started
