"""Listings from the index pages of web servers: one request for each directory, and one for each object's version."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from urllib.parse import urljoin, urlsplit

from millrace.errors import ObjectNotFoundError, UsageError
from millrace.origin.base import pages_of
from millrace.origin.protocol import Listing, ListingPage, ObjectInfo
from millrace.origin.side_by_side import side_by_side
from millrace.origin.web.addresses import readable, same_server

_PAGE = 64  # each object of a page costs a request, and a caller that only checks for existence takes one page
_HEADS_AT_ONCE = 8
_DEEPEST = 64


@dataclass(frozen=True, slots=True)
class IndexPage:
    """The content of a directory, as the last parts of keys, sorted and without repeats."""

    files: Sequence[str]
    directories: Sequence[str]


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.targets += [value.strip() for name, value in attrs if name == "href" and value]


def parse_index(url: str, text: str) -> IndexPage:
    """The links of the page at `url` (with its slash) to the files and directories directly below it. Pure.

    Links to other places (the parent, other servers, deeper directories) and with a query (sort orders) are ignored.
    """
    links = _Links()
    links.feed(text)
    links.close()
    base = urlsplit(url).path
    files, directories = set[str](), set[str]()
    for target in links.targets:
        try:
            full = urljoin(url, target).partition("#")[0]
            parts = urlsplit(full)
            here = same_server(full, url) and parts.path.startswith(base) and not parts.query
        except ValueError:  # an invalid link
            continue
        name, slash, deeper = parts.path[len(base) :].partition("/")
        name = readable(name)
        if here and name and not deeper and name not in (".", ".."):
            (directories if slash else files).add(name)
    return IndexPage(sorted(files), sorted(directories))


@dataclass(frozen=True, slots=True)
class IndexListings:
    """Lists with two functions: `index` returns a directory's page (None: no such directory), `head` describes an object."""

    index: Callable[[str], IndexPage | None]
    head: Callable[[str], ObjectInfo]

    def level(self, prefix: str) -> Listing:
        """The content of one directory."""
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
        yield from pages_of(self._walk(prefix, top, after, 0), _PAGE, is_directory=top is not None)

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
        """The descriptions of the objects; broken links are left out."""
        found = side_by_side(self._head_if_exists, keys, _HEADS_AT_ONCE, "millrace-heads")
        return [info for info in found if info is not None]

    def _head_if_exists(self, key: str) -> ObjectInfo | None:
        try:
            return self.head(key)
        except ObjectNotFoundError:
            return None
