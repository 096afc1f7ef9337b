"""`millrace doctor`: check the machine, the cache directories, a storage URL and the cluster."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from millrace.cli.commands import LibraryCommand
from millrace.cli.common import cache_dir_option, endpoint_option, json_option, print_json
from millrace.config import CacheOptions, load_file, parse_etcd, resolve
from millrace.errors import ConfigurationError, MillraceError, ObjectNotFoundError, UsageError, without_queries
from millrace.figures import size_text

if TYPE_CHECKING:
    from millrace.cluster.folder import LocalNode

_CONNECT_SECONDS = 3.0
_LIBRARIES = ("pyarrow", "obstore", "lmdb", "fsspec")
_PLACES = ("HOME", "XDG_CACHE_HOME", "MILLRACE_CACHE_DIR")  # the variables that name the default cache directory
_OPTIONAL = {"ray": "ray", "torch": "torch"}
# File locks and memory maps are not reliable on these.
_REMOTE_FILE_SYSTEMS = ("nfs", "cifs", "smb", "ceph", "lustre", "gpfs", "glusterfs", "afs", "9p", "beegfs", "fuse.")


@dataclass(frozen=True, kw_only=True)
class Check:
    """The result of one check. A `note` is a warning, not a failure."""

    name: str
    state: Literal["ok", "note", "failed"]
    detail: str


@click.command(cls=LibraryCommand)
@click.argument("url", required=False)
@cache_dir_option
@endpoint_option
@json_option
def doctor(url: str | None, cache_dir: tuple[str, ...], endpoint_url: str | None, as_json: bool) -> int:
    """Check this machine, its cluster, and whether URL (s3://bucket/prefix) can be listed."""
    if endpoint_url and not url:
        raise UsageError("--endpoint-url needs a URL", next_step="add the URL to list: s3://bucket/prefix")
    options = resolve({"cache_dir": list(cache_dir) or None})
    checks = list(checks_of(options, url, endpoint_url))
    good = all(check.state != "failed" for check in checks)
    if as_json:
        print_json({"ok": good, "checks": [asdict(check) for check in checks]})
    else:
        for check in checks:
            click.echo(f"{check.state:6s}  {check.name:16s}  {check.detail}")
    return 0 if good else 1


def checks_of(options: CacheOptions, url: str | None, endpoint_url: str | None) -> Iterator[Check]:
    """All checks of this machine, of its cluster, and of `url` if there is one."""
    yield from machine_checks(options)
    yield from _cluster_checks(options)
    if url is not None:
        yield _reach(url, endpoint_url)


def checks_despite_errors(cache_dir: Sequence[str]) -> Iterator[Check]:
    """`checks_of` this machine and its cluster. With an unusable option: that error, and the checks of the machine."""
    given = {"cache_dir": list(cache_dir) or None}
    try:
        options = resolve(given)
    except ConfigurationError as error:
        yield Check(name="configuration", state="failed", detail=str(error))
    else:
        yield from checks_of(options, None, None)
        return
    environ = {name: os.environ[name] for name in _PLACES if name in os.environ}
    file: dict[str, Any] = {}
    usable: CacheOptions | None = None
    with contextlib.suppress(ConfigurationError):
        file = load_file(os.environ)
    with contextlib.suppress(ConfigurationError):
        usable = resolve(given, environ=environ, file={"cache_dir": file.get("cache_dir")})
    yield from machine_checks(usable)


def machine_checks(options: CacheOptions | None) -> Iterator[Check]:
    """The checks of Python, the libraries, the machine, and the cache directories of `options`."""
    from millrace.cluster.attach import with_node_limits

    yield Check(name="python", state="ok", detail=f"{platform.python_version()} in {sys.prefix}")
    for name in _LIBRARIES:
        yield _library(name, None)
    for name, extra in _OPTIONAL.items():
        yield _library(name, extra)
    yield _boot()
    if options is not None:
        for directory in options.cache_dirs:
            yield from _cache_directory(directory, with_node_limits(options))


def _library(name: str, extra: str | None) -> Check:
    import importlib.metadata  # `millrace --help` does not need it

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
    import tempfile

    from millrace.cache.node import check_cache_dir
    from millrace.store.space import bytes_of

    name = "cache directory"
    # A missing directory is created at its first use, below the nearest existing one.
    there = next(path for path in (directory, *directory.parents) if os.path.exists(path))
    later = "" if there == directory else " (does not exist yet)"
    kind = file_system_of(there)
    remote = kind.startswith(_REMOTE_FILE_SYSTEMS)
    yield Check(
        name="file system",
        state="failed" if remote else "note" if kind in ("tmpfs", "ramfs") else "ok",
        detail=f"{directory}: {kind}"
        + (", which is not a local disk: choose another 'cache_dir'" if remote else "")
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
    keep = bytes_of(options.min_free, disk.total)
    room = min(disk.free - keep, bytes_of(options.capacity, disk.total))
    yield Check(
        name="room",
        state="ok" if room > 0 else "failed",
        detail=f"{directory}: {size_text(disk.free)} free, min_free keeps {size_text(keep)}, "
        + (f"room for {size_text(room)}" if room > 0 else "no room: free some space, or lower 'min_free'"),
    )


def _index(scratch: Path) -> Check:
    from millrace.store.index import Index

    try:
        (scratch / "index").mkdir()
        Index(scratch / "index").close()
    except MillraceError as error:
        return Check(name="index", state="failed", detail=str(error))
    return Check(name="index", state="ok", detail="LMDB opens and maps its file")


def file_system_of(path: Path) -> str:
    """The type of the file system that holds `path`, as named in `/proc/self/mountinfo`."""
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return "unknown"
    real = os.path.realpath(path)
    longest, kind = "", "unknown"
    for line in lines:
        fields, _, rest = line.partition(" - ")
        mount = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields.split()[4])
        # The last mount on a path hides the others.
        if (real == mount or real.startswith(f"{mount.rstrip('/')}/")) and len(mount) >= len(longest):
            longest, kind = mount, rest.split()[0]
    return kind


def _reach(url: str, endpoint_url: str | None) -> Check:
    from millrace.origin import SCHEMES, options_for, origin_for_url, require_url
    from millrace.origin.reachability import probe
    from millrace.origin.web.addresses import shown

    try:
        require_url(url)
    except MillraceError as error:
        return Check(name="origin", state="failed", detail=str(error))
    address = endpoint_url
    if address is None and SCHEMES.get(url.partition("://")[0].lower()) == "s3":
        address = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if address:
        address = address.strip() if "://" in address else f"https://{address.strip()}"
        cause = probe(address, seconds=5)  # fails at once if the connection is refused, without retries
        if cause is not None:
            detail = without_queries(f"{shown(address)} cannot be reached: {cause.text}: {cause.next_step}")
            return Check(name="origin", state="failed", detail=detail)
    try:
        origin, key = origin_for_url(url, options_for(url, endpoint_url))
        try:
            size = None if url.endswith("/") else origin.head(key).size
        except (ObjectNotFoundError, UsageError):
            size = None  # a prefix, a bucket, or nothing: the listing shows which
        if size is not None:
            return Check(name="origin", state="ok", detail=without_queries(f"{url}: an object of {size} bytes"))
        listing = origin.list_level(key)
    except MillraceError as error:
        return Check(name="origin", state="failed", detail=str(error))
    found = len(listing.objects) + len(listing.prefixes)
    # A bucket and a prefix with a slash may be empty; a missing bucket raises.
    may_be_empty = "/" not in key.strip("/") or url.endswith("/")
    return Check(
        name="origin",
        state="ok" if found else "note" if may_be_empty else "failed",
        detail=without_queries(f"{url}: objects and folders directly below: {found}")
        + ("" if found or may_be_empty else "; no object has that name: check the name"),
    )


# --- the cluster ----------------------------------------------------------------------------------------


def _cluster_checks(options: CacheOptions) -> Iterator[Check]:
    """Checks of the cluster; none if no cluster is configured and no node runs on this machine."""
    from millrace.cluster.folder import live_nodes

    nodes = live_nodes(options)
    if options.members == "ray":
        yield Check(name="cluster", state="note", detail="members='ray' applies inside a Ray job only")
        return
    if not nodes and options.members in ("none", "auto"):
        return
    yield _token(options, nodes)
    yield _node(options, nodes)
    reached = True
    if options.members.startswith("etcd://"):
        check = _etcd(parse_etcd(options.members)[0])
        reached = check.state != "failed"
        yield check
    if reached and (nodes or options.cluster_token is not None):
        yield _peers(options)


def _token(options: CacheOptions, nodes: list[LocalNode]) -> Check:
    if options.cluster_token is not None:
        return Check(name="cluster token", state="ok", detail="set")
    if nodes:
        return Check(name="cluster token", state="ok", detail="from the node on this machine")
    return Check(
        name="cluster token",
        state="failed",
        detail="not set: set MILLRACE_CLUSTER_TOKEN, or 'cluster_token' in millrace.toml, to the token of the cluster",
    )


def _node(options: CacheOptions, nodes: list[LocalNode]) -> Check:
    if not nodes:
        return Check(
            name="node",
            state="note",
            detail="not running: this machine is a client of the cluster; 'millrace node run' starts a node",
        )
    others = sorted({node.facts.members for node in nodes} - {options.members})
    text = ", ".join(f"{node.facts.address} ({node.name})" for node in nodes)
    if others and options.members not in ("none", "auto"):
        return Check(
            name="node", state="note", detail=f"{text}; belongs to another cluster ({others[0]}) than {options.members}"
        )
    return Check(name="node", state="ok", detail=text)


def _etcd(addresses: tuple[tuple[str, int], ...]) -> Check:
    reached, failures = [], []
    for host, port in addresses:
        try:
            socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()
            reached.append(f"{host}:{port}")
        except OSError as error:
            failures.append(f"{host}:{port} cannot be reached: {error.strerror or error}")
    if not reached:
        return Check(name="etcd", state="failed", detail=f"{'; '.join(failures)}: start it, or correct 'members'")
    return Check(name="etcd", state="note" if failures else "ok", detail="; ".join([*reached, *failures]))


def _peers(options: CacheOptions) -> Check:
    from millrace.filesystem.cluster_access import access_from_here, statuses

    try:
        access = access_from_here(options)
        if access is None:
            return Check(name="nodes", state="note", detail="no cluster")
        with access:
            nodes = statuses(access)
    except MillraceError as error:
        return Check(name="nodes", state="failed", detail=str(error))
    responding = [node["address"] for node in nodes if node["answers"]]
    silent = [node["error"] for node in nodes if not node["answers"]]
    if not nodes:
        return Check(name="nodes", state="note", detail="the cluster has no nodes: 'millrace node run' starts one")
    if not responding:
        return Check(name="nodes", state="failed", detail=f"no node responds: {silent[0]}")
    wrong = [*silent, *_disagreements([node for node in nodes if node["answers"]])]
    detail = f"{', '.join(responding)} responded" + "".join(f"; {text}" for text in wrong)
    return Check(name="nodes", state="note" if wrong else "ok", detail=detail)


def _disagreements(nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Settings that must be equal on all nodes, and differ."""
    replicas = {node["address"]: node["replicas"] for node in nodes if "replicas" in node}
    if len(set(replicas.values())) < 2:
        return []
    listed = ", ".join(f"{number} on {address}" for address, number in replicas.items())
    return [f"'replicas' differs between the nodes ({listed}): start all nodes with one number"]
