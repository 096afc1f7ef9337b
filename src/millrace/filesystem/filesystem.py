"""`MillraceFileSystem`: an fsspec file system and a pyarrow file system in one object.

fsspec callers (pandas, datasets, DuckDB, `open`) use the methods of the first half. pyarrow and Ray Data see a
`pyarrow.fs.FileSystem` whose handler gives out native files: a cached Parquet file is read by C++ from a memory map, with
no Python between.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import pyarrow as pa
from fsspec.utils import tokenize
from pyarrow.fs import PyFileSystem

from millrace.cache.node import CacheNode
from millrace.cache.reader import ObjectReader
from millrace.cache.usage import Use
from millrace.config import LIMIT_NAMES, OPTION_NAMES, resolve
from millrace.errors import ConfigurationError, IsDirectoryError, ObjectChangedError, ObjectNotFoundError
from millrace.filesystem import opens
from millrace.filesystem.batches import Range, as_list, bounds, read_batch, read_ranges
from millrace.filesystem.files import BufferedFile, CachedFile, MappedFile
from millrace.filesystem.handler import MillraceHandler
from millrace.filesystem.hot import HotOpens
from millrace.filesystem.managing import CacheManagement
from millrace.filesystem.native_files import FetchingFile, MemoryFile
from millrace.filesystem.paths import OWN_SCHEME, Paths, names_directory, without_any_scheme
from millrace.filesystem.writing import WritingFileSystem
from millrace.origin import SCHEMES, ObjectInfo, open_origin
from millrace.origin.options.store import checked_mapping
from millrace.peers.attach import Attached

_T = TypeVar("_T")

# Names of which pyarrow decompresses a stream by itself.
_COMPRESSED = (".bz2", ".gz", ".lz4", ".zst")


def filesystem(protocol: str, target_options: Mapping[str, Any] | None = None, **options: Any) -> MillraceFileSystem:
    """The file system over `protocol` with a cache beneath: `"s3"`, `"az"`, `"gs"`, `"hf"`, `"https"`, `"file"`, or another
    that fsspec knows.

    `target_options` are those that s3fs, adlfs, gcsfs, huggingface_hub or fsspec's library for the protocol take. The other
    options are `cache_dir`, `capacity`, `min_free`, `members`, `consistency` and more, see `docs/reference/options.md`; each
    can also come from `MILLRACE_*` variables and `millrace.toml`.

    The result is picklable, thread-safe, usable after a fork, and both an fsspec and a pyarrow file system. Its pickle
    carries explicit `target_options`, secrets included. Raises `ConfigurationError`, and `MissingDependencyError` where a
    library is needed that is not installed.
    """
    return MillraceFileSystem(target_protocol=protocol, target_options=target_options, **options)


class MillraceFileSystem(CacheManagement, WritingFileSystem, PyFileSystem):  # type: ignore[misc]
    """See `filesystem`. Registered with fsspec as `millrace`; `target_protocol` names what lies behind."""

    protocol: str | tuple[str, ...] = OWN_SCHEME
    root_marker = ""
    cachable = True
    # `fo` is the path of the next link of a chained URL; it says nothing about the file system.
    _strip_tokenize_options = ("fo",)

    def __init__(
        self,
        target_protocol: str | None = None,
        target_options: Mapping[str, Any] | None = None,
        *,
        fo: str | None = None,
        _pyarrow_half: bool = True,
        _hot: HotOpens | None = None,
        **options: Any,
    ) -> None:
        if not target_protocol:
            raise ConfigurationError(
                "millrace:// does not say what lies behind it",
                next_step='give target_protocol="s3", or chain the URL: millrace::s3://bucket/key',
            )
        arguments = {name: options.pop(name) for name in OPTION_NAMES if name in options}
        WritingFileSystem.__init__(self, **_fsspec_options(options))
        self._arguments = arguments
        self._target_protocol = target_protocol
        self._target_options = checked_mapping(target_options, "'target_options'")
        limits = {name: arguments.get(name) for name in LIMIT_NAMES}
        self._origin = open_origin(target_protocol, self._target_options, limits)
        self._paths = Paths(target_protocol, self._target_options, self._origin.identity)
        self._rooted = self._paths.rooted
        # Instead of the class's, which does not know of which storage this is: also for fsspec's own methods.
        self._strip_protocol = self._paths.strip  # type: ignore[method-assign]
        self._options = resolve(arguments)
        self._attached = Attached(self._options, self._origin)
        self._hot = HotOpens() if _hot is None else _hot
        # All aliases: "s3" must be among the protocols, or Ray resolves s3:// paths against AWS; and must not be the first,
        # or Ray may bypass this file system with a client of its own.
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
        if not isinstance(other, MillraceFileSystem):
            return NotImplemented
        return self._token() == other._token()

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._token())

    def equals(self, other: object) -> bool:
        return self == other

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
        """The options of the storage behind, as they were given: a copy, secrets included."""
        return dict(self._target_options)

    @property
    def fsid(self) -> str:
        return f"{OWN_SCHEME}_{self._origin.identity}"

    # --- what the cache knows ---------------------------------------------------------------------

    @property
    def node(self) -> CacheNode:
        """The cache of this process that this file system reads through."""
        return self._attached.node

    def cache_counters(self, *, settled: bool = False) -> dict[str, int]:
        """What the cache on this node did since it was made, over all processes: see `millrace.cache.counters`.

        Other processes' opens of what is here are counted up to half a second late; with `settled` that is waited for, so
        that all of what was opened before the call is in the sums (of a process that is stopped it is not: after 5 s).
        """
        return self.node.counters(settled=settled)

    # --- opening ----------------------------------------------------------------------------------

    def open_native(self, path: str, *, sequential: bool) -> pa.NativeFile:
        """Open for pyarrow: a native file when the object is here, else a Python file that fetches.

        An object of one block is fetched first, and so is native from its first open on. Raises `ObjectNotFoundError`.
        """
        buffer = self._hot.find(path)
        return self._open_first(path, sequential=sequential) if buffer is None else MemoryFile(buffer)

    def _open_first(self, path: str, *, sequential: bool) -> pa.NativeFile:
        """Open for pyarrow what was not opened lately."""
        self.require_file_name(path)
        buffer = self._find_here(path)
        if buffer is not None:
            return MemoryFile(buffer)
        info, buffer = self._look_up(path)
        if buffer is not None:
            return MemoryFile(buffer)
        reader = self.node.open_reader(self._origin, info)
        if info.size <= reader.block_bytes:
            reader.close()
            return MemoryFile(pa.py_buffer(self._read_at_once(info, lambda reader: reader.read(0, reader.size))))
        return FetchingFile(self._cached_file(reader, info, sequential=sequential))

    def open_input_file(self, path: str) -> pa.NativeFile:
        """Override of pyarrow's, which would go through C++ and back."""
        buffer = self._hot.find(path)
        return self._open_first(path, sequential=False) if buffer is None else MemoryFile(buffer)

    def open_input_stream(self, path: str, compression: str | None = "detect", buffer_size: int | None = None) -> Any:
        """Override of pyarrow's, which would go through C++ and back when there is nothing to decompress."""
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
        """fsspec's. Of an object that is completely here it gives a file over the memory map."""
        if mode == "rb" and compression is None:
            buffer = self._hot.find(path)
            return self._open_for_reading(path) if buffer is None else MappedFile(buffer, path)
        return super().open(path, mode, block_size, cache_options, compression, **kwargs)

    def _open(self, path: str, mode: str = "rb", autocommit: bool = True, **_: Any) -> Any:
        if mode != "rb":
            return self._open_for_writing(path, mode, autocommit=autocommit)
        return self._open_for_reading(path)

    def _open_for_reading(self, path: str) -> MappedFile | BufferedFile:
        buffer = self._find_here(path)
        if buffer is not None:
            return MappedFile(buffer, path)
        info, buffer = self._look_up(path)
        if buffer is not None:
            return MappedFile(buffer, path)
        return BufferedFile(self._cached_file(self.node.open_reader(self._origin, info), info, sequential=False))

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

        What is not here is fetched all at once, by blocks, so `max_gap` changes nothing.
        """
        if not isinstance(paths, list):
            raise TypeError("paths must be a list")
        ranges = list(zip(as_list(starts, len(paths)), as_list(ends, len(paths)), strict=True))
        return self._cat_batch(paths, ranges, on_error)

    def cat(self, path: Any, recursive: bool = False, on_error: str = "raise", **kwargs: Any) -> Any:
        """fsspec's. Of several objects those that are not here are fetched at once."""
        paths = self.expand_path(path, recursive=recursive, **kwargs)
        if len(paths) == 1 and not isinstance(path, list) and paths[0] == self._strip_protocol(path):
            return self.cat_file(paths[0], **kwargs)
        wanted = (kwargs.get("start"), kwargs.get("end"))
        answers = self._cat_batch(paths, [wanted] * len(paths), "raise" if on_error == "raise" else "return")
        named = dict(zip(paths, answers, strict=True))
        return {name: data for name, data in named.items() if on_error != "omit" or not isinstance(data, Exception)}

    # --- inside -----------------------------------------------------------------------------------

    def key_of(self, path: str) -> str:
        """The origin's name of what a user calls `path`. Local paths are made absolute against the current directory."""
        return self._paths.key_of(path)

    def _may_keep(self, path: str) -> bool:
        """Whether `path` may be found without a look: not where it means something else elsewhere, or to pyarrow."""
        return not self._paths.is_movable(path) and not names_directory(path)

    def _find_here(self, path: str) -> pa.Buffer | None:
        """All bytes of what `path` names, if one look at the index finds them; None: `_look_up` says more.

        Remembered for the next time. Counts as a use.
        """
        first = self.node.find_known(self._origin, self.key_of(path))
        if first is None:
            return None
        found, until, stamp = first
        if opens.listeners:
            name = found.entry.name
            opens.tell(name.origin, name.key)
        hot = None
        if self._may_keep(path):
            hot = self._hot.keep(path, found, until=until, changes=(found.disk.signals, stamp.changes))
        found.disk.usage.touched(hot or Use(found.entry))
        return found.buffer

    def _look_up(self, path: str) -> tuple[ObjectInfo, pa.Buffer | None]:
        """What `path` names, and all of its bytes if they are here; remembered for the next time. Counts as a use.

        Raises `ObjectNotFoundError`, and `IsDirectoryError` for a local directory.
        """
        node = self.node
        seen = node.changes()  # before anything is asked
        key = self.key_of(path)
        try:
            info, until = node.metadata.stat_until(self._origin, key)
        except ObjectNotFoundError as error:
            if self._target_protocol in ("file", "local") and os.path.isdir("/" + key.strip("/")):
                raise IsDirectoryError(f"file://{key} is a directory", next_step="name a file in it") from error
            raise
        if opens.listeners:
            opens.tell(self._origin.identity, info.key)
        found = node.find_native(self._origin, info, seen)
        if found is None:
            return info, None
        if seen is not None and until > self._hot.clock() and self._may_keep(path):
            self._hot.keep(path, found, until=until, changes=(seen.disk.signals, seen.stamp.changes))
        return info, found.buffer

    def _cached_file(self, reader: ObjectReader, info: ObjectInfo, *, sequential: bool) -> CachedFile:
        return CachedFile(reader, path=info.key, sequential=sequential, on_changed=lambda: self._changed(info.key))

    def _cat_batch(self, paths: Sequence[str], ranges: Sequence[Range], on_error: str) -> list[bytes | Exception]:
        """Ranges of objects, of which those that were not opened before are read several at a time."""
        hot = {path: self._hot.find(path) for path in paths}
        answers: list[bytes | Exception] = [b""] * len(paths)
        rest = []
        for place, path in enumerate(paths):
            buffer = hot[path]
            if buffer is None:
                rest.append(place)
            else:
                (answers[place],) = self._read_ranges(path, [ranges[place]], buffer)
        found = read_batch([paths[place] for place in rest], [ranges[place] for place in rest], self._read_ranges)
        for place, answer in zip(rest, found, strict=True):
            if isinstance(answer, Exception) and on_error == "raise":
                raise answer
            answers[place] = answer
        return answers

    def _read_ranges(self, path: str, ranges: Sequence[Range], buffer: pa.Buffer | None = None) -> list[bytes]:
        """Ranges of one version of an object, from its map where there is one."""
        if buffer is None:
            buffer = self._find_here(path)
        if buffer is None:
            info, buffer = self._look_up(path)
            if buffer is None:
                return self._read_at_once(info, lambda reader: read_ranges(reader, ranges))
        spans = [bounds(wanted, buffer.size) for wanted in ranges]
        return [buffer.slice(start, stop - start).to_pybytes() for start, stop in spans]

    def _read_at_once(self, info: ObjectInfo, read: Callable[[ObjectReader], _T]) -> _T:
        """Read of an object of which nothing was handed out yet: if it was overwritten meanwhile, of its new version."""
        try:
            return self._read_version(info, read)
        except ObjectChangedError:
            return self._read_version(self.describe(info.key), read)  # forgotten by now: this asks the origin

    def _read_version(self, info: ObjectInfo, read: Callable[[ObjectReader], _T]) -> _T:
        reader = self.node.open_reader(self._origin, info)
        try:
            return read(reader)
        except (ObjectChangedError, ObjectNotFoundError):
            self._changed(info.key)
            raise
        finally:
            reader.close()


def _rebuild(target_protocol: str, target_options: dict[str, Any], arguments: dict[str, Any]) -> MillraceFileSystem:
    return MillraceFileSystem(target_protocol, target_options, **arguments)


def _fsspec_options(options: dict[str, Any]) -> dict[str, Any]:
    """Options that fsspec's base class knows; anything else is a mistake."""
    known = ("use_listings_cache", "listings_expiry_time", "max_paths", "asynchronous", "loop")
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ConfigurationError(
            f"unknown option {', '.join(map(repr, unknown))}",
            next_step=f"known ones are {', '.join((*OPTION_NAMES, 'target_protocol', 'target_options'))}",
        )
    return options
