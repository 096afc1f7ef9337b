"""A folder on any pyarrow file system: what the demo reads from and writes to."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass

import pyarrow.fs


@dataclass(frozen=True, kw_only=True)
class Place:
    """A file system and a folder in it. Picklable if the file system is; thread-safe.

    `fs` and `path` are as pyarrow wants them (`bucket/prefix`, no scheme); `url` is what people and Ray are told.
    """

    fs: pyarrow.fs.FileSystem
    url: str

    @property
    def path(self) -> str:
        """`url` without its scheme, as the file system takes it."""
        _, separator, rest = self.url.partition("://")
        return (rest if separator else self.url).rstrip("/")

    def at(self, *parts: str) -> Place:
        """The place below."""
        return Place(fs=self.fs, url=posixpath.join(self.url, *parts))

    def read(self, name: str) -> bytes:
        """The content of a file; `FileNotFoundError` if there is none."""
        with self.fs.open_input_stream(posixpath.join(self.path, name), compression=None) as stream:
            return bytes(stream.read())

    def read_if_there(self, name: str) -> bytes | None:
        """The content of a file, or None if there is none."""
        try:
            return self.read(name)
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        """Make or replace a file."""
        target = posixpath.join(self.path, name)
        if isinstance(self.fs, pyarrow.fs.LocalFileSystem):
            # An object store makes the object visible when it is complete and knows no folders; a disk needs both.
            self.fs.create_dir(posixpath.dirname(target), recursive=True)
            with self.fs.open_output_stream(target + ".part", compression=None) as stream:
                stream.write(content)
            self.fs.move(target + ".part", target)
            return
        with self.fs.open_output_stream(target, compression=None) as stream:
            stream.write(content)

    def sizes(self) -> dict[str, int]:
        """The size in bytes of every file below, by its path relative to here; empty if there is nothing."""
        selector = pyarrow.fs.FileSelector(self.path, recursive=True, allow_not_found=True)
        return {
            info.path[len(self.path) :].lstrip("/"): info.size
            for info in self.fs.get_file_info(selector)
            if info.type == pyarrow.fs.FileType.File
        }

    def folders(self) -> list[str]:
        """The names of the folders directly below, sorted."""
        selector = pyarrow.fs.FileSelector(self.path, recursive=False, allow_not_found=True)
        infos = self.fs.get_file_info(selector)
        return sorted(info.base_name for info in infos if info.type == pyarrow.fs.FileType.Directory)
