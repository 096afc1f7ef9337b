import contextlib
import math
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.support.clocks import Clock
from tests.support.indexes import fail_on
from tests.support.origins import MemoryOrigin

from millrace.cache.metadata.metadata import MetadataCache, OriginMetadata, UncachedMetadata
from millrace.cache.metadata.page_map import PageMap
from millrace.cache.reading.threads import CALLERS_THREAD
from millrace.errors import DeniedError, DiskFullError, ObjectNotFoundError, OriginUnavailableError
from millrace.origin import Listing, ListingPage, ObjectInfo, Origin
from millrace.runtime.locks import NamedLocks
from millrace.store.index import Index


@pytest.fixture
def make(index: Index, tmp_path: Path) -> Iterator[Callable[..., tuple[MetadataCache, Clock, list[ObjectInfo]]]]:
    locks = NamedLocks(tmp_path / "locks")

    def build(max_age: float, ahead: Executor | None = None) -> tuple[MetadataCache, Clock, list[ObjectInfo]]:
        clock, changed = Clock(), []
        cache = MetadataCache(
            PageMap(index),
            locks,
            max_age_seconds=max_age,
            on_changed=lambda _, info: changed.append(info),
            report=fail_on,
            clock=clock,
            ahead=ahead,
        )
        return cache, clock, changed

    yield build
    locks.close()


Make = Callable[..., tuple[MetadataCache, Clock, list[ObjectInfo]]]


def test_clock_set_back_makes_metadata_stale(make: Make) -> None:
    origin = MemoryOrigin()
    origin.put("b/d/k", b"1")
    cache, clock, _ = make(60.0)
    clock.now = 1e6
    assert cache.stat(origin, "b/d/k").size == 1
    list(cache.list_all(origin, "b/d"))
    clock.now -= 50_000
    origin.put("b/d/k", b"22")
    assert cache.stat(origin, "b/d/k").size == 2
    assert [info.size for page in cache.list_all(origin, "b/d") for info in page] == [2]
    # The new result is cached, although the cached one has a later request time.
    requests = origin.count("head") + origin.count("list")
    assert cache.stat(origin, "b/d/k").size == 2
    assert [info.size for page in cache.list_all(origin, "b/d") for info in page] == [2]
    assert origin.count("head") + origin.count("list") == requests
    clock.now += 50_000
    origin.put("b/d/k", b"333")
    assert cache.stat(origin, "b/d/k").size == 3


def test_listing_of_very_long_names_is_requested_by_page(make: Make) -> None:
    """A page cannot begin at such a position: it is too long for LMDB."""
    origin = MemoryOrigin()
    for number in range(1500):
        origin.put(f"b/b{'l' * 900}{number:05}", b"x")
    cache, clock, _ = make(60.0)
    for start in range(4):
        names = [info.key for page in cache.list_all(origin, "b") for info in page]
        assert len(names) == 1500 + 30 * start
        assert cache.stat(origin, names[7]).size == 1
        for number in range(30):
            origin.put(f"b/a{start}{number:05}", b"x")
        clock.now += 100


def test_immutable_metadata_is_requested_once(make: Make) -> None:
    origin = MemoryOrigin()
    origin.put("b/k", b"1")
    cache, clock, _ = make(math.inf)
    first = cache.stat(origin, "b/k")
    clock.now += 1e9
    assert cache.stat(origin, "b/k") == first
    assert origin.count("head") == 1


def test_stat_with_always_requests_every_time(make: Make) -> None:
    origin = MemoryOrigin()
    origin.put("b/k", b"1")
    cache, _, changed = make(0)
    old = cache.stat(origin, "b/k")
    origin.put("b/k", b"22")
    assert cache.stat(origin, "b/k").size == 2
    assert changed == [old]
    assert origin.count("head") == 2


def test_metadata_after_its_ttl_is_requested_again(make: Make) -> None:
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


def test_removed_object_drops_its_metadata(make: Make) -> None:
    origin = MemoryOrigin()
    origin.put("b/k", b"1")
    cache, clock, changed = make(60)
    cache.stat(origin, "b/k")
    origin.delete(["b/k"])
    clock.now += 61
    with pytest.raises(ObjectNotFoundError):
        cache.stat(origin, "b/k")
    assert [info.key for info in changed] == ["b/k"]


def test_listing_is_cached_and_describes_its_objects(make: Make) -> None:
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
    assert cache.remembered_directory(origin, "b/d")
    level = cache.list_level(origin, "b/d")
    assert cache.list_level(origin, "b/d") == level
    assert level.prefixes == ["b/d/sub"]
    assert len(level.objects) == 2500
    assert origin.count("list") == 3  # pages; the level needed none of its own
    assert origin.count("head") == 0
    clock.now += 61
    assert sum(len(page) for page in cache.list_all(origin, "b/d")) == 2501
    assert origin.count("list") == 6


