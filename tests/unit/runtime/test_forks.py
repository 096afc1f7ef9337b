"""Forked children: resets run once, owners differ, and per-process values are created again."""

from __future__ import annotations

import os
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
