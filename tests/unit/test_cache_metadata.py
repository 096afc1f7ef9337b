import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from millrace.cache.index import Index
from millrace.cache.metadata import MetadataCache
from millrace.errors import ChangedError, ObjectNotFoundError
from millrace.origin import ObjectInfo, Origin
from millrace.testing.origins import MemoryOrigin


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    (tmp_path / "index").mkdir()
    index = Index(tmp_path / "index")
    yield index
    index.close()


@pytest.fixture
def make(index: Index) -> Callable[..., tuple[MetadataCache, Clock, list[ObjectInfo]]]:
    def build(max_age: float) -> tuple[MetadataCache, Clock, list[ObjectInfo]]:
        clock, changed = Clock(), []
        cache = MetadataCache(
            index, max_age_seconds=max_age, on_changed=lambda _, info: changed.append(info), clock=clock
        )
        return cache, clock, changed

    return build


Make = Callable[..., tuple[MetadataCache, Clock, list[ObjectInfo]]]


def test_immutable_asks_once(make: Make) -> None:
    origin = MemoryOrigin()
    origin.put("b/k", b"1")
    cache, clock, _ = make(math.inf)
    first = cache.stat(origin, "b/k")
    clock.now += 1e9
    assert cache.stat(origin, "b/k") == first
    assert origin.count("head") == 1


def test_always_asks_every_time(make: Make) -> None:
    origin = MemoryOrigin()
    origin.put("b/k", b"1")
    cache, _, changed = make(0)
    old = cache.stat(origin, "b/k")
    origin.put("b/k", b"22")
    assert cache.stat(origin, "b/k").size == 2
    assert changed == [old]
    assert origin.count("head") == 2


def test_ttl_is_honoured(make: Make) -> None:
    origin = MemoryOrigin()
    origin.put("b/k", b"1")
    cache, clock, changed = make(60)
    cache.stat(origin, "b/k")
    origin.put("b/k", b"22")
    clock.now += 59
    assert cache.stat(origin, "b/k").size == 1
    clock.now += 2
    assert cache.stat(origin, "b/k").size == 2
    assert len(changed) == 1


def test_a_removed_object_is_forgotten(make: Make) -> None:
    origin = MemoryOrigin()
    origin.put("b/k", b"1")
    cache, clock, changed = make(60)
    cache.stat(origin, "b/k")
    origin.delete(["b/k"])
    clock.now += 61
    with pytest.raises(ObjectNotFoundError):
        cache.stat(origin, "b/k")
    assert [info.key for info in changed] == ["b/k"]


def test_a_listing_is_remembered_and_describes_its_objects(make: Make) -> None:
    origin = MemoryOrigin()
    for number in range(2500):
        origin.put(f"b/d/{number:05}", b"x" * (number % 7))
    origin.put("b/d/sub/x", b"1")
    cache, clock, _ = make(60)
    pages = list(cache.list_all(origin, "b/d"))
    assert [info for page in cache.list_all(origin, "b/d") for info in page] == [
        info for page in pages for info in page
    ]
    assert max(len(page) for page in pages) <= 1000
    assert cache.stat(origin, "b/d/00006").size == 6
    assert cache.known_directory(origin, "b/d")
    level = cache.list_level(origin, "b/d")
    assert cache.list_level(origin, "b/d") == level
    assert level.prefixes == ["b/d/sub"]
    assert len(level.objects) == 2500
    assert origin.count("list") == 2
    assert origin.count("head") == 0
    clock.now += 61
    assert sum(len(page) for page in cache.list_all(origin, "b/d")) == 2501
    assert origin.count("list") == 3


def test_a_listing_that_was_broken_off_is_not_taken_for_whole(make: Make) -> None:
    origin = MemoryOrigin()
    for number in range(1500):
        origin.put(f"b/d/{number:05}", b"")
    cache, _, _ = make(60)
    next(cache.list_all(origin, "b/d"))
    assert not cache.known_directory(origin, "b/d")
    assert sum(len(page) for page in cache.list_all(origin, "b/d")) == 1500


