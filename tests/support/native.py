"""Complete cached objects as files of pyarrow."""

from __future__ import annotations

import pyarrow as pa

from millrace.cache.node import CacheNode
from millrace.origin import ObjectInfo, Origin


def open_native(node: CacheNode, origin: Origin, info: ObjectInfo) -> pa.BufferReader | None:
    """A native file of an object that is completely cached on this node, else None. Counts as one use."""
    found = node.find_native(origin, info)
    return None if found is None else pa.BufferReader(found.buffer)
