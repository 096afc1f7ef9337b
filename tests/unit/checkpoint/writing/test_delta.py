"""Decisions as tables: the base of a save, the form of a chunk, and the cost of chains."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from millrace.checkpoint.codec.chunks import CHUNK_BYTES, OPAQUE, Effort, Kind, checksum
from millrace.checkpoint.codec.planes import PlaneCodec
from millrace.checkpoint.codec.registry import Steady
from millrace.checkpoint.format.manifest import DataFile
from millrace.checkpoint.format.tables import (
    MAX_BASES,
    NO_BASE,
    Table,
    chain,
    chain_costs,
    chunk_table,
    closure,
    plan_reads,
    restore_bytes,
)
from millrace.checkpoint.format.transforms import Transforms
from millrace.checkpoint.writing.bases import MemoryBase, Place
from millrace.checkpoint.writing.delta import SaveRecord, choose_base, sample, worth_a_delta
from millrace.checkpoint.writing.packing import ChunkEncoder
from millrace.errors import CorruptCheckpointError
from millrace.events import add_hook

BF16, FP32, INT64 = Kind(2, True), Kind(4, True), Kind(8, False)
MB = 1_000_000


# --- the base of a save ---------------------------------------------------------------------------


def record(own: float, restore: float, base: Any = None) -> SaveRecord:
    """One save; sizes in MB."""
    return SaveRecord(
        directory=f"step-{own}",
        kind="full" if base is None else "delta",
        base=base,
        raw_bytes=150 * MB,
        own_bytes=round(own * MB),
        restore_bytes=round(restore * MB),
    )


FULL = record(100, 100)
PREVIOUS = record(20, 120, "previous")


@pytest.mark.parametrize(
    ("history", "full_every", "here", "expected"),
    [
        # Without a base, or with deltas switched off.
        ([], 10, (True, True), "full"),
        ([FULL], 1, (True, True), "full"),
        ([FULL], 10, (False, False), "full"),
        # The first delta: a guess of half fits.
        ([FULL], 10, (True, True), "previous"),
        ([FULL], 2, (True, True), "previous"),
        ([FULL], 10, (False, True), "anchor"),
        # Small deltas continue from the save before, as long as the chain is short enough.
        ([FULL, PREVIOUS], 10, (True, True), "previous"),
        ([FULL, PREVIOUS], 2, (True, True), "full"),
        ([FULL, PREVIOUS, record(20, 180, "previous")], 10, (True, True), "previous"),
        # The next one would be beyond twice the bytes; one against the full save is not.
        ([FULL, PREVIOUS, record(20, 190, "previous")], 10, (True, True), "anchor"),
        ([FULL, PREVIOUS, record(20, 190, "previous")], 10, (True, False), "full"),
        # The local bytes are not enough.
        ([FULL, PREVIOUS], 10, (False, True), "anchor"),
        # Large deltas: neither fits.
        ([FULL, record(90, 190, "previous")], 10, (True, True), "full"),
        # A delta that is as large as a full save gains nothing.
        ([FULL, record(99, 99, "previous")], 10, (True, True), "full"),
        # Against the full save deltas grow: .6 of it after one save is too much after eight.
        ([FULL, *[record(60, 160, "anchor")] * 2], 10, (False, True), "anchor"),
        ([FULL, record(60, 160, "anchor"), *[record(60, 160, "previous")] * 6], 10, (False, True), "full"),
    ],
)
def test_base_keeps_a_restore_within_twice_a_full_one(history, full_every, here, expected):
    chosen = choose_base(history, full_every=full_every, previous_near=here[0], anchor_near=here[1])
    assert chosen == expected


def test_choose_base_without_an_independent_checkpoint_is_full():
    here = {"full_every": 10, "previous_near": True, "anchor_near": True}
    assert choose_base([FULL], has_independent=False, **here) == "full"
    assert choose_base([FULL], has_independent=True, **here) == "previous"


def test_chain_of_a_run_stays_within_the_limit():
    """For any ratio of a delta to a full save, if the next delta is about as large as the last."""
    for share in (0.02, 0.1, 0.3, 0.5, 0.8, 1.0):
        history: list[SaveRecord] = []
        for _ in range(40):
            chosen = choose_base(history, full_every=10, previous_near=True, anchor_near=True)
            if chosen == "full":
                history = [FULL]
                continue
            own = 100 * share if chosen == "previous" else 100 * share * len(history) ** (1 / 3)
            restore = own + (history[-1].restore_bytes / MB if chosen == "previous" else 100)
            history.append(record(own, restore, chosen))
            if len(history) > 2:
                assert restore <= 200 + 1e-6, (share, chosen)
            assert len(history) <= 10


# --- the form of a chunk --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("delta", "full", "chain_bytes", "root", "expected"),
    [
        (20, 70, 70, 70, True),
        (69, 70, 70, 70, False),
        (70, 70, 70, 70, False),
        (20, 70, 120, 70, True),
        (21, 70, 120, 70, False),
        # The root was smaller than the chunk is now, or the chunk is smaller than the root: the lesser counts.
        (20, 70, 10, 10, False),
        (2, 5, 70, 70, False),
        (0, 0, 0, 0, True),
    ],
)
def test_delta_is_chosen_only_if_smaller(delta, full, chain_bytes, root, expected):
    worth = worth_a_delta(delta_bytes=delta, full_bytes=full, chain_bytes=chain_bytes, root_bytes=root, limit=2.0)
    assert worth is expected


def test_sample_has_whole_elements_from_the_whole_chunk():
    for width in (1, 2, 4, 8):
        for nbytes in (0, width, 32 << 10, (32 << 10) + width, CHUNK_BYTES):
            data = np.arange(nbytes // width, dtype=f"u{width}")
            some = sample(data.view(np.uint8), width).view(f"u{width}")
            assert some.size == data.size or some.nbytes == 16 << 10
            assert np.isin(some, data).all()
            if data.size:
                assert some[0] == data[0]
                assert (int(data[-1]) - int(some[-1])) % 256 < 8


def normal(seed: int, scale: float = 0.02) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(CHUNK_BYTES // 4) * scale).astype(np.float32)


def bf16(values: np.ndarray) -> np.ndarray:
    wide = np.concatenate([values, values]).view(np.uint32)
    return (wide >> 16).astype(np.uint16)


def step(values: np.ndarray, size: float) -> np.ndarray:
    """Weights after a step of this size, in any direction."""
    return values + np.float32(size) * np.sign(normal(99)) * np.random.default_rng(98).random(values.size, np.float32)


MOMENT = normal(3, 1e-5)
CASES = {
    "bf16 weights, small step": (BF16, bf16(normal(1)), bf16(step(normal(1), 2e-5)), "delta"),
    "bf16 weights, ten steps": (BF16, bf16(normal(1)), bf16(step(normal(1), 2e-4)), "delta"),
    "bf16 weights, others": (BF16, bf16(normal(1)), bf16(normal(2)), "full"),
    "fp32 weights, small step": (FP32, normal(1), step(normal(1), 2e-5), "delta"),
    "fp32 weights, ten steps": (FP32, normal(1), step(normal(1), 2e-4), "delta"),
    "fp32 weights, others": (FP32, normal(1), normal(2), "full"),
    "exp_avg, half of it new": (FP32, MOMENT, 0.35 * MOMENT + normal(4, 1e-5), "full"),
    "exp_avg_sq, one part in a thousand new": (
        FP32,
        MOMENT**2,
        0.999 * MOMENT**2 + 0.001 * normal(4, 1e-5) ** 2,
        "delta",
    ),
    "moments that were zero": (FP32, 0 * MOMENT, MOMENT, "full"),
    "moments that become zero": (FP32, MOMENT, 0 * MOMENT, "full"),
    "rows of an embedding": (
        FP32,
        normal(1),
        np.where(np.arange(CHUNK_BYTES // 4) // 512 % 64 == 5, normal(8), normal(1)),
        "delta",
    ),
    "noise": (OPAQUE, *np.random.default_rng(7).integers(0, 256, (2, CHUNK_BYTES), np.uint8), "full"),
    "noise of which little changed": (
        OPAQUE,
        np.random.default_rng(7).integers(0, 256, CHUNK_BYTES, np.uint8),
        np.random.default_rng(7).integers(0, 256, CHUNK_BYTES, np.uint8) ^ (np.arange(CHUNK_BYTES) % 99 == 0),
        "delta",
    ),
    "unchanged": (FP32, normal(1), normal(1), "reference"),
    "zeros": (INT64, np.zeros(CHUNK_BYTES // 8), np.zeros(CHUNK_BYTES // 8), "reference"),
}


class OneChunk:
    """A base of one chunk."""

    directory, transforms = "step-1", ()
    files = (DataFile("../step-1/data-0-0-0.millrace", 1 << 30),)

    def __init__(self, raw: np.ndarray, kind: Kind) -> None:
        self.raw = raw
        stored = b"".join(PlaneCodec().encode(raw, kind))
        self.chunks = table([(0, 0, len(stored), NO_BASE)], raw_bytes=raw.size, raw_checksum=checksum(raw.data))

    def find(self, key, kind, nbytes):
        return 0

    def read(self, row, key):
        return self.raw.data


@pytest.mark.parametrize("effort", [Effort.TYPED, Effort.MAX])
@pytest.mark.parametrize("case", CASES)
def test_trial_on_sample_chooses_the_right_form(case, effort):
    kind, before, after, expected = CASES[case]
    old, new = (np.ascontiguousarray(values).view(np.uint8).reshape(-1) for values in (before, after))
    encoded = ChunkEncoder(Steady(effort), Transforms(), OneChunk(old, kind)).encode(new, kind, (("w", (0,), 0, 1),))
    form = "reference" if encoded.stored is None else "full" if encoded.base is None else "delta"
    assert form == expected
    whole = b"".join(PlaneCodec().encode(new, kind, effort=effort))
    if form == "full":
        assert encoded.stored == whole
    if form == "delta":
        assert encoded.stored == b"".join(PlaneCodec().encode(new, kind, old, effort=effort))
        assert len(encoded.stored) < 0.97 * len(whole)


def test_base_with_too_long_chains_is_not_used():
    base = OneChunk(normal(1).view(np.uint8), FP32)
    base.chunks = table([(0, number, 1, number - 1 if number else NO_BASE) for number in range(MAX_BASES + 2)])
    events: list[str] = []
    remove = add_hook(lambda event: events.append(event.name))
    try:
        encoder = ChunkEncoder(Steady(Effort.TYPED), Transforms(), base)
    finally:
        remove()
    assert encoder.encode(normal(1).view(np.uint8), FP32, (("w", (0,), 0, 1),)).base is None
    assert events == ["checkpoint.base.unreadable"]


# --- chains ---------------------------------------------------------------------------------------


def table(rows: list[tuple[int, int, int, int]], raw_bytes: int = 100, raw_checksum: int = 0) -> Table:
    """Chunks by (file, offset, stored bytes, base)."""
    columns = dict(zip(("file", "offset", "stored_bytes", "base"), zip(*rows, strict=True), strict=True))
    count = len(rows)
    same = {"kind": [FP32.code] * count, "raw_bytes": [raw_bytes] * count, "raw_checksum": [raw_checksum] * count}
    return chunk_table({**columns, **same, "stored_checksum": [0] * count})


FORK = table([(0, 0, 50, NO_BASE), (0, 50, 60, NO_BASE), (1, 0, 7, 0), (1, 7, 9, 1), (2, 0, 3, 2), (0, 0, 50, NO_BASE)])


def test_chain_costs_are_summed():
    costs = chain_costs(FORK)
    assert costs.chain_bytes.tolist() == [50, 60, 57, 69, 60, 50]
    assert costs.root_bytes.tolist() == [50, 60, 50, 60, 50, 50]
    assert costs.deltas.tolist() == [0, 0, 1, 1, 2, 0]
    assert chain(FORK, 4) == [0, 2, 4]
    assert closure(FORK, np.array([4, 3])).tolist() == [0, 1, 2, 3, 4]
    assert closure(FORK, np.array([4, 4])).tolist() == [0, 2, 4]
    assert closure(FORK, np.array([], dtype=np.int64)).tolist() == []
    # Two rows that are one chunk in a file are read once.
    assert restore_bytes(FORK) == 129
    assert restore_bytes(chunk_table()) == 0


def test_chain_beyond_the_readers_limit_is_refused():
    longest = [(0, number, 1, number - 1 if number else NO_BASE) for number in range(MAX_BASES + 1)]
    assert chain_costs(table(longest)).deltas[-1] == MAX_BASES
    assert len(chain(table(longest), MAX_BASES)) == len(closure(table(longest), np.array([MAX_BASES]))) == MAX_BASES + 1
    longer = table([*longest, (0, 99, 1, MAX_BASES)])
    for call in (
        chain_costs,
        lambda chunks: chain(chunks, MAX_BASES + 1),
        lambda chunks: closure(chunks, np.array([65])),
    ):
        with pytest.raises(CorruptCheckpointError, match="more than 64"):
            call(longer)


def long_chains(chunks: int, levels: int) -> Table:
    """A full save in file 0, and deltas of a fifth in a file each; the last level's rows are the last ones."""
    rows = []
    for level in range(levels):
        for number in range(chunks):
            size = 500_000 if level == 0 else 100_000
            rows.append((level, number * size, size, NO_BASE if level == 0 else (level - 1) * chunks + number))
    return table(rows, raw_bytes=1 << 20)


