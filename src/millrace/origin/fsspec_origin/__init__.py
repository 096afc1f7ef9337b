"""Origins that only fsspec speaks to: sftp, ftp, smb, hdfs, memory, archives in other origins, and what users register."""

from __future__ import annotations

from millrace.origin.fsspec_origin.origin import FsspecOrigin

__all__ = ["FsspecOrigin"]
