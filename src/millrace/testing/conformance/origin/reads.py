"""Objects, ranges, versions and errors."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest

from millrace.errors import MillraceError, ObjectChangedError, ObjectNotFoundError, UsageError
from millrace.origin import Listable, Origin, Readable, Writable
from millrace.testing.conformance.origin.base import Contents, OriginSuite


class Reads(OriginSuite):
    """Requirements on every origin."""

    def test_origin_implements_all_protocols(self, origin: Origin, contents: Contents) -> None:
        assert isinstance(origin, Readable)
        assert isinstance(origin, Listable)
        assert isinstance(origin, Writable)

    def test_identity_is_stable_and_contains_no_secret(self, origin: Origin, contents: Contents) -> None:
        assert origin.identity
        assert origin.identity == origin.identity
        assert "secret" not in origin.identity.lower()

    def test_texts_of_origin_contain_no_secret(self, origin: Origin, root: str) -> None:
        with pytest.raises(MillraceError) as caught:
            origin.head(f"{root}/none")
        texts = [origin.identity, repr(origin), str(origin), str(caught.value), repr(caught.value)]
        assert [text for text in texts for secret in self.secrets if secret in text] == []

    @pytest.mark.parametrize("size", [0, 1, 65_536, 3 << 20])
    def test_read_returns_the_bytes_that_were_put(
        self, origin: Origin, contents: Contents, root: str, size: int
    ) -> None:
        data = bytes(range(256)) * (size // 256 + 1)
        data = data[:size]
        contents.put(f"{root}/object", data)
        info = origin.head(f"{root}/object")
        assert (info.key, info.size) == (f"{root}/object", size)
        assert info.version
        assert info.modified > 1_500_000_000
        assert bytes(origin.read(info.key, 0, size, version=info.version)) == data

    @pytest.mark.parametrize(("start", "stop"), [(0, 1), (999, 1000), (1, 999), (500, 500), (0, 1000)])
    def test_read_of_range_is_half_open(
        self, origin: Origin, contents: Contents, root: str, start: int, stop: int
    ) -> None:
        data = bytes(i % 251 for i in range(1000))
        contents.put(f"{root}/object", data)
        assert bytes(origin.read(f"{root}/object", start, stop)) == data[start:stop]

    @pytest.mark.parametrize(("start", "stop"), [(0, 11), (9, 12), (10, 11), (50, 60)])
    def test_read_past_the_end_raises(
        self, origin: Origin, contents: Contents, root: str, start: int, stop: int
    ) -> None:
        contents.put(f"{root}/object", b"0123456789")
        with pytest.raises(UsageError):
            origin.read(f"{root}/object", start, stop)

    def test_missing_object_raises_not_found(self, origin: Origin, contents: Contents, root: str) -> None:
        for call in (lambda: origin.head(f"{root}/none"), lambda: origin.read(f"{root}/none", 0, 1)):
            with pytest.raises(ObjectNotFoundError) as caught:
                call()
            assert isinstance(caught.value, FileNotFoundError)
            assert "none" in str(caught.value)

    def test_replaced_object_gets_another_version_and_all_new_bytes(
        self, origin: Origin, contents: Contents, root: str
    ) -> None:
        contents.put(f"{root}/object", b"first")
        first = origin.head(f"{root}/object")
        contents.put(f"{root}/object", b"the second")
        second = origin.head(f"{root}/object")
        assert first.version != second.version
        assert bytes(origin.read(second.key, 0, second.size, version=second.version)) == b"the second"
        with pytest.raises(ObjectChangedError):
            origin.read(first.key, 0, first.size, version=first.version)

    def test_replaced_object_of_same_size_gets_another_version(
        self, origin: Origin, contents: Contents, root: str
    ) -> None:
        if not self.exact_versions:
            pytest.skip("its versions do not distinguish writes of the same size at nearly the same time")
        versions = set()
        for data in (b"aaaa", b"bbbb", b"cccc"):
            contents.put(f"{root}/object", data)
            versions.add(origin.head(f"{root}/object").version)
        assert len(versions) == 3

    def test_read_of_removed_version_raises(self, origin: Origin, contents: Contents, root: str) -> None:
        contents.put(f"{root}/object", b"here")
        info = origin.head(f"{root}/object")
        contents.delete([info.key])
        with pytest.raises((ObjectNotFoundError, ObjectChangedError)):
            origin.read(info.key, 0, 4, version=info.version)

    def test_reads_of_many_threads_return_the_bytes(self, origin: Origin, contents: Contents, root: str) -> None:
        data = bytes(i * 7 % 256 for i in range(200_000))
        contents.put(f"{root}/shared", data)
        version = origin.head(f"{root}/shared").version

        def read(number: int) -> bool:
            start = number * 997 % 190_000
            return bytes(origin.read(f"{root}/shared", start, start + 5_000, version=version)) == data[start:][:5_000]

        with ThreadPoolExecutor(32) as pool:
            assert all(pool.map(read, range(200)))

    def test_errors_are_millrace_errors_and_picklable(self, origin: Origin, contents: Contents, root: str) -> None:
        with pytest.raises(MillraceError) as caught:
            origin.head(f"{root}/none")
        copy = pickle.loads(pickle.dumps(caught.value))
        assert type(copy) is type(caught.value)
        assert str(copy) == str(caught.value)
