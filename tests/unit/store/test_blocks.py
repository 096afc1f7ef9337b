import random

import pytest

from millrace.store.records import ReadAhead, block_count, blocks_of, coalesce, object_id, span_of


def test_identity_depends_on_every_part_and_on_nothing_else() -> None:
    base = ("s3+http://a", "b/k", '"v1"', 10)
    assert object_id(*base) == object_id(*base)
    # The value is part of the store's format: it must be the same in every build.
    assert object_id(*base).hex() == "29803395efe1fc41fa6b4a654d028cd1"
    others = [
        ("s3+http://b", "b/k", '"v1"', 10),
        ("s3+http://a", "b/l", '"v1"', 10),
        ("s3+http://a", "b/k", '"v2"', 10),
    ]
    others += [("s3+http://a", "b/k", '"v1"', 11), ("s3+http://ab", "/k", '"v1"', 10)]
    assert len({object_id(*other) for other in [base, *others]}) == len(others) + 1


@pytest.mark.parametrize(
    ("start", "stop", "expected"),
    [(0, 0, []), (0, 1, [0]), (0, 4, [0]), (3, 5, [0, 1]), (4, 8, [1]), (8, 8, []), (7, 13, [1, 2, 3]), (9, 3, [])],
)
def test_blocks_of_range_are_those_it_touches(start: int, stop: int, expected: list[int]) -> None:
    assert list(blocks_of(start, stop, 4)) == expected


@pytest.mark.parametrize(("size", "count"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_block_count_rounds_up(size: int, count: int) -> None:
    assert block_count(size, 4) == count
    if count:
        assert span_of(count - 1, count, size, 4) == ((count - 1) * 4, size)


@pytest.mark.parametrize(
    ("blocks", "max_run", "runs"),
    [
        ([], 4, []),
        ([3], 4, [(3, 4)]),
        ([2, 0, 1], 4, [(0, 3)]),
        ([0, 1, 2, 3, 4], 2, [(0, 2), (2, 4), (4, 5)]),
        ([0, 2, 3, 3, 7], 4, [(0, 1), (2, 4), (7, 8)]),
    ],
)
def test_coalesce_joins_adjacent_blocks_up_to_the_longest_run(
    blocks: list[int], max_run: int, runs: list[tuple[int, int]]
) -> None:
    assert [(run.start, run.stop) for run in coalesce(blocks, max_run)] == runs


def test_read_ahead_opens_on_sequential_reads_and_closes_on_others() -> None:
    state = ReadAhead()
    assert list(state.wanted(1000, 10)) == []
    windows = []
    for start in range(0, 60, 10):
        state = state.after(start, start + 10)
        windows.append(state.window)
    assert windows == [0, 1, 2, 4, 8, 16]
    assert list(state.wanted(100, 10)) == [6, 7, 8, 9]  # never past the end
    assert state.after(500, 510).window == 0


def windows_after(*reads: tuple[int, int]) -> list[int]:
    state, windows = ReadAhead(), []
    for start, stop in reads:
        state = state.after(start, stop)
        windows.append(state.window)
    return windows


def test_read_ahead_of_interleaved_columns_grows() -> None:
    # The footer; then two columns of a row group, buffer by buffer in turn; then the next row group.
    assert windows_after((900, 1000), (4, 104), (104, 204), (204, 304), (304, 404)) == [0, 0, 1, 2, 4]
    assert windows_after((0, 100), (200, 300), (100, 200), (300, 400), (400, 500)) == [0, 1, 1, 2, 4]


def test_read_ahead_skips_small_gaps_and_no_large_ones() -> None:
    assert windows_after((0, 100), (120, 200), (210, 300)) == [0, 1, 2]
    assert windows_after((0, 100), (250, 260)) == [0, 0]
    assert windows_after((0, 100), (1000, 1100), (2000, 2100), (3000, 3100)) == [0, 0, 0, 0]


def test_read_ahead_of_random_reads_stays_closed() -> None:
    source = random.Random(0)
    places = [source.randrange(1, 1 << 30) for _ in range(1000)]
    assert not any(windows_after(*((place, place + 65536) for place in places)))


def test_read_ahead_of_full_read_starts_open() -> None:
    assert list(ReadAhead(window=16).wanted(35, 10)) == [0, 1, 2, 3]
