"""The inventory of a manifest: its values, the keys that patterns name, and the chunks that are checked together."""

from __future__ import annotations

import numpy as np
import pytest

from millrace.checkpoint.codec.chunks import OPAQUE, Kind
from millrace.checkpoint.format.inventory import inventory, item_spans, natural_order, rank_of, select_keys
from millrace.checkpoint.format.manifest import DataFile, Manifest, Shard, TensorEntry
from millrace.checkpoint.format.tables import NO_BASE, chunk_table, item_table
from millrace.checkpoint.tools.verifying import batches
from millrace.errors import UsageError

KEYS = ["model.layers.1.weight", "model.layers.10.weight", "model.layers.2.bias", "model_ema.w", "optim.lr", "step"]


@pytest.mark.parametrize(
    ("patterns", "chosen"),
    [
        ([], KEYS),
        (["model"], KEYS[:3]),
        (["step"], ["step"]),
        (["model.*.weight"], KEYS[:2]),
        (["step", "model.layers.1"], [KEYS[0], "step"]),
        (["model*"], KEYS[:4]),
        (["model.layers.[12].*"], [KEYS[0], KEYS[2]]),
    ],
)
def test_keys_are_chosen_by_name_prefix_or_pattern(patterns: list[str], chosen: list[str]) -> None:
    assert select_keys(KEYS, patterns) == chosen


def test_pattern_without_matches_raises() -> None:
    with pytest.raises(UsageError, match=r"'modle'.*'model\.layers\.1\.weight'"):
        select_keys(KEYS, ["model", "modle"])
    with pytest.raises(UsageError, match="it is empty"):
        select_keys([], ["model"])


def test_numbers_in_keys_sort_as_numbers() -> None:
    keys = ["a.10.w", "a.2.w", "a.2", "a", "b.1", "10", "9"]
    assert sorted(keys, key=natural_order) == ["9", "10", "a", "a.2", "a.2.w", "a.10.w", "b.1"]


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("data-0123456789abcdef-12-0.millrace", 12),
        ("../step-000000000100/data-ff-3-1.millrace", 3),
        ("__7_0.distcp", 7),
        ("__1234567890_0.distcp", None),
        ("data-abc.millrace", None),
    ],
)
def test_file_name_contains_the_rank(name: str, rank: int | None) -> None:
    assert rank_of(name) == rank


def small_manifest() -> Manifest:
    """`a` in two shards of 1.5 and .5 chunks, `b` and an empty `c` packed behind, an object; one base, one reference."""
    kind = Kind(4, True)
    rows = {
        #       base   a     a     a+b   blob
        "kind": [kind.code] * 4 + [OPAQUE.code],
        "file": [1, 0, 1, 0, 0],
        "base": [NO_BASE, 0, NO_BASE, NO_BASE, NO_BASE],
        "raw_bytes": [400, 400, 400, 400, 50],
        "stored_bytes": [300, 100, 200, 400, 25],
        "offset": [0, 0, 300, 100, 500],
        "stored_checksum": [0] * 5,
        "raw_checksum": [0] * 5,
    }
    return Manifest(
        created=0.0,
        writer="test",
        files=(DataFile("data-ab-0-0.millrace", 525), DataFile("../step-1/data-cd-2-0.millrace", 500)),
        tensors=(
            TensorEntry("a", "float32", (250,), (Shard((0,), (150,)), Shard((150,), (100,)))),
            TensorEntry("b", "float32", (50,), (Shard((0,), (50,)),)),
            TensorEntry("c", "float32", (0, 3), (Shard((0, 0), (0, 3)),)),
        ),
        blobs=("o",),
        items=item_table({"chunk": [1, 2, 3, 9, 4], "start": [0, 200, 200, 7, 0], "nbytes": [600, 400, 200, 0, 50]}),
        chunks=chunk_table(rows),
    )


def test_inventory_has_the_location_of_each_value() -> None:
    a, b, c, blob = inventory(small_manifest())
    assert (a.key, a.shards, a.raw_bytes, a.ranks) == ("a", 2, 1000, (0, 2))
    # Its delta, both halves of the reference, and half of a full chunk.
    assert a.stored_bytes == 100 + 200 + 200
    assert (a.chunks_full, a.chunks_delta, a.chunks_referenced) == (1, 1, 2)
    assert (b.raw_bytes, b.stored_bytes, b.chunks_full, b.ranks) == (200, 200, 1, (0,))
    assert (c.raw_bytes, c.stored_bytes, c.files, c.shape) == (0, 0, (), (0, 3))
    assert (blob.dtype, blob.raw_bytes, blob.stored_bytes) == (None, 50, 25)


def test_spans_have_rows_and_bytes() -> None:
    spans = item_spans(small_manifest())
    assert spans.first.tolist() == [1, 2, 3, 0, 4]
    assert spans.stop.tolist() == [3, 4, 4, 0, 5]
    assert (spans.begin[1], spans.end[1]) == (1000, 1400)


def table_of(bases: list[int | None], stored: list[int]) -> object:
    count = len(bases)
    return chunk_table(
        {
            "kind": [0] * count,
            "file": [0] * count,
            "base": [NO_BASE if base is None else base for base in bases],
            "raw_bytes": [8] * count,
            "stored_bytes": stored,
            "offset": np.cumsum(stored) - stored,
            "stored_checksum": [0] * count,
            "raw_checksum": [0] * count,
        }
    )


@pytest.mark.parametrize(
    ("bases", "stored", "groups"),
    [
        ([], [], []),
        ([None, None, None], [4, 4, 4], [[0, 1], [2]]),
        ([None, None, 0, 2], [4, 4, 4, 4], [[0, 2, 3], [1]]),  # a chain stays together, whatever its size
        ([None, 0, 0, None, 1], [1, 1, 1, 1, 1], [[0, 1, 2, 4, 3]]),
        ([None, None], [100, 1], [[0], [1]]),
    ],
)
def test_chunks_that_build_on_each_other_are_checked_together(
    bases: list[int | None], stored: list[int], groups: list[list[int]]
) -> None:
    assert [rows.tolist() for rows in batches(table_of(bases, stored), limit_bytes=8)] == groups  # type: ignore[arg-type]
