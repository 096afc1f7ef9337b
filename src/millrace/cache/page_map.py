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

import hashlib
import json
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

from millrace.cache.index import Index
from millrace.cache.pages import Page, decode, encode, pack_page, storable
from millrace.origin import ObjectInfo

_T = TypeVar("_T")
_Transaction = Any  # py-lmdb has no types

END = "\U0010ffff"
"""Sorts after everything that a key may continue with."""

_PAGE, _RECORD, _CHANGE, _ORDER, _NUMBER = b"P", b"R", b"T", b"O", b"N"
_CHANGES_KEPT = 4096
_MOST_POSITION_BYTES = 480  # LMDB takes keys of 511 bytes
_U64 = struct.Struct(">Q")


@dataclass(frozen=True, slots=True)
class Space:
    """The keys of one origin in its order, or one level of a directory's listing in ours."""

    digest: bytes
    folders_first: bool = False

    def position(self, key: str) -> str:
        """Where `key` sorts."""
        return key.replace("/", "\0") if self.folders_first else key

    def key(self, position: str) -> str:
        """The reverse of `position`."""
        return position.replace("\0", "/") if self.folders_first else position


@dataclass(frozen=True, slots=True)
class Moment:
    """When the origin was asked: the time, and the number of the last change that was known by then."""

    asked: float
    changes: int


class Known(NamedTuple):
    """What a page says about a key: its description, None when it does not name the key; and how good the page is."""

    info: ObjectInfo | None
    asked: float
    incomplete: bool


@dataclass(frozen=True, slots=True)
class Stretch:
    """A page without its objects: what lies after the position `lower`, up to `through`, in a listing of `root`."""

    lower: str
    through: str
    root: str
    asked: float
    incomplete: bool


def _digest(*parts: str) -> bytes:
    return hashlib.blake2b(encode("\0".join(parts)), digest_size=8).digest()


def level_space(identity: str, base: str) -> Space:
    """The space of one level: what lies directly below the directory `base` (with its slash); prefixes end in a slash."""
    return Space(_digest("level", identity, base))


