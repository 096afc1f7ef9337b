"""Buckets with many objects behind an emulated region: filled at once, their requests counted, their metadata expired."""

from __future__ import annotations

import struct
from concurrent.futures import ThreadPoolExecutor

import millrace
from millrace.cache.metadata import pages
from millrace.origin import open_origin
from millrace.store.transactions import Writing
from millrace.testing.region import EmulatedRegion
from millrace.testing.s3 import S3Server


def fill(s3: S3Server, files: dict[str, bytes]) -> None:
    """Put objects, by key, past the cache and the region."""
    origin = open_origin("s3", s3.target_options)
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda item: origin.put(*item), files.items()))


def asked(region: EmulatedRegion) -> dict[str, int]:
    """Requests by kind since the last call."""
    kinds = {kind: row.requests for kind, row in region.stats().by_kind.items() if row.requests}
    region.reset()
    return kinds


def let_everything_expire(fs: millrace.MillraceFileSystem) -> None:
    """Set back when every page was requested, for all processes of the node, as if a day had gone by."""
    index = fs.node._disks[0].store.index

    def set_back(txn: Writing) -> None:
        kept = [(bytes(key), bytearray(value)) for key, value in txn.cursor() if bytes(key[:1]) == b"P"]
        for key, value in kept:
            when = pages.Page(value).sent_at
            at = bytes(value).index(struct.pack("<d", when))
            struct.pack_into("<d", value, at, when - 86_400)
            txn.put(key, bytes(value))

    index.meta_write(set_back, changed=True)