def test_interrupted_listing_is_continued(make: Make) -> None:
    origin = MemoryOrigin()
    for number in range(2500):
        origin.put(f"b/d/{number:05}", b"")
    cache, _, _ = make(60)
    next(cache.list_all(origin, "b/d"))
    assert cache.remembered_directory(origin, "b/d")
    assert origin.count("list") == 1
    assert sum(len(page) for page in cache.list_all(origin, "b/d")) == 2500
    assert origin.count("list") == 3


def test_write_drops_the_object_and_the_listings_above(make: Make) -> None:
    origin = MemoryOrigin()
    origin.put("b/d/k", b"1")
    cache, _, _ = make(math.inf)
    list(cache.list_all(origin, "b"))
    cache.list_level(origin, "b/d")
    cache.invalidate(origin, "b/d/k")
    assert cache.known(origin, "b/d/k") is None
    assert not cache.remembered_directory(origin, "b")
    assert not cache.remembered_directory(origin, "b/d")


def test_reader_continues_a_listing_that_another_reader_requests_again(make: Make) -> None:
    origin = MemoryOrigin()
    for number in range(2500):
        origin.put(f"b/d/{number:05}", b"")
    cache, clock, _ = make(60)
    list(cache.list_all(origin, "b/d"))
    reading = cache.list_all(origin, "b/d")
    found = list(next(reading))
    for _ in range(2):
        clock.now += 61
        list(cache.list_all(origin, "b/d"))
    found += [info for page in reading for info in page]
    assert [info.key for info in found] == [f"b/d/{number:05}" for number in range(2500)]


def test_memory_origin_of_the_tests_implements_the_origin_protocol() -> None:
    assert isinstance(MemoryOrigin(), Origin)


def test_answer_from_before_a_write_is_not_cached(make: Make) -> None:
    origin = MemoryOrigin()
    origin.put("b/d/k", b"old")
    cache, _, _ = make(math.inf)
    real_head = origin.head

    def slow_head(key: str) -> ObjectInfo:
        info = real_head(key)
        origin.put("b/d/k", b"newer")  # another thread writes while the answer is on its way
        cache.invalidate(origin, "b/d/k")
        return info

    origin.head = slow_head  # type: ignore[method-assign]
    assert cache.stat(origin, "b/d/k").size == 3
    origin.head = real_head  # type: ignore[method-assign]
    assert cache.stat(origin, "b/d/k").size == 5


def test_listing_from_before_a_write_is_not_cached(make: Make) -> None:
    origin = MemoryOrigin()
    for number in range(1500):
        origin.put(f"b/d/{number:05}", b"")
    cache, _, _ = make(math.inf)
    pages = cache.list_all(origin, "b/d")
    next(pages)
    origin.put("b/d/zz", b"new")
    cache.invalidate(origin, "b/d/zz")
    list(pages)
    assert sum(len(page) for page in cache.list_all(origin, "b/d")) == 1501


@pytest.mark.parametrize("in_flight", [False, True], ids=["", "by a response in flight"])
def test_directory_is_missing_after_all_below_its_listed_directories_was_removed(make: Make, in_flight: bool) -> None:
    origin = MemoryOrigin()
    origin.put("b/d/s/k", b"1")
    cache, _, _ = make(math.inf)
    list_level = origin.list_level

    def remove() -> None:
        origin.delete(["b/d/s/k"])
        cache.invalidate(origin, "b/d/s/k")

    def list_before_the_removal(prefix: str) -> Listing:
        found = list_level(prefix)
        if in_flight:
            remove()
        return found

    origin.list_level = list_before_the_removal  # type: ignore[method-assign]
    assert cache.list_level(origin, "b/d").prefixes == ["b/d/s"]
    if not in_flight:
        remove()
    assert not cache.remembered_directory(origin, "b/d")
    assert not cache.remembered_directory(origin, "b/d/s")
    assert cache.below(origin, "b/d") == "nothing"


def test_invalidate_all_removes_all_metadata(make: Make) -> None:
    origin = MemoryOrigin()
    origin.put("b/d/k", b"1")
    cache, _, _ = make(math.inf)
    cache.stat(origin, "b/d/k")
    cache.list_level(origin, "b/d")
    cache.invalidate_all()
    assert cache.known(origin, "b/d/k") is None
    assert not cache.remembered_directory(origin, "b/d")
    origin.put("b/d/k", b"22")
    assert cache.stat(origin, "b/d/k").size == 2


