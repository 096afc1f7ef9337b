"""Faults of the saver process of a manager."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.checkpoint import CheckpointManager
from millrace.checkpoint.run import saver_process

# Ends the saver with the operation on a local disk after this many.
KILLED_AFTER = """
import os, signal
from millrace.checkpoint.storage import storage
left = [{operations}]
def guard(owner, name):
    method = getattr(owner, name)
    def guarded(*arguments, **options):
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        return method(*arguments, **options)
    setattr(owner, name, guarded)
for name in ("__init__", "write", "close"):
    guard(storage.LocalWriter, name)
for name in ("publish", "delete", "prepare"):
    guard(storage.LocalStorage, name)
"""


# A storage that fails does so soon, and one that a busy machine stops for some seconds does not fail.
FEW_TRIES = """
from millrace.origin.limits import retrying
retrying.PATIENCE = retrying.Patience(tries=3)
"""


# A node that a busy machine stops for some seconds is not lost.
PATIENT_WITH_NODES = """
from millrace.checkpoint.storage import peer_files
peer_files.LIST_SECONDS = peer_files.DATA_SECONDS = 60.0
"""


@contextlib.contextmanager
def savers_with(code: str) -> Iterator[None]:
    """The savers that start in this context run `code` first."""
    with pytest.MonkeyPatch.context() as patch:
        last = "main(sys.argv[1:])\n"
        assert saver_process._CODE.endswith(last)
        patch.setattr(saver_process, "_CODE", saver_process._CODE.removesuffix(last) + code + last)
        yield


def pid_of(run: CheckpointManager) -> int:
    """The pid of the saver, which a save has started."""
    assert run._saver is not None
    assert run._saver.pid is not None
    return run._saver.pid


def child_of(run: CheckpointManager) -> saver_process._Child:
    """The saver process as its parent has it, which a save has started."""
    assert run._saver is not None
    assert run._saver._child is not None
    return run._saver._child


def child_has_died(run: CheckpointManager) -> bool:
    """Whether the parent has noticed that its saver process ended."""
    return run._saver is not None and run._saver._child is not None and run._saver._child.death is not None


@contextlib.contextmanager
def no_files_in(run: CheckpointManager) -> Iterator[None]:
    """Every file that the saver writes is too large."""
    pid = pid_of(run)
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE, (10, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


def is_gone(pid: int) -> bool:
    """Whether a process has ended, waited for or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def first_upload_fails(error: str) -> str:
    """A program for `savers_with`: uploads of the files of step 1 raise this class of `millrace.errors`."""
    return f"""
from millrace import errors
from millrace.checkpoint.run import uploading
copy = uploading.copy_files
def fail_first(source, *arguments, **options):
    if source.url.endswith("step-000000000001"):
        raise errors.{error}("the upload fails", next_step="save again")
    return copy(source, *arguments, **options)
uploading.copy_files = fail_first
"""
