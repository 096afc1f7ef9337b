"""Everything that is remembered of an origin's keys, as an ordered map in the index: which stretch of keys was listed when.

A listed stretch is a page (`pages.py`) under the position where it begins. Pages never overlap, so the page that could name
a key is found by one step of a cursor, whatever was listed: a bucket, a directory, a single level. Nothing is recorded for
each key beside its page; only a key that was described alone has a record of its own.

A *position* is a key as its origin sorts: by its bytes, as S3 does; or folder by folder, as servers with real directories
do, where `/` comes before every other character. Which one it is shows in what the origin answers.

What this node writes is remembered as a numbered change. An answer that the origin gave before the change is not believed
about that key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from millrace.cache.index import Index
from millrace.cache.page_memory import PageMemory, Remembered
from millrace.cache.page_rows import (
    CHANGES_KEPT,
    MOST_POSITION_BYTES,
    ORDER,
    PAGE,
    RECORD,
    Transaction,
    ascending,
    change_key,
    changes_since,
    concerns,
    later,
    make_incomplete,
    overlapping,
    pack_record,
    page_naming,
    read_number,
    record_key,
    replace_pages,
    said_in_record,
    settle_named,
    settle_records,
    struck_by,
    unpack_record,
    write_number,
)
from millrace.cache.pages import MOST_OBJECTS, Page, Said, decode, encode, pack_page, said_in, storable
from millrace.cache.positions import END, Moment, Space, digest_of, level_space
from millrace.origin import ObjectInfo

_T = TypeVar("_T")


class Known(NamedTuple):
    """What is remembered of a key, and when the origin was asked."""

    said: Said
    asked: float


def page_saying(cursor: Any, space: Space, position: bytes) -> Known | None:
    """What the page of a space that names `position` says of it."""
    own = PAGE + space.digest
    found = cursor.prev() if cursor.set_range(own + position) else cursor.last()
    if not found:
        return None
    at, value = cursor.item()
    if at[:9] != own:
        return None
    asked, said = said_in(value, position)
    return None if said is None else Known(said, asked)


@dataclass(frozen=True, slots=True)
class Stretch:
    """A page without its objects: what lies after the position `lower`, up to `through`, in a listing of `root`."""

    lower: str
    through: str
    root: str
    asked: float
    incomplete: bool


class PageMap:
    """The map of one index. Thread- and process-safe; raises what `Index` raises."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._spaces: dict[str, Space] = {}
        self._memory = PageMemory()
        self._last_level: tuple[tuple[str, str], Space] | None = None

    # --- spaces and time --------------------------------------------------------------------------

    def space(self, identity: str) -> Space:
        """All keys of an origin, in the order that is known by now."""
        space = self._spaces.get(identity)
        return space if space is not None else self._read_space(identity)

    def _read_space(self, identity: str) -> Space:
        with self._index.meta_reading() as txn:
            folders_first = txn.get(ORDER + digest_of(identity)) is not None
        space = Space(digest_of("all", identity, "folders first" if folders_first else ""), folders_first)
        self._spaces[identity] = space
        return space

    def moment(self, identity: str, now: float) -> Moment:
        """To be taken before the origin is asked. Also looks again how the origin sorts."""
        self._read_space(identity)
        with self._index.meta_reading() as txn:
            return Moment(now, read_number(txn, b"changes"))

    def learn_order(self, identity: str, keys: Sequence[str], after: str) -> bool:
        """Whether `keys`, as the origin listed them after `after`, are in an order that the map can keep.

        An origin that turns out to sort folder by folder loses what was remembered in the wrong order.
        """
        space = self.space(identity)
        if ascending(keys, after, space):
            return True
        if space.folders_first or not ascending(keys, after, Space(b"", folders_first=True)):
            return False
        with self._index.meta_writing() as txn:
            txn.put(ORDER + digest_of(identity), b"folders first")
            cursor = txn.cursor()
            for kind in (PAGE, RECORD):
                found = cursor.set_range(kind + space.digest)
                while found and cursor.key()[:9] == kind + space.digest:
                    found = cursor.delete()
        self._read_space(identity)
        return True

    # --- looking ----------------------------------------------------------------------------------

    def look(self, read: Callable[[Transaction], _T]) -> _T:
        """What `read` makes of the map as of one moment."""
        return self._index.look(read)

    def look_up(self, space: Space, key: str) -> Known | None:
        """What the page of a space that names a key says of it, however old; None when none does."""
        position = encode(space.position(key))
        return self._index.look(lambda txn: page_saying(txn.cursor(), space, position))

    def unpacked(self, identity: str, key: str, changes: int) -> Remembered | None:
        """What the page that names a key says, however old, if this process has unpacked it; without the index.

        `changes` is the number of changes as of now.
        """
        space = self.space(identity)
        return None if space.folders_first else self._memory.find(space.digest, key, changes)

    def known_in(
        self, txn: Transaction, identity: str, key: str, oldest: float, newest: float, *, changes: int | None = None
    ) -> Known | None:
        """What is remembered of a key and was asked for between two times: of everything, of its level, or of it alone.

        Inside a transaction that reads. `changes`, the number from before it began, says that only an object which is here
        is wanted. What a page contradicts is not here any more, so that what is found first will do; and the page may be
        unpacked for the keys that are looked up next.
        """
        space = self.space(identity)
        position = encode(space.position(key) if space.folders_first else key)
        if changes is not None:
            known = self.alone_in(txn, space, position)
            if known is not None and oldest <= known.asked <= newest:
                return known
        cursor = txn.cursor()
        known = page_saying(cursor, space, position)
        if known is not None and oldest <= known.asked <= newest:
            if changes is not None and not space.folders_first:
                self._memory.note(space.digest, bytes(cursor.key()), cursor.value(), changes)
            return known
        known = page_saying(cursor, self._level_above(identity, key), encode(key) if space.folders_first else position)
        if known is not None and oldest <= known.asked <= newest:
            return known
        known = self.alone_in(txn, space, position)
        return known if known is not None and oldest <= known.asked <= newest else None

    def alone_in(self, txn: Transaction, space: Space, position: bytes) -> Known | None:
        """What the origin said when it was asked about a key alone, however old."""
        value = txn.get(record_key(space, position))
        return None if value is None else Known(*said_in_record(value))

    def _level_above(self, identity: str, key: str) -> Space:
        """The level that a key is on: mostly that of the last key."""
        asked = (identity, key[: key.rfind("/") + 1])
        last = self._last_level
        if last is None or last[0] != asked:
            last = self._last_level = (asked, level_space(*asked))
        return last[1]

    def read_after(self, space: Space, position: str, read: Callable[[Stretch, Page], _T]) -> _T | None:
        """What `read` makes of the page that says what follows `position`; None where there is none.

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
            return read(Stretch(decode(at[9:]), decode(through), page.root, page.asked, page.incomplete), page)

        # The smallest key that is greater: a page that begins at `position` itself is the one.
        return self._index.last_meta_before(own + wanted + b"\0", found)

    def stretch_naming(self, space: Space, key: str) -> Stretch | None:
        """The stretch of the page that names `key`."""
        position = encode(space.position(key))
        own = PAGE + space.digest

        def read(at: bytes, value: memoryview) -> Stretch | None:
            if at[:9] != own:
                return None
            page = Page(value)
            if page.find(position) is None:
                return None
            return Stretch(decode(at[9:]), decode(page.through), page.root, page.asked, page.incomplete)

        return self._index.last_meta_before(own + position, read)

    def listed(self, space: Space, key: str) -> ObjectInfo | None:
        """What the page that names a key said, however old."""
        known = self.look_up(space, key)
        return None if known is None else ObjectInfo(key, *known.said)

    def is_remembered(self, identity: str, key: str) -> bool:
        """Whether anything is remembered of a key, however old."""
        space = self.space(identity)
        levels = (space, level_space(identity, key[: key.rfind("/") + 1]))
        return any(self.listed(each, key) for each in levels) or self.record(space, key) is not None

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
        """Remember that after the position `lower`, up to `through`, there are exactly `infos`, in order.

        Returns the descriptions that are not true any more. Pages that know better, since the origin was asked later, stay.
        Nothing is kept for a stretch without objects unless `keep_empty`. `keys` is the origin's space, where changes are
        noted, when `space` is that of a level.
        """
        entries = [(space.position(info.key), info) for info in infos]
        start, stop = encode(lower), encode(through)
        if len(start) > MOST_POSITION_BYTES or len(entries) > MOST_OBJECTS:
            return []
        if not all(storable(*entry) for entry in entries):
            return []
        with self._index.meta_writing() as txn:
            changes = changes_since(txn, moment.changes, keys or space)
            if changes is None:
                return []
            if keys is not None:
                changes = [encode(space.position(keys.key(decode(change)))) for change in changes]
            cursor = txn.cursor()
            old = list(overlapping(cursor, space, start, stop))
            for at, value in old:
                page = Page(value)
                if later(page.asked, moment.asked) and not page.incomplete:
                    if at <= start:
                        return []
                    stop = at
                    entries = [entry for entry in entries if encode(entry[0]) <= stop]
                    break
            old = [(at, value) for at, value in old if at < stop]
            value = pack_page(entries, asked=moment.asked, through=decode(stop), root=root)
            gone = struck_by(changes, space, start, stop, entries)
            if gone is not None:
                value = Page(value).without(gone)
            superseded = replace_pages(txn, space, start, stop, value, old, keep=bool(entries) or keep_empty)
            said, better = settle_records(cursor, space, start, stop, value, moment.asked)
            if keys is not None:
                said += settle_named(txn, keys, [info for _, info in entries], moment.asked)
            if better and (entries or keep_empty):
                txn.put(PAGE + space.digest + start, Page(value).without(better))
        return superseded + said

    # --- keys that were described alone -----------------------------------------------------------

    def record(self, space: Space, key: str) -> tuple[ObjectInfo, float] | None:
        """What the origin said when it was asked about `key` alone, and when."""
        with self._index.meta_reading() as txn:
            value = txn.get(record_key(space, encode(space.position(key))))
            return None if value is None else unpack_record(value)

    def store_record(self, space: Space, info: ObjectInfo, moment: Moment) -> ObjectInfo | None:
        """Remember a description; returns another one that was remembered of the key and is not true any more."""
        with self._index.meta_writing() as txn:
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
                if number is not None and not later(page.asked, moment.asked):
                    said = page.info(number, info.key)
                    old = old or said
                    if (said.version, said.size) != (info.version, info.size):
                        txn.put(listed[0], page.without([position]))
            txn.put(at, pack_record(info, moment.asked))
        return old if old is not None and (old.version, old.size) != (info.version, info.size) else None

    # --- forgetting -------------------------------------------------------------------------------

    def change(self, identity: str, key: str) -> ObjectInfo | None:
        """Note that `key` was written or removed; returns what was known of it.

        A key that ends in a slash is a directory: its listing is not believed any more, what it says about single keys is.
        """
        space = self.space(identity)
        position = encode(space.position(key))
        with self._index.meta_writing(changed=True) as txn:
            number = read_number(txn, b"changes") + 1
            write_number(txn, b"changes", number)
            txn.put(change_key(number), space.digest + position)
            txn.delete(change_key(max(0, number - CHANGES_KEPT)))
            cursor = txn.cursor()
            known = None
            if not key.endswith("/"):
                known = self._strike(txn, cursor, space, key)
                at = record_key(space, position)
                value = txn.get(at)
                if value is not None:
                    known = unpack_record(value)[0]
                    txn.delete(at)
            else:
                base = position
                for at, page in list(overlapping(cursor, space, base, base + encode(END))):
                    make_incomplete(txn, PAGE + space.digest + at, page)
                self._distrust(txn, cursor, level_space(identity, key), encode(key))
            below = key.rstrip("/")
            while slash := below.rfind("/") + 1:
                level = level_space(identity, below[:slash])
                if below == key:
                    known = self._strike(txn, cursor, level, key) or known
                self._distrust(txn, cursor, level, encode(below[:slash]))
                below = below[: slash - 1]
            return known

    def drop(self, space: Space) -> None:
        """Forget every page of a space."""
        with self._index.meta_writing() as txn:
            cursor = txn.cursor()
            found = cursor.set_range(PAGE + space.digest)
            while found and cursor.key()[:9] == PAGE + space.digest:
                found = cursor.delete()

    def clear(self) -> None:
        """Forget everything; who asked the origin before that stores nothing."""
        with self._index.meta_writing(changed=True) as txn:
            number = read_number(txn, b"changes") + 1
            self._index.drop_meta(txn)
            write_number(txn, b"changes", number)
            write_number(txn, b"cleared", number)

    def _strike(self, txn: Transaction, cursor: Any, space: Space, key: str) -> ObjectInfo | None:
        """Take a key out of the page that covers it, whose stretch is not complete any more."""
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

    def _distrust(self, txn: Transaction, cursor: Any, level: Space, base: bytes) -> None:
        for at, value in list(overlapping(cursor, level, base, base + encode(END))):
            make_incomplete(txn, PAGE + level.digest + at, value)
