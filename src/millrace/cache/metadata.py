"""What the origin said about keys, remembered in the index for as long as the chosen consistency allows.

A listing is remembered in pages (`page_map.py`), each with the time when it was asked for. What has expired is asked again
by the page: one request for a thousand keys, whether a listing or a single object is wanted, one at a time on a node. A key
that no listing has named is asked for alone. Figures and reasons: docs/design/0006-metadata.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

from millrace.cache.asking import ASK_ORIGIN, Asking
from millrace.cache.belief import FOR_EVER, Belief
from millrace.cache.listing_stream import Answer, Below, ListingStream, base_of, end_of
from millrace.cache.page_map import PageMap, Stretch
from millrace.cache.page_rows import Transaction
from millrace.cache.pages import Page, Said, encode
from millrace.cache.positions import Moment, Space, level_space
from millrace.cache.turns import Turns
from millrace.errors import DeniedError, StorageError, UsageError
from millrace.origin import Listing, ObjectInfo, Origin

_T = TypeVar("_T")

PAGE_OBJECTS = 1000

_LEVEL_PAGES = 10
"""A level is derived from at most so many pages of everything, and asked for anew as a whole up to that length."""

_NOWHERE = Space(b"nowhere!")


class MetadataCache:
    """Answers `stat` and listings from the index while they are fresh, else from the origin.

    `max_age_seconds` is 0 (ask every time), `inf` (never ask twice) or a time; what the origin calls immutable is never
    asked about twice. `on_changed` is told the old description of an object whose version turns out to have changed, or
    which is gone. Thread- and process-safe. A disk in trouble costs the memory, not the answer.
    """

    def __init__(
        self,
        pages: PageMap,
        turns: Turns,
        *,
        max_age_seconds: float,
        on_changed: Callable[[Origin, ObjectInfo], None],
        report: Callable[[StorageError], None],
        clock: Callable[[], float] = time.time,
        asking: Callable[[], Asking] = lambda: ASK_ORIGIN,
    ) -> None:
        self._map = pages
        self._turns = turns
        self._belief = Belief(max_age_seconds)
        self._on_changed = on_changed
        self._report_disk = report
        self._clock = clock
        self._asking = asking

    # --- objects ----------------------------------------------------------------------------------

    def known(self, origin: Origin, key: str) -> ObjectInfo | None:
        """What is remembered of an object and still fresh; asks nobody."""
        known = self._known_until(origin, key)
        return None if known is None else known[0]

    def stat(self, origin: Origin, key: str) -> ObjectInfo:
        """Describe an object, from memory while fresh. Raises `ObjectNotFoundError`."""
        return self.stat_until(origin, key)[0]

    def stat_until(self, origin: Origin, key: str) -> tuple[ObjectInfo, float]:
        """Describe an object as `stat` does, and say until when (by `time.time`) that may be believed."""
        known = self._known_until(origin, key)
        if known is None and self._asks_by_listing(origin):
            known = self._stat_by_listing(origin, key)
        return self._stat_alone(origin, key) if known is None else known

    def forget(self, origin: Origin, *keys: str) -> None:
        """Drop what is remembered of `keys`, because they were written or removed, here and by whoever else remembers it.

        Listings that could name them are asked again. A key that ends in a slash is a directory, whose listing is asked
        again. The versions that were known are reported as changed. What the origin said of the keys before, and is still
        on its way, is not remembered.
        """
        try:
            self._report(origin, [self._map.change(origin.identity, key) for key in keys])
        finally:
            doubtful = self._asking().changed(origin, keys)  # also where this disk is in trouble: the others must know
        if doubtful:
            # Others of this node have asked anew since, and may have heard from somebody who was not told yet.
            self._report(origin, [self._map.change(origin.identity, key) for key in keys])

    def forget_all(self) -> None:
        """Drop everything that is remembered, for every process of this node. What is cached stays, and is found again."""
        self._map.clear()

    def belief_in(self, origin: Origin, key: str) -> Belief:
        """For how long what the origin says of an object, or of what lies below a directory, is believed."""
        return FOR_EVER if origin.is_immutable(key) else self._belief

    def known_in(
        self, txn: Transaction, identity: str, key: str, belief: Belief, *, changes: int | None = None
    ) -> tuple[Said, float] | None:
        """What is remembered of an object of an origin and is believed, and until when; in a transaction that reads.

        `changes` as for `PageMap.known_in`.
        """
        if not belief:
            return None
        now = self._clock()  # once, since every open that was not answered before in this process comes here
        known = self._map.known_in(txn, identity, key, belief.oldest(now), belief.newest(now), changes=changes)
        return None if known is None else (known.said, belief.until(known.asked))

    def unpacked(self, identity: str, key: str, changes: int, belief: Belief) -> tuple[int, str, float] | None:
        """Size and version of an object that this process knows without the index and that are believed, and until when.

        It may be overtaken by an answer that came to another process since; then the version is not in the store any more.
        """
        found = self._map.unpacked(identity, key, changes)
        if found is None:
            return None
        if not belief.holds(found[3], self._clock()):
            return None
        return found[0], found[1], belief.until(found[3])

    def _known_until(self, origin: Origin, key: str) -> tuple[ObjectInfo, float] | None:
        identity, belief = origin.identity, self.belief_in(origin, key)
        found = self._tolerantly(lambda: self._map.look(lambda txn: self.known_in(txn, identity, key, belief)), None)
        return None if found is None else (ObjectInfo(key, *found[0]), found[1])

    def _stat_alone(self, origin: Origin, key: str) -> tuple[ObjectInfo, float]:
        moment = self._moment(origin)
        try:
            info, age = self._asking().head(origin, key)
        except FileNotFoundError:
            if self._tolerantly(lambda: self._map.is_remembered(origin.identity, key), False):
                self._tolerantly(lambda: self.forget(origin, key), None)
            raise
        moment = moment.earlier(age)
        space = self._space(origin)
        self._report(origin, [self._tolerantly(lambda: self._map.store_record(space, info, moment), None)])
        return info, self.belief_in(origin, key).until(moment.asked)

    def _stat_by_listing(self, origin: Origin, key: str) -> tuple[ObjectInfo, float] | None:
        """Ask for the page of the listing that named `key`; None where none did, or it does not any more."""
        for _ in range(2):  # once more where so much is new that the page does not reach the key
            stretch = self._listed_in(origin, key)
            if stretch is None:
                return self._stat_by_level(origin, key)
            space = self._space(origin)
            start = space.key(stretch.lower)
            with self._turn(origin, start):
                known = self._known_until(origin, key)  # somebody may have asked meanwhile
                if known is not None:
                    return known
                asked = self._clock()
                stream = self._stream(origin, stretch.root, start)
                try:
                    answer = self._pull(origin, stream)[0]
                except DeniedError:  # who may read an object may not be allowed to list
                    return None
            for info in answer.objects:
                if info.key == key:
                    return info, self.belief_in(origin, key).until(asked - stream.age)
            if space.position(answer.through) >= space.position(key):
                return None
        return None

    def _stat_by_level(self, origin: Origin, key: str) -> tuple[ObjectInfo, float] | None:
        """Ask for the level that named `key`, unless it is long."""
        parent = key[: key.rfind("/") + 1]
        level = _level(origin, parent)
        known = self._tolerantly(lambda: self._map.look_up(level, key), None)
        if known is None or self._tolerantly(lambda: self._is_long(level, parent), True):
            return None
        self.list_level(origin, parent[:-1])
        return self._known_until(origin, key)

    def listing_root(self, origin: Origin, key: str) -> str | None:
        """The prefix whose listing named `key`, however long ago; None where none is remembered."""
        stretch = self._listed_in(origin, key)
        return None if stretch is None else stretch.root

    def _listed_in(self, origin: Origin, key: str) -> Stretch | None:
        return self._tolerantly(lambda: self._map.stretch_naming(self._space(origin), key), None)

    # --- directories ------------------------------------------------------------------------------

    def remembered_directory(self, origin: Origin, prefix: str) -> bool:
        """Whether something lies below `prefix`, by what is remembered, asked anew where that has expired.

        False where nothing is known: this never asks about what was no directory before.
        """
        below = self._fresh_below(origin, prefix)
        if below is None and self._asks_by_listing(origin) and self._was_directory(origin, prefix):
            return self.below(origin, prefix) == "something"
        return below is True

    def below(self, origin: Origin, prefix: str, *, believe_nothing: bool = False) -> Below:
        """What lies below `prefix`. Asks for one page of its listing where that is not known.

        That there is nothing is believed of a listing only with `believe_nothing`: somebody may be about to write.
        """
        below = self._fresh_below(origin, prefix)
        if below or (below is False and believe_nothing):
            return "something" if below else "nothing"
        for answer in self._walk(origin, prefix):
            if answer.objects:
                return "something"
            if answer.is_directory:
                return "empty"
        return "nothing"

    def _fresh_below(self, origin: Origin, prefix: str) -> bool | None:
        """Whether fresh pages name something below `prefix`; None where they do not say."""
        belief = self.belief_in(origin, prefix)
        if not belief:
            return None
        try:
            space = self._space(origin)
            base, end = (space.position(text) for text in (base_of(prefix), end_of(prefix)))
            marker = self._map.look_up(space, base_of(prefix))
            if marker is not None and self._fresh(belief, marker.asked):
                return True

            def read(stretch: Stretch, page: Page) -> tuple[bool, bool, str]:
                return (
                    self._fresh(belief, stretch.asked),
                    page.names_below(encode(base)),
                    self._complete_to(belief, stretch),
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
                _level(origin, base_of(prefix)),
                base_of(prefix),
                lambda stretch, page: self._fresh(belief, stretch.asked) and page.names_below(encode(base_of(prefix))),
            )
        except StorageError as error:
            self._report_disk(error)
            return None
        return True if level else None

    def _complete_to(self, belief: Belief, stretch: Stretch) -> str:
        """Up to where a page can be believed to name everything; nowhere when it has expired."""
        return stretch.through if self._fresh(belief, stretch.asked) and not stretch.incomplete else ""

    def _was_directory(self, origin: Origin, prefix: str) -> bool:
        """Whether the first remembered page, however old, names something below `prefix`."""
        base = base_of(prefix)
        return self._names_below(self._space(origin), base) or self._names_below(_level(origin, base), base)

    def _names_below(self, space: Space, base: str) -> bool:
        position = space.position(base)
        found = self._tolerantly(
            lambda: self._map.read_after(space, position, lambda _, page: page.names_below(encode(position))), None
        )
        return found is True

    # --- listings ---------------------------------------------------------------------------------

    def list_all(self, origin: Origin, prefix: str) -> Iterator[Sequence[ObjectInfo]]:
        """Every object below `prefix`, in pages, in bounded memory; each page is from memory while it is fresh."""
        return (answer.objects for answer in self._walk(origin, prefix) if answer.objects)

    def list_level(self, origin: Origin, prefix: str) -> Listing:
        """What lies directly below `prefix`; an empty listing where there is nothing."""
        base = base_of(prefix)
        remembered = self._fresh_level(origin, base)
        if remembered is not None:
            return remembered
        with self._turns.take(encode(f"level\0{origin.identity}\0{base}")):
            remembered = self._fresh_level(origin, base)  # somebody may have asked meanwhile
            if remembered is None:
                remembered = self._flat_level(origin, prefix)
            return self._ask_for_level(origin, prefix) if remembered is None else remembered

    def answers(self, origin: Origin, prefix: str, after: str) -> Iterator[Answer]:
        """What lies below a directory after the key `after` (`""`: all of it), as `list_all` has it, answer by answer.

        Raises `UsageError` for an origin that lists in no order, so that nobody could go on behind an answer.
        """
        last = after or base_of(prefix)
        for answer in self._walk(origin, prefix, last):
            if last == end_of(prefix):
                raise UsageError(f"the origin lists {prefix} in no order that can be cut into pages")
            last = answer.through
            yield answer

    def _walk(self, origin: Origin, prefix: str, start: str = "") -> Iterator[Answer]:
        """What lies below a directory: fresh pages from memory, each run of others as one stream from the origin."""
        belief = self.belief_in(origin, prefix)
        after, end = start or base_of(prefix), end_of(prefix)
        found, stuck = after != base_of(prefix), False
        stream: ListingStream | None = None
        while after != end:
            answer = self._fresh_page(belief, self._space(origin), prefix, after)
            if answer is None:
                root, start = (prefix, after) if stuck else self._what_to_ask(origin, prefix, after)
                with self._turn(origin, start):
                    answer = self._fresh_page(
                        belief, self._space(origin), prefix, after
                    )  # somebody may have asked meanwhile
                    if answer is None:
                        if stream is None or (stream.root, stream.after) not in ((root, start), (prefix, after)):
                            stream = self._stream(origin, root, start)
                        answer, ordered = self._pull(origin, stream)
                        if not ordered:
                            break
                        if stream.root != prefix:
                            answer = answer.within(prefix, after, self._space(origin))
            yield answer
            stuck = answer.through == after
            after, found = answer.through, found or bool(answer.objects)
        if after != end or (not found and stream is None):
            # An order that cannot be kept; or there is nothing, which is never believed: somebody may be about to write.
            yield from self._walk_unremembered(origin, prefix, after if after != end else "")

    def _walk_unremembered(self, origin: Origin, prefix: str, after: str) -> Iterator[Answer]:
        for page, _ in self._asking().list_pages(origin, prefix, after=after):
            yield Answer(page.objects, end_of(prefix), page.is_directory)

    def _fresh_page(self, belief: Belief, space: Space, prefix: str, after: str) -> Answer | None:
        """What a fresh and complete page says about what follows `after` below `prefix`."""
        if not belief:
            return None

        def read(stretch: Stretch, page: Page) -> Answer | None:
            if not self._complete_to(belief, stretch):
                return None
            infos = page.infos()
            if space.folders_first:
                infos = [ObjectInfo(space.key(each.key), each.size, each.version, each.modified) for each in infos]
            return Answer(infos, space.key(stretch.through))

        answer = self._tolerantly(lambda: self._map.read_after(space, space.position(after), read), None)
        return None if answer is None else answer.within(prefix, after, space)

    def _what_to_ask(self, origin: Origin, prefix: str, after: str) -> tuple[str, str]:
        """Which listing to ask, and after which key: that of the page which has expired, if it is one further up."""
        if self._asks_by_listing(origin):
            space = self._space(origin)
            stretch = self._tolerantly(
                lambda: self._map.read_after(space, space.position(after), lambda stretch, _: stretch), None
            )
            if stretch is not None and base_of(prefix).startswith(base_of(stretch.root)):
                return stretch.root, space.key(stretch.lower)
        return prefix, after

    # --- one level --------------------------------------------------------------------------------

    def _fresh_level(self, origin: Origin, base: str) -> Listing | None:
        belief, level, space = self.belief_in(origin, base), _level(origin, base), self._space(origin)
        infos = self._fresh_infos(belief, level, base, None)
        if infos is None:
            infos = self._fresh_infos(belief, space, base, _LEVEL_PAGES)
        if not infos:  # that there is nothing is never believed
            return None
        objects = [info for info in infos if "/" not in info.key[len(base) :]]
        deeper = (info.key for info in infos if "/" in info.key[len(base) :])
        prefixes = dict.fromkeys(base + key[len(base) :].partition("/")[0] for key in deeper)
        return Listing(objects=objects, prefixes=list(prefixes))

    def _flat_level(self, origin: Origin, prefix: str) -> Listing | None:
        """A level that begins with a fresh page without folders (whoever asked whether it is a directory got one), by
        going on behind that; None where it does not begin so, turns out to have folders, or is long.
        """
        base = base_of(prefix)

        def is_flat(answer: Answer) -> bool:
            return all("/" not in info.key[len(base) :] for info in answer.objects)

        first = self._fresh_page(self.belief_in(origin, base), self._space(origin), prefix, base)
        if first is None or not is_flat(first):
            return None
        objects: list[ObjectInfo] = []
        for pages, answer in enumerate(self._walk(origin, prefix)):
            if pages == _LEVEL_PAGES or not is_flat(answer):
                return None
            objects += answer.objects
        return Listing(objects=objects, prefixes=[]) if objects else None

    def _fresh_infos(self, belief: Belief, space: Space, base: str, most_pages: int | None) -> list[ObjectInfo] | None:
        """Everything that fresh pages name below `base`; None when some are missing, or there are too many."""
        if not belief:
            return None
        found: list[ObjectInfo] = []
        after, pages = base, 0
        while after != end_of(base):
            answer = self._fresh_page(belief, space, base, after)
            pages += 1
            if answer is None or (most_pages is not None and pages > most_pages):
                return None
            found += answer.objects
            after = answer.through
        return found

    def _is_long(self, level: Space, base: str) -> bool:
        after, pages = base, 0
        while (through := self._map.read_after(level, after, lambda stretch, _: stretch.through)) is not None:
            after, pages = through, pages + 1
        return pages > _LEVEL_PAGES

    def _ask_for_level(self, origin: Origin, prefix: str) -> Listing:
        base = base_of(prefix)
        moment = self._moment(origin)
        listing, age = self._asking().list_level(origin, prefix)
        moment = moment.earlier(age)
        space = self._space(origin)
        level = _level(origin, base)
        folders = [ObjectInfo(f"{name}/", 0, "", 0.0) for name in listing.prefixes]
        # Where there are no directories, a level is everything.
        target, keys = (level, space) if folders else (space, None)
        entries = sorted([*listing.objects, *folders], key=lambda info: target.position(info.key))

        def store() -> list[ObjectInfo | None]:
            gone: list[ObjectInfo | None] = []
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

    # --- asking -----------------------------------------------------------------------------------

    def _asks_by_listing(self, origin: Origin) -> bool:
        return bool(self._belief) and not origin.head_is_local

    def _turn(self, origin: Origin, start: str) -> AbstractContextManager[None]:
        return self._turns.take(encode(f"page\0{origin.identity}\0{start}"))

    def _stream(self, origin: Origin, root: str, start: str) -> ListingStream:
        def settled(key: str) -> ObjectInfo | None:
            space = self._space(origin)
            return self._tolerantly(lambda: self._map.listed(space, key) or self._map.listed(space, f"{key}/"), None)

        return ListingStream(self._asking(), origin, root, start, settled)

    def _pull(self, origin: Origin, stream: ListingStream) -> tuple[Answer, bool]:
        """Take one page of a stream and remember it; also gives whether it is in an order that can be kept."""
        start, asked = stream.after, self._moment(origin)
        # A client may have the page already, since it asked for the one before.
        moment = stream.asked or asked
        page, stream.asked = stream.next_page(), asked
        moment = moment.earlier(stream.age)
        answer = Answer(page.objects, stream.after, page.is_directory)
        keys = [info.key for info in page.objects]
        ordered = self._tolerantly(lambda: self._map.learn_order(origin.identity, keys, start), False)
        if ordered and stream.after != start:
            space = self._space(origin)

            def store() -> list[ObjectInfo | None]:
                return [
                    *self._map.store(
                        space,
                        space.position(start),
                        space.position(stream.after),
                        page.objects,
                        moment,
                        root=stream.root,
                        keep_empty=start != base_of(stream.root),
                    )
                ]

            self._report(origin, self._tolerantly(store, []))
        return answer, ordered

    def _space(self, origin: Origin) -> Space:
        return self._tolerantly(lambda: self._map.space(origin.identity), _NOWHERE)

    def _moment(self, origin: Origin) -> Moment:
        now = self._clock()
        return self._tolerantly(lambda: self._map.moment(origin.identity, now), Moment(now, -1))

    def _fresh(self, belief: Belief, asked: float) -> bool:
        return belief.holds(asked, self._clock())

    def _report(self, origin: Origin, gone: Iterable[ObjectInfo | None]) -> None:
        for info in gone:
            if info is not None and not info.key.endswith("/"):
                self._on_changed(origin, info)

    def _tolerantly(self, act: Callable[[], _T], otherwise: _T) -> _T:
        """Do something with the index; a disk in trouble costs what it would have given."""
        try:
            return act()
        except StorageError as error:
            self._report_disk(error)
            return otherwise


def _level(origin: Origin, base: str) -> Space:
    return level_space(origin.identity, base)
