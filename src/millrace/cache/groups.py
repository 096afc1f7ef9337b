"""Which small objects share segments: those of one data set, so that a data set can leave as a whole. Pure."""

from __future__ import annotations

_COPIES = " (copies)"
_LEVELS_BELOW_BUCKET = 2


def group_of(origin_identity: str, key: str, listing_root: str | None = None) -> str:
    """The group of the object `key` of an origin.

    A data set is what somebody lists: when `listing_root`, the prefix whose listing named the object, is a directory below
    its bucket, that is the group. Otherwise it is the object's directory, cut two levels below the bucket: deep trees with a
    directory for each class or day must not end up with a segment each.
    """
    directory = key.rpartition("/")[0]
    root = (listing_root or "").rstrip("/")
    if "/" in root.lstrip("/") and (directory == root or directory.startswith(f"{root}/")):
        return f"{origin_identity} {root}"
    levels = directory.split("/")
    # An absolute path begins with an empty level.
    return f"{origin_identity} {'/'.join(levels[: _LEVELS_BELOW_BUCKET + 1 + (levels[0] == '')])}"


def copies_of(group: str) -> str:
    """The group of segments that hold copies of what other nodes own, of the data set `group`."""
    return group + _COPIES


def holds_copies(group: str) -> bool:
    """Whether a segment of this group was made for copies."""
    return group.endswith(_COPIES)