def test_chain_is_read_by_few_ranges_per_file():
    chunks = long_chains(100, 5)
    groups = plan_reads(chunks, np.arange(400, 500), gap_bytes=0, limit_bytes=8 << 20, group_bytes=32 << 20)
    assert [row for group in groups for row in group.rows] == list(range(400, 500))
    # Sixteen chunks of the full save make 8 MiB.
    assert len(groups) == 7
    assert all(len(found.ranges) == 5 for found in groups)
    read = [row for group in groups for found in group.ranges for row in found.rows]
    assert sorted(read) == list(range(500))
    assert sum(found.stop - found.start for group in groups for found in group.ranges) == restore_bytes(chunks)
    # A bound on a group's bytes makes for more of them.
    small = plan_reads(chunks, np.arange(400, 500), gap_bytes=0, limit_bytes=8 << 20, group_bytes=1 << 20)
    assert [len(group.rows) for group in small] == [1] * 100


def test_full_chunks_are_read_directly():
    chunks = table([(number % 2, number * 10, 10, NO_BASE) for number in range(6)])
    groups = plan_reads(chunks, np.array([5, 0, 2]), gap_bytes=10, limit_bytes=1000, group_bytes=1)
    assert [(group.rows, len(group.ranges)) for group in groups] == [((0, 2), 1), ((5,), 1)]


