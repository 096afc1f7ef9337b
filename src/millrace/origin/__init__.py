"""Remote storage behind narrow Protocols, and the one place that chooses an implementation for a URL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from millrace.errors import ConfigurationError, UsageError
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

if TYPE_CHECKING:
    from millrace.origin.object_store import ObjectStoreOrigin

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
    "origin_for_url",
    "split_url",
]

SCHEMES: Mapping[str, str] = {"s3": "s3", "s3a": "s3", "file": "file", "local": "file"}
"""Every scheme that users write, and the origin that serves it."""


def open_origin(scheme: str, target_options: Mapping[str, Any] | None = None) -> ObjectStoreOrigin:
    """Open the storage that serves `scheme`. No request is made.

    Raises `ConfigurationError` for a scheme or an option that is not known.
    """
    served = SCHEMES.get(scheme)
    if served is None:
        raise ConfigurationError(
            f"no origin serves {scheme!r}", next_step=f"use one of {', '.join(sorted(set(SCHEMES.values())))}"
        )
    from millrace.origin.object_store import ObjectStoreOrigin

    return ObjectStoreOrigin(served, target_options)


def split_url(url: str) -> tuple[str, str]:
    """Split `scheme://bucket/key` into scheme and key; a plain path has the scheme `file`. Raises `UsageError`."""
    if not url:
        raise UsageError("a URL is empty", next_step="write s3://bucket/key, or '.' for the current directory")
    scheme, separator, key = url.partition("://")
    return (scheme, key) if separator else ("file", url)


def origin_for_url(url: str, target_options: Mapping[str, Any] | None = None) -> tuple[ObjectStoreOrigin, str]:
    """Open the origin of `url`; returns it with the key (`bucket/path`) that `url` names there."""
    scheme, key = split_url(url)
    return open_origin(scheme, target_options), key
