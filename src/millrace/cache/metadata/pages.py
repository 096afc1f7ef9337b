"""Pages of listings as bytes, and the rows of the index's table of metadata that contain them. No I/O.

A page holds a thousand objects; one is found without reading the others. Layout: a header; a hash table of the names (u16
numbers of objects, linear probing, at most half full); sizes (u64) and times (f64) of all objects; the offsets of each name
and each version (u32); then the texts: the bound `through`, the listing's root, the prefix that all names share, the names,
the versions. Names are sorted by their bytes.

Names are *positions*: keys as the origin sorts them, see `Space`. Figures: docs/design/0006-metadata.md.

A row's key begins with its kind. Pages and single records follow by space and position, changes by their number. The second
part of this file has the steps of a transaction on rows; `page_map.py` combines them.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import xxhash

from millrace.origin import ObjectInfo

MOST_OBJECTS = 4096
"""The most objects of a page; a listing returns a thousand."""

_VERSION = 1
_INCOMPLETE = 1
_STRUCK = 2**64 - 1
_NO_OBJECT = 0xFFFF
_SEPARATOR = "\n"
_describe = partial(tuple.__new__, ObjectInfo)  # `ObjectInfo._make` without a Python function for each object

# Format, flags, objects, slots of the hash table, time of the request; where sizes, times, starts of names and versions,
# the five texts and the end are.
_HEADER = struct.Struct("<BBHHxxd10I")
_FLAGS_AT = 1
_SLOT = struct.Struct("<H")
_PAIR = struct.Struct("<II")
_SIZE = struct.Struct("<Q")
_TIME = struct.Struct("<d")


def encode(text: str) -> bytes:
    """A key or a position in the form that is stored and sorted."""
    return text.encode("utf-8", "surrogatepass")


def decode(data: bytes) -> str:
    """The reverse of `encode`."""
    return data.decode("utf-8", "surrogatepass")


END = "\U0010ffff"
"""Sorts after everything that a key may continue with."""


class Space(NamedTuple):
    """The keys of one origin in its order, or one level of a directory's listing in byte order."""

    digest: bytes
    folders_first: bool = False

    def position(self, key: str) -> str:
        """The position of `key`."""
        return key.replace("/", "\0") if self.folders_first else key

    def key(self, position: str) -> str:
        """The reverse of `position`."""
        return position.replace("\0", "/") if self.folders_first else position


def digest_of(*parts: str) -> bytes:
    return hashlib.blake2b(encode("\0".join(parts)), digest_size=8).digest()


def level_space(identity: str, base: str) -> Space:
    """The space of one level: the direct children of the directory `base` (with its slash); prefixes end in a slash."""
    return Space(digest_of("level", identity, base))


def storable(position: str, info: ObjectInfo) -> bool:
    """Whether a page can hold an object: its texts must not contain the separator."""
    return _SEPARATOR not in position and _SEPARATOR not in info.version


