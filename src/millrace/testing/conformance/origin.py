"""What Millrace requires of remote storage, as tests."""

from __future__ import annotations

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from millrace.errors import (
    MillraceError,
    ObjectChangedError,
    ObjectExistsError,
    ObjectNotFoundError,
    UsageError,
)
from millrace.origin import Listable, ObjectInfo, Origin, Readable, Writable

ODD_NAMES = (
    "plain.bin",
    "with space",
    "per%cent %41",
    "hash#tag?query",
    "plus+and&",
    "ünï-ćødé-漢字-🦀",
    "quote'and\"double",
    "brackets[0]{1}(2)*",
    "back\\slash",
    "..double..dots..",
    "colon:equals=comma,semi;",
    "x" * 200,
)
"""Last parts of keys that users have, and that clients like to mistreat."""


def _listed(origin: Origin, prefix: str) -> list[ObjectInfo]:
    return [info for page in origin.list_all(prefix) for info in page]


class OriginConformance:
    """Subclass it with the fixtures `origin` (an `Origin`) and `root` (a prefix of keys in it, empty and the test's own)."""

    picklable = True
    """Whether a copy in another process must read the same bytes: true of everything but what lives in memory."""

    ordered = True
    """Whether listings come in the order of the keys, as object stores give them."""

    unsupported_names: frozenset[str] = frozenset()
    """Those of `ODD_NAMES` that the storage behind this origin cannot have; say why where you set it."""

    @pytest.fixture
    def origin(self) -> Origin:
        raise NotImplementedError("give an `origin` fixture")

    @pytest.fixture
    def root(self) -> str:
        raise NotImplementedError("give a `root` fixture")

    def test_it_has_every_operation(self, origin: Origin) -> None:
        assert isinstance(origin, Readable)
        assert isinstance(origin, Listable)
        assert isinstance(origin, Writable)

    def test_the_identity_is_stable_and_tells_no_secret(self, origin: Origin) -> None:
        assert origin.identity
        assert origin.identity == origin.identity
        assert "secret" not in origin.identity.lower()

    # --- objects ----------------------------------------------------------------------------------

    @pytest.mark.parametrize("size", [0, 1, 65_536, 3 << 20])
    def test_what_was_put_is_read(self, origin: Origin, root: str, size: int) -> None:
        data = bytes(range(256)) * (size // 256 + 1)
        data = data[:size]
        origin.put(f"{root}/object", data)
        info = origin.head(f"{root}/object")
        assert (info.key, info.size) == (f"{root}/object", size)
        assert info.version
        assert info.modified > 1_500_000_000
        assert bytes(origin.read(info.key, 0, size, version=info.version)) == data

    @pytest.mark.parametrize(("start", "stop"), [(0, 1), (999, 1000), (1, 999), (500, 500), (0, 1000)])
    def test_ranges_are_half_open(self, origin: Origin, root: str, start: int, stop: int) -> None:
        data = bytes(i % 251 for i in range(1000))
        origin.put(f"{root}/object", data)
        assert bytes(origin.read(f"{root}/object", start, stop)) == data[start:stop]

    @pytest.mark.parametrize(("start", "stop"), [(0, 11), (9, 12), (10, 11), (50, 60)])
    def test_a_range_past_the_end_is_an_error_and_never_short(
        self, origin: Origin, root: str, start: int, stop: int
    ) -> None:
        origin.put(f"{root}/object", b"0123456789")
        with pytest.raises(UsageError):
            origin.read(f"{root}/object", start, stop)

    def test_what_is_missing_is_not_found(self, origin: Origin, root: str) -> None:
        for call in (lambda: origin.head(f"{root}/none"), lambda: origin.read(f"{root}/none", 0, 1)):
            with pytest.raises(ObjectNotFoundError) as caught:
                call()
            assert isinstance(caught.value, FileNotFoundError)
            assert "none" in str(caught.value)

    def test_an_object_is_replaced_whole_and_gets_another_version(self, origin: Origin, root: str) -> None:
        origin.put(f"{root}/object", b"first")
        first = origin.head(f"{root}/object")
        origin.put(f"{root}/object", b"the second")
        second = origin.head(f"{root}/object")
        assert first.version != second.version
        assert bytes(origin.read(second.key, 0, second.size, version=second.version)) == b"the second"
        with pytest.raises(ObjectChangedError):
            origin.read(first.key, 0, first.size, version=first.version)

    def test_the_same_size_again_is_still_another_version_when_the_bytes_differ(
        self, origin: Origin, root: str
    ) -> None:
        versions = set()
        for data in (b"aaaa", b"bbbb", b"cccc"):
            origin.put(f"{root}/object", data)
            versions.add(origin.head(f"{root}/object").version)
        assert len(versions) == 3

    def test_a_version_that_is_gone_is_never_read_as_another(self, origin: Origin, root: str) -> None:
        origin.put(f"{root}/object", b"here")
        info = origin.head(f"{root}/object")
        origin.delete([info.key])
        with pytest.raises((ObjectNotFoundError, ObjectChangedError)):
            origin.read(info.key, 0, 4, version=info.version)

    def test_put_if_absent_has_one_winner(self, origin: Origin, root: str) -> None:
        barrier = threading.Barrier(8)

        def put(number: int) -> bool:
            barrier.wait()
            try:
                origin.put(f"{root}/once", b"%d" % number, if_absent=True)
            except ObjectExistsError:
                return False
            return True

        with ThreadPoolExecutor(8) as pool:
            won = [number for number, wins in enumerate(pool.map(put, range(8))) if wins]
        assert len(won) == 1
        assert bytes(origin.read(f"{root}/once", 0, 1)) == b"%d" % won[0]

    def test_deleting_what_is_missing_is_no_error(self, origin: Origin, root: str) -> None:
        origin.put(f"{root}/here", b"x")
        origin.delete([f"{root}/here", f"{root}/missing"])
        with pytest.raises(ObjectNotFoundError):
            origin.head(f"{root}/here")

    def test_many_are_deleted_at_once(self, origin: Origin, root: str) -> None:
        keys = [f"{root}/many/{number:03}" for number in range(120)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda key: origin.put(key, b"x"), keys))
        assert sorted(info.key for info in _listed(origin, f"{root}/many")) == keys
        origin.delete(keys)
        assert _listed(origin, f"{root}/many") == []

    @pytest.mark.parametrize("name", ODD_NAMES)
    def test_odd_names_are_kept(self, origin: Origin, root: str, name: str) -> None:
        if name in self.unsupported_names:
            pytest.skip("the storage behind this origin has no such names")
        key = f"{root}/odd {name}/{name}"
        origin.put(key, name.encode())
        info = origin.head(key)
        assert info.key == key
        assert bytes(origin.read(key, 0, info.size, version=info.version)) == name.encode()
        assert [found.key for found in _listed(origin, root)] == [key]
        assert origin.list_level(root).prefixes == [f"{root}/odd {name}"]
        origin.delete([key])
        assert _listed(origin, root) == []

    # --- writers ----------------------------------------------------------------------------------

    def test_a_writer_publishes_at_its_end(self, origin: Origin, root: str) -> None:
        with origin.open_writer(f"{root}/streamed") as writer:
            assert writer.write(b"one ") == 4
            with pytest.raises(ObjectNotFoundError):
                origin.head(f"{root}/streamed")
            writer.write(memoryview(b"two"))
        assert bytes(origin.read(f"{root}/streamed", 0, 7)) == b"one two"

    def test_a_large_stream_arrives_in_order(self, origin: Origin, root: str) -> None:
        parts = [bytes([number]) * 1_500_000 for number in range(20)]
        with origin.open_writer(f"{root}/large") as writer:
            for part in parts:
                writer.write(part)
        data = b"".join(parts)
        info = origin.head(f"{root}/large")
        assert info.size == len(data)
        assert bytes(origin.read(info.key, 0, info.size, version=info.version)) == data

    def test_an_exception_publishes_nothing(self, origin: Origin, root: str) -> None:
        origin.put(f"{root}/object", b"old")

        class StopError(Exception):
            pass

        def fail_half_way() -> None:
            with origin.open_writer(f"{root}/object") as writer:
                writer.write(b"half")
                raise StopError

        with pytest.raises(StopError):
            fail_half_way()
        assert bytes(origin.read(f"{root}/object", 0, 3)) == b"old"

    def test_abort_and_close_may_come_twice(self, origin: Origin, root: str) -> None:
        writer = origin.open_writer(f"{root}/object")
        writer.write(b"x")
        writer.abort()
        writer.abort()
        with pytest.raises(ObjectNotFoundError):
            origin.head(f"{root}/object")
        writer = origin.open_writer(f"{root}/object")
        writer.close()
        writer.close()
        assert origin.head(f"{root}/object").size == 0

    # --- listings ---------------------------------------------------------------------------------

    def test_a_level_names_objects_and_prefixes(self, origin: Origin, root: str) -> None:
        for name in ("a", "b/c", "b/d/e", "b-x", "f/g"):
            origin.put(f"{root}/{name}", name.encode())
        listing = origin.list_level(root)
        assert {info.key: info.size for info in listing.objects} == {f"{root}/a": 1, f"{root}/b-x": 3}
        assert sorted(listing.prefixes) == [f"{root}/b", f"{root}/f"]
        deeper = origin.list_level(f"{root}/b/")
        assert [info.key for info in deeper.objects] == [f"{root}/b/c"]
        assert list(deeper.prefixes) == [f"{root}/b/d"]

    def test_everything_below_is_listed_with_what_head_says(self, origin: Origin, root: str) -> None:
        names = ["a", "b/c", "b/d/e", "b-x", "f/g"]
        for name in names:
            origin.put(f"{root}/{name}", name.encode())
        found = {info.key: info for info in _listed(origin, root)}
        assert sorted(found) == sorted(f"{root}/{name}" for name in names)
        for key, info in found.items():
            head = origin.head(key)
            assert (info.size, info.version) == (head.size, head.version)

    def test_a_prefix_is_a_directory_and_not_the_begin_of_a_name(self, origin: Origin, root: str) -> None:
        for name in ("data/x", "data-old/y", "data.txt"):
            origin.put(f"{root}/{name}", b"1")
        assert [info.key for info in _listed(origin, f"{root}/data")] == [f"{root}/data/x"]
        assert [info.key for info in origin.list_level(f"{root}/data").objects] == [f"{root}/data/x"]

    def test_where_nothing_is_the_listing_is_empty(self, origin: Origin, root: str) -> None:
        origin.put(f"{root}/elsewhere", b"")  # so that the bucket is there
        assert _listed(origin, f"{root}/nothing") == []
        listing = origin.list_level(f"{root}/nothing")
        assert (list(listing.objects), list(listing.prefixes)) == ([], [])

    def test_listings_go_over_many_pages(self, origin: Origin, root: str) -> None:
        keys = sorted(f"{root}/pages/{number:05}" for number in range(2_050))
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda key: origin.put(key, b"x"), keys))
        pages = list(origin.list_all(f"{root}/pages"))
        found = [info.key for page in pages for info in page]
        assert (found if self.ordered else sorted(found)) == keys
        assert max(len(page) for page in pages) <= 1_001  # bounded memory

    # --- how it is used ---------------------------------------------------------------------------

    def test_many_threads_read_at_once(self, origin: Origin, root: str) -> None:
        data = bytes(i * 7 % 256 for i in range(200_000))
        origin.put(f"{root}/shared", data)
        version = origin.head(f"{root}/shared").version

        def read(number: int) -> bool:
            start = number * 997 % 190_000
            return bytes(origin.read(f"{root}/shared", start, start + 5_000, version=version)) == data[start:][:5_000]

        with ThreadPoolExecutor(32) as pool:
            assert all(pool.map(read, range(200)))

    def test_a_copy_reads_the_same(self, origin: Origin, root: str) -> None:
        if not self.picklable:
            pytest.skip("lives in the memory of one process")
        origin.put(f"{root}/object", b"data")
        copy = pickle.loads(pickle.dumps(origin))
        assert copy.identity == origin.identity
        assert bytes(copy.read(f"{root}/object", 0, 4)) == b"data"

    def test_errors_are_ours_and_picklable(self, origin: Origin, root: str) -> None:
        with pytest.raises(MillraceError) as caught:
            origin.head(f"{root}/none")
        copy = pickle.loads(pickle.dumps(caught.value))
        assert type(copy) is type(caught.value)
        assert str(copy) == str(caught.value)
