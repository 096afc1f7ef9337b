"""Listings of object stores and of local directories, and what a folder is where there are only names."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from millrace.errors import DeniedError, ObjectNotFoundError, UsageError
from millrace.origin.obstore_library import obstore_library
from millrace.origin.protocol import Listing, ListingPage, ObjectInfo
from millrace.origin.side_by_side import side_by_side
from millrace.origin.store_access import StoreAccess
from millrace.origin.turns import resumed

LIST_PAGE = 1000
_MARKER_THREADS = 16


class StoreListing(StoreAccess):
    """Enumerates keys, as `millrace.origin.Listable` says."""

    def list_level(self, prefix: str) -> Listing:
        prefix = prefix.strip("/")
        bucket = self._bucket(prefix)

        def request(client: Any, path: str) -> Listing:
            with self._listable(prefix):
                result = obstore_library().list_with_delimiter(client, path or None)
            objects = [self._info(bucket + meta["path"], meta) for meta in result["objects"] if meta["path"] != path]
            prefixes = [bucket + name for name in result["common_prefixes"]]
            folders = set(prefixes)
            return Listing(
                objects=[info for info in objects if info.size or info.key not in folders],
                prefixes=prefixes,
                # A bucket that answers, a folder's marker (it alone has the prefix's own name), or a local directory.
                is_directory=not path
                or any(meta["path"] == path for meta in result["objects"])
                or (self._scheme == "file" and os.path.isdir("/" + path)),
            )

        return self._retrying(prefix, lambda: self._request(prefix, request))

    def list_all(self, prefix: str) -> Iterator[Sequence[ObjectInfo]]:
        for page in self.list_pages(prefix):
            if page.objects:
                yield page.objects

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
            yield replace(page, objects=self._with_empty_folders(page.objects, settled))

    def _list_remote_pages(self, prefix: str, after: str) -> Iterator[ListingPage]:
        """The pages as they come, with markers of empty folders among the objects."""
        last = renewed = False
        while not last:
            client, _ = self._locate(prefix)
            try:
                for page in self._pages_of(client, prefix, after):
                    yield page
                    last, renewed = page.last, False
                    after = page.objects[-1].key if page.objects else after
            except DeniedError:  # credentials may have ended in the middle: go on behind what has come
                # Once for each page: who is denied gets others each time where a program makes them for each question.
                if renewed or not self._clients.renew(client):
                    raise
                renewed = True

    def _pages_of(self, client: Any, prefix: str, after: str) -> Iterator[ListingPage]:
        path = prefix.partition("/")[2]
        bucket = self._bucket(prefix)
        # The marker of the folder itself is wanted when listing begins, and is not an object below it.
        offset = after.removeprefix(bucket).rstrip("/") if after.rstrip("/") != prefix else ""
        held_back: list[ObjectInfo] = []
        is_directory = not path
        with self._translated(prefix), self._listable(prefix):
            stream = obstore_library().list(client, path or None, offset=offset or None, chunk_size=LIST_PAGE)

        def next_chunk() -> Sequence[Any] | None:
            with self._listable(prefix):
                return next(stream, None)

        while (chunk := self._in_turn(prefix, next_chunk)) is not None:
            last = len(chunk) < LIST_PAGE
            is_directory = is_directory or any(meta["path"] == path for meta in chunk)
            found = held_back + [self._info(bucket + meta["path"], meta) for meta in chunk if meta["path"] != path]
            objects = without_folder_markers(found)
            # Whether the last one is a marker shows with the first of the next page.
            held_back = objects[-1:] if objects and objects[-1].size == 0 and not last else []
            yield ListingPage(objects[: len(objects) - len(held_back)], last, is_directory)
            if last:
                return
        yield ListingPage(held_back, True, is_directory)

    def _list_local_pages(self, prefix: str, after: str) -> Iterator[ListingPage]:
        """A walk in the order of the keys, which obstore's own is not; bounded by the largest directory."""
        objects: list[ObjectInfo] = []
        is_directory = os.path.isdir("/" + prefix)
        for info in self._walk(prefix, after):
            objects.append(info)
            if len(objects) == LIST_PAGE:
                yield ListingPage(objects, False, is_directory)
                objects = []
        yield ListingPage(objects, True, is_directory)

    def _walk(self, prefix: str, after: str) -> Iterator[ObjectInfo]:
        listing = self.list_level(prefix)
        entries: list[tuple[str, ObjectInfo | None]] = [(info.key, info) for info in listing.objects]
        entries += [(f"{name}/", None) for name in listing.prefixes]
        for key, info in sorted(entries, key=lambda entry: entry[0]):
            if info is None:
                if key > after or after.startswith(key):
                    yield from self._walk(key, after)
            elif key > after:
                yield info

    def _with_empty_folders(
        self, objects: Sequence[ObjectInfo], settled: Callable[[str], ObjectInfo | None]
    ) -> Sequence[ObjectInfo]:
        """Tell the markers of empty folders from empty objects, by a slash at the end of their key.

        obstore takes the slash off, but cannot fetch such a name either: an empty object that a listing names and a request
        does not find is a marker. Costs a request for each empty object that is not settled.
        """
        empty = [info for info in objects if not info.size]
        if not empty:
            return objects
        earlier = {info.key: settled(info.key) for info in empty}
        names = {info.key: told.key for info in empty if (told := earlier[info.key]) is not None and _same(info, told)}
        unsure = [info.key for info in empty if info.key not in names]
        if unsure:
            found = side_by_side(self._is_object, unsure, _MARKER_THREADS, "millrace-markers")
            names |= {key: key if is_object else f"{key}/" for key, is_object in zip(unsure, found, strict=True)}
        return [info if info.size else replace(info, key=names[info.key]) for info in objects]

    def _is_object(self, key: str) -> bool:
        try:
            self._retrying(key, lambda: self.head(key))
        except ObjectNotFoundError:
            return False
        return True

    @contextlib.contextmanager
    def _listable(self, prefix: str) -> Iterator[None]:
        """Tell a listed name that obstore cannot take from one that was asked for: the others are there all the same."""
        try:
            yield
        except obstore_library().exceptions.InvalidPathError as error:
            if "//" in prefix:
                raise
            raise UsageError(
                f"{self._scheme}://{prefix} holds an object whose name cannot be used ({error})",
                next_step="rename that object (no control characters, no empty parts), or list a directory without it",
            ) from error


def _same(info: ObjectInfo, earlier: ObjectInfo) -> bool:
    return (info.version, info.modified) == (earlier.version, earlier.modified)


def without_folder_markers(objects: Sequence[ObjectInfo]) -> list[ObjectInfo]:
    """Leave out the empty objects that consoles and some servers make for folders: the key lies right above another one.

    `objects` are in the order of the origin, which lists a marker immediately before what is in its folder.
    """
    following = [info.key for info in objects[1:]] + [""] * bool(objects)
    return [
        info
        for info, next_key in zip(objects, following, strict=True)
        if info.size or not next_key.startswith(info.key + "/")
    ]
