"""Descriptions of many objects at once, from listings: to ask for each alone would take hours for a million."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from millrace.errors import DeniedError, ObjectNotFoundError, UsageError
from millrace.filesystem.listing import ListingFileSystem
from millrace.origin import ObjectInfo


def describe_many(fs: ListingFileSystem, keys: Iterable[str]) -> dict[str, ObjectInfo]:
    """The objects that have these keys, from remembered listings or else from new ones.

    A request lists up to a thousand keys of a directory, and stretches without a wanted one are passed over. What does not
    exist is left out, and so is what may not be listed and was not asked for before.
    """
    found: dict[str, ObjectInfo] = {}
    for directory, names in groupby(sorted(set(keys)), key=_directory_of):
        if directory:
            _find(fs, directory, list(names), found)
    return found


def _directory_of(key: str) -> str:
    return key.rpartition("/")[0]


def _find(fs: ListingFileSystem, directory: str, names: list[str], found: dict[str, ObjectInfo]) -> None:
    """Find `names`, which are sorted, in the listing of their directory."""
    metadata, wanted = fs.node.metadata, set(names)
    try:
        for name in names:
            if name in found:
                continue
            # From just before the first that is not found yet, and on while that finds any.
            for answer in metadata.answers(fs.origin, directory, name[:-1]):
                hits = [info for info in answer.objects if info.key in wanted]
                found.update((info.key, info) for info in hits)
                if not hits and answer.through >= name:
                    break
    except ObjectNotFoundError:
        return  # there is no such bucket
    except (DeniedError, UsageError):  # who may read objects may not be allowed to list; some origins keep no order
        for name in names:
            known = metadata.known(fs.origin, name)
            if known is not None:
                found[name] = known
