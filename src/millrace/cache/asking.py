"""Whom a node asks about keys: the origin, or in a cluster first the member that asks on behalf of all.

Every answer comes with its age in seconds: how long before the question the origin may have said so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from millrace.origin import Listing, ListingPage, ObjectInfo, Origin


class Asking(Protocol):
    """Asks about keys. Thread-safe. Raises what the methods of `Origin` of the same names raise."""

    def head(self, origin: Origin, key: str) -> tuple[ObjectInfo, float]:
        """Describe an object."""
        ...

    def list_level(self, origin: Origin, prefix: str) -> tuple[Listing, float]:
        """List what lies directly below a directory."""
        ...

    def list_pages(
        self, origin: Origin, prefix: str, *, after: str, settled: Callable[[str], ObjectInfo | None] | None = None
    ) -> Iterator[tuple[ListingPage, float]]:
        """List everything below a directory, lazily, page by page."""
        ...

    def changed(self, origin: Origin, keys: Sequence[str]) -> bool:
        """Keys were written or removed through this node: nobody else may believe an older answer any more. Never raises.

        Gives whether somebody who asked others meanwhile, on this node, may have heard such an answer.
        """
        ...


class AskOrigin:
    """Asks nobody but the origin."""

    def head(self, origin: Origin, key: str) -> tuple[ObjectInfo, float]:
        return origin.head(key), 0.0

    def list_level(self, origin: Origin, prefix: str) -> tuple[Listing, float]:
        return origin.list_level(prefix), 0.0

    def list_pages(
        self, origin: Origin, prefix: str, *, after: str, settled: Callable[[str], ObjectInfo | None] | None = None
    ) -> Iterator[tuple[ListingPage, float]]:
        return ((page, 0.0) for page in origin.list_pages(prefix, after=after, settled=settled))

    def changed(self, origin: Origin, keys: Sequence[str]) -> bool:
        return False  # nobody else has to know


ASK_ORIGIN: Asking = AskOrigin()