def pack_page(
    entries: Sequence[tuple[str, ObjectInfo]], *, sent_at: float, through: str, root: str, incomplete: bool = False
) -> bytes:
    """A page of objects by position, in ascending order; the key of an object's description is not kept.

    `sent_at` is the time of the request. The page covers the keys up to the position `through`, in a listing of `root`. An
    `incomplete` page may lack keys.
    """
    names = [position for position, _ in entries]
    cut = _shared(names[0], names[-1]) if names else 0
    prefix = names[0][:cut] if names else ""
    name_parts = [encode(name[cut:]) for name in names]
    version_parts = [encode(info.version) for _, info in entries]
    sections = [
        _hash_table(name_parts),
        array("Q", [info.size for _, info in entries]).tobytes(),
        array("d", [info.modified for _, info in entries]).tobytes(),
        _starts(name_parts),
        _starts(version_parts),
        encode(through),
        encode(root),
        encode(prefix),
        b"\n".join(name_parts),
        b"\n".join(version_parts),
    ]
    ends = list(accumulate(map(len, sections), initial=_HEADER.size))
    flags = _INCOMPLETE if incomplete else 0
    header = _HEADER.pack(_VERSION, flags, len(entries), len(sections[0]) // _SLOT.size, sent_at, *ends[1:])
    return header + b"".join(sections)


def _shared(first: str, last: str) -> int:
    """The length of the common prefix of two texts, and so of all that sort between them."""
    for number, (one, other) in enumerate(zip(first, last, strict=False)):
        if one != other:
            return number
    return min(len(first), len(last))


def _hash_table(names: Sequence[bytes]) -> bytes:
    slots = 1 << max(1, (2 * len(names) - 1).bit_length())
    table = array("H", [_NO_OBJECT]) * slots
    digest, mask = xxhash.xxh3_64_intdigest, slots - 1
    for number, name in enumerate(names):
        slot = digest(name) & mask
        while table[slot] != _NO_OBJECT:
            slot = (slot + 1) & mask
        table[slot] = number
    return table.tobytes()


def _starts(parts: Sequence[bytes]) -> bytes:
    """The offset of each part in their join by one separator, and that of a part after the last."""
    return array("I", accumulate((len(part) + 1 for part in parts), initial=0)).tobytes()


class Description(NamedTuple):
    """The description of an object: its size in bytes, its version, and when it was modified, in Unix seconds."""

    size: int
    version: str
    modified: float


def description_in(data: memoryview, position: bytes) -> tuple[float, Description | None]:
    """When a packed page was requested, and its description of the object at `position`; None if it does not name it.

    The results of `Page.find` and `Page.info` by one function: every first open of a file by a process calls it.
    """
    header = _HEADER.unpack_from(data)
    version, _, _, slots, sent_at, sizes, times, name_starts, version_starts, _, _, prefix_at, names, versions, _ = (
        header
    )
    if version != _VERSION:
        raise ValueError(f"a page of format {version}")
    length = names - prefix_at
    if position[:length] != data[prefix_at:names]:
        return sent_at, None
    name = position[length:]
    nbytes = len(name)
    slot = xxhash.xxh3_64_intdigest(name)
    while True:
        slot &= slots - 1
        (number,) = _SLOT.unpack_from(data, _HEADER.size + 2 * slot)
        if number == _NO_OBJECT:
            return sent_at, None
        start, stop = _PAIR.unpack_from(data, name_starts + 4 * number)
        if stop - start - 1 == nbytes and data[names + start : names + stop - 1] == name:
            break
        slot += 1
    (size,) = _SIZE.unpack_from(data, sizes + 8 * number)
    if size == _STRUCK:
        return sent_at, None
    start, stop = _PAIR.unpack_from(data, version_starts + 4 * number)
    text = str(data[versions + start : versions + stop - 1], "utf-8", "surrogatepass")
    return sent_at, Description(size, text, _TIME.unpack_from(data, times + 8 * number)[0])


class Page:
    """A packed page, read in place: only the requested parts are copied.

    `data` must live as long as the page.
    """

    __slots__ = ("_at", "_data", "_slots", "count", "incomplete", "sent_at")

    def __init__(self, data: memoryview | bytes) -> None:
        self._data = data
        header = _HEADER.unpack_from(data)
        version, flags, self.count, self._slots, self.sent_at = header[:5]
        self._at: tuple[int, ...] = header[5:]
        if version != _VERSION:
            raise ValueError(f"a page of format {version}")
        self.incomplete = flags & _INCOMPLETE != 0

    @property
    def through(self) -> bytes:
        """The position up to which the page covers the keys."""
        return bytes(self._data[self._at[4] : self._at[5]])

    @property
    def root(self) -> str:
        """The prefix whose listing the page is of."""
        return decode(bytes(self._data[self._at[5] : self._at[6]]))

    @property
    def _prefix(self) -> bytes:
        return bytes(self._data[self._at[6] : self._at[7]])

    def find(self, position: bytes) -> int | None:
        """The number of the object at `position`; None if there is none, or if it was removed."""
        data, at = self._data, self._at
        prefix = data[at[6] : at[7]]
        length = len(prefix)
        if position[:length] != prefix:
            return None
        name = position[length:]
        mask = self._slots - 1
        slot = xxhash.xxh3_64_intdigest(name) & mask
        while True:
            number: int = _SLOT.unpack_from(data, _HEADER.size + 2 * slot)[0]
            if number == _NO_OBJECT:
                return None
            start, stop = _PAIR.unpack_from(data, at[2] + 4 * number)
            if data[at[7] + start : at[7] + stop - 1] == name:
                struck = _SIZE.unpack_from(data, at[0] + 8 * number)[0] == _STRUCK
                return None if struck else number
            slot = (slot + 1) & mask

    def info(self, number: int, key: str) -> ObjectInfo:
        """The description of an object, under the `key` that it is given."""
        data, at = self._data, self._at
        start, stop = _PAIR.unpack_from(data, at[3] + 4 * number)
        return ObjectInfo(
            key,
            _SIZE.unpack_from(data, at[0] + 8 * number)[0],
            str(data[at[8] + start : at[8] + stop - 1], "utf-8", "surrogatepass"),
            _TIME.unpack_from(data, at[1] + 8 * number)[0],
        )

    def _size(self, number: int) -> int:
        size: int = _SIZE.unpack_from(self._data, self._at[0] + 8 * number)[0]
        return size

    def _name(self, number: int) -> bytes:
        start, stop = _PAIR.unpack_from(self._data, self._at[2] + 4 * number)
        return bytes(self._data[self._at[7] + start : self._at[7] + stop - 1])

    def names_below(self, base: bytes) -> bool:
        """Whether any object's position begins with `base`."""
        prefix = self._prefix
        if base.startswith(prefix):
            wanted = base[len(prefix) :]
            first = bisect_left(range(self.count), wanted, key=self._name)
        else:
            wanted, first = b"", (0 if prefix.startswith(base) else self.count)
        while first < self.count and self._name(first).startswith(wanted):
            if self._size(first) != _STRUCK:
                return True
            first += 1
        return False

    def columns(self) -> tuple[list[str], list[int], list[str], list[float]]:
        """Positions, sizes, versions and times of all objects; removed objects have an invalid size."""
        if not self.count:
            return [], [], [], []
        data, at = self._data, self._at
        prefix = decode(self._prefix)
        positions = [prefix + name for name in decode(bytes(data[at[7] : at[8]])).split(_SEPARATOR)]
        versions = decode(bytes(data[at[8] : at[9]])).split(_SEPARATOR)
        sizes: list[int] = memoryview(data)[at[0] : at[1]].cast("Q").tolist()
        times: list[float] = memoryview(data)[at[1] : at[2]].cast("d").tolist()  # type: ignore[assignment]
        return positions, sizes, versions, times

    def infos(self) -> list[ObjectInfo]:
        """Every object that was not removed, with its position in place of its key."""
        columns = self.columns()
        infos = map(_describe, zip(*columns, strict=True))
        return [info for info in infos if info.size != _STRUCK] if _STRUCK in columns[1] else list(infos)

    def same_objects(self, other: Page) -> bool:
        """Whether both hold the same names, sizes and versions."""
        if self.count != other.count or self._prefix != other._prefix:
            return False
        mine, theirs = memoryview(self._data), memoryview(other._data)
        sections = [(0, 1), (7, 8), (8, 9)]
        return all(
            mine[self._at[start] : self._at[stop]] == theirs[other._at[start] : other._at[stop]]
            for start, stop in sections
        )

    def without(self, positions: Sequence[bytes]) -> bytes:
        """This page without the objects at `positions`, and incomplete."""
        changed = bytearray(self._data)
        changed[_FLAGS_AT] |= _INCOMPLETE
        for position in positions:
            number = self.find(position)
            if number is not None:
                _SIZE.pack_into(changed, self._at[0] + 8 * number, _STRUCK)
        return bytes(changed)


# --- rows -------------------------------------------------------------------------------------------

Transaction = Any  # py-lmdb has no types

# R was used for records in an earlier format.
PAGE, RECORD, CHANGE, ORDER, NUMBER = b"P", b"S", b"T", b"O", b"N"
CHANGES_KEPT = 4096
MOST_POSITION_BYTES = 480  # LMDB takes keys of 511 bytes

_LONGEST_REQUEST_SECONDS = 3600.0

_NUMBER = struct.Struct(">Q")
_RECORD = struct.Struct("<IIQdd")
_RECORD_VERSION = 1


def later(sent_at: float, other: float) -> bool:
    """Whether a request at `sent_at` was sent after `other`. If it is much later, the clock was set back in between."""
    return other < sent_at <= other + _LONGEST_REQUEST_SECONDS


def change_key(number: int) -> bytes:
    """The index key of the change with this number."""
    return CHANGE + _NUMBER.pack(number)


def make_incomplete(txn: Transaction, at: bytes, value: bytes) -> None:
    """Mark a page as incomplete."""
    page = Page(value)
    if not page.incomplete:
        txn.put(at, page.without([]))


def ascending(keys: Sequence[str], after: str, space: Space) -> bool:
    """Whether keys are in the order of a space, and all follow `after`."""
    positions = [space.position(key) for key in keys]
    if positions and positions[0] <= space.position(after):
        return False
    return all(first < second for first, second in pairwise(positions))


def read_number(txn: Transaction, name: bytes) -> int:
    """A number that the map stores; 0 if it was never written."""
    value = txn.get(NUMBER + name)
    return 0 if value is None else int(_NUMBER.unpack(value)[0])


def write_number(txn: Transaction, name: bytes, number: int) -> None:
    """Write a number that the map stores."""
    txn.put(NUMBER + name, _NUMBER.pack(number))


def changes_since(txn: Transaction, number: int, space: Space) -> list[bytes] | None:
    """The positions that were changed since the change `number`; None if the record of them was removed."""
    latest = read_number(txn, b"changes")
    if number < read_number(txn, b"cleared") or not number <= latest < number + CHANGES_KEPT:
        return None
    values = [txn.get(change_key(each)) for each in range(number + 1, latest + 1)]
    if None in values:  # a damaged record may have named any key
        return None
    return [bytes(value[8:]) for value in values if value[:8] == space.digest]


def concerns(change: bytes, position: bytes) -> bool:
    """Whether a change may be one of `position`: it is that key, a directory above it, or in that directory."""
    return (
        position == change
        or (change[-1:] in (b"/", b"\0") and position.startswith(change))
        or (position[-1:] in (b"/", b"\0") and change.startswith(position))
    )


def by_folders(position: bytes) -> bytes:
    """The position of a key, whose position in byte order is given, in an origin that lists folder by folder."""
    return position.replace(b"/", b"\0")


def cut_differs(space: Space, positions: Sequence[bytes], cut: bytes) -> bool:
    """Whether a page of these positions is cut elsewhere if the origin lists folder by folder.

    False if that order is known, and if the positions show byte order.
    """
    places = [] if space.folders_first else [by_folders(position) for position in positions]
    if any(first > second for first, second in pairwise(places)):
        return False
    return bool(places) and bisect_right(places, by_folders(cut)) != bisect_right(positions, cut)


def struck_by(
    changes: Sequence[bytes], space: Space, start: bytes, stop: bytes, entries: Sequence[tuple[str, ObjectInfo]]
) -> list[bytes] | None:
    """The positions among `entries` that were changed; None if nothing in the range was changed."""
    near = [change for change in changes if _is_near(change, start, stop)]
    if not space.folders_first:  # the order may not be known yet
        low, high = by_folders(start), by_folders(stop)
        near += [change for change in changes if _is_near(by_folders(change), low, high)]
    if not near:
        return None
    return [position for position in (encode(each) for each, _ in entries) if any(concerns(c, position) for c in near)]


def _is_near(change: bytes, start: bytes, stop: bytes) -> bool:
    return start < change + b"\xff" and change <= stop


def overlapping(cursor: Any, space: Space, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The pages that cover keys after `start`, up to `stop`, each with the position where it begins."""
    own = PAGE + space.digest
    found = cursor.set_range(own + start)
    if not (found and bytes(cursor.key()) == own + start):
        if cursor.before(own + start) and bytes(cursor.key()[:9]) == own:
            value = bytes(cursor.value())
            if Page(value).through > start:
                yield bytes(cursor.key()[9:]), value
        found = cursor.set_range(own + start)
    while found and bytes(cursor.key()[:9]) == own and bytes(cursor.key()[9:]) < stop:
        at = bytes(cursor.key())
        yield at[9:], bytes(cursor.value())
        found = cursor.set_range(at) and cursor.next()


def page_naming(cursor: Any, space: Space, position: bytes, *, but: bytes = b"") -> tuple[bytes, bytes] | None:
    """The page that covers `position`, with its place in the index. None if its place is `but`."""
    own = PAGE + space.digest
    if not cursor.before(own + position) or bytes(cursor.key()[:9]) != own or bytes(cursor.key()) == but:
        return None
    value = bytes(cursor.value())
    return (bytes(cursor.key()), value) if Page(value).through >= position else None


def replace_pages(
    txn: Transaction,
    space: Space,
    start: bytes,
    stop: bytes,
    value: bytes,
    old: Sequence[tuple[bytes, bytes]],
    *,
    keep: bool,
) -> list[ObjectInfo]:
    """Replace `old` pages by one page; their parts outside it stay. Returns their outdated descriptions."""
    own = PAGE + space.digest
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
        positions = [at, *(encode(position) for position, _ in entries), old_page.through]
        if at < start:
            rest = [entry for entry in entries if encode(entry[0]) <= start]
            rests.append((at, _part(old_page, rest, start, incomplete=cut_differs(space, positions, start))))
        if old_page.through > stop:
            rest = [entry for entry in entries if encode(entry[0]) > stop]
            incomplete = cut_differs(space, positions, stop)
            rests.append((stop, _part(old_page, rest, old_page.through, incomplete=incomplete)))
    if not keep and not before and len(old) == 1 and rests:
        return []  # an empty range of a listing that is still empty
    for at, _ in old:
        txn.delete(own + at)
    for at, part in rests:
        if len(at) <= MOST_POSITION_BYTES:  # else it is requested again
            txn.put(own + at, part)
    if keep:
        txn.put(own + start, value)
    now = {info.key: (info.version, info.size) for info in page.infos()}
    return [
        ObjectInfo(space.key(position), info.size, info.version, info.modified)
        for position, info in before
        if now.get(position) != (info.version, info.size)
    ]


def _part(page: Page, entries: Sequence[tuple[str, ObjectInfo]], through: bytes, *, incomplete: bool) -> bytes:
    incomplete = page.incomplete or incomplete
    return pack_page(entries, sent_at=page.sent_at, through=decode(through), root=page.root, incomplete=incomplete)


def record_key(space: Space, position: bytes) -> bytes:
    """The index key of the description of a key that was requested alone."""
    if len(position) > MOST_POSITION_BYTES:
        position = position[: MOST_POSITION_BYTES - 16] + hashlib.blake2b(position, digest_size=16).digest()
    return RECORD + space.digest + position


def pack_record(info: ObjectInfo, sent_at: float) -> bytes:
    """The description of a key that was requested alone, and the time of the request."""
    key = encode(info.key)
    return _RECORD.pack(_RECORD_VERSION, len(key), info.size, info.modified, sent_at) + key + encode(info.version)


def unpack_record(value: memoryview) -> tuple[ObjectInfo, float]:
    """The reverse of `pack_record`."""
    description, sent_at = description_in_record(value)
    key_bytes = _RECORD.unpack_from(value)[1]
    return ObjectInfo(decode(bytes(value[_RECORD.size : _RECORD.size + key_bytes])), *description), sent_at


def description_in_record(value: memoryview) -> tuple[Description, float]:
    """Such a description without its key. Called by the first open of a file by a process."""
    version, key_bytes, size, modified, sent_at = _RECORD.unpack_from(value)
    if version != _RECORD_VERSION:
        raise ValueError(f"a record of format {version}")
    return Description(size, str(value[_RECORD.size + key_bytes :], "utf-8", "surrogatepass"), modified), sent_at


def settle_records(
    cursor: Any, space: Space, start: bytes, stop: bytes, value: bytes, sent_at: float
) -> tuple[list[ObjectInfo], list[bytes]]:
    """Remove the single records that a page replaces.

    Returns the replaced records with another version or size, and the positions of records with another version or size
    that stay, since they were requested later.
    """
    own = RECORD + space.digest
    page = Page(value)
    superseded: list[ObjectInfo] = []
    better: list[bytes] = []
    found = cursor.set_range(own + start)
    while found and bytes(cursor.key()[:9]) == own and bytes(cursor.key()[9:]) <= stop:
        info, described = unpack_record(cursor.value())
        position = encode(space.position(info.key))
        number = page.find(position)
        listed = None if number is None else page.info(number, info.key)
        same = listed is not None and (listed.version, listed.size) == (info.version, info.size)
        if not start < position <= stop:
            found = cursor.next()
        elif later(described, sent_at):
            better += [] if same else [position]
            found = cursor.next()
        else:
            superseded += [] if same else [info]
            found = cursor.delete()
    return superseded, better


def settle_named(txn: Transaction, keys: Space, infos: Sequence[ObjectInfo], sent_at: float) -> list[ObjectInfo]:
    """Remove the single records of these objects, which a page of a level names. Returns those with another version or size.

    Those that were requested later stay.
    """
    superseded: list[ObjectInfo] = []
    for info in infos:
        at = record_key(keys, encode(keys.position(info.key)))
        value = txn.get(at)
        if value is None:
            continue
        old, described = unpack_record(value)
        if not later(described, sent_at):
            superseded += [] if (old.version, old.size) == (info.version, info.size) else [old]
            txn.delete(at)
    return superseded
