"""Remote storage behind narrow Protocols, and the one place that chooses an implementation for a URL."""

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
from millrace.origin.schemes import SCHEMES, open_origin, service_of, split_url

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
    "service_of",
    "split_url",
]
