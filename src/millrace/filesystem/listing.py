"""The listing methods of the file system: fsspec's `ls`, `find`, `walk` over cached metadata."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import groupby
from typing import TYPE_CHECKING, Any

from fsspec.core import has_magic
from fsspec.implementations.chained import ChainedFileSystem

from millrace.errors import DeniedError, MissingError, NotDirectoryError, ObjectNotFoundError, UsageError
from millrace.filesystem.opens import is_pattern, names_directory
from millrace.origin import Listing, ObjectInfo, Origin

if TYPE_CHECKING:
    from millrace.cache.node import CacheNode


class ListingFileSystem(ChainedFileSystem):  # type: ignore[misc]
    """Lists and describes objects. Only a missing object, prefix or bucket counts as absent; other errors are raised."""

    _origin: Origin
    is_rooted: bool
    """Whether paths name files of this machine."""

    if TYPE_CHECKING:

        @property
        def node(self) -> CacheNode: ...

        def key_of(self, path: str) -> str: ...

    @property
    def origin(self) -> Origin:
        """The storage behind the cache."""
        return self._origin

    def describe(self, path: str) -> ObjectInfo:
        """Describe one object. Raises `ObjectNotFoundError`, and `NotDirectoryError` if the path ends in a slash."""
        info = self.node.metadata.stat(self._origin, self.key_of(path))
        self._require_directory_name(path, is_file=True)
        return info

    def list_level(self, path: str) -> Listing:
        """The entries directly below a directory, possibly none. Raises `ObjectNotFoundError` for a missing bucket."""
        return self.node.metadata.list_level(self._origin, self.key_of(path))

    def list_all(self, path: str) -> Iterator[Sequence[ObjectInfo]]:
        """Every object below a directory, in pages. A key that ends in a slash is an empty folder."""
        return self.node.metadata.list_all(self._origin, self.key_of(path))

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """fsspec's. A path that ends in a slash names a directory: for a file it raises `NotDirectoryError`."""
        entry = self._entry(self.key_of(path))
        self._require_directory_name(path, is_file=entry["type"] == "file")
        return entry

    def _require_directory_name(self, path: str, *, is_file: bool) -> None:
        """Raises `NotDirectoryError` if `path` ends in a slash and is a file."""
        if is_file and names_directory(path):
            name = self.unstrip_protocol(self.key_of(path))
            raise NotDirectoryError(f"{name} is a file, not a directory", next_step="leave out the slash at its end")

    def _entry(self, key: str) -> dict[str, Any]:
        metadata = self.node.metadata
        known = metadata.known(self._origin, key)
        if known is not None and known.size:
            return file_entry(known)
        if not key.strip("/") or metadata.remembered_directory(self._origin, key):
            return _directory_entry(key)
        try:
            found: ObjectInfo | None = metadata.stat(self._origin, key)
        except ObjectNotFoundError:
            found = None
        if found is not None and found.size:
            return file_entry(found)
        # No object, or an empty one, which may be the marker of a folder: the listing below decides.
        below = metadata.below(self._origin, key, accept_empty=found is not None)
        if below == "something" or (below == "empty" and found is None):
            return _directory_entry(key)
        if found is None:
            raise ObjectNotFoundError(f"{self.unstrip_protocol(key)} does not exist", next_step="check the name")
        return file_entry(found)

    def exists(self, path: str, **_: Any) -> bool:
        return self._type_of(path) is not None

    def isfile(self, path: str) -> bool:
        return self._type_of(path) == "file"

    def isdir(self, path: str) -> bool:
        return self._type_of(path) == "directory"

    def _type_of(self, path: str) -> str | None:
        try:
            return str(self.info(path)["type"])
        except (FileNotFoundError, NotADirectoryError):
            return None

    def ls(self, path: str, detail: bool = True, refresh: bool = False, **_: Any) -> Any:
        """The entries directly below `path`. With `refresh=True` from the origin, not from cached metadata."""
        key = self.key_of(path)
        if refresh:
            self.invalidate_cache(key)
        listing = self.list_level(key)
        files = [info for info in listing.objects if not info.key.endswith("/")]
        if not files and not listing.prefixes:
            entry = self.info(path)  # raises FileNotFoundError, NotADirectoryError
            found = [entry] if entry["type"] == "file" else []
            return found if detail else [entry["name"] for entry in found]
        if not detail:
            return sorted([*listing.prefixes, *[info.key for info in files]])
        return [*map(_directory_entry, listing.prefixes), *map(file_entry, files)]

    def walk(
        self,
        path: str,
        maxdepth: int | None = None,
        topdown: bool = True,
        on_error: str | Callable[[OSError], None] = "omit",
        **kwargs: Any,
    ) -> Iterator[Any]:
        """fsspec's, but "omit" only omits missing directories: a denied listing is raised."""
        handle = _omit_missing if on_error == "omit" else on_error
        yield from super().walk(path, maxdepth=maxdepth, topdown=topdown, on_error=handle, **kwargs)

    def find(
        self, path: str, maxdepth: int | None = None, withdirs: bool = False, detail: bool = False, **kwargs: Any
    ) -> Any:
        """Every file below `path`, with one listing (one per directory with `maxdepth`); with `withdirs` directories too."""
        key = self.key_of(path)
        out: dict[str, Any] = {}
        if maxdepth is not None:
            self.list_level(key)  # a missing bucket is an error in either case
            out = super().find(key, maxdepth=maxdepth, withdirs=withdirs, detail=True, **kwargs)
        else:
            if kwargs.get("refresh"):
                self.invalidate_cache(key)
            for page in self.list_all(key):
                for info in page:
                    if withdirs:
                        out.update((name, _directory_entry(name)) for name in parents(info.key, key) if name not in out)
                    if not info.key.endswith("/"):
                        out[info.key] = file_entry(info)
            if (withdirs or not out) and key.strip("/"):
                try:
                    entry = self.info(path)
                except (FileNotFoundError, NotADirectoryError):
                    entry = None
                if entry is not None and (withdirs or entry["type"] == "file"):
                    out[key] = entry
        return dict(sorted(out.items())) if detail else sorted(out)

    def expand_path(
        self,
        path: Any,
        recursive: bool = False,
        maxdepth: int | None = None,
        assume_literal: bool = False,
        **kwargs: Any,
    ) -> list[str]:
        """fsspec's, but a name with `*`, `?` or `[` is a pattern only if no object or directory has exactly that name.

        Raises `ObjectNotFoundError` if nothing matches.
        """
        names = [path] if isinstance(path, str | os.PathLike) else list(path)
        if not names:
            return []
        found: set[str] = set()
        for name in names:
            literal = assume_literal or (has_magic(str(name)) and self.exists(str(name)))
            if names_directory(name):  # fsspec removes the slash
                self._require_directory_name(str(name), is_file=self.isfile(self.key_of(str(name))))
            try:
                found.update(super().expand_path([name], recursive, maxdepth, assume_literal=literal, **kwargs))
            except MissingError:
                raise
            except FileNotFoundError:
                continue  # an error only if none of the names exists
        if not found:
            shown = ", ".join(self.unstrip_protocol(self.key_of(str(name))) for name in names[:3])
            raise ObjectNotFoundError(f"{shown or '(no name)'}: not found", next_step="check the name")
        return sorted(found)

    def get(self, rpath: Any, lpath: Any, *arguments: Any, **kwargs: Any) -> Any:
        """fsspec's; an object with `*`, `?` or `[` in its name gets the same target as any other."""
        if isinstance(rpath, str) and has_magic(rpath) and self.isfile(rpath):
            if isinstance(lpath, str | os.PathLike):
                target = os.fspath(lpath)
                into = target.endswith("/") or os.path.isdir(target)
                lpath = [os.path.join(target, self.key_of(rpath).rpartition("/")[2]) if into else target]
            rpath = [rpath]
        return super().get(rpath, lpath, *arguments, **kwargs)

    def get_file(self, rpath: str, lpath: Any = None, *arguments: Any, **kwargs: Any) -> None:
        """fsspec's; a local file onto itself stays as it is. fsspec empties it before it is read.

        A file that root has from `millrace files` is replaced: a write into it would change the cache.
        """
        if isinstance(lpath, str | os.PathLike):
            with contextlib.suppress(OSError):  # one of them does not exist
                if self.is_rooted and os.path.samefile(self.key_of(rpath), lpath):
                    return
                found = os.stat(lpath)
                is_link = stat.S_ISREG(found.st_mode) and found.st_nlink > 1 and not found.st_mode & 0o222
                if is_link and os.access(lpath, os.W_OK) and self.isfile(rpath):
                    os.unlink(lpath)
        super().get_file(rpath, lpath, *arguments, **kwargs)

    def glob(self, path: str, maxdepth: int | None = None, **kwargs: Any) -> Any:
        """fsspec's, but a web address with '?' is not a pattern: its query begins there, and it names one object."""
        if has_magic(path) and not is_pattern(path, self._origin.identity):
            entry = self.info(path) if self.exists(path) else None
            found = {} if entry is None else {str(entry["name"]): entry}
            return found if kwargs.get("detail") else sorted(found)
        return super().glob(path, maxdepth=maxdepth, **kwargs)

    def invalidate_cache(self, path: str | None = None) -> None:
        """Drop the cached metadata of `path` and the listings that may contain it; without a path, all metadata.

        The next use reads it from the origin. Cached bytes stay, and so do listings below `path`.
        """
        metadata = self.node.metadata
        if path is None:
            metadata.invalidate_all()
            return
        key = self.key_of(path)
        metadata.invalidate(self._origin, key)
        metadata.invalidate(self._origin, f"{key}/")  # the listing of the directory itself

    def created(self, path: str) -> datetime:
        return self.modified(path)

    def modified(self, path: str) -> datetime:
        return datetime.fromtimestamp(self.describe(path).modified, UTC)

    def checksum(self, path: str) -> str:
        return self.describe(path).version


