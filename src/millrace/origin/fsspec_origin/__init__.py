"""Origins through fsspec: sftp, ftp, smb, hdfs, memory, archives in other origins, and protocols that users register.

Key terms:
- library: fsspec's implementation of a protocol, of which a call counts as one request.
- identity: the name of a storage, derived from its options without secrets.

Start reading in `origin.py`, then `clients.py` and `translation.py`.
"""

from __future__ import annotations

from millrace.origin.fsspec_origin.origin import FsspecOrigin

__all__ = ["FsspecOrigin"]
