"""What a URL that a user writes names: an object, a prefix, or a pattern."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

from fsspec.utils import glob_translate

from millrace.errors import ObjectNotFoundError
from millrace.origin import ObjectInfo

if TYPE_CHECKING:
    from millrace.filesystem.listing import ListingFileSystem

_WILD = re.compile(r"[*?[]")


def is_pattern(key: str, origin_identity: str, *, wildcards: str = "*?[") -> bool:
    """Whether `key` of this storage has a wildcard in it. The '?' of a web address begins its query: that is none."""
    if "?" in key and origin_identity in ("http", "https"):
        return False
    return any(each in key for each in wildcards)


def select(fs: ListingFileSystem, url: str) -> Iterator[ObjectInfo]:
    """Every object that `url` names, in the order of the listing.

    `url` is an object; or a prefix, which is everything below it as a directory (with a slash at its end it is never an
    object); or a pattern with `*`, `?`, `[...]` inside a name and `**` over several. Raises `ObjectNotFoundError` at once
    when that is nothing. Listings come in pages, so a selection of any length needs little memory.
    """
    key = fs.key_of(url)
    if not url.endswith("/"):
        try:
            return iter([fs.describe(key)])
        except ObjectNotFoundError:
            pass  # a prefix or a pattern, then
    matched = is_pattern(key, fs.origin.identity)
    found = _matching(fs, key) if matched else _below(fs, key)
    first = next(found, None)
    if first is None:
        what = "matches nothing" if matched else "does not exist, neither as an object nor as a prefix"
        raise ObjectNotFoundError(f"{fs.unstrip_protocol(key)} {what}", next_step="check the name and the endpoint")
    return chain([first], found)


def _below(fs: ListingFileSystem, key: str) -> Iterator[ObjectInfo]:
    for page in fs.list_all(key):
        yield from (info for info in page if not info.key.endswith("/"))


def _matching(fs: ListingFileSystem, pattern: str) -> Iterator[ObjectInfo]:
    wild = _WILD.search(pattern)
    root = pattern[: wild.start() if wild else None].rpartition("/")[0]
    matches = re.compile(glob_translate(pattern)).match
    return (info for info in _below(fs, root) if matches(info.key))