def test_a_write_forgets_the_object_and_the_listings_above(make: Make) -> None:
    origin = MemoryOrigin()
    origin.put("b/d/k", b"1")
    cache, _, _ = make(math.inf)
    list(cache.list_all(origin, "b"))
    cache.list_level(origin, "b/d")
    cache.forget(origin, "b/d/k")
    assert cache.known(origin, "b/d/k") is None
    assert not cache.known_directory(origin, "b")
    assert not cache.known_directory(origin, "b/d")


def test_a_reader_of_a_listing_that_was_replaced_twice_is_told(make: Make) -> None:
    origin = MemoryOrigin()
    for number in range(2500):
        origin.put(f"b/d/{number:05}", b"")
    cache, clock, _ = make(60)
    list(cache.list_all(origin, "b/d"))
    reading = cache.list_all(origin, "b/d")
    next(reading)
    for _ in range(2):
        clock.now += 61
        list(cache.list_all(origin, "b/d"))
    with pytest.raises(ChangedError, match="list it again"):
        list(reading)


def test_memory_origin_is_an_origin() -> None:
    assert isinstance(MemoryOrigin(), Origin)


def test_an_answer_from_before_a_write_is_not_remembered(make: Make) -> None:
    origin = MemoryOrigin()
    origin.put("b/d/k", b"old")
    cache, _, _ = make(math.inf)
    real_head = origin.head

    def slow_head(key: str) -> ObjectInfo:
        info = real_head(key)
        origin.put("b/d/k", b"newer")  # another thread writes while the answer is on its way
        cache.forget(origin, "b/d/k")
        return info

    origin.head = slow_head  # type: ignore[method-assign]
    assert cache.stat(origin, "b/d/k").size == 3
    origin.head = real_head  # type: ignore[method-assign]
    assert cache.stat(origin, "b/d/k").size == 5


def test_a_listing_from_before_a_write_is_not_remembered(make: Make) -> None:
    origin = MemoryOrigin()
    for number in range(1500):
        origin.put(f"b/d/{number:05}", b"")
    cache, _, _ = make(math.inf)
    pages = cache.list_all(origin, "b/d")
    next(pages)
    origin.put("b/d/zz", b"new")
    cache.forget(origin, "b/d/zz")
    list(pages)
    assert sum(len(page) for page in cache.list_all(origin, "b/d")) == 1501


def test_everything_can_be_forgotten(make: Make) -> None:
    origin = MemoryOrigin()
    origin.put("b/d/k", b"1")
    cache, _, _ = make(math.inf)
    cache.stat(origin, "b/d/k")
    cache.list_level(origin, "b/d")
    cache.forget_all()
    assert cache.known(origin, "b/d/k") is None
    assert not cache.known_directory(origin, "b/d")
    origin.put("b/d/k", b"22")
    assert cache.stat(origin, "b/d/k").size == 2


def test_forgetting_gives_up_the_version_that_was_known(make: Make) -> None:
    origin = MemoryOrigin()
    origin.put("b/k", b"1")
    cache, _, changed = make(math.inf)
    old = cache.stat(origin, "b/k")
    cache.forget(origin, "b/k")
    assert changed == [old]


def test_listings_do_not_pile_up(make: Make, index: Index) -> None:
    origin = MemoryOrigin()
    for number in range(2500):
        origin.put(f"b/d/{number:05}", b"")
    cache, clock, _ = make(60)

    def records() -> int:
        return sum(1 for _ in all_meta(index))

    counts = []
    for _ in range(5):
        clock.now += 1
        cache.forget(origin, "b/d/00000")
        list(cache.list_all(origin, "b/d"))
        counts.append(records())
    assert counts[-1] == counts[2]


def all_meta(index: Index) -> Iterator[bytes]:
    with index._env.begin(index._meta) as txn:
        for key, _ in txn.cursor():
            yield key
