"""Listings of object stores and local directories, and the meaning of folders in a store without directories."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from millrace.errors import DeniedError, NotDirectoryError, ObjectNotFoundError, UsageError
from millrace.origin.base import pages_of, resumed, walk
from millrace.origin.obstore_library import obstore_library
from millrace.origin.protocol import Listing, ListingPage, ObjectInfo
from millrace.origin.side_by_side import side_by_side
from millrace.origin.store_access import MADE_UP, StoreAccess

LIST_PAGE = 1000
_MARKER_THREADS = 16
_BAD_PATH = re.compile(r'\bpath: ("(?:[^"\\]|\\.)*")')  # escaped, in the debug part of obstore's text


class StoreListing(StoreAccess):
    """Implements `millrace.origin.Listable`."""

    def list_level(self, prefix: str) -> Listing:
        prefix = prefix.strip("/")
        bucket = self._bucket(prefix)

        def request(client: Any, path: str) -> Listing:
            with self._listable(prefix):
                result = client.list_with_delimiter(path or None)
            objects = [self._info(bucket + meta["path"], meta) for meta in result["objects"] if meta["path"] != path]
            prefixes = [bucket + name for name in result["common_prefixes"]]
            folders = set(prefixes)
            return Listing(
                objects=[info for info in objects if info.size or info.key not in folders],
                prefixes=prefixes,
                # A bucket, the marker of the folder (the only object with the name of the prefix), or a local directory.
                is_directory=not path
                or any(meta["path"] == path for meta in result["objects"])
                or (self._scheme == "file" and os.path.isdir("/" + path)),
            )

        try:
            return self._retrying(prefix, lambda: self._request(prefix, request))
        except NotDirectoryError:  # a local path below a file
            return Listing((), ())

    def list_pages(
        self, prefix: str, *, after: str = "", settled: Callable[[str], ObjectInfo | None] | None = None
    ) -> Iterator[ListingPage]:
        if self._scheme == "file":
            return self._list_local_pages(prefix.strip("/"), after)
        return self._settled_pages(prefix.strip("/"), after, settled or (lambda _: None))

    def _settled_pages(
        self, prefix: str, after: str, settled: Callable[[str], ObjectInfo | None]
    ) -> Iterator[ListingPage]:
        pages = resumed(
            lambda behind: self._list_remote_pages(prefix, behind),
            after,
            lambda next_page: self._retrying(prefix, next_page),
        )
        for page in pages:
            yield page._replace(objects=self._with_empty_folders(page.objects, settled))

    def _list_remote_pages(self, prefix: str, after: str) -> Iterator[ListingPage]:
        """The pages of the origin; markers of empty folders are among the objects."""
        last = renewed = False
        while not last:
            client, _ = self._locate(prefix)
            try:
                for page in self._pages_of(client, prefix, after):
                    yield page
                    last, renewed = page.last, False
                    after = page.objects[-1].key if page.objects else after
            except DeniedError:  # credentials may have expired in the middle: continue behind the last page
                # Once for each page: a credential program may return other credentials each time, also without access.
                if renewed or not self._clients.renew(client):
                    raise
                renewed = True

    def _pages_of(self, client: Any, prefix: str, after: str) -> Iterator[ListingPage]:
        path = prefix.partition("/")[2]
        bucket = self._bucket(prefix)
        # The first page needs the marker of the folder itself, which is not an object below it.
        offset = after.removeprefix(bucket).rstrip("/") if after.rstrip("/") != prefix else ""
        held_back: list[ObjectInfo] = []
        is_directory = not path
        with self._translated(prefix), self._listable(prefix):
            stream = client.list(path or None, offset=offset or None, chunk_size=LIST_PAGE)

        def next_chunk() -> Sequence[Any] | None:
            with self._listable(prefix):
                return next(stream, None)

        while (chunk := self._in_slot(prefix, next_chunk)) is not None:
            last = len(chunk) < LIST_PAGE
            is_directory = is_directory or any(meta["path"] == path for meta in chunk)
            found = held_back + [self._info(bucket + meta["path"], meta) for meta in chunk if meta["path"] != path]
            objects = without_folder_markers(found)
            # The first object of the next page shows whether the last one is a marker.
            held_back = objects[-1:] if objects and objects[-1].size == 0 and not last else []
            yield ListingPage(objects[: len(objects) - len(held_back)], last, is_directory)
            if last:
                return
        yield ListingPage(held_back, True, is_directory)

    def _list_local_pages(self, prefix: str, after: str) -> Iterator[ListingPage]:
        """A walk in the order of the keys, which obstore's own listing does not have; one directory in memory at a time.

        An empty directory is an empty object whose key ends in a slash, as the marker of a folder.
        """
        objects = walk(self.list_level, self.list_level(prefix), after, _empty_folder)
        yield from pages_of(objects, LIST_PAGE, is_directory=os.path.isdir("/" + prefix))

    def _with_empty_folders(
        self, objects: Sequence[ObjectInfo], settled: Callable[[str], ObjectInfo | None]
    ) -> Sequence[ObjectInfo]:
        """Add the final slash to the keys of empty folders' markers, which distinguishes them from empty objects.

        obstore removes the slash and cannot fetch such a name: an empty object in a listing that a request does not find is
        a marker. One request for each empty object that is not settled.
        """
        empty = [info for info in objects if not info.size]
        if not empty:
            return objects
        earlier = {info.key: settled(info.key) for info in empty}
        names = {info.key: old.key for info in empty if (old := earlier[info.key]) is not None and _same(info, old)}
        unsure = [info.key for info in empty if info.key not in names]
        if unsure:
            found = side_by_side(self._is_object, unsure, _MARKER_THREADS, "millrace-markers")
            names |= {key: key if is_object else f"{key}/" for key, is_object in zip(unsure, found, strict=True)}
        return [info if info.size else info._replace(key=names[info.key]) for info in objects]

    def _is_object(self, key: str) -> bool:
        try:
            self._retrying(key, lambda: self.head(key))
        except ObjectNotFoundError:
            return False
        return True

    @contextlib.contextmanager
    def _listable(self, prefix: str) -> Iterator[None]:
        """Replace obstore's error for an invalid name among the listed ones by one that names it."""
        try:
            yield
        except obstore_library().exceptions.InvalidPathError as error:
            if "//" in prefix:
                raise
            raise UsageError(
                f"{self._url(prefix)} contains an object whose name cannot be used"
                + (f" ({bad[1]})" if (bad := _BAD_PATH.search(str(error))) else ""),
                next_step="rename that object (no control characters, no empty parts), or list a directory without it",
            ) from error


def _empty_folder(key: str) -> ObjectInfo | None:
    try:
        modified = os.stat(key).st_mtime
    except FileNotFoundError:  # removed since its parent was listed
        return None
    return ObjectInfo(key=key, size=0, version=f"{MADE_UP}-0-{modified}", modified=modified)


def _same(info: ObjectInfo, earlier: ObjectInfo) -> bool:
    return (info.version, info.modified) == (earlier.version, earlier.modified)


def without_folder_markers(objects: Sequence[ObjectInfo]) -> list[ObjectInfo]:
    """Remove the empty objects that consoles and some servers create for folders: the next key is directly below theirs.

    `objects` are in the order of the origin, which lists a marker immediately before the content of its folder.
    """
    following = [info.key for info in objects[1:]] + [""] * bool(objects)
    return [
        info
        for info, next_key in zip(objects, following, strict=True)
        if info.size or not next_key.startswith(info.key + "/")
    ]
