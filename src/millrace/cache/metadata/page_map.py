"""The cached keys of an origin, as an ordered map in the index: which range of keys was listed when.

A listed range is a page (`pages.py`) under the position where it begins. Pages never overlap, so the page that could name
a key is found by one step of a cursor, whatever was listed: a bucket, a directory, a single level. Nothing is recorded for
each key in addition to its page; only a key that was requested alone has its own record.

A *position* is a key as its origin sorts: by its bytes, as S3 does; or folder by folder, as servers with real directories
do, where `/` sorts before every other character. The responses of the origin show which one it is.

A write of this node is stored as a numbered change. A response from before the change is not used for that
key. `Freshness` is the rule by which a response becomes stale.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any, NamedTuple, TypeVar

from millrace.cache.metadata.pages import (
    CHANGES_KEPT,
    END,
    MOST_OBJECTS,
    MOST_POSITION_BYTES,
    ORDER,
    PAGE,
    RECORD,
    Description,
    Page,
    Space,
    Transaction,
    ascending,
    by_folders,
    change_key,
    changes_since,
    concerns,
    cut_differs,
    decode,
    description_in,
    description_in_record,
    digest_of,
    encode,
    later,
    level_space,
    make_incomplete,
    overlapping,
    pack_page,
    pack_record,
    page_naming,
    read_number,
    record_key,
    replace_pages,
    settle_named,
    settle_records,
    storable,
    struck_by,
    unpack_record,
    write_number,
)
from millrace.origin import ObjectInfo
from millrace.store.index import Index
from millrace.store.signals import METADATA_SINCE
from millrace.store.transactions import Writing

_T = TypeVar("_T")

_MOST_KEYS = 1 << 16
_MOST_PAGES = 4096
_LOOK_UPS = 32
_PAUSE_SECONDS = 60.0


# --- freshness ------------------------------------------------------------------------------------


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

# --- the map --------------------------------------------------------------------------------------

Remembered = tuple[int, str, float, float]
"""Size in bytes, version, time of modification, and time of the request."""


class Known(NamedTuple):
    """The description of a key, and the time of the request."""

    description: Description
    sent_at: float


def described_in_page(cursor: Any, space: Space, position: bytes) -> Known | None:
    """The description of `position` in the page of a space that names it."""
    own = PAGE + space.digest
    if not cursor.before(own + position):
        return None
    at, value = cursor.item()
    if at[:9] != own:
        return None
    sent_at, description = description_in(value, position)
    return None if description is None else Known(description, sent_at)


class Stretch(NamedTuple):
    """A page without its objects: the keys after the position `lower`, up to `through`, in a listing of `root`."""

    lower: str
    through: str
    root: str
    sent_at: float
    incomplete: bool


def _space_of(identity: str, *, folders_first: bool) -> Space:
    """All keys of an origin in one of the two orders."""
    return Space(digest_of("all", identity, "folders first" if folders_first else ""), folders_first)


class PageMap:
    """The map of one index. Thread- and process-safe; raises the errors of `Index`."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._times = index.signals.times
        self._spaces: dict[str, Space] = {}
        self._memory = PageMemory()
        self._last_level: tuple[tuple[str, str], Space] | None = None

    # --- spaces and time --------------------------------------------------------------------------

    def space(self, identity: str) -> Space:
        """All keys of an origin, in the order that its responses have shown so far."""
        space = self._spaces.get(identity)
        return space if space is not None else self._read_space(identity)

    def _read_space(self, identity: str) -> Space:
        with self._index.meta_reading() as txn:
            return self._space_in(txn, identity)

    def _space_in(self, txn: Transaction, identity: str) -> Space:
        """The space of an origin, as this transaction has it: another process may have stored the order."""
        space = _space_of(identity, folders_first=txn.get(ORDER + digest_of(identity)) is not None)
        self._spaces[identity] = space
        return space

    @property
    def since(self) -> float:
        """No process uses metadata in this index that was requested before this time."""
        return self._times[METADATA_SINCE]

    def expire(self, moment: float) -> None:
        """Set `since` to `moment`, where no transaction is possible."""
        self._index.signals.expire_metadata(moment)

    def moment(self, identity: str, now: float) -> Moment:
        """The moment before a request to the origin. Also reads the origin's order again."""
        self._read_space(identity)
        with self._index.meta_reading() as txn:
            return Moment(now, read_number(txn, b"changes"))

    def learn_order(self, identity: str, keys: Sequence[str], after: str) -> bool:
        """Whether `keys`, as the origin listed them after `after`, are in an order that the map can store.

        If an origin turns out to sort folder by folder, its pages in the wrong order are dropped.
        """
        space = self.space(identity)
        if ascending(keys, after, space):
            return True
        if space.folders_first or not ascending(keys, after, Space(b"", folders_first=True)):
            return False

        def write(txn: Writing) -> None:
            txn.put(ORDER + digest_of(identity), b"folders first")
            new = _space_of(identity, folders_first=True)
            # Listings in flight, this one too, are stored in the new order, and are older than these changes.
            latest = read_number(txn, b"changes")
            for number in range(max(1, latest - CHANGES_KEPT), latest + 1):
                change = txn.get(change_key(number))
                if change is not None and change[:8] == space.digest:
                    txn.put(change_key(number), new.digest + encode(new.position(decode(bytes(change[8:])))))
            cursor = txn.cursor()
            for kind in (PAGE, RECORD):
                found = cursor.set_range(kind + space.digest)
                while found and cursor.key()[:9] == kind + space.digest:
                    found = cursor.delete()

        self._index.meta_write(write)
        self._read_space(identity)
        return True

    # --- looking ----------------------------------------------------------------------------------

    def look(self, read: Callable[[Transaction], _T]) -> _T:
        """The result of `read` on the map at one moment."""
        return self._index.look(read)

    def look_up(self, space: Space, key: str) -> Known | None:
        """The description of a key in the page of a space that names it, however old; None without such a page."""
        position = encode(space.position(key))
        return self._index.look(lambda txn: described_in_page(txn.cursor(), space, position))

    def unpacked(self, identity: str, key: str, changes: int) -> Remembered | None:
        """The description of a key in a page that this process has unpacked, however old; does not use the index.

        `changes` is the number of changes as of now.
        """
        space = self.space(identity)
        return None if space.folders_first else self._memory.find(space.digest, key, changes)

    def known_in(
        self, txn: Transaction, identity: str, key: str, oldest: float, newest: float, *, changes: int | None = None
    ) -> Known | None:
        """The description of a key from a request between two times: from a listing, from its level, or of it alone.

        Runs inside a read transaction. `changes`, the number from before it began, restricts the lookup to a cached object.
        An object that a page contradicts is no longer cached, so the first result suffices; the page may be unpacked
        for the next lookups.
        """
        space = self.space(identity)
        position = encode(space.position(key) if space.folders_first else key)
        if changes is not None:
            known = self.alone_in(txn, space, position)
            if known is not None and oldest <= known.sent_at <= newest:
                return known
        cursor = txn.cursor()
        known = described_in_page(cursor, space, position)
        if known is not None and oldest <= known.sent_at <= newest:
            if changes is not None and not space.folders_first:
                self._memory.note(space.digest, bytes(cursor.key()), cursor.value(), changes)
            return known
        known = described_in_page(
            cursor, self._level_above(identity, key), encode(key) if space.folders_first else position
        )
        if known is not None and oldest <= known.sent_at <= newest:
            return known
        known = self.alone_in(txn, space, position)
        return known if known is not None and oldest <= known.sent_at <= newest else None

    def alone_in(self, txn: Transaction, space: Space, position: bytes) -> Known | None:
        """The description of a key that was requested alone, however old."""
        value = txn.get(record_key(space, position))
        return None if value is None else Known(*description_in_record(value))

    def _level_above(self, identity: str, key: str) -> Space:
        """The level of a key: mostly that of the last key."""
        level = (identity, key[: key.rfind("/") + 1])
        last = self._last_level
        if last is None or last[0] != level:
            last = self._last_level = (level, level_space(*level))
        return last[1]

    def read_after(self, space: Space, position: str, read: Callable[[Stretch, Page], _T]) -> _T | None:
        """The result of `read` for the page that covers the keys after `position`; None without such a page.

        The page is valid only inside `read`.
        """
        own, wanted = PAGE + space.digest, encode(position)

        def found(at: bytes, value: memoryview) -> _T | None:
            if at[:9] != own:
                return None
            page = Page(value)
            through = page.through
            if through <= wanted:
                return None
            return read(Stretch(decode(at[9:]), decode(through), page.root, page.sent_at, page.incomplete), page)

        # The smallest greater key, so that a page that begins at `position` itself is found.
        return self._index.last_meta_before(own + wanted + b"\0", found)

    def stretch_naming(self, space: Space, key: str) -> Stretch | None:
        """The range of the page that names `key`."""
        position = encode(space.position(key))
        own = PAGE + space.digest

        def read(at: bytes, value: memoryview) -> Stretch | None:
            if at[:9] != own:
                return None
            page = Page(value)
            if page.find(position) is None:
                return None
            return Stretch(decode(at[9:]), decode(page.through), page.root, page.sent_at, page.incomplete)

        return self._index.last_meta_before(own + position, read)

    def key_before(self, space: Space, position: str) -> str | None:
        """The last key before `position` in the page that begins before it, or where that page begins; None without one."""
        own, wanted = PAGE + space.digest, encode(position)

        def read(at: bytes, value: memoryview) -> str | None:
            if at[:9] != own:
                return None
            named = [info.key for info in Page(value).infos() if encode(info.key) < wanted]
            return space.key(named[-1] if named else decode(at[9:]))

        return self._index.last_meta_before(own + wanted, read)

    def listed(self, space: Space, key: str) -> ObjectInfo | None:
        """The description of a key in the page that names it, however old."""
        known = self.look_up(space, key)
        return None if known is None else ObjectInfo(key, *known.description)

    def is_remembered(self, identity: str, key: str) -> bool:
        """Whether metadata of a key is stored, however old."""
        space = self.space(identity)
        levels = (space, level_space(identity, key[: key.rfind("/") + 1]))
        if any(self.look_up(each, key) for each in levels):
            return True
        with self._index.meta_reading() as txn:
            return self.alone_in(txn, space, encode(space.position(key))) is not None

    # --- storing ----------------------------------------------------------------------------------

    def store(
        self,
        space: Space,
        lower: str,
        through: str,
        infos: Sequence[ObjectInfo],
        moment: Moment,
        *,
        root: str,
        keep_empty: bool = False,
        keys: Space | None = None,
    ) -> list[ObjectInfo]:
        """Store that exactly `infos` are between the position `lower` and `through`, in order.

        Returns the descriptions that are outdated. Pages from a later request stay.
        Nothing is stored for a range without objects unless `keep_empty`. `keys` is the origin's space, where changes are
        noted, when `space` is that of a level.
        """
        entries = [(space.position(info.key), info) for info in infos]
        start, stop = encode(lower), encode(through)
        if len(start) > MOST_POSITION_BYTES or len(entries) > MOST_OBJECTS:
            return []
        if not all(storable(*entry) for entry in entries):
            return []

        def write(txn: Writing) -> list[ObjectInfo]:
            nonlocal entries, stop
            changes = changes_since(txn, moment.changes, keys or space)
            if changes is None:
                return []
            if keys is not None:
                changes = [encode(space.position(keys.key(decode(change)))) for change in changes]
            cursor = txn.cursor()
            old = list(overlapping(cursor, space, start, stop))
            incomplete = False
            for at, value in old:
                page = Page(value)
                if later(page.sent_at, moment.sent_at) and not page.incomplete:
                    if at <= start:
                        return []
                    incomplete = cut_differs(space, [start, *(encode(entry[0]) for entry in entries), stop], at)
                    stop = at
                    entries = [entry for entry in entries if encode(entry[0]) <= stop]
                    break
            old = [(at, value) for at, value in old if at < stop]
            value = pack_page(entries, sent_at=moment.sent_at, through=decode(stop), root=root, incomplete=incomplete)
            gone = struck_by(changes, space, start, stop, entries)
            if gone is not None:
                value = Page(value).without(gone)
            superseded = replace_pages(txn, space, start, stop, value, old, keep=bool(entries) or keep_empty)
            outdated, better = settle_records(cursor, space, start, stop, value, moment.sent_at)
            if keys is not None:
                outdated += settle_named(txn, keys, [info for _, info in entries], moment.sent_at)
            if better and (entries or keep_empty):
                txn.put(PAGE + space.digest + start, Page(value).without(better))
            return superseded + outdated

        return self._index.meta_write(write)

    def store_record(self, space: Space, info: ObjectInfo, moment: Moment) -> ObjectInfo | None:
        """Store a description; returns the stored one of the same key if it is outdated now."""

        def write(txn: Writing) -> ObjectInfo | None:
            changes = changes_since(txn, moment.changes, space)
            position = encode(space.position(info.key))
            if changes is None or any(concerns(change, position) for change in changes):
                return None
            at = record_key(space, position)
            value = txn.get(at)
            old = None if value is None else unpack_record(value)[0]
            listed = page_naming(txn.cursor(), space, position)
            if listed is not None:
                page = Page(listed[1])
                number = page.find(position)
                if number is not None and not later(page.sent_at, moment.sent_at):
                    description = page.info(number, info.key)
                    old = old or description
                    if (description.version, description.size) != (info.version, info.size):
                        txn.put(listed[0], page.without([position]))
            txn.put(at, pack_record(info, moment.sent_at))
            return old if old is not None and (old.version, old.size) != (info.version, info.size) else None

        return self._index.meta_write(write)

    # --- dropping -------------------------------------------------------------------------------

    def change(self, identity: str, key: str) -> ObjectInfo | None:
        """Note that `key` was written or removed; returns its old description.

        A key that ends in a slash is a directory: its listing is stale, its descriptions of single keys are not.
        """

        def write(txn: Writing) -> ObjectInfo | None:
            space = self._space_in(txn, identity)
            position = encode(space.position(key))
            number = read_number(txn, b"changes") + 1
            write_number(txn, b"changes", number)
            txn.put(change_key(number), space.digest + position)
            txn.delete(change_key(max(0, number - CHANGES_KEPT)))
            cursor = txn.cursor()
            self._mark_incomplete_in_other_order(txn, cursor, space, key)
            known = None
            if not key.endswith("/"):
                known = self._strike(txn, cursor, space, key)
                at = record_key(space, position)
                value = txn.get(at)
                if value is not None:
                    known = unpack_record(value)[0]
                    txn.delete(at)
            else:
                self._distrust(txn, cursor, space, position)
                self._strike(txn, cursor, space, key)
                self._distrust(txn, cursor, level_space(identity, key), encode(key))
            below = key.rstrip("/")
            while slash := below.rfind("/") + 1:
                level = level_space(identity, below[:slash])
                if below == key:
                    known = self._strike(txn, cursor, level, key) or known
                self._strike(txn, cursor, level, f"{below}/")  # this directory may be gone with its last key
                self._distrust(txn, cursor, level, encode(below[:slash]))
                below = below[: slash - 1]
            return known

        return self._index.meta_write(write, changed=True)

    def drop(self, space: Space) -> None:
        """Remove every page of a space."""

        def write(txn: Writing) -> None:
            cursor = txn.cursor()
            found = cursor.set_range(PAGE + space.digest)
            while found and cursor.key()[:9] == PAGE + space.digest:
                found = cursor.delete()

        self._index.meta_write(write, last_pages=True)

    def clear(self) -> None:
        """Drop everything. Requests that were sent before store nothing."""

        def write(txn: Writing) -> None:
            number = read_number(txn, b"changes") + 1
            self._index.drop_meta(txn)
            write_number(txn, b"changes", number)
            write_number(txn, b"cleared", number)

        self._index.clear_dead_readers()  # they keep pages from being free, which this needs on a full disk
        self._index.meta_write(write, changed=True, last_pages=True)

    def _strike(self, txn: Transaction, cursor: Any, space: Space, key: str) -> ObjectInfo | None:
        """Remove a key from the page that covers it; the page is incomplete then."""
        position = encode(space.position(key))
        found = page_naming(cursor, space, position)
        if found is None:
            return None
        page = Page(found[1])
        number = page.find(position)
        known = None if number is None else page.info(number, key)
        if number is not None or not page.incomplete:
            txn.put(found[0], page.without([position]))
        return known

    def _mark_incomplete_in_other_order(self, txn: Transaction, cursor: Any, space: Space, key: str) -> None:
        """Mark the pages as incomplete that name `key` if the origin lists folder by folder, as long as that is not known.

        Such an origin lists all of `a/` before `a b` and `a-b`. So a page up to `a b` names `a/k`, and a page from `a/k` on
        names `a-b`. These pages would otherwise still seem to be complete.
        """
        place, compared = by_folders(encode(key)), b""
        for number, character in enumerate("" if space.folders_first else key):
            if character > "/":
                continue
            nearest = f"{key[:number]}\0" if character == "/" else f"{key[:number]}/{END}"
            found = page_naming(cursor, space, encode(nearest), but=compared)
            if found is None:
                continue
            compared = found[0]  # mostly the page of the other directories, too
            if by_folders(compared[9:]) < place <= by_folders(Page(found[1]).through):
                make_incomplete(txn, *found)

    def _distrust(self, txn: Transaction, cursor: Any, space: Space, base: bytes) -> None:
        """Mark the pages as incomplete that cover keys below the position `base`."""
        for at, value in list(overlapping(cursor, space, base, base + encode(END))):
            make_incomplete(txn, PAGE + space.digest + at, value)


