"""Listings of a commit in the order of their paths, with few requests and bounded memory.

The hub lists in an order of its own (directories first), in pages of a thousand. A directory with up to `MOST_AT_ONCE`
files is taken whole and sorted; a larger one is taken level by level, each directory in it by the same rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from millrace.origin.hub.client import Entry

MOST_AT_ONCE = 20_000

TreePages = Callable[[str, bool], Iterator[Sequence[Entry]]]
"""Gives the pages of a directory, with all below it (True) or its own level only."""


def walk(pages: TreePages, path: str, after: str = "", most_at_once: int = MOST_AT_ONCE) -> Iterator[Entry]:
    """The files below `path` whose paths follow `after`, sorted. Raises what `pages` raises."""
    files: list[Entry] = []
    for page in pages(path, True):
        files += (each for each in page if each.version is not None and each.path > after and each.path != path)
        if len(files) > most_at_once:
            break
    else:
        yield from sorted(files, key=lambda entry: entry.path)
        return
    del files
    level = [each for page in pages(path, False) for each in page if each.path != path]
    names = sorted((each.path if each.version is not None else f"{each.path}/", each) for each in level)
    for name, entry in names:
        if entry.version is not None:
            if name > after:
                yield entry
        elif name > after or after.startswith(name):
            yield from walk(pages, entry.path, after, most_at_once)
