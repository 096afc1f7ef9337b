"""The options of `millrace.filesystem`, declared once, with their types and their meaning.

`config.OPTION_NAMES` is made from `CacheArguments`, so accepted and declared options cannot differ. Editors complete and
document the keyword arguments from here. `docs/reference/options.md` has the details.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict


class CacheArguments(TypedDict, total=False):
    """The options of the cache. Each can also come from `MILLRACE_*` variables and `millrace.toml`; None means not given."""

    cache_dir: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None
    """Where blocks are kept: a directory on a local disk, or a list with one for each disk. Default: `~/.cache/millrace`."""

    capacity: str | int | None
    """The most bytes that the cache may hold on a disk: `"200GB"`, bytes, or a share of the disk. Default: `"80%"`."""

    min_free: str | int | None
    """Disk space that the cache leaves free: `"50GB"`, bytes, or a share of the disk. Default: `"10%"`."""

    members: str | None
    """The cluster: `"none"`, `"ray"`, `"etcd://host:port[,...][/name]"`, `"static://host:port,..."`, or `"auto"`: `"ray"`
    inside a Ray job, otherwise this node alone. Default: `"auto"`.
    """

    consistency: str | float | None
    """How long sizes, versions and listings are fresh: `"immutable"`, `"always"`, or a time. Default: `"60s"`."""

    native: bool | None
    """False: no memory maps; a checksum is verified at every read. Default: true."""

    etcd_host: str | None
    """Short for `members="etcd://HOST:2379"`. Of the two, the one of the stronger source is used. Default: none."""

    etcd_port: int | str | None
    """The port for `etcd_host`. Default: 2379."""

    cluster_token: str | None
    """The members' shared secret: at least 8 printable characters. Default: none; in Ray, made by the cluster."""

    tls: str | os.PathLike[str] | Mapping[str, str | os.PathLike[str]] | None
    """TLS between members: a folder with `cert.pem`, `key.pem`, `ca.pem`, or a mapping of `cert`, `key`, `ca` to files.

    Members accept only clients with a certificate of this `ca`.
    """

    replicas: int | str | None
    """The number of nodes that keep each block, from 1 to 16. Default: 1."""

    max_requests: int | str | None
    """The most requests of this node in flight to one origin, from 1 to 1024. Default: 128; 16 for `http(s)`."""

    request_rate: str | float | None
    """The most requests of this node to one origin in a time: `200`, `"200/s"`, `"5000/5min"`. Default: `"none"`."""

    timeout: str | float | None
    """How long one operation may take if the origin does not respond, with all attempts: `30`, `"30s"`, `"2min"`, at least
    a second. Default: `"none"`.
    """


class FileSystemOptions(CacheArguments, total=False):
    """All keyword options of `millrace.filesystem`: those of the cache, and fsspec's own."""

    skip_instance_cache: bool
    """fsspec's: True makes a new object, which reads the environment and the file again."""

    use_listings_cache: bool
    """fsspec's. Accepted, without effect: `consistency` decides how long listings are fresh."""

    listings_expiry_time: float | None
    """fsspec's. Accepted, without effect."""

    max_paths: int | None
    """fsspec's. Accepted, without effect."""

    asynchronous: bool
    """fsspec's."""

    loop: Any
    """fsspec's."""
