"""Listings made of index pages: one request for each directory, and one for each object, since a page tells no versions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from millrace.errors import ObjectNotFoundError, UsageError
from millrace.origin.protocol import Listing, ListingPage, ObjectInfo
from millrace.origin.side_by_side import side_by_side
from millrace.origin.web.index_pages import IndexPage

_PAGE = 64  # each object of a page costs a request, and who asks only whether there is something takes one page
_HEADS_AT_ONCE = 8
_DEEPEST = 64


@dataclass(frozen=True, slots=True)
class IndexListings:
    """Lists by two questions: `index` gives a directory's page (None: there is no such directory), `head` describes."""

    index: Callable[[str], IndexPage | None]
    head: Callable[[str], ObjectInfo]

    def level(self, prefix: str) -> Listing:
        """What lies directly below `prefix`."""
        page = self.index(prefix)
        if page is None:
            return Listing(objects=[], prefixes=[])
        base = prefix.rstrip("/")
        objects = self._heads([f"{base}/{name}" for name in page.files])
        return Listing(objects, [f"{base}/{name}" for name in page.directories], is_directory=True)

    def pages(self, prefix: str, after: str) -> Iterator[ListingPage]:
        """Everything below `prefix` that follows `after`, in the order of the keys."""
        prefix = prefix.rstrip("/")
        top = self.index(prefix)
        objects: list[ObjectInfo] = []
        for info in self._walk(prefix, top, after, 0) if top is not None else ():
            objects.append(info)
            if len(objects) == _PAGE:
                yield ListingPage(objects, False, True)
                objects = []
        yield ListingPage(objects, True, top is not None)

    def _walk(self, prefix: str, page: IndexPage | None, after: str, depth: int) -> Iterator[ObjectInfo]:
        if page is None:
            return
        if depth > _DEEPEST:
            raise UsageError(f"{prefix} has directories in a circle", next_step="list a directory below it")
        files: list[str] = []
        for name in sorted([*page.files, *(f"{name}/" for name in page.directories)]):
            key, is_directory = f"{prefix}/{name}", name.endswith("/")
            if not is_directory and key > after:
                files.append(key)
            if files and (is_directory or len(files) == _PAGE):
                yield from self._heads(files)
                files = []
            if is_directory and (key > after or after.startswith(key)):
                yield from self._walk(key[:-1], self.index(key), after, depth + 1)
        yield from self._heads(files)

    def _heads(self, keys: Sequence[str]) -> list[ObjectInfo]:
        """What `head` says of each; without links that lead nowhere."""
        found = side_by_side(self._head_if_there, keys, _HEADS_AT_ONCE, "millrace-heads")
        return [info for info in found if info is not None]

    def _head_if_there(self, key: str) -> ObjectInfo | None:
        try:
            return self.head(key)
        except ObjectNotFoundError:
            return None
