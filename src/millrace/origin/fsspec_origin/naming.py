"""What a storage behind fsspec is called, and what lies in it. Pure."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

from millrace.origin import unusable

# Options that say which storage is meant, and are no secrets.
_PLACE_OPTIONS = frozenset(
    {
        "account_name", "bucket", "endpoint", "endpoint_url", "fo", "global_store", "host", "instance", "org", "path",
        "port", "project", "ref", "region", "repo", "root_file_id", "sha", "share", "target_protocol", "user", "username",
    }
)  # fmt: skip
# Options that say how to speak to it: two origins that differ in these have the same bytes.
_TUNING_OPTIONS = frozenset(
    {
        "asynchronous", "auto_mkdir", "block_size", "cache_options", "default_block_size", "listings_expiry_time", "loop",
        "max_paths", "skip_instance_cache", "tempdir", "temppath", "timeout", "use_listings_cache",
    }
)  # fmt: skip
# Parts of the names of options that hold secrets: they are in no identity, not even as a checksum.
_SECRET = re.compile(r"(?i)pass|secret|token|key|cred|auth|acct|cert|kerb|sas|cookie|header|connection_string")
_PLAIN = re.compile(r"[\w./:+-]{0,200}")

_LOCAL_SCHEMES = frozenset({"asynclocal", "data", "file", "git", "local", "memory"})
_INSIDE_OTHERS = frozenset({"dir", "libarchive", "reference", "tar", "zip"})
# Of these options one says whose storage it is, or at which host.
_OWNER_OPTIONS = frozenset(
    {"account_name", "endpoint", "endpoint_url", "host", "instance", "root_file_id", "share", "user", "username"}
)
# Services where a key names the same bytes whoever asks.
_GLOBAL_SCHEMES = frozenset({"gcs", "gist", "github", "gs", "hf", "http", "https", "s3", "s3a"})


PART_PREFIX = ".millrace-part-"
"""Begins the name of a file that is being written, in the directory where it will be published."""


def identity_of(scheme: str, options: Mapping[str, Any]) -> str:
    """Names the storage: what says where it is as it stands, what is not known to be harmless as a checksum, no secret.

    Not enough of a name where it `lies_in_memory` or `only_a_secret_tells_whose`.
    """
    return "+".join([f"fsspec-{scheme}", *(f"{name}={value}" for name, value in _places("", options))])


def lies_in_memory(scheme: str, options: Mapping[str, Any]) -> bool:
    """Whether another process has other bytes under the same names."""
    inner = _inside(scheme, options)
    return scheme == "memory" if inner is None else lies_in_memory(*inner)


def only_a_secret_tells_whose(scheme: str, options: Mapping[str, Any]) -> bool:
    """Whether nothing but a secret says which account is meant, so that another one may mean other files of these names."""
    inner = _inside(scheme, options)
    if inner is not None:
        return only_a_secret_tells_whose(*inner)
    if scheme in _GLOBAL_SCHEMES or any(options.get(name) is not None for name in _OWNER_OPTIONS):
        return False
    return any(options[name] is not None and is_secret(name) for name in options)


class _Process:
    """A name for this process that no other has, also none that gets its number later."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.name = f"process={os.getpid()}.{time.time_ns()}"


_process = _Process()
os.register_at_fork(after_in_child=_process.begin)


def this_process() -> str:
    """Tells this process from all others; a forked child is another one."""
    return _process.name


def is_local(scheme: str, options: Mapping[str, Any]) -> bool:
    """Whether the storage lies in this process or on this machine's disks, so that no peer has it or brings it faster."""
    if scheme not in _INSIDE_OTHERS:
        return scheme in _LOCAL_SCHEMES
    inner = _inside(scheme, options)
    return inner is not None and is_local(*inner)


def is_secret(name: str) -> bool:
    """Whether the name of an option says that it, or something in it, is a secret."""
    return bool(_SECRET.search(name))


def is_public(name: str, value: str | int) -> bool:
    """Whether an identity shows this option as it stands: it says which storage is meant, and holds no login."""
    return name in _PLACE_OPTIONS and _PLAIN.fullmatch(str(value)) is not None


def is_usable(key: str) -> bool:
    """Whether a key can be a path that names this object and no other."""
    return not unusable.IN_PATHS.search(key)


def part_of_nothing(name: str) -> bool:
    """Whether the last part of a path names a file that is being written, which nobody lists."""
    return name.rpartition("/")[2].startswith(PART_PREFIX)


def _inside(scheme: str, options: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]] | None:
    """Scheme and options of the storage that an archive or a directory lies in; None for what lies in no other."""
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
