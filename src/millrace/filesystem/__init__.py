"""The face towards fsspec, pyarrow, Ray, pandas: one object that is a file system of both kinds."""

from millrace.filesystem.filesystem import MillraceFileSystem, filesystem

__all__ = ["MillraceFileSystem", "filesystem"]
