"""Millrace: the I/O layer of a Ray training cluster."""

from millrace._version import __version__

__all__ = ["__version__"]