# --- finding a chunk ------------------------------------------------------------------------------


def test_chunk_is_found_by_its_whole_content():
    # A pack of two, an item of two chunks and a bit, and another kind.
    rows = [(0, number * 100, 100, NO_BASE) for number in range(5)]
    chunks = table(rows)
    chunks["raw_bytes"][:] = [60, 100, 100, 40, 8]
    chunks["kind"][4] = OPAQUE.code
    places = {
        ("a", (0,)): Place(0, 0, 20),
        ("b", (0, 0)): Place(0, 20, 40),
        ("large", (4,)): Place(1, 0, 240),
        ("object", None): Place(4, 0, 8),
        ("empty", (0,)): Place(7, 0, 0),
    }
    finder = MemoryBase("step-1", (), chunks, (), places, {}, sparse=False)
    pack = (("a", (0,), 0, 20), ("b", (0, 0), 0, 40))
    assert finder.find(pack, FP32, 60) == 0
    assert finder.find((("large", (4,), 0, 100),), FP32, 100) == 1
    assert finder.find((("large", (4,), 100, 200),), FP32, 100) == 2
    assert finder.find((("large", (4,), 200, 240),), FP32, 40) == 3
    assert finder.find((("object", None, 0, 8),), OPAQUE, 8) == 4
    for key, kind, nbytes in [
        (pack, BF16, 60),
        (pack[::-1], FP32, 60),
        (pack[:1], FP32, 20),
        (pack[1:], FP32, 40),
        ((*pack, ("c", (0,), 0, 20)), FP32, 80),
        ((("large", (4,), 0, 60),), FP32, 60),
        ((("large", (4,), 50, 150),), FP32, 100),
        ((("large", (4,), 200, 300),), FP32, 100),
        ((("large", (0,), 0, 100),), FP32, 100),
        ((("object", (), 0, 8),), OPAQUE, 8),
        ((("empty", (0,), 0, 4),), FP32, 4),
        ((), FP32, 0),
    ]:
        assert finder.find(key, kind, nbytes) is None, key
