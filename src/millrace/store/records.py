"""Objects and blocks as values: identity, ranges, read-ahead, owners; their records in the index, in sidecars and in
segments. No I/O.

Records of the index are packed structs, not JSON or pickle: a lookup takes about a microsecond, and decoding must not take
longer.

A data file holds exactly the object's bytes, with holes for missing blocks. Its sidecar, a small file next to it, holds the
rest, and the index can be rebuilt from it. Layout of a sidecar::

    64 bytes    magic, object id, generation, size, block bytes, length of name, checksum of all this
    then        the packed name (origin, key, version)
    then        16 bytes per block: its checksum and a mark, or zeros

A mark is a checksum of the block's identity and of its checksum. Zeros, torn writes and entries of other files have no valid
mark. A valid mark does not prove that the bytes are right: they are verified before their first use.
"""

from __future__ import annotations

import hashlib
import math
import os
import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import xxhash

BLOCK_BYTES = 4 << 20
"""Unit of caching and checksumming: large enough that a request's overhead is small, small enough for a footer."""

PAGE_BYTES = 16 << 10
"""Unit of caching and checksumming inside a block that is not completely cached, see docs/design/0022-cold-columns.md."""

RUN_BLOCKS = 2
"""The most neighbouring blocks that one request fetches (8 MiB, see docs/design/0009-cold-reads.md)."""

READ_AHEAD_BLOCKS = 16
"""The longest read-ahead of a sequential reader (64 MiB)."""

_BITS = 52  # so that every hash is a float between 0 and 1, both excluded

_LENGTHS = struct.Struct("<III")
_OBJECT = struct.Struct("<QQIQQQQqqqI")
_SEGMENT = struct.Struct("<QQ")
_BLOCK_KEY = struct.Struct(">16sQI")
_MEMBER_KEY = struct.Struct(">Q16s")
_U64 = struct.Struct("<Q")
_PAGE = struct.Struct("<IQ")
_GENERATION = struct.Struct(">Q")

_MAGIC = b"MLRCobj4"
_HEADER = struct.Struct("<8s16sQQIIQ8x")
_CHECKED_BYTES = 48  # of the header: all before its checksum
_BLOCK = struct.Struct("<QQ")
_MARKED = struct.Struct("<16sQQQ")

BLOCK_ENTRY_BYTES = _BLOCK.size
SIDECAR_SUFFIX = ".idx"


# --- blocks -------------------------------------------------------------------------------------------


