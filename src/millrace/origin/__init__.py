"""Remote storage behind narrow Protocols, and the one place that chooses an implementation for a URL.

Key terms:
- origin: an object store, web server, hub or other storage that data is read from and written to.
- object: one version of one key, identified by URL and ETag, version or size.
- limiter: bounds the requests of all processes of a node to one origin, and retries.

Start reading in `protocol.py`, then `object_store.py`.
"""

from __future__ import annotations

from millrace.origin.addresses import options_for, origin_for_url
from millrace.origin.protocol import (
    Listable,
    Listing,
    ListingPage,
    ObjectInfo,
    ObjectWriter,
    Origin,
    Readable,
    Writable,
)
from millrace.origin.schemes import SCHEMES, open_origin, require_url, service_of, split_url

__all__ = [
    "SCHEMES",
    "Listable",
    "Listing",
    "ListingPage",
    "ObjectInfo",
    "ObjectWriter",
    "Origin",
    "Readable",
    "Writable",
    "open_origin",
    "options_for",
    "origin_for_url",
    "require_url",
    "service_of",
    "split_url",
]