class PageMap:
    """The map of one index. Thread- and process-safe; raises what `Index` raises."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._spaces: dict[str, Space] = {}

    # --- spaces and time --------------------------------------------------------------------------

    def space(self, identity: str) -> Space:
        """All keys of an origin, in the order that is known by now."""
        space = self._spaces.get(identity)
        return space if space is not None else self._read_space(identity)

    def _read_space(self, identity: str) -> Space:
        with self._index.meta_reading() as txn:
            folders_first = txn.get(_ORDER + _digest(identity)) is not None
        space = Space(_digest("all", identity, "folders first" if folders_first else ""), folders_first)
        self._spaces[identity] = space
        return space

    def moment(self, identity: str, now: float) -> Moment:
        """To be taken before the origin is asked. Also looks again how the origin sorts."""
        self._read_space(identity)
        with self._index.meta_reading() as txn:
            return Moment(now, _number(txn, b"changes"))

    def learn_order(self, identity: str, keys: Sequence[str], after: str) -> bool:
        """Whether `keys`, as the origin listed them after `after`, are in an order that the map can keep.

        An origin that turns out to sort folder by folder loses what was remembered in the wrong order.
        """
        space = self.space(identity)
        if _ascending(keys, after, space):
            return True
        if space.folders_first or not _ascending(keys, after, Space(b"", folders_first=True)):
            return False
        with self._index.meta_writing() as txn:
            txn.put(_ORDER + _digest(identity), b"folders first")
            cursor = txn.cursor()
            for kind in (_PAGE, _RECORD):
                found = cursor.set_range(kind + space.digest)
                while found and cursor.key()[:9] == kind + space.digest:
                    found = cursor.delete()
        self._read_space(identity)
        return True

    # --- looking ----------------------------------------------------------------------------------

    def look_up(self, space: Space, key: str) -> Known | None:
        """What the pages of a space say about a key; None when no page covers it."""
        position = encode(space.position(key) if space.folders_first else key)
        own = _PAGE + space.digest

        def read(at: bytes, value: memoryview) -> Known | None:
            if not at.startswith(own):
                return None
            page = Page(value)
            number = page.find(position)
            if number is None:
                return Known(None, page.asked, page.incomplete) if position <= page.through else None
            return Known(page.info(number, key), page.asked, page.incomplete)

        return self._index.last_meta_before(own + position, read)

    def read_after(self, space: Space, position: str, read: Callable[[Stretch, Page], _T]) -> _T | None:
        """What `read` makes of the page that says what follows `position`; None where there is none.

        The page is valid only inside `read`.
        """
        own, wanted = _PAGE + space.digest, encode(position)

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
        own = _PAGE + space.digest

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
        return None if known is None else known.info

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
        if len(start) > _MOST_POSITION_BYTES or not all(storable(*entry) for entry in entries):
            return []
        with self._index.meta_writing() as txn:
            changes = _changes_since(txn, moment.changes, keys or space)
            if changes is None:
                return []
            if keys is not None:
                changes = [encode(space.position(keys.key(decode(change)))) for change in changes]
            cursor = txn.cursor()
            old = list(_overlapping(cursor, space, start, stop))
            for at, value in old:
                page = Page(value)
                if page.asked > moment.asked and not page.incomplete:
                    if at <= start:
                        return []
                    stop = at
                    entries = [entry for entry in entries if encode(entry[0]) <= stop]
                    break
            old = [(at, value) for at, value in old if at < stop]
            value = pack_page(entries, asked=moment.asked, through=decode(stop), root=root)
            gone = _struck_by(changes, space, start, stop, entries)
            if gone is not None:
                value = Page(value).without(gone)
            superseded = _replace(txn, space, start, stop, value, old, keep=bool(entries) or keep_empty)
            superseded += _drop_records(cursor, space, start, stop, value, moment.asked)
        return superseded

    # --- keys that were described alone -----------------------------------------------------------

    def record(self, space: Space, key: str) -> tuple[ObjectInfo, float] | None:
        """What the origin said when it was asked about `key` alone, and when."""
        with self._index.meta_reading() as txn:
            value = txn.get(_record_key(space, key))
            return None if value is None else _unpack_record(value)

    def store_record(self, space: Space, info: ObjectInfo, moment: Moment) -> ObjectInfo | None:
        """Remember a description; returns another one that was remembered of the key and is not true any more."""
        with self._index.meta_writing() as txn:
            changes = _changes_since(txn, moment.changes, space)
            position = encode(space.position(info.key))
            if changes is None or any(_concerns(change, position) for change in changes):
                return None
            at = _record_key(space, info.key)
            value = txn.get(at)
            old = None if value is None else _unpack_record(value)[0]
            listed = _page_naming(txn.cursor(), space, position)
            if listed is not None:
                page = Page(listed[1])
                number = page.find(position)
                if number is not None and page.asked <= moment.asked:
                    said = page.info(number, info.key)
                    old = old or said
                    if (said.version, said.size) != (info.version, info.size):
                        txn.put(listed[0], page.without([position]))
            txn.put(at, json.dumps([info.key, info.size, info.version, info.modified, moment.asked]).encode())
        return old if old is not None and (old.version, old.size) != (info.version, info.size) else None

    # --- forgetting -------------------------------------------------------------------------------

    def change(self, identity: str, key: str) -> ObjectInfo | None:
        """Note that `key` was written or removed; returns what was known of it.

        A key that ends in a slash is a directory: its listing is not believed any more, what it says about single keys is.
        """
        space = self.space(identity)
        position = encode(space.position(key))
        with self._index.meta_writing(changed=True) as txn:
            number = _number(txn, b"changes") + 1
            _set_number(txn, b"changes", number)
            txn.put(_CHANGE + _U64.pack(number), space.digest + position)
            txn.delete(_CHANGE + _U64.pack(max(0, number - _CHANGES_KEPT)))
            cursor = txn.cursor()
            known = None
            if not key.endswith("/"):
                known = self._strike(txn, cursor, space, key)
                value = txn.get(_record_key(space, key))
                if value is not None:
                    known = _unpack_record(value)[0]
                    txn.delete(_record_key(space, key))
            else:
                base = position
                for at, page in list(_overlapping(cursor, space, base, base + encode(END))):
                    _make_incomplete(txn, _PAGE + space.digest + at, page)
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
            found = cursor.set_range(_PAGE + space.digest)
            while found and cursor.key()[:9] == _PAGE + space.digest:
                found = cursor.delete()

    def clear(self) -> None:
        """Forget everything; who asked the origin before that stores nothing."""
        with self._index.meta_writing(changed=True) as txn:
            number = _number(txn, b"changes") + 1
            self._index.drop_meta(txn)
            _set_number(txn, b"changes", number)
            _set_number(txn, b"cleared", number)

    def _strike(self, txn: _Transaction, cursor: Any, space: Space, key: str) -> ObjectInfo | None:
        """Take a key out of the page that covers it, whose stretch is not complete any more."""
        position = encode(space.position(key))
        found = _page_naming(cursor, space, position)
        if found is None:
            return None
        page = Page(found[1])
        number = page.find(position)
        known = None if number is None else page.info(number, key)
        if number is not None or not page.incomplete:
            txn.put(found[0], page.without([position]))
        return known

    def _distrust(self, txn: _Transaction, cursor: Any, level: Space, base: bytes) -> None:
        for at, value in list(_overlapping(cursor, level, base, base + encode(END))):
            _make_incomplete(txn, _PAGE + level.digest + at, value)


def _make_incomplete(txn: _Transaction, at: bytes, value: bytes) -> None:
    page = Page(value)
    if not page.incomplete:
        txn.put(at, page.without([]))


def _ascending(keys: Sequence[str], after: str, space: Space) -> bool:
    positions = [space.position(key) for key in keys]
    if positions and positions[0] <= space.position(after):
        return False
    return all(first < second for first, second in pairwise(positions))


def _number(txn: _Transaction, name: bytes) -> int:
    value = txn.get(_NUMBER + name)
    return 0 if value is None else int(_U64.unpack(value)[0])


def _set_number(txn: _Transaction, name: bytes, number: int) -> None:
    txn.put(_NUMBER + name, _U64.pack(number))


def _changes_since(txn: _Transaction, number: int, space: Space) -> list[bytes] | None:
    """The positions that were changed since the change `number`; None when that is not known any more."""
    latest = _number(txn, b"changes")
    if number < _number(txn, b"cleared") or latest - number > _CHANGES_KEPT - 1:
        return None
    values = [bytes(txn.get(_CHANGE + _U64.pack(each)) or b"") for each in range(number + 1, latest + 1)]
    return [value[8:] for value in values if value[:8] == space.digest]


def _concerns(change: bytes, position: bytes) -> bool:
    """Whether a change may be one of `position`: it is that key, or a directory above it."""
    return position == change or (change[-1:] in (b"/", b"\0") and position.startswith(change))


def _struck_by(
    changes: Sequence[bytes], space: Space, start: bytes, stop: bytes, entries: Sequence[tuple[str, ObjectInfo]]
) -> list[bytes] | None:
    """The positions among `entries` that were changed; None when nothing was changed in the stretch at all."""
    near = [change for change in changes if start < change + b"\xff" and change <= stop]
    if not near:
        return None
    return [position for position in (encode(each) for each, _ in entries) if any(_concerns(c, position) for c in near)]


def _overlapping(cursor: Any, space: Space, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The pages that say something about what follows `start`, up to `stop`, each with the position where it begins."""
    own = _PAGE + space.digest
    found = cursor.set_range(own + start)
    if not (found and bytes(cursor.key()) == own + start):
        before = cursor.prev() if found else cursor.last()
        if before and bytes(cursor.key()[:9]) == own:
            value = bytes(cursor.value())
            if Page(value).through > start:
                yield bytes(cursor.key()[9:]), value
        found = cursor.set_range(own + start)
    while found and bytes(cursor.key()[:9]) == own and bytes(cursor.key()[9:]) < stop:
        at = bytes(cursor.key())
        yield at[9:], bytes(cursor.value())
        found = cursor.set_range(at) and cursor.next()