def object_id(origin_identity: str, key: str, version: str, size: int) -> bytes:
    """The id of one version of one object: 16 bytes, equal in every process and on every node.

    The version is part of the name, so an overwritten object is a different one and two versions never share a block.
    """
    bytes_text = str(size)
    # Length-prefixed, so that two different tuples never make the same text. One expression: every open calls this.
    text = f"{len(origin_identity)}:{origin_identity}{len(key)}:{key}{len(version)}:{version}{len(bytes_text)}:{bytes_text}"
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def block_count(size: int, block_bytes: int) -> int:
    """The number of blocks of an object of `size` bytes (0 for an empty one)."""
    return -(-size // block_bytes)


def blocks_of(start: int, stop: int, block_bytes: int) -> range:
    """The blocks that the byte range `[start, stop)` touches."""
    return range(start // block_bytes, -(-stop // block_bytes)) if stop > start else range(0)


def span_of(first: int, stop: int, size: int, block_bytes: int) -> tuple[int, int]:
    """The byte range `[start, stop)` of the blocks `[first, stop)` in an object of `size` bytes."""
    return first * block_bytes, min(stop * block_bytes, size)


def coalesce(blocks: Iterable[int], max_run: int) -> list[range]:
    """Group block numbers into runs of neighbours, each at most `max_run` long, in order."""
    runs: list[range] = []
    for block in sorted(set(blocks)):
        if runs and runs[-1].stop == block and len(runs[-1]) < max_run:
            runs[-1] = range(runs[-1].start, block + 1)
        else:
            runs.append(range(block, block + 1))
    return runs


class ReadAhead(NamedTuple):
    """The read-ahead of one reader, as a value: `after(start, stop)` returns the next one.

    Reads that together cover most of the bytes since they began are a scan, in any order: column by column, or by several
    threads. Each read that continues a scan doubles the window, up to `READ_AHEAD_BLOCKS`. Any other read begins again with
    the window closed, so random reads fetch nothing in advance. A reader that will read everything starts with the whole
    window open (`ReadAhead(window=...)`).
    """

    base: int = 0
    frontier: int = 0
    covered: int = 0
    window: int = 0

    @property
    def scans(self) -> bool:
        """Whether the reads so far are a scan."""
        return self.window > 0

    def after(self, start: int, stop: int) -> ReadAhead:
        """The state after the bytes `[start, stop)` were read."""
        frontier = max(self.frontier, stop)
        covered = min(self.covered + stop - start, frontier - self.base)
        first = not self.covered and not self.window  # may be a read of the file's head only
        if first or start < self.base or stop <= start or 2 * covered < frontier - self.base:
            return ReadAhead(base=start, frontier=stop, covered=stop - start)
        window = min(max(1, self.window * 2), READ_AHEAD_BLOCKS) if frontier > self.frontier else self.window
        return ReadAhead(self.base, frontier, covered, window)

    def wanted(self, size: int, block_bytes: int) -> range:
        """The blocks to fetch ahead, none past the end of an object of `size` bytes."""
        first = -(-self.frontier // block_bytes)
        return range(first, min(first + self.window, block_count(size, block_bytes)))


def owners(key: bytes, nodes: Iterable[tuple[str, float]]) -> list[str]:
    """The ids of `nodes`, each an (id, weight above 0), in the order in which they own `key`: weighted rendezvous hashing.

    The order depends only on the key, the ids and the weights. When the first node leaves, the second is the owner: a join
    or leave moves only that node's share. The score is that of Schindelhauer and Schomaker, "Weighted Distributed Hash
    Tables" (SPAA 2005); rendezvous hashing is Thaler and Ravishankar's (1998).
    """
    return [node for _, node in sorted((-_score(key, node, weight), node) for node, weight in nodes)]


def _score(key: bytes, node: str, weight: float) -> float:
    seed = xxhash.xxh3_64_intdigest(node.encode("utf-8", "surrogatepass"))
    uniform = ((xxhash.xxh3_64_intdigest(key, seed) >> (64 - _BITS)) + 0.5) / (1 << _BITS)
    return -weight / math.log(uniform)


# --- records of the index -----------------------------------------------------------------------------


class ObjectName(NamedTuple):
    """The name of an object version at its origin: the origin's identity, the key, and the version."""

    origin: str
    key: str
    version: str

    def pack(self) -> bytes:
        """The name as it is stored in records, sidecars and segments."""
        parts = [part.encode("utf-8", "surrogatepass") for part in self]
        return _LENGTHS.pack(*map(len, parts)) + b"".join(parts)

    @classmethod
    def unpack(cls, data: bytes) -> ObjectName:
        """The reverse of `pack`. Raises `ValueError` for anything else."""
        if len(data) < _LENGTHS.size:
            raise ValueError("not a packed name")
        position = _LENGTHS.size
        parts = []
        for length in _LENGTHS.unpack_from(data):
            parts.append(data[position : position + length].decode("utf-8", "surrogatepass"))
            position += length
        if position != len(data):
            raise ValueError("not a packed name")
        return cls(*parts)


class Entry(NamedTuple):
    """The record of one object version in a store.

    `generation` is never used twice in a store. It names the file, so a file that may be mapped is never written again.
    `cached_bytes` are those of all cached blocks and pages. `place` is 0 for an object with its own file, otherwise the
    generation of the segment that contains the object, from `offset`, with `checksum`. The seal is the inode, the times (ns)
    and the number of links of the file when all of its blocks were last verified; the inode is 0 when they were not.
    `packed_name` is a packed
    `ObjectName`.
    """

    object_id: bytes
    generation: int
    size: int
    block_bytes: int
    cached_bytes: int
    place: int = 0
    offset: int = 0
    checksum: int = 0
    seal_inode: int = 0
    seal_ctime_ns: int = 0
    seal_mtime_ns: int = 0
    seal_links: int = 0
    packed_name: bytes = b""

    @property
    def complete(self) -> bool:
        """Whether every block is cached."""
        return self.cached_bytes >= self.size

    @property
    def sealed(self) -> bool:
        """Whether every block was verified while the file had the inode and change time of the seal."""
        return self.seal_inode != 0

    def seal_holds(self, file: os.stat_result) -> bool:
        """Whether the file in this state has not changed since its blocks were verified."""
        return self.sealed and (self.seal_inode, self.seal_ctime_ns) == (file.st_ino, file.st_ctime_ns)

    def with_seal(self, file: os.stat_result | None) -> Entry:
        """The record with the seal of a file in this state, or without a seal."""
        seal = (0, 0, 0, 0) if file is None else (file.st_ino, file.st_ctime_ns, file.st_mtime_ns, file.st_nlink)
        return Entry(*self[:8], *seal, packed_name=self.packed_name)

    @property
    def name(self) -> ObjectName:
        """The name of the object at its origin."""
        return ObjectName.unpack(self.packed_name)

    def pack(self) -> bytes:
        """The record, without the object's id, which is its key."""
        return _OBJECT.pack(*self[1:12]) + self.packed_name

    @classmethod
    def unpack(cls, object_id: bytes, value: bytes) -> Entry:
        """The reverse of `pack`."""
        # Part of every first open: `_make` takes a third longer.
        return tuple.__new__(cls, (object_id, *_OBJECT.unpack_from(value), value[_OBJECT.size :]))


class SegmentRecord(NamedTuple):
    """The record of one segment: the bytes written to it, the bytes of its recorded objects, and their group.

    Objects of different groups (data sets) never share a segment.
    """

    generation: int
    written_bytes: int
    live_bytes: int
    group: str

    def pack(self) -> bytes:
        """The record, without the generation, which is its key."""
        return _SEGMENT.pack(self.written_bytes, self.live_bytes) + self.group.encode("utf-8", "surrogatepass")

    @classmethod
    def unpack(cls, key: bytes, value: bytes) -> SegmentRecord:
        """The reverse of `pack` and `generation_key`."""
        group = value[_SEGMENT.size :].decode("utf-8", "surrogatepass")
        return cls._make((_GENERATION.unpack(key)[0], *_SEGMENT.unpack_from(value), group))


def block_key(object_id: bytes, generation: int, block: int) -> bytes:
    """The key of a block's checksum; those of one object are adjacent and in order."""
    return _BLOCK_KEY.pack(object_id, generation, block)


def block_of(key: bytes) -> int:
    """The number of the block in a `block_key`."""
    return int(_BLOCK_KEY.unpack(key)[2])


Pages = dict[int, int]
"""The cached pages of a block that is not completely cached: their checksums, by the number of the page in the block."""


def pack_pages(pages: Pages) -> bytes:
    """The record of a block of which only these pages are cached. Its length is never that of a checksum."""
    return b"".join(_PAGE.pack(*page) for page in sorted(pages.items()))


def unpack_block(value: bytes) -> int | Pages:
    """The record of a block: its checksum, or its cached pages."""
    return number(value) if len(value) == _U64.size else dict(_PAGE.iter_unpack(value))


def page_span(entry: Entry, block: int, page: int) -> tuple[int, int]:
    """The byte range `[start, stop)` of a page in its object."""
    start, stop = span_of(block, block + 1, entry.size, entry.block_bytes)
    return start + page * PAGE_BYTES, min(start + (page + 1) * PAGE_BYTES, stop)


def pages_of(entry: Entry, block: int, start: int, stop: int, *, touched: bool = False) -> range:
    """The pages of a block inside the byte range `[start, stop)` of the object; with `touched`, those that it touches."""
    base, end = span_of(block, block + 1, entry.size, entry.block_bytes)
    start, stop = max(start, base) - base, min(stop, end) - base
    if touched or stop == end - base:
        stop += PAGE_BYTES - 1
    return range((start if touched else start + PAGE_BYTES - 1) // PAGE_BYTES, stop // PAGE_BYTES)


def page_count(entry: Entry, block: int) -> int:
    """The number of pages of a block."""
    return len(pages_of(entry, block, *span_of(block, block + 1, entry.size, entry.block_bytes)))


def page_number(entry: Entry, block: int, page: int) -> int:
    """A negative number that no other page of the object has; blocks have natural ones."""
    return -1 - block * -(-entry.block_bytes // PAGE_BYTES) - page


def cached_in(entry: Entry, block: int, state: int | Pages) -> int:
    """The cached bytes of a block with this record."""
    if isinstance(state, int):
        start, stop = span_of(block, block + 1, entry.size, entry.block_bytes)
        return stop - start
    return sum(stop - start for start, stop in (page_span(entry, block, page) for page in state))


BLOCK_KEY_BYTES = _BLOCK_KEY.size
BLOCK_PREFIX_BYTES = 24
"""The length of the common prefix of the `block_key`s of an object."""


def generation_key(generation: int) -> bytes:
    """The key of a segment."""
    return _GENERATION.pack(generation)


def segment_unit(generation: int) -> bytes:
    """The key of a segment among the units of eviction: 16 bytes that begin with a hash, like an object id."""
    key = _GENERATION.pack(generation)
    return _GENERATION.pack(xxhash.xxh3_64_intdigest(key)) + key


def member_key(segment: int, object_id: bytes = bytes(16)) -> bytes:
    """The key that records an object as part of a segment; those of one segment are adjacent."""
    return _MEMBER_KEY.pack(segment, object_id)


def member_of(key: bytes, segment: int) -> bytes | None:
    """The object of a `member_key`; None when the key is empty or of another segment."""
    return key[8:] if key[:8] == _GENERATION.pack(segment) else None


def number(value: bytes | None) -> int:
    """A stored number; 0 when there is none."""
    return 0 if value is None else int(_U64.unpack(value)[0])


def pack_number(value: int) -> bytes:
    """The reverse of `number`."""
    return _U64.pack(value)


# --- the data file of an object and its sidecar -------------------------------------------------


def file_name(entry: Entry) -> str:
    """The path of the data file, relative to the directory of data files."""
    name = entry.object_id.hex()
    return f"{name[:2]}/{name}-{entry.generation}"


def block_offset(entry: Entry, block: int) -> int:
    """The offset of the entry of a block in the sidecar."""
    return _HEADER.size + len(entry.packed_name) + block * BLOCK_ENTRY_BYTES


def pack_header(entry: Entry) -> bytes:
    """The header and the name: a sidecar without blocks."""
    fields = (_MAGIC, entry.object_id, entry.generation, entry.size, entry.block_bytes, len(entry.packed_name))
    return _HEADER.pack(*fields, _header_checksum(entry.packed_name, _HEADER.pack(*fields, 0))) + entry.packed_name


def pack_block(entry: Entry, block: int, checksum: int) -> bytes:
    """The entry of a cached block."""
    return _BLOCK.pack(checksum, _mark(entry, block, checksum))


def parse_sidecar(data: bytes) -> tuple[Entry, list[tuple[int, int]]] | None:
    """The record of an object, and (block, checksum) of every block with a valid entry; None without a valid header."""
    if len(data) < _HEADER.size:
        return None
    magic, object_id, generation, size, block_bytes, name_bytes, checksum = _HEADER.unpack_from(data)
    name = data[_HEADER.size : _HEADER.size + name_bytes]
    if magic != _MAGIC or not block_bytes or checksum != _header_checksum(name, data):
        return None
    entry = Entry(object_id, generation, size, block_bytes, 0, packed_name=name)
    count = min(block_count(size, block_bytes), (len(data) - block_offset(entry, 0)) // BLOCK_ENTRY_BYTES)
    pairs = _BLOCK.iter_unpack(data[block_offset(entry, 0) : block_offset(entry, count)])
    blocks = [
        (block, checksum) for block, (checksum, mark) in enumerate(pairs) if mark == _mark(entry, block, checksum)
    ]
    return entry._replace(cached_bytes=sum(cached_in(entry, *found) for found in blocks)), blocks


def _mark(entry: Entry, block: int, checksum: int) -> int:
    return xxhash.xxh3_64_intdigest(_MARKED.pack(entry.object_id, entry.generation, block, checksum))


def _header_checksum(name: bytes, header: bytes) -> int:
    return xxhash.xxh3_64_intdigest(header[:_CHECKED_BYTES] + name)


# --- the records in the `.idx` file of a segment --------------------------------------------------
#
# A header, then one record for each object. A record can be found after any number of damaged ones: it begins at a multiple
# of 16 with a mark that no text contains (0xFF is not in UTF-8), and has a checksum that is seeded with the segment's
# generation. Zeros, torn writes and records of another segment have no valid checksum.

_SEGMENT_MARK = b"\xffMR2"
_SEGMENT_ALIGNMENT = 16
# mark, kind, checksum of the record, object id, offset, checksum of the object, bytes of the object, bytes of the name
_SEGMENT_FIXED = struct.Struct("<4sIQ16sQQII")
_SEGMENT_CHECKSUM = slice(8, 16)
_SEGMENT_HEADER, _SEGMENT_OBJECT = 1, 2


class SegmentObject(NamedTuple):
    """The record of one object in `.idx`: `size` bytes from `offset` in `.data`, with this xxh3 checksum."""

    object_id: bytes
    offset: int
    size: int
    checksum: int
    name: ObjectName


def pack_segment_header(generation: int, group: str) -> bytes:
    """The first record of a segment, which names the group of its objects."""
    return _pack_record(generation, _SEGMENT_HEADER, bytes(16), 0, 0, 0, group.encode("utf-8", "surrogatepass"))


def pack_segment_object(generation: int, record: SegmentObject) -> bytes:
    """The record of one object in the segment of this generation; a multiple of 16 bytes."""
    return _pack_record(
        generation, _SEGMENT_OBJECT, record.object_id, record.offset, record.checksum, record.size, record.name.pack()
    )


def parse_segment_group(generation: int, data: bytes) -> str | None:
    """The group in the header of a segment; None when the header is damaged. The head of the file is enough."""
    found = _record_at(generation, data, 0)
    if found is None or found[0] != _SEGMENT_HEADER:
        return None
    return found[5].decode("utf-8", "surrogatepass")


def parse_segment_objects(generation: int, data: bytes) -> Iterator[SegmentObject]:
    """The valid records of objects in the bytes of an `.idx` file, in the order of writing."""
    position = 0
    while position >= 0:
        found = _record_at(generation, data, position)
        if found is None:
            position = _next_mark(data, position + 1)
            continue
        kind, object_id, offset, checksum, size, text = found
        if kind == _SEGMENT_OBJECT:
            yield SegmentObject(object_id, offset, size, checksum, ObjectName.unpack(text))
        position += next_record(_SEGMENT_FIXED.size + len(text))


def next_record(position: int) -> int:
    """The start of the next record in an `.idx` file that ends at `position`."""
    return -(-position // _SEGMENT_ALIGNMENT) * _SEGMENT_ALIGNMENT


def _pack_record(
    generation: int, kind: int, object_id: bytes, offset: int, checksum: int, size: int, text: bytes
) -> bytes:
    fixed = _SEGMENT_FIXED.pack(_SEGMENT_MARK, kind, 0, object_id, offset, checksum, size, len(text))
    record = bytearray(fixed + text)
    record[_SEGMENT_CHECKSUM] = _record_digest(generation, bytes(record)).to_bytes(8, "little")
    return bytes(record.ljust(next_record(len(record)), b"\0"))


def _record_at(generation: int, data: bytes, position: int) -> tuple[int, bytes, int, int, int, bytes] | None:
    if position + _SEGMENT_FIXED.size > len(data):
        return None
    mark, kind, digest, object_id, offset, checksum, size, text_bytes = _SEGMENT_FIXED.unpack_from(data, position)
    stop = position + _SEGMENT_FIXED.size + text_bytes
    if mark != _SEGMENT_MARK or stop > len(data):
        return None
    record = bytearray(data[position:stop])
    record[_SEGMENT_CHECKSUM] = bytes(8)
    if _record_digest(generation, bytes(record)) != digest:
        return None
    return kind, object_id, offset, checksum, size, bytes(record[_SEGMENT_FIXED.size :])


def _record_digest(generation: int, record: bytes) -> int:
    return xxhash.xxh3_64_intdigest(record, seed=generation)


def _next_mark(data: bytes, position: int) -> int:
    """The position at which the next record may begin; -1 when there is none."""
    while True:
        position = data.find(_SEGMENT_MARK, position)
        if position < 0 or position % _SEGMENT_ALIGNMENT == 0:
            return position
        position += 1
