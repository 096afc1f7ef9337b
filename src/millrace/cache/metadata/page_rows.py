"""The rows of the ordered map (`page_map.py`) in the index's table of metadata, and the steps of a transaction on them.

A row's key begins with its kind. Pages and single records follow by space and position, changes by their number.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from millrace.cache.metadata.pages import Description, Page, Space, decode, encode, pack_page
from millrace.origin import ObjectInfo

Transaction = Any  # py-lmdb has no types

# R was used for records in an earlier format.
PAGE, RECORD, CHANGE, ORDER, NUMBER = b"P", b"S", b"T", b"O", b"N"
CHANGES_KEPT = 4096
MOST_POSITION_BYTES = 480  # LMDB takes keys of 511 bytes

_LONGEST_ANSWER_SECONDS = 3600.0

_U64 = struct.Struct(">Q")
_RECORD = struct.Struct("<IIQdd")
_RECORD_VERSION = 1


def later(asked: float, other: float) -> bool:
    """Whether the request at time `asked` was sent after `other`. If it is much later, the clock was set back in between."""
    return other < asked <= other + _LONGEST_ANSWER_SECONDS


def change_key(number: int) -> bytes:
    """The index key of the change with this number."""
    return CHANGE + _U64.pack(number)


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
    return 0 if value is None else int(_U64.unpack(value)[0])


def write_number(txn: Transaction, name: bytes, number: int) -> None:
    """Write a number that the map stores."""
    txn.put(NUMBER + name, _U64.pack(number))


def changes_since(txn: Transaction, number: int, space: Space) -> list[bytes] | None:
    """The positions that were changed since the change `number`; None if that is no longer known."""
    latest = read_number(txn, b"changes")
    if number < read_number(txn, b"cleared") or not number <= latest < number + CHANGES_KEPT:
        return None
    values = [txn.get(change_key(each)) for each in range(number + 1, latest + 1)]
    if None in values:  # a damaged record may have named any key
        return None
    return [bytes(value[8:]) for value in values if value[:8] == space.digest]


def concerns(change: bytes, position: bytes) -> bool:
    """Whether a change may be one of `position`: it is that key, or a directory above it."""
    return position == change or (change[-1:] in (b"/", b"\0") and position.startswith(change))


def struck_by(
    changes: Sequence[bytes], space: Space, start: bytes, stop: bytes, entries: Sequence[tuple[str, ObjectInfo]]
) -> list[bytes] | None:
    """The positions among `entries` that were changed; None if nothing in the range was changed."""
    near = [change for change in changes if start < change + b"\xff" and change <= stop]
    if not near:
        return None
    return [position for position in (encode(each) for each, _ in entries) if any(concerns(c, position) for c in near)]


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


def page_naming(cursor: Any, space: Space, position: bytes) -> tuple[bytes, bytes] | None:
    """The page that covers `position`, with its place in the index."""
    own = PAGE + space.digest
    if not cursor.before(own + position) or bytes(cursor.key()[:9]) != own:
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
        if at < start:
            rests.append((at, _part(old_page, [e for e in entries if encode(e[0]) <= start], start)))
        if old_page.through > stop:
            rests.append((stop, _part(old_page, [e for e in entries if encode(e[0]) > stop], old_page.through)))
    if not keep and not before and len(old) == 1 and rests:
        return []  # an empty range of a listing that is still empty
    for at, _ in old:
        txn.delete(own + at)
    for at, rest in rests:
        if len(at) <= MOST_POSITION_BYTES:  # else it is requested again
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


def record_key(space: Space, position: bytes) -> bytes:
    """The index key of the description of a key that was requested alone."""
    if len(position) > MOST_POSITION_BYTES:
        position = position[: MOST_POSITION_BYTES - 16] + hashlib.blake2b(position, digest_size=16).digest()
    return RECORD + space.digest + position


def pack_record(info: ObjectInfo, asked: float) -> bytes:
    """The description of a key that was requested alone, and the time of the request."""
    key = encode(info.key)
    return _RECORD.pack(_RECORD_VERSION, len(key), info.size, info.modified, asked) + key + encode(info.version)


def unpack_record(value: memoryview) -> tuple[ObjectInfo, float]:
    """The reverse of `pack_record`."""
    description, asked = description_in_record(value)
    key_bytes = _RECORD.unpack_from(value)[1]
    return ObjectInfo(decode(bytes(value[_RECORD.size : _RECORD.size + key_bytes])), *description), asked


def description_in_record(value: memoryview) -> tuple[Description, float]:
    """Such a description without its key. Called by the first open of a file by a process."""
    version, key_bytes, size, modified, asked = _RECORD.unpack_from(value)
    if version != _RECORD_VERSION:
        raise ValueError(f"a record of format {version}")
    return Description(size, str(value[_RECORD.size + key_bytes :], "utf-8", "surrogatepass"), modified), asked


def settle_records(
    cursor: Any, space: Space, start: bytes, stop: bytes, value: bytes, asked: float
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
        elif later(described, asked):
            better += [] if same else [position]
            found = cursor.next()
        else:
            superseded += [] if same else [info]
            found = cursor.delete()
    return superseded, better


def settle_named(txn: Transaction, keys: Space, infos: Sequence[ObjectInfo], asked: float) -> list[ObjectInfo]:
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
        if not later(described, asked):
            superseded += [] if (old.version, old.size) == (info.version, info.size) else [old]
            txn.delete(at)
    return superseded
