"""Forked children: resets run once, owners differ, and per-process values are created again."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tests.support.forked import in_child

from millrace.runtime import forks


def test_owner_in_a_child_is_another_process() -> None:
    owner = forks.Owner()
    assert owner.is_this_process
    assert in_child(lambda: f"{owner.is_this_process} {forks.Owner().is_this_process}") == "False True"


def test_fork_depth_in_a_grandchild_is_two_larger() -> None:
    here = forks.depth()
    assert in_child(lambda: in_child(lambda: str(forks.depth()))) == str(here + 2)


def test_reset_of_objects_runs_for_those_alive() -> None:
    class Thing:
        def __init__(self) -> None:
            self.resets = 0

    def reset(thing: Thing) -> None:
        thing.resets += 1

    things = forks.objects_reset_in_child(reset)
    kept, dropped = Thing(), Thing()
    things.add(kept)
    things.add(dropped)
    del dropped
    assert in_child(lambda: f"{kept.resets} {len(things)}") == "1 1"
    assert kept.resets == 0


def test_resets_after_one_that_raises_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Thing:
        was_reset = False

    def reset(thing: Thing) -> None:
        thing.was_reset = True
        raise OSError("its descriptor is closed already")

    monkeypatch.setattr(forks, "_resets", list(forks._resets))
    things, others, reported = [Thing(), Thing()], [Thing()], list[str]()
    for each in (things, others):
        forks.objects_reset_in_child(reset).update(each)
    # Other objects of the parent may also be reported: files that its threads have open, for example.
    monkeypatch.setattr(sys, "unraisablehook", lambda found: reported.append(str(found.exc_value)))
    assert in_child(lambda: str([each.was_reset for each in (*things, *others)])) == "[True, True, True]"
    assert in_child(lambda: str("its descriptor is closed already" in reported)) == "True"


def test_per_process_value_is_created_anew_in_a_child() -> None:
    made: list[list[int] | None] = []

    def make(inherited: list[int] | None) -> list[int]:
        made.append(inherited)
        return [os.getpid()]

    value = forks.PerProcess(make)
    assert value.get() is value.get()
    assert value.get() == [os.getpid()]
    found = in_child(lambda: f"{value.get() == [os.getpid()]} {value.get() is value.get()} {made[1] == [os.getppid()]}")
    assert found == "True True True"
    assert made == [None]


_DROPS_BEFORE_OUR_HOOKS = """
import os, sys
held = []
os.register_at_fork(after_in_child=held.clear)  # before Millrace's: hooks run in the order of registration
from millrace.runtime import forks

class Client:
    def __del__(self):
        os.write(1, f"destroyed in {'the parent' if os.getpid() == parent else 'a child'}\\n".encode())

parent = os.getpid()
held.append(forks.PerProcess(lambda _: Client()))
if (pid := os.fork()) == 0:
    os.waitpid(os.fork() or os._exit(0), 0)  # nor in a grandchild
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
held.clear()
"""


def test_per_process_value_dropped_by_another_hook_is_destroyed_in_no_child() -> None:
    done = subprocess.run([sys.executable, "-c", _DROPS_BEFORE_OUR_HOOKS], capture_output=True, text=True, check=True)
    assert done.stdout == "destroyed in the parent\n"


_CREATED_DURING_A_FORK = """
import os
held = []
os.register_at_fork(before=lambda: held.append(forks.PerProcess(lambda _: Client())))  # runs after Millrace's
from millrace.runtime import forks

class Client:
    def __del__(self):
        os.write(1, f"destroyed in {'the parent' if os.getpid() == parent else 'a child'}\\n".encode())

parent = os.getpid()
if (pid := os.fork()) == 0:
    held.clear()
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
held.clear()
"""


def test_per_process_value_created_while_a_fork_begins_is_not_destroyed_in_the_child() -> None:
    command = [sys.executable, "-c", _CREATED_DURING_A_FORK]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "destroyed in the parent\n"


_INTERRUPTS_THE_WAIT = """
import os, signal, sys, threading, time
from millrace.runtime import forks

def is_waiting():
    return sys._current_frames()[main].f_code is forks._before_fork.__code__

def interrupt():
    with forks.importing():
        imports.set()
        while not is_waiting():
            time.sleep(0.001)
        signal.pthread_kill(main, signal.SIGINT)
        while is_waiting():
            time.sleep(0.001)

main, imports, resets = threading.get_ident(), threading.Event(), []
forks.reset_in_child(lambda: resets.append(None))
threading.Thread(target=interrupt).start()
imports.wait()
if (pid := os.fork()) == 0:
    os._exit(0 if resets else 1)
assert os.waitpid(pid, 0)[1] == 0
"""


def test_resets_after_an_interrupted_wait_for_an_import_run() -> None:
    """Python reports an exception in a hook, and forks all the same."""
    subprocess.run([sys.executable, "-c", _INTERRUPTS_THE_WAIT], check=True, capture_output=True)


_DROPS_A_FILE_SYSTEM = """
import gc, os, weakref
import fsspec
import millrace

def clients():
    fs = millrace.filesystem("s3", target_options={"anon": True, "endpoint_url": "http://127.0.0.1:9"}, members="none")
    return weakref.ref(fs.origin.inner._clients._states.get())

kept = clients()
assert kept() is not None  # by fsspec, which drops all file systems in a forked child
if (pid := os.fork()) == 0:
    gc.collect()
    cached = fsspec.get_filesystem_class("millrace")._cache
    os._exit(0 if kept() is not None and not cached else 1)
assert os.waitpid(pid, 0)[1] == 0
"""


def test_clients_of_a_file_system_that_fsspec_drops_are_not_destroyed_in_a_child() -> None:
    """The destructor of a client of obstore waits for a lock that a thread of the parent may have had: without end."""
    subprocess.run([sys.executable, "-c", _DROPS_A_FILE_SYSTEM], check=True)
