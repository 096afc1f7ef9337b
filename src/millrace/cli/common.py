"""What the commands about a node's cache have in common: options, the cache they mean, and how figures are written."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies

import click

if TYPE_CHECKING:
    from millrace.cache.node import CacheNode
    from millrace.cache.rules import Place
    from millrace.filesystem import MillraceFileSystem

F = TypeVar("F", bound=Callable[..., object])


def cache_dir_option(command: F) -> F:
    """`--cache-dir`, several times."""
    text = "Cache directory; repeat for several disks. Default: the configured one."
    return click.option("--cache-dir", multiple=True, help=text)(command)


def endpoint_option(command: F) -> F:
    """`--endpoint-url`."""
    return click.option("--endpoint-url", help="Address of the storage service, where it is not the usual one.")(
        command
    )


def node_option(command: F) -> F:
    """`--node`."""
    text = "Ask the cluster of the node at this address, in place of the one that the options name."
    return click.option("--node", metavar="HOST:PORT", help=text)(command)


def json_option(command: F) -> F:
    """`--json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def require_host(endpoint_url: str | None) -> None:
    """Raise `ConfigurationError` where the host of an endpoint has no address: requests to it would be retried long."""
    from millrace.errors import ConfigurationError, printable

    if not endpoint_url or getproxies():  # a proxy finds hosts that this machine does not
        return
    try:
        parts = urlsplit(endpoint_url if "://" in endpoint_url else f"https://{endpoint_url}")
        if parts.hostname:  # where there is none, that is told with the other options
            socket.getaddrinfo(parts.hostname, parts.port or 443)
    except (OSError, ValueError) as error:  # also a port that is no number, a host that cannot be one
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigurationError(
            f"no server has the name in --endpoint-url {printable(endpoint_url.rpartition('@')[2])} ({reason})",
            next_step="correct the address",
        ) from error


# --- the cache that is meant --------------------------------------------------------------------------


def file_system(
    urls: Sequence[str], cache_dir: Sequence[str], endpoint_url: str | None, *, asks: bool = False
) -> MillraceFileSystem:
    """The file system that serves `urls`, with credentials from the environment. All must be of one storage.

    `asks` says that the storage will be asked, so that there must be such a host.
    """
    from millrace.errors import UsageError
    from millrace.filesystem import filesystem
    from millrace.origin import options_for, split_url

    schemes = sorted({split_url(url)[0] for url in urls})
    if len(schemes) > 1:
        raise UsageError(f"URLs of {' and '.join(schemes)} together", next_step="use one command for each")
    options = options_for(urls[0], endpoint_url)
    if asks and options:
        require_host(endpoint_url)
    # Not one that fsspec has kept: environment and file are read for each command.
    return filesystem(schemes[0], target_options=options, cache_dir=list(cache_dir) or None, skip_instance_cache=True)


def existing_node(cache_dir: Sequence[str]) -> tuple[CacheNode, list[str]]:
    """The cache that is there, and the directories without one. Makes nothing: where there is no cache is an error."""
    from millrace.cache.node import cache_node, store_exists
    from millrace.config import resolve
    from millrace.errors import ConfigurationError, StorageError

    options = resolve({"cache_dir": list(cache_dir) or None})
    there = tuple(path for path in options.cache_dirs if store_exists(replace(options, cache_dirs=(path,))))
    missing = [str(path) for path in options.cache_dirs if path not in there]
    if not there:
        raise ConfigurationError(
            f"no cache in {', '.join(missing)}",
            next_step="read something through millrace.filesystem first, or name the directory with --cache-dir",
        )
    # Only what is there: a cache makes the directories that it is given.
    node = cache_node(replace(options, cache_dirs=there))
    if not node.open_disks:
        raise StorageError("no cache directory can be used", next_step="'millrace doctor' says why")
    return node, missing


def places_of(node: CacheNode, url: str, endpoint_url: str | None) -> list[Place]:
    """Where `url` points, at every service of which something is known here; with an endpoint at that one only."""
    from millrace.cache.catalog import origins
    from millrace.errors import UsageError
    from millrace.filesystem import filesystem
    from millrace.filesystem.selection import is_pattern
    from millrace.origin import options_for, split_url

    options = options_for(url, endpoint_url)
    named = filesystem(split_url(url)[0], target_options=options, skip_instance_cache=True)
    key = named.key_of(url).rstrip("/")
    if is_pattern(key, named.origin_identity, wildcards="*?"):
        raise UsageError(f"{url!r} is a pattern", next_step="name an object or a prefix")
    if endpoint_url:
        return [(named.origin_identity, key)]
    kind = named.origin_identity.partition("+")[0]
    return [(origin, key) for origin in sorted(origins(node)) if origin.partition("+")[0] == kind]


# --- figures for people -------------------------------------------------------------------------------


def time_text(seconds: float) -> str:
    """A duration: `9 s`, `2:05`, `1:02:05`, `3 d`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02}"
    if whole < 86400 or whole % 86400:
        return f"{whole // 3600}:{whole % 3600 // 60:02}:{whole % 60:02}"
    return f"{whole // 86400} d"
