from __future__ import annotations

import contextlib
import itertools
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.descriptors import open_below
from tests.support.forked import WaitingChild
from tests.support.interrupts import interrupted_at

from millrace.errors import StorageError
from millrace.store import segments as segments_module
from millrace.store.records import (
    ObjectName,
    SegmentObject,
    pack_segment_header,
    pack_segment_object,
    parse_segment_group,
    parse_segment_objects,
)
from millrace.store.segment_files import data_path, generations, group_in, idx_path, scan
from millrace.store.segments import SEGMENT_BYTES, SMALL_OBJECT_BYTES, Placed, Segments


class Table:
    """The part of the store's index for segments, in memory; generations start at unused numbers."""

    def __init__(self, first: int = 1) -> None:
        self._numbers = itertools.count(first)
        self.groups: dict[int, str] = {}

    def new_generation(self) -> int:
        return next(self._numbers)

    def add_segment(self, generation: int, group: str) -> None:
        self.groups[generation] = group


def name_of(number: int) -> ObjectName:
    return ObjectName("memory", f"b/images/{number}.jpg", f"v{number}")


def id_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def append(segments: Segments, number: int, data: bytes, group: str = "g") -> Placed:
    return segments.append(group, id_of(number), name_of(number), data)


def stored(directory: Path, place: Placed, size: int) -> bytes:
    with open(data_path(directory, place.segment), "rb") as file:
        return os.pread(file.fileno(), size, place.offset)


def everything(directory: Path) -> dict[bytes, tuple[int, SegmentObject]]:
    return {
        record.object_id: (generation, record)
        for generation in generations(directory)
        for record in scan(directory, generation)
    }


@contextmanager
def opened(directory: Path, first: int = 1, **options: int) -> Iterator[Segments]:
    segments = Segments(directory, Table(first), **options)
    try:
        yield segments
    finally:
        segments.close()


# --- records ------------------------------------------------------------------------------------------

texts = st.text(max_size=12)
objects = st.builds(
    SegmentObject,
    object_id=st.binary(min_size=16, max_size=16),
    offset=st.integers(0, SEGMENT_BYTES),
    size=st.integers(0, SMALL_OBJECT_BYTES),
    checksum=st.integers(0, 2**64 - 1),
    name=st.builds(ObjectName, texts, texts, texts),
)


@given(generation=st.integers(1, 2**62), group=texts, records=st.lists(objects, max_size=8))
def test_segment_records_round_trip_is_equal(generation: int, group: str, records: list[SegmentObject]) -> None:
    data = pack_segment_header(generation, group) + b"".join(
        pack_segment_object(generation, record) for record in records
    )
    assert parse_segment_group(generation, data) == group
    assert list(parse_segment_objects(generation, data)) == records
    assert list(parse_segment_objects(generation + 1, data)) == []  # of another segment


@given(records=st.lists(objects, min_size=1, max_size=8, unique=True), harm=st.data())
def test_damaged_record_alone_is_skipped(records: list[SegmentObject], harm: st.DataObject) -> None:
    pieces = [pack_segment_header(7, "g"), *(pack_segment_object(7, record) for record in records)]
    data = bytearray(b"".join(pieces))
    start = harm.draw(st.integers(0, len(data) - 1))
    stop = harm.draw(st.integers(start + 1, len(data)))
    data[start:stop] = harm.draw(st.sampled_from([bytes(stop - start), os.urandom(stop - start)]))
    ends = list(itertools.accumulate(map(len, pieces)))
    untouched = [
        record
        for record, (begin, end) in zip(records, itertools.pairwise(ends), strict=True)
        if end <= start or begin >= stop
    ]
    found = list(parse_segment_objects(7, bytes(data)))
    # The damage may have hit only the padding of a record, which is then as good as before.
    assert [record for record in found if record in untouched] == untouched
    assert all(record in records for record in found)


def test_name_with_a_mark_is_not_a_record() -> None:
    inner = pack_segment_object(7, SegmentObject(id_of(1), 0, 5, 5, name_of(1)))
    for shift in range(16):
        outer = bytearray(
            pack_segment_object(
                7, SegmentObject(id_of(2), 0, 5, 5, ObjectName("m", "x" * shift + inner.decode("latin-1"), "v"))
            )
        )
        outer[0] ^= 1
        assert list(parse_segment_objects(7, bytes(outer))) == []