# --- unpacked pages -----------------------------------------------------------------------------------


class PageMemory:
    """The contents of unpacked pages, by space. Thread-safe without a lock: each step is one operation on a dict.

    A lookup in a packed page takes some five microseconds; in a dict, one. Unpacking a page of a thousand keys takes
    as long as some fifty lookups, so a page is unpacked after 32 lookups. The contents are valid until a process of
    this node changes something (the number of `signals.py`).

    Holds up to 65,536 keys (some 400 bytes each) and a page more. When it is full, nothing is added for a minute, so a
    data set of more keys does not replace its own pages; then it is emptied.
    """

    def __init__(
        self,
        *,
        most_keys: int = _MOST_KEYS,
        look_ups: int = _LOOK_UPS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most_keys = most_keys
        self._look_ups = look_ups
        self._clock = clock
        self._begin(0)

    def __len__(self) -> int:
        return sum(len(known) for known in list(self._known.values()))

    def find(self, space: bytes, key: str, changes: int) -> Remembered | None:
        """The description of a key in an unpacked page of a space, if nothing has changed since."""
        if changes != self._changes:
            return None
        known = self._known.get(space)
        return None if known is None else known.get(key)

    def note(self, space: bytes, at: bytes, value: memoryview, changes: int) -> None:
        """Count a lookup in this page, which is stored under `at` in the index; unpack the page after many of them.

        `changes` is the number from before the page was read, while no change was in progress.
        """
        if changes != self._changes:
            self._begin(changes)
        count = self._counts.get(at, 0) + 1
        if count < self._look_ups:
            if len(self._counts) >= _MOST_PAGES:
                self._counts.clear()
            self._counts[at] = count
        elif len(self) < self._most_keys:
            self._counts.pop(at, None)
            page = Page(value)
            if not page.incomplete:  # none of its objects is removed
                positions, sizes, versions, times = page.columns()
                known = self._known.setdefault(space, {})
                known.update(
                    zip(positions, zip(sizes, versions, times, repeat(page.sent_at), strict=False), strict=True)
                )
        elif self._clock() >= self._since + _PAUSE_SECONDS:
            self._begin(changes)

    def _begin(self, changes: int) -> None:
        # In this order: a reader of the new number finds no older content.
        self._counts: dict[bytes, int] = {}
        self._known: dict[bytes, dict[str, Remembered]] = {}
        self._since = self._clock()
        self._changes = changes
