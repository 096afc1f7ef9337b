"""Millrace: the I/O layer of a Ray training cluster.

Data sets stream in through a cache on the nodes' idle disks (`millrace.filesystem`), checkpoints stream out compressed
(`millrace.checkpoint`).
"""

from millrace._version import __version__
from millrace.filesystem import MillraceFileSystem, filesystem

__all__ = ["MillraceFileSystem", "__version__", "filesystem"]
