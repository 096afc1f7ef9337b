"""The cache management of the file system: fill the cache, list it, and set the objects to keep.

Modules of loads and prefetches are imported at their first use: Ray starts new workers in every epoch, and workers that only
read must not wait for these imports.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from millrace.cache import catalog
from millrace.cache.catalog import CachedObject
from millrace.cache.eviction.retention import Place
from millrace.cache.eviction.usage import url_of
from millrace.config import CacheOptions, parse_amount, parse_seconds
from millrace.errors import UsageError
from millrace.filesystem.listing import ListingFileSystem
from millrace.filesystem.opens import is_pattern, text_of
from millrace.origin import Readable
from millrace.runtime.forks import importing

if TYPE_CHECKING:
    from millrace.filesystem.loading import LoadProgress
    from millrace.filesystem.prefetching import Prefetch


class CacheManagement(ListingFileSystem):
    """Fills and manages this node's cache. Every method is thread- and process-safe.

    `urls` is one URL or several. A URL is an object or a prefix, which means everything below it as a directory; `load` also
    accepts patterns. Raises `StorageError` if no cache directory can be used.
    """

    _options: CacheOptions

    @property
    def origin_identity(self) -> str:
        """The storage of this file system, in the form of `CachedObject.origin`."""
        return self._origin.identity

    def as_origin(self) -> Readable:
        """The cache in the role of an origin, for `CheckpointReader(url, origin=...)`.

        When many nodes restore one checkpoint, each byte comes from the storage once. Keys are those of the storage:
        `bucket/path`.
        """
        with importing():
            from millrace.filesystem.cached_origin import CachedOrigin

        return CachedOrigin(self)

    def load(
        self,
        urls: str | Iterable[str],
        *,
        progress: Callable[[LoadProgress], None] | None = None,
        verify: bool = False,
    ) -> LoadProgress:
        """Load everything that `urls` name (objects, prefixes, patterns) into the cache; returns when it is cached.

        In a cluster each node loads its share with its own access to the origin, and the progress is the sum over the nodes.
        Without a cluster, or in one without nodes, this machine loads everything. In a Ray job, nodes are first started on
        all Ray nodes.

        Cached blocks are not fetched again, so an interrupted load continues when it is called again. `verify` checks every
        cached byte, read from the disk, against its checksum, and fetches bad blocks again. `progress` is called about twice
        a second, and at the end, in the calling thread.

        Up to 32 concurrent requests, in up to 256 MiB of memory. Raises `ObjectNotFoundError` (before anything is fetched,
        if a URL has no object), `DeniedError`, `OriginUnavailableError`, and `DiskFullError` if not everything fits. A
        `KeyboardInterrupt` ends the load on all nodes; requests in progress end in the background.
        """
        chosen = _several(urls)
        if chosen and self._options.members != "none":
            with importing():
                from millrace.filesystem.cluster_loading import load_on_own_cluster

            done = load_on_own_cluster(self, self._options, chosen, progress=progress, verify=verify)
            if done is not None:
                return done
        with importing():
            from millrace.filesystem.loading import load

        return load(self, chosen, progress=progress, verify=verify)

    def prefetch(
        self,
        paths: Iterable[str],
        *,
        window: int | str = "1GB",
        follow_opens: bool = True,
        on_error: Callable[[str, Exception], None] | None = None,
    ) -> Prefetch:
        """Fetch ahead of a reader that opens `paths` in this order, at most `window` bytes. See `Prefetch`."""
        with importing():
            from millrace.filesystem.prefetching import Prefetch

        return Prefetch(self, paths, window=window, follow_opens=follow_opens, on_error=on_error)

    @contextmanager
    def local_folder(
        self,
        url: str,
        *,
        directory: str | os.PathLike[str] | None = None,
        copy: bool = False,
        progress: Callable[[LoadProgress], None] | None = None,
    ) -> Iterator[str]:
        """A directory of read-only files with the objects of `url`, for a `with` block; yields its path.

        `url` is an object, a prefix or a pattern, as for `load`, which first loads the objects that are not cached on this
        node. Every file has one version of its object, complete and verified. Files above 1 MiB are hard links to the
        cache's own, and take no more space; smaller ones are copies. Eviction, overwrites and removals do not change them.
        The objects stay in the cache while the directory exists, and count to its capacity.

        The directory is removed at the end, or, if the process was killed, by the next process that uses the cache. With
        `directory`, a new or empty one on the file system of the cache, it stays until it is deleted. `copy` copies every
        file, so that it may be on any file system.

        Raises the errors of `load`, `UsageError` for names that are not file names and a `directory` that cannot be used,
        and `StorageError` for a file system without hard links.
        """
        with importing():
            from millrace.filesystem.folders import LocalFolder

        with LocalFolder(self, text_of(url), directory=directory, copy=copy, progress=progress) as folder:
            yield folder.path

    def cached(self, prefix: str | None = None) -> Iterator[CachedObject]:
        """Every object with cached bytes on this node, at or below `prefix`; without it, of any origin."""
        return catalog.cached_objects(self.node, None if prefix is None else self._place(prefix))

    def free(self, urls: str | Iterable[str]) -> int:
        """Remove the objects at or below `urls` from this node's cache, except pinned ones; returns the freed bytes.

        Open readers continue to read; the disk space is free when they have ended.
        """
        return sum(catalog.free(self.node, place).nbytes for place in [self._place(url) for url in _several(urls)])

    def pin(self, urls: str | Iterable[str]) -> None:
        """Pin the objects at or below `urls` in this node's cache, including those that are cached later.

        Nothing is fetched. Pinned objects are never evicted or freed; an object that changes at its origin is removed.
        """
        for place in [self._valid_place(url) for url in _several(urls)]:  # all are checked before the first is pinned
            catalog.pin(self.node, place)

    def unpin(self, urls: str | Iterable[str]) -> None:
        """Remove every pin at or below `urls`. Raises `UsageError`, before any change, for a URL without one."""
        places = [self._place(url) for url in _several(urls)]
        catalog.unpin(self.node, [(url_of(*place), [place]) for place in places])

    def limit(self, prefix: str, *, quota: int | str | None = None, ttl: float | str | None = None) -> None:
        """Set the limits of `prefix` in this node's cache. Replaces both.

        `quota`: the largest number of bytes, or share of the disks (`"10GB"`, `"20%"`). `ttl`: objects that were not used
        for this time are removed (`"1d"`, seconds). None means no limit. Raises `ConfigurationError`.
        """
        catalog.limit(
            self.node,
            self._valid_place(prefix),
            quota=None if quota is None else parse_amount(quota, option="quota"),
            ttl_seconds=None if ttl is None else parse_seconds(ttl, option="ttl"),
        )

    def resize(self, capacity: int | str | None) -> None:
        """Set the capacity of each cache directory, for every process of this node at once, and for later ones.

        It overrides the option `capacity` until `resize(None)`. Raises `ConfigurationError`.
        """
        catalog.resize(self.node, None if capacity is None else parse_amount(capacity, option="capacity"))

    def _valid_place(self, url: str) -> Place:
        """As `_place`. Raises `ObjectNotFoundError` if no object and no prefix can have this name."""
        with importing():
            from millrace.origin.store_access import OBJECT_STORES, check_name

        identity, key = self._place(url)
        scheme = identity.partition("+")[0]
        if scheme in OBJECT_STORES:
            check_name(scheme, key)
        return identity, key

    def _place(self, url: str) -> Place:
        """Origin and key of `url`, for rules and lists. Raises `UsageError` for a pattern."""
        key = self.key_of(url)
        if is_pattern(key, self._origin.identity, wildcards="*?"):
            raise UsageError(f"{url!r} is a pattern", next_step="name an object or a prefix")
        if not key.strip("/"):  # every bucket of the storage is never intended
            raise UsageError(f"{url!r} names no object and no prefix", next_step="write scheme://bucket/prefix")
        return self._origin.identity, key.rstrip("/")


def _several(urls: Any) -> list[str]:
    is_one = isinstance(urls, str | bytes | os.PathLike) or not isinstance(urls, Iterable)
    return [text_of(url) for url in ([urls] if is_one else urls)]
