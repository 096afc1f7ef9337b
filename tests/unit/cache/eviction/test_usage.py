import threading
from dataclasses import fields

import pytest

from millrace.cache.eviction.usage import AccessRecord, Read, Tally, UsageLog
from millrace.store.records import Entry, segment_unit

ENTRY = Entry(bytes(16), 1, 10, 4096, 1)
COUNTS = [field.name for field in fields(Tally) if field.type == "int" and field.name not in ("nbytes", "segment")]


def use(number: int, size: int = 10) -> AccessRecord:
    return AccessRecord(Entry(bytes([number]) * 16, 1, size, 4096, 1))


def test_uses_are_added_up_by_object() -> None:
    received: list[tuple[int, int]] = []
    log = UsageLog(lambda uses, nbytes: received.append((uses, nbytes)))
    again = use(1)
    for each in (again, again, use(1), use(2, 5)):
        log.touched(each)
    assert received == []
    log.settle()
    assert received == [(4, 35)]
    log.touched(again)
    log.note(Read(use(3).entry, 7, hit=True, kept=True))
    log.note(Read(use(3).entry, 3, hit=False, kept=False))
    assert log.settle() == 55
    assert [(tally.key, tally.hit_bytes, tally.miss_bytes, tally.kept) for tally in log.drain()] == [
        (b"\1" * 16, 40, 0, True),
        (b"\2" * 16, 5, 0, True),
        (b"\3" * 16, 7, 3, True),
    ]
    assert received == [(4, 35), (1, 10)]  # readers count the bytes of partial reads
    assert log.drain() == []
    assert log.settle() == 0
    assert len(received) == 2


@pytest.mark.parametrize(
    ("read", "counts"),
    [
        (Read(ENTRY, 7, hit=True, kept=True), {"hits": 1, "hit_bytes": 7}),
        (Read(ENTRY, 0, hit=True, kept=True), {"hits": 1}),
        (Read(ENTRY, 20, hit=True, kept=True, times=2), {"hits": 2, "hit_bytes": 20}),
        (
            Read(ENTRY, 5, hit=True, kept=True, served=True),
            {"hits": 1, "hit_bytes": 5, "served": 1, "served_bytes": 5},
        ),
        (Read(ENTRY, 3, hit=False, kept=False), {"misses": 1, "miss_bytes": 3}),
        (Read(ENTRY, 0, hit=False, kept=True), {}),  # its bytes were counted before they were stored
        (
            Read(ENTRY, 6, hit=False, kept=False, peer_bytes=2),
            {"misses": 1, "miss_bytes": 6, "peer_reads": 1, "peer_bytes": 2},
        ),
        (
            Read(ENTRY, 4, hit=False, kept=False, served=True),
            {"misses": 1, "miss_bytes": 4, "relayed": 1, "relayed_bytes": 4},
        ),
        (
            Read(ENTRY, 4, hit=False, kept=False, served=True, peer_bytes=4),
            {"misses": 1, "miss_bytes": 4, "relayed": 1, "relayed_bytes": 4},
        ),
    ],
)
def test_read_of_each_kind_is_counted_once(read: Read, counts: dict[str, int]) -> None:
    log = UsageLog()
    log.note(read)
    (tally,) = log.drain()
    assert {name: value for name in COUNTS if (value := getattr(tally, name))} == counts
    assert tally.kept == read.kept


def test_use_of_a_small_object_counts_for_its_segment_only_if_it_was_kept() -> None:
    log = UsageLog()
    lone = use(1).entry
    log.note(Read(lone, 10, hit=False, kept=False, group=lambda: "somewhere"))
    log.note(Read(use(2).entry, 10, hit=False, kept=False))
    inside = lone._replace(place=77, offset=64)
    log.note(Read(inside, 0, hit=False, kept=True))
    log.touched(AccessRecord(inside._replace(object_id=b"\5" * 16, offset=128)))
    other, segment = log.drain()
    assert (other.key, other.kept, other.joined) == (b"\2" * 16, False, [])
    assert segment.key == segment_unit(77)
    assert (segment.segment, segment.nbytes, segment.joined) == (77, 138, [b"\1" * 16])
    assert (segment.hit_bytes, segment.miss_bytes, segment.kept) == (10, 10, True)


def test_usage_log_is_bounded() -> None:
    log = UsageLog(max_pending=4, max_units=2)
    for number in range(6):
        log.touched(use(number))
    assert [tally.key for tally in log.drain()] == [b"\2" * 16, b"\3" * 16]
    log.touched(use(9))
    log.touched(use(9))
    assert [(tally.key, tally.hit_bytes) for tally in log.drain()] == [(b"\t" * 16, 20)]


def test_usage_of_many_threads_is_complete() -> None:
    total = [0, 0]

    def received(uses: int, nbytes: int) -> None:
        total[0] += uses
        total[1] += nbytes

    log = UsageLog(received)
    mine = [use(number) for number in range(8)]

    def work(own: AccessRecord) -> None:
        for _ in range(5000):
            log.touched(own)

    threads = [threading.Thread(target=work, args=(own,)) for own in mine]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        log.settle()
    assert {tally.key: tally.hit_bytes for tally in log.drain()} == {own.entry.object_id: 50_000 for own in mine}
    assert total == [40_000, 400_000]
