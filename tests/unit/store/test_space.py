"""The space kept free beyond `min_free`, and the interval of checks: a table of observations."""

import pytest

from millrace.store.space import CLOSE_LOOK_SECONDS, Look, headroom, until_next_look

MB = 1_000_000


def steady(
    rate: float, *, seconds: float = 1.0, every: float = 0.05, kept: float = 0.0, free: int = 1000 * MB
) -> list[Look]:
    """Looks at a disk to which everybody writes `rate` bytes a second, and we `kept` of these."""
    moments = [number * every for number in range(round(seconds / every) + 1)]
    return [Look(moment, free - int(rate * moment), int(kept * moment)) for moment in moments]


@pytest.mark.parametrize(
    ("looks", "min_free", "expected"),
    [
        ([], 100 * MB, 0),
        ([Look(0, 500 * MB, 0)], 100 * MB, 0),  # one look shows no rate
        (steady(0), 100 * MB, 0),
        (steady(20 * MB), 100 * MB, 2 * MB),  # twice the writes of a twentieth of a second
        (steady(400 * MB), 100 * MB, 40 * MB),
        (steady(4000 * MB), 100 * MB, 100 * MB),  # never more than as much again
        (steady(20 * MB), 0, 0),  # nothing is to be kept free
        (steady(20 * MB, every=0.5), 100 * MB, 2 * MB),  # however rarely it was looked
        (steady(200 * MB, kept=200 * MB), 100 * MB, 0),  # it was us
        (steady(220 * MB, kept=200 * MB), 100 * MB, 2 * MB),
        (steady(-20 * MB), 100 * MB, 0),  # others gave something back
        (steady(0, kept=-50 * MB), 100 * MB, 0),  # other processes evicted files that are still mapped
        (
            [*steady(400 * MB, seconds=0.5), Look(1.5, 800 * MB, 0), Look(1.55, 800 * MB, 0)],
            100 * MB,
            40 * MB,
        ),  # it ended
        (
            [Look(0, 500 * MB, 0), Look(0.05, 480 * MB, 0)],
            100 * MB,
            10 * MB,
        ),  # a burst is averaged over a fifth of a second
        ([Look(0, 500 * MB, 0), Look(0, 480 * MB, 0)], 100 * MB, 10 * MB),  # two looks at once
        # A block of 4 MB is on the disk before it is in the index.
        ([Look(0, 500 * MB, 0), Look(0.05, 496 * MB, 0), Look(0.1, 496 * MB, 4 * MB)], 100 * MB, 2 * MB),
    ],
)
def test_headroom_is_twice_the_writes_between_two_checks(looks: list[Look], min_free: int, expected: int) -> None:
    assert headroom(looks, min_free_bytes=min_free) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("looks", "free", "min_free", "closely"),
    [
        ([], 500 * MB, 100 * MB, False),
        ([], 200 * MB, 100 * MB, False),
        ([], 199 * MB, 100 * MB, True),
        ([], 0, 100 * MB, True),
        ([], 0, 0, False),
        (steady(150 * MB), 249 * MB, 100 * MB, True),  # two ticks from here
        (steady(150 * MB), 251 * MB, 100 * MB, False),
        (steady(150 * MB, kept=150 * MB), 249 * MB, 100 * MB, False),
        (steady(150 * MB), 100 * MB, 0, True),
    ],
)
def test_disk_that_is_nearly_full_is_checked_more_often(
    looks: list[Look], free: int, min_free: int, closely: bool
) -> None:
    pause = until_next_look(looks, free_bytes=free, min_free_bytes=min_free)
    assert pause == (CLOSE_LOOK_SECONDS if closely else None)
