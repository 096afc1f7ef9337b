"""What fsspec's libraries say of a file, as an `ObjectInfo`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from millrace.errors import UsageError
from millrace.origin.protocol import ObjectInfo

# What changes with the bytes, by the names that libraries give it, the most exact first.
_CONTENT = (
    "etag", "ETag", "e_tag", "version_id", "VersionId", "versionId", "generation", "checksum", "md5", "md5Hash",
    "md5Checksum", "content_md5", "content_hash", "sha256", "sha1", "sha", "hash", "rev", "CRC",
)  # fmt: skip
# When it was written; not "time", which some use for the last read.
_MODIFIED = (
    "mtime", "modified", "last_modified", "LastModified", "modificationTime", "modify", "updated", "modifiedTime",
    "server_modified", "created", "creation_time", "date_time",
)  # fmt: skip
_PLACES = ("ino", "fileId")


def is_directory(info: Mapping[str, Any]) -> bool:
    """Whether an entry is a directory."""
    return str(info.get("type")).lower() == "directory"


def describe(key: str, info: Mapping[str, Any], url: str) -> ObjectInfo:
    """The description of a file of which the library says `info`. Raises `UsageError` where it does not tell the size."""
    size = info.get("size")
    if size is None:
        raise UsageError(f"{url} does not say how long it is", next_step="copy it to a storage that does")
    found = [(name, info[name]) for name in _MODIFIED if info.get(name) is not None]
    modified = seconds(found[0][1]) if found else 0.0
    return ObjectInfo(key=key, size=int(size), version=_version(info, int(size), modified), modified=modified)


def _version(info: Mapping[str, Any], size: int, modified: float) -> str:
    for name in _CONTENT:
        value = info.get(name)
        if value not in (None, ""):
            return f"{name}={value}"
    places = "".join(f"-{info[name]}" for name in _PLACES if info.get(name) is not None)
    return f"~{size}-{modified!r}{places}"


def seconds(value: Any) -> float:
    """A time as libraries write it, in Unix seconds; 0.0 for what is no time. Times without a zone are UTC."""
    if isinstance(value, datetime):
        return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
    if isinstance(value, int | float):
        return value / 1000 if value > 1e11 else float(value)  # hdfs counts milliseconds
    if isinstance(value, tuple) and len(value) == 6:  # members of a zip file
        return seconds(datetime(*value))
    if isinstance(value, str):
        for read in (datetime.fromisoformat, lambda text: datetime.strptime(text, "%Y%m%d%H%M%S")):
            try:
                return seconds(read(value))
            except ValueError:
                continue
    return 0.0