def _page_naming(cursor: Any, space: Space, position: bytes) -> tuple[bytes, bytes] | None:
    """The page that covers `position`, with its place in the index."""
    own = _PAGE + space.digest
    before = cursor.prev() if cursor.set_range(own + position) else cursor.last()
    if not before or bytes(cursor.key()[:9]) != own:
        return None
    value = bytes(cursor.value())
    return (bytes(cursor.key()), value) if Page(value).through >= position else None


def _replace(
    txn: _Transaction,
    space: Space,
    start: bytes,
    stop: bytes,
    value: bytes,
    old: Sequence[tuple[bytes, bytes]],
    *,
    keep: bool,
) -> list[ObjectInfo]:
    """Put a page in the place of `old` ones, whose ends beyond it stay; returns what they said that is not true any more."""
    own = _PAGE + space.digest
    page = Page(value)
    if len(old) == 1 and old[0][0] == start and Page(old[0][1]).through == stop and page.same_objects(Page(old[0][1])):
        txn.put(own + start, value)
        return []
    before: list[tuple[str, ObjectInfo]] = []
    rests: list[tuple[bytes, bytes]] = []
    for at, old_value in old:
        old_page = Page(old_value)
        entries = [(info.key, info) for info in old_page.infos()]
        before += [entry for entry in entries if start < encode(entry[0]) <= stop]
        if at < start:
            rests.append((at, _part(old_page, [e for e in entries if encode(e[0]) <= start], start)))
        if old_page.through > stop:
            rests.append((stop, _part(old_page, [e for e in entries if encode(e[0]) > stop], old_page.through)))
    if not keep and not before and len(old) == 1 and rests:
        return []  # a stretch of a listing in which there was nothing, and is nothing
    for at, _ in old:
        txn.delete(own + at)
    for at, rest in rests:
        txn.put(own + at, rest)
    if keep:
        txn.put(own + start, value)
    now = {info.key: (info.version, info.size) for info in page.infos()}
    return [
        ObjectInfo(space.key(position), info.size, info.version, info.modified)
        for position, info in before
        if now.get(position) != (info.version, info.size)
    ]


