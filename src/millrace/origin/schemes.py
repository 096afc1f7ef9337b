"""The registry: which origin serves which scheme. Imports an origin at its first use.

A new origin is one module and one `Service` in the table. Other schemes are served by fsspec.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from millrace.errors import ConfigurationError, UsageError
from millrace.origin.base import Limits, limited
from millrace.origin.options.store import checked_mapping
from millrace.origin.protocol import Origin
from millrace.runtime.forks import imported

_OBJECT_STORE = "millrace.origin.object_store:ObjectStoreOrigin"
_WEB = "millrace.origin.web:WebOrigin"
_HUB = "millrace.origin.hub:HubOrigin"
_FSSPEC = "millrace.origin.fsspec_origin:FsspecOrigin"


class Service(NamedTuple):
    """The origin of a scheme.

    - `aliases`: all names of the scheme in URLs, with `scheme` itself.
    - `implementation`: `module:class`, which is created from (scheme, target_options).
    - `rooted`: keys are absolute paths of this machine instead of bucket/key.
    - `endpoint_option`: the option for the address of the service; empty if the URL has it.
    - `colons`: whether the first part of a key may contain a colon.
    """

    scheme: str
    aliases: tuple[str, ...]
    implementation: str
    rooted: bool = False
    endpoint_option: str = ""
    colons: bool = False


_TABLE = (
    Service("s3", ("s3", "s3a"), _OBJECT_STORE, endpoint_option="endpoint_url"),
    Service("az", ("az", "abfs", "abfss"), _OBJECT_STORE, endpoint_option="account_host"),
    Service("gs", ("gs", "gcs"), _OBJECT_STORE, endpoint_option="endpoint_url"),
    Service("hf", ("hf",), _HUB, endpoint_option="endpoint"),
    Service("http", ("http",), _WEB, colons=True),
    Service("https", ("https",), _WEB, colons=True),
    Service("file", ("file", "local"), _OBJECT_STORE, rooted=True, colons=True),
)
_BY_ALIAS: Mapping[str, Service] = {alias: service for service in _TABLE for alias in service.aliases}

SCHEMES: Mapping[str, str] = {alias: service.scheme for alias, service in _BY_ALIAS.items()}
"""Every alias of the table and its scheme, without the protocols of fsspec."""

# fsspec's caches and this file system: a cache over a cache only adds stale bytes.
_CACHES = frozenset({"blockcache", "cached", "filecache", "millrace", "simplecache"})


def service_of(scheme: str) -> Service:
    """The service of `scheme`. Raises `ConfigurationError` for an unknown scheme."""
    found = _BY_ALIAS.get(scheme) or _of_fsspec(scheme)
    if found is None and scheme.lower() in _BY_ALIAS:
        raise ConfigurationError(f"no origin serves {scheme!r}", next_step=f"write {scheme.lower()}, in lower case")
    if found is None and (alone := scheme.strip().partition(":")[0]) in _BY_ALIAS:
        given = f"{alone}://..." if "/" in scheme else scheme  # a URL may contain a secret
        raise ConfigurationError(f"{given!r} is not a scheme", next_step=f"write {alone!r}")
    if found is None:
        raise ConfigurationError(
            f"no origin serves {scheme!r}",
            next_step=f"use one of {', '.join(service.scheme for service in _TABLE)}, or a protocol of fsspec",
        )
    return found


def is_of_fsspec(service: Service) -> bool:
    """Whether a service is a library of fsspec instead of one of the table."""
    return service.implementation == _FSSPEC


def _of_fsspec(scheme: str) -> Service | None:
    """The service over fsspec's library for `scheme`; names of the same class are its aliases."""
    if scheme in _CACHES:
        return None
    known: Any = imported("fsspec.registry")
    classes = {name: str(entry["class"]) for name, entry in known.known_implementations.items()}
    classes |= {name: f"{each.__module__}.{each.__qualname__}" for name, each in known.registry.items()}
    wanted = classes.get(scheme)
    if wanted is None:
        return None
    aliases = tuple(name for name, each in classes.items() if each == wanted and name not in _BY_ALIAS)
    return Service(aliases[0], aliases, _FSSPEC, colons=True)


