"""Converts a path on a pyarrow file system to a URL and `target_options`. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pyarrow.fs import FileSystem, FSSpecHandler, LocalFileSystem, PyFileSystem, SubTreeFileSystem

from millrace.errors import UsageError
from millrace.filesystem import MillraceFileSystem
from millrace.origin import SCHEMES

# Options of pyarrow's S3FileSystem with which it requests credentials from another service.
_ASSUMED_ROLE = ("role_arn", "external_id")
# Options of fsspec and s3fs other than address and credentials.
_TUNING = frozenset(
    {
        "asynchronous",
        "cache_regions",
        "default_block_size",
        "default_cache_type",
        "default_fill_cache",
        "listings_expiry_time",
        "loop",
        "max_concurrency",
        "max_paths",
        "skip_instance_cache",
        "use_listings_cache",
        "version_aware",
    }
)


def location_of(
    filesystem: FileSystem, path: str, target_options: Mapping[str, Any] | None = None
) -> tuple[str, dict[str, Any]]:
    """The URL or local path of a `path` on a pyarrow file system, and its options (with secrets).

    Supports Millrace's own, pyarrow's for local files and S3, s3fs, adlfs, gcsfs, the hub's and fsspec's local one, and
    subtrees of these (`SubTreeFileSystem`). `target_options` replace those of the file system. Raises `UsageError` for other
    file systems.
    """
    url, found = _located(filesystem, path)
    return url, dict(found() if target_options is None else target_options)


def millrace_of(filesystem: object) -> MillraceFileSystem | None:
    """Millrace's file system behind one given to pyarrow or Ray; None if it is another."""
    if isinstance(filesystem, PyFileSystem) and not isinstance(filesystem, MillraceFileSystem):
        handler = filesystem.handler
        filesystem = handler.fs if isinstance(handler, FSSpecHandler) else None
    return filesystem if isinstance(filesystem, MillraceFileSystem) else None


def _located(filesystem: FileSystem, path: str) -> tuple[str, Callable[[], dict[str, Any]]]:
    while isinstance(filesystem, SubTreeFileSystem):
        filesystem, path = filesystem.base_fs, f"{filesystem.base_path.rstrip('/')}/{path.lstrip('/')}"
    if isinstance(filesystem, PyFileSystem) and not isinstance(filesystem, MillraceFileSystem):
        handler = filesystem.handler
        inner = handler.fs if isinstance(handler, FSSpecHandler) else None
        if not isinstance(inner, MillraceFileSystem):
            return _of_fsspec(inner, path)
        filesystem = inner
    if isinstance(filesystem, MillraceFileSystem):
        return filesystem.unstrip_protocol(path), lambda: filesystem.target_options
    if isinstance(filesystem, LocalFileSystem):
        return path, dict
    if filesystem.type_name == "s3":
        return f"s3://{path.strip('/')}", lambda: _s3_options(filesystem)
    raise _unknown(filesystem.type_name)


def _s3_options(filesystem: FileSystem) -> dict[str, Any]:
    # Only its pickle contains the settings.
    (settings,) = filesystem.__reduce__()[1]
    if any(settings.get(name) for name in _ASSUMED_ROLE):
        raise UsageError(
            "the S3 file system assumes a role, which Millrace does not support",
            next_step="give target_options= with a 'profile' that assumes it",
        )
    options = {
        "key": settings.get("access_key"),
        "secret": settings.get("secret_key"),
        "token": settings.get("session_token"),
        "anon": settings.get("anonymous"),
        "region": settings.get("region"),
    }
    if endpoint := settings.get("endpoint_override"):
        # From AWS_ENDPOINT_URL it contains a scheme.
        options["endpoint_url"] = endpoint if "://" in endpoint else f"{settings.get('scheme') or 'https'}://{endpoint}"
    return {name: value for name, value in options.items() if value}


def _of_fsspec(filesystem: Any, path: str) -> tuple[str, Callable[[], dict[str, Any]]]:
    protocols = getattr(filesystem, "protocol", ())
    for protocol in (protocols,) if isinstance(protocols, str) else protocols:
        if SCHEMES.get(protocol) == "file":
            return path, dict
        if (scheme := SCHEMES.get(protocol)) in ("s3", "az", "gs", "hf"):
            return f"{scheme}://{path.strip('/')}", lambda: _given_options(filesystem)
    raise _unknown(type(filesystem).__name__)


def _given_options(filesystem: Any) -> dict[str, Any]:
    return {name: value for name, value in filesystem.storage_options.items() if name not in _TUNING}


def _unknown(what: str) -> UsageError:
    return UsageError(
        f"a file system of the kind {what!r} has no known URL",
        next_step="use storage_path='s3://...', or storage_filesystem=millrace.filesystem(...)",
    )
