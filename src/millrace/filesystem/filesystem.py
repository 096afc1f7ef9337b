"""`MillraceFileSystem`: an fsspec file system and a pyarrow file system in one object.

fsspec callers (pandas, datasets, DuckDB, `open`) use the methods of the first half. pyarrow and Ray Data see a
`pyarrow.fs.FileSystem` whose handler gives out native files: a cached Parquet file is read by C++ from a memory map, with
no Python between.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
from fsspec.implementations.chained import ChainedFileSystem
from fsspec.utils import tokenize
from pyarrow.fs import PyFileSystem

from millrace.cache.node import CacheNode, cache_node
from millrace.config import OPTION_NAMES, resolve
from millrace.errors import ConfigurationError, ObjectChangedError, ObjectNotFoundError
from millrace.filesystem.files import CachedFile, UploadFile
from millrace.filesystem.handler import MillraceHandler, python_file
from millrace.origin import SCHEMES, Listing, ObjectInfo, open_origin

_OWN_SCHEME = "millrace"

# Protocols whose keys are absolute paths rather than bucket/key.
_ROOTED = frozenset(scheme for scheme, served in SCHEMES.items() if served == "file")


def filesystem(protocol: str, target_options: Mapping[str, Any] | None = None, **options: Any) -> MillraceFileSystem:
    """The file system over `protocol` (`"s3"`, `"file"`) with a cache beneath.

    `target_options` are those of s3fs (`key`, `secret`, `token`, `endpoint_url`, `anon`, `client_kwargs`, ...). The other
    options are `cache_dir`, `capacity`, `min_free`, `members`, `consistency` and `native`, see `docs/reference/options.md`;
    each can also come from `MILLRACE_*` variables and `millrace.toml`.

    The result is picklable, thread-safe, usable after a fork, and both an fsspec and a pyarrow file system. Its pickle
    carries explicit `target_options`, secrets included. Raises `ConfigurationError`.
    """
    return MillraceFileSystem(target_protocol=protocol, target_options=target_options, **options)


class MillraceFileSystem(ChainedFileSystem, PyFileSystem):  # type: ignore[misc]
    """See `filesystem`. Registered with fsspec as `millrace`; `target_protocol` names what lies behind."""

    protocol: str | tuple[str, ...] = _OWN_SCHEME
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
        **options: Any,
    ) -> None:
        if not target_protocol:
            raise ConfigurationError(
                "millrace:// does not say what lies behind it",
                next_step='give target_protocol="s3", or chain the URL: millrace::s3://bucket/key',
            )
        arguments = {name: options.pop(name) for name in OPTION_NAMES if name in options}
        ChainedFileSystem.__init__(self, **_fsspec_options(options))
        self._arguments = arguments
        self._target_protocol = target_protocol
        self._target_options = dict(target_options or {})
        self._origin = open_origin(target_protocol, self._target_options)
        self._options = resolve(arguments)
        # "s3" must be among the protocols, or Ray resolves s3:// paths against AWS; and must not be the first, or Ray
        # may bypass this file system with a client of its own.
        self.protocol = (_OWN_SCHEME, *(name for name, served in SCHEMES.items() if served == SCHEMES[target_protocol]))
        if _pyarrow_half:
            inner = MillraceFileSystem(
                target_protocol, self._target_options, _pyarrow_half=False, skip_instance_cache=True, **arguments
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
        text = str(path)
        scheme, separator, rest = text.partition("://")
        if separator and (scheme == _OWN_SCHEME or scheme in SCHEMES):
            text = rest
        return text.rstrip("/") if not text.startswith("/") else "/" + text.strip("/")

    def unstrip_protocol(self, name: str) -> str:
        return f"{self._target_protocol}://{self._strip_protocol(name)}"

    @property
    def fsid(self) -> str:
        return f"{_OWN_SCHEME}_{self._origin.identity}"

    # --- what the cache knows ---------------------------------------------------------------------

    @property
    def node(self) -> CacheNode:
        """The cache of this process that this file system reads through."""
        return cache_node(self._options)

    def cache_counters(self) -> dict[str, int]:
        """What the cache on this node did since it was made, over all processes: see `millrace.cache.counters`."""
        return self.node.counters()

    def stat(self, path: str) -> ObjectInfo:
        """Describe one object. Raises `ObjectNotFoundError`."""
        return self.node.metadata.stat(self._origin, self.key_of(path))

    def list_level(self, path: str) -> Listing:
        """What lies directly below a directory; empty where there is nothing."""
        return self.node.metadata.list_level(self._origin, self.key_of(path))

    def list_all(self, path: str) -> Iterator[Sequence[ObjectInfo]]:
        """Every object below a directory, in pages."""
        return self.node.metadata.list_all(self._origin, self.key_of(path))

    # --- opening ----------------------------------------------------------------------------------

    def open_native(self, path: str, *, sequential: bool) -> pa.NativeFile:
        """Open for pyarrow: a native file when the object is here, else a Python file that fetches.

        An object of one block is fetched first, and so is native from its first open on. Raises `ObjectNotFoundError`.
        """
        info = self.stat(path)
        node = self.node
        file = node.open_native(self._origin, info)
        if file is not None:
            return file
        reader = node.open_reader(self._origin, info)
        if info.size <= reader.block_bytes:
            return pa.BufferReader(pa.py_buffer(self._read_whole(reader, info)))
        return python_file(CachedFile(reader, path=self.key_of(path), sequential=sequential))

    def open_input_file(self, path: str) -> pa.NativeFile:
        """Override of pyarrow's, which would go through C++ and back."""
        return self.open_native(path, sequential=False)

    def open_input_stream(self, path: str, compression: str | None = "detect", buffer_size: int | None = None) -> Any:
        """Override of pyarrow's, which would go through C++ and back when there is nothing to decompress."""
        if (compression == "detect" and not _looks_compressed(path)) or compression is None:
            return self.open_native(path, sequential=True)
        return PyFileSystem.open_input_stream(self, path, compression=compression, buffer_size=buffer_size)

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        if mode == "wb":
            key = self.key_of(path)
            return UploadFile(self._origin.open_writer(key), path=key, on_published=lambda: self._changed(key))
        if mode != "rb":
            raise ConfigurationError(f"cannot open {path} with mode {mode!r}", next_step="use 'rb' or 'wb'")
        info = self.stat(path)
        return CachedFile(self.node.open_reader(self._origin, info), path=self.key_of(path), sequential=False)

    # --- fsspec's reading half --------------------------------------------------------------------

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        key = self.key_of(path)
        metadata = self.node.metadata
        known = metadata.known(self._origin, key)
        if known is not None and known.size:
            return _file_entry(known)
        if not key.strip("/") or metadata.known_directory(self._origin, key):
            return _directory_entry(key)
        try:
            found: ObjectInfo | None = metadata.stat(self._origin, key)
        except ObjectNotFoundError:
            found = None
        if found is not None and found.size:
            return _file_entry(found)
        # Nothing by this name, or an empty object, which may be a folder's marker: what lies below decides.
        listing = metadata.list_level(self._origin, key)
        if listing.objects or listing.prefixes:
            return _directory_entry(key)
        if found is None:
            raise ObjectNotFoundError(f"{self.unstrip_protocol(key)} does not exist", next_step="check the name")
        return _file_entry(found)

    def ls(self, path: str, detail: bool = True, **_: Any) -> Any:
        key = self.key_of(path)
        listing = self.list_level(key)
        entries = [_directory_entry(prefix) for prefix in listing.prefixes]
        entries += [_file_entry(info) for info in listing.objects if not info.key.endswith("/")]
        if not entries:
            entry = self.info(key)  # raises FileNotFoundError
            entries = [entry] if entry["type"] == "file" else []
        return entries if detail else sorted(entry["name"] for entry in entries)

    def created(self, path: str) -> datetime:
        return self.modified(path)

    def modified(self, path: str) -> datetime:
        return datetime.fromtimestamp(self.stat(path).modified, UTC)

    def checksum(self, path: str) -> str:
        return self.stat(path).version

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        info = self.stat(path)
        first = _position(start, info.size, default=0)
        last = _position(end, info.size, default=info.size)
        reader = self.node.open_reader(self._origin, info)
        try:
            return bytes(reader.read(first, last))
        except ObjectChangedError:
            self._changed(info.key)
            raise
        finally:
            reader.close()

    # --- fsspec's writing half --------------------------------------------------------------------

    def pipe_file(self, path: str, value: Any, mode: str = "overwrite", **_: Any) -> None:
        key = self.key_of(path)
        self._origin.put(key, value, if_absent=mode == "create")
        self._changed(key)

    def rm_file(self, path: str) -> None:
        key = self.key_of(path)
        self.stat(key)  # object stores do not say whether there was something to remove
        self._origin.delete([key])
        self._changed(key)

    def _rm(self, path: str) -> None:
        self.rm_file(path)

    def mkdir(self, path: str, create_parents: bool = True, **_: Any) -> None:
        """Directories of an object store exist as soon as something lies in them: nothing to do."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Directories of an object store exist as soon as something lies in them: nothing to do."""

    # --- inside -----------------------------------------------------------------------------------

    def key_of(self, path: str) -> str:
        """The origin's name of what a user calls `path`."""
        key = str(self._strip_protocol(path)).strip("/")
        return f"/{key}" if self._target_protocol in _ROOTED else key

    def _changed(self, key: str) -> None:
        self.node.metadata.forget(self._origin, key)

    def _read_whole(self, reader: Any, info: ObjectInfo) -> Any:
        try:
            return reader.read(0, info.size)
        except ObjectChangedError:
            # The object was overwritten since its description was fetched; the next open asks anew.
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


def _file_entry(info: ObjectInfo) -> dict[str, Any]:
    return {
        "name": info.key,
        "size": info.size,
        "type": "file",
        "mtime": datetime.fromtimestamp(info.modified, UTC),
        "ETag": info.version,
    }


def _directory_entry(key: str) -> dict[str, Any]:
    return {"name": key, "size": 0, "type": "directory"}


def _position(value: int | None, size: int, *, default: int) -> int:
    if value is None:
        return default
    return max(0, size + value) if value < 0 else min(value, size)


def _looks_compressed(path: str) -> bool:
    """Whether pyarrow would decompress a stream of this name by itself."""
    try:
        return pa.Codec.detect(path) is not None
    except (TypeError, ValueError):  # pyarrow answers an unknown ending with one or the other
        return False
