"""Reads of whole objects through a cache."""

from __future__ import annotations

from millrace.cache.node import CacheNode
from millrace.origin import ObjectInfo, Origin


def read_all(node: CacheNode, origin: Origin, info: ObjectInfo | str) -> bytes:
    """The object that `info` describes, or the one that now has this key."""
    if isinstance(info, str):
        info = origin.head(info)
    reader = node.open_reader(origin, info)
    try:
        return bytes(reader.read(0, info.size))
    finally:
        reader.close()