# --- appending ----------------------------------------------------------------------------------------


def test_append_returns_the_place_of_the_object(tmp_path: Path) -> None:
    datas = [os.urandom(size) for size in (1, 63, 64, 26_000, 0, SMALL_OBJECT_BYTES)]
    with opened(tmp_path / "s") as segments:
        places = [append(segments, number, data) for number, data in enumerate(datas)]
    found = everything(tmp_path / "s")
    for number, (place, data) in enumerate(zip(places, datas, strict=True)):
        assert stored(tmp_path / "s", place, len(data)) == data
        assert place.checksum == xxhash.xxh3_64_intdigest(data)
        assert place.offset % 64 == 0
        assert found[id_of(number)] == (
            place.segment,
            SegmentObject(id_of(number), place.offset, len(data), place.checksum, name_of(number)),
        )


def test_groups_have_segments_of_their_own(tmp_path: Path) -> None:
    with opened(tmp_path) as segments:
        of = {group: {append(segments, n, b"x", group).segment for n in range(5)} for group in ("a", "b")}
    assert len(of["a"]) == len(of["b"]) == 1
    assert of["a"] != of["b"]
    for group, (generation,) in of.items():
        assert group_in(tmp_path, generation) == group


def test_group_with_long_name_is_read_back(tmp_path: Path) -> None:
    group = "g/" * 5000
    with opened(tmp_path) as segments:
        place = append(segments, 1, b"x", group)
    assert group_in(tmp_path, place.segment) == group


def test_segment_that_is_full_is_followed_by_another(tmp_path: Path) -> None:
    data = bytes(SMALL_OBJECT_BYTES)
    with opened(tmp_path) as segments:
        places = [append(segments, number, data) for number in range(66)]
    assert [place.segment for place in places] == [1] * 64 + [2] * 2
    assert os.stat(data_path(tmp_path, 1)).st_size == SEGMENT_BYTES


def test_record_file_of_many_tiny_objects_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments_module, "_IDX_BYTES", 4096)
    with opened(tmp_path) as segments:
        for number in range(200):
            append(segments, number, b"tiny")
    assert len(everything(tmp_path)) == 200
    assert all(os.stat(idx_path(tmp_path, generation)).st_size <= 4096 for generation in generations(tmp_path))


def test_append_of_too_large_object_raises(tmp_path: Path) -> None:
    with opened(tmp_path) as segments, pytest.raises(ValueError, match="cannot hold"):
        append(segments, 1, bytes(SEGMENT_BYTES + 1))


def test_segments_with_full_idx_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments_module, "_IDX_BYTES", 4096)
    monkeypatch.setattr(segments_module, "_ROOMY_IDX_BYTES", roomy := 4096)  # so that they are taken over, and refuse
    for first in (1, 100, 200):
        with opened(tmp_path, first=first) as segments:
            for number in range(first, first + 90):
                append(segments, number, b"x")
        monkeypatch.setattr(segments_module, "_ROOMY_IDX_BYTES", roomy := roomy - 1024)
    assert len(everything(tmp_path)) == 270


def test_segment_without_appender_is_reused(tmp_path: Path) -> None:
    with opened(tmp_path, first=1) as first:
        a = append(first, 1, b"a" * 100)
        with opened(tmp_path, first=10) as second:
            b = append(second, 2, b"b")
            assert b.segment == 10  # the first one still appends to its own
            with opened(tmp_path, first=20) as third:
                assert append(third, 3, b"c").segment == 20
    with opened(tmp_path, first=30) as fourth:
        d = append(fourth, 4, b"d")
        assert d.segment == a.segment
        assert d.offset == 128
        with opened(tmp_path, first=40) as fifth:
            assert append(fifth, 5, b"e").segment == 10
    assert len(everything(tmp_path)) == 5


