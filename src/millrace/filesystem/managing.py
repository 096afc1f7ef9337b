"""The half of the file system for whoever keeps a node's cache: fill it, see what is in it, and decide what stays.

What only loads and prefetches need is imported by them: Ray starts new workers in every epoch, and those that only read
should not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from millrace.cache import catalog
from millrace.cache.catalog import CachedObject
from millrace.cache.rules import Place
from millrace.config import CacheOptions, parse_amount, parse_seconds
from millrace.errors import UsageError
from millrace.filesystem.listing import ListingFileSystem
from millrace.filesystem.selection import is_pattern
from millrace.origin import Readable

if TYPE_CHECKING:
    from millrace.filesystem.loading import LoadProgress
    from millrace.filesystem.prefetching import Prefetch


class CacheManagement(ListingFileSystem):
    """What this node's cache holds and keeps. Every method is thread- and process-safe.

    `urls` is one URL or several. A URL is an object or a prefix, which means everything below it as a directory; where it
    says so also a pattern. Raises `StorageError` when there is no cache directory that can be used.
    """

    _options: CacheOptions

    @property
    def origin_identity(self) -> str:
        """Names the storage behind, as `CachedObject.origin` does."""
        return self._origin.identity

    def as_origin(self) -> Readable:
        """The cache as something to read from, for `CheckpointReader(url, origin=...)`: on many nodes that restore one
        checkpoint, each byte of it comes from the storage once. Keys are as in the storage: `bucket/path`.
        """
        from millrace.filesystem.cached_origin import CachedOrigin

        return CachedOrigin(self)

    def load(
        self,
        urls: str | Iterable[str],
        *,
        progress: Callable[[LoadProgress], None] | None = None,
        verify: bool = False,
    ) -> LoadProgress:
        """Bring everything that `urls` name (objects, prefixes, patterns) into the cache; returns when it is here.

        In a cluster each node loads its share, with its own access to the origin, and the progress is the sum over them; a
        node alone loads everything, and so does this machine where the cluster has no node. In a Ray job, nodes are started
        on all Ray nodes first.

        What is here already is not fetched again, so a load that was broken off, by whatever, goes on where it was when it
        is called again. `verify` checks every cached byte, read from the disk, against its checksum, and fetches bad blocks
        anew. `progress` is called about twice a second, and at the end, in the calling thread.

        Up to 32 requests at a time, in up to 256 MiB of memory. Raises `ObjectNotFoundError` (before anything is fetched,
        when a URL names nothing), `DeniedError`, `OriginUnavailableError`, and `DiskFullError` when not everything fits. A
        `KeyboardInterrupt` ends it, on all nodes; requests under way come to their end in the background.
        """
        if self._options.members != "none":
            from millrace.filesystem.cluster_loading import load_on_own_cluster

            done = load_on_own_cluster(self, self._options, urls, progress=progress, verify=verify)
            if done is not None:
                return done
        from millrace.filesystem.loading import load

        return load(self, urls, progress=progress, verify=verify)

    def prefetch(
        self,
        paths: Iterable[str],
        *,
        window: int | str = "1GB",
        follow_opens: bool = True,
        on_error: Callable[[str, Exception], None] | None = None,
    ) -> Prefetch:
        """Fetch ahead of a reader who will open `paths` in this order, at most `window` bytes. See `Prefetch`."""
        from millrace.filesystem.prefetching import Prefetch

        return Prefetch(self, paths, window=window, follow_opens=follow_opens, on_error=on_error)

    def cached(self, prefix: str | None = None) -> Iterator[CachedObject]:
        """Every object of which something is in this node's cache, at or below `prefix`; of any origin without it."""
        return catalog.cached_objects(self.node, None if prefix is None else self._place(prefix))

    def free(self, urls: str | Iterable[str]) -> int:
        """Drop what lies at or below `urls` from this node's cache, except for what is pinned; returns the bytes.

        Readers that have it open read on; the disk gets its space back when they have ended.
        """
        return sum(catalog.free(self.node, self._place(url)).nbytes for url in _several(urls))

    def pin(self, urls: str | Iterable[str]) -> None:
        """Keep what lies at or below `urls` in this node's cache, whether it is there already or comes later.

        Nothing is fetched. What is pinned is never evicted and never freed; an object that changes at its origin is dropped.
        """
        for url in _several(urls):
            catalog.pin(self.node, self._place(url))

    def unpin(self, urls: str | Iterable[str]) -> None:
        """Take back every pin at or below `urls`. Raises `UsageError` when there is none."""
        for url in _several(urls):
            place = self._place(url)
            if not catalog.unpin(self.node, place):
                above = catalog.rules(self.node).rule_for(*place).pinned
                raise UsageError(
                    f"{catalog.url_of(*place)} has no pin of its own" + (", a prefix above it has" if above else ""),
                    next_step="'millrace status' shows every pin",
                )

    def limit(self, prefix: str, *, quota: int | str | None = None, ttl: float | str | None = None) -> None:
        """Set what `prefix` may take of this node's cache, in place of what was set before.

        `quota`: at most so many bytes, or such a share of the disks (`"10GB"`, `"20%"`). `ttl`: gone when nobody used it for
        so long (`"1d"`, seconds). None is no limit. Raises `ConfigurationError`.
        """
        catalog.limit(
            self.node,
            self._place(prefix),
            quota=None if quota is None else parse_amount(quota, option="quota"),
            ttl_seconds=None if ttl is None else parse_seconds(ttl, option="ttl"),
        )

    def resize(self, capacity: int | str | None) -> None:
        """Set the capacity of each cache directory, for every process of this node at once, and for later ones.

        It holds in place of the option `capacity` until it is given back with None. Raises `ConfigurationError`.
        """
        catalog.resize(self.node, None if capacity is None else parse_amount(capacity, option="capacity"))

    def _place(self, url: str) -> Place:
        """Where `url` points, for rules and lists of what is cached; these take no patterns."""
        key = self.key_of(url)
        if is_pattern(key, self._origin.identity, wildcards="*?"):
            raise UsageError(f"{url!r} is a pattern", next_step="name an object or a prefix")
        if not key.strip("/"):  # every bucket of the storage: what nobody means
            raise UsageError(f"{url!r} names no object and no prefix", next_step="name what is meant")
        return self._origin.identity, key.rstrip("/")


def _several(urls: str | Iterable[str]) -> list[str]:
    return [urls] if isinstance(urls, str) else list(urls)
