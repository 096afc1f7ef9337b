"""The interface of a source of metadata, and the parts and pages of its listings.

A node requests metadata from the origin, or in a cluster first from the member that requests it for all nodes. Each
response has an age in seconds: the time since the request to the origin.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple, Protocol

from millrace.cache.metadata.page_map import Moment
from millrace.cache.metadata.pages import END, Space
from millrace.origin import Listing, ListingPage, ObjectInfo, Origin


class MetadataSource(Protocol):
    """Requests metadata. Thread-safe. Raises the errors of the `Origin` methods with the same names."""

    def head(self, origin: Origin, key: str) -> tuple[ObjectInfo, float]:
        """Describe an object."""
        ...

    def list_level(self, origin: Origin, prefix: str) -> tuple[Listing, float]:
        """List the direct children of a directory."""
        ...

    def list_pages(
        self, origin: Origin, prefix: str, *, after: str, settled: Callable[[str], ObjectInfo | None] | None = None
    ) -> Iterator[tuple[ListingPage, float]]:
        """List everything below a directory, lazily, page by page."""
        ...

    def changed(self, origin: Origin, keys: Sequence[str]) -> bool:
        """Invalidate older responses about keys that this node wrote or removed, on all nodes. Never raises.

        Returns whether another process of this node may have received an older response in the meantime.
        """
        ...


# --- listings -----------------------------------------------------------------------------------------

Below = Literal["something", "empty", "nothing"]
"""The content below a key: objects; nothing, but the key is a directory; or nothing, and it is not a directory."""


def base_of(prefix: str) -> str:
    """The text with which every key below a directory begins."""
    return prefix.rstrip("/") + "/"


def end_of(prefix: str) -> str:
    """A text that sorts after every key below a directory, and before every key that follows the directory."""
    return base_of(prefix) + END


class ListingPart(NamedTuple):
    """A part of a directory's listing: its objects after the end of the response before, up to the key `through`."""

    objects: Sequence[ObjectInfo]
    through: str
    is_directory: bool = False

    def within(self, prefix: str, after: str, space: Space) -> ListingPart:
        """The part of a response about a parent directory that is below `prefix` and after the key `after`."""
        first, last = space.position(after), space.position(end_of(prefix))

        def position(info: ObjectInfo) -> str:
            return space.position(info.key)

        # Responses are sorted. A comparison for each object would be most of the time of a listing.
        start, stop = bisect_right(self.objects, first, key=position), bisect_left(self.objects, last, key=position)
        through = max(first, min(space.position(self.through), last))
        is_directory = start > 0 and after == base_of(prefix) and self.objects[start - 1].key == after
        return ListingPart(self.objects[start:stop], space.key(through), is_directory)


class ListingStream:
    """The listing of `root` after the key `start`. Each page is one request.

    The caller sets `sent_at`: the moment before the last page was requested. `age` is the age of that page on arrival.
    """

    def __init__(
        self,
        source: MetadataSource,
        origin: Origin,
        root: str,
        start: str,
        settled: Callable[[str], ObjectInfo | None],
    ) -> None:
        self.root = root
        self.after = start
        self.sent_at: Moment | None = None
        self.age = 0.0
        self._pages = iter(source.list_pages(origin, root, after=start, settled=settled))

    def next_page(self) -> ListingPage:
        """The next page. `after` is then the key where it ends."""
        page, self.age = next(self._pages)
        if page.last:
            self.after = end_of(self.root)
        elif page.objects:
            self.after = page.objects[-1].key
        return page
