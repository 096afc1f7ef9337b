"""Slices of row-major shards, against numpy's own slicing; coalescing of reads."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.checkpoint.format.slices import ReadRange, box_runs, coalesce, scatter_chunk


@st.composite
def boxes(draw):
    sizes = draw(st.lists(st.integers(1, 9), max_size=4))
    offsets = [draw(st.integers(0, size)) for size in sizes]
    lengths = [draw(st.integers(0, size - offset)) for size, offset in zip(sizes, offsets, strict=True)]
    return sizes, offsets, lengths, draw(st.sampled_from([1, 2, 4, 8, 16]))


@given(boxes(), st.integers(1, 300), st.integers(0, 40))
def test_chunks_put_together_are_the_slice(box, chunk_elements, before):
    sizes, offsets, lengths, itemsize = box
    rng = np.random.default_rng(0)
    shard = rng.integers(0, 256, int(np.prod(sizes, dtype=int)) * itemsize, np.uint8)
    index = tuple(slice(offset, offset + length) for offset, length in zip(offsets, lengths, strict=True))
    expected = np.ascontiguousarray(shard.reshape(*sizes, itemsize)[index]).reshape(-1)
    runs = box_runs(sizes, offsets, lengths, itemsize)
    if runs is None:
        assert expected.size == 0
        return
    assert runs.count * runs.nbytes == expected.size
    # As in a pack: other bytes before and after, and chunk borders anywhere.
    lead = before * itemsize
    everything = np.concatenate([np.zeros(lead, np.uint8), shard, np.zeros(5 * itemsize, np.uint8)])
    out = np.full(expected.size, 0xEE, np.uint8)
    for start in range(0, everything.size, chunk_elements * itemsize):
        scatter_chunk(runs, everything[start : start + chunk_elements * itemsize], start - lead, out)
    assert np.array_equal(out, expected)


def test_long_runs_are_copied_one_by_one():
    shard = np.random.default_rng(1).integers(0, 256, (40, 3 * 4096), np.uint8)
    runs = box_runs(shard.shape, (3, 4096), (30, 4096), 1)
    out = np.zeros(30 * 4096, np.uint8)
    flat = shard.reshape(-1)
    for start in range(0, flat.size, 50_000):
        scatter_chunk(runs, flat[start : start + 50_000], start, out)
    assert np.array_equal(out.reshape(30, 4096), shard[3:33, 4096:8192])


@pytest.mark.parametrize(
    ("sizes", "offsets", "lengths", "count", "nbytes"),
    [
        ((8, 10), (0, 0), (8, 10), 1, 160),
        ((8, 10), (2, 0), (3, 10), 1, 60),
        ((8, 10), (2, 1), (3, 4), 3, 8),
        ((4, 5, 6), (1, 2, 0), (2, 2, 6), 2, 24),
        ((), (), (), 1, 2),
    ],
)
def test_whole_trailing_dimensions_join_into_one_run(sizes, offsets, lengths, count, nbytes):
    runs = box_runs(sizes, offsets, lengths, 2)
    assert (runs.count, runs.nbytes) == (count, nbytes)


def test_box_outside_the_tensor_raises():
    for offsets, lengths in (((0, 5), (1, 6)), ((-1, 0), (1, 1)), ((0, 0), (9, 1))):
        with pytest.raises(ValueError, match="is not inside"):
            box_runs((8, 10), offsets, lengths, 1)


def join(chunks, **limits):
    rows = np.arange(len(chunks))
    files, offsets, lengths = (np.array(column) for column in zip(*chunks, strict=True))
    return coalesce(rows, files, offsets, lengths, **{"gap_bytes": 10, "limit_bytes": 100, **limits})


def test_coalesce_joins_near_ranges_up_to_the_limit():
    assert join([(0, 0, 30), (0, 30, 30)]) == [ReadRange(0, 0, 60, (0, 1))]
    assert join([(0, 30, 30), (0, 0, 30)]) == [ReadRange(0, 0, 60, (1, 0))]
    assert join([(0, 0, 30), (0, 40, 30)]) == [ReadRange(0, 0, 70, (0, 1))]
    assert join([(0, 0, 30), (0, 41, 30)]) == [ReadRange(0, 0, 30, (0,)), ReadRange(0, 41, 71, (1,))]
    assert join([(0, 0, 60), (0, 60, 60)]) == [ReadRange(0, 0, 60, (0,)), ReadRange(0, 60, 120, (1,))]
    assert join([(0, 0, 500)]) == [ReadRange(0, 0, 500, (0,))]
    assert join([(1, 0, 10), (0, 0, 10)]) == [ReadRange(0, 0, 10, (1,)), ReadRange(1, 0, 10, (0,))]
    empty = np.zeros(0, np.int64)
    assert coalesce(empty, empty, empty, empty, gap_bytes=1, limit_bytes=1) == []