def test_segments_beyond_the_limit_are_closed_and_reused(tmp_path: Path) -> None:
    with opened(tmp_path, max_open=3) as segments:
        for number in range(60):
            append(segments, number, b"x" * 10, group=f"g{number % 10}")
            assert len(open_below(tmp_path)) <= 6
        assert len(generations(tmp_path)) == 10
        assert open_below(tmp_path)
    assert open_below(tmp_path) == []
    assert len(everything(tmp_path)) == 60


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of an iterator over a directory
def test_interrupt_at_any_moment_leaves_no_segment_locked(tmp_path: Path) -> None:
    """A segment that stays locked cannot be evicted by any process before this one ends."""
    for number in itertools.count():
        directory = tmp_path / str(number)
        segments = Segments(directory, Table())

        def work(segments: Segments = segments) -> None:
            placed = append(segments, 1, b"x" * 100)
            segments.remove(placed.segment, lambda: None)

        interrupt = interrupted_at(number, work)
        ended = interrupt is None
        del interrupt  # its traceback refers to all that was interrupted
        segments.close()
        for generation in generations(directory):
            assert segments.remove(generation, lambda: None), number
        if ended:
            break
    assert number > 20


def test_segment_that_was_removed_is_not_appended_to(tmp_path: Path) -> None:
    with opened(tmp_path) as segments:
        assert append(segments, 1, b"x").segment == 1
        os.unlink(idx_path(tmp_path, 1))
        os.unlink(data_path(tmp_path, 1))
        assert append(segments, 2, b"y").segment == 2
        segments.drop(2)
        assert append(segments, 3, b"z").segment == 3


