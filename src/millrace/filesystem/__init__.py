"""The object that users hold: a file system for fsspec and for pyarrow at once.

Key terms:
- native file: a memory-mapped file of a complete object; pyarrow reads it without calling Python.
- cached file: a Python file object whose blocks come through the cache.
- hot open: a recent open of this process, repeated with one lookup in memory.

Start reading in `filesystem.py`, then `handler.py` (calls from pyarrow) and `files.py`.
"""

from millrace.filesystem.filesystem import MillraceFileSystem, filesystem

__all__ = ["MillraceFileSystem", "filesystem"]