def _omit_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def file_entry(info: ObjectInfo) -> dict[str, Any]:
    """An object as fsspec describes a file."""
    return {
        "name": info.key,
        "size": info.size,
        "type": "file",
        "mtime": datetime.fromtimestamp(info.modified, UTC),
        "ETag": info.version,
    }


def _directory_entry(key: str) -> dict[str, Any]:
    return {"name": key, "size": 0, "type": "directory"}


def parents(key: str, base: str) -> list[str]:
    """The directories between `base` and `key`, outermost first, without `base` itself."""
    found: list[str] = []
    while (key := key.rpartition("/")[0]) and len(key) > len(base):
        found.append(key)
    return found[::-1]


def describe_many(fs: ListingFileSystem, keys: Iterable[str]) -> dict[str, ObjectInfo]:
    """The objects with these keys, from cached or new listings: one request per key would take hours for a million.

    A request lists up to a thousand keys of a directory; ranges without a requested key are skipped. Missing objects are
    omitted, and so are objects that may not be listed and whose metadata is not cached.
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
            # Begin just before the first name that is not found yet; continue while pages contain names.
            for part in metadata.parts(fs.origin, directory, name[:-1]):
                hits = [info for info in part.objects if info.key in wanted]
                found.update((info.key, info) for info in hits)
                if not hits and part.through >= name:
                    break
    except ObjectNotFoundError:
        return  # there is no such bucket
    except (DeniedError, UsageError):  # reading may be allowed and listing denied; some origins have no order
        for name in names:
            known = metadata.known(fs.origin, name)
            if known is not None:
                found[name] = known