def test_invalidation_in_a_full_index_waits_for_pages_that_are_still_read(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = MemoryOrigin()
    origin.put("b/d/k", b"old")
    cache, _, _ = make(math.inf)
    assert cache.stat(origin, "b/d/k").size == 3
    real_clear, calls = PageMap.clear, []

    def full(*_: object) -> None:
        raise DiskFullError("the index cannot grow")

    def clear(pages: PageMap) -> None:
        calls.append(pages)
        (full if len(calls) < 3 else real_clear)(pages)

    monkeypatch.setattr(PageMap, "change", full)
    monkeypatch.setattr(PageMap, "clear", clear)
    origin.put("b/d/k", b"newer")
    cache.invalidate(origin, "b/d/k")
    assert cache.stat(origin, "b/d/k").size == 5
    monkeypatch.setattr(PageMap, "clear", full)
    with pytest.raises(DiskFullError):
        cache.invalidate(origin, "b/d/k")


@pytest.mark.parametrize("is_cached", [False, True])
def test_invalidation_interrupted_on_another_disk_reaches_other_nodes(
    index: Index, tmp_path: Path, is_cached: bool
) -> None:
    invalidated = []

    class Source(OriginMetadata):
        def changed(self, origin: Origin, keys: Sequence[str]) -> bool:
            invalidated.extend(keys)
            return False

    def interrupt(own: bool) -> None:
        raise KeyboardInterrupt

    with contextlib.closing(NamedLocks(tmp_path / "locks")) as locks:
        cached = MetadataCache(
            PageMap(index),
            locks,
            max_age_seconds=60.0,
            on_changed=lambda *_: None,
            report=fail_on,
            source=Source(),
            expire_elsewhere=interrupt,
        )
        metadata = cached if is_cached else UncachedMetadata(Source(), expire_elsewhere=interrupt)
        with pytest.raises(KeyboardInterrupt):
            metadata.invalidate(MemoryOrigin(), "b/k")
    assert invalidated == ["b/k"]


def test_invalidation_removes_the_old_version(make: Make) -> None:
    origin = MemoryOrigin()
    origin.put("b/k", b"1")
    cache, _, changed = make(math.inf)
    old = cache.stat(origin, "b/k")
    cache.invalidate(origin, "b/k")
    assert changed == [old]


def test_repeated_listings_do_not_accumulate(make: Make, index: Index) -> None:
    origin = MemoryOrigin()
    for number in range(2500):
        origin.put(f"b/d/{number:05}", b"")
    cache, clock, _ = make(60)

    def records() -> int:
        return sum(1 for _ in all_meta(index))

    def changes() -> int:
        return sum(1 for key in all_meta(index) if key.startswith(b"T"))  # of which some thousands are kept

    counts = []
    for _ in range(5):
        clock.now += 1
        cache.invalidate(origin, "b/d/00000")
        list(cache.list_all(origin, "b/d"))
        cache.stat(origin, "b/d/00000")
        counts.append(records() - changes())
    assert counts == [counts[0]] * 5


def all_meta(index: Index) -> Iterator[bytes]:
    with index.meta_reading() as txn:
        for key, _ in txn.cursor():
            yield bytes(key)


# --- what has expired is requested again by the page ----------------------------------------------


def fill(origin: MemoryOrigin, count: int, prefix: str = "b/d/") -> list[str]:
    keys = [f"{prefix}{number:05}" for number in range(count)]
    for key in keys:
        origin.put(key, b"x")
    return keys


def listed(cache: MetadataCache, origin: MemoryOrigin, prefix: str) -> list[str]:
    return [info.key for page in cache.list_all(origin, prefix) for info in page]


@pytest.mark.parametrize("count", [1, 999, 1000, 1001, 2000, 3500])
def test_expired_epoch_costs_one_request_per_thousand_keys(make: Make, count: int) -> None:
    origin = MemoryOrigin()
    keys = fill(origin, count)
    cache, clock, changed = make(60)
    assert listed(cache, origin, "b/d") == keys
    for epoch in range(3):
        clock.now += 61
        origin.requests.clear()
        for key in random.Random(epoch).sample(keys, count):
            assert cache.stat(origin, key).size == 1
        assert origin.requests == [("list", "b/d", 0, 0)] * -(-count // 1000)
        assert cache.remembered_directory(origin, "b/d")
        assert listed(cache, origin, "b/d") == keys
        assert cache.below(origin, "b/d") == "something"
        assert origin.count("head") == 0
        assert origin.count("list") == -(-count // 1000)
    assert changed == []


def expired(make: Make, count: int) -> tuple[MetadataCache, MemoryOrigin, list[str]]:
    """A listing whose pages have expired, in a cache that requests pages ahead, in the same thread."""
    origin = MemoryOrigin()
    keys = fill(origin, count)
    cache, clock, _ = make(60, ahead=CALLERS_THREAD.ahead)
    listed(cache, origin, "b/d")
    clock.now += 61
    origin.requests.clear()
    return cache, origin, keys


def test_pages_are_requested_before_a_reader_that_follows_the_listing_needs_them(make: Make) -> None:
    cache, origin, keys = expired(make, 12_500)
    requests = []
    for start in range(0, len(keys), 1000):
        assert cache.stat(origin, keys[start]).size == 1
        requests.append(origin.count("list"))
    # The second page is reached from the first one, so eight are requested after it; then the twelfth in the same way.
    assert requests == [1, *[10] * 9, *[13] * 3]
    assert cache.known(origin, keys[-1]) is not None
    assert origin.count("head") == 0


def test_pages_ahead_end_with_the_listing_also_before_another_expired_one(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    origin = MemoryOrigin()
    keys = fill(origin, 2500)
    fill(origin, 1, "b/e/")
    cache, clock, _ = make(60, ahead=CALLERS_THREAD.ahead)
    for prefix in ("b/d", "b"):
        listed(cache, origin, prefix)
    clock.now += 61
    origin.requests.clear()
    for start in range(0, len(keys), 1000):
        cache.stat(origin, keys[start])
    assert origin.count("list") == 3
    assert not caplog.records


@pytest.mark.parametrize("number", [0, 5000])
def test_reader_of_one_object_requests_one_page(make: Make, number: int) -> None:
    cache, origin, keys = expired(make, 12_500)
    assert cache.stat(origin, keys[number]).size == 1
    assert origin.count("list") == 1


def test_failure_of_a_page_that_is_requested_ahead_reaches_only_a_reader_that_needs_it(make: Make) -> None:
    cache, origin, keys = expired(make, 4_000)
    cache.stat(origin, keys[0])
    real, pages = origin.list_pages, []

    def one_page(*args: Any, **options: Any) -> Iterator[ListingPage]:
        for page in real(*args, **options):
            if pages:
                raise OriginUnavailableError("no answer")
            pages.append(page)
            yield page

    origin.list_pages = one_page  # type: ignore[method-assign]
    assert cache.stat(origin, keys[1000]).size == 1
    assert pages
    with pytest.raises(OriginUnavailableError, match="no answer"):
        cache.stat(origin, keys[2000])
    origin.list_pages = real  # type: ignore[method-assign]
    assert cache.stat(origin, keys[2000]).size == 1


def test_many_threads_request_each_page_once(make: Make) -> None:
    origin = MemoryOrigin()
    keys = fill(origin, 3000)
    cache, clock, _ = make(60)
    listed(cache, origin, "b/d")
    clock.now += 61
    origin.requests.clear()
    all_in = threading.Barrier(16)

    def epoch(seed: int) -> None:
        all_in.wait()
        for key in random.Random(seed).sample(keys, 300):
            cache.stat(origin, key)
        assert listed(cache, origin, "b/d") == keys

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(epoch, range(16)))
    assert origin.count("list") == 3
    assert origin.count("head") == 0


def test_listing_again_reports_changed_drops_removed_adds_new_objects(make: Make) -> None:
    origin = MemoryOrigin()
    keys = fill(origin, 2500)
    cache, clock, changed = make(60)
    old = {info.key: info for page in cache.list_all(origin, "b/d") for info in page}
    origin.put("b/d/00100", b"other")
    origin.delete(["b/d/00200", "b/d/01700"])
    origin.put("b/d/00300x", b"new")
    clock.now += 61
    origin.requests.clear()
    assert cache.stat(origin, "b/d/00001") == old["b/d/00001"]
    assert changed == [old["b/d/00100"], old["b/d/00200"]]
    assert cache.stat(origin, "b/d/00100").size == 5
    assert cache.known(origin, "b/d/00300x") is not None
    with pytest.raises(ObjectNotFoundError):
        cache.stat(origin, "b/d/01700")
    assert changed == [old["b/d/00100"], old["b/d/00200"], old["b/d/01700"]]
    assert listed(cache, origin, "b/d") == sorted({*keys, "b/d/00300x"} - {"b/d/00200", "b/d/01700"})
    assert origin.count("list") == 3
    assert origin.count("head") == 1  # for the one that was gone


def test_pages_after_many_changes_are_not_fragmented(make: Make) -> None:
    origin = MemoryOrigin()
    keys = set(fill(origin, 4990))
    cache, clock, _ = make(60)
    rng = random.Random(1)
    listed(cache, origin, "b/d")
    for _ in range(5):
        for key in rng.sample(sorted(keys), 50):
            origin.delete([key])
            keys.remove(key)
        for _ in range(50):
            key = f"b/d/{rng.randrange(5000):05}+{rng.randrange(1000)}"
            origin.put(key, b"new")
            keys.add(key)
        clock.now += 61
        for key in rng.sample(sorted(keys), 200):
            cache.stat(origin, key)
    for most in (12, -(-len(keys) // 1000)):  # a listing makes whole pages again
        clock.now += 61
        origin.requests.clear()
        for key in rng.sample(sorted(keys), len(keys)):
            cache.stat(origin, key)
        assert origin.count("list") + origin.count("head") <= most
        clock.now += 61
        assert listed(cache, origin, "b/d") == sorted(keys)


def test_keys_outside_listings_are_requested_alone(make: Make) -> None:
    origin = MemoryOrigin()
    keys = fill(origin, 5)
    cache, clock, _ = make(60)
    for _ in range(2):
        clock.now += 61
        for key in keys:
            cache.stat(origin, key)
            cache.stat(origin, key)
    assert origin.count("head") == 10
    assert origin.count("list") == 0


def test_local_origin_is_requested_for_each_object(make: Make) -> None:
    origin = MemoryOrigin(head_is_local=True)
    keys = fill(origin, 5)
    cache, clock, _ = make(60)
    listed(cache, origin, "b/d")
    clock.now += 61
    for key in keys:
        cache.stat(origin, key)
    assert origin.count("head") == 5
    assert origin.count("list") == 1


def test_always_requests_each_object_and_listing(make: Make) -> None:
    origin = MemoryOrigin()
    keys = fill(origin, 3)
    cache, _, _ = make(0)
    for _ in range(2):
        assert listed(cache, origin, "b/d") == keys
        cache.stat(origin, keys[0])
        assert not cache.remembered_directory(origin, "b/d")
    assert origin.count("head") == 2
    assert origin.count("list") == 2


def test_expired_level_is_requested_again(make: Make) -> None:
    origin = MemoryOrigin()
    keys = fill(origin, 1500)
    origin.put("b/d/sub/x", b"1")
    cache, clock, _ = make(60)
    for _ in range(3):
        clock.now += 61
        origin.requests.clear()
        for _ in range(2):
            level = cache.list_level(origin, "b/d")
            assert [info.key for info in level.objects] == keys
            assert level.prefixes == ["b/d/sub"]
        clock.now += 61
        for key in keys[::100]:
            assert cache.stat(origin, key).size == 1
        assert origin.requests == [("list", "b/d", 0, 0)] * 2


def test_denied_listing_is_replaced_by_requests_for_objects(make: Make) -> None:
    origin = MemoryOrigin()
    keys = fill(origin, 3)
    cache, clock, _ = make(60)
    listed(cache, origin, "b/d")
    clock.now += 61

    def refuse(prefix: str, after: str) -> None:
        raise DeniedError("no listing for you")

    origin.before_list = refuse
    assert cache.stat(origin, keys[0]).size == 1
    assert origin.count("head") == 1


def test_object_with_long_name_is_found_and_invalidated(make: Make) -> None:
    origin = MemoryOrigin()
    keys = sorted(f"b/d/{'l' * 900}{number:05}" for number in range(1500))
    for key in keys:
        origin.put(key, b"x")
    cache, _, _ = make(math.inf)
    for _ in range(2):
        assert listed(cache, origin, "b/d") == keys
    for key in (keys[0], keys[999], keys[1000], keys[-1]):
        assert cache.stat(origin, key).size == 1
    cache.invalidate(origin, keys[1000])
    origin.put(keys[1000], b"yy")
    assert cache.stat(origin, keys[1000]).size == 2


def test_write_of_other_key_keeps_answers_in_flight(make: Make) -> None:
    origin = MemoryOrigin()
    keys = fill(origin, 10)
    cache, _, _ = make(math.inf)
    origin.before_list = lambda prefix, after: cache.invalidate(origin, "b/elsewhere")
    assert listed(cache, origin, "b/d") == keys
    origin.before_list = None
    assert cache.known(origin, keys[3]) is not None
    assert listed(cache, origin, "b/d") == keys
    assert origin.count("list") == 1


def test_answer_from_before_invalidate_all_is_not_cached(make: Make) -> None:
    origin = MemoryOrigin()
    keys = fill(origin, 10)
    cache, _, _ = make(math.inf)
    origin.before_list = lambda prefix, after: cache.invalidate_all()
    listed(cache, origin, "b/d")
    assert cache.known(origin, keys[0]) is None
    assert not cache.remembered_directory(origin, "b/d")


def test_description_from_a_later_request_wins_over_a_listing(make: Make) -> None:
    class Slow(MemoryOrigin):
        """Its listings are on their way for so long that the object is overwritten and described meanwhile."""

        def list_pages(self, prefix: str, *, after: str = "", settled: object = None) -> Iterator[ListingPage]:
            for page in list(super().list_pages(prefix, after=after)):
                self.put("b/d/00001", b"newer")
                clock.now += 1
                asking.stat(self, "b/d/00001")
                yield page

    origin = Slow()
    fill(origin, 3)
    cache, clock, _ = make(60)
    asking, its_clock, _ = make(0)
    its_clock.now = clock.now + 1
    assert len(listed(cache, origin, "b/d")) == 3
    known = cache.known(origin, "b/d/00001")
    assert known is not None
    assert known.size == 5
    assert cache.known(origin, "b/d/00002") is not None


class FolderOrigin(MemoryOrigin):
    """Lists folder by folder, as servers with real directories do: `a/x` before `a-b`."""

    page_objects = 1000

    def list_pages(self, prefix: str, *, after: str = "", settled: object = None) -> Iterator[ListingPage]:
        def place(key: str) -> str:
            return key.replace("/", "\0")

        below = sorted((key for key in self._objects if key.startswith(f"{prefix.rstrip('/')}/")), key=place)
        below = [key for key in below if place(key) > place(after)]
        for start in range(0, max(len(below), 1), self.page_objects):
            stop = start + self.page_objects
            self.requests.append(("list", prefix, 0, 0))
            yield ListingPage([self._info(key) for key in below[start:stop]], stop >= len(below))


class FolderPagesOrigin(FolderOrigin):
    """Lists three keys in a page."""

    page_objects = 3


class FolderSkippingOrigin(FolderOrigin):
    """Takes the beginning of a directory for its end, as SeaweedFS does."""

    def list_pages(self, prefix: str, *, after: str = "", settled: object = None) -> Iterator[ListingPage]:
        skips = after.endswith("/") and after.rstrip("/") != prefix
        yield from super().list_pages(prefix, after=f"{after}\U0010ffff" if skips else after)


class SlashDroppingOrigin(MemoryOrigin):
    """Repeats the names between that of a directory and its slash, as S3 does through obstore, which removes the slash."""

    def list_pages(self, prefix: str, *, after: str = "", settled: object = None) -> Iterator[ListingPage]:
        yield from super().list_pages(prefix, after=after.rstrip("/") if after.rstrip("/") != prefix else after)


class ShuffledOrigin(MemoryOrigin):
    """Lists in no order that could be kept."""

    def list_pages(self, prefix: str, *, after: str = "", settled: object = None) -> Iterator[ListingPage]:
        pages = list(super().list_pages(prefix))
        infos = [info for page in pages for info in page.objects]
        random.Random(0).shuffle(infos)
        skipped = next((number + 1 for number, info in enumerate(infos) if info.key == after), 0)
        yield ListingPage(infos[skipped:], True)


def test_origin_in_folder_order_is_cached_in_its_order(make: Make) -> None:
    origin = FolderOrigin()
    keys = [*fill(origin, 1500, "b/train/"), *fill(origin, 1500, "b/train-clean/"), "b/train.txt", "b/zz"]
    for key in keys[-2:]:
        origin.put(key, b"1")
    cache, clock, changed = make(60)
    listed(cache, origin, "b")  # which shows the order, so earlier pages are dropped
    for _ in range(3):
        clock.now += 61
        origin.requests.clear()
        for _ in range(2):
            assert sorted(listed(cache, origin, "b")) == sorted(keys)
            for key in random.Random(1).sample(keys, 100):
                assert cache.stat(origin, key).size == 1
        assert origin.count("list") == 4
        assert origin.count("head") == 0
    assert sorted(listed(cache, origin, "b/train")) == keys[:1500]
    assert origin.count("list") == 4
    assert changed == []


def test_write_of_a_process_that_has_not_seen_the_folder_order_is_visible(make: Make) -> None:
    """Another process of the node has learned the order since this one used the origin."""
    origin = FolderOrigin()
    for key in ("b/d/x", "b/d-x"):
        origin.put(key, b"old")
    reader, writer = make(math.inf)[0], make(math.inf)[0]
    assert writer.stat(origin, "b/d-x").size == 3
    listed(reader, origin, "b")
    assert reader.stat(origin, "b/d/x").size == 3
    origin.put("b/d/x", b"newer")
    writer.invalidate(origin, "b/d/x")
    assert reader.stat(origin, "b/d/x").size == 5


def test_listing_that_shows_the_folder_order_is_older_than_writes_before_its_end(make: Make) -> None:
    origin = FolderOrigin()
    for key in ("b/d/x", "b/d-x"):
        origin.put(key, b"old")
    reader, writer = make(math.inf)[0], make(math.inf)[0]
    real_pages = origin.list_pages

    def slow_pages(*arguments: Any, **options: Any) -> Iterator[ListingPage]:
        pages = list(real_pages(*arguments, **options))
        origin.put("b/d/x", b"newer")  # another process writes while the answer is in flight
        writer.invalidate(origin, "b/d/x")
        yield from pages

    origin.list_pages = slow_pages  # type: ignore[method-assign]
    listed(reader, origin, "b")
    origin.list_pages = real_pages  # type: ignore[method-assign]
    assert reader.stat(origin, "b/d/x").size == 5


def test_directory_behind_a_longer_one_is_listed_before_the_order_is_known(make: Make) -> None:
    """`b/train-clean` sorts before `b/train/` by its bytes, and follows it in this origin."""
    origin = FolderOrigin()
    fill(origin, 1500, "b/train/")
    cache, _, _ = make(math.inf)
    assert cache.below(origin, "b") == "something"
    origin.put("b/train-clean/k", b"1")
    cache.invalidate(origin, "b/train-clean/k")
    for _ in range(2):
        assert listed(cache, origin, "b/train-clean") == ["b/train-clean/k"]
    assert len(listed(cache, origin, "b")) == 1501


def test_write_behind_a_longer_directory_is_listed_before_the_order_is_known(make: Make) -> None:
    origin = FolderOrigin()
    keys = fill(origin, 1500, "b/train/")
    cache, _, _ = make(math.inf)
    assert listed(cache, origin, "b") == keys
    origin.put("b/train-clean/k", b"1")
    cache.invalidate(origin, "b/train-clean/k")
    assert listed(cache, origin, "b/train") == keys  # the first page is complete again
    for _ in range(2):
        assert listed(cache, origin, "b") == [*keys, "b/train-clean/k"]


@pytest.mark.parametrize("in_flight", [False, True])
def test_write_before_a_longer_directory_is_listed_before_the_order_is_known(make: Make, in_flight: bool) -> None:
    """`b/train/k` follows `b/train-clean` by its bytes, and is the first key in this origin."""

    class Writing(FolderOrigin):
        """An object is written while the first page is in flight."""

        def list_pages(self, prefix: str, *, after: str = "", settled: object = None) -> Iterator[ListingPage]:
            pages = list(super().list_pages(prefix, after=after))
            if in_flight:
                write()
            yield from pages

    def write() -> None:
        origin.put("b/train/k", b"1")
        writer.invalidate(origin, "b/train/k")

    origin = Writing()
    keys = fill(origin, 1500, "b/train-clean/")
    cache, writer = make(math.inf)[0], make(math.inf)[0]
    assert len(next(cache.list_all(origin, "b"))) == 1000
    if not in_flight:
        assert listed(cache, origin, "b") == keys
        write()
    in_flight = False
    for _ in range(2):
        assert sorted(listed(cache, origin, "b")) == [*keys, "b/train/k"]


def test_page_that_begins_before_a_longer_directory_keeps_no_part_of_later_pages(make: Make) -> None:
    """By their bytes, its keys follow all of `b/train-clean/`, whose pages it would replace."""
    origin = FolderOrigin()
    keys = fill(origin, 1500, "b/train-clean/")
    cache, _, _ = make(math.inf)
    assert listed(cache, origin, "b") == keys
    added = fill(origin, 1000, "b/train/")
    cache.invalidate(origin, *added)
    assert cache.stat(origin, keys[1200]).size == 1  # the second page is complete again
    for _ in range(2):
        assert sorted(listed(cache, origin, "b")) == [*keys, *added]


@pytest.mark.parametrize("kind", [FolderOrigin, FolderSkippingOrigin, MemoryOrigin, SlashDroppingOrigin])
@pytest.mark.parametrize("before", [[], ["b/c-1", "b/c/1"], ["b/c/1/2"]])
def test_directory_that_was_listed_by_itself_is_listed_again_within_its_parent(
    make: Make, kind: type[MemoryOrigin], before: list[str]
) -> None:
    origin = kind()
    keys = sorted([*before, "b/d/1", "b/d-x", "b/d.x/1", "b/e/1"])
    for key in keys:
        origin.put(key, b"1")
    cache, always = make(math.inf)[0], make(0)[0]
    assert sorted(listed(cache, origin, "b")) == keys
    for directory in ("b/e", "b/d", "b/c"):
        always.list_level(origin, directory)
    for key in ("b/d/2", "b/e/2"):
        origin.put(key, b"2")
        cache.invalidate(origin, key)
    for _ in range(2):
        assert sorted(listed(cache, origin, "b")) == sorted([*keys, "b/d/2", "b/e/2"])


def test_listing_of_name_with_zero_byte_ends(make: Make) -> None:
    """In this order a position has a zero byte for each slash, so such a name is that of another directory."""
    origin = FolderOrigin()
    for key in ("b/d/a/x", "b/d/a-b", "b/d/b"):  # folder by folder
        origin.put(key, b"1")
    cache, _, _ = make(math.inf)
    assert sum(len(page) for page in cache.list_all(origin, "b/d")) == 3
    assert cache.below(origin, "b/d/a\0") == "nothing"
    assert list(cache.list_all(origin, "b/d/a\0")) == []
    assert cache.list_level(origin, "b/d/a\0").objects == []


def test_listing_without_order_is_returned_and_not_cached(make: Make) -> None:
    origin = ShuffledOrigin()
    keys = fill(origin, 50)
    cache, _, _ = make(math.inf)
    for _ in range(2):
        assert sorted(listed(cache, origin, "b/d")) == keys
    assert cache.known(origin, keys[0]) is None
    assert cache.stat(origin, keys[0]).size == 1


@pytest.mark.parametrize(
    "kind", [MemoryOrigin, FolderOrigin, FolderPagesOrigin, FolderSkippingOrigin, SlashDroppingOrigin, ShuffledOrigin]
)
@pytest.mark.parametrize("seed", range(6))
def test_answers_after_random_changes_are_right(make: Make, kind: type[MemoryOrigin], seed: int) -> None:
    """After any listings, and every change that is invalidated or old enough, all answers are right."""
    rng = random.Random(seed)
    origin = kind()
    cache, clock, _ = make(60)
    names = ["a", "a-b", "a.txt", "a0", "b", "ä", "%41", "a b", "日"]

    def some_key() -> str:
        return "/".join(["b", *(rng.choice(names) for _ in range(rng.randrange(1, 4)))])

    def is_free(key: str) -> bool:
        """Whether no object is below another one, which a directory tree cannot contain."""
        above = ("/".join(key.split("/")[:depth]) for depth in range(2, key.count("/") + 1))
        return not any(name in origin._objects for name in above) and not any(
            other.startswith(f"{key}/") for other in origin._objects
        )

    def some_prefix() -> str:
        return rng.choice(["b", some_key().rpartition("/")[0], some_key()])

    for step in range(300):
        if rng.random() < 0.5:
            reported = rng.random() < 0.6
            for _ in range(rng.randrange(1, 4)):
                key = some_key()
                if rng.random() < 0.6 and is_free(key):
                    origin.put(key, b"x" * rng.randrange(1, 9))
                else:
                    origin.delete([key])
                if reported:
                    cache.invalidate(origin, key)
            if not reported:
                clock.now += 61
        action, prefix = rng.randrange(5), some_prefix()
        below = sorted(key for key in origin._objects if key.startswith(f"{prefix}/"))
        if action == 0:
            assert sorted(listed(cache, origin, prefix)) == below, (step, prefix)
        elif action == 1:
            level, truth = cache.list_level(origin, prefix), origin.list_level(prefix)
            assert sorted(info.key for info in level.objects) == sorted(info.key for info in truth.objects)
            assert sorted(level.prefixes) == sorted(truth.prefixes), (step, prefix)
        elif action == 2:
            assert (cache.below(origin, prefix) == "something") == bool(below), (step, prefix)
        elif action == 3:
            assert cache.remembered_directory(origin, prefix) <= bool(below), (step, prefix)
        for key in rng.sample(sorted(origin._objects), min(3, len(origin._objects))):
            assert cache.stat(origin, key) == origin._info(key), (step, key)
        missing = some_key()
        if missing not in origin._objects:
            with pytest.raises(ObjectNotFoundError):
                cache.stat(origin, missing)


@pytest.mark.parametrize("max_age", [0.0, 60.0])
def test_immutable_object_is_never_requested_again(make: Make, max_age: float) -> None:
    origin = MemoryOrigin(immutable_below="repo@commit/")
    for key in ("repo@commit/data/a", "repo@commit/data/b", "repo/data/a"):
        origin.put(key, b"data")
    cache, clock, _ = make(max_age)
    clock.now = 1e6

    def ask(root: str) -> tuple[str, int, int, int]:
        clock.now += 3600
        version = cache.stat(origin, f"{root}/data/a").version
        listed = sum(len(page) for page in cache.list_all(origin, f"{root}/data"))
        return version, listed, len(cache.list_level(origin, f"{root}/data").objects), origin.count("list")

    first = ask("repo@commit")
    asked = len(origin.requests)
    assert [ask("repo@commit") for _ in range(3)] == [first] * 3
    assert len(origin.requests) == asked
    _, until = cache.stat_until(origin, "repo@commit/data/a")
    assert until == float("inf")
    ask("repo")
    asked = len(origin.requests)
    ask("repo")
    assert len(origin.requests) > asked  # the branch next to it


def test_immutable_object_that_was_missing_is_requested_again(make: Make) -> None:
    origin = MemoryOrigin(immutable_below="repo@commit/")
    cache, _, _ = make(0.0)
    with pytest.raises(ObjectNotFoundError):
        cache.stat(origin, "repo@commit/late")
    origin.put("repo@commit/late", b"x")
    assert cache.stat(origin, "repo@commit/late").size == 1