def test_missing_segment_directory_is_created_again(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as segments:
        place = append(segments, 1, b"x")
        for file in (tmp_path / "s").iterdir():
            file.unlink()
        (tmp_path / "s").rmdir()
        assert append(segments, 2, b"y").segment != place.segment


def test_segment_refused_by_index_leaves_no_files(tmp_path: Path) -> None:
    class Refusing(Table):
        def add_segment(self, generation: int, group: str) -> None:
            raise StorageError("index", next_step="")

    segments = Segments(tmp_path, Refusing())
    with pytest.raises(StorageError, match="index"):
        append(segments, 1, b"x")
    assert list(tmp_path.iterdir()) == []
    segments.close()


def test_concurrent_appends_of_threads_are_complete(tmp_path: Path) -> None:
    datas = [os.urandom(1 + number * 37 % 5000) for number in range(400)]
    with opened(tmp_path) as segments, ThreadPoolExecutor(16) as pool:
        places = list(pool.map(lambda n: append(segments, n, datas[n], group=f"g{n % 3}"), range(400)))
    for place, data in zip(places, datas, strict=True):
        assert stored(tmp_path, place, len(data)) == data
    assert len(everything(tmp_path)) == 400


def test_forked_child_appends_to_a_separate_segment(tmp_path: Path) -> None:
    segments = Segments(tmp_path, Table())
    append(segments, 1, b"parent")
    ready, done = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(300)
        code = 1
        try:
            with pytest.raises(StorageError, match="fork"):
                append(segments, 9, b"never")
            segments.abandon()
            own = Segments(tmp_path, Table(100))
            if append(own, 2, b"child").segment == 100:
                os.write(ready[1], b"x")
                os.read(
                    done[0], 1
                )  # the parent has ended its use; its segment must be free although this process lives
                own.drop(100)
                os.rename(idx_path(tmp_path, 100), tmp_path / "hidden")
                code = 0 if append(own, 3, b"more").segment == 1 else 2
        finally:
            os._exit(code)
    os.read(ready[0], 1)
    assert append(segments, 4, b"parent again").segment == 1
    segments.close()
    os.write(done[1], b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    for descriptor in (*ready, *done):
        os.close(descriptor)
    assert {record.object_id for record in scan(tmp_path, 1)} == {id_of(1), id_of(4), id_of(3)}


def test_child_forked_while_a_segment_is_created_does_not_hold_it(tmp_path: Path) -> None:
    children: list[WaitingChild] = []

    class Forking(Table):
        def add_segment(self, generation: int, group: str) -> None:
            children.append(WaitingChild())
            super().add_segment(generation, group)

    try:
        with contextlib.closing(Segments(tmp_path, Forking())) as segments:
            append(segments, 1, b"parent")
        with opened(tmp_path, 2) as others:
            assert append(others, 2, b"another process").segment == 1
            assert others.remove(1, lambda: None)
    finally:
        for child in children:
            child.end()


# --- crashes ------------------------------------------------------------------------------------------

sizes = st.integers(0, 3000)


@settings(max_examples=60, deadline=None)
@given(rounds=st.lists(st.lists(sizes, max_size=6), min_size=1, max_size=5), harm=st.data())
def test_scan_after_crash_returns_whole_objects_only(rounds: list[list[int]], harm: st.DataObject) -> None:
    """Append, crash (truncate or zero the end of either file anywhere), append again: verified bytes are right."""
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        written: dict[bytes, bytes] = {}
        numbers = itertools.count()
        for round_number, round_sizes in enumerate(rounds):
            safe = set()
            with opened(directory, first=100 * (round_number + 1)) as segments:
                for size in round_sizes:
                    number = next(numbers)
                    written[id_of(number)] = os.urandom(size)
                    append(segments, number, written[id_of(number)])
                    safe.add(id_of(number))
            found = everything(directory)
            assert safe <= set(found)
            check_all(directory, written)
            paths = [path for generation in generations(directory) for path in _files(directory, generation)]
            for path in paths:
                crash(path, harm)
        check_all(directory, written)


def check_all(directory: Path, written: dict[bytes, bytes]) -> None:
    for object_id, (generation, record) in everything(directory).items():
        data = stored(directory, Placed(generation, record.offset, record.checksum), record.size)
        assert len(data) == record.size
        if xxhash.xxh3_64_intdigest(data) == record.checksum:
            assert data == written[object_id]
            assert record.name == name_of(int.from_bytes(object_id, "big"))


def crash(path: str, harm: st.DataObject) -> None:
    size = os.stat(path).st_size
    match harm.draw(st.sampled_from(["nothing", "cut", "zeros"])):
        case "cut":
            os.truncate(path, harm.draw(st.integers(0, size)))
        case "zeros":
            start = harm.draw(st.integers(0, size))
            with open(path, "r+b") as file:
                file.seek(start)
                file.write(bytes(size - start))
        case _:
            pass


def _files(directory: Path, generation: int) -> tuple[str, str]:
    return data_path(directory, generation), idx_path(directory, generation)


def test_record_past_the_end_of_data_is_skipped(tmp_path: Path) -> None:
    with opened(tmp_path) as segments:
        append(segments, 1, b"a" * 100)
        append(segments, 2, b"b" * 100)
    os.truncate(data_path(tmp_path, 1), 200)
    assert [record.object_id for record in scan(tmp_path, 1)] == [id_of(1)]


def test_segment_without_header_is_not_appended_to(tmp_path: Path) -> None:
    with opened(tmp_path) as segments:
        append(segments, 1, b"a" * 100)
    with open(idx_path(tmp_path, 1), "r+b") as file:
        file.write(bytes(16))
    with opened(tmp_path, first=50) as segments:
        assert append(segments, 2, b"b").segment == 50
    assert set(everything(tmp_path)) == {id_of(1), id_of(2)}  # its objects are found all the same
    assert group_in(tmp_path, 1) is None


@pytest.mark.parametrize("failing", ["data", "idx"])
def test_append_that_fails_leaves_segment_usable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    real = os.pwrite
    calls: list[int] = []

    def short_then_full(descriptor: int, data: memoryview, offset: int) -> int:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if not path.endswith(failing):
            return real(descriptor, data, offset)
        calls.append(descriptor)
        if len(calls) == 1:
            return real(descriptor, data[: len(data) // 2], offset)
        raise OSError(28, "No space left on device")

    with opened(tmp_path) as segments:
        append(segments, 1, b"a" * 1000)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", short_then_full)
            with pytest.raises(StorageError, match="no space left"):
                append(segments, 2, b"b" * 1000)
        place = append(segments, 3, b"c" * 1000)
        assert place.segment == 1
        assert place.offset == 1024  # overwrites bytes that are never read
    assert set(everything(tmp_path)) == {id_of(1), id_of(3)}
    check_all(tmp_path, {id_of(1): b"a" * 1000, id_of(3): b"c" * 1000})


def test_scan_during_appends_finds_intact_records(tmp_path: Path) -> None:
    stop = threading.Event()
    with opened(tmp_path) as segments:
        append(segments, 0, b"first")

        def write() -> None:
            for number in itertools.count(1):
                append(segments, number, b"x" * 100)
                if stop.is_set():
                    return

        thread = threading.Thread(target=write)
        thread.start()
        counts = [len(everything(tmp_path)) for _ in range(20)]
        stop.set()
        thread.join()
    assert counts == sorted(counts)
