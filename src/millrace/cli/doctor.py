"""`millrace doctor`: whether this machine has what Millrace needs, and why not."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import socket
import sys
import tempfile
import urllib.parse
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import click

from millrace.cli.checks import Check
from millrace.cli.doctor_cluster import cluster_checks
from millrace.config import CacheOptions
from millrace.errors import MillraceError, ObjectNotFoundError, UsageError, without_queries
from millrace.figures import size_text

_LIBRARIES = ("pyarrow", "obstore", "lmdb", "fsspec")
_OPTIONAL = {"ray": "ray", "torch": "torch"}
# Locks and memory maps do not hold between machines there, or not at all.
_REMOTE_FILE_SYSTEMS = ("nfs", "cifs", "smb", "ceph", "lustre", "gpfs", "glusterfs", "afs", "9p", "beegfs", "fuse.")


@click.command()
@click.argument("url", required=False)
@click.option(
    "--cache-dir", multiple=True, help="Cache directory; repeat for several disks. Default: the configured one."
)
@click.option("--endpoint-url", help="Address of the storage service, where it is not the usual one.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def doctor(url: str | None, cache_dir: tuple[str, ...], endpoint_url: str | None, as_json: bool) -> int:
    """Check what Millrace needs on this machine, whether URL (s3://bucket/prefix) can be listed from it, and its cluster."""
    from millrace.config import resolve

    if endpoint_url and not url:
        raise UsageError("--endpoint-url without a URL", next_step="say what to list there: s3://bucket/prefix")
    options = resolve({"cache_dir": list(cache_dir) or None})
    checks = list(_checks(options, url, endpoint_url))
    good = all(check.state != "failed" for check in checks)
    if as_json:
        click.echo(json.dumps({"ok": good, "checks": [asdict(check) for check in checks]}))
    else:
        for check in checks:
            click.echo(f"{check.state:6s}  {check.name:16s}  {check.detail}")
    return 0 if good else 1


def _checks(options: CacheOptions, url: str | None, endpoint_url: str | None) -> Iterator[Check]:
    yield Check(name="python", state="ok", detail=f"{platform.python_version()} in {sys.prefix}")
    for name in _LIBRARIES:
        yield _library(name, None)
    for name, extra in _OPTIONAL.items():
        yield _library(name, extra)
    yield _boot()
    for directory in options.cache_dirs:
        yield from _cache_directory(directory, options)
    yield from cluster_checks(options)
    if url:
        yield _reach(url, endpoint_url)


def _library(name: str, extra: str | None) -> Check:
    try:
        return Check(name=name, state="ok", detail=importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        if extra is None:
            return Check(name=name, state="failed", detail="not installed: install millrace again")
        return Check(name=name, state="note", detail=f"not installed: pip install 'millrace[{extra}]' to use it")


def _boot() -> Check:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError as error:
        return Check(name="boot id", state="failed", detail=f"{error.strerror}: the cache needs Linux with /proc")
    return Check(name="boot id", state="ok", detail=boot)


def _cache_directory(directory: Path, options: CacheOptions) -> Iterator[Check]:
    from millrace.cache.node import check_cache_dir

    name = "cache directory"
    # What is not there yet is made at first use, below the nearest that is.
    there = next(path for path in (directory, *directory.parents) if os.path.exists(path))
    later = "" if there == directory else " (not there yet)"
    kind = file_system_of(there)
    remote = kind.startswith(_REMOTE_FILE_SYSTEMS)
    yield Check(
        name="file system",
        state="failed" if remote else "note" if kind in ("tmpfs", "ramfs") else "ok",
        detail=f"{directory}: {kind}"
        + (", which is no local disk: choose another 'cache_dir'" if remote else "")
        + (", which is memory, not disk" if kind in ("tmpfs", "ramfs") else ""),
    )
    try:
        with tempfile.TemporaryDirectory(prefix=".millrace-doctor-", dir=there) as scratch:
            yield Check(name=name, state="ok", detail=f"{directory}{later} can be written")
            yield _index(Path(scratch))
        check_cache_dir(directory)
    except MillraceError as error:
        yield Check(name=name, state="failed", detail=str(error))
        return
    except OSError as error:
        yield Check(name=name, state="failed", detail=f"{there}: {error.strerror}: choose another 'cache_dir'")
        return
    disk = shutil.disk_usage(there)
    keep = options.min_free.of(disk.total)
    room = min(disk.free - keep, options.capacity.of(disk.total))
    yield Check(
        name="room",
        state="ok" if room > 0 else "failed",
        detail=f"{directory}: {size_text(disk.free)} free, min_free keeps {size_text(keep)}, "
        + (f"up to {size_text(room)} more" if room > 0 else "nothing can be kept: free some, or lower 'min_free'"),
    )


def _index(scratch: Path) -> Check:
    from millrace.cache.index import Index

    try:
        (scratch / "index").mkdir()
        Index(scratch / "index").close()
    except MillraceError as error:
        return Check(name="index", state="failed", detail=str(error))
    return Check(name="index", state="ok", detail="LMDB opens and maps its file")


def file_system_of(path: Path) -> str:
    """The type of the file system that holds `path`, as `/proc/self/mountinfo` calls it."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return "unknown"
    real = os.path.realpath(path)
    longest, kind = "", "unknown"
    for line in lines:
        fields, _, rest = line.partition(" - ")
        mount = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields.split()[4])
        # Of several on one path the last hides the others.
        if (real == mount or real.startswith(f"{mount.rstrip('/')}/")) and len(mount) >= len(longest):
            longest, kind = mount, rest.split()[0]
    return kind


def _reach(url: str, endpoint_url: str | None) -> Check:
    from millrace.origin import SCHEMES, options_for, origin_for_url

    address = endpoint_url
    if address is None and SCHEMES.get(url.partition("://")[0]) == "s3":
        address = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if address:
        # Requests are retried for a long time; whether anybody listens there can be told at once.
        try:
            parts = urllib.parse.urlsplit(address if "://" in address else f"https://{address}")
            port = parts.port or (80 if parts.scheme == "http" else 443)
            socket.create_connection((parts.hostname or "", port), timeout=5).close()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            return Check(
                name="origin", state="failed", detail=f"{address} cannot be reached: {reason}: check the address"
            )
    try:
        origin, key = origin_for_url(url, options_for(url, endpoint_url))
        try:
            size = None if url.endswith("/") else origin.head(key).size
        except (ObjectNotFoundError, UsageError):
            size = None  # a prefix, a bucket, or nothing: the listing says which
        if size is not None:
            return Check(name="origin", state="ok", detail=without_queries(f"{url}: an object of {size} bytes"))
        listing = origin.list_level(key)
    except MillraceError as error:
        return Check(name="origin", state="failed", detail=str(error))
    found = len(listing.objects) + len(listing.prefixes)
    # A bucket and what is meant as a prefix may be empty; a bucket that is missing raises.
    may_be_empty = "/" not in key.strip("/") or url.endswith("/")
    return Check(
        name="origin",
        state="ok" if found else "note" if may_be_empty else "failed",
        detail=without_queries(f"{url}: {found or 'no'} objects and folders directly below")
        + ("" if found or may_be_empty else ", and no object of that name: check the name"),
    )
