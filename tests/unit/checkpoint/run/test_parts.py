"""Joining the manifests of the ranks of one save."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.checkpoint.codec.chunks import OPAQUE
from millrace.checkpoint.format.manifest import (
    DTYPES,
    DataFile,
    Manifest,
    Shard,
    TensorEntry,
    decode_manifest,
    encode_manifest,
)
from millrace.checkpoint.format.tables import NO_BASE, chunk_table, item_table
from millrace.checkpoint.run.parts import PartRecord, join_parts
from millrace.errors import UsageError

FLOAT = DTYPES["float32"][1]


def part(
    rank: int, count: int, shards: dict[str, Shard], shapes: dict[str, tuple[int, ...]], blobs: list[str]
) -> Manifest:
    """A part with one chunk for each item, the lengths of which are the sizes of the items."""
    sizes = [4 * shard.sizes[0] for shard in shards.values()] + [rank + 1] * len(blobs)
    kinds = [FLOAT.code] * len(shards) + [OPAQUE.code] * len(blobs)
    rows = len(sizes)
    chunks = {
        "kind": kinds,
        "raw_bytes": sizes,
        "raw_checksum": list(range(rank * 100, rank * 100 + rows)),
        "file": [0] * rows,
        "offset": [sum(sizes[:number]) for number in range(rows)],
        "stored_bytes": sizes,
        "stored_checksum": [0] * rows,
        "base": [NO_BASE] * rows,
    }
    return Manifest(
        created=1.0 + rank,
        writer="test",
        files=(DataFile(f"data-x-{rank}-0.millrace", sum(sizes)),) if rows else (),
        tensors=tuple(TensorEntry(key, "float32", shapes[key], (shard,)) for key, shard in shards.items()),
        blobs=tuple(blobs),
        items=item_table({"chunk": list(range(rows)), "start": [0] * rows, "nbytes": sizes}),
        chunks=chunk_table(chunks),
        planner_data={key: [key, rank] for key in (*shards, *blobs)},
        user={
            "run": {"step": 3, "full": "step-000000000003", "metrics": {}},
            "part": tuple(PartRecord(rank, count, (rows, 0, rank), ())),
        },
        save_id="id",
    )


@st.composite
def parts(draw: Any) -> list[Manifest]:
    """Tensors of one dimension in pieces, and objects, on ranks in any order."""
    count = draw(st.integers(1, 4))
    shards: list[dict[str, Shard]] = [{} for _ in range(count)]
    shapes: dict[str, tuple[int, ...]] = {}
    for number in range(draw(st.integers(0, 6))):
        key = f"t{number}"
        ranks = draw(st.permutations(range(count)))[: draw(st.integers(1, count))]
        start = 0
        for rank in ranks:
            length = draw(st.integers(1, 5))
            shards[rank][key] = Shard((start,), (length,))
            start += length
        shapes[key] = (start,)
    blobs: list[list[str]] = [[] for _ in range(count)]
    for number in range(draw(st.integers(0, 4))):
        blobs[draw(st.integers(0, count - 1))].append(f"o{number}")
    return [part(rank, count, shards[rank], shapes, blobs[rank]) for rank in range(count)]


@given(parts=parts())
def test_joined_manifest_has_each_item_with_the_chunks_of_its_part(parts: list[Manifest]) -> None:
    joined = join_parts(parts)
    assert joined is not None
    whole = decode_manifest(encode_manifest(joined))
    expected = {}
    for each in parts:
        rows = each.chunks["raw_checksum"].tolist()
        keys = [(entry.key, entry.shards[0]) for entry in each.tensors] + [(key, None) for key in each.blobs]
        expected.update({key: (rows[number], each.files[0].name) for number, key in enumerate(keys)})
    keys = [(entry.key, shard) for entry in whole.tensors for shard in entry.shards]
    keys += [(key, None) for key in whole.blobs]
    found = {}
    for key, row in zip(keys, whole.items["chunk"].tolist(), strict=True):
        name = whole.files[int(whole.chunks["file"][row])].name
        found[key] = (int(whole.chunks["raw_checksum"][row]), name)
    assert found == expected
    assert whole.user["run"]["chunks"] == [sum(len(each.items) for each in parts), 0, sum(range(len(parts)))]
    assert "part" not in whole.user
    # The path of the lowest rank.
    lowest = {key: rank for rank in reversed(range(len(parts))) for key in parts[rank].planner_data}
    assert whole.planner_data == {key: [key, rank] for key, rank in lowest.items()}


@given(parts=parts())
def test_parts_in_any_order_give_the_same_bytes_and_a_missing_one_none(parts: list[Manifest]) -> None:
    one, other = join_parts(parts[::-1]), join_parts(parts)
    assert one is not None
    assert other is not None
    assert encode_manifest(one) == encode_manifest(other)
    assert join_parts(parts[1:]) is None


HALF = {"w": Shard((0,), (2,))}
REST = {"w": Shard((2,), (2,))}


def test_parts_that_lack_a_piece_of_a_tensor_are_refused() -> None:
    with pytest.raises(UsageError, match="do not make 'w' whole"):
        join_parts([part(0, 2, HALF, {"w": (4,)}, []), part(1, 2, {}, {}, [])])


def test_object_of_two_ranks_is_refused() -> None:
    with pytest.raises(UsageError, match="two ranks wrote 'o'"):
        join_parts([part(0, 2, {}, {}, ["o"]), part(1, 2, {}, {}, ["o"])])


def test_tensor_with_two_element_types_is_refused() -> None:
    one, other = part(0, 2, HALF, {"w": (4,)}, []), part(1, 2, REST, {"w": (4,)}, [])
    other = replace(other, tensors=(other.tensors[0]._replace(dtype="int32"),))
    with pytest.raises(UsageError, match="'w' is not the same kind of tensor on every rank"):
        join_parts([one, other])
