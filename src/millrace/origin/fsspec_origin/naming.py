"""The identity of a storage behind fsspec, derived from its options. Pure, except for `this_process`."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

from millrace.origin.keys import UNUSABLE_IN_PATHS
from millrace.origin.options.public import is_public, is_secret
from millrace.runtime import forks

# Options that do not change the bytes: two origins may differ in these.
_TUNING_OPTIONS = frozenset(
    {
        "asynchronous", "auto_mkdir", "block_size", "cache_options", "default_block_size", "listings_expiry_time", "loop",
        "max_paths", "skip_instance_cache", "tempdir", "temppath", "timeout", "use_listings_cache",
    }
)  # fmt: skip
_LOCAL_SCHEMES = frozenset({"asynclocal", "data", "file", "git", "local", "memory"})
_INSIDE_OTHERS = frozenset({"dir", "libarchive", "reference", "tar", "zip"})
# Each of these options identifies the account or the host.
_OWNER_OPTIONS = frozenset(
    {"account_name", "endpoint", "endpoint_url", "host", "instance", "root_file_id", "share", "user", "username"}
)
# Services where a key names the same bytes for every account.
_GLOBAL_SCHEMES = frozenset({"gcs", "gist", "github", "gs", "hf", "http", "https", "s3", "s3a"})


PART_PREFIX = ".millrace-part-"
"""The prefix of the name of an incomplete file, in the directory where it will be published."""


def identity_of(scheme: str, options: Mapping[str, Any]) -> str:
    """The name of the storage: public options as they are, others as a checksum, no secrets.

    Not unique for a storage that `is_in_memory` or `needs_secret_for_identity`.
    """
    return "+".join([f"fsspec-{scheme}", *(f"{name}={value}" for name, value in _places("", options))])


def is_in_memory(scheme: str, options: Mapping[str, Any]) -> bool:
    """Whether another process has other bytes with the same names."""
    inner = _inside(scheme, options)
    return scheme == "memory" if inner is None else is_in_memory(*inner)


def needs_secret_for_identity(scheme: str, options: Mapping[str, Any]) -> bool:
    """Whether only a secret identifies the account, so that another secret may refer to other files of the same names."""
    inner = _inside(scheme, options)
    if inner is not None:
        return needs_secret_for_identity(*inner)
    if scheme in _GLOBAL_SCHEMES or any(options.get(name) is not None for name in _OWNER_OPTIONS):
        return False
    return any(options[name] is not None and is_secret(name) for name in options)


class _Process:
    """A unique name for this process; a later process with the same number has another one."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.name = f"process={os.getpid()}.{time.time_ns()}"


_process = _Process()
forks.reset_in_child(_process.begin)


def this_process() -> str:
    """The unique name of this process; a forked child has another one."""
    return _process.name


def is_local(scheme: str, options: Mapping[str, Any]) -> bool:
    """Whether the storage is in this process or on this machine's disks, so that a peer cannot be faster."""
    if scheme not in _INSIDE_OTHERS:
        return scheme in _LOCAL_SCHEMES
    inner = _inside(scheme, options)
    return inner is not None and is_local(*inner)


def is_usable(key: str) -> bool:
    """Whether a key is a path that names exactly this object."""
    return not UNUSABLE_IN_PATHS.search(key)


def is_incomplete(name: str) -> bool:
    """Whether a path names an incomplete file, which listings leave out."""
    return name.rpartition("/")[2].startswith(PART_PREFIX)


def _inside(scheme: str, options: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]] | None:
    """Scheme and options of the storage that contains an archive or a directory; None for other schemes."""
    if scheme not in _INSIDE_OTHERS:
        return None
    inner, target = options.get("target_options"), options.get("target_protocol")
    if not isinstance(target, str):
        outer, separator, _ = str(options.get("fo") or "").partition("://")
        target = outer if separator else "file"
    return target, inner if isinstance(inner, Mapping) else {}


def _places(prefix: str, options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name in sorted(options):
        value = options[name]
        if isinstance(value, Mapping) and not is_secret(name):
            yield from _places(f"{prefix}{name}.", value)
        elif value is not None and name not in _TUNING_OPTIONS and not is_secret(name):
            yield prefix + name, _shown(name, value)


def _shown(name: str, value: Any) -> str:
    if isinstance(value, str | int) and is_public(name, value):
        return str(value)
    return "#" + hashlib.blake2b(repr(value).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
