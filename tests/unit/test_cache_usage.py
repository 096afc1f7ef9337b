import threading

from millrace.cache.records import Entry, segment_unit
from millrace.cache.usage import UsageLog, Use


def use(number: int, size: int = 10) -> Use:
    return Use(Entry(bytes([number]) * 16, 1, size, 4096, 1))


def test_uses_are_added_up_by_object() -> None:
    heard: list[tuple[int, int]] = []
    log = UsageLog(lambda uses, nbytes: heard.append((uses, nbytes)))
    again = use(1)
    for each in (again, again, use(1), use(2, 5)):
        log.touched(each)
    assert heard == []
    log.settle()
    assert heard == [(4, 35)]
    log.touched(again)
    log.hit(use(3).entry, 7)
    log.missed(use(3).entry, 3, kept=False)
    assert log.settle() == 55
    assert [(tally.key, tally.hit_bytes, tally.miss_bytes, tally.kept) for tally in log.drain()] == [
        (b"\1" * 16, 40, 0, True),
        (b"\2" * 16, 5, 0, True),
        (b"\3" * 16, 7, 3, True),
    ]
    assert heard == [(4, 35), (1, 10)]  # bytes that were not given out whole are counted by who reads them
    assert log.drain() == []
    assert log.settle() == 0
    assert len(heard) == 2


def test_small_objects_are_uses_of_their_segment_and_by_themselves_when_they_were_not_kept() -> None:
    log = UsageLog()
    lone = use(1).entry
    log.missed(lone, 10, lambda: "somewhere", kept=False)
    log.missed(use(2).entry, 10, kept=False)
    inside = lone._replace(place=77, offset=64)
    log.missed(inside, 0, kept=True)
    log.touched(Use(inside._replace(object_id=b"\5" * 16, offset=128)))
    other, segment = log.drain()
    assert (other.key, other.kept, other.joined) == (b"\2" * 16, False, [])
    assert segment.key == segment_unit(77)
    assert (segment.segment, segment.nbytes, segment.joined) == (77, 138, [b"\1" * 16])
    assert (segment.hit_bytes, segment.miss_bytes, segment.kept) == (10, 10, True)


def test_it_is_bounded() -> None:
    log = UsageLog(max_pending=4, max_units=2)
    for number in range(6):
        log.touched(use(number))
    assert [tally.key for tally in log.drain()] == [b"\2" * 16, b"\3" * 16]
    log.touched(use(9))
    log.touched(use(9))
    assert [(tally.key, tally.hit_bytes) for tally in log.drain()] == [(b"\t" * 16, 20)]


def test_threads_lose_nothing() -> None:
    total = [0, 0]

    def heard(uses: int, nbytes: int) -> None:
        total[0] += uses
        total[1] += nbytes

    log = UsageLog(heard)
    mine = [use(number) for number in range(8)]

    def work(own: Use) -> None:
        for _ in range(5000):
            log.touched(own)

    threads = [threading.Thread(target=work, args=(own,)) for own in mine]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        log.settle()
    assert {tally.key: tally.hit_bytes for tally in log.drain()} == {own.entry.object_id: 50_000 for own in mine}
    assert total == [40_000, 400_000]