def _part(page: Page, entries: Sequence[tuple[str, ObjectInfo]], through: bytes) -> bytes:
    return pack_page(entries, asked=page.asked, through=decode(through), root=page.root, incomplete=page.incomplete)


def _record_key(space: Space, key: str) -> bytes:
    position = encode(space.position(key))
    if len(position) > _MOST_POSITION_BYTES:
        position = position[: _MOST_POSITION_BYTES - 16] + hashlib.blake2b(position, digest_size=16).digest()
    return _RECORD + space.digest + position


def _unpack_record(value: memoryview) -> tuple[ObjectInfo, float]:
    key, size, version, modified, asked = json.loads(bytes(value))
    return ObjectInfo(key, size, version, modified), asked


def _drop_records(cursor: Any, space: Space, start: bytes, stop: bytes, value: bytes, asked: float) -> list[ObjectInfo]:
    """Remove the single records that a page replaces; returns those that said something else."""
    own = _RECORD + space.digest
    page = Page(value)
    superseded = []
    found = cursor.set_range(own + start)
    while found and bytes(cursor.key()[:9]) == own and bytes(cursor.key()[9:]) <= stop:
        info, described = _unpack_record(cursor.value())
        position = encode(space.position(info.key))
        number = page.find(position)
        if described > asked or not start < position <= stop:
            found = cursor.next()
            continue
        if number is None or (page.info(number, info.key).version, page.info(number, info.key).size) != (
            info.version,
            info.size,
        ):
            superseded.append(info)
        found = cursor.delete()
    return superseded
