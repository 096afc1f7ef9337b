"""What pyarrow's C++ side calls: native files for cached objects, Python files for the rest."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyarrow.fs import FileInfo, FileSelector, FileType, FSSpecHandler

from millrace.origin import ObjectInfo

if TYPE_CHECKING:
    from millrace.filesystem.filesystem import MillraceFileSystem


class MillraceHandler(FSSpecHandler):  # type: ignore[misc]
    """Handler of the pyarrow half. It must be an `FSSpecHandler`, by which Ray knows that `s3://` paths are for it.

    It holds a separate file system object, not the one that holds it, so that there is no reference cycle.
    """

    fs: MillraceFileSystem

    def __init__(self, fs: MillraceFileSystem) -> None:
        super().__init__(fs)

    def normalize_path(self, path: str) -> str:
        return self.fs.key_of(path)

    def get_file_info(self, paths: list[str]) -> list[FileInfo]:
        return [self._info(path) for path in paths]

    def get_file_info_selector(self, selector: FileSelector) -> list[FileInfo]:
        base = self.normalize_path(selector.base_dir)
        infos = list(self._select(base, recursive=selector.recursive))
        if infos or selector.allow_not_found:
            return infos
        info = self.fs.info(base)  # raises FileNotFoundError
        if info["type"] == "file":
            raise NotADirectoryError(f"{base} is a file, not a directory")
        return infos

    def open_input_file(self, path: str) -> pa.NativeFile:
        return self.fs.open_native(path, sequential=False)

    def open_input_stream(self, path: str) -> pa.NativeFile:
        return self.fs.open_native(path, sequential=True)

    def _info(self, path: str) -> FileInfo:
        try:
            info = self.fs.info(self.normalize_path(path))
        except FileNotFoundError:
            return FileInfo(path, FileType.NotFound)
        if info["type"] == "directory":
            return FileInfo(path, FileType.Directory)
        return FileInfo(path, FileType.File, size=info["size"], mtime=info["mtime"])

    def _select(self, base: str, *, recursive: bool) -> Iterator[FileInfo]:
        if not recursive:
            listing = self.fs.list_level(base)
            yield from (FileInfo(prefix, FileType.Directory) for prefix in listing.prefixes)
            yield from (_file_info(info) for info in listing.objects if not info.key.endswith("/"))
            return
        seen: set[str] = set()
        for page in self.fs.list_all(base):
            for info in page:
                for directory in _parents(info.key, base):
                    if directory not in seen:
                        seen.add(directory)
                        yield FileInfo(directory, FileType.Directory)
                if not info.key.endswith("/"):
                    yield _file_info(info)


def _file_info(info: ObjectInfo) -> FileInfo:
    return FileInfo(info.key, FileType.File, size=info.size, mtime=datetime.fromtimestamp(info.modified, UTC))


def _parents(key: str, base: str) -> list[str]:
    """The directories between `base` and `key`, outermost first, without `base` itself."""
    parents: list[str] = []
    while (key := key.rpartition("/")[0]) and len(key) > len(base):
        parents.append(key)
    return parents[::-1]


def python_file(file: Any) -> pa.PythonFile:
    """A pyarrow file over a readable Python file object."""
    return pa.PythonFile(file, mode="r")
