"""The order of a run's checkpoints by steps and revisions; and the memory budget of bases."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.checkpoint.run.run_saver import base_budget
from millrace.checkpoint.run.timeline import newest_first, next_revision, timeline


@dataclass(frozen=True)
class Point:
    step: int
    revision: int = 0


def points(*texts: str) -> list[Point]:
    return [Point(*map(int, text.split("r"))) if "r" in text else Point(int(text)) for text in texts]


@pytest.mark.parametrize(
    ("saved", "expected"),
    [
        ([], []),
        (["100", "200", "300"], ["100", "200", "300"]),
        (["100", "200", "200r1"], ["100", "200r1"]),
        (["100", "200", "300", "150r1"], ["100", "150r1"]),
        (["100", "200", "300", "150r1", "200r1", "250r1"], ["100", "150r1", "200r1", "250r1"]),
        (["100", "200", "300", "250r1", "120r2"], ["100", "120r2"]),
        (["100", "200", "150r1", "180r2"], ["100", "150r1", "180r2"]),
        (["100", "50r1"], ["50r1"]),
        (["100r3"], ["100r3"]),
    ],
)
def test_timeline_orders_the_saves(saved: list[str], expected: list[str]) -> None:
    assert timeline(points(*saved)) == points(*expected)
    assert timeline(reversed(points(*saved))) == points(*expected)


@pytest.mark.parametrize(
    ("saved", "step", "expected"),
    [
        ([], 0, 0),
        (["100"], 101, 0),
        (["100"], 100, 1),
        (["100"], 7, 1),
        (["100", "200", "150r1"], 200, 1),
        (["100", "200", "150r1"], 150, 2),
    ],
)
def test_next_revision_follows_the_existing_ones(saved: list[str], step: int, expected: int) -> None:
    assert next_revision(step, points(*saved)) == expected


@given(st.lists(st.integers(0, 12), max_size=30))
def test_last_save_is_the_newest_and_timeline_rises(steps: list[int]) -> None:
    """Saves in any order of steps, as after restores of earlier ones."""
    saved: list[Point] = []
    for step in steps:
        saved.append(Point(step, next_revision(step, saved)))
        assert len(set(saved)) == len(saved)
        live = timeline(saved)
        assert live[-1] == saved[-1] == newest_first(saved)[0]
        assert [each.step for each in live] == sorted({each.step for each in live})
        assert sorted(newest_first(saved), key=saved.index) == saved


def test_base_budget_is_bounded_by_the_machine_and_by_every_cgroup(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    (proc / "self").mkdir(parents=True)
    (groups / "outer" / "inner").mkdir(parents=True)
    assert base_budget(proc, groups) == 0
    (proc / "meminfo").write_text("MemTotal: 4000 kB\nMemAvailable: 2000 kB\n")
    assert base_budget(proc, groups) == 1000 * 1024
    (proc / "self" / "cgroup").write_text("0::/outer/inner\n")
    (groups / "outer" / "inner" / "memory.max").write_text("max\n")
    assert base_budget(proc, groups) == 1000 * 1024
    (groups / "outer" / "memory.max").write_text("300000\n")
    (groups / "outer" / "memory.current").write_text("100000\n")
    assert base_budget(proc, groups) == 100_000


def test_base_budget_of_this_machine_is_plausible() -> None:
    assert 0 < base_budget() < 1 << 50
