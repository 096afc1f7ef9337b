"""Metadata where there is no disk to remember it on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from millrace.cache.asking import ASK_ORIGIN, Asking
from millrace.cache.listing_stream import Answer, Below, base_of, end_of
from millrace.origin import Listing, ObjectInfo, Origin


class NoMemory:
    """Stands in for `MetadataCache` where there is no disk: remembers nothing, asks the origin every time.

    What is written through it the others must forget all the same.
    """

    def __init__(self, asking: Callable[[], Asking] = lambda: ASK_ORIGIN) -> None:
        self._asking = asking

    def known(self, origin: Origin, key: str) -> ObjectInfo | None:
        return None

    def stat(self, origin: Origin, key: str) -> ObjectInfo:
        return origin.head(key)

    def stat_until(self, origin: Origin, key: str) -> tuple[ObjectInfo, float]:
        return origin.head(key), 0.0

    def forget(self, origin: Origin, *keys: str) -> None:
        self._asking().changed(origin, keys)

    def listing_root(self, origin: Origin, key: str) -> str | None:
        return None

    def forget_all(self) -> None:
        pass

    def remembered_directory(self, origin: Origin, prefix: str) -> bool:
        return False

    def below(self, origin: Origin, prefix: str, *, believe_nothing: bool = False) -> Below:
        for page in origin.list_pages(prefix):
            if page.objects:
                return "something"
            if page.is_directory:
                return "empty"
        return "nothing"

    def answers(self, origin: Origin, prefix: str, after: str) -> Iterator[Answer]:
        for page in origin.list_pages(prefix, after=after):
            through = (
                end_of(prefix) if page.last else page.objects[-1].key if page.objects else after or base_of(prefix)
            )
            yield Answer(page.objects, through, page.is_directory)

    def list_level(self, origin: Origin, prefix: str) -> Listing:
        return origin.list_level(prefix)

    def list_all(self, origin: Origin, prefix: str) -> Iterator[Sequence[ObjectInfo]]:
        return origin.list_all(prefix)