def open_origin(
    scheme: str, target_options: Mapping[str, Any] | None = None, limits: Mapping[str, Any] | None = None
) -> Origin:
    """Open the storage that serves `scheme`, within the limits of this node. No request is made.

    `limits` are explicit options of `config.LIMIT_NAMES`; others come from the environment and the file. Raises
    `ConfigurationError` for an unknown scheme or option, `MissingDependencyError` if the library is not installed.
    """
    service = service_of(scheme)
    options = checked_mapping(target_options, "'target_options'")
    module, _, name = service.implementation.partition(":")
    origin: Origin = getattr(imported(module), name)(service.scheme, options)
    return limited(origin, Limits.of(service.scheme, limits))


def split_url(url: str) -> tuple[str, str]:
    """Split `scheme://bucket/key` into scheme, in lower case, and key; a plain path has the scheme `file`.

    Raises `UsageError`.
    """
    if not url:
        raise UsageError("a URL is empty", next_step="write s3://bucket/key, or '.' for the current directory")
    scheme, separator, key = url.partition("://")
    scheme = scheme.lower()
    if separator and scheme.startswith("millrace::"):
        raise UsageError("only fsspec chains URLs with 'millrace::'", next_step="leave 'millrace::' out")
    if separator:
        refuse_password(scheme, key)
    broken, slash, _ = url.partition(":/")
    service = _BY_ALIAS.get(broken.lower())
    if slash and not separator and service is not None and not service.rooted:
        # As a local path it would be in the working directory.
        raise UsageError(f"{broken}:/ has one slash after its colon", next_step=f"did you mean {broken}://")
    return (scheme, key) if separator else ("file", url)


_FIRST_PART = re.compile(r"[^/?#]*")


def refuse_password(scheme: str, key: str) -> None:
    """Raise `UsageError` if `key` (the part after `scheme://`) starts with `user:password@`. The error does not repeat it.

    Passwords in URLs would appear in logs, in the cache's index and in errors. Some origins have names before an `@`: a
    container of Azure, a revision of a repository. Names of local files are not checked.
    """
    service = _BY_ALIAS.get(scheme)
    if service is not None and service.rooted:
        return
    first = _FIRST_PART.match(key.lstrip("/"))
    name, at, _ = (first[0] if first else "").partition("@")
    # If names have no colons, a password with a slash in it, as AWS's keys may have, is found, too.
    has_no_colons = service is not None and not service.colons and not name.startswith("arn:")
    if ":" not in name or not (at or has_no_colons):
        return
    if "@" not in key:  # perhaps a port; the message shows neither
        raise UsageError(
            f"the first part of a path of {scheme}:// has a ':' in it",
            next_step="write the name alone; the address of the service is an option of its own",
        )
    raise UsageError(
        f"a path of {scheme}:// begins with text like a user name and a password",
        next_step="give credentials as target_options, or leave them to the environment",
    )


def require_url(url: str) -> None:
    """Check that `url` has a storage and a name in it. Makes no request.

    A URL has a known scheme. A local path starts with `/`, `./`, `../` or `~`, or is `.` or `..`: a bare
    `bucket/key` is more likely a URL without its scheme. Raises `UsageError`.
    """
    scheme, key = split_url(url)
    service_of(scheme)
    if "://" not in url and not url.startswith(("/", "~")) and url.split("/", 1)[0] not in (".", ".."):
        raise UsageError(
            f"{url!r} has no scheme", next_step=f"write s3://{url}, or ./{url} for a file or directory of this machine"
        )
    if not key.strip("/"):
        raise UsageError(f"{url!r} names no object and no prefix", next_step="write scheme://bucket/prefix")
