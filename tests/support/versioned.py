"""Contents with their version in every 4 KiB, so that a mix of two is detected; and a check of a whole store."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
from typing_extensions import Buffer

import millrace
from millrace.cache.disk import Disk
from millrace.cache.reading.locations import stored_object
from millrace.store.records import BLOCK_BYTES, Entry, page_span, span_of

PAGE = 4096
_WORDS = PAGE // 8


def content(version: int, nbytes: int) -> bytes:
    """`nbytes` (whole pages) of a version: each word is the version and the number of its page."""
    assert nbytes % PAGE == 0
    pages = np.arange(nbytes // PAGE, dtype=np.uint64)
    return np.repeat((np.uint64(version) << np.uint64(32)) | pages, _WORDS).tobytes()


def versions_in(data: Buffer, start: int = 0) -> set[int]:
    """The versions whose bytes are in `data`, which begins at byte `start` (a whole page) of its object.

    Fails where a page is not that of its place.
    """
    words = np.frombuffer(memoryview(data).cast("B"), dtype=np.uint64)
    assert start % PAGE == 0
    assert len(words) % _WORDS == 0
    pages = words.reshape(-1, _WORDS)
    if (pages == pages[:, :1]).all():
        pages = pages[:, :1]  # all words of a page are equal: what follows examines one of each
    places = np.arange(len(pages), dtype=np.uint64)[:, np.newaxis] + np.uint64(start // PAGE)
    assert ((pages & np.uint64(0xFFFFFFFF)) == places).all(), "bytes of another place of the object"
    return {int(version) for version in np.unique(pages >> np.uint64(32))}


def stored_pieces(fs: millrace.MillraceFileSystem) -> list[tuple[Entry, int, bytes]]:
    """All bytes that the cache of `fs` would give out: for each piece its object, its first byte there, and what it is.

    Fails where a checksum is wrong.
    """
    found: list[tuple[Entry, int, bytes]] = []
    for disk in fs.node.open_disks:
        page = disk.store.index.page(b"", 1_000_000)
        for entry in page:
            if entry.place:
                held = stored_object(disk, entry, verify=True)
                assert held is not None, f"{entry.name} is damaged"
                found.append((entry, 0, bytes(held[0])))
                continue
            descriptor = disk.store.open_data(entry)
            try:
                for block in range(-(-entry.size // BLOCK_BYTES)):
                    if disk.store.missing(entry, [block]):
                        found += [(entry, *page) for page in _pages(disk, entry, descriptor, block)]
                        continue
                    data = disk.store.read_block(entry, descriptor, block)
                    assert data is not None, f"block {block} of {entry.name} is damaged"
                    found.append((entry, span_of(block, block + 1, entry.size, BLOCK_BYTES)[0], data))
            finally:
                os.close(descriptor)
    return found


def _pages(disk: Disk, entry: Entry, descriptor: int, block: int) -> Iterator[tuple[int, bytes]]:
    """The cached pages of an incomplete block: the first byte of each in the object, and its bytes."""
    state = disk.store.index.block_states(entry, [block])[0]
    for page in state if isinstance(state, dict) else ():
        start, stop = page_span(entry, block, page)
        data = disk.store.read_pages(entry, descriptor, start, stop)
        assert data is not None, f"page {page} of block {block} of {entry.name} is damaged"
        yield start, data


def assert_store_holds_only(fs: millrace.MillraceFileSystem, contents: dict[str, bytes]) -> int:
    """That every stored byte is one of the content that `contents` has under its version; returns the number of pieces."""
    pieces = stored_pieces(fs)
    for entry, start, data in pieces:
        expected = contents[entry.name.version]
        assert entry.size == len(expected), entry.name
        assert data == expected[start : start + len(data)], f"wrong bytes of {entry.name} at {start}"
    return len(pieces)
