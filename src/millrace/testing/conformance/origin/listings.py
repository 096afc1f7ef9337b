"""Listings of one level, and of all objects below a prefix in pages."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from millrace.errors import UsageError
from millrace.origin import Origin
from millrace.testing.conformance.origin.base import Contents, OriginSuite, listed


class Listings(OriginSuite):
    """Requirements on listings. An origin without listings must raise `UsageError`."""

    def test_listing_of_origin_without_listings_raises(self, origin: Origin, contents: Contents, root: str) -> None:
        if self.lists:
            pytest.skip("this origin can list")
        contents.put(f"{root}/object", b"x")
        for call in (
            lambda: origin.list_level(root),
            lambda: list(origin.list_all(root)),
            lambda: list(origin.list_pages(root)),
        ):
            with pytest.raises(UsageError) as caught:
                call()
            assert caught.value.next_step

    def test_list_level_returns_objects_and_prefixes(self, listable: Origin, contents: Contents, root: str) -> None:
        for name in ("a", "b/c", "b/d/e", "b-x", "f/g"):
            contents.put(f"{root}/{name}", name.encode())
        listing = listable.list_level(root)
        assert sorted(info.key for info in listing.objects) == [f"{root}/a", f"{root}/b-x"]
        if self.lists_versions:
            assert [info.size for info in sorted(listing.objects, key=lambda info: info.key)] == [1, 3]
        assert sorted(listing.prefixes) == [f"{root}/b", f"{root}/f"]
        deeper = listable.list_level(f"{root}/b/")
        assert [info.key for info in deeper.objects] == [f"{root}/b/c"]
        assert list(deeper.prefixes) == [f"{root}/b/d"]

    def test_list_all_returns_sizes_and_versions_of_head(self, listable: Origin, contents: Contents, root: str) -> None:
        names = ["a", "b/c", "b/d/e", "b-x", "f/g"]
        for name in names:
            contents.put(f"{root}/{name}", name.encode())
        found = {info.key: info for info in listed(listable, root)}
        assert sorted(found) == sorted(f"{root}/{name}" for name in names)
        for key, info in found.items():
            head = listable.head(key)
            if self.lists_versions:
                assert (info.size, info.version) == (head.size, head.version)

    def test_listing_of_prefix_excludes_names_that_only_begin_with_it(
        self, listable: Origin, contents: Contents, root: str
    ) -> None:
        for name in ("data/x", "data-old/y", "data.txt"):
            contents.put(f"{root}/{name}", b"1")
        assert [info.key for info in listed(listable, f"{root}/data")] == [f"{root}/data/x"]
        assert [info.key for info in listable.list_level(f"{root}/data").objects] == [f"{root}/data/x"]

    def test_listing_of_missing_prefix_is_empty(self, listable: Origin, contents: Contents, root: str) -> None:
        contents.put(f"{root}/elsewhere", b"")  # so that the bucket is there
        assert listed(listable, f"{root}/nothing") == []
        listing = listable.list_level(f"{root}/nothing")
        assert (list(listing.objects), list(listing.prefixes)) == ([], [])

    def test_list_all_of_many_objects_returns_bounded_pages(
        self, listable: Origin, contents: Contents, root: str
    ) -> None:
        keys = sorted(f"{root}/pages/{number:05}" for number in range(self.largest_listing))
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda key: contents.put(key, b"x"), keys))
        pages = list(listable.list_all(f"{root}/pages"))
        found = [info.key for page in pages for info in page]
        assert (found if self.ordered else sorted(found)) == keys
        assert max(len(page) for page in pages) <= 1_001  # bounded memory
