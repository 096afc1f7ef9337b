"""`MillraceFileSystem`: an fsspec file system and a pyarrow file system in one object.

fsspec callers (pandas, datasets, DuckDB, `open`) use the fsspec half. pyarrow and Ray Data use the `pyarrow.fs.FileSystem`
half, whose handler returns native files: C++ reads a cached Parquet file from a memory map, without calling Python.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, Unpack

import pyarrow as pa
from fsspec.json import FilesystemJSONEncoder
from fsspec.utils import tokenize
from pyarrow.fs import FileSystem, PyFileSystem

from millrace.cache.eviction.usage import AccessRecord
from millrace.cache.node import CacheNode
from millrace.cache.reading.reader import CachedReader, ObjectReader, Range, bounds, read_ranges
from millrace.cluster.attach import Attached
from millrace.config import LIMIT_NAMES, OPTION_NAMES, anchored, resolve, unknown_names
from millrace.errors import ConfigurationError, MillraceError, ObjectChangedError, ObjectNotFoundError, StorageError
from millrace.filesystem.files import (
    BufferedFile,
    CachedFile,
    FetchingFile,
    MappedFile,
    MemoryFile,
    as_list,
    read_batch,
)
from millrace.filesystem.handler import MillraceHandler
from millrace.filesystem.managing import CacheManagement
from millrace.filesystem.opens import (
    OWN_SCHEME,
    HotOpens,
    Paths,
    drop_hot_opens,
    log_mapped,
    names_directory,
    open_hooks,
    unusable_name,
    without_any_scheme,
)
from millrace.filesystem.writing import WritingFileSystem
from millrace.option_types import FileSystemOptions
from millrace.origin import SCHEMES, ObjectInfo, open_origin
from millrace.origin.options.public import without_secrets
from millrace.origin.options.store import checked_mapping
from millrace.store.segments import SMALL_OBJECT_BYTES

_T = TypeVar("_T")

# Options of the cache; `tls` names a private key.
_SECRET_ARGUMENTS = frozenset({"cluster_token", "tls"})

# pyarrow decompresses streams with these names.
_COMPRESSED = (".bz2", ".gz", ".lz4", ".zst")


def filesystem(
    protocol: str, target_options: Mapping[str, Any] | None = None, **options: Unpack[FileSystemOptions]
) -> MillraceFileSystem:
    """A cached file system over `protocol`: `"s3"`, `"az"`, `"gs"`, `"hf"`, `"https"`, `"file"`, or another of fsspec.

    `target_options` are those of s3fs, adlfs, gcsfs, huggingface_hub or fsspec's library for the protocol. The other
    options are declared in `millrace.option_types.FileSystemOptions` and described in `docs/reference/options.md`; those of
    the cache can also come from `MILLRACE_*` variables and `millrace.toml`.

    The result is picklable, thread-safe, usable after a fork, and both an fsspec and a pyarrow file system. Its pickle
    contains explicit `target_options`, secrets included. Raises `ConfigurationError`, and `MissingDependencyError` if a
    required library is not installed.
    """
    return MillraceFileSystem(target_protocol=protocol, target_options=target_options, **options)


class MillraceFileSystem(CacheManagement, WritingFileSystem, PyFileSystem):  # type: ignore[misc]
    """See `filesystem`. Registered with fsspec as `millrace`; `target_protocol` names the storage."""

    protocol: str | tuple[str, ...] = OWN_SCHEME
    root_marker = ""
    cachable = True
    # `fo` is the path of the next link of a chained URL; it does not affect the file system.
    _strip_tokenize_options = ("fo",)

    def __init__(
        self,
        target_protocol: str | None = None,
        target_options: Mapping[str, Any] | None = None,
        *,
        fo: str | None = None,
        _pyarrow_half: bool = True,
        _hot: HotOpens | None = None,
        **options: Unpack[FileSystemOptions],
    ) -> None:
        if not target_protocol:
            raise ConfigurationError(
                "millrace:// needs a target_protocol",
                next_step='set target_protocol="s3", or chain the URL: millrace::s3://bucket/key',
            )
        given: dict[str, Any] = {**options}
        arguments = {name: given.pop(name) for name in OPTION_NAMES if name in given}
        if "cache_dir" in arguments:  # a pickle is used by processes with other working directories
            arguments["cache_dir"] = anchored(arguments["cache_dir"])
        WritingFileSystem.__init__(self, **_fsspec_options(given))
        self._arguments = arguments
        self._target_protocol = target_protocol
        self._target_options = checked_mapping(target_options, "'target_options'")
        limits = {name: arguments.get(name) for name in LIMIT_NAMES}
        self._origin = open_origin(target_protocol, self._target_options, limits)
        self._paths = Paths(target_protocol, self._target_options, self._origin.identity)
        self.is_rooted = self._paths.rooted
        # Replaces the class method, which has no storage, also in fsspec's own methods.
        self._strip_protocol = self._paths.strip  # type: ignore[method-assign]
        self._options = resolve(arguments)
        self._attached = Attached(self._options, self._origin)
        self._hot = HotOpens() if _hot is None else _hot
        # All aliases: "s3" must be among the protocols, or Ray resolves s3:// paths against AWS. It must not be the first,
        # or Ray may bypass this file system with its own client.
        self.protocol = (OWN_SCHEME, *self._paths.aliases)
        if _pyarrow_half:
            inner = MillraceFileSystem(
                target_protocol,
                self._target_options,
                _pyarrow_half=False,
                _hot=self._hot,
                skip_instance_cache=True,
                **arguments,
            )
            PyFileSystem.__init__(self, MillraceHandler(inner))

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self._target_protocol, self._target_options, self._arguments)

    def __repr__(self) -> str:
        return f"MillraceFileSystem({self._origin.identity!r}, cache_dir={[str(d) for d in self._options.cache_dirs]})"

    # Both halves define equality; two file systems are equal when they read the same bytes through the same cache.
    def __eq__(self, other: object) -> bool:
        if isinstance(other, PyFileSystem) and isinstance(other.handler, MillraceHandler):
            other = other.handler.fs  # as pyarrow's data sets return it
        if not isinstance(other, MillraceFileSystem):
            return NotImplemented
        return self._token() == other._token()

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._token())

    def equals(self, other: object) -> bool:
        """pyarrow's. Raises `TypeError` for anything but a file system, as pyarrow's own classes do."""
        if not isinstance(other, FileSystem):
            raise TypeError(f"equals takes a pyarrow.fs.FileSystem, not {type(other).__name__}")
        return self.__eq__(other) is True

    def _token(self) -> str:
        return str(tokenize(self._target_protocol, self._target_options, self._arguments))

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        """`s3://bucket/key`, `millrace://bucket/key` and `bucket/key` all name `bucket/key`."""
        if isinstance(path, list):
            return [cls._strip_protocol(item) for item in path]
        return without_any_scheme(path, SCHEMES)

    def unstrip_protocol(self, name: str) -> str:
        return self._paths.url_of(name)

    @property
    def target_options(self) -> dict[str, Any]:
        """A copy of the options of the storage as they were passed, secrets included."""
        return dict(self._target_options)

    def to_dict(self, *, include_password: bool = True) -> dict[str, Any]:
        """fsspec's, also used by `to_json`. Without `include_password` it contains no secret, at any depth.

        The receiver then uses credentials, `cluster_token` and `tls` of its own environment.
        """
        target = {name: value for name, value in self._target_options.items() if value is not None}
        arguments = self._arguments
        if not include_password:
            target = without_secrets(target)
            arguments = {name: value for name, value in arguments.items() if name not in _SECRET_ARGUMENTS}
        options = {"target_protocol": self._target_protocol, "target_options": target or None, **arguments}
        given = FilesystemJSONEncoder().make_serializable({k: v for k, v in options.items() if v is not None})
        return {"cls": f"{__name__}:{type(self).__name__}", "protocol": OWN_SCHEME, "args": (), **given}

    @property
    def fsid(self) -> str:
        return f"{OWN_SCHEME}_{self._origin.identity}"

    # --- the cache --------------------------------------------------------------------------------

    @property
    def node(self) -> CacheNode:
        """The cache of this process behind this file system."""
        return self._attached.node

    def cache_counters(self, *, settled: bool = False) -> dict[str, int]:
        """Counters of the cache on this node since its creation, over all processes: see `millrace.cache.counters`.

        Other processes count their opens of cached objects up to half a second late. With `settled`, this call waits for
        them, at most 5 s: a stopped process does not count.
        """
        return self.node.counters(settled=settled)

    # --- opening ----------------------------------------------------------------------------------

    def open_native(self, path: str, *, sequential: bool) -> pa.NativeFile:
        """Open for pyarrow: a native file if the object is cached, else a Python file that fetches.

        An object of one block is fetched first, so it is native from its first open; but not for random access when the
        disk is full: it may not be stored, and other processes that read its footer would fetch it whole each time.
        Raises `ObjectNotFoundError`.
        """
        buffer = self._hot.find(path)
        return self._open_first(path, sequential=sequential) if buffer is None else MemoryFile(buffer)

    def _open_first(self, path: str, *, sequential: bool) -> pa.NativeFile:
        """Open for pyarrow, for a path without a recent open."""
        found = self._look_up(path)
        if not isinstance(found, ObjectInfo):
            return MemoryFile(found)
        reader = self.node.open_reader(self._origin, found)
        if found.size <= reader.block_bytes and (sequential or not _may_be_refused(found, reader)):
            reader.close()
            return MemoryFile(pa.py_buffer(self._read_at_once(found, lambda reader: reader.read(0, reader.size))))
        return FetchingFile(self._cached_file(reader, found, sequential=sequential))

    def get_file_info(self, paths_or_selector: Any) -> Any:
        """Override of pyarrow's, which takes no `os.PathLike`, and for which a name that is not UTF-8 is a codec's error."""
        given = paths_or_selector
        if isinstance(given, os.PathLike):
            given = os.fspath(given)
        elif isinstance(given, list | tuple):
            given = [os.fspath(path) for path in given]
        try:
            return PyFileSystem.get_file_info(self, given)
        except UnicodeEncodeError as error:
            raise unusable_name(error.object) from error

    def open_input_file(self, path: str) -> pa.NativeFile:
        """Override of pyarrow's, which would go through C++ and back."""
        buffer = self._hot.find(path)
        return self._open_first(path, sequential=False) if buffer is None else MemoryFile(buffer)

    def open_input_stream(self, path: str, compression: str | None = "detect", buffer_size: int | None = None) -> Any:
        """Override of pyarrow's, which would go through C++ and back if there is nothing to decompress."""
        if compression is not None and (compression != "detect" or str(path).endswith(_COMPRESSED)):
            return PyFileSystem.open_input_stream(self, path, compression=compression, buffer_size=buffer_size)
        buffer = self._hot.find(path)
        return self._open_first(path, sequential=True) if buffer is None else MemoryFile(buffer)

    def open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        cache_options: dict[str, Any] | None = None,
        compression: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """fsspec's. For a completely cached object it returns a file over the memory map."""
        if mode == "rb" and compression is None:
            buffer = self._hot.find(path)
            return self._open_for_reading(path) if buffer is None else MappedFile(buffer, path)
        return super().open(path, mode, block_size, cache_options, compression, **kwargs)

    def _open(self, path: str, mode: str = "rb", autocommit: bool = True, **_: Any) -> Any:
        if mode != "rb":
            return self._open_for_writing(path, mode, autocommit=autocommit)
        return self._open_for_reading(path)

    def _open_for_reading(self, path: str) -> MappedFile | BufferedFile:
        found = self._look_up(path)
        if not isinstance(found, ObjectInfo):
            return MappedFile(found, path)
        return BufferedFile(self._cached_file(self.node.open_reader(self._origin, found), found, sequential=False))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        buffer = self._hot.find(path)
        if buffer is not None and start is None and end is None:
            return bytes(buffer.to_pybytes())
        return self._read_ranges(path, [(start, end)], buffer)[0]

    def cat_ranges(
        self,
        paths: list[str],
        starts: int | Sequence[int | None] | None,
        ends: int | Sequence[int | None] | None,
        max_gap: int | None = None,
        on_error: str = "return",
        **_: Any,
    ) -> list[Any]:
        """fsspec's: bytes for each range, or with `on_error="return"` the exception.

        Missing blocks are fetched at once, so `max_gap` has no effect.
        """
        if not isinstance(paths, list):
            raise TypeError("paths must be a list")
        ranges = list(zip(as_list(starts, len(paths)), as_list(ends, len(paths)), strict=True))
        return self._cat_batch(paths, ranges, on_error)

    def cat(self, path: Any, recursive: bool = False, on_error: str = "raise", **kwargs: Any) -> Any:
        """fsspec's. Several objects are fetched at the same time."""
        paths = self.expand_path(path, recursive=recursive, **kwargs)
        if len(paths) == 1 and not isinstance(path, list) and paths[0] == self._strip_protocol(path):
            return self.cat_file(paths[0], **kwargs)
        wanted = (kwargs.get("start"), kwargs.get("end"))
        results = self._cat_batch(paths, [wanted] * len(paths), "raise" if on_error == "raise" else "return")
        named = dict(zip(paths, results, strict=True))
        return {name: data for name, data in named.items() if on_error != "omit" or not isinstance(data, Exception)}

    # --- inside -----------------------------------------------------------------------------------

    def key_of(self, path: str) -> str:
        """The key of `path` at the origin. A relative local path is resolved against the current directory."""
        return self._paths.key_of(path)

    def without_scheme(self, path: str) -> str:
        """The result of pyarrow's `normalize_path`: see `Paths.normalized`."""
        return self._paths.normalized(path)

    def _may_keep(self, path: str) -> bool:
        """Whether a later open may use `path` as a key: not a relative path, nor one that ends in a slash."""
        return not self._paths.is_movable(path) and not names_directory(path)

    def _look_up(self, path: str) -> ObjectInfo | pa.Buffer:
        """All bytes of the object at `path` if they are cached, else its description. Counts as a use.

        Kept for the next open. Raises `ObjectNotFoundError`, and `IsDirectoryError` or `NotDirectoryError` for a path that
        is not a file's.
        """
        if names_directory(path):
            self.require_file_name(path)
        node = self.node
        key = self.key_of(path)
        began = time.time()
        known = node.find_known(self._origin, key)  # one lookup in the index
        if known is not None:
            found, until, stamp = known
            if open_hooks.registered:
                open_hooks.call(found.entry.name.origin, found.entry.name.key)
            hot = None
            if self._may_keep(path):
                hot = self._hot.keep(path, found, until=until, changes=(found.disk.signals, stamp.changes))
            found.disk.usage.touched(hot or AccessRecord(found.entry))
            log_mapped(found.entry, began)
            return found.buffer
        seen = node.changes()  # before the metadata is read
        try:
            info, until = node.metadata.stat_until(self._origin, key)
        except ObjectNotFoundError as error:
            if self._is_directory(key):
                raise self.is_directory_error(path) from error
            raise
        if open_hooks.registered:
            open_hooks.call(self._origin.identity, info.key)
        native = node.find_native(self._origin, info, seen)
        if native is None:
            return info
        if seen is not None and until > self._hot.clock() and self._may_keep(path):
            self._hot.keep(path, native, until=until, changes=(seen.disk.signals, seen.stamp.changes))
        log_mapped(native.entry, began)
        return native.buffer

    def _is_directory(self, key: str) -> bool:
        """Whether `key`, which is not an object, is a directory. Requests at most one page of a listing."""
        if self.is_rooted:
            return os.path.isdir(key)
        try:
            return self.node.metadata.below(self._origin, key, accept_empty=True) != "nothing"
        except MillraceError:  # listing is denied, or the bucket is missing: so is the object
            return False

    def _cached_file(self, reader: ObjectReader, info: ObjectInfo, *, sequential: bool) -> CachedFile:
        return CachedFile(reader, path=info.key, sequential=sequential, on_changed=lambda: self._outdated(info.key))

    def _cat_batch(self, paths: Sequence[str], ranges: Sequence[Range], on_error: str) -> list[bytes | Exception]:
        """Ranges of objects. Objects without a recent open are read several at a time."""
        hot = {path: self._hot.find(path) for path in paths}
        results: list[bytes | Exception] = [b""] * len(paths)
        rest = []
        for place, path in enumerate(paths):
            buffer = hot[path]
            if buffer is None:
                rest.append(place)
            else:
                (results[place],) = self._read_ranges(path, [ranges[place]], buffer)
        found = read_batch([paths[place] for place in rest], [ranges[place] for place in rest], self._read_ranges)
        for place, result in zip(rest, found, strict=True):
            if isinstance(result, Exception) and on_error == "raise":
                raise result
            results[place] = result
        return results

    def _read_ranges(self, path: str, ranges: Sequence[Range], buffer: pa.Buffer | None = None) -> list[bytes]:
        """Ranges of one version of an object, from its memory map if it is cached."""
        if buffer is None:
            found = self._look_up(path)
            if isinstance(found, ObjectInfo):
                return self._read_at_once(found, lambda reader: read_ranges(reader, ranges))
            buffer = found
        spans = [bounds(wanted, buffer.size) for wanted in ranges]
        return [buffer.slice(start, stop - start).to_pybytes() for start, stop in spans]

    def _read_at_once(self, info: ObjectInfo, read: Callable[[ObjectReader], _T]) -> _T:
        """Read from an object without an open file. If it was overwritten, read once more from the new version."""
        try:
            return self._read_version(info, read)
        except ObjectChangedError:
            # Not from cached metadata: a full disk may have kept the old description.
            newest = self.node.metadata_within(0).stat(self._origin, info.key)
            return self._read_version(newest, read)

    def _read_version(self, info: ObjectInfo, read: Callable[[ObjectReader], _T]) -> _T:
        reader = self.node.open_reader(self._origin, info)
        try:
            return read(reader)
        except (ObjectChangedError, ObjectNotFoundError):
            self._outdated(info.key)
            raise
        finally:
            reader.close()

    def _changed(self, *keys: str) -> None:
        try:
            super()._changed(*keys)
        except StorageError:
            drop_hot_opens()
            raise

    def _outdated(self, key: str) -> None:
        self.node.metadata.drop_outdated(self._origin, key)


def _may_be_refused(info: ObjectInfo, reader: ObjectReader) -> bool:
    """Whether there may be no space for this object, of which parts can be read."""
    return isinstance(reader, CachedReader) and info.size > SMALL_OBJECT_BYTES and not reader.has_room(info.size)


def _rebuild(target_protocol: str, target_options: dict[str, Any], arguments: dict[str, Any]) -> MillraceFileSystem:
    return MillraceFileSystem(target_protocol, target_options, **arguments)


def _fsspec_options(options: dict[str, Any]) -> dict[str, Any]:
    """The options of fsspec's base class. Raises `ConfigurationError` for unknown ones."""
    unknown = sorted(set(options) - set(FileSystemOptions.__annotations__))
    if unknown:
        hint = "; those of the storage, such as 'key' or 'endpoint_url', go into target_options={...}"
        raise unknown_names("unknown option", unknown, (*OPTION_NAMES, "target_protocol", "target_options"), hint=hint)
    return options
