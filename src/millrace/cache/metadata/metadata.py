"""Descriptions of keys, cached in the index for as long as the option `consistency` allows.

A listing is stored in pages (`page_map.py`), each with the time of its request. Expired metadata is requested again
by page: one request for a thousand keys, for a listing or for a single object, one at a time on a node. A key
that no listing has named is requested alone. Figures and reasons: docs/design/0006-metadata.md.

At the end are the two simple cases: requests without a cluster (`OriginMetadata`), and a node without a usable disk
(`UncachedMetadata`).
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import TypeVar

from millrace.cache.metadata.page_map import ALWAYS_FRESH, Freshness, Moment, PageMap, Stretch
from millrace.cache.metadata.pages import Description, Page, Space, Transaction, encode, level_space
from millrace.cache.metadata.sources import (
    Below,
    ListingPart,
    ListingStream,
    MetadataSource,
    base_of,
    end_of,
)
from millrace.errors import DeniedError, DiskFullError, MillraceError, StorageError, UsageError
from millrace.origin import Listing, ListingPage, ObjectInfo, Origin
from millrace.runtime.failures import FailingDiskError
from millrace.runtime.locks import NamedLocks
from millrace.store.environment import DamagedIndexError

_log = logging.getLogger("millrace.cache")

_T = TypeVar("_T")

PAGE_OBJECTS = 1000

_LEVEL_PAGES = 10
"""A level is derived from at most this many recursive pages, and requested again as a whole up to that length."""

_PAGES_AHEAD = 8
"""Expired pages that are requested after one that a reader needs, when it has reached that page from the page before."""

_NOWHERE = Space(b"nowhere!")
_CLEAR_ATTEMPTS, _CLEAR_PAUSE_SECONDS = 50, 0.01


class MetadataCache:
    """Serves `stat` and listings from the index while they are fresh, else from the origin.

    `max_age_seconds` is 0 (request every time), `inf` (never request twice) or a time. Metadata that was requested before
    the time `since` is not used. Metadata that the origin declares immutable is never requested twice. `on_changed` is
    called with the old description of an object that has changed or was removed. `ahead` runs requests for pages that
    a reader needs soon, in other threads. `expire_elsewhere` is called after a write: it expires the metadata on the
    other disks of this node, which processes use that cannot use this one, and with `True` also in a new index on this disk.
    Thread- and process-safe. A disk error disables caching, not the request.
    """

    def __init__(
        self,
        pages: PageMap,
        locks: NamedLocks,
        *,
        max_age_seconds: float,
        since: float = -math.inf,
        on_changed: Callable[[Origin, ObjectInfo], None],
        report: Callable[[StorageError], None],
        clock: Callable[[], float] = time.time,
        source: MetadataSource | None = None,
        ahead: Executor | None = None,
        expire_elsewhere: Callable[[bool], None] = lambda own: None,
    ) -> None:
        self._map = pages
        self._locks = locks
        self._freshness = Freshness(max_age_seconds, since)
        self._latest = (-math.inf, self._freshness)
        self._on_changed = on_changed
        self._report_disk = report
        self._clock = clock
        self._source = source or ORIGIN_METADATA
        self._ahead = ahead
        self._expire_elsewhere = expire_elsewhere

    # --- objects ----------------------------------------------------------------------------------

    def known(self, origin: Origin, key: str) -> ObjectInfo | None:
        """The cached description of an object, if it is fresh; sends no request."""
        known = self._known_until(origin, key)
        return None if known is None else known[0]

    def stat(self, origin: Origin, key: str) -> ObjectInfo:
        """Describe an object, from memory while fresh. Raises `ObjectNotFoundError`."""
        return self.stat_until(origin, key)[0]

    def stat_until(self, origin: Origin, key: str) -> tuple[ObjectInfo, float]:
        """Describe an object as `stat` does; also returns the time (`time.time`) from which this is stale."""
        known = self._known_until(origin, key)
        if known is None and self._uses_listings(origin):
            known = self._stat_by_listing(origin, key)
        return self._stat_alone(origin, key) if known is None else known

    def invalidate(self, origin: Origin, *keys: str) -> None:
        """Drop the metadata of `keys` that were written or removed, on this node and on all others.

        Listings that could name them are requested again. A key that ends in a slash is a directory, and its listing is
        requested again. The versions that were known are reported as changed. Earlier responses about the keys that are
        still in flight are not stored.

        Raises `StorageError` when the index cannot be changed. Then all metadata of this node expires, for all processes.
        """
        self._invalidate(origin, keys, written=True)

    def _invalidate(self, origin: Origin, keys: Sequence[str], *, written: bool) -> None:
        try:
            self._drop(origin, keys, written=written)
        finally:  # also after a disk error: other nodes must drop it
            if self._source.changed(origin, keys):
                # Other processes of this node may have received an older response from a node that had not dropped it yet.
                self._drop(origin, keys, written=written)

    def _drop(self, origin: Origin, keys: Sequence[str], *, written: bool) -> None:
        is_changed = False
        try:
            self._change(origin, keys)
            is_changed = True
        except (DamagedIndexError, FailingDiskError) as error:
            self._report_disk(error)  # this process then stops using it
            raise
        finally:
            if not is_changed:
                # The index still has the metadata of these keys, for example because a process that writes is stopped.
                self._map.expire(self._clock())
            if written:
                self._expire_elsewhere(not is_changed)

    def _change(self, origin: Origin, keys: Sequence[str]) -> None:
        try:
            self._report(origin, [self._map.change(origin.identity, key) for key in keys])
        except DiskFullError:
            self._make_space()

    def _make_space(self) -> None:
        """Drop all metadata of an index that cannot grow: this writes few pages, and leaves space for later changes.

        Repeated, because pages that a read transaction can still see are not free. Raises `DiskFullError`.
        """
        for left in reversed(range(_CLEAR_ATTEMPTS)):
            try:
                self._map.clear()
                return
            except DiskFullError:
                if not left:
                    raise
                time.sleep(_CLEAR_PAUSE_SECONDS)

    def drop_outdated(self, origin: Origin, key: str) -> None:
        """Drop the metadata of a key that a read found to be outdated. A disk error is reported; the read continues."""
        self._tolerantly(lambda: self._invalidate(origin, [key], written=False), None)

    def invalidate_all(self) -> None:
        """Drop all cached metadata, for every process of this node. Cached blocks stay, and are found again."""
        self._expire_elsewhere(False)
        self._map.clear()

    def freshness_of(self, origin: Origin, key: str) -> Freshness:
        """For how long the metadata of an object, or of a directory's content, is fresh."""
        if origin.is_immutable(key):
            return ALWAYS_FRESH
        since, freshness = self._latest
        if since != (now := self._map.since):  # once: this is part of every first open
            freshness = self._freshness._replace(since=max(self._freshness.since, now))
            self._latest = (now, freshness)
        return freshness

    def known_in(
        self, txn: Transaction, identity: str, key: str, freshness: Freshness, *, changes: int | None = None
    ) -> tuple[Description, float] | None:
        """The cached description of an object, if it is fresh, and the time from which it is stale; in a read transaction.

        `changes` as for `PageMap.known_in`.
        """
        if not freshness:
            return None
        now = self._clock()  # once: the first open of an object by a process uses this
        known = self._map.known_in(txn, identity, key, freshness.earliest(now), freshness.latest(now), changes=changes)
        return None if known is None else (known.description, freshness.stale_from(known.sent_at))

    def unpacked(self, identity: str, key: str, changes: int, freshness: Freshness) -> tuple[int, str, float] | None:
        """Size and version of an object from an unpacked page, if they are fresh, and the time from which they are stale.

        Another process may have received a newer response since; then the store no longer has the version.
        """
        found = self._map.unpacked(identity, key, changes)
        if found is None:
            return None
        if not freshness.is_fresh(found[3], self._clock()):
            return None
        return found[0], found[1], freshness.stale_from(found[3])

    def _known_until(self, origin: Origin, key: str) -> tuple[ObjectInfo, float] | None:
        identity, freshness = origin.identity, self.freshness_of(origin, key)
        found = self._tolerantly(lambda: self._map.look(lambda txn: self.known_in(txn, identity, key, freshness)), None)
        return None if found is None else (ObjectInfo(key, *found[0]), found[1])

    def _stat_alone(self, origin: Origin, key: str) -> tuple[ObjectInfo, float]:
        moment = self._moment(origin)
        try:
            info, age = self._source.head(origin, key)
        except FileNotFoundError:
            if self._tolerantly(lambda: self._map.is_remembered(origin.identity, key), False):
                self.drop_outdated(origin, key)
            raise
        moment = moment.earlier(age)
        space = self._space(origin)
        self._report(origin, [self._tolerantly(lambda: self._map.store_record(space, info, moment), None)])
        return info, self.freshness_of(origin, key).stale_from(moment.sent_at)

    def _stat_by_listing(self, origin: Origin, key: str) -> tuple[ObjectInfo, float] | None:
        """Request the page of the listing that named `key`; None if none did, or if it no longer does."""
        for _ in range(2):  # once more if new keys fill the page before the key
            stretch = self._listed_in(origin, key)
            if stretch is None:
                return self._stat_by_level(origin, key)
            space = self._space(origin)
            start = space.key(stretch.lower)
            turn = self._turn(origin, start)
            with self._locks.threads(turn), self._locks.processes(turn):
                known = self._known_until(origin, key)  # another thread may have requested it
                if known is not None:
                    return known
                sent_at = self._clock()
                stream = self._stream(origin, stretch.root, start)
                try:
                    part = self._pull(origin, stream)[0]
                except DeniedError:  # credentials may allow reads but not listings
                    return None
            self._read_ahead(origin, stream, stretch)
            for info in part.objects:
                if info.key == key:
                    return info, self.freshness_of(origin, key).stale_from(sent_at - stream.age)
            if space.position(part.through) >= space.position(key):
                return None
        return None

    def _read_ahead(self, origin: Origin, stream: ListingStream, stretch: Stretch) -> None:
        """Request the expired pages after `stretch`, which a stream has replaced, if a reader came from the page before."""
        if self._ahead is None:
            return
        before = self._listed_in(origin, self._space(origin).key(stretch.lower))
        if before is not None and self._fresh(self.freshness_of(origin, before.root), before.sent_at):
            with contextlib.suppress(RuntimeError):  # the process is ending, or has no thread left
                self._ahead.submit(self._pull_ahead, origin, stream)

    def _pull_ahead(self, origin: Origin, stream: ListingStream) -> None:
        freshness = self.freshness_of(origin, stream.root)
        for _ in range(_PAGES_AHEAD):
            start, space = stream.after, self._space(origin)
            if start == end_of(stream.root):
                return
            turn = self._turn(origin, start)
            with self._locks.threads(turn), self._locks.processes(turn):
                stale = self._tolerantly(partial(self._is_stale, freshness, space, start), False)
                try:
                    if not stale or not self._pull(origin, stream)[1]:
                        return
                except MillraceError:  # a reader that needs the page requests it again, and gets the error
                    return
                except Exception:  # noqa: BLE001 - no caller sees it
                    _log.exception("a defect in a request for a page of %s ahead of its reader", stream.root)
                    return

    def _is_stale(self, freshness: Freshness, space: Space, after: str) -> bool:
        """Whether there is a page after a key, and it is stale or incomplete."""

        def read(stretch: Stretch, _: Page) -> bool:
            return not self._complete_to(freshness, stretch)

        return bool(self._map.read_after(space, space.position(after), read))

    def _stat_by_level(self, origin: Origin, key: str) -> tuple[ObjectInfo, float] | None:
        """Request the level that named `key`, unless it is long."""
        parent = key[: key.rfind("/") + 1]
        level = level_space(origin.identity, parent)
        known = self._tolerantly(lambda: self._map.look_up(level, key), None)
        if known is None or self._tolerantly(lambda: self._is_long(level, parent), True):
            return None
        self.list_level(origin, parent[:-1])
        return self._known_until(origin, key)

    def listing_root(self, origin: Origin, key: str) -> str | None:
        """The prefix whose listing named `key`, however old; None without one."""
        stretch = self._listed_in(origin, key)
        return None if stretch is None else stretch.root

    def _listed_in(self, origin: Origin, key: str) -> Stretch | None:
        return self._tolerantly(lambda: self._map.stretch_naming(self._space(origin), key), None)

    # --- directories ------------------------------------------------------------------------------

    def remembered_directory(self, origin: Origin, prefix: str) -> bool:
        """Whether cached metadata names something below `prefix`; stale metadata is requested again.

        False without cached metadata: this sends no request about a key that was not a directory before.
        """
        below = self._fresh_below(origin, prefix)
        if below is None and self._uses_listings(origin) and self._was_directory(origin, prefix):
            return self.below(origin, prefix) == "something"
        return below is True

    def below(self, origin: Origin, prefix: str, *, accept_empty: bool = False) -> Below:
        """The kind of content below `prefix`. Requests one page of its listing if that is not cached.

        A cached empty listing is used only with `accept_empty`: another program may be about to write.
        """
        below = self._fresh_below(origin, prefix)
        if below or (below is False and accept_empty):
            return "something" if below else "nothing"
        for part in self._walk(origin, prefix):
            if part.objects:
                return "something"
            if part.is_directory:
                return "empty"
        return "nothing"

    def _fresh_below(self, origin: Origin, prefix: str) -> bool | None:
        """Whether fresh pages name something below `prefix`; None if they do not cover it."""
        freshness = self.freshness_of(origin, prefix)
        if not freshness:
            return None
        try:
            space = self._space(origin)
            base, end = (space.position(text) for text in (base_of(prefix), end_of(prefix)))
            marker = self._map.look_up(space, base_of(prefix))
            if marker is not None and self._fresh(freshness, marker.sent_at):
                return True

            def read(stretch: Stretch, page: Page) -> tuple[bool, bool, str]:
                return (
                    self._fresh(freshness, stretch.sent_at),
                    page.names_below(encode(base)),
                    self._complete_to(freshness, stretch),
                )

            after = base
            while (found := self._map.read_after(space, after, read)) is not None:
                fresh, named, through = found
                if fresh and named:
                    return True
                if through >= end:
                    return False
                if through <= after:
                    break
                after = through
            level = self._map.read_after(
                level_space(origin.identity, base_of(prefix)),
                base_of(prefix),
                lambda stretch, page: (
                    self._fresh(freshness, stretch.sent_at) and page.names_below(encode(base_of(prefix)))
                ),
            )
        except StorageError as error:
            self._report_disk(error)
            return None
        return True if level else None

    def _complete_to(self, freshness: Freshness, stretch: Stretch) -> str:
        """The position up to which a page is complete; empty if it is stale or incomplete."""
        return stretch.through if self._fresh(freshness, stretch.sent_at) and not stretch.incomplete else ""

    def _was_directory(self, origin: Origin, prefix: str) -> bool:
        """Whether the first cached page, however old, names something below `prefix`."""
        base = base_of(prefix)
        spaces = (self._space(origin), level_space(origin.identity, base))
        return any(self._names_below(space, base) for space in spaces)

    def _names_below(self, space: Space, base: str) -> bool:
        position = space.position(base)
        found = self._tolerantly(
            lambda: self._map.read_after(space, position, lambda _, page: page.names_below(encode(position))), None
        )
        return found is True

    # --- listings ---------------------------------------------------------------------------------

    def list_all(self, origin: Origin, prefix: str) -> Iterator[Sequence[ObjectInfo]]:
        """Every object below `prefix`, in pages, in bounded memory; fresh pages are from the index."""
        return (part.objects for part in self._walk(origin, prefix) if part.objects)

    def list_level(self, origin: Origin, prefix: str) -> Listing:
        """The direct children of `prefix`; an empty listing if there are none."""
        base = base_of(prefix)
        remembered = self._fresh_level(origin, base)
        if remembered is not None:
            return remembered
        name = encode(f"level\0{origin.identity}\0{base}")
        with self._locks.threads(name), self._locks.processes(name):
            remembered = self._fresh_level(origin, base)  # another thread may have requested it
            if remembered is None:
                remembered = self._flat_level(origin, prefix)
            return self._request_level(origin, prefix) if remembered is None else remembered

    def parts(self, origin: Origin, prefix: str, after: str) -> Iterator[ListingPart]:
        """The content of a directory after the key `after` (`""`: all of it), as in `list_all`, response by response.

        Raises `UsageError` for an origin that lists without an order, because no response can be continued.
        """
        last = after or base_of(prefix)
        for part in self._walk(origin, prefix, last):
            if last == end_of(prefix):
                raise UsageError(f"the origin lists {prefix} in no order that can be cut into pages")
            last = part.through
            yield part

    def _walk(self, origin: Origin, prefix: str, start: str = "") -> Iterator[ListingPart]:
        """The content of a directory: fresh pages from the index, each run of other pages as one stream from the origin."""
        freshness = self.freshness_of(origin, prefix)
        after, end = start or base_of(prefix), end_of(prefix)
        found, stuck = after != base_of(prefix), False
        stream: ListingStream | None = None
        while after != end:
            part = self._fresh_page(freshness, self._space(origin), prefix, after)
            if part is None:
                root, start = (prefix, after) if stuck else self._next_request(origin, prefix, after)
                turn = self._turn(origin, start)
                with self._locks.threads(turn), self._locks.processes(turn):
                    # Another thread may have requested it.
                    part = self._fresh_page(freshness, self._space(origin), prefix, after)
                    if part is None:
                        continues = stuck and stream is not None and stream.root == prefix
                        if stream is None or not (
                            continues or (stream.root, stream.after) in ((root, start), (prefix, after))
                        ):
                            stream = self._stream(origin, root, start)
                        began = stream.after
                        part, ordered = self._pull(origin, stream)
                        if not ordered:
                            break
                        if (stream.root, began) != (prefix, after):
                            part = part.within(prefix, after, self._space(origin))
            yield part
            stuck = part.through == after
            after, found = part.through, found or bool(part.objects)
        if after != end or (not found and (stream is None or stream.root != prefix)):
            # An order that cannot be stored; or an empty result, which is never cached: it may change at any time. Nor is
            # one of a parent's listing used: the parent's first page may not show yet that it lists folder by folder.
            for page, _ in self._source.list_pages(origin, prefix, after=after if after != end else ""):
                yield ListingPart(page.objects, end, page.is_directory)

    def _fresh_page(self, freshness: Freshness, space: Space, prefix: str, after: str) -> ListingPart | None:
        """The part of a fresh and complete page that follows `after` below `prefix`."""
        if not freshness:
            return None

        def read(stretch: Stretch, page: Page) -> ListingPart | None:
            if not self._complete_to(freshness, stretch):
                return None
            infos = page.infos()
            if space.folders_first:
                infos = [ObjectInfo(space.key(each.key), each.size, each.version, each.modified) for each in infos]
            return ListingPart(infos, space.key(stretch.through))

        part = self._tolerantly(lambda: self._map.read_after(space, space.position(after), read), None)
        found = None if part is None else part.within(prefix, after, space)
        # A page that does not lead on is not used: the loop of the caller would not end.
        return None if found is None or found.through == after else found

    def _next_request(self, origin: Origin, prefix: str, after: str) -> tuple[str, str]:
        """The listing to request, and the key to begin after: those of the expired page, if its listing is of a parent."""
        if self._uses_listings(origin):
            space = self._space(origin)
            stretch = self._tolerantly(
                lambda: self._map.read_after(space, space.position(after), lambda stretch, _: stretch), None
            )
            if stretch is not None and base_of(prefix).startswith(base_of(stretch.root)):
                return stretch.root, space.key(stretch.lower)
        return prefix, after

    # --- one level --------------------------------------------------------------------------------

    def _fresh_level(self, origin: Origin, base: str) -> Listing | None:
        freshness = self.freshness_of(origin, base)
        infos = self._fresh_infos(freshness, level_space(origin.identity, base), base, None)
        if infos is None:
            infos = self._fresh_infos(freshness, self._space(origin), base, _LEVEL_PAGES)
        if not infos:  # a cached empty result is not used
            return None
        start = len(base)
        objects = [info for info in infos if info.key.find("/", start) < 0]
        prefixes: dict[str, None] = {}
        if len(objects) < len(infos):
            prefixes = dict.fromkeys(info.key[:slash] for info in infos if (slash := info.key.find("/", start)) >= 0)
        return Listing(objects=objects, prefixes=list(prefixes))

    def _flat_level(self, origin: Origin, prefix: str) -> Listing | None:
        """A level that begins with a fresh page without folders (from an earlier check for a directory), by
        continuing after that; None if it begins otherwise, has folders, or is long.
        """
        base = base_of(prefix)

        def is_flat(part: ListingPart) -> bool:
            return all("/" not in info.key[len(base) :] for info in part.objects)

        first = self._fresh_page(self.freshness_of(origin, base), self._space(origin), prefix, base)
        if first is None or not is_flat(first):
            return None
        objects: list[ObjectInfo] = []
        for pages, part in enumerate(self._walk(origin, prefix)):
            if pages == _LEVEL_PAGES or not is_flat(part):
                return None
            objects += part.objects
        return Listing(objects=objects, prefixes=[]) if objects else None

    def _fresh_infos(
        self, freshness: Freshness, space: Space, base: str, most_pages: int | None
    ) -> list[ObjectInfo] | None:
        """All objects that fresh pages name below `base`; None if pages are missing, or there are too many."""
        if not freshness:
            return None
        found: list[ObjectInfo] = []
        after, pages = base, 0
        while after != end_of(base):
            part = self._fresh_page(freshness, space, base, after)
            pages += 1
            if part is None or (most_pages is not None and pages > most_pages):
                return None
            found += part.objects
            after = part.through
        return found

    def _is_long(self, level: Space, base: str) -> bool:
        after, pages = base, 0
        while (through := self._map.read_after(level, after, lambda stretch, _: stretch.through)) is not None:
            after, pages = through, pages + 1
        return pages > _LEVEL_PAGES

    def _request_level(self, origin: Origin, prefix: str) -> Listing:
        base = base_of(prefix)
        moment = self._moment(origin)
        listing, age = self._source.list_level(origin, prefix)
        moment = moment.earlier(age)
        space = self._space(origin)
        level = level_space(origin.identity, base)
        folders = [ObjectInfo(f"{name}/", 0, "", 0.0) for name in listing.prefixes]
        # Without directories, a level contains everything.
        target, keys = (level, space) if folders else (space, None)
        entries = sorted([*listing.objects, *folders], key=lambda info: target.position(info.key))

        def store() -> list[ObjectInfo]:
            gone: list[ObjectInfo] = []
            if not folders:
                self._map.drop(level)
            lower, end = target.position(base), target.position(end_of(prefix))
            for start in range(0, max(len(entries), 1), PAGE_OBJECTS):
                page = entries[start : start + PAGE_OBJECTS]
                last = start + PAGE_OBJECTS >= len(entries)
                through = end if last else target.position(page[-1].key)
                gone += self._map.store(target, lower, through, page, moment, root=prefix, keys=keys)
                lower = through
            return gone

        self._report(origin, self._tolerantly(store, []))
        return listing

    # --- requests ---------------------------------------------------------------------------------

    def _uses_listings(self, origin: Origin) -> bool:
        return bool(self._freshness) and not origin.head_is_local

    def _turn(self, origin: Origin, start: str) -> bytes:
        """The name of the lock of a page that is requested."""
        return encode(f"page\0{origin.identity}\0{start}")

    def _stream(self, origin: Origin, root: str, start: str) -> ListingStream:
        def settled(key: str) -> ObjectInfo | None:
            space = self._space(origin)
            return self._tolerantly(lambda: self._map.listed(space, key) or self._map.listed(space, f"{key}/"), None)

        return ListingStream(self._source, origin, root, self._key_before(origin, root, start), settled)

    def _key_before(self, origin: Origin, root: str, start: str) -> str:
        """Where to begin a listing of `root` that must contain the keys after `start`.

        If a directory was listed by itself, a page can end where the directory begins. That is not a key: some servers
        would continue behind the directory, others with names that sort before its slash. So begin with the key before.
        """
        base, space = base_of(root), self._space(origin)
        while start.endswith("/") and start != base:
            position = space.position(start)
            key = self._tolerantly(partial(self._map.key_before, space, position), None)
            start = key if key is not None and key.startswith(base) else base
        return start

    def _pull(self, origin: Origin, stream: ListingStream) -> tuple[ListingPart, bool]:
        """Request one page of a stream and store it. Also returns whether its order can be stored."""
        start, sent_at = stream.after, self._moment(origin)
        # A client may have the page already, since it requested the one before.
        moment = stream.sent_at or sent_at
        page, stream.sent_at = stream.next_page(), sent_at
        moment = moment.earlier(stream.age)
        part = ListingPart(page.objects, stream.after, page.is_directory)
        keys = [info.key for info in page.objects]
        ordered = self._tolerantly(lambda: self._map.learn_order(origin.identity, keys, start), False)
        if ordered and stream.after != start:
            space = self._space(origin)
            store = partial(
                self._map.store,
                space,
                space.position(start),
                space.position(stream.after),
                page.objects,
                moment,
                root=stream.root,
                keep_empty=start != base_of(stream.root),
            )
            self._report(origin, self._tolerantly(store, []))
        return part, ordered

    def _space(self, origin: Origin) -> Space:
        return self._tolerantly(lambda: self._map.space(origin.identity), _NOWHERE)

    def _moment(self, origin: Origin) -> Moment:
        now = self._clock()
        return self._tolerantly(lambda: self._map.moment(origin.identity, now), Moment(now, -1))

    def _fresh(self, freshness: Freshness, sent_at: float) -> bool:
        return freshness.is_fresh(sent_at, self._clock())

    def _report(self, origin: Origin, gone: Iterable[ObjectInfo | None]) -> None:
        for info in gone:
            if info is not None and not info.key.endswith("/"):
                self._on_changed(origin, info)

    def _tolerantly(self, act: Callable[[], _T], otherwise: _T) -> _T:
        """Use the index; a disk error is reported and `otherwise` is returned."""
        try:
            return act()
        except StorageError as error:
            self._report_disk(error)
            return otherwise


