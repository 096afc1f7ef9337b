"""The sources of metadata, and the time for which a response is fresh.

A node requests metadata from the origin, or in a cluster first from the member that requests it for all nodes. Each
response has an age in seconds: the time since the request to the origin.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple, Protocol

from millrace.cache.metadata.pages import END, Space
from millrace.origin import Listing, ListingPage, ObjectInfo, Origin

# --- freshness ----------------------------------------------------------------------------------------


class Moment(NamedTuple):
    """The moment of a request to the origin: the time, and the number of the last change before it."""

    sent_at: float
    changes: int

    def earlier(self, seconds: float) -> Moment:
        """The moment of a response that had this age when it arrived."""
        return self if not seconds else Moment(self.sent_at - seconds, self.changes)


class Freshness(NamedTuple):
    """For how long cached metadata is used without a new request.

    `max_age` is in seconds: 0 never uses cached metadata, `inf` never requests it again. The object is false for 0.
    Metadata that was requested before the time `since` is not used.
    """

    max_age: float
    since: float = -math.inf

    def __bool__(self) -> bool:
        return self.max_age > 0

    def earliest(self, now: float) -> float:
        """The earliest time of a request whose response is fresh now."""
        return max(now - self.max_age, self.since)

    def latest(self, now: float) -> float:
        """The latest time of a request whose response is fresh now.

        A request in the future was sent before the clock was set back. Its age is not known, so it is stale.
        """
        return math.inf if self.max_age == math.inf else now

    def is_fresh(self, sent_at: float, now: float) -> bool:
        """Whether the response to a request at time `sent_at` is fresh at time `now`."""
        return self.max_age > 0 and self.earliest(now) <= sent_at <= self.latest(now)

    def stale_from(self, sent_at: float) -> float:
        """The time from which the response to a request at time `sent_at` is stale."""
        return sent_at + self.max_age


ALWAYS_FRESH = Freshness(math.inf)
"""For metadata that cannot change, such as that of a file in a commit."""

# --- sources ------------------------------------------------------------------------------------------


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


class OriginMetadata:
    """The `MetadataSource` of a node without a cluster: every request goes to the origin."""

    def head(self, origin: Origin, key: str) -> tuple[ObjectInfo, float]:
        return origin.head(key), 0.0

    def list_level(self, origin: Origin, prefix: str) -> tuple[Listing, float]:
        return origin.list_level(prefix), 0.0

    def list_pages(
        self, origin: Origin, prefix: str, *, after: str, settled: Callable[[str], ObjectInfo | None] | None = None
    ) -> Iterator[tuple[ListingPage, float]]:
        return ((page, 0.0) for page in origin.list_pages(prefix, after=after, settled=settled))

    def changed(self, origin: Origin, keys: Sequence[str]) -> bool:
        return False  # a single node


ORIGIN_METADATA: MetadataSource = OriginMetadata()

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


# --- without a disk -----------------------------------------------------------------------------------


class UncachedMetadata:
    """Replaces `MetadataCache` on a node without a usable disk: it stores nothing and requests everything.

    Writes through it still invalidate the metadata that other nodes have cached.
    """

    def __init__(self, source: Callable[[], MetadataSource] = lambda: ORIGIN_METADATA) -> None:
        self._source = source

    def known(self, origin: Origin, key: str) -> ObjectInfo | None:
        return None

    def stat(self, origin: Origin, key: str) -> ObjectInfo:
        return origin.head(key)

    def stat_until(self, origin: Origin, key: str) -> tuple[ObjectInfo, float]:
        return origin.head(key), 0.0

    def invalidate(self, origin: Origin, *keys: str) -> None:
        self._source().changed(origin, keys)

    def drop_outdated(self, origin: Origin, key: str) -> None:
        self.invalidate(origin, key)

    def listing_root(self, origin: Origin, key: str) -> str | None:
        return None

    def invalidate_all(self) -> None:
        pass

    def remembered_directory(self, origin: Origin, prefix: str) -> bool:
        return False

    def below(self, origin: Origin, prefix: str, *, accept_empty: bool = False) -> Below:
        for page in origin.list_pages(prefix):
            if page.objects:
                return "something"
            if page.is_directory:
                return "empty"
        return "nothing"

    def parts(self, origin: Origin, prefix: str, after: str) -> Iterator[ListingPart]:
        for page in origin.list_pages(prefix, after=after):
            through = (
                end_of(prefix) if page.last else page.objects[-1].key if page.objects else after or base_of(prefix)
            )
            yield ListingPart(page.objects, through, page.is_directory)

    def list_level(self, origin: Origin, prefix: str) -> Listing:
        return origin.list_level(prefix)

    def list_all(self, origin: Origin, prefix: str) -> Iterator[Sequence[ObjectInfo]]:
        return origin.list_all(prefix)
