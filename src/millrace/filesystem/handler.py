"""What pyarrow's C++ side calls: native files for cached objects, Python files for the rest."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyarrow.fs import FileInfo, FileSelector, FileType, FSSpecHandler

from millrace.errors import NotDirectoryError, UsageError
from millrace.filesystem.listing import parents
from millrace.filesystem.paths import names_directory
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
        try:
            infos = list(self._select(base, recursive=selector.recursive))
        except FileNotFoundError:  # the bucket
            infos = []
        if infos or selector.allow_not_found:
            return infos
        info = self.fs.info(base)  # raises FileNotFoundError
        if info["type"] == "file":
            raise _no_directory(base)
        return infos

    def open_input_file(self, path: str) -> pa.NativeFile:
        return self.fs.open_native(path, sequential=False)

    def open_input_stream(self, path: str) -> pa.NativeFile:
        return self.fs.open_native(path, sequential=True)

    def delete_dir(self, path: str) -> None:
        self.fs.rm_tree(self._directory(path))

    def delete_dir_contents(self, path: str, missing_dir_ok: bool) -> None:
        if not path.strip("/"):
            raise UsageError("the root is not emptied", next_step="name a directory")
        try:
            self.fs.rm_below(self._directory(path))
        except FileNotFoundError:
            if not missing_dir_ok:
                raise

    def delete_root_dir_contents(self) -> None:
        raise UsageError("the root is not emptied", next_step="name a directory")

    def delete_file(self, path: str) -> None:
        self.fs.require_file_name(path)
        self.fs.rm_file(path)  # a name, never a pattern

    def copy_file(self, src: str, dest: str) -> None:
        self.fs.require_file_name(src)
        self.fs.require_new_file_name(dest)
        super().copy_file(src, dest)

    def open_output_stream(self, path: str, metadata: Any) -> pa.NativeFile:
        self.fs.require_new_file_name(path)
        return super().open_output_stream(path, metadata)

    def _directory(self, path: str) -> str:
        key = self.normalize_path(path)
        if self.fs.isfile(key):
            raise _no_directory(key)
        return key

    def _info(self, path: str) -> FileInfo:
        try:
            info = self.fs.info(self.normalize_path(path))
        except FileNotFoundError:
            return FileInfo(path, FileType.NotFound)
        if info["type"] == "directory":
            return FileInfo(path, FileType.Directory)
        if names_directory(path):
            return FileInfo(path, FileType.NotFound)
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
                for directory in parents(info.key, base):
                    if directory not in seen:
                        seen.add(directory)
                        yield FileInfo(directory, FileType.Directory)
                if not info.key.endswith("/"):
                    yield _file_info(info)


def _no_directory(key: str) -> NotDirectoryError:
    return NotDirectoryError(f"{key} is a file, not a directory", next_step="name the directory that it is in")


def _file_info(info: ObjectInfo) -> FileInfo:
    return FileInfo(info.key, FileType.File, size=info.size, mtime=datetime.fromtimestamp(info.modified, UTC))