# --- without a cluster, and without a disk ---------------------------------------------------------


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


class UncachedMetadata:
    """Replaces `MetadataCache` on a node without a usable disk: it stores nothing and requests everything.

    Writes through it still invalidate the metadata that other processes and nodes have cached.
    """

    def __init__(
        self, source: MetadataSource = ORIGIN_METADATA, *, expire_elsewhere: Callable[[bool], None] = lambda own: None
    ) -> None:
        self._source = source
        self._expire_elsewhere = expire_elsewhere

    def known(self, origin: Origin, key: str) -> ObjectInfo | None:
        return None

    def stat(self, origin: Origin, key: str) -> ObjectInfo:
        return origin.head(key)

    def stat_until(self, origin: Origin, key: str) -> tuple[ObjectInfo, float]:
        return origin.head(key), 0.0

    def invalidate(self, origin: Origin, *keys: str) -> None:
        try:
            self._expire_elsewhere(True)
        finally:
            if self._source.changed(origin, keys):
                self._expire_elsewhere(True)

    def drop_outdated(self, origin: Origin, key: str) -> None:
        self._source.changed(origin, [key])

    def listing_root(self, origin: Origin, key: str) -> str | None:
        return None

    def invalidate_all(self) -> None:
        self._expire_elsewhere(True)

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
