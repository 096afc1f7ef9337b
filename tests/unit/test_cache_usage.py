import threading

from millrace.cache.records import Entry
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
    log.opened(use(3).entry)
    assert log.drain() == {b"\1" * 16: (4, 40), b"\2" * 16: (1, 5), b"\3" * 16: (1, 0)}
    assert heard == [(4, 35), (1, 10)]  # the open was counted elsewhere
    assert log.drain() == {}
    assert len(heard) == 2


def test_it_is_bounded() -> None:
    log = UsageLog(max_pending=4, max_objects=2)
    for number in range(6):
        log.touched(use(number))
    assert sorted(log.drain()) == [b"\2" * 16, b"\3" * 16]
    log.touched(use(9))
    log.touched(use(9))
    assert log.drain() == {b"\t" * 16: (2, 20)}


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
    assert log.drain() == {own.entry.object_id: (5000, 50_000) for own in mine}
    assert total == [40_000, 400_000]
